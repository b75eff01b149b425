"""Effect consumers on NATS: shared, durable, with every acknowledgment confirmed by the server."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import nats.errors
import structlog

from gpu_autoscaler.bus.differences import NANOSECONDS, refuse_differences
from gpu_autoscaler.bus.nats.link import ApiError, NatsLink, RequestTimedOut
from gpu_autoscaler.bus.nats.pull import Pull
from gpu_autoscaler.bus.nats.read import NO_STREAM, message, parse_ack_subject
from gpu_autoscaler.bus.nats.wire import Frame
from gpu_autoscaler.bus.protocol import Delivery, Message
from gpu_autoscaler.bus.streams import ConsumerSpec
from gpu_autoscaler.model.errors import ConfigError, TransientError

NO_CONSUMER = 10014
CONSUMER_EXISTS = 10148
REQUEST_SECONDS_MAX = 30.0  # of one pull request; longer waits take several
ANSWER_SECONDS_MAX = 10.0  # longer than a restart of the broker; then the message is redelivered
CONFIRM_SECONDS_MAX = 2.0
# A crashed server may have lost its last deliveries, as has a recreated consumer. It never confirms their
# acknowledgments and redelivers them: a short wait suffices.
STALE_CONFIRM_SECONDS_MAX = 0.3
PAUSE_SECONDS = 0.05
REASON_CHARACTERS_MAX = 500

ACK = b"+ACK"
NAK = b"-NAK"
TERM = b"+TERM"
IN_PROGRESS = b"+WPI"

_log = structlog.get_logger(__name__)


class NatsDelivery:
    """A delivered message. The server confirms its acknowledgment."""

    def __init__(self, link: NatsLink, received: Frame, recreations: Callable[[], int]) -> None:
        at = parse_ack_subject(received.reply)
        self._link = link
        self._recreations = recreations  # number of recreations of the consumer so far
        self._origin = (link.connections_count, recreations())
        self._reply = received.reply.decode()
        self._message = message(received, at)
        self._delivered_count = at.delivered_count

    @property
    def message(self) -> Message:
        return self._message

    @property
    def delivered_count(self) -> int:
        return self._delivered_count

    async def ack(self) -> None:
        """Confirm. Raises TransientError when the server did not accept it: the message is redelivered."""
        await self._answer(ACK)

    async def nak(self, delay_seconds: float) -> None:
        """Request redelivery, not before `delay_seconds`."""
        await self._answer(NAK + b" " + msgspec.json.encode({"delay": int(delay_seconds * NANOSECONDS)}))

    async def term(self, reason: str) -> None:
        """Never deliver again; the server's advisory carries the reason."""
        text = " ".join(reason.split())[:REASON_CHARACTERS_MAX]
        await self._answer(TERM + b" " + text.encode())

    async def in_progress(self) -> None:
        """Extend the `ack_wait`."""
        await self._answer(IN_PROGRESS)

    async def _answer(self, answer: bytes) -> None:
        """Send the answer, retrying after a broken connection: a repetition is harmless, a lost answer repeats work."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ANSWER_SECONDS_MAX
        while True:
            is_stale = self._origin != (self._link.connections_count, self._recreations())
            try:
                await self._link.request(
                    self._reply, answer, STALE_CONFIRM_SECONDS_MAX if is_stale else CONFIRM_SECONDS_MAX
                )
            except TransientError as exc:
                if isinstance(exc, RequestTimedOut) or loop.time() + PAUSE_SECONDS > deadline:
                    raise TransientError(
                        f"{answer[:4].decode()} of {self._message.stream} {self._message.sequence} was not confirmed: "
                        f"{exc}; the message will be redelivered"
                    ) from exc
                await asyncio.sleep(PAUSE_SECONDS)
            else:
                return


class ConsumerPosition:
    """What this process knows of a durable consumer. It outlives the readers: a later one recreates it there too."""

    def __init__(self) -> None:
        self.stream_created_at = ""  # a recreated stream starts at sequence 1 again; empty: never bound
        self.acknowledged_sequence = 0  # all messages up to here are acknowledged, by the last report of the broker
        self.recreations_count = 0


class NatsEffectConsumer:
    """Pulls from a durable consumer. Call `bind` before use."""

    def __init__(self, link: NatsLink, spec: ConsumerSpec, position: ConsumerPosition) -> None:
        self._link = link
        self._spec = spec
        self._position = position
        self._pull = Pull(link, spec.stream, spec.durable)
        self.is_closed = False

    async def bind(self) -> None:
        """Compare with the server's consumer and subscribe; recreate it if it was deleted since this process had it.

        Raises ConfigError when it is missing otherwise, or differs.
        """
        position = self._position
        is_known = bool(position.stream_created_at)
        try:
            position.stream_created_at = position.stream_created_at or await self._read_stream_created_at()
            actual = (await self._info())["config"]
        except ApiError as exc:
            if exc.error_code not in (NO_CONSUMER, NO_STREAM):
                raise
            if not is_known:
                error = (
                    f"consumer {self._spec.durable} of stream {self._spec.stream} does not exist; create it with "
                    "`ensure`"
                )
                raise ConfigError("broker", [error]) from exc
            await self._recreate(exc)
            actual = (await self._info())["config"]
        found = self._spec.differences(actual)
        if not all(difference.is_tolerated for difference in found):
            refuse_differences(found)
        await self._pull.open()

    async def fetch(self, count_max: int, wait_seconds_max: float) -> Sequence[Delivery]:
        """Return up to `count_max` deliveries; none when the wait ends.

        Raises TransientError when the broker is away or the consumer was deleted (it is recreated), ConfigError when
        the stream was deleted.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_seconds_max
        await self._link.wait_until_up()
        while True:
            try:
                if not self._pull.waiting_count:
                    remaining = min(max(deadline - loop.time(), 0.01), REQUEST_SECONDS_MAX)
                    await self._pull.request(count_max, remaining)
                received = await self._pull.collect(count_max)
            except TransientError:
                await self._recreate_if_deleted()
                raise
            if received or loop.time() >= deadline:
                return [NatsDelivery(self._link, frame, self._recreations) for frame in received]
            await asyncio.sleep(min(PAUSE_SECONDS, max(deadline - loop.time(), 0)))

    async def pending_count(self) -> int:
        """Messages not yet delivered to any process. Raises as `fetch` does."""
        try:
            return int((await self._info())["num_pending"])
        except ApiError as exc:
            if exc.error_code not in (NO_CONSUMER, NO_STREAM):
                raise
            await self._recreate(exc)
            raise TransientError(f"consumer {self._spec.durable} of {self._spec.stream} was recreated") from exc

    async def acknowledged_sequence(self) -> int:
        """Return the sequence up to which every message is acknowledged. Raises as `fetch` does."""
        last_sequence = await self._last_sequence()  # first: what is stored afterwards may not be counted yet
        try:
            info = await self._info()
        except ApiError as exc:
            raise TransientError(f"consumer {self._spec.durable} of {self._spec.stream}: {exc}") from exc
        is_idle = not info["num_pending"] and not info["num_ack_pending"]
        acknowledged_sequence = int(info["ack_floor"]["stream_seq"])
        return max(last_sequence, acknowledged_sequence) if is_idle else acknowledged_sequence

    async def close(self) -> None:
        """Return unfetched messages, so that another replica gets them at once."""
        self.is_closed = True
        with contextlib.suppress(TransientError, nats.errors.Error):
            for received in await self._pull.close():
                await self._link.send(received.reply.decode(), NAK)

    async def _info(self) -> dict[str, Any]:
        info = await self._link.call(
            f"CONSUMER.INFO.{self._spec.stream}.{self._spec.durable}", seconds_max=self._link.timeouts.read_seconds_max
        )
        position = self._position
        position.acknowledged_sequence = max(position.acknowledged_sequence, int(info["ack_floor"]["stream_seq"]))
        return info

    def _recreations(self) -> int:
        return self._position.recreations_count

    async def _read_stream_created_at(self) -> str:
        return str((await self._stream_info())["created"])

    async def _last_sequence(self) -> int:
        try:
            return int((await self._stream_info())["state"]["last_seq"])
        except ApiError as exc:
            raise TransientError(f"stream {self._spec.stream}: {exc}") from exc

    async def _stream_info(self) -> dict[str, Any]:
        return await self._link.call(
            f"STREAM.INFO.{self._spec.stream}", seconds_max=self._link.timeouts.read_seconds_max
        )

    async def _recreate_if_deleted(self) -> None:
        """Recreate the consumer if it was deleted. Raises ConfigError when its stream was deleted too."""
        if not self._link.is_up:
            return
        with contextlib.suppress(TransientError):
            try:
                await self._info()
            except ApiError as exc:
                if exc.error_code not in (NO_CONSUMER, NO_STREAM):
                    raise
                await self._recreate(exc)

    async def _recreate(self, reason: ApiError) -> None:
        """Recreate the consumer at its last reported position, so that few handled messages are redelivered.

        Those acknowledged since that report are handled again, which is harmless, as after any crash.
        """
        spec, position = self._spec, self._position
        try:
            is_same = (
                reason.error_code == NO_CONSUMER and await self._read_stream_created_at() == position.stream_created_at
            )
        except ApiError:
            is_same = False
        if not is_same:
            error = (
                f"stream {spec.stream} was deleted while its consumer {spec.durable} was in use; find out by whom, "
                "then restart: `ensure` creates both"
            )
            raise ConfigError("broker", [error]) from reason
        config = spec.config_from(position.acknowledged_sequence)
        body = {"stream_name": spec.stream, "action": "create", "config": config}
        try:
            await self._link.call(f"CONSUMER.CREATE.{spec.stream}.{spec.durable}", body)
        except ApiError as exc:
            if exc.error_code != CONSUMER_EXISTS:  # another replica recreated it
                raise
        position.recreations_count += 1
        _log.error(
            "deleted consumer recreated; find out who deleted it",
            durable=spec.durable, stream=spec.stream, after_sequence=position.acknowledged_sequence,
        )  # fmt: skip
