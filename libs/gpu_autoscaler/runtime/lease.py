"""Leader election: which replica of a service is active. For liveness and to avoid double work, never for safety:
fences and idempotent tokens cover the moment in which two replicas may act.

A lease is an entry of a key-value bucket with a time to live (`bus/streams.py: BUCKETS`). It is created where there is
none and renewed against its own revision; a refused holder stops at once. The term counts from before the request, by
the monotonic clock: a process that was paused sees its lease expired before anything else.
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

STANDBY_POLL_SECONDS = 0.2  # between two checks of a standby

log = structlog.get_logger()


async def holder_of(bus: Bus, role: str) -> str | None:
    """Return the holder of the role, None without one. Raises TransientError while the broker is away."""
    entry = await bus.last_message(LEASES.stream, LEASES.subject(role))
    return None if entry is None or not entry.payload else entry.payload.decode()


class Lease:
    """One process's claim to a role."""

    def __init__(self, bus: Bus, role: str, instance: str, monotonic_seconds: Callable[[], float]) -> None:
        """`instance` names the process for people; it need not be unique."""
        self.role = role
        self.holder = f"{instance}/{uuid4().hex[:8]}"
        self.other_holder: str | None = None  # at the last check, when it was not this process
        self._bus = bus
        self._monotonic_seconds = monotonic_seconds
        self._subject = LEASES.subject(role)
        self._revision: int | None = None
        self._held_until = 0.0  # monotonic
        self._was_held = False

    @property
    def is_held(self) -> bool:
        """True while no other process can hold the lease."""
        return self._revision is not None and self._monotonic_seconds() < self._held_until

    def require(self) -> None:
        """Return while the lease is held. Raises TransientError otherwise: its holder continues the work."""
        if not self.is_held:
            raise TransientError(f"lease of {self.role} is held by {self.other_holder or 'nobody'}; left to its holder")

    async def run(self, stop: asyncio.Event) -> None:
        """Acquire the lease, renew it, acquire it again after a loss, until `stop`; then release it."""
        while True:
            await self._acquire()
            held = self.is_held
            if held != self._was_held:
                self._was_held = held
                write = log.info if held else log.warning
                write(
                    "lease acquired" if held else "lease lost", role=self.role, holder=self.other_holder or self.holder
                )
            if await pause(stop, LEASES.ttl_seconds / 3 if held else STANDBY_POLL_SECONDS):
                break
        await self._release()

    async def _acquire(self) -> None:
        """Write the entry where it is ours or free. Without an answer the current term simply runs out."""
        requested_at = self._monotonic_seconds()
        try:
            async with asyncio.timeout(LEASES.ttl_seconds / 3):
                entry = await self._bus.last_message(LEASES.stream, self._subject)
                name = None if entry is None or not entry.payload else entry.payload.decode()
                self.other_holder = name if name != self.holder else None
                if self.other_holder is not None:
                    self._revision = None
                    return
                self._revision = await self._write(self.holder, 0 if entry is None else entry.sequence)
                self._held_until = requested_at + LEASES.ttl_seconds
        except StalePlan:
            self._revision = None
        except (TransientError, TimeoutError, PermanentError) as exc:
            log.debug("lease not renewed", role=self.role, error=str(exc) or repr(exc))

    async def _write(self, holder: str, after: int) -> int:
        """Return the new revision. Raises StalePlan when another process wrote first."""
        ack = await self._bus.publish(
            self._subject, holder.encode(), message_id=uuid4().hex, expected_last_subject_sequence=after
        )
        return ack.sequence

    async def _release(self) -> None:
        """Clear the entry, so that a standby need not wait for the term to end."""
        revision, self._revision = self._revision, None
        if revision is not None:
            with contextlib.suppress(StalePlan, TransientError, PermanentError, TimeoutError):
                async with asyncio.timeout(LEASES.ttl_seconds / 3):
                    await self._write("", revision)
