"""Independent steps of one effect: bounded, published as they end, none delayed by the failure of another."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime

import pytest

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobFinished
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.runtime.publisher import as_outcome
from gpu_autoscaler.runtime.service import Outcome, Step
from gpu_autoscaler.runtime.steps import RETRY_WALL_SECONDS, take_steps

AT = datetime(2026, 11, 21, 12, tzinfo=UTC)


def finished(name: str) -> JobFinished:
    """The job ended."""
    return JobFinished(job_id=JobId(name), outcome="completed", finished_at=AT)


def ends(name: str, seconds: float = 0.0) -> Step:
    """A step that publishes the end of a job after a while."""

    async def step() -> Sequence[Fact]:
        await asyncio.sleep(seconds)
        return [finished(name)]

    return step


def fails(error: Exception) -> Step:
    """A step that fails."""

    async def step() -> Sequence[Fact]:
        raise error

    return step


async def taken(*steps: Step, at_once: int = 2) -> tuple[list[str], float | None]:
    """Take the steps; return the published jobs in their order, and the seconds until redelivery."""
    published: list[str] = []

    async def call(step: Step) -> Outcome:
        return as_outcome(await step())

    async def publish(part: Outcome) -> None:
        published.extend(fact.job_id for fact in part.facts if isinstance(fact, JobFinished))

    again_seconds = await take_steps(Outcome(steps=steps, steps_concurrent_max=at_once), call, publish)
    return published, again_seconds


async def test_each_step_is_published_when_it_ends() -> None:
    """Not in the order in which they began."""
    assert await taken(ends("slow", 0.05), ends("quick")) == (["quick", "slow"], None)


async def test_steps_begin_in_order_and_are_bounded() -> None:
    """One at a time is one after the other."""
    names = [f"{number}" for number in range(20)]
    assert await taken(*map(ends, names), at_once=1) == (names, None)


async def test_a_failed_step_delays_no_other() -> None:
    """They are published, and the fact is handled again."""
    steps = (fails(TransientError("busy")), fails(PermanentError("refused")), ends("a"), ends("b"))
    assert await taken(*steps) == (["a", "b"], RETRY_WALL_SECONDS)


async def test_an_effect_without_any_progress_fails() -> None:
    """As a transient failure if one was: it is set aside only if every step fails permanently."""
    with pytest.raises(TransientError):
        await taken(fails(PermanentError("refused")), fails(TransientError("busy")))
    with pytest.raises(PermanentError):
        await taken(fails(PermanentError("refused")))


async def test_a_bug_is_raised_when_the_others_have_ended() -> None:
    """Their facts are published all the same."""
    published: list[Fact] = []

    async def call(step: Step) -> Outcome:
        return as_outcome(await step())

    async def publish(part: Outcome) -> None:
        published.extend(part.facts)

    with pytest.raises(ZeroDivisionError):
        await take_steps(Outcome(steps=(fails(ZeroDivisionError()), ends("a", 0.02))), call, publish)
    assert published == [finished("a")]
