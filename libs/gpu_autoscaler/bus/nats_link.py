"""One connection to the broker: requests whose answers are awaited, and what happens when it breaks.

Used by the other `nats_*` modules. Every request in flight fails at once when the connection is lost, so that callers
repeat it after the reconnect instead of waiting for an answer that cannot come.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import nats.errors
import structlog
from nats.aio.client import Client

from gpu_autoscaler.bus.nats_wire import Frame, Tap, pieces_count, send, tap
from gpu_autoscaler.bus.streams import SERVER_PAYLOAD_BYTES_MAX
from gpu_autoscaler.model.errors import PermanentError, TransientError

PROOF_SECONDS_MAX = 5.0  # where an answer is overdue: a message to ourselves must come back within this
# What was handed over and is not on the wire. Beyond it nothing more is taken: the caller waits, as on every bus that
# is away. The connection itself may hold as much again.
UNSENT_BYTES_MAX = 4 * SERVER_PAYLOAD_BYTES_MAX
# A decision of seconds keeps this process from reading what has come meanwhile: before silence is called so, there is
# another look after this long, and others while more is read: an answer stands behind what came before it.
SECOND_LOOK_SECONDS = 0.2
LOOKS_COUNT_MAX = 20
TROUBLE_SECONDS = 10.0  # a failure says this long that the broker does not do its work, unless something went well
RECONNECT_SECONDS = 0.25
CLOSE_SECONDS_MAX = 2.0
NO_RESPONDERS = "503"

_log = structlog.get_logger(__name__)


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """How long to wait for the broker, wall time."""

    connect_seconds_max: float = 10.0
    request_seconds_max: float = 5.0  # one question, one answer
    publish_seconds_max: float = 30.0  # all tries of one message
    # No answer to anything for so long: what is out is sent again. A leader that died answers nothing, and its
    # successor is there seconds before `request_seconds_max` is over.
    silence_seconds_max: float = 1.0
    read_seconds_max: float = 2.0  # what a reader asks on its way back to work, for the same reason
    no_stream_seconds_max: float = 5.0  # a cluster that elects a leader says for about 4 s that there is no stream


class NoResponders(TransientError):
    """Nobody listens on the subject now: no such stream or consumer, or JetStream is not up yet."""


class RequestTimedOut(TransientError):
    """The connection stands, but no answer came in time."""


class ApiError(PermanentError):
    """JetStream refused a request; `error_code` is the server's own number."""

    def __init__(self, error_code: int, description: str) -> None:
        super().__init__(f"{description} (JetStream error {error_code})")
        self.error_code = error_code


