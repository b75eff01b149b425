"""One connection to the broker: requests whose answers are awaited, and what happens when it breaks.

Used by the other `nats_*` modules. Every request in flight fails at once when the connection is lost, so that callers
repeat it after the reconnect instead of waiting for an answer that cannot come.
"""

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import nats.errors
import structlog
from nats.aio.client import Client

from gpu_autoscaler.bus.nats.clients import TlsMissing, Wire
from gpu_autoscaler.bus.nats.wire import Command, Frame, FrameReceiver
from gpu_autoscaler.bus.streams import SERVER_PAYLOAD_BYTES_MAX
from gpu_autoscaler.model.errors import PermanentError, TransientError

VERIFY_SECONDS_MAX = 5.0  # after an overdue answer: a message to ourselves must arrive within this
# Bytes handed over and not yet on the wire. Beyond this nothing more is accepted and the caller waits, as while the
# broker is away. The connection itself may buffer as much again.
UNSENT_BYTES_MAX = 4 * SERVER_PAYLOAD_BYTES_MAX
# A decision that takes seconds delays reading. Before the broker counts as silent, the check is repeated after this
# long, and further while data is being read, as the answer may be queued behind it.
RECHECK_SECONDS = 0.2
RECHECKS_COUNT_MAX = 20
FAILURE_SECONDS = 10.0  # how long a failure is reported, unless the operation succeeds again
RECONNECT_SECONDS = 0.25
CLOSE_SECONDS_MAX = 2.0
CLOSED_POLL_SECONDS = 1.0
NO_RESPONDERS = "503"

_log = structlog.get_logger(__name__)


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """How long to wait for the broker, wall time."""

    connect_seconds_max: float = 10.0
    request_seconds_max: float = 5.0  # of one request
    publish_seconds_max: float = 30.0  # of all attempts to publish one message
    # After this long without any answer, messages in flight are sent again. A dead leader answers nothing, and its
    # successor is elected seconds before `request_seconds_max` ends.
    silence_seconds_max: float = 1.0
    read_seconds_max: float = 2.0  # of a reader's requests on recovery, for the same reason
    no_stream_seconds_max: float = 5.0  # during a leader election a cluster reports no stream for about 4 s


class NoResponders(TransientError):
    """No responders on the subject: no such stream or consumer, or JetStream is not ready yet."""


class RequestTimedOut(TransientError):
    """No answer in time on an open connection."""


class ApiError(PermanentError):
    """JetStream refused a request; `error_code` is the server's own number."""

    def __init__(self, error_code: int, description: str) -> None:
        super().__init__(f"{description} (JetStream error {error_code})")
        self.error_code = error_code


