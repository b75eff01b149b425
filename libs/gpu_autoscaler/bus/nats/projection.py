"""Ordered read of a stream by one process: no effects, no repeats, no gaps, whatever happens to the connection.

The server-side consumer is ephemeral: it needs no acknowledgments, lives in memory, and is recreated behind the last
returned message whenever the connection broke or a message is missing.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import nats.errors
import structlog

from gpu_autoscaler.bus.differences import NANOSECONDS
from gpu_autoscaler.bus.nats.link import ApiError, NatsLink
from gpu_autoscaler.bus.nats.pull import Pull
from gpu_autoscaler.bus.nats.read import NO_STREAM, read_delivery
from gpu_autoscaler.bus.protocol import Message, refuse_gap
from gpu_autoscaler.model.errors import ConfigError, TransientError

BATCH_COUNT_MAX = 4000
REQUEST_SECONDS_MAX = 5.0
UNUSED_SECONDS_MAX = 300  # the server drops a consumer after this long without requests; a slow fold is faster
PAUSE_SECONDS_MIN = 0.05
PAUSE_SECONDS_MAX = 2.0

_log = structlog.get_logger(__name__)


class NatsProjection:
    """Reads one stream: `open`, iterate once, `close`."""

    def __init__(self, link: NatsLink, stream: str, subjects: Sequence[str], after_sequence: int) -> None:
        self._link = link
        self._stream = stream
        self._subjects = list(dict.fromkeys(subjects))
        self._last_sequence = after_sequence  # of the last returned message
        self._seen_sequence = after_sequence  # everything the read is about was returned up to here; 0: unknown yet
        self._last_number = 0  # of that message, as the consumer counts deliveries
        self._created_at = ""  # of the stream
        self._consumer = ""
        self._pull: Pull | None = None
        self._closed = False

    async def open(self) -> Pull:
        """Create a consumer that continues behind the last returned message, and request the first batch.

        Raises ConfigError when the stream does not exist or ends before that message.
        """
        await self._drop()
        await self._check_stream()
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
            seconds_max=self._link.timeouts.read_seconds_max,
        )
        self._consumer, self._last_number = name, 0
        self._pull = pull = Pull(self._link, self._stream, name)
        await pull.open()
        await pull.request(BATCH_COUNT_MAX, REQUEST_SECONDS_MAX)
        return pull

    async def __aiter__(self) -> AsyncIterator[Sequence[Message]]:
        """Batches of at most BATCH_COUNT_MAX messages; the next one is requested before the current one is returned."""
        pause = PAUSE_SECONDS_MIN
        while True:
            if self._closed:
                return
            try:
                batch = await self._take(self._pull or await self.open())
            except TransientError as exc:
                _log.warning("stream read interrupted, retry scheduled", stream=self._stream, error=str(exc))
                await self._drop()
                await asyncio.sleep(pause)
                pause = min(2 * pause, PAUSE_SECONDS_MAX)
                continue
            pause = PAUSE_SECONDS_MIN
            if batch:
                yield batch

    async def _take(self, pull: Pull) -> list[Message]:
        """Return the next messages and request more when the last request is complete.

        A broken pull is dropped; messages already read are kept.
        """
        batch: list[Message] = []
        for received in await pull.collect(BATCH_COUNT_MAX):
            number, read = read_delivery(received, self._stream)
            if number != self._last_number + 1:
                _log.warning("gap detected in stream read, read restarted", stream=self._stream, sequence=read.sequence)
                await self._drop()
                return batch
            if read.sequence != self._last_sequence + 1 and not self._subjects:
                await self._check_stream()  # were messages deleted in the middle, or discarded unread?
            self._last_number, self._last_sequence = number, read.sequence
            self._seen_sequence = max(self._seen_sequence, read.sequence)
            batch.append(read)
        if pull.is_broken or self._lost_last_messages(pull):
            await self._drop()
            return batch
        if pull.is_answered:
            try:
                await pull.request(BATCH_COUNT_MAX, REQUEST_SECONDS_MAX)
            except TransientError:
                await self._drop()
        return batch

    def _lost_last_messages(self, pull: Pull) -> bool:
        """True when sent messages never arrived: at the end of a stream no later number reveals the gap."""
        if pull.waiting_count or pull.sent_count <= self._last_number:
            return False
        lost_count = pull.sent_count - self._last_number
        _log.warning("last messages lost in stream read, read restarted", stream=self._stream, lost_count=lost_count)
        return True

    async def lag_count(self) -> int:
        """Messages that are stored but not yet returned.

        Raises TransientError when the broker is away, ConfigError when messages were discarded unread.
        """
        if self._pull is None:
            raise TransientError(f"read of stream {self._stream} is interrupted; retry")
        try:
            last_sequence = await self._check_stream()
            info = await self._link.call(f"CONSUMER.INFO.{self._stream}.{self._consumer}")
        except ApiError as exc:
            raise TransientError(f"read of stream {self._stream} is interrupted: {exc}") from exc
        # Messages sent but not yet returned are on the wire or in a buffer: not caught up either.
        lag_count = int(info["num_pending"]) + int(info["delivered"]["consumer_seq"]) - self._last_number
        if lag_count == 0:
            self._seen_sequence = max(self._seen_sequence, last_sequence)
        return lag_count

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._closed

    async def close(self) -> None:
        """Stop reading; a waiting iteration ends."""
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

    async def _check_stream(self) -> int:
        """Return the last sequence of the stream.

        Raises ConfigError for a recreated or truncated stream, and when it has discarded messages unread: continuing
        would skip facts.
        """
        read_up_to = self._last_sequence  # more may be read while the broker answers
        try:
            info = await self._link.call(
                f"STREAM.INFO.{self._stream}", seconds_max=self._link.timeouts.read_seconds_max
            )
        except ApiError as exc:
            if exc.error_code != NO_STREAM:
                raise
            raise ConfigError("broker", [f"stream {self._stream} does not exist; create it with `ensure`"]) from exc
        first_sequence, last_sequence = int(info["state"]["first_seq"]), int(info["state"]["last_seq"])
        created_at = str(info["created"])
        is_another, self._created_at = created_at != (self._created_at or created_at), created_at
        if is_another or last_sequence < read_up_to:
            error = (
                f"stream {self._stream} ends at sequence {last_sequence}, but was read up to {read_up_to}: it was "
                "recreated or lost messages; restart the process"
            )
            raise ConfigError("broker", [error])
        refuse_gap(self._stream, self._seen_sequence, first_sequence)
        return last_sequence
