"""Upgrade from an earlier version and rollback, process by process, while jobs run."""

from pathlib import Path

import pytest
from tests.e2e.test_story import has, kept, request
from tests.support.running import Running, followed, started
from tests.upgrade import PROCESSES, unpacked

from gpu_autoscaler.bus.streams import DEAD
from gpu_autoscaler.events.job import JobStarted

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


@pytest.mark.sweep
async def test_an_upgrade_and_a_rollback(tmp_path: Path) -> None:
    """No job is lost, each ends once, all costs are charged, and each version reads the other's facts."""
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

        await cluster.system.migrate(to="0.2")
        back = await replaced(cluster, earlier, PROCESSES, jobs="back")
        assert is_of(cluster, earlier) == set(PROCESSES)
        kept(await cluster.report_when_quiet(QUIET_SECONDS_MAX), "before", *asked, *back)
        assert await cluster.player._bus.last_sequence(DEAD) == 0, "each version reads what the other says"
