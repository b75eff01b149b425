"""The server's own endpoints: tokens, faults, compacted history, health; and its process."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from datetime import datetime

import aiohttp
import pytest
from tests.support.cluster import until
from tests.support.kube_captures import Replay, needs_captures, recorded
from tests.support.kube_http import KubeHttp
from tests.support.kube_objects import pod

from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.simcluster import kinds
from gpu_autoscaler.simcluster.server import start
from gpu_autoscaler.simcluster.store import Change
from gpu_autoscaler.simcluster.world import World

PODS = "/api/v1/namespaces/default/pods"
HELD = [{"name": "example.invalid/hold"}]
TOKEN = "let-me-in"


@pytest.fixture
def world() -> World:
    """A cluster in real time with a short memory."""
    return World(Clock(), history_changes_max=50)


@pytest.fixture
async def kube(world: World) -> AsyncIterator[KubeHttp]:
    """A client of the served world."""
    runner, url = await start(world)
    async with aiohttp.ClientSession() as session:
        yield KubeHttp(session, url)
    await runner.cleanup()


@pytest.fixture
async def guarded() -> AsyncIterator[KubeHttp]:
    """A client with the right token of a server that asks for one."""
    runner, url = await start(World(Clock()), token=TOKEN)
    async with aiohttp.ClientSession() as session:
        yield KubeHttp(session, url, TOKEN)
    await runner.cleanup()


async def test_requests_require_the_token(guarded: KubeHttp) -> None:
    """The right token reads, a wrong one is 401, none is 403; health needs none."""
    answers = [await guarded.send("GET", PODS, token=token) for token in (None, "wrong", "")]
    health = await guarded.send("GET", "/healthz", token="")

    assert [answer.status for answer in answers] == [200, 401, 403]
    assert (health.status, health.body) == (200, "ok")


@needs_captures
async def test_authentication_errors_equal_recorded_ones(guarded: KubeHttp) -> None:
    """401 and 403 have the recorded bodies exactly."""
    for name, token in (("401", "wrong"), ("403", "")):
        answer = await guarded.send("GET", PODS, token=token)
        assert answer.body == recorded(name)["response"]["body"]


@needs_captures
async def test_expired_history_equals_recorded_answers(kube: KubeHttp) -> None:
    """After a compaction a page is 410 with a new token, an exact list is 410, a watch has 410 inside 200."""
    replay = Replay(kube)
    for name in ("a", "b", "c"):
        await kube.made(PODS, pod(name, schedulingGates=HELD))
    token = (await kube.read(f"{PODS}?limit=1"))["metadata"]["continue"]
    await kube.made(PODS, pod("d", schedulingGates=HELD))
    await kube.send("POST", "/admin/history/compact")

    page = await kube.send("GET", f"{PODS}?limit=1&continue={token}")
    replay.compare("continue-token-expired", recorded("continue-token-expired")["response"], page)
    await replay.request("list-exact-version-gone")
    await replay.watch("watch-410-too-old", f"{PODS}?watch=1&resourceVersion=2&timeoutSeconds=1")
    rest = await kube.read(f"{PODS}?continue={page.body['metadata']['continue']}")

    assert not replay.wrong, "\n".join(replay.wrong)
    assert [item["metadata"]["name"] for item in rest["items"]] == ["b", "c", "d"]


async def test_history_is_compacted_automatically(kube: KubeHttp) -> None:
    """A watch from before the log's start gets 410; a current one continues."""
    await kube.made(PODS, pod("a", schedulingGates=HELD))
    for index in range(60):
        await kube.patched(f"{PODS}/a", {"metadata": {"labels": {"index": str(index)}}})
    version = (await kube.read(PODS))["metadata"]["resourceVersion"]
    old = await kube.watch(f"{PODS}?watch=1&resourceVersion=2&timeoutSeconds=1")
    current = await kube.watch(f"{PODS}?watch=1&resourceVersion={version}&timeoutSeconds=1")

    assert [(line["type"], line["object"]["code"]) for line in old] == [("ERROR", 410)]
    assert current == []


async def test_dropped_watches_are_aborted(world: World, kube: KubeHttp) -> None:
    """Every open watch is cut off as by a connection error; new ones work."""
    watching = asyncio.create_task(kube.watch(f"{PODS}?watch=1&timeoutSeconds=30"))
    await until(lambda: world.faults.watches)
    dropped = await kube.send("POST", "/admin/watches/drop")
    with pytest.raises(aiohttp.ClientError):
        await asyncio.wait_for(watching, 60)

    assert dropped.body == {"dropped": 1}
    assert await kube.watch(f"{PODS}?watch=1&timeoutSeconds=1") == []


async def test_an_open_watch_gets_an_error_after_compaction(kube: KubeHttp) -> None:
    """The error line instead of a gap."""
    await kube.made(PODS, pod("a", schedulingGates=HELD))
    await kube.send("POST", "/admin/history/compact")
    await kube.made(PODS, pod("b", schedulingGates=HELD))
    lines = await kube.watch(f"{PODS}?watch=1&resourceVersion=1&timeoutSeconds=1")

    assert [line["type"] for line in lines] == ["ERROR"]


