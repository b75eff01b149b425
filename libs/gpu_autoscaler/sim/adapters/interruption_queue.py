"""The cloud's interruption queue: spot warnings and rebalance recommendations, until they are deleted.

In runs where instance metadata is closed the queue is the only source of notices. Sources: EC2 User Guide, "Spot
Instance interruption notices"; Amazon SQS Developer Guide, "Amazon SQS visibility timeout" (read 2026-11-22).
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.cloudmeta.protocol import QueuedEvent
from gpu_autoscaler.sim.adapters.call_boundary import CallBoundary
from gpu_autoscaler.sim.cluster.cloud import Cloud, Machine
from gpu_autoscaler.sim.faults.injection import Faults
from gpu_autoscaler.sim.virtual_time import VirtualLoop

METADATA_CLOSED = "metadata_closed"
VISIBILITY_TIMEOUT_SECONDS = 30.0  # the default visibility timeout
RECEIVE_COUNT_MAX = 10
WARNED_AHEAD_SECONDS = 120.0  # a spot warning has no deadline: it always means this
_SPOT = "EC2 Spot Instance Interruption Warning"
_RESERVED = "EC2 Capacity Reservation Instance Interruption Warning"  # names its deadline
_REBALANCE = "EC2 Instance Rebalance Recommendation"


@dataclass(slots=True)
class QueueMessage:
    """One message of the queue."""

    number: int
    machine: Machine
    is_notice: bool
    body: str
    sent_at: datetime
    visible_at: float  # in seconds of the loop


class InterruptionQueue:
    """All messages in the queue."""

    def __init__(self, loop: VirtualLoop, faults: Faults, cloud: Cloud) -> None:
        self.is_open = METADATA_CLOSED in faults.kinds
        self.is_metadata_closed = faults.strikes(METADATA_CLOSED)
        self.deleted_listeners: list[Callable[[QueueMessage], None]] = []
        self.waiting: dict[int, QueueMessage] = {}
        self._loop = loop
        self._sent_count = 0
        self._listening: list[asyncio.Future[None]] = []
        if self.is_open:
            cloud.notice_listeners.append(self._on_notice)
            cloud.hint_listeners.append(self._on_recommendation)

    def take(self, now: float) -> list[QueueMessage]:
        """Return visible messages, oldest first, and hide them."""
        taken = [message for message in self.waiting.values() if message.visible_at <= now][:RECEIVE_COUNT_MAX]
        for message in taken:
            self.hide(message.number, VISIBILITY_TIMEOUT_SECONDS)
        return taken

    def hide(self, number: int, seconds: float) -> None:
        if (message := self.waiting.get(number)) is not None:
            message.visible_at = self._loop.time() + seconds
            self._loop.call_later(seconds, self._wake)

    def delete(self, number: int) -> None:
        if (message := self.waiting.pop(number, None)) is not None:
            for listener in self.deleted_listeners:
                listener(message)

    async def until_more(self) -> None:
        """Wait until a message may have become visible."""
        listening = self._loop.create_future()
        self._listening.append(listening)
        await listening

    def _wake(self) -> None:
        listening, self._listening = self._listening, []
        for future in listening:
            if not future.done():
                future.set_result(None)

    def _on_notice(self, machine: Machine) -> None:
        notice = machine.notice
        if notice is None or notice.reclaim_at is None:
            return
        now, name = self._loop.now().replace(microsecond=0), {"instance-id": _instance_id(machine)}
        if notice.reclaim_at - now == timedelta(seconds=WARNED_AHEAD_SECONDS):
            self._send(machine, _SPOT, {**name, "instance-action": "terminate"}, now)
        else:
            self._send(machine, _RESERVED, {**name, "instance-termination-time": notice.reclaim_at.isoformat()}, now)

    def _on_recommendation(self, machine: Machine) -> None:
        if machine.hinted_at is not None:
            self._send(machine, _REBALANCE, {"instance-id": _instance_id(machine)}, machine.hinted_at)

    def _send(self, machine: Machine, kind: str, detail: dict[str, str], at: datetime) -> None:
        self._sent_count += 1
        content = {"id": f"event-{self._sent_count}", "detail-type": kind, "time": at.isoformat(), "detail": detail}
        body = msgspec.json.encode(content).decode()
        number, is_notice = self._sent_count, kind != _REBALANCE
        self.waiting[number] = QueueMessage(number, machine, is_notice, body, self._loop.now(), self._loop.time())
        self._wake()


@dataclass(frozen=True, slots=True)
class SimInterruptionQueue:
    """The EventQueue of one process."""

    _boundary: CallBoundary
    _queue: InterruptionQueue

    async def receive(self) -> Sequence[QueuedEvent]:
        await self._boundary.continue_if_alive()
        while not (taken := self._queue.take(self._boundary.loop.time())):
            await self._queue.until_more()
            await self._boundary.continue_if_alive()
        now = self._boundary.loop.now()
        return [
            QueuedEvent(receipt=str(message.number), body=message.body, sent_at=message.sent_at, received_at=now)
            for message in taken
        ]

    async def delete(self, event: QueuedEvent) -> None:
        await self._boundary.before_call("cloud_call_failed")
        self._queue.delete(int(event.receipt))
        await self._boundary.after_call("cloud_call_failed")

    async def hide(self, event: QueuedEvent, seconds: float) -> None:
        await self._boundary.before_call("cloud_call_failed")
        self._queue.hide(int(event.receipt), seconds)

    async def complete_hook(self, group: str, hook: str, token: str) -> None:
        """This cloud has no lifecycle hooks."""

    async def extend_hook(self, group: str, hook: str, token: str) -> None:
        """This cloud has no lifecycle hooks."""

    async def close(self) -> None:
        """Nothing to close."""


def _instance_id(machine: Machine) -> str:
    return machine.provider_id.rpartition("/")[2]
