"""REBUILD and STANDBY: how long the whole system, as real processes, takes to know and to decide again.

REBUILD: every file of the broker is lost under load; measured until the new streams hold each accepted unfinished
job and a first plan. STANDBY: the active scaler is frozen and a job is requested; measured until the standby has
launched capacity for it. Both follow `tests/e2e/test_rebuild.py` and `test_standby.py`.
"""

import asyncio
import tempfile
import time
from pathlib import Path

from tests.bench.line import Line
from tests.e2e.test_rebuild import RECONCILE_SECONDS, in_the_middle, lose_everything, until_known_again
from tests.e2e.test_standby import DECIDED_SECONDS, decided_after, two_scalers
from tests.support.running import followed, started

TOLERATED = 5  # times the target: these are times, which move with the machine


def measure_rebuild() -> list[Line]:
    """One loss of everything, with services that go on."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = asyncio.run(_rebuilt(Path(folder)))
    return [_line("REBUILD", seconds, RECONCILE_SECONDS, "every NATS file lost; known again from the rest")]


def measure_standby() -> list[Line]:
    """One death of the active scaler."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = asyncio.run(_taken_over(Path(folder)))
    return [
        _line("STANDBY", seconds, DECIDED_SECONDS, "the active scaler stopped where it stood; decided by the other")
    ]


async def _rebuilt(folder: Path) -> float:
    async with started(folder) as system:
        async with followed(system) as before:
            await in_the_middle(before)
        await lose_everything(system)
        began = time.perf_counter()
        system.children["scheduler"].kill()  # `in_the_middle` leaves it standing still
        async with followed(system) as after:
            await until_known_again(after)
            return time.perf_counter() - began


async def _taken_over(folder: Path) -> float:
    async with two_scalers(folder) as cluster:
        cluster.freeze("scaler")
        seconds = await decided_after(cluster, "job-0")
        cluster.system.children["scaler"].kill()  # a frozen process cannot exit by itself
        return seconds


def _line(case: str, seconds: float, seconds_max: float, against: str) -> Line:
    return Line(
        case=case,
        value=seconds,
        unit="s",
        against=against,
        target=f"<= {seconds_max:g}",
        met=seconds <= seconds_max,
        is_tolerated=seconds <= TOLERATED * seconds_max,
    )
