"""SUBMIT: a hundred jobs at once through each entry point of a whole system, as `gpu-autoscaler up` starts it.

A real broker, every service as a process, and the simulated cluster, frozen so that nothing is bought meanwhile. Answer
is what the client waits for: over NATS as a trusted publisher the broker's acknowledgment, else the gateway's promise.
Queued is when the scheduler has admitted the job. No job may be lost or doubled.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from tests.bench.line import Line
from tests.support.running import followed, started
from tests.support.submissions import COUNT, Submission, entry_points, frozen, submitted_at_once

from gpu_autoscaler.events.spot import SpotOffersSampled


def measure() -> list[Line]:
    """Median and 95th percentile of each entry point."""
    with tempfile.TemporaryDirectory() as folder:
        by_entry_point = asyncio.run(_measure(Path(folder)))
    return [line for name, done in by_entry_point.items() for line in _lines(name, done)]


async def _measure(folder: Path) -> dict[str, list[Submission]]:
    async with started(folder, clock_factor=1.0) as local, followed(local) as system, AsyncExitStack() as stack:
        await system.until(lambda record: record.count(SpotOffersSampled) > 0, "offers")
        await frozen(system)
        ways = await entry_points(system, stack)
        return {name: await submitted_at_once(system, name, submit) for name, submit in ways.items()}


def _lines(name: str, done: Sequence[Submission]) -> list[Line]:
    answers = sorted(submission.answer_seconds for submission in done)
    queued = sorted(submission.queued_seconds for submission in done)
    return [
        Line(case=f"SUBMIT {name}, {stage} {label}", value=values[int(ratio * (len(values) - 1))], unit="s",
             against=f"{COUNT} jobs at once, none lost")
        for stage, values in (("answered", answers), ("queued", queued))
        for label, ratio in (("p50", 0.5), ("p95", 0.95))
    ]  # fmt: skip
