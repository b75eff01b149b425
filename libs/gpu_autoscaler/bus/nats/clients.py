"""Clients of nats-py, and how frames are read and written with them: by our parser, or by nats-py alone.

Our parser replaces nats-py's through names that are not public. If a version of nats-py lacks one of them, everything
works as before, slower: one object and task switch per message.
"""

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import nats.aio.client
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error
from nats.protocol.parser import Parser

from gpu_autoscaler.bus.nats.wire import (
    Command,
    Frame,
    FrameParser,
    FrameReceiver,
    encoded,
    header_block,
    parse_headers,
)
from gpu_autoscaler.model.errors import ConfigError

SUPPORTED = "nats-py>=2.16,<2.17"  # as in pyproject.toml

log = structlog.get_logger()


class Wire(Protocol):
    """Reads and writes the frames of one client."""

    client: Client

    @property
    def reads_count(self) -> int:
        """Reads from the broker so far: while it grows, the connection works."""

    async def subscribe(self, subject: str, receiver: FrameReceiver) -> Subscription:
        """Subscribe, also after each reconnect; frames go to `receiver` until `unsubscribe`."""

    async def unsubscribe(self, subscription: Subscription) -> None:
        """Unsubscribe; frames in flight are dropped."""

    async def write(self, commands: Sequence[Command]) -> None:
        """Write messages, behind the pending writes of nats-py."""


class FrameWire:
    """By our parser: all frames of one read at once, many messages in one write."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._parser = client._ps = FrameParser(client)  # noqa: SLF001 - guarded by `missing_names`, as all others here

    @property
    def reads_count(self) -> int:
        """Reads from the socket."""
        return self._parser.chunks_count

    async def subscribe(self, subject: str, receiver: FrameReceiver) -> Subscription:
        subscription = await self.client.subscribe(subject, cb=_ignore)
        self._parser.receivers[_number(subscription)] = receiver
        return subscription

    async def unsubscribe(self, subscription: Subscription) -> None:
        self._parser.receivers.pop(_number(subscription), None)
        if not self.client.is_closed:
            await subscription.unsubscribe()

    async def write(self, commands: Sequence[Command]) -> None:
        """At once: `publish` would send a single message."""
        await self.client._send_command(b"".join(map(encoded, commands)))  # noqa: SLF001
        await self.client._flush_pending()  # noqa: SLF001


class StockWire:
    """By the public interface of nats-py, message by message."""

    def __init__(self, client: Client) -> None:
        self.client = client

    @property
    def reads_count(self) -> int:
        """Messages that arrived."""
        return self.client.stats["in_msgs"]

    async def subscribe(self, subject: str, receiver: FrameReceiver) -> Subscription:

        async def receive(message: Msg) -> None:
            receiver.receive((_frame(message),))

        return await self.client.subscribe(subject, cb=receive)

    async def unsubscribe(self, subscription: Subscription) -> None:
        if not self.client.is_closed:
            await subscription.unsubscribe()

    async def write(self, commands: Sequence[Command]) -> None:
        """One after another."""
        for subject, reply, headers, payload in commands:
            await self.client.publish(subject, payload, reply=reply, headers=parse_headers(headers) or None)


def _number(subscription: Subscription) -> bytes:
    return b"%d" % subscription._id  # noqa: SLF001


async def _ignore(_: Msg) -> None:
    """Drop messages that arrive before the receiver is registered: nothing was requested yet."""


def _frame(message: Msg) -> Frame:
    """Return the message as it was on the wire, as far as nats-py says."""
    headers = dict(message.headers or {})
    words = (headers.pop(name, "") for name in ("Status", "Description"))  # of the server's first line
    status = "".join(f" {word}" for word in words if word)
    block = header_block(headers, status) if message.headers else b""
    return Frame(message.subject.encode(), message.reply.encode(), block, message.data)


def open_wire(*, requires_tls: bool) -> Wire:
    """Return a new client with its wire: nats-py's own if our parser cannot replace it, with a warning."""
    client = plain_client(requires_tls=requires_tls)
    if missing := missing_names():
        log.warning(
            "nats-py read by its own parser, slower",
            missing=", ".join(missing),
            version=nats.aio.client.__version__,
            step=f"install {SUPPORTED}",
        )
        return StockWire(client)
    return FrameWire(client)


def missing_names() -> tuple[str, ...]:
    """Return what nats-py lacks for our parser; nothing if it can replace nats-py's."""
    needed = {
        "Client._ps": isinstance(getattr(Client(), "_ps", None), Parser),
        "Client._read_loop": {"_ps", "parse"} <= _names_in(Client, "_read_loop"),
        "Client._send_command": inspect.iscoroutinefunction(getattr(Client, "_send_command", None)),
        "Client._flush_pending": inspect.iscoroutinefunction(getattr(Client, "_flush_pending", None)),
        "Parser.parse": inspect.iscoroutinefunction(getattr(Parser, "parse", None)),
        "Parser.reset": callable(getattr(Parser, "reset", None)),
        "Subscription._id": "_id" in _names_in(Subscription, "__init__"),
    }
    return tuple(name for name, is_there in needed.items() if not is_there)


def _names_in(owner: type, function: str) -> set[str]:
    """Return the attributes that the code of this method names."""
    return set(getattr(getattr(getattr(owner, function, None), "__code__", None), "co_names", ()))


# ---- encryption


class TlsMissing(Error):
    """The server does not encrypt; the client would go on in plain text, with its password."""

    def __str__(self) -> str:
        return "the server does not offer TLS"


class _TlsClient(Client):
    """A client that sends nothing to a server without TLS."""

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:  # noqa: FBT001, FBT002 - as in nats-py
        if initial_connection and not info.get("tls_required"):
            raise TlsMissing
        await super()._process_info(info, initial_connection)


def plain_client(*, requires_tls: bool) -> Client:
    """Return a client that refuses a server without TLS if `requires_tls`.

    Raises ConfigError if it could not: with another version of nats-py it would send its password in plain text.
    """
    if not requires_tls:
        return Client()
    if "_process_info" not in _names_in(Client, "_process_connect_init"):
        error = f"this version of nats-py cannot be kept from a server without TLS; install {SUPPORTED}"
        raise ConfigError("broker", [error])
    return _TlsClient()
