"""Makes a failing run small: the shortest list of faults found that still breaks the same promise.

Delta debugging (Zeller, Hildebrandt: "Simplifying and Isolating Failure-Inducing Input", 2002), first over kinds of
faults, then over single occurrences; bounded, as each try is a whole run.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from gpu_autoscaler.sim.faults import Occurrence
from gpu_autoscaler.sim.world import Result, Setting

T = TypeVar("T")
Run = Callable[[Setting], Result]

RUNS_COUNT_MAX = 120


class _Tries:
    """Runs left."""

    def __init__(self, run: Run, promise: str) -> None:
        self._run = run
        self._promise = promise
        self._left_count = RUNS_COUNT_MAX
        self.last: Result | None = None  # the last one that broke

    def breaks(self, setting: Setting) -> bool:
        """True when this run breaks the same promise; False also when there are no runs left."""
        if self._left_count == 0:
            return False
        self._left_count -= 1
        result = self._run(setting)
        if result.promise != self._promise:
            return False
        self.last = result
        return True


def shrink(setting: Setting, result: Result, run: Run) -> tuple[Setting, Result]:
    """Return the smallest run found that breaks the promise that `result` broke, and what came of it."""
    tries = _Tries(run, result.promise)
    kinds: Sequence[str] = tuple(sorted(result.faults))
    kinds = _least(kinds, lambda kept: tries.breaks(replace(setting, kinds=tuple(kept))))
    smaller = replace(setting, kinds=tuple(kinds))
    known = tries.last or result
    happened: Sequence[Occurrence] = [one for one in known.happened if one[0] in kinds]
    happened = _least(happened, lambda kept: tries.breaks(replace(smaller, only=tuple(kept))))
    smallest = replace(smaller, only=tuple(happened))
    last = run(smallest)
    return (smallest, last) if last.promise == result.promise else (setting, result)


def _least(things: Sequence[T], breaks: Callable[[Sequence[T]], bool]) -> Sequence[T]:
    """Return a part of `things`, in their order, from which no chunk can be left out; all of them at worst."""
    if breaks(()):
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
