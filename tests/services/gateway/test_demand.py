"""Reported demand over REST and from the command line."""

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
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.model.demands import DemandShape
from gpu_autoscaler.runtime.metrics import package_version
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.main import run


@pytest.fixture
async def gate(tmp_path: Path) -> AsyncIterator[Front]:
    """A gateway."""
    async with front(tmp_path) as opened:
        yield opened


async def _post(gate: Front, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as http, http.post(f"{gate.url}/api/v1/demand", json=body) as response:
        return response.status, await response.json()


async def test_an_accepted_report_is_on_the_stream(gate: Front) -> None:
    """202 guarantees it; the fact equals the request body."""
    until = gate.model.clock.now() + timedelta(hours=1)
    body = {"source": "kafka", "shape": {"gpu_count": 1}, "count": 3, "until": until.isoformat()}
    status, accepted = await _post(gate, body)
    assert status == 202
    assert (accepted["source"], accepted["count"], accepted["priority"]) == ("kafka", 3, 500)
    message = await gate.model.bus.message_at("DEMAND", 1)
    assert message is not None
    read = ingress.read(message.subject, message.payload, message_id=None, arrived_at=lambda: until)
    assert read.fact == DemandReported(source="kafka", shape=DemandShape(gpu_count=1), count=3, until=until)


async def test_an_invalid_report_is_refused_with_every_violation(gate: Front) -> None:
    """Violations name the sender's fields, including wrong types and unknown fields."""
    body = {"source": "", "shape": {"gpu_count": 1, "gpu_type": "H10"}, "count": -1, "until": "2020-01-01T00:00:00Z"}
    status, problem = await _post(gate, body)
    assert status == 422
    assert {violation["field"] for violation in problem["violations"]} == {"source", "shape.gpu_type", "count", "until"}
    status, problem = await _post(gate, {**body, "counts": 1, "shape": {"gpu_count": "many"}})
    assert status == 422
    reasons = {violation["field"]: violation["reason"] for violation in problem["violations"]}
    assert set(reasons) == {"counts", "shape.gpu_count"}
    assert f"did you mean 'count'? (this gateway is {package_version()})" in reasons["counts"]
    assert package_version() not in reasons["shape.gpu_count"]


async def test_active_reports_are_listed(gate: Front, capsys: pytest.CaptureFixture[str]) -> None:
    """A report from the command line is on the bus and in the list; expired reports are not listed."""
    now = gate.model.clock.now()
    command = ("demand", "report", "kafka", "--count", "3", "--gpus", "1", "--gateway", gate.url)
    assert await asyncio.to_thread(run, command) == Exit.OK
    active = DemandReported(source="kafka", shape=DemandShape(gpu_count=1), count=3, until=now + timedelta(hours=1))
    expired = DemandReported(source="expired", shape=DemandShape(gpu_count=1), count=1, until=now - timedelta(hours=1))
    await gate.tell((TimedFact(active, now), TimedFact(expired, now - timedelta(hours=2))))
    capsys.readouterr()

    assert await asyncio.to_thread(run, ("demand", "list", "-o", "json", "--gateway", gate.url)) == Exit.OK
    assert [item["source"] for item in json.loads(capsys.readouterr().out)["items"]] == ["kafka"]
