"""Ordered read of a stream by one process: no effects, no repeats, no gaps, whatever happens to the connection.

The server-side consumer is disposable: it acknowledges nothing, lives in memory, and is made anew after the last
sequence that was given whenever the connection broke or a number is missing.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import nats.errors
import structlog

from gpu_autoscaler.bus.nats_link import ApiError, NatsLink
from gpu_autoscaler.bus.nats_pull import Pull
from gpu_autoscaler.bus.nats_read import NO_STREAM, delivered
from gpu_autoscaler.bus.protocol import Message
from gpu_autoscaler.bus.streams import NANOSECONDS
from gpu_autoscaler.model.errors import ConfigError, TransientError

BATCH_COUNT_MAX = 4000
REQUEST_SECONDS_MAX = 5.0
UNUSED_SECONDS_MAX = 300  # the server drops a consumer that nobody asks for so long; a slow fold is quicker
PAUSE_SECONDS_MIN = 0.05
PAUSE_SECONDS_MAX = 2.0

_log = structlog.get_logger(__name__)


class NatsProjection:
    """Reads one stream. Make one with `open`, iterate once, close."""

    def __init__(self, link: NatsLink, stream: str, subjects: Sequence[str], after_sequence: int) -> None:
        self._link = link
        self._stream = stream
        self._subjects = list(dict.fromkeys(subjects))
        self._last_sequence = after_sequence  # given to the reader
        self._last_number = 0  # the consumer's own count of what was given
        self._made_at = ""  # of the stream that is read
        self._consumer = ""
        self._pull: Pull | None = None
        self._closed = False

    async def open(self) -> Pull:
        """Make the consumer that goes on after the last sequence given, and ask it for the first batch.

        Raises ConfigError when there is no such stream, or it ends before that sequence.
        """
        await self._drop()
        await self._refuse_shorter_stream()
        config: dict[str, object] = {
            "name": self._link.client.new_inbox().rpartition(".")[2],
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._last_sequence + 1,
            "ack_policy": "none",
            "replay_policy": "instant",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": UNUSED_SECONDS_MAX * NANOSECONDS,
        }
        if self._subjects:
            config["filter_subjects"] = self._subjects
        name = str(config["name"])
        await self._link.call(
            f"CONSUMER.CREATE.{self._stream}.{name}",
            {"stream_name": self._stream, "config": config, "action": "create"},
            seconds_max=self._link.waits.read_seconds_max,
        )
        self._consumer, self._last_number = name, 0
        self._pull = pull = Pull(self._link, self._stream, name)
        await pull.open()
        await pull.ask(BATCH_COUNT_MAX, REQUEST_SECONDS_MAX)
        return pull

    async def __aiter__(self) -> AsyncIterator[Sequence[Message]]:
        """Batches of at most BATCH_COUNT_MAX messages. The next one is on its way while the reader has this one."""
        pause = PAUSE_SECONDS_MIN
        while True:
            if self._closed:
                return
            try:
                batch = await self._take(self._pull or await self.open())
            except TransientError as exc:
                _log.warning("stream read interrupted, going on", stream=self._stream, error=str(exc))
                await self._drop()
                await asyncio.sleep(pause)
                pause = min(2 * pause, PAUSE_SECONDS_MAX)
                continue
            pause = PAUSE_SECONDS_MIN
            if batch:
                yield batch

    async def _take(self, pull: Pull) -> list[Message]:
        """The next messages; asks for more where all that was asked for is here.

        A pull that cannot go on is dropped, never what was read.
        """
        batch: list[Message] = []
        for received in await pull.collect(BATCH_COUNT_MAX):
            number, read = delivered(received, self._stream)
            if number != self._last_number + 1:
                _log.warning("stream read has a gap, reading again", stream=self._stream, sequence=read.sequence)
                await self._drop()
                return batch
            self._last_number, self._last_sequence = number, read.sequence
            batch.append(read)
        if pull.is_broken or self._lacks_its_last(pull):
            await self._drop()
            return batch
        if pull.is_answered:
            try:
                await pull.ask(BATCH_COUNT_MAX, REQUEST_SECONDS_MAX)
            except TransientError:
                await self._drop()
        return batch

    def _lacks_its_last(self, pull: Pull) -> bool:
        """True when messages were sent that never came: where nothing follows them, no number shows that they miss."""
        if pull.waiting_count or pull.sent_count <= self._last_number:
            return False
        lost_count = pull.sent_count - self._last_number
        _log.warning("stream read lacks its last messages, reading again", stream=self._stream, lost_count=lost_count)
        return True

    async def lag_count(self) -> int:
        """Messages that are stored but not given yet. Raises TransientError when the broker is away."""
        if self._pull is None:
            raise TransientError(f"the read of {self._stream} is interrupted; ask again")
        try:
            info = await self._link.call(f"CONSUMER.INFO.{self._stream}.{self._consumer}")
        except ApiError as exc:
            raise TransientError(f"the read of {self._stream} is interrupted: {exc}") from exc
        # What the server sent and we did not give is on the wire or in a buffer: not caught up either.
        return int(info["num_pending"]) + int(info["delivered"]["consumer_seq"]) - self._last_number

    @property
    def is_closed(self) -> bool:
        """True when nobody reads here any more."""
        return self._closed

    async def close(self) -> None:
        """Stop reading; an iteration that waits ends."""
        self._closed = True
        await self._drop()

    async def _drop(self) -> None:
        pull, self._pull = self._pull, None
        if pull is None:
            return
        with contextlib.suppress(TransientError, ApiError, nats.errors.Error):
            await pull.close()
            if self._link.is_up:
                await self._link.call(f"CONSUMER.DELETE.{self._stream}.{self._consumer}")

    async def _refuse_shorter_stream(self) -> None:
        """A stream that ends before what we read of it is another one, or lost data; waiting would skip facts."""
        try:
            info = await self._link.call(f"STREAM.INFO.{self._stream}", seconds_max=self._link.waits.read_seconds_max)
        except ApiError as exc:
            if exc.error_code != NO_STREAM:
                raise
            raise ConfigError("broker", [f"there is no stream {self._stream}; make it with `ensure`"]) from exc
        last_sequence, made_at = int(info["state"]["last_seq"]), str(info["created"])
        is_another, self._made_at = made_at != (self._made_at or made_at), made_at
        if is_another or last_sequence < self._last_sequence:
            mistake = (
                f"stream {self._stream} ends at sequence {last_sequence}, but was read up to {self._last_sequence}: it "
                "was made anew or lost messages; start again from the beginning"
            )
            raise ConfigError("broker", [mistake])
