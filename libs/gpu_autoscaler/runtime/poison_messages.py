"""Detects poison messages: those that end every process that handles them. They become dead letters.

Only a redelivered message that this process has not handled before is suspect: another process may have died of it.
Each attempt at a suspect is recorded before it starts, and cleared once the process survives it. A suspect with
recorded attempts is handled alone, so that no other message in hand is blamed.
"""

import msgspec

from gpu_autoscaler.bus.protocol import Bus, Delivery
from gpu_autoscaler.bus.streams import ATTEMPT
from gpu_autoscaler.model.errors import PermanentError

# Two attempts alone, one beside other messages, and the unrecorded first one. Source: our own.
ATTEMPTS_COUNT_MAX = 3


class PoisonMessage(PermanentError):
    """A message that no process has survived."""


class _Record(msgspec.Struct, frozen=True):
    attempts_count: int  # since the last attempt that was survived


class AttemptRecords:
    """The recorded attempts at suspect messages of one service."""

    def __init__(self, bus: Bus, service: str) -> None:
        self._bus = bus
        self._service = service

    async def attempts_count(self, delivery: Delivery) -> int:
        """Return how many attempts no process survived. Raises TransientError, PoisonMessage at the limit."""
        message = await self._bus.last_message(ATTEMPT, self._subject(delivery))
        count = 0 if message is None else msgspec.json.decode(message.payload, type=_Record).attempts_count
        if count >= ATTEMPTS_COUNT_MAX:
            raise PoisonMessage(
                f"the process ended {count + 1} times while it handled this message, at last with no other in hand"
            )
        return count

    async def begin(self, delivery: Delivery, attempts_count: int) -> None:
        """Record that another attempt starts. Raises TransientError."""
        await self._record(delivery, attempts_count + 1)

    async def survived(self, delivery: Delivery) -> None:
        """Clear the record: the process survived the message. Raises TransientError."""
        await self._record(delivery, 0)

    async def _record(self, delivery: Delivery, attempts_count: int) -> None:
        subject = self._subject(delivery)
        await self._bus.publish(
            subject,
            msgspec.json.encode(_Record(attempts_count)),
            message_id=f"{subject}/{delivery.delivered_count}/{attempts_count}",
        )

    def _subject(self, delivery: Delivery) -> str:
        return f"attempt.{self._service}.{delivery.message.stream}.{delivery.message.sequence}"
