"""Shrinks a failing run to the shortest list of faults found that violates the same invariant.

Delta debugging (Zeller, Hildebrandt: "Simplifying and Isolating Failure-Inducing Input", 2002), first over kinds of
faults, then over single occurrences. Limited in runs and time, as each attempt is a whole run.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from gpu_autoscaler.sim.faults import Occurrence
from gpu_autoscaler.sim.world import Result, Setting

T = TypeVar("T")
Run = Callable[[Setting], Result]

RUNS_COUNT_MAX = 120
SECONDS_MAX = 60.0  # of wall time; a run in progress is completed
# With fewer faults the violation occurs at about the same time; attempts run only slightly longer.
LATER_HOURS = 0.5


class _Tries:
    """Attempts left, and the smallest run so far that violates the invariant."""

    def __init__(self, run: Run, setting: Setting, result: Result, until: float, now: Callable[[], float]) -> None:
        self.smallest, self.result = setting, result
        self._run = run
        self._promise = result.promise
        in_time = result.ended_at_hours < setting.hours
        self._ends_at_hours = result.ended_at_hours + LATER_HOURS if in_time else None
        self._left_count = RUNS_COUNT_MAX
        self._until = until
        self._now = now

    def breaks(self, setting: Setting) -> bool:
        """True if this run violates the same invariant; False also when attempts or time are used up."""
        if self._left_count == 0 or self._now() >= self._until:
            return False
        self._left_count -= 1
        result = self._run(replace(setting, ends_at_hours=self._ends_at_hours))
        if result.promise != self._promise:
            return False
        self.smallest, self.result = setting, result
        return True


def shrink(
    setting: Setting,
    result: Result,
    run: Run,
    *,
    seconds_max: float = SECONDS_MAX,
    now: Callable[[], float] = time.monotonic,
) -> tuple[Setting, Result]:
    """Return the smallest run found that violates the invariant of `result`, and its result."""
    tries = _Tries(run, setting, result, now() + seconds_max, now)
    kinds = sorted(result.faults)
    kinds = list(_least(kinds, lambda kept: tries.breaks(replace(setting, kinds=tuple(kept)))))
    if not kinds and result.faults:
        return only(setting, ()), tries.result
    happened = [one for one in tries.result.happened if one[0] in kinds]
    _least(happened, lambda kept: tries.breaks(only(setting, kept)))
    return tries.smallest, tries.result


def only(setting: Setting, kept: Sequence[Occurrence]) -> Setting:
    """Return the same run with only these faults."""
    return replace(setting, kinds=tuple(sorted({kind for kind, _ in kept})), only=tuple(kept))


def _least(things: Sequence[T], breaks: Callable[[Sequence[T]], bool]) -> Sequence[T]:
    """Return a subsequence of `things` from which no chunk can be removed; all of them at worst."""
    if not things or breaks(()):
        return ()
    chunks_count = 2
    while len(things) > 1:
        size = -(-len(things) // chunks_count)
        for start in range(0, len(things), size):
            rest = [*things[:start], *things[start + size :]]
            if rest and breaks(rest):
                things, chunks_count = rest, max(chunks_count - 1, 2)
                break
        else:
            if size == 1:
                break
            chunks_count = min(chunks_count * 2, len(things))
    return things
