"""A simulated run depends on its setting alone: no error is lost in it, and it reads neither clock nor chance."""

import dataclasses
import random
import sys
import uuid
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from logging import CRITICAL
from pathlib import Path
from threading import Thread
from time import monotonic
from types import BuiltinFunctionType, FrameType

import pytest
import structlog

from gpu_autoscaler.sim.simulation import Setting, Simulation, run
from gpu_autoscaler.sim.virtual_time import VirtualLoop
from gpu_autoscaler_services.simulation import ROLES

SHORT = Setting(seed=3, hours=0.15, ends_at_hours=0.15)


class OutOfTime(BaseException):
    """What a time limit raises, wherever the code is: as pytest's, it is no Exception."""


# ---- errors


def _out_of_time(*_: object) -> Hashable:
    raise OutOfTime


def test_a_time_limit_ends_the_run() -> None:
    """It strikes in a task of the scaler; without its scaler the run would go on, and report broken promises."""
    with pytest.raises(OutOfTime):
        run(SHORT, {**ROLES, "scaler": dataclasses.replace(ROLES["scaler"], tick_inputs=_out_of_time)})


def _spawn(loop: VirtualLoop) -> None:
    async def fail() -> None:
        raise KeyError("lost")

    loop.spawn(fail())


def _set_timer(loop: VirtualLoop) -> None:
    loop.call_later(1.0, {}.pop, "lost")


@pytest.mark.parametrize("start", [_spawn, _set_timer])
def test_an_error_of_the_simulation_ends_the_run(start: Callable[[VirtualLoop], None]) -> None:
    """Whether a task or a timer of it fails; asyncio would log both and go on."""
    loop = VirtualLoop()
    start(loop)
    loop.call_later(2.0, loop.stop)
    with pytest.raises(KeyError, match="lost"):
        loop.run_forever()
    loop.end()


# ---- clocks and chance


def _is_outside(function: object) -> bool:
    """Return True for a function whose result depends on more than its arguments."""
    if not isinstance(function, BuiltinFunctionType):
        return False
    owner = function.__self__
    if isinstance(owner, type) and issubclass(owner, datetime):
        return function.__name__ in ("now", "utcnow", "today")
    if owner is random._inst:  # of random's own functions
        return True
    return function.__module__ == "time" or function.__name__ in ("urandom", "getrandom", "start_new_thread")


@contextmanager
def outside_calls() -> Iterator[set[str]]:
    """Yield the calls of this thread that read a clock, chance or the system's entropy, or start a thread."""
    calls: set[str] = set()

    def note(frame: FrameType, event: str, function: object) -> None:
        if "hypothesis" in Path(frame.f_code.co_filename).parts:  # it times garbage collections, whenever one happens
            return
        is_seed = event == "call" and frame.f_code is random.Random.seed.__code__ and frame.f_locals["a"] is None
        if is_seed or (event == "c_call" and _is_outside(function)):
            calls.add(f"{frame.f_code.co_filename}:{frame.f_lineno} {getattr(function, '__name__', 'seed')}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize(
    "read",
    [
        monotonic, random.random, random.Random, partial(random.uniform, 0, 1), uuid.uuid4, lambda: datetime.now(UTC),
        lambda: Thread(target=print).start(),
    ],
)  # fmt: skip
def test_clocks_and_chance_are_noticed(read: Callable[[], object]) -> None:
    """Otherwise the next test would show nothing."""
    seeded = random.Random(1)  # noqa: S311 - repeatable
    with outside_calls() as calls:
        seeded.random()
        assert not calls
        read()
    assert calls


def test_a_run_reads_neither_clock_nor_chance() -> None:
    """Nor does it start a thread: its facts do not depend on the load of the machine."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(CRITICAL))  # log lines have the time
    simulation = Simulation(SHORT, ROLES)
    with outside_calls() as calls:
        result = simulation.run()
    assert result.plans_count > 0
    assert calls == set()
