"""Finds the message that ends the process whenever it is handled, so that it is set aside instead of coming for ever.

Only a message that was delivered before, and not to this process, is looked at: somebody may have died of it. That it
was begun is put on record before, that it was survived afterwards. One that was begun and never survived is handled
alone from then on, so that no innocent is blamed for what was in hand beside it.
"""

import msgspec

from gpu_autoscaler.bus.protocol import Bus, Delivery
from gpu_autoscaler.bus.streams import ATTEMPT
from gpu_autoscaler.model.errors import PermanentError

# Twice alone, once beside others, and the first time of all, which nobody noted. Source: our own.
ATTEMPTS_COUNT_MAX = 3


class PoisonMessage(PermanentError):
    """A message that no process has survived."""


class _Mark(msgspec.Struct, frozen=True):
    attempts_count: int  # since it was last survived


class AttemptRecords:
    """What is on record about suspects of one service."""

    def __init__(self, bus: Bus, service: str) -> None:
        self._bus = bus
        self._service = service

    async def attempts_count(self, delivery: Delivery) -> int:
        """How often this message was begun and never survived. Raises TransientError, PoisonMessage at the limit."""
        mark = await self._bus.last_message(ATTEMPT, self._subject(delivery))
        count = 0 if mark is None else msgspec.json.decode(mark.payload, type=_Mark).attempts_count
        if count >= ATTEMPTS_COUNT_MAX:
            raise PoisonMessage(
                f"the process ended {count + 1} times while it handled this message, at last with nothing else in hand"
            )
        return count

    async def begin(self, delivery: Delivery, attempts_count: int) -> None:
        """Put on record that it is begun once more. Raises TransientError."""
        await self._note(delivery, attempts_count + 1)

    async def survived(self, delivery: Delivery) -> None:
        """Put on record that it ended no process. Raises TransientError."""
        await self._note(delivery, 0)

    async def _note(self, delivery: Delivery, attempts_count: int) -> None:
        subject = self._subject(delivery)
        await self._bus.publish(
            subject,
            msgspec.json.encode(_Mark(attempts_count)),
            message_id=f"{subject}/{delivery.delivered_count}/{attempts_count}",
        )

    def _subject(self, delivery: Delivery) -> str:
        return f"trial.{self._service}.{delivery.message.stream}.{delivery.message.sequence}"
