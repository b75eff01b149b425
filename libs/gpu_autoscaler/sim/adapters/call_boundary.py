"""The boundary between a process and everything outside: every call passes here, and a process may be killed here.

A killed process never continues: no `finally`, no `except`, like after a power loss.
"""

import asyncio
from typing import Protocol

from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.sim.faults.injection import Faults
from gpu_autoscaler.sim.virtual_time import VirtualLoop


class KillableProcess(Protocol):
    """A process as the boundary needs it."""

    is_dead: bool
    role: str

    @property
    def suspension(self) -> asyncio.Future[None] | None:
        """Ends when its code may run again; None: it may."""

    def kill(self) -> None:
        """Stop it at once."""


class CallBoundary:
    """The call boundary of one process."""

    def __init__(self, loop: VirtualLoop, faults: Faults, process: KillableProcess) -> None:
        self.loop = loop
        self.faults = faults
        self.role = process.role
        self._process = process

    async def before_call(self, failure: str = "") -> None:
        """Before a call: the process may be dead or be killed, or the call may fail (`failing`: kind of fault).

        Raises TransientError where the call does not arrive.
        """
        if self.faults.strikes("killed_in_call", self.role):
            self._process.kill()
        await self.continue_if_alive()
        if failure and self.faults.strikes(failure, self.role):
            raise TransientError(f"{failure}: the call did not arrive")

    async def after_call(self, loss: str = "") -> None:
        """Before the response is returned: the process may be killed, or the response be lost (`losing`: kind of
        fault).

        The call has taken effect. Raises TransientError.
        """
        if self.faults.strikes("killed_in_call", self.role):
            self._process.kill()
        await self.continue_if_alive()
        if loss and self.faults.strikes(loss, self.role):
            raise TransientError(f"{loss}: the call took effect, but its response is lost")

    async def sleep(self, seconds: float) -> None:
        waiting = self.loop.create_future()
        self.loop.call_later(seconds, _end, waiting)
        await waiting
        await self.continue_if_alive()

    async def continue_if_alive(self) -> None:
        """Continue only if the process is alive and not suspended; return never, or when its suspension ends."""
        while self._process.suspension is not None:
            await self._process.suspension
        if self._process.is_dead:
            await self.loop.create_future()


def _end(waiting: "asyncio.Future[None]") -> None:
    if not waiting.done():  # the waiting task may have been canceled
        waiting.set_result(None)
