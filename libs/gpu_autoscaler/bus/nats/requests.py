"""Requests and answers without JetStream: from many light clients, to a few services that answer.

`RequestLink` costs the broker one ping a minute at rest. `answering` is the other side: a queue group, so that each
request reaches one of the replicas.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg

from gpu_autoscaler.bus.nats.clients import plain_client
from gpu_autoscaler.bus.nats.link import CLOSE_SECONDS_MAX, RECONNECT_SECONDS, abort
from gpu_autoscaler.bus.nats.open import Tls, refuses_plain, tls_for
from gpu_autoscaler.model.errors import ConfigError, TransientError

CONNECT_SECONDS_MAX = 10.0  # longer than the server waits for an auth callout
HURRIED_CONNECT_SECONDS = 1.0  # doubled after each failure
VERIFY_SECONDS_MAX = 2.0
REST_PING_SECONDS = 60
CLOSED_POLL_SECONDS = 1.0
PING_SECONDS = 10  # of those who answer
EXPIRED = "authentication expired"  # the server's words; the next login needs no wait
ANSWERING_PENDING_COUNT_MAX = 65_536
MESSAGE_ID = "Nats-Msg-Id"

log = structlog.get_logger(__name__)


class Reconnects(msgspec.Struct, frozen=True, kw_only=True):
    """Waits between attempts to connect: random, so that a thousand clients come back one after another."""

    # After the first loss; doubled after each failure. As long as the API server takes to review a thousand tokens.
    first_seconds_max: float = 15.0
    seconds_max: float = 30.0
    hurried_seconds_max: float = 1.0  # while there is something to send

    def wait_seconds(self, failures_count: int) -> float:
        """Return a wait after this many failures in a row; 0: the connection broke."""
        longest = min(self.first_seconds_max * 2.0 ** min(failures_count, 16), self.seconds_max)
        return random.uniform(0.0, longest)  # noqa: S311 - spreads load, no security


class RequestLink:
    """One connection for requests. `run` keeps it open; `request` fails at once while it is closed."""

    def __init__(
        self,
        servers: Sequence[str],
        *,
        name: str,
        inbox: str,
        token: Callable[[], str] | None = None,
        tls: Tls | None = None,
        on_change: Callable[[], None] = lambda: None,
        reconnects: Reconnects | None = None,
    ) -> None:
        """`token` is read for each login; None: the servers' addresses hold user and password."""
        self._servers = list(servers)
        self._name = name
        self._inbox = inbox
        self._token = token
        self._tls = tls_for(servers, tls)
        self._on_change = on_change
        self._reconnects = reconnects or Reconnects()
        self._client: Client | None = None
        self._closed = asyncio.Event()
        self._hurry = asyncio.Event()
        self._error = "not connected yet"
        self.connections_count = 0

    @property
    def is_up(self) -> bool:
        return self._client is not None

    @property
    def failure(self) -> str | None:
        """Why there is no connection; None: there is one."""
        return None if self.is_up else f"broker at {self._addresses()}: {self._error}"

    def hurry(self) -> None:
        """Shorten the waits between attempts until the next connection: there is something to send."""
        self._hurry.set()

    async def run(self) -> None:
        """Connect, and connect again whenever the connection is lost, until canceled."""
        failures_count = 0
        try:
            while True:
                try:
                    client = await self._connect(failures_count)
                except TransientError as exc:
                    failures_count += 1
                    self._report(str(exc))
                    await self._wait(failures_count)
                    continue
                failures_count, self._client = 0, client
                self.connections_count += 1
                self._hurry.clear()
                self._on_change()
                await self._wait_until_closed(client)
                self._client = None
                await _close(client)
                self._report(self._error or str(client.last_error or "connection was closed"))
                if EXPIRED not in self._error:
                    await self._wait(failures_count)
        finally:
            await _close(self._client)
            self._client = None

    async def _wait_until_closed(self, client: Client) -> None:
        # The client's own callback is not called if the server resets the connection while the client closes it.
        while not client.is_closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSED_POLL_SECONDS):
                    await self._closed.wait()
                    return

    async def request(self, subject: str, payload: bytes, seconds_max: float) -> bytes:
        """Return the answer. Raises TransientError without one; the caller repeats."""
        client = self._client
        if client is None:
            raise TransientError(self.failure or "connection to the broker was lost")
        try:
            answer = await client.request(subject, payload, timeout=seconds_max)
        except nats.errors.NoRespondersError as exc:
            raise TransientError(f"no service answers on {subject} now") from exc
        except nats.errors.TimeoutError as exc:
            await self._verify(client)
            raise TransientError(f"no answer on {subject} within {seconds_max:g} s ({self._error})") from exc
        except (nats.errors.Error, OSError) as exc:
            raise TransientError(f"connection to the broker broke before the answer on {subject}: {exc}") from exc
        return bytes(answer.data)

    async def _connect(self, failures_count: int) -> Client:
        """Return a client that the server has accepted. Raises TransientError.

        In a hurry it does not wait long at first: a login from before the auth callout was back is never answered.
        """
        hurried_seconds = HURRIED_CONNECT_SECONDS * 2.0 ** min(failures_count, 8)
        seconds_max = min(hurried_seconds, CONNECT_SECONDS_MAX) if self._hurry.is_set() else CONNECT_SECONDS_MAX
        client, closed = plain_client(requires_tls=refuses_plain(self._servers, self._tls)), asyncio.Event()
        self._closed, self._error = closed, ""

        async def on_error(error: Exception) -> None:
            self._error = str(error) or type(error).__name__
            if "permissions violation" in self._error.lower():
                log.error("subject denied by the broker; its credentials are for another instance", error=self._error)

        async def on_closed() -> None:
            closed.set()

        options: dict[str, Any] = {} if self._tls is None else self._tls.options()
        if self._token is not None:
            options["token"] = self._read_token()
        try:
            async with asyncio.timeout(seconds_max):
                await client.connect(
                    servers=self._servers,
                    name=self._name,
                    inbox_prefix=self._inbox,
                    allow_reconnect=False,  # the client's own waits are the same for a thousand clients
                    max_reconnect_attempts=0,
                    ping_interval=REST_PING_SECONDS,
                    max_outstanding_pings=2,
                    error_cb=on_error,
                    closed_cb=on_closed,
                    **options,
                )
                await client.flush()  # a refused login closes the connection only after it was opened
        except (nats.errors.Error, OSError, ValueError, TimeoutError) as exc:
            await _close(client)
            raise TransientError(self._error or str(exc) or type(exc).__name__) from exc
        except BaseException:
            await _close(client)
            raise
        return client

    def _read_token(self) -> str:
        assert self._token is not None, "no token"  # noqa: S101 - a bug
        try:
            return self._token()
        except OSError as exc:
            raise TransientError(f"token not read: {exc}; check the projected volume of the pod") from exc

    async def _verify(self, client: Client) -> None:
        """Close a connection that carries no data any more; it would stay open for minutes."""
        try:
            async with asyncio.timeout(VERIFY_SECONDS_MAX):
                await client.flush()
        except (nats.errors.Error, OSError, TimeoutError):
            self._error = "connection carries no data"
            await _close(client)
            self._closed.set()

    async def _wait(self, failures_count: int) -> None:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._reconnects.wait_seconds(failures_count)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(ends_at):
                await self._hurry.wait()
        if self._hurry.is_set():
            hurried = random.uniform(0.0, self._reconnects.hurried_seconds_max)  # noqa: S311 - spreads load
            await asyncio.sleep(max(0.0, min(hurried, ends_at - loop.time())))

    def _report(self, error: str) -> None:
        self._error = error
        log.info("broker not connected, retry scheduled", error=error)
        self._on_change()

    def _addresses(self) -> str:
        return ", ".join(server.rpartition("@")[2].rpartition("//")[2] for server in self._servers)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A received request."""

    subject: str
    payload: bytes
    answer: Callable[[bytes], Awaitable[None]]  # at most once; a lost answer is not reported
    message_id: str | None = None  # its Nats-Msg-Id


@asynccontextmanager
async def answering(
    servers: Sequence[str],
    *,
    name: str,
    group: str,
    receivers: Mapping[str, Callable[[Request], None]],
    credentials: Path | None = None,
    tls: Tls | None = None,
    on_closed: Callable[[], None] = lambda: None,
) -> AsyncIterator[Client]:
    """Receive the requests on these subjects, as one of the group. A receiver only stores the request.

    `on_closed` is called when the connection is closed for good. Raises TransientError when no server answers.
    """
    tls = tls_for(servers, tls)
    client, is_closing = plain_client(requires_tls=refuses_plain(servers, tls)), False

    async def on_closed_for_good() -> None:
        if not is_closing:
            on_closed()

    async def on_error(error: Exception) -> None:
        log.warning("connection for requests disturbed", error=str(error) or type(error).__name__)

    try:
        async with asyncio.timeout(CONNECT_SECONDS_MAX):
            options: dict[str, Any] = {
                "servers": list(servers),
                "name": name,
                "reconnect_time_wait": RECONNECT_SECONDS,
                "max_reconnect_attempts": -1,
                "ping_interval": PING_SECONDS,
                "max_outstanding_pings": 2,
                "error_cb": on_error,
                "closed_cb": on_closed_for_good,
                **({} if tls is None else tls.options()),
                **({} if credentials is None else {"user_credentials": str(credentials)}),
            }
            await client.connect(**options)
            for subject, receive in receivers.items():
                await client.subscribe(
                    subject, group, cb=_passing_to(receive), pending_msgs_limit=ANSWERING_PENDING_COUNT_MAX
                )
            await client.flush()
    except TimeoutError as exc:
        await _close(client)
        raise TransientError("no NATS server answered; start one, or correct nats.url") from exc
    except (nats.errors.Error, OSError, ValueError) as exc:
        await _close(client)
        error = f"cannot receive requests: {exc}; correct nats.url or the user's password"
        raise ConfigError("broker", [error]) from exc
    try:
        yield client
    finally:
        is_closing = True
        await _close(client)


def _passing_to(receive: Callable[[Request], None]) -> Callable[[Msg], Awaitable[None]]:
    async def on_message(message: Msg) -> None:
        async def answer(payload: bytes) -> None:
            with contextlib.suppress(nats.errors.Error, OSError):  # whoever asked repeats
                await message.respond(payload)

        if message.reply:
            message_id = (message.headers or {}).get(MESSAGE_ID)
            payload = bytes(message.data)
            receive(Request(subject=message.subject, payload=payload, answer=answer, message_id=message_id))

    return on_message


async def _close(client: Client | None) -> None:
    if client is not None:
        with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
            await asyncio.wait_for(client.close(), CLOSE_SECONDS_MAX)
        abort(client)  # a client that the server turned away leaves its socket open
