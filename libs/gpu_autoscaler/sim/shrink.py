"""Shrinks a failing run to the shortest list of faults found that violates the same invariant.

Delta debugging (Zeller, Hildebrandt: "Simplifying and Isolating Failure-Inducing Input", 2002), first over kinds of
faults, then over single occurrences. Limited in runs and time, as each attempt is a whole run.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from gpu_autoscaler.sim.faults.injection import Occurrence
from gpu_autoscaler.sim.simulation import Result, Setting

T = TypeVar("T")
Run = Callable[[Setting], Result]

RUNS_COUNT_MAX = 120
SECONDS_MAX = 60.0  # of wall time; a run in progress is completed
# With fewer faults the violation occurs at about the same time; attempts run only slightly longer.
LATER_HOURS = 0.5


class _Attempts:
    """Attempts left, and the smallest run so far that violates the invariant."""

    def __init__(self, run: Run, setting: Setting, result: Result, until: float, now: Callable[[], float]) -> None:
        self.smallest, self.result = setting, result
        self._run = run
        self._invariant = result.invariant
        in_time = result.ended_at_hours < setting.hours
        self._ends_at_hours = result.ended_at_hours + LATER_HOURS if in_time else None
        self._left_count = RUNS_COUNT_MAX
        self._until = until
        self._now = now

    def reproduces(self, setting: Setting) -> bool:
        """True if this run violates the same invariant; False also when attempts or time are used up."""
        if self._left_count == 0 or self._now() >= self._until:
            return False
        self._left_count -= 1
        result = self._run(replace(setting, ends_at_hours=self._ends_at_hours, record_path=None))
        if result.invariant != self._invariant:
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
    attempts = _Attempts(run, setting, result, now() + seconds_max, now)
    kinds = sorted(result.faults)
    kinds = list(_minimize(kinds, lambda kept: attempts.reproduces(replace(setting, kinds=tuple(kept)))))
    if not kinds and result.faults:
        return with_only_faults(setting, ()), attempts.result
    happened = [occurrence for occurrence in attempts.result.happened if occurrence[0] in kinds]
    _minimize(happened, lambda kept: attempts.reproduces(with_only_faults(setting, kept)))
    return attempts.smallest, attempts.result


def with_only_faults(setting: Setting, kept: Sequence[Occurrence]) -> Setting:
    """Return the same run with only these faults."""
    return replace(setting, kinds=tuple(sorted({kind for kind, _ in kept})), only=tuple(kept))


def _minimize(items: Sequence[T], reproduces: Callable[[Sequence[T]], bool]) -> Sequence[T]:
    """Return a subsequence of `items` from which no chunk can be removed; all of them at worst."""
    if not items or reproduces(()):
        return ()
    chunks_count = 2
    while len(items) > 1:
        size = -(-len(items) // chunks_count)
        for start in range(0, len(items), size):
            remaining = [*items[:start], *items[start + size :]]
            if remaining and reproduces(remaining):
                items, chunks_count = remaining, max(chunks_count - 1, 2)
                break
        else:
            if size == 1:
                break
            chunks_count = min(chunks_count * 2, len(items))
    return items
