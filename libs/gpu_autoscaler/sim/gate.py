"""The one way out of a process: every call to the outside passes here, and here a process can die.

What is killed simply never goes on: no `finally`, no `except`, as after a power cut.
"""

import asyncio
from typing import Protocol

from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.sim.faults import Faults
from gpu_autoscaler.sim.timeline import VirtualLoop


class Mortal(Protocol):
    """A process, as the gate needs it."""

    is_dead: bool
    role: str

    def kill(self) -> None:
        """End it at once."""
        ...


class Gate:
    """One process' way out."""

    def __init__(self, loop: VirtualLoop, faults: Faults, process: Mortal) -> None:
        self.loop = loop
        self.faults = faults
        self.role = process.role
        self._process = process

    async def leave(self, failing: str = "") -> None:
        """Before a call goes out: the process may be dead or die now, or the call fail (`failing`: kind of fault).

        Raises TransientError where the call never arrives.
        """
        if self.faults.strikes("killed_in_call", self.role):
            self._process.kill()
        await self.live()
        if failing and self.faults.strikes(failing, self.role):
            raise TransientError(f"{failing}: the call never arrived")

    async def back(self, losing: str = "") -> None:
        """When the answer comes back: as above, but what was asked for is done. Raises TransientError."""
        if self.faults.strikes("killed_in_call", self.role):
            self._process.kill()
        await self.live()
        if losing and self.faults.strikes(losing, self.role):
            raise TransientError(f"{losing}: it is done, and the answer is lost")

    async def wait(self, seconds: float) -> None:
        """Let time pass for this process."""
        waiting = self.loop.create_future()
        self.loop.call_later(seconds, _end, waiting)
        await waiting
        await self.live()

    async def live(self) -> None:
        """Go on only if the process lives."""
        if self._process.is_dead:
            await self.loop.create_future()


def _end(waiting: "asyncio.Future[None]") -> None:
    if not waiting.done():  # whoever waited may have given up
        waiting.set_result(None)
