"""A shadow policy on real processes: its plans are published and not executed. Then the history is replayed."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.e2e.test_story import QUIET_SECONDS_MAX, has, kept, request
from tests.support.running import POLICY, Running, running

from gpu_autoscaler.events.job import JobFinished
from gpu_autoscaler.events.scaling import ScalingDrainStarted, ScalingPlanMade
from gpu_autoscaler.events.shadow import ShadowPlanMade
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.main import run

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.sweep, pytest.mark.timeout(300)]
SHADOW_POLICY = """
watch_age_seconds_max = 300.0
idle_seconds_max = 15.0
scale_down_cooldown_seconds = 0.0
disruption_ratio_max = 1.0
"""


async def _shown(cluster: Running) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{cluster.system.gateway_url}/api/v1/shadow?limit=50") as response,
    ):
        assert response.status == 200
        document: dict[str, Any] = await response.json()
        return document


async def _found(cluster: Running) -> list[dict[str, Any]]:
    shown = await _shown(cluster)
    return [*shown["now"], *shown["earlier"]]


async def test_a_shadow_policy_that_removes_idle_nodes_earlier_is_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gateway and CLI show the difference with both reasons; every drain belongs to an active plan."""
    policy = tmp_path / "shadow.toml"
    policy.write_text(SHADOW_POLICY)
    async with running(tmp_path, shadow=policy) as cluster:
        await cluster.player.submit(request("job-0"), "nats")
        await cluster.until(lambda record: has(record, JobFinished, job_id="job-0"), "the job has ended")
        await cluster.until(
            lambda record: any(fact.differences for fact, _ in record.of(ShadowPlanMade)), "a difference"
        )
        async with asyncio.timeout(60):
            while not (found := await _found(cluster)):
                await asyncio.sleep(0.1)
        assert {(one["real"]["outcome"], one["real"]["reason"]) for one in found} == {("deferred", "not_yet_idle")}
        assert {(one["shadow"]["outcome"], one["shadow"]["reason"]) for one in found} == {("drain_node", "node_idle")}
        assert all(one["name"].startswith("node/g4dn") for one in found)
        assert (await _shown(cluster))["is_compared_with_scaler"] is True

        command = ("shadow", "--limit", "50", "--gateway", cluster.system.gateway_url)
        assert await asyncio.to_thread(run, (*command, "-o", "json")) == Exit.OK
        document = json.loads(capsys.readouterr().out)
        assert [*document["now"], *document["earlier"]]
        assert await asyncio.to_thread(run, command) == Exit.OK
        assert "drain" in capsys.readouterr().out.lower()

        kept(await cluster.report_when_quiet(QUIET_SECONDS_MAX), "job-0")
        _only_active_plans_are_executed(cluster)

        monkeypatch.setenv("GPU_AUTOSCALER_CLOCK", cluster.clock.to_text())
        monkeypatch.setenv("GPU_AUTOSCALER_POLICY_PATH", str(POLICY))
        monkeypatch.setenv("GPU_AUTOSCALER_NATS_URL", cluster.system.nats_url)
        monkeypatch.setenv("GPU_AUTOSCALER_STORE_URL", f"sqlite:///{(tmp_path / 'store.db').absolute()}")
        since = ("replay", "--from", cluster.clock.origin.isoformat())
        # Between plans a loaded machine may decide late, which a fast clock makes long; at a plan nothing differs.
        assert await asyncio.to_thread(run, since) in (Exit.OK, Exit.FAILURE)
        match = re.search(r"(\d+) of (\d+) plans equal byte for byte", capsys.readouterr().err)
        assert match is not None
        assert match.group(1) == match.group(2)
        other = ("--policy", str(policy), "--chart", str(tmp_path / "chart.svg"), "-o", "json")
        assert await asyncio.to_thread(run, (*since, *other)) == Exit.OK
        answer = json.loads(capsys.readouterr().out)
        assert answer["other"]["node_hours"] < answer["modeled"]["node_hours"]


def _only_active_plans_are_executed(cluster: Running) -> None:
    planned = {one.action_id for fact, _ in cluster.record.of(ScalingPlanMade) for one in fact.plan.decisions}
    shadowed = {one.action_id for fact, _ in cluster.record.of(ShadowPlanMade) for one in fact.plan.decisions}
    drained = {fact.action_id for fact, _ in cluster.record.of(ScalingDrainStarted)}
    assert drained
    assert drained <= planned
    assert not drained & (shadowed - planned)
