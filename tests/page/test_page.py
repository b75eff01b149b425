"""The live page in a real Chromium, on a real gateway: what people see, click, type and read aloud."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from tests.page.browser import Browser, opened_browser
from tests.page.cluster import LONG_NAME, cluster, counting_down, frozen, left
from tests.support.front import Front, front
from tests.support.stories import MINUTE, job, node, pod

from gpu_autoscaler.runtime.health import Readiness
from gpu_autoscaler_services.gateway.auth import SharedTokens

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

TOKEN = "a-token-that-is-long-enough"
LIVE = "#connection[data-state=live]"
SCREENSHOTS = Path(__file__).parents[2] / "out" / "page"
DESKTOP, PHONE = {"width": 1360, "height": 900}, {"width": 390, "height": 844}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Browser]:
    """One Chromium for all tests; each opens the page anew."""
    async with opened_browser() as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def gate(tmp_path: Path) -> AsyncIterator[Front]:
    """A gateway of the cluster."""
    async with front(tmp_path) as opened:
        await opened.tell(*cluster(opened.model.clock.now()))
        yield opened


def node_card(name: str) -> str:
    """Return the selector of a node's card."""
    return f".node:has(button:text-is('{name}'))"


async def test_the_page_shows_the_cluster(browser: Browser, gate: Front) -> None:
    """Nodes, jobs, plans, spend and facts, without an error of a script or of the content security policy."""
    await browser.open(gate.url)
    await browser.sees(LIVE)

    assert "8 of 8" in str(await browser.do("getAttribute", "aria-label", at=f"{node_card('gpu-a')} .gpus"))
    assert "92 % used" in await browser.text(node_card("gpu-a"))
    assert "reclaim in" in await browser.text(node_card("gpu-spot-at-risk"))
    assert LONG_NAME in await browser.text("#jobs")
    cost = await gate.model.cost_history.cost(3600, before=None, days_count=31)
    shown = sum(span.allocated_micro_usd for span in cost.spans[-24:])
    assert f"allocated ${shown / 1e6:,.2f}" in await browser.text("#spend")
    total = cost.allocated_micro_usd + cost.idle_micro_usd
    assert (await browser.text("#spend-note")).startswith(f"${total / 1e6:,.2f} since ")
    await browser.sees("#events li .subject")
    assert await browser.do("errors") == []


async def test_an_empty_node_is_not_shown_as_used(browser: Browser, gate: Front) -> None:
    """Its newest minute of telemetry is of the pod that left."""
    await browser.open(gate.url)
    await browser.sees(node_card("gpu-empty"))

    assert "used" not in await browser.text(node_card("gpu-empty"))
    assert "0 of 8" in str(await browser.do("getAttribute", "aria-label", at=f"{node_card('gpu-empty')} .gpus"))


async def test_a_countdown_is_shown_once(browser: Browser, gate: Front) -> None:
    """Plans that differ by a countdown alone are one entry; a node that joins the wait is new."""
    await browser.open(gate.url)
    countdown = "#plans .sentence:has-text('has been empty for')"
    await browser.sees(countdown)
    assert await browser.do("count", at=countdown) == 1
    assert "45 s" in await browser.text(countdown)
    assert await browser.do("count", at="#plans > li:has-text('like all since')") == 1

    now = gate.model.clock.now()
    await gate.tell(counting_down(9, ["node/uid-gpu-empty", "node/uid-gpu-reserved", "pod/uid-waiting-pod"], now))

    await browser.sees("#plans .sentence:has-text('1 min 10 s')")
    newest = await browser.text("#plans > li:has-text('1 min 10 s')")
    assert "node gpu-reserved" in newest
    assert "pod default/waiting-pod" in newest
    assert await browser.do("count", at=countdown) == 1


