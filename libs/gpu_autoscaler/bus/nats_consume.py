"""Effect consumer on the broker: shared, durable, every acknowledgement confirmed by the server."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import nats.errors
import structlog

from gpu_autoscaler.bus.nats_link import ApiError, NatsLink, RequestTimedOut
from gpu_autoscaler.bus.nats_pull import Pull
from gpu_autoscaler.bus.nats_read import NO_STREAM, message, place
from gpu_autoscaler.bus.nats_wire import Frame
from gpu_autoscaler.bus.protocol import Delivery, Message
from gpu_autoscaler.bus.streams import NANOSECONDS, ConsumerSpec
from gpu_autoscaler.model.errors import ConfigError, TransientError

NO_CONSUMER = 10014
CONSUMER_EXISTS = 10148
REQUEST_SECONDS_MAX = 30.0  # one pull request; longer waits are several
SETTLE_SECONDS_MAX = 10.0  # a restart of the broker fits in; then the message comes again
ANSWER_SECONDS_MAX = 2.0
# A server that crashed may have forgotten its last deliveries, as has a consumer that was made again. Nothing is said
# to their acknowledgement, and they come anew: there is little to wait for.
STALE_ANSWER_SECONDS_MAX = 0.3
PAUSE_SECONDS = 0.05
REASON_CHARACTERS_MAX = 500

ACK = b"+ACK"
NAK = b"-NAK"
TERM = b"+TERM"
IN_PROGRESS = b"+WPI"

_log = structlog.get_logger(__name__)


class NatsDelivery:
    """A message in our hand. The server confirms what becomes of it."""

    def __init__(self, link: NatsLink, received: Frame, made_again: Callable[[], int]) -> None:
        at = place(received.reply)
        self._link = link
        self._made_again = made_again  # how often the consumer was, by now
        self._origin = (link.connections_count, made_again())
        self._reply = received.reply.decode()
        self._message = message(received, at)
        self._delivered_count = at.delivered_count

    @property
    def message(self) -> Message:
        """The message."""
        return self._message

    @property
    def delivered_count(self) -> int:
        """1 at the first delivery."""
        return self._delivered_count

    async def ack(self) -> None:
        """Confirm. Raises TransientError when the server did not take it: the message comes again."""
        await self._settle(ACK)

    async def nak(self, delay_seconds: float) -> None:
        """Ask for another delivery, not before `delay_seconds`."""
        await self._settle(NAK + b" " + msgspec.json.encode({"delay": int(delay_seconds * NANOSECONDS)}))

    async def term(self, reason: str) -> None:
        """Never deliver again; the reason stands in the server's advisory."""
        words = " ".join(reason.split())[:REASON_CHARACTERS_MAX]
        await self._settle(TERM + b" " + words.encode())

    async def in_progress(self) -> None:
        """Ask for another `ack_wait`."""
        await self._settle(IN_PROGRESS)

    async def _settle(self, verdict: bytes) -> None:
        """Repeat over a broken connection: saying it twice is harmless, an unheard word is work done again."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SETTLE_SECONDS_MAX
        while True:
            is_stale = self._origin != (self._link.connections_count, self._made_again())
            try:
                await self._link.request(
                    self._reply, verdict, STALE_ANSWER_SECONDS_MAX if is_stale else ANSWER_SECONDS_MAX
                )
            except TransientError as exc:
                if isinstance(exc, RequestTimedOut) or loop.time() + PAUSE_SECONDS > deadline:
                    raise TransientError(
                        f"{verdict[:4].decode()} of {self._message.stream} {self._message.sequence} was not confirmed: "
                        f"{exc}; the message will come again"
                    ) from exc
                await asyncio.sleep(PAUSE_SECONDS)
            else:
                return


class NatsEffectConsumer:
    """Pulls from a durable consumer. Make one with `bind`."""

    def __init__(self, link: NatsLink, spec: ConsumerSpec) -> None:
        self._link = link
        self._spec = spec
        self._pull = Pull(link, spec.stream, spec.durable)
        self.is_closed = False
        self._made_again_count = 0
        self._made_at = ""  # of the stream: one of this name that was made anew counts from 1 again
        self._settled_sequence = 0  # up to here everything is acknowledged, as far as the broker has told us

    async def bind(self) -> None:
        """Listen, after a look at what the server has. Raises ConfigError when it is missing or drifted."""
        try:
            self._made_at = await self._stream_made_at()
            actual = (await self._info())["config"]
        except ApiError as exc:
            if exc.error_code not in (NO_CONSUMER, NO_STREAM):
                raise
            mistake = f"consumer {self._spec.durable} of {self._spec.stream} does not exist; make it with `ensure`"
            raise ConfigError("broker", [mistake]) from exc
        drift = self._spec.differences(actual)
        if drift:
            raise ConfigError("broker", drift)
        await self._pull.open()

    async def fetch(self, count_max: int, wait_seconds_max: float) -> Sequence[Delivery]:
        """Return up to `count_max` deliveries, none after waiting.

        Raises TransientError when the broker is away or the consumer was deleted under us, which is made again;
        ConfigError when the stream was deleted.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_seconds_max
        await self._link.wait_until_up()
        while True:
            try:
                if not self._pull.waiting_count:
                    remaining = min(max(deadline - loop.time(), 0.01), REQUEST_SECONDS_MAX)
                    await self._pull.ask(count_max, remaining)
                received = await self._pull.collect(count_max)
            except TransientError:
                await self._mend()
                raise
            if received or loop.time() >= deadline:
                return [NatsDelivery(self._link, one, self._made_again) for one in received]
            await asyncio.sleep(min(PAUSE_SECONDS, max(deadline - loop.time(), 0)))

    async def pending_count(self) -> int:
        """Messages not yet delivered to anybody. Raises as `fetch` does, also while nothing is fetched."""
        try:
            return int((await self._info())["num_pending"])
        except ApiError as exc:
            if exc.error_code not in (NO_CONSUMER, NO_STREAM):
                raise
            await self._make_again(exc)
            raise TransientError(f"consumer {self._spec.durable} of {self._spec.stream} was made again") from exc

    async def close(self) -> None:
        """Give back what arrived and was not fetched, so that another replica has it at once."""
        self.is_closed = True
        with contextlib.suppress(TransientError, nats.errors.Error):
            for received in await self._pull.close():
                await self._link.tell(received.reply.decode(), NAK)

    async def _info(self) -> dict[str, Any]:
        info = await self._link.call(
            f"CONSUMER.INFO.{self._spec.stream}.{self._spec.durable}", seconds_max=self._link.waits.read_seconds_max
        )
        self._settled_sequence = max(self._settled_sequence, int(info["ack_floor"]["stream_seq"]))
        return info

    def _made_again(self) -> int:
        return self._made_again_count

    async def _stream_made_at(self) -> str:
        info = await self._link.call(f"STREAM.INFO.{self._spec.stream}", seconds_max=self._link.waits.read_seconds_max)
        return str(info["created"])

    async def _mend(self) -> None:
        """Make the consumer again where somebody deleted it. Raises ConfigError when its stream is gone as well."""
        if not self._link.is_up:
            return
        with contextlib.suppress(TransientError):
            try:
                await self._info()
            except ApiError as exc:
                if exc.error_code not in (NO_CONSUMER, NO_STREAM):
                    raise
                await self._make_again(exc)

    async def _make_again(self, why: ApiError) -> None:
        """From where the deleted one was, not from the oldest message: of what is done little comes a second time.

        That little is what was acknowledged since we last heard of it; a repeat is harmless, as after any crash.
        """
        spec = self._spec
        try:
            is_same = why.error_code == NO_CONSUMER and await self._stream_made_at() == self._made_at
        except ApiError:
            is_same = False
        if not is_same:
            mistake = (
                f"stream {spec.stream} was deleted while its consumer {spec.durable} was in use; find out by whom, "
                "then start again: `ensure` makes both anew"
            )
            raise ConfigError("broker", [mistake]) from why
        config = {
            **spec.config(),
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._settled_sequence + 1,
        }
        body = {"stream_name": spec.stream, "action": "create", "config": config}
        try:
            await self._link.call(f"CONSUMER.CREATE.{spec.stream}.{spec.durable}", body)
        except ApiError as exc:
            if exc.error_code != CONSUMER_EXISTS:  # another replica was first
                raise
        self._made_again_count += 1
        _log.error(
            "consumer was deleted while it was in use, made again; find out by whom",
            durable=spec.durable, stream=spec.stream, after_sequence=self._settled_sequence,
        )  # fmt: skip