class NatsLink:
    """A connection that never stops trying to come back. Make one with `nats_open.py: open_link`."""

    def __init__(self, client: Client, waits: Waits, on_closed: Callable[[], None] | None) -> None:
        self.client = client
        self.waits = waits
        self.listeners: set[Callable[[], None]] = set()  # called when the connection breaks
        self._up = asyncio.Event()
        self._on_closed = on_closed
        self._closing = False
        self._answers: dict[bytes, asyncio.Future[Frame]] = {}
        self._number = 0
        self.connections_count = 0  # so that one can tell what came over an earlier connection
        self._inbox = ""
        self._troubles: dict[str, tuple[str, float]] = {}  # by what does not go well: why, and since when it stands
        self._proof: asyncio.Task[None] | None = None
        self.last_error = ""
        self.refusal = ""  # the server's word on our credentials

    @property
    def is_up(self) -> bool:
        """True while the broker answers, as far as is known."""
        return self._up.is_set() and self.client.is_connected

    @property
    def trouble(self) -> str | None:
        """Why the broker does not do its work now; None while it does, as far as is known."""
        if not self.is_up:
            return "the broker does not answer; trying again"
        oldest = asyncio.get_running_loop().time() - TROUBLE_SECONDS
        return next((f"{what}: {why}" for what, (why, at) in self._troubles.items() if at > oldest), None)

    def failed(self, what: str, why: str) -> None:
        """Say that something does not go well on a connection that stands."""
        self._troubles[what] = (why, asyncio.get_running_loop().time())

    def went_well(self, what: str) -> None:
        """Say that it does again."""
        if self._troubles:
            self._troubles.pop(what, None)

    async def is_silent(self, has_come: Callable[[], bool]) -> bool:
        """Look again for what is overdue: it may be there and only not be read yet."""
        for _ in range(LOOKS_COUNT_MAX):
            heard_count = pieces_count(self.client)
            await asyncio.sleep(SECOND_LOOK_SECONDS)
            if has_come():
                return False
            if pieces_count(self.client) == heard_count:
                return True
        return True

    def doubt(self) -> None:
        """An answer is overdue: find out whether the connection carries anything, and break it where it does not.

        Packets that are dropped without a word leave it standing for minutes; one that is broken is made anew.
        """
        if self.is_up and (self._proof is None or self._proof.done()):
            self._proof = asyncio.create_task(self._prove())

    async def _prove(self) -> None:
        # A message to ourselves. The client's own ping, given up before its pong, would end the client's reading.
        connection, heard_count = self.connections_count, pieces_count(self.client)
        subject, arrival = self._expect()
        with contextlib.suppress(TimeoutError, TransientError):
            async with asyncio.timeout(PROOF_SECONDS_MAX):
                while not await self._told(subject):  # noqa: ASYNC110 - the socket has no event for us
                    await asyncio.sleep(RECONNECT_SECONDS)
                await asyncio.shield(arrival)
        # While anything comes, the connection is not dead; this process is slow, and what is on its way would be lost.
        if not await self.is_silent(arrival.done) or pieces_count(self.client) != heard_count:
            arrival.cancel()
            return
        if not self._closing and self.is_up and self.connections_count == connection:
            _log.warning("broker is silent, connecting anew", server=self._server(), seconds=PROOF_SECONDS_MAX)
            _abort(self.client)

    async def _told(self, subject: str) -> bool:
        with contextlib.suppress(TransientError):
            await self.tell(subject, b"")
            return True
        return False

    async def on_connected(self) -> None:
        """Called by the client when the connection stands, first or again."""
        if not self._inbox:
            self._inbox = self.client.new_inbox()
            await tap(self.client, f"{self._inbox}.*", self)
        else:
            _log.warning("broker is back", server=self._server())
        self.connections_count += 1
        self._up.set()

    async def on_disconnected(self) -> None:
        """Called by the client when the connection broke: nothing that was asked will be answered."""
        self._up.clear()
        if not self._closing:
            _log.warning("broker is away, trying to reach it again", server=self._server())
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(TransientError("the connection to the broker broke before it answered"))
        for listener in tuple(self.listeners):
            listener()

    async def on_closed(self) -> None:
        """Called by the client when it gave up for good."""
        if not self._closing:
            _log.error("connection to the broker is closed for good", server=self._server(), error=self.last_error)
            if self._on_closed is not None:
                self._on_closed()

    async def on_error(self, error: Exception) -> None:
        """Called by the client for errors that belong to no request."""
        self.last_error = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if "authorization violation" in str(error).lower():
            self.refusal = self.last_error  # the broken connection that follows would hide it
        if "permissions violation" in str(error).lower():
            # The server only says so here; the request itself just never gets its answer.
            self.failed("permissions", self.last_error)
            _log.error("broker refuses a subject to this user, extend its permissions", error=self.last_error)
        else:
            _log.debug("broker connection error", error=self.last_error)

    async def wait_until_up(self) -> None:
        """Return when the connection stands. Raises TransientError after `request_seconds_max`."""
        if self.is_up:
            return
        try:
            async with asyncio.timeout(self.waits.request_seconds_max):
                await self._up.wait()
        except TimeoutError as exc:
            raise TransientError(f"no broker answers at {self._server()}: {self.last_error or 'still away'}") from exc

    async def ask(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> asyncio.Future[Frame]:
        """Send a request; the future is its answer, or TransientError when the connection breaks first.

        The caller limits the wait and cancels a future that it no longer wants.
        """
        reply, answer = self._expect()
        try:
            await self.tell(subject, payload, reply=reply, headers=headers)
        except TransientError as exc:
            if not answer.done():
                answer.set_exception(exc)
        return answer

    def _expect(self) -> tuple[str, asyncio.Future[Frame]]:
        """A subject of our own, and what will come to it."""
        self._number += 1
        token = b"%d" % self._number
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda _: self._answers.pop(token, None))
        self._answers[token] = answer
        return f"{self._inbox}.{self._number}", answer

    async def tell(
        self, subject: str, payload: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a message without waiting for anything. Raises TransientError when the broker is away."""
        with self._away():
            await self.client.publish(subject, payload, reply=reply, headers=dict(headers) if headers else None)

    async def write(self, commands: list[bytes]) -> None:
        """Send many messages (`nats_wire.py: command`) in one piece. Raises TransientError when the broker is away."""
        with self._away():
            await send(self.client, commands)

    async def listen(self, taker: Tap) -> str:
        """Return an inbox whose every message, `<inbox>.<token>`, goes to `taker`, also after a reconnect."""
        with self._away():
            inbox = self.client.new_inbox()
            await tap(self.client, f"{inbox}.*", taker)
        return inbox

    @contextlib.contextmanager
    def _away(self) -> Iterator[None]:
        if not self.is_up:
            # Buffered messages would overtake those that were lost in flight.
            raise TransientError(f"the broker at {self._server()} is away")
        if self.client.pending_data_size > UNSENT_BYTES_MAX:
            self.doubt()
            raise TransientError(f"the broker at {self._server()} does not take what is sent")
        try:
            yield
        except (nats.errors.ConnectionClosedError, nats.errors.OutboundBufferLimitError, OSError) as exc:
            raise TransientError(f"the broker at {self._server()} is away: {exc}") from exc

    async def request(self, subject: str, payload: bytes, seconds_max: float | None = None) -> Frame:
        """Return the answer. Raises RequestTimedOut, NoResponders, or another TransientError when the connection breaks."""
        await self.wait_until_up()
        answer = await self.ask(subject, payload)
        try:
            async with asyncio.timeout(seconds_max or self.waits.request_seconds_max):
                message = await asyncio.shield(answer)
        except TimeoutError as exc:
            if await self.is_silent(answer.done):
                self.doubt()
                raise RequestTimedOut(f"the broker did not answer on {subject} in time") from exc
            message = answer.result()
        finally:
            answer.cancel()
        if message.status[0] == NO_RESPONDERS:
            raise NoResponders(f"nobody answers on {subject}: no such stream or consumer, or JetStream is not up")
        return message

    async def call(
        self, operation: str, body: Mapping[str, Any] | None = None, *, seconds_max: float | None = None
    ) -> dict[str, Any]:
        """Ask the JetStream API, e.g. `STREAM.INFO.JOB`. Raises ApiError, NoResponders, TransientError."""
        payload = b"" if body is None else msgspec.json.encode(body)
        message = await self.request(f"$JS.API.{operation}", payload, seconds_max)
        answer: dict[str, Any] = msgspec.json.decode(message.payload)
        error = answer.get("error")
        if error:
            if error.get("code") == 503:
                raise NoResponders(f"JetStream is not ready: {error.get('description')}")
            raise ApiError(int(error.get("err_code", 0)), str(error.get("description", "no reason given")))
        return answer

    async def close(self) -> None:
        """Flush what is under way and leave, within CLOSE_SECONDS_MAX each."""
        self._closing = True
        if self._proof is not None:
            self._proof.cancel()
        with contextlib.suppress(TimeoutError, nats.errors.Error, OSError):
            if self.client.is_connected:
                await asyncio.wait_for(self.client.flush(), CLOSE_SECONDS_MAX)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.client.close(), CLOSE_SECONDS_MAX)

    def take(self, frames: Sequence[Frame]) -> None:
        """Answers: give each to who asked."""
        for frame in frames:
            answer = self._answers.get(frame.subject.rpartition(b".")[2])
            if answer is not None and not answer.done():
                answer.set_result(frame)

    def _server(self) -> str:
        url = self.client.connected_url
        return url.netloc.rpartition("@")[2] if url is not None else ", ".join(s.netloc for s in self.client.servers)


def _abort(client: Client) -> None:
    """End the connection without a goodbye: one that waits until all is sent would wait for a quarter of an hour."""
    transport = getattr(getattr(client, "_transport", None), "_io_writer", None)
    if transport is not None:
        transport.transport.abort()
