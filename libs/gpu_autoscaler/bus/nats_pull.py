"""Pulls deliveries of one consumer in batches. Used by effect consumers and projections, which say what they mean.

One request is one batch: the server sends what is there and ends it; when nothing is there it waits for the first
message. Whatever arrives after a batch was given is kept for the next one.
"""

import asyncio
from collections.abc import Sequence

import msgspec
from nats.aio.subscription import Subscription

from gpu_autoscaler.bus.nats_link import NO_RESPONDERS, NatsLink
from gpu_autoscaler.bus.nats_read import sent_count
from gpu_autoscaler.bus.nats_wire import Frame, tap, untap
from gpu_autoscaler.bus.streams import NANOSECONDS, SERVER_PAYLOAD_BYTES_MAX
from gpu_autoscaler.model.errors import TransientError

BATCH_BYTES_MAX = 2 * SERVER_PAYLOAD_BYTES_MAX  # what one batch may hold in memory
HEARTBEAT_SECONDS = 1.0
QUIET_SECONDS_MAX = 3.5  # three heartbeats missed: the server does not know of our request any more
LINGER_SECONDS = 0.02  # a batch cut short by the consumer's limit ends without a word
HEARTBEAT = "100"
CONFLICT = "409"
# A replicated consumer says this at once, and delivers when its copies have noted it: the word overtakes the messages.
BATCH_COMPLETED = "Batch Completed"


class Pull:
    """An inbox for one consumer. `open` before use, `close` after."""

    def __init__(self, link: NatsLink, stream: str, consumer: str) -> None:
        self._link = link
        self._stream = stream
        self._consumer = consumer
        self._inbox = link.client.new_inbox()
        self._current = b""  # where the server ends the current request
        self._subscription: Subscription | None = None
        self._arrived: list[Frame] = []
        self._changed = asyncio.Event()
        self._request = 0
        self._left_count = 0  # of what was asked for and has not come
        self._asked_on = 0  # which connection; what is asked on one is never answered on another
        self.sent_count = 0  # of messages that the consumer has sent so far, as its last heartbeat said
        self._ended: tuple[str, str] | None = None  # status that ended the current request, and its words

    async def open(self) -> None:
        """Listen for deliveries."""
        self._link.listeners.add(self.wake)
        self._subscription = await tap(self._link.client, f"{self._inbox}.*", self)

    @property
    def waiting_count(self) -> int:
        """Deliveries that arrived and were not given yet."""
        return len(self._arrived)

    @property
    def is_answered(self) -> bool:
        """True when nothing more comes of the last request: who asks before lets the server send without measure."""
        return self._ended is not None or self._left_count <= 0

    @property
    def is_broken(self) -> bool:
        """True when the connection that the last request went over is gone, and with it what was on its way."""
        return not self._link.is_up or self._asked_on != self._link.connections_count

    async def ask(self, count_max: int, wait_seconds_max: float) -> None:
        """Send the request for a batch; `collect` then returns it."""
        self._request += 1
        self._left_count = count_max
        self._asked_on = self._link.connections_count
        self._current = f"{self._inbox}.{self._request}".encode()
        self._ended = None
        # Without both the server keeps a batch open until it is full or the time is over.
        body: dict[str, object] = {
            "batch": count_max,
            "no_wait": True,
            "expires": int(wait_seconds_max * NANOSECONDS),
            "max_bytes": BATCH_BYTES_MAX,
        }
        if wait_seconds_max > 2 * HEARTBEAT_SECONDS:
            body["idle_heartbeat"] = int(HEARTBEAT_SECONDS * NANOSECONDS)
        await self._link.tell(
            f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}",
            msgspec.json.encode(body),
            reply=self._current.decode(),
        )

    async def collect(self, count_max: int) -> list[Frame]:
        """Return the batch asked for, empty when its time is over or the pull was closed.

        Raises TransientError when the broker or the consumer went away; what had arrived is kept.
        """
        while len(self._arrived) < count_max and not self.is_answered:
            if self.is_broken and not self._arrived:
                raise TransientError(f"consumer {self._consumer} of {self._stream}: the broker is away")
            self._changed.clear()
            try:
                async with asyncio.timeout(LINGER_SECONDS if self._arrived else QUIET_SECONDS_MAX):
                    await self._changed.wait()
            except TimeoutError:
                if not self._arrived:
                    if not await self._link.is_silent(self._changed.is_set):
                        continue
                    self._link.doubt()
                    self._link.failed(f"reading {self._stream}", "the broker fell silent")
                    raise TransientError(
                        f"consumer {self._consumer} of {self._stream}: the broker fell silent"
                    ) from None
                break
            if self._subscription is None:
                return []
        self._check_end()
        self._link.went_well(f"reading {self._stream}")
        if len(self._arrived) <= count_max:
            given, self._arrived = self._arrived, []
        else:
            given, self._arrived = self._arrived[:count_max], self._arrived[count_max:]
        return given

    def _check_end(self) -> None:
        status, words = self._ended or ("", "")
        if status == NO_RESPONDERS or (status == CONFLICT and not self._arrived):
            why = words if status == CONFLICT else "nobody answers"
            raise TransientError(f"consumer {self._consumer} of {self._stream} does not deliver: {why}")

    def take(self, frames: Sequence[Frame]) -> None:
        """Deliveries, and the server's words on a request."""
        deliveries = [frame for frame in frames if frame.reply]
        self._arrived.extend(deliveries)
        self._left_count -= len(deliveries)
        if len(deliveries) < len(frames):
            for frame in frames:
                if not frame.reply:
                    self._hear(frame)
        self.wake()

    def _hear(self, frame: Frame) -> None:
        status, words = frame.status
        if status == HEARTBEAT:
            self.sent_count = max(self.sent_count, sent_count(frame))
        # The end of a batch that was given before says nothing about this one.
        if status != HEARTBEAT and words != BATCH_COMPLETED and frame.subject == self._current:
            self._ended = (status, words)

    def wake(self) -> None:
        """Let `collect` look again: something came, the link is lost, or somebody closes."""
        self._changed.set()

    async def close(self) -> list[Frame]:
        """Stop listening; return what arrived and was never given."""
        self._link.listeners.discard(self.wake)
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await untap(self._link.client, subscription)
        left, self._arrived = self._arrived, []
        self.wake()
        return left