async def test_facts_change_the_page_as_they_arrive(browser: Browser, gate: Front) -> None:
    """A node, a job and a pod that leaves are seen without a reload."""
    await browser.open(gate.url)
    await browser.sees(LIVE)
    await browser.do("evaluate", "window.isSamePage = true")
    now = gate.model.clock.now()

    await gate.tell(node("gpu-new", at=now), job("late-job", at=now))

    await browser.sees(node_card("gpu-new"))
    await browser.sees("#jobs button:text-is('late-job')")
    await browser.sees("#events li:has-text('gpu-new ready')")

    await gate.tell(left("notebook", "gpu-reserved", now))

    await browser.sees(f"{node_card('gpu-reserved')} .gpus[aria-label^='0 of 8']")
    assert await browser.do("evaluate", "window.isSamePage") is True


async def test_a_freeze_is_shown_with_author_reason_and_end(browser: Browser, gate: Front) -> None:
    """It appears while the page is open."""
    await browser.open(gate.url)
    await browser.sees(LIVE)
    await browser.loses("#directives")

    await gate.tell(frozen(gate.model.clock.now()))

    await browser.sees("#directives li:has-text('Purchases and voluntary removals suspended')")
    assert "by anna: upgrade of the network" in await browser.text("#directives")


async def test_the_page_survives_a_restart_of_the_gateway(browser: Browser, tmp_path: Path) -> None:
    """The connection is lost, then refused in words until the gateway is ready; facts continue without a gap."""
    async with contextlib.AsyncExitStack() as first:
        gate = await first.enter_async_context(front(tmp_path))
        await gate.tell(*cluster(gate.model.clock.now()))
        await browser.open(gate.url)
        await browser.sees(LIVE)
        await browser.sees("#events li .subject")
    await browser.sees("#connection[data-state=lost]")
    await browser.sees(node_card("gpu-a"))

    readiness = Readiness()
    port = urlsplit(gate.url).port or 0
    async with front(tmp_path, port=port, before=gate, readiness=readiness) as again:
        await browser.sees("#problem:has-text('still reading the recorded facts')")
        await browser.sees("#connection[data-state=refused]")
        await again.tell(node("gpu-since", at=again.model.clock.now()))

        readiness.clear("state")

        await browser.sees(LIVE)
        await browser.loses("#problem")
        await browser.sees(node_card("gpu-since"))
        await browser.sees("#events li:has-text('gpu-since ready')")
        await again.tell(job("after-restart", at=again.model.clock.now()))
        await browser.sees("#jobs button:text-is('after-restart')")
        assert await browser.do("errors") == []


async def test_a_wrong_token_is_refused_in_words(browser: Browser, tmp_path: Path) -> None:
    """The form asks, repeats the gateway's refusal, and lets the right token in, by the keyboard alone."""
    async with front(tmp_path, authenticators=[SharedTokens([TOKEN])]) as gate:
        await gate.tell(*cluster(gate.model.clock.now()))
        await browser.open(gate.url)
        await browser.sees("#token:focus")
        assert await browser.text("#login-problem") == ""

        await browser.do("keyboard.type", "not-the-token-of-this-gateway")
        await browser.do("keyboard.press", "Enter")

        await browser.sees("#login-problem:has-text('unknown or expired token')")
        await browser.sees("#token:focus")
        assert await browser.do("violations") == []
        assert await browser.do("count", at=".node") == 0

        await browser.do("keyboard.type", TOKEN)
        await browser.do("keyboard.press", "Enter")

        await browser.sees(LIVE)
        await browser.sees(node_card("gpu-a"))
        await browser.loses("#login")


async def test_a_click_on_a_name_explains_it(browser: Browser, gate: Front) -> None:
    """Nodes, their pods, jobs, and the subjects of plans: with the story that the gateway tells of them."""
    await browser.open(gate.url)
    await browser.do("click", at=f"{node_card('gpu-a')} button")
    await browser.sees("dialog[open] .story li")
    assert await browser.text("#why-title") == "Node gpu-a"
    assert "A100" in await browser.text("#why-text .facts")

    await browser.do("click", at="#why-text button:text-is('default/training-0')")
    await browser.sees("#why-title:text-is('Pod default/training-0')")
    await browser.sees("dialog[open] .story li")
    assert await browser.do("violations") == []

    await browser.do("click", at="dialog button:text-is('Close')")
    await browser.loses("dialog")
    await browser.do("click", at="#jobs button:text-is('evaluation')")
    await browser.sees("#why-title:text-is('Job evaluation')")
    await browser.sees("dialog[open] .now:has-text('Waiting')")
    await browser.do("keyboard.press", "Escape")
    await browser.do("click", at="#plans button:text-is('node gpu-empty') >> nth=0")
    await browser.sees("dialog[open] .story li")
    assert await browser.do("errors") == []


