"""Directives over REST and from the command line."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.support.front import Front, front
from tests.support.stories import TimedFact

from gpu_autoscaler.events import ingress
from gpu_autoscaler.events.policy import PolicyDirectiveGiven, PolicyDirectiveLifted
from gpu_autoscaler.model.directives import Freeze, Override
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.main import run


@pytest.fixture
async def gate(tmp_path: Path) -> AsyncIterator[Front]:
    """A gateway."""
    async with front(tmp_path) as opened:
        yield opened


async def _ask(gate: Front, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:  # noqa: ANN401 - JSON
    url = f"{gate.url}/api/v1/{path}"
    async with aiohttp.ClientSession() as http, http.request(method, url, json=body) as response:
        return response.status, await response.json()


async def test_a_freeze_from_the_command_line_is_a_fact_with_author_reason_and_end(
    gate: Front, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listed and shown in the status while active; ended by its key."""
    monkeypatch.setenv("LOGNAME", "alice")
    here = ("--gateway", gate.url)
    command = ("freeze", "--reason", "upkeep", "--for", "1h30m", *here)
    assert await asyncio.to_thread(run, command) == Exit.OK
    message = await gate.model.bus.message_at("POLICY", 1)
    assert message is not None
    given = ingress.read(message.subject, message.payload, message_id=None, arrived_at=gate.model.clock.now).fact
    assert isinstance(given, PolicyDirectiveGiven)
    assert (given.directive, given.reason, given.given_by) == (Freeze(), "upkeep", "alice")
    assert timedelta(minutes=89) < given.until - given.given_at <= timedelta(minutes=90)

    await gate.tell((TimedFact(given, given.given_at),))
    capsys.readouterr()
    assert await asyncio.to_thread(run, ("directives", "-o", "json", *here)) == Exit.OK
    assert [item["key"] for item in json.loads(capsys.readouterr().out)["items"]] == ["freeze"]
    assert await asyncio.to_thread(run, ("status", *here)) == Exit.OK
    assert "freeze: no purchases, no voluntary removals, by alice until" in capsys.readouterr().out

    assert await asyncio.to_thread(run, ("resume", "freeze", "--reason", "done", *here)) == Exit.OK
    message = await gate.model.bus.message_at("POLICY", 3)
    assert message is not None
    lifted = ingress.read(message.subject, message.payload, message_id=None, arrived_at=gate.model.clock.now).fact
    assert isinstance(lifted, PolicyDirectiveLifted)
    assert (lifted.key, lifted.lifted_by, lifted.reason) == ("freeze", "alice", "done")


async def test_override_options_define_scope_and_bounds(gate: Front) -> None:
    """A target sets both bounds; a listed key with slashes ends the override."""
    here = ("--reason", "demo", "--for", "2h", "--gateway", gate.url)
    command = ("override", "--target", "16", "--unit", "gpus", "--pool", "default", "--gpu-type", "A100", *here)
    assert await asyncio.to_thread(run, command) == Exit.OK
    message = await gate.model.bus.message_at("POLICY", 1)
    assert message is not None
    given = ingress.read(message.subject, message.payload, message_id=None, arrived_at=gate.model.clock.now).fact
    assert isinstance(given, PolicyDirectiveGiven)
    assert given.directive == Override(pool="default", gpu_model="A100", gpu_count_min=16, gpu_count_max=16)
    await gate.tell((TimedFact(given, given.given_at),))
    resume = ("resume", given.directive.key, "--gateway", gate.url)
    assert await asyncio.to_thread(run, resume) == Exit.OK
