"""From an earlier version to today's and one step back, process after process, while work comes, runs and ends."""

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
    """The processes that really run this code, as their open command line and environment say."""
    found = set()
    for name in PROCESSES:
        pid = cluster.system.children[name].pid
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"PYTHONPATH={code}".encode() in variables:
            found.add(name)
    return found


async def replaced(cluster: Running, code: Path | None, names: tuple[str, ...], *, jobs: str) -> list[str]:
    """Start these processes anew, from this code or from today's; before each, somebody asks for a job."""
    asked = []
    for number, name in enumerate(names):
        asked.append(f"{jobs}-{number}")
        await cluster.script.request(request(asked[-1], run_seconds=60.0), "nats")
        if code is None:
            cluster.system.code.pop(name, None)
        else:
            cluster.system.code[name] = code
        await cluster.system.restart_process(name)
    return asked


async def test_an_upgrade_and_a_step_back(tmp_path: Path) -> None:
    """No job is lost, each ends once, every cent is charged, and each version reads what the other says."""
    earlier = unpacked(tmp_path / "earlier")
    async with (
        started(tmp_path / "system", code=dict.fromkeys(PROCESSES, earlier)) as system,
        followed(system) as cluster,
    ):
        assert is_of(cluster, earlier) == set(PROCESSES)
        await cluster.script.request(request("before", run_seconds=900.0), "nats")
        await cluster.until(lambda record: has(record, JobStarted, job_id="before"), "a job runs")

        asked = await replaced(cluster, None, PROCESSES, jobs="up")
        assert is_of(cluster, earlier) == set()
        await cluster.until(
            lambda record: all(has(record, JobStarted, job_id=one) for one in asked), "all of them ran", 180.0
        )

        back = await replaced(cluster, earlier, PROCESSES, jobs="back")
        assert is_of(cluster, earlier) == set(PROCESSES)
        kept(await cluster.report_when_quiet(QUIET_SECONDS_MAX), "before", *asked, *back)
        assert await cluster.script._bus.last_sequence(DEAD) == 0, "each version reads what the other says"
