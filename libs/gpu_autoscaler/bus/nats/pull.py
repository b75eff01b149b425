"""Pulls deliveries of one consumer in batches. Used by effect consumers and projections.

One request is one batch: the server sends the available messages and ends the batch; without any it waits for the first
message. Messages that arrive after a batch was returned are kept for the next one.
"""

import asyncio
from collections.abc import Sequence

import msgspec
from nats.aio.subscription import Subscription

from gpu_autoscaler.bus.differences import NANOSECONDS
from gpu_autoscaler.bus.nats.link import NO_RESPONDERS, NatsLink
from gpu_autoscaler.bus.nats.read import sent_count
from gpu_autoscaler.bus.nats.wire import Frame
from gpu_autoscaler.bus.streams import SERVER_PAYLOAD_BYTES_MAX
from gpu_autoscaler.model.errors import TransientError

BATCH_BYTES_MAX = 2 * SERVER_PAYLOAD_BYTES_MAX  # memory limit of one batch
HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS_MAX = 3.5  # three missed heartbeats: the server lost our request
LINGER_SECONDS = 0.02  # a batch cut short by the consumer's limit ends without a status
HEARTBEAT = "100"
CONFLICT = "409"
# A replicated consumer sends this at once, but its messages only after replication: this status overtakes them.
BATCH_COMPLETED = "Batch Completed"


class Pull:
    """The inbox of one consumer. `open` before use, `close` after."""

    def __init__(self, link: NatsLink, stream: str, consumer: str) -> None:
        self._link = link
        self._stream = stream
        self._consumer = consumer
        self._inbox = link.client.new_inbox()
        self._current = b""  # the reply subject of the current request
        self._subscription: Subscription | None = None
        self._frames: list[Frame] = []
        self._changed = asyncio.Event()
        self._request_number = 0
        self._missing_count = 0  # requested messages that have not arrived
        self._connection = 0  # of the last request; it is never answered on another connection
        self.sent_count = 0  # messages sent by the consumer so far, by its last heartbeat
        self._ended: tuple[str, str] | None = None  # status and text that ended the current request

    async def open(self) -> None:
        """Subscribe to deliveries."""
        self._link.listeners.add(self.wake)
        self._subscription = await self._link.wire.subscribe(f"{self._inbox}.*", self)

    @property
    def waiting_count(self) -> int:
        """Deliveries that arrived and were not yet returned."""
        return len(self._frames)

    @property
    def is_answered(self) -> bool:
        """True when the last request is complete; requesting earlier would let the server send without a limit."""
        return self._ended is not None or self._missing_count <= 0

    @property
    def is_broken(self) -> bool:
        """True when the connection of the last request broke, which loses its messages in flight."""
        return not self._link.is_up or self._connection != self._link.connections_count

    async def request(self, count_max: int, wait_seconds_max: float) -> None:
        """Request a batch; `collect` then returns it."""
        self._request_number += 1
        self._missing_count = count_max
        self._connection = self._link.connections_count
        self._current = f"{self._inbox}.{self._request_number}".encode()
        self._ended = None
        # Without both `no_wait` and `expires` the server keeps a batch open until it is full or expires.
        body: dict[str, object] = {
            "batch": count_max,
            "no_wait": True,
            "expires": int(wait_seconds_max * NANOSECONDS),
            "max_bytes": BATCH_BYTES_MAX,
        }
        if wait_seconds_max > 2 * HEARTBEAT_SECONDS:
            body["idle_heartbeat"] = int(HEARTBEAT_SECONDS * NANOSECONDS)
        await self._link.send(
            f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}",
            msgspec.json.encode(body),
            reply=self._current.decode(),
        )

    async def collect(self, count_max: int) -> list[Frame]:
        """Return the requested batch, empty when it expired or the pull was closed.

        Raises TransientError when the broker or the consumer is lost; messages that arrived are kept.
        """
        while len(self._frames) < count_max and not self.is_answered:
            if self.is_broken and not self._frames:
                raise TransientError(f"consumer {self._consumer} of {self._stream}: broker disconnected")
            self._changed.clear()
            try:
                async with asyncio.timeout(LINGER_SECONDS if self._frames else SILENCE_SECONDS_MAX):
                    await self._changed.wait()
            except TimeoutError:
                if not self._frames:
                    if not await self._link.is_unresponsive(self._changed.is_set):
                        continue
                    self._link.verify()
                    self._link.report_failure(f"reading {self._stream}", "broker silent")
                    raise TransientError(f"consumer {self._consumer} of {self._stream}: broker silent") from None
                break
            if self._subscription is None:
                return []
        self._check_end()
        self._link.report_success(f"reading {self._stream}")
        if len(self._frames) <= count_max:
            batch, self._frames = self._frames, []
        else:
            batch, self._frames = self._frames[:count_max], self._frames[count_max:]
        return batch

    def _check_end(self) -> None:
        status, text = self._ended or ("", "")
        if status == NO_RESPONDERS or (status == CONFLICT and not self._frames):
            reason = text if status == CONFLICT else "no responders"
            raise TransientError(f"consumer {self._consumer} of {self._stream} does not deliver: {reason}")

    def receive(self, frames: Sequence[Frame]) -> None:
        """Store deliveries and process the server's status messages."""
        deliveries = [frame for frame in frames if frame.reply]
        self._frames.extend(deliveries)
        self._missing_count -= len(deliveries)
        if len(deliveries) < len(frames):
            for frame in frames:
                if not frame.reply:
                    self._process_status(frame)
        self.wake()

    def _process_status(self, frame: Frame) -> None:
        status, text = frame.status
        if status == HEARTBEAT:
            self.sent_count = max(self.sent_count, sent_count(frame))
        # The end of an earlier batch does not end this one.
        if status != HEARTBEAT and text != BATCH_COMPLETED and frame.subject == self._current:
            self._ended = (status, text)

    def wake(self) -> None:
        """Wake `collect` after a message, a disconnect or a close."""
        self._changed.set()

    async def close(self) -> list[Frame]:
        """Unsubscribe; return messages that arrived and were never returned."""
        self._link.listeners.discard(self.wake)
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await self._link.wire.unsubscribe(subscription)
        left, self._frames = self._frames, []
        self.wake()
        return left
