"""Takes the independent steps of one fact's effect: a limited number at once, each published when it ends.

Used by the runner and by the simulator, which differ in how a call is limited and how facts are published.
"""

import asyncio
from collections.abc import Awaitable, Callable

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.runtime.service import Outcome, Step

RETRY_WALL_SECONDS = 1.0  # until a fact whose steps partly failed is handled again


async def take_steps(
    outcome: Outcome, call: Callable[[Step], Awaitable[Outcome]], publish: Callable[[Outcome], Awaitable[object]]
) -> float | None:
    """Take all steps; return the seconds until the fact is handled again, None if every step succeeded.

    A failed step does not delay the others. If none of them published a fact, the error of one is raised, a transient
    one first: a fact is set aside only if every remaining step fails permanently. A bug is raised when all have ended.
    """
    waiting = iter(outcome.steps)
    failures: list[Exception] = []
    has_published = False

    async def take_next() -> None:
        nonlocal has_published
        for step in waiting:
            try:
                part = await call(step)
                assert all(fact.condition() is not None for fact in part.facts), (  # noqa: S101 - a bug
                    "a fact of a step has an id of its own: steps end in any order"
                )
                if part.facts:
                    await publish(part)
                    has_published = True
            except Exception as exc:  # noqa: BLE001 - whatever a step raises, the others are taken
                failures.append(exc)

    hands = min(max(outcome.steps_concurrent_max, 1), len(outcome.steps))
    await asyncio.gather(*(take_next() for _ in range(hands)))
    if not failures:
        return None
    worst = min(failures, key=_order)
    if not has_published or _order(worst) == 0:
        raise worst
    return RETRY_WALL_SECONDS


def _order(failure: Exception) -> int:
    """Bugs first, then transient failures."""
    return 1 if isinstance(failure, TransientError) else 2 if isinstance(failure, PermanentError) else 0
