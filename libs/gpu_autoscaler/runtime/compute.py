"""Where a service computes a plan: in the calling task, or in a thread beside the event loop.

A plan of a large cluster takes seconds. On the event loop nothing else would run meanwhile: the lease would not be
renewed, no drain step taken, no notice folded. The core is pure. Its caches, and
what is derived from a state, may be used by several threads (`core/identity_cache.py`, `core/state/lineage.py`).
"""

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar, TypeVarTuple

Result = TypeVar("Result")
Args = TypeVarTuple("Args")

# The event loop waits at most this long for the interpreter while a plan is computed; the default is 5 ms, several
# times for each message.
SWITCH_SECONDS = 0.0005


class Compute(Protocol):
    """Calls a pure function and returns its result."""

    async def __call__(self, function: Callable[[*Args], Result], *args: *Args) -> Result:
        """Return the result; raises what the function raises."""


async def compute_here(function: Callable[[*Args], Result], *args: *Args) -> Result:
    """Call the function at once: for the simulator, whose virtual time does not pass meanwhile, and for tests."""
    return function(*args)


class ComputeThread:
    """Calls functions in one thread, one after the other, while the event loop goes on."""

    def __init__(self) -> None:
        sys.setswitchinterval(SWITCH_SECONDS)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="plan")

    async def __call__(self, function: Callable[[*Args], Result], *args: *Args) -> Result:
        """Return the result. A canceled call that has begun is completed first; its result is dropped."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
