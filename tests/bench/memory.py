"""What the scaler's process holds in memory: a cluster of full size, and the same after a week of coming and going."""

import asyncio
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import uvloop
from tests.bench.line import Line
from tests.bench.scaler_process import NODES_COUNT, PODS_PER_NODE, Ground, ScalerProcess, ground
from tests.support.stories import job, node, on_sale, pod, synced
from tests.support.timed_facts import EPOCH, SECOND, TimedFact

from gpu_autoscaler.events.job import JobFinished
from gpu_autoscaler.events.pod import PodGone
from gpu_autoscaler.model.ids import JobId, PodUid

MEBIBYTES_MAX = 200.0
WEEK_HOURS = 7 * 24
LOOKS_COUNT_MAX = 15
PODS_PER_HOUR = 100  # each of a job of its own, which is asked for, runs and ends


def measure() -> list[Line]:
    """Resident memory of the real process, first with what lives, then after the week."""
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        begun, after = runner.run(_measure(Path(folder)))
    facts_count = WEEK_HOURS * sum(1 for _ in _an_hour(0, datetime.now(UTC)))
    size = f"{NODES_COUNT:,} nodes, {NODES_COUNT * PODS_PER_NODE:,} pods and as many jobs"
    return [
        Line(
            case=case, value=value, unit="MiB", against=against,
            target=f"<= {MEBIBYTES_MAX:g}", met=value <= MEBIBYTES_MAX,
        )
        for case, value, against in (
            ("MEMORY", begun, size),
            ("MEMORY week", after, f"the same, and {facts_count:,} facts of a week"),
        )
    ]  # fmt: skip


async def _measure(folder: Path) -> tuple[float, float]:
    async with ground(folder) as here:
        now = datetime.now(UTC)
        monday = now - timedelta(hours=WEEK_HOURS)
        offers = await here.offers()
        sized = max(offers, key=lambda offer: (offer.resources.gpu_count, offer.key))
        living: list[TimedFact] = [*on_sale(*offers, at=monday)]
        for number in range(NODES_COUNT):
            name = f"node-{number}"
            living += node(name, sized, is_ours=False, at=monday)
            for index in range(PODS_PER_NODE):
                own = f"{name}-{index}"
                living += job(own, gpus=0, at=monday, placed_on=(name,), is_running=True)
                living += pod(own, on=name, gpus=0, at=monday, job_id=own)
        await here.say((*living, *synced(living, as_of=now)))
        async with here.scaler() as scaler:
            begun = await _at_rest(here, scaler)
            for hour in range(WEEK_HOURS):
                await here.say(_an_hour(hour, monday + timedelta(hours=hour)))
            after = await _at_rest(here, scaler)
    return begun, after


def _an_hour(hour: int, at: datetime) -> Iterator[TimedFact]:
    """Jobs that are asked for, run on a node and end, evenly."""
    for number in range(PODS_PER_HOUR):
        began = at + number * (3600 / PODS_PER_HOUR) * SECOND
        name, on = f"hour-{hour}-{number}", f"node-{number % NODES_COUNT}"
        yield from job(name, gpus=0, at=began, placed_on=(on,), is_running=True)
        yield from pod(name, on=on, gpus=0, at=began, job_id=name)
        ended = began + 60 * SECOND
        gone = PodGone(
            pod_uid=PodUid(f"uid-{name}"), namespace="default", name=name, node_name=on, epoch=EPOCH, version=2,
            phase="succeeded", job_id=JobId(name),
        )  # fmt: skip
        yield TimedFact(gone, ended)
        yield TimedFact(JobFinished(job_id=JobId(name), outcome="completed", finished_at=ended), ended)


async def _at_rest(here: Ground, scaler: ScalerProcess) -> float:
    """Resident memory when everything is folded and the ticks that follow are done."""
    lags: dict[str, float] = {}
    for _ in range(LOOKS_COUNT_MAX):
        await asyncio.sleep(12.0)  # two regular ticks, and a look at how far the fold is behind
        figures = await scaler.figures()
        lags = {name: value for name, value in figures.items() if name.startswith("gpu_autoscaler_consumer_lag")}
        if lags and not any(lag > 0 for lag in lags.values()):  # what nobody has told yet is no number
            return scaler.resident_mebibytes()
    behind = {name: value for name, value in lags.items() if not value <= 0}
    raise AssertionError(f"the scaler is still behind: {behind or 'it tells no lag'}")
