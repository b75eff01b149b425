"""Upgrade from an earlier version and rollback, process by process, while jobs run."""

from pathlib import Path

import pytest
from tests.e2e.test_story import has, kept, request
from tests.support.running import Running, followed, started
from tests.upgrade import PROCESSES, unpacked

from gpu_autoscaler.bus.streams import DEAD
from gpu_autoscaler.events.job import JobStarted
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.replay.recompute import Verdict, recompute
from gpu_autoscaler.runtime.digests import core_digest
from gpu_autoscaler.store.opening import open_store
from gpu_autoscaler_services.demo.subscriber import connect

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(900)]

QUIET_SECONDS_MAX = 180.0


def is_of(cluster: Running, code: Path) -> set[str]:
    """Return the processes that run this code, by their command line and environment."""
    found = set()
    for name in PROCESSES:
        pid = cluster.system.children[name].pid
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"PYTHONPATH={code}".encode() in variables:
            found.add(name)
    return found


async def replaced(cluster: Running, code: Path | None, names: tuple[str, ...], *, jobs: str) -> list[str]:
    """Restart these processes with this code; submit a job before each."""
    asked = []
    for number, name in enumerate(names):
        asked.append(f"{jobs}-{number}")
        await cluster.player.submit(request(asked[-1], run_seconds=60.0), "nats")
        if code is None:
            cluster.system.code.pop(name, None)
        else:
            cluster.system.code[name] = code
        await cluster.system.restart_process(name)
    return asked


async def recomputed(cluster: Running, store_url: str) -> int:
    """Recompute each plan of the current version, from the snapshot of the earlier one; return their number."""
    plans = [fact for fact, _ in cluster.record.of(ScalingPlanMade) if fact.core_digest == core_digest()]
    bus, store = await connect(cluster.system.nats_url), await open_store(store_url, is_read_only=True)
    try:
        for plan in plans:
            assert plan.cut.base
            result = await recompute(bus, plan.plan_id, cluster.policy, cluster.clock, store)
            assert result.verdict is Verdict.EQUAL, result
    finally:
        await bus.close()
        await store.close()
    return len(plans)


@pytest.mark.sweep
async def test_an_upgrade_and_a_rollback(tmp_path: Path) -> None:
    """No job is lost, each ends once, all costs are charged, and each version reads the other's facts. The current
    version continues from snapshots of the earlier one, and its plans are recomputed from there."""
    earlier = unpacked(tmp_path / "earlier")
    async with (
        started(tmp_path / "system", code=dict.fromkeys(PROCESSES, earlier)) as system,
        followed(system) as cluster,
    ):
        assert is_of(cluster, earlier) == set(PROCESSES)
        await cluster.player.submit(request("before", run_seconds=900.0), "nats")
        await cluster.until(lambda record: has(record, JobStarted, job_id="before"), "a job runs")

        changes = await cluster.system.migrate("required")
        assert {change.property for change in changes} == {"schema"}, "services of this release wait for nothing else"
        asked = await replaced(cluster, None, PROCESSES, jobs="up")
        await cluster.system.migrate()
        assert is_of(cluster, earlier) == set()
        await cluster.until(
            lambda record: all(has(record, JobStarted, job_id=one) for one in asked), "all of them ran", 180.0
        )

        for name in ("scaler", "gateway"):  # the scaler saves its first snapshot when it ends; 0.2 has no others
            log = cluster.system.children[name].log.read_text(errors="replace")
            assert "state restored from snapshot" in log.rpartition("no snapshot used")[2], f"{name} read the history"
        assert await recomputed(cluster, f"sqlite:///{tmp_path / 'system' / 'store.db'}")

        await cluster.system.migrate(to="0.2")
        back = await replaced(cluster, earlier, PROCESSES, jobs="back")
        assert is_of(cluster, earlier) == set(PROCESSES)
        kept(await cluster.report_when_quiet(QUIET_SECONDS_MAX), "before", *asked, *back)
        assert await cluster.player._bus.last_sequence(DEAD) == 0, "each version reads what the other says"