async def test_the_next_requests_can_be_refused(kube: KubeHttp) -> None:
    """A number of requests of a method and path, with a status and Retry-After."""
    fault = {"method": "GET", "path": PODS, "status": 429, "count": 2, "retryAfterSeconds": 3}
    await kube.send("POST", "/admin/faults", fault)
    other = await kube.send("GET", "/api/v1/nodes")
    answers = [await kube.send("GET", PODS) for _ in range(3)]

    assert other.status == 200
    assert [answer.status for answer in answers] == [429, 429, 200]
    assert answers[0].headers["retry-after"] == "3"


async def test_an_answer_can_be_lost_after_the_write(kube: KubeHttp) -> None:
    """Performed, but answered 500: the retry finds the object."""
    await kube.send("POST", "/admin/faults", {"method": "POST", "path": PODS, "status": 500, "performed": True})
    first = await kube.send("POST", PODS, pod("a"))
    second = await kube.send("POST", PODS, pod("a"))

    assert (first.status, second.status) == (500, 409)


async def test_answers_can_be_delayed(kube: KubeHttp) -> None:
    """Latency is real time, for one path prefix, until cleared."""
    loop = asyncio.get_running_loop()
    await kube.send("POST", "/admin/latency", {"path": "/api/v1/nodes", "seconds": 0.3})
    began = loop.time()
    await kube.send("GET", "/api/v1/nodes")
    slow_seconds = loop.time() - began
    shown = await kube.send("DELETE", "/admin/faults")

    assert slow_seconds >= 0.3
    assert shown.body == {"refusals": [], "latencies": []}


@pytest.mark.parametrize("body", [b"{", {"path": PODS, "status": 200}, {"path": PODS, "status": 500, "cuont": 3}])
async def test_an_invalid_fault_is_refused(kube: KubeHttp, body: object) -> None:
    """400 with a message; nothing is enabled."""
    answer = await kube.send("POST", "/admin/faults", body)

    assert answer.status == 400
    assert (await kube.read("/admin/faults"))["refusals"] == []


async def test_a_failed_controller_makes_the_server_unhealthy() -> None:
    """An exception ends its loop, and health reports it."""

    class Broken:
        """A controller with a bug."""

        def on_change(self, change: Change) -> None:
            """Nothing."""

        def step(self, now: datetime) -> None:  # noqa: ARG002 - the protocol
            """Fail."""
            raise RuntimeError("a bug")

    world = World(Clock())
    world.add_controller(Broken())
    runner, url = await start(world)
    async with aiohttp.ClientSession() as session:
        answer = await KubeHttp(session, url).send("GET", "/readyz")
    with pytest.raises(RuntimeError, match="a bug"):
        await runner.cleanup()

    assert answer.status == 500


async def test_discovery_lists_all_resources(kube: KubeHttp) -> None:
    """And their subresources."""
    core = await kube.read("/api/v1")
    groups = await kube.read("/apis")
    nothing = await kube.send("GET", "/apis/example.invalid/v1")

    assert {"pods", "pods/eviction", "pods/binding", "nodes/status"} <= {entry["name"] for entry in core["resources"]}
    assert {"batch", "policy", "coordination.k8s.io"} <= {group["name"] for group in groups["groups"]}
    assert nothing.status == 404


async def test_bookmarks_advance_an_idle_watch(world: World, kube: KubeHttp) -> None:
    """Beyond events of other kinds."""
    version = (await kube.read(PODS))["metadata"]["resourceVersion"]
    await kube.made("/api/v1/nodes", {"metadata": {"name": "n"}})
    query = f"watch=1&resourceVersion={version}&allowWatchBookmarks=true&timeoutSeconds=1"
    lines = await kube.watch(f"{PODS}?{query}")

    assert [line["type"] for line in lines] == ["BOOKMARK"]
    assert int(lines[0]["object"]["metadata"]["resourceVersion"]) > int(version)
    assert world.faults.watches == set()


async def test_a_watch_sends_all_events_before_its_last_bookmark(world: World, kube: KubeHttp) -> None:
    """Also events at the time of its timeout, as readers continue from the bookmark."""
    version = (await kube.read(PODS))["metadata"]["resourceVersion"]
    query = f"watch=1&resourceVersion={version}&allowWatchBookmarks=true&timeoutSeconds=3"
    watching = asyncio.create_task(kube.watch(f"{PODS}?{query}"))
    await asyncio.sleep(2.0)
    time.sleep(1.5)  # noqa: ASYNC251 - the server is busy while the watch's time ends
    world.api.create(kinds.PODS, "default", pod("late", schedulingGates=HELD))
    lines = await watching

    assert lines[0]["type"] == "ADDED"
    assert lines[0]["object"]["metadata"]["name"] == "late"


def test_the_process_starts_fast_and_stops_cleanly() -> None:
    """Serving soon even on a busy machine; SIGTERM ends it with 0; a port in use is 78."""
    command = [sys.executable, "-m", "gpu_autoscaler.simcluster"]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        started_seconds = time.monotonic() - began
        taken = subprocess.run(
            [*command, "--port", url.rpartition(":")[2]], capture_output=True, text=True, check=False, timeout=30
        )
        process.terminate()

    assert started_seconds < 60  # two or so; a machine that others use takes what it takes
    assert process.returncode == 0
    assert taken.returncode == 78
    assert "choose another --port" in taken.stderr