async def test_what_cannot_be_explained_is_said_in_words(browser: Browser, gate: Front) -> None:
    """The gateway cannot read the history of a node now; later it can."""
    await browser.open(gate.url)
    await browser.sees(LIVE)
    gate.bus.unreadable = frozenset({"NODE"})

    await browser.do("click", at=f"{node_card('gpu-a')} button")

    await browser.sees("dialog[open] [role=alert]:has-text('stream NODE cannot be read now; retry')")
    assert await browser.do("violations") == []
    gate.bus.unreadable = frozenset()
    await browser.do("click", at="dialog button:text-is('default/training-0')")
    await browser.sees("dialog[open] .story li")


async def test_the_keyboard_reaches_everything(browser: Browser, gate: Front) -> None:
    """Skip link, names and lists in order; a dialog opens, holds the focus, and gives it back, also after a refresh."""
    await browser.open(gate.url)
    await browser.sees(LIVE)
    await browser.sees(node_card("gpu-a"))
    await browser.do("keyboard.press", "Tab")
    await browser.sees(".skip:focus")
    await browser.do("keyboard.press", "Enter")
    order = ".node:has-text('booting') button:focus, .node:has-text('ordered') button:focus"
    for focused in ("#nodes:focus", order, f"{node_card('gpu-a')} button:focus"):
        await browser.do("keyboard.press", "Tab")
        await browser.sees(focused)

    await browser.do("keyboard.press", "Enter")
    await browser.sees("dialog[open] .story li")
    await browser.do("keyboard.press", "Tab")
    await browser.sees("dialog button:text-is('Close'):focus")
    # A card before the focused one appears, and the focused one changes, while the dialog is open.
    now = gate.model.clock.now()
    await gate.tell(node("gpu-0", at=now - MINUTE), left("training-0", "gpu-a", now))
    await browser.do("waitFor", {"state": "attached"}, at=node_card("gpu-0"))
    await browser.do("keyboard.press", "Enter")
    await browser.loses("dialog")
    await browser.sees(f"{node_card('gpu-a')} button:focus")

    await gate.tell(node("gpu-00", at=now - MINUTE), pod("more-0", on="gpu-a", gpus=2, at=now))
    await browser.sees(f"{node_card('gpu-a')} .gpus[aria-label^='2 of 8']")
    await browser.sees(f"{node_card('gpu-a')} button:focus")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("name", "viewport"), [("desktop", DESKTOP), ("phone", PHONE)])
async def test_the_page_is_accessible_and_fits(
    browser: Browser, gate: Front, scheme: str, name: str, viewport: dict[str, int]
) -> None:
    """No violation of axe's rules, of contrast among them, and nothing wider than the screen. Leaves a screenshot."""
    await gate.tell(frozen(gate.model.clock.now()))
    await browser.open(gate.url, viewport=viewport, colorScheme=scheme, reducedMotion="reduce")
    await browser.sees(LIVE)
    await browser.sees("#events li .subject")
    await browser.sees("#directives li")

    assert await browser.do("violations") == []
    assert await browser.do("overflowing") == []
    await browser.do("screenshot", {"path": str(SCREENSHOTS / f"{name}-{scheme}.png"), "fullPage": True})
    await browser.do("click", at=f"{node_card('gpu-a')} button")
    await browser.sees("dialog[open] .story li")
    assert await browser.do("violations") == []
    await browser.do("screenshot", {"path": str(SCREENSHOTS / f"{name}-{scheme}-why.png")})