class NatsLink:
    """A connection that reconnects without a limit. Create with `open.py: open_link`."""

    def __init__(self, wire: Wire, timeouts: Timeouts, on_closed: Callable[[], None] | None) -> None:
        self.wire = wire
        self.client = wire.client
        self.timeouts = timeouts
        self.listeners: set[Callable[[], None]] = set()  # called when the connection breaks
        self._up = asyncio.Event()
        self._on_closed = on_closed
        self._closing = False
        self._answers: dict[bytes, asyncio.Future[Frame]] = {}
        self._number = 0
        self.connections_count = 0  # distinguishes messages of an earlier connection
        self._inbox = ""
        self._failures: dict[str, tuple[str, float]] = {}  # by operation: error and time
        self._verification: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._is_lost = False
        self.last_error = ""
        self.refusal = ""  # the server's error about our credentials
        self.tls_failure = ""  # why no encrypted connection could be opened

    @property
    def is_up(self) -> bool:
        """True while the broker answers, as far as known."""
        return self._up.is_set() and self.client.is_connected

    @property
    def failure(self) -> str | None:
        """Why the broker does not work now; None while it works, as far as known."""
        if not self.is_up:
            return "broker does not answer; reconnecting"
        oldest = asyncio.get_running_loop().time() - FAILURE_SECONDS
        return next((f"{name}: {error}" for name, (error, at) in self._failures.items() if at > oldest), None)

    def report_failure(self, operation: str, error: str) -> None:
        """Record that an operation fails on an open connection."""
        self._failures[operation] = (error, asyncio.get_running_loop().time())

    def report_success(self, operation: str) -> None:
        """Record that an operation succeeded."""
        if self._failures:
            self._failures.pop(operation, None)

    async def is_unresponsive(self, has_arrived: Callable[[], bool]) -> bool:
        """Check again for an overdue answer, which may have arrived without being read yet."""
        for _ in range(RECHECKS_COUNT_MAX):
            reads_before = self.wire.reads_count
            await asyncio.sleep(RECHECK_SECONDS)
            if has_arrived():
                return False
            if self.wire.reads_count == reads_before:
                return True
        return True

    def verify(self) -> None:
        """After an overdue answer, verify that the connection carries data, and break it otherwise.

        Silently dropped packets would leave it open for minutes; a broken connection is reopened.
        """
        if self.is_up and (self._verification is None or self._verification.done()):
            self._verification = asyncio.create_task(self._verify())

    async def _verify(self) -> None:
        # By a message to ourselves. The client's own ping, canceled before its pong, would end the client's reading.
        connection, reads_before = self.connections_count, self.wire.reads_count
        subject, arrival = self._expect_answer()
        with contextlib.suppress(TimeoutError, TransientError):
            async with asyncio.timeout(VERIFY_SECONDS_MAX):
                while not await self._can_send(subject):  # noqa: ASYNC110 - the socket has no event
                    await asyncio.sleep(RECONNECT_SECONDS)
                await asyncio.shield(arrival)
        # While data arrives the connection works and this process is slow; breaking it would lose data in flight.
        if not await self.is_unresponsive(arrival.done) or self.wire.reads_count != reads_before:
            arrival.cancel()
            return
        if not self._closing and self.is_up and self.connections_count == connection:
            _log.warning("broker silent, reconnect started", server=self._server(), seconds=VERIFY_SECONDS_MAX)
            abort(self.client)

    async def _can_send(self, subject: str) -> bool:
        with contextlib.suppress(TransientError):
            await self.send(subject, b"")
            return True
        return False

    async def on_connected(self) -> None:
        """Called by the client after each connect and reconnect."""
        if not self._inbox:
            self._inbox = self.client.new_inbox()
            await self.wire.subscribe(f"{self._inbox}.*", self)
        else:
            _log.warning("broker reconnected", server=self._server())
        self.connections_count += 1
        self._up.set()
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_closed())

    async def on_disconnected(self) -> None:
        """Called by the client when the connection broke: pending requests will not be answered."""
        self._up.clear()
        if not self._closing:
            _log.warning("broker disconnected, reconnect started", server=self._server())
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(TransientError("connection to the broker broke before the answer"))
        for listener in tuple(self.listeners):
            listener()

    async def on_closed(self) -> None:
        """Called when the connection is closed for good."""
        if not self._closing and not self._is_lost:
            self._is_lost = True
            _log.error("broker connection closed for good", server=self._server(), error=self.last_error)
            if self._on_closed is not None:
                self._on_closed()

    async def _watch_closed(self) -> None:
        """Notice a connection that was closed for good without a call of the client.

        A server that resets the connection while the client writes its last bytes ends the client's own closing.
        """
        while not self.client.is_closed:  # noqa: ASYNC110 - the client has no event
            await asyncio.sleep(CLOSED_POLL_SECONDS)
        if not self._is_lost:
            abort(self.client)  # it did not come to that
            await self.on_disconnected()
        await self.on_closed()

    async def on_error(self, error: Exception) -> None:
        """Called by the client for errors outside a request."""
        self.last_error = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, ssl.SSLError | TlsMissing):
            self.tls_failure = self.last_error
        if "authorization violation" in str(error).lower():
            self.refusal = self.last_error  # the disconnect that follows would hide it
        if "permissions violation" in str(error).lower():
            # The server reports it only here; the request itself is never answered.
            self.report_failure("permissions", self.last_error)
            _log.error("subject denied by the broker; extend the permissions of this user", error=self.last_error)
        else:
            _log.debug("broker connection failed", error=self.last_error)

    async def wait_until_up(self) -> None:
        """Return when connected. Raises TransientError after `request_seconds_max`."""
        if self.is_up:
            return
        try:
            async with asyncio.timeout(self.timeouts.request_seconds_max):
                await self._up.wait()
        except TimeoutError as exc:
            raise TransientError(
                f"broker at {self._server()} does not answer: {self.last_error or 'no connection'}"
            ) from exc

    async def send_request(self, subject: str, payload: bytes) -> asyncio.Future[Frame]:
        """Send a request; the future is its answer, or TransientError when the connection breaks first.

        The caller limits the wait and cancels the future when it stops waiting.
        """
        reply, answer = self._expect_answer()
        try:
            await self.send(subject, payload, reply=reply)
        except TransientError as exc:
            if not answer.done():
                answer.set_exception(exc)
        return answer

    def _expect_answer(self) -> tuple[str, asyncio.Future[Frame]]:
        """Return a reply subject and the future of its answer."""
        self._number += 1
        token = b"%d" % self._number
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda _: self._answers.pop(token, None))
        self._answers[token] = answer
        return f"{self._inbox}.{self._number}", answer

    async def send(
        self, subject: str, payload: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a message without waiting for an answer. Raises TransientError when the broker is away."""
        with self._require_connection():
            await self.client.publish(subject, payload, reply=reply, headers=dict(headers) if headers else None)

    async def send_all(self, commands: Sequence[Command]) -> None:
        """Send many messages at once. Raises TransientError when the broker is away."""
        with self._require_connection():
            await self.wire.write(commands)

    async def subscribe(self, receiver: FrameReceiver) -> str:
        """Return an inbox whose messages, `<inbox>.<token>`, go to `receiver`, also after a reconnect."""
        with self._require_connection():
            inbox = self.client.new_inbox()
            await self.wire.subscribe(f"{inbox}.*", receiver)
        return inbox

    @contextlib.contextmanager
    def _require_connection(self) -> Iterator[None]:
        if not self.is_up:
            # Buffering would let messages overtake those that were lost in flight.
            raise TransientError(f"broker at {self._server()} is disconnected")
        if self.client.pending_data_size > UNSENT_BYTES_MAX:
            self.verify()
            raise TransientError(f"broker at {self._server()} does not read fast enough")
        try:
            yield
        except (nats.errors.ConnectionClosedError, nats.errors.OutboundBufferLimitError, OSError) as exc:
            raise TransientError(f"broker at {self._server()} is disconnected: {exc}") from exc

    async def request(self, subject: str, payload: bytes, seconds_max: float | None = None) -> Frame:
        """Return the answer. Raises RequestTimedOut, NoResponders, or another TransientError on a disconnect."""
        await self.wait_until_up()
        answer = await self.send_request(subject, payload)
        try:
            async with asyncio.timeout(seconds_max or self.timeouts.request_seconds_max):
                message = await asyncio.shield(answer)
        except TimeoutError as exc:
            if await self.is_unresponsive(answer.done):
                self.verify()
                raise RequestTimedOut(f"broker did not answer on {subject} in time") from exc
            message = answer.result()
        finally:
            answer.cancel()
        if message.status[0] == NO_RESPONDERS:
            raise NoResponders(f"no responders on {subject}: no such stream or consumer, or JetStream is not ready")
        return message

    async def call(
        self, operation: str, body: Mapping[str, Any] | None = None, *, seconds_max: float | None = None
    ) -> dict[str, Any]:
        """Call the JetStream API, e.g. `STREAM.INFO.JOB`. Raises ApiError, NoResponders, TransientError."""
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
        """Flush pending messages and disconnect, within CLOSE_SECONDS_MAX each."""
        self._closing = True
        for task in (self._verification, self._watch):
            if task is not None:
                task.cancel()
        with contextlib.suppress(TimeoutError, nats.errors.Error, OSError):
            if self.client.is_connected:
                await asyncio.wait_for(self.client.flush(), CLOSE_SECONDS_MAX)
        # AssertionError: the client never had a connection, because it refused the address.
        with contextlib.suppress(TimeoutError, AssertionError):
            await asyncio.wait_for(self.client.close(), CLOSE_SECONDS_MAX)

    def receive(self, frames: Sequence[Frame]) -> None:
        """Pass each answer to its request."""
        for frame in frames:
            answer = self._answers.get(frame.subject.rpartition(b".")[2])
            if answer is not None and not answer.done():
                answer.set_result(frame)

    def _server(self) -> str:
        url = self.client.connected_url
        return url.netloc.rpartition("@")[2] if url is not None else ", ".join(s.netloc for s in self.client.servers)


def abort(client: Client) -> None:
    """Abort the connection: an orderly close would wait for unsent data, up to 15 minutes."""
    transport = getattr(getattr(client, "_transport", None), "_io_writer", None)
    if transport is not None:
        transport.transport.abort()
