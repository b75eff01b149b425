"""Which of several processes of a service is the active one. For liveness and for doing things once, never for safety:
that two may act at once for a moment is what fences and idempotent tokens are for.

A lease is an entry of a bucket whose entries vanish (`bus/streams.py: BUCKETS`). It is taken where there is none, and
written again behind its own revision; whoever is refused stops at once. Time is counted from before the question, by
the monotonic clock: a process that was paused finds its lease over before it hears of anything.
"""

import asyncio
import contextlib
from collections.abc import Callable
from uuid import uuid4

import structlog

from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.bus.streams import LEASES
from gpu_autoscaler.model.errors import PermanentError, StalePlan, TransientError
from gpu_autoscaler.runtime.retry import pause

LOOK_SECONDS = 0.2  # between two looks of one that stands by

log = structlog.get_logger()


async def holder_of(bus: Bus, role: str) -> str | None:
    """Return who holds the role; None: nobody. Raises TransientError while the broker is away."""
    entry = await bus.last_message(LEASES.stream, LEASES.subject(role))
    return None if entry is None or not entry.payload else entry.payload.decode()


class Lease:
    """One process's hand on a role."""

    def __init__(self, bus: Bus, role: str, instance: str, monotonic_seconds: Callable[[], float]) -> None:
        """`instance` names the process for people; two of one name are told apart all the same."""
        self.role = role
        self.holder = f"{instance}/{uuid4().hex[:8]}"
        self.other: str | None = None  # who held it at the last look, where it was not us
        self._bus = bus
        self._monotonic_seconds = monotonic_seconds
        self._subject = LEASES.subject(role)
        self._revision: int | None = None
        self._until = 0.0  # monotonic
        self._was_held = False

    @property
    def is_held(self) -> bool:
        """True while nobody else can have it."""
        return self._revision is not None and self._monotonic_seconds() < self._until

    def guard(self) -> None:
        """Return while the lease is held. Raises TransientError when it is not: somebody else goes on with the work."""
        if not self.is_held:
            raise TransientError(f"the lease of {self.role} is {self.other or 'nobody'}'s by now; left to its holder")

    async def keep(self, stop: asyncio.Event) -> None:
        """Take the lease, keep it, take it again when it was lost, until it is time to stop; then give it back."""
        while True:
            await self._ask()
            held = self.is_held
            if held != self._was_held:
                self._was_held = held
                say = log.info if held else log.warning
                say("lease taken" if held else "lease lost", role=self.role, holder=self.other or self.holder)
            if await pause(stop, LEASES.ttl_seconds / 3 if held else LOOK_SECONDS):
                break
        await self._give_back()

    async def _ask(self) -> None:
        """Write the entry where it is ours or free. What nobody answers changes nothing until the time is over."""
        asked_at = self._monotonic_seconds()
        try:
            async with asyncio.timeout(LEASES.ttl_seconds / 3):
                entry = await self._bus.last_message(LEASES.stream, self._subject)
                name = None if entry is None or not entry.payload else entry.payload.decode()
                self.other = name if name != self.holder else None
                if self.other is not None:
                    self._revision = None
                    return
                self._revision = await self._write(self.holder, 0 if entry is None else entry.sequence)
                self._until = asked_at + LEASES.ttl_seconds
        except StalePlan:
            self._revision = None
        except (TransientError, TimeoutError, PermanentError) as exc:
            log.debug("lease not renewed", role=self.role, error=str(exc) or repr(exc))

    async def _write(self, holder: str, after: int) -> int:
        """Return the new revision. Raises StalePlan where another was first."""
        ack = await self._bus.publish(
            self._subject, holder.encode(), message_id=uuid4().hex, expected_last_subject_sequence=after
        )
        return ack.sequence

    async def _give_back(self) -> None:
        """Whoever stands by need not wait for the end of our time."""
        revision, self._revision = self._revision, None
        if revision is not None:
            with contextlib.suppress(StalePlan, TransientError, PermanentError, TimeoutError):
                async with asyncio.timeout(LEASES.ttl_seconds / 3):
                    await self._write("", revision)
