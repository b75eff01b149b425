"""Reads many messages at a time below nats-py, which handles connection, authentication and reconnects.

nats-py creates an object, a dictionary of headers, a queue entry and a task switch per message, which dominated long
reads. On subjects with many messages a FrameReceiver gets the raw frames instead, all frames of one read at once.
Everything else is passed on to nats-py, frame by frame. `clients.py` decides whether this parser can be used.
Source of the protocol: NATS documentation, "NATS Protocol / Client Protocol" (read 2026-11-21).
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
from nats.aio.client import Client
from nats.errors import ProtocolError
from nats.protocol.parser import Parser

_LINE_END = b"\r\n"
_HEADERS_START = b"NATS/1.0"
_BLANK = re.compile(r"[ \t\r\n]")
_LINE_ENDS = re.compile(r"[\r\n]")
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_MESSAGE_STARTS = b"MH"  # no other line begins so
_NO_WORDS: list[bytes] = []
_WORDS_COUNT_MIN = 4
# A delivery of a stream: subject, subscription, reply, header bytes, total bytes. Other lines are parsed word by word.
_DELIVERY = re.compile(rb"HMSG (\S+) (\d+) (\S+) (\d+) (\d+)\r\n")
CONTROL_LINE_BYTES_MAX = 64 * 1024  # INFO of a large cluster; a longer line is not from a NATS server


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One message as on the wire."""

    subject: bytes
    reply: bytes  # empty: no answer expected
    headers: bytes  # the whole block with its first line; empty: none
    payload: bytes

    @property
    def status(self) -> tuple[str, str]:
        """The server's inline status and text, such as ("404", "No Messages"); ("", "") without one."""
        line = self.headers[len(_HEADERS_START) : self.headers.find(_LINE_END)].strip()
        code, _, words = line.partition(b" ")
        return code.decode("ascii", "replace"), words.strip().decode("utf-8", "replace")


class FrameReceiver(Protocol):
    """Receives the frames of a subscription."""

    def receive(self, frames: Sequence[Frame]) -> None:
        """Store the frames of one read and wake waiting tasks; do nothing else here."""


class FrameParser(Parser):
    """nats-py's parser with a short way for subscriptions of frames."""

    def __init__(self, client: Client) -> None:
        self.receivers: dict[bytes, FrameReceiver] = {}  # by the number of the subscription
        self.chunks_count = 0  # reads from the socket
        self._buffer = bytearray()
        self._needed_bytes = 0  # parse again when this much has arrived
        self._resets_count = 0
        super().__init__(client)

    def reset(self) -> None:
        """Drop a partial frame of a broken connection."""
        super().reset()
        self._buffer = bytearray()
        self._needed_bytes = 0
        self._resets_count += 1

    async def parse(self, data: bytes = b"") -> None:
        """Parse a chunk of data. Raises ProtocolError for data that no NATS server sends."""
        self.chunks_count += 1
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._needed_bytes:
                return
            data, self._buffer = bytes(self._buffer), bytearray()
        self._needed_bytes = 0
        received: defaultdict[FrameReceiver, list[Frame]] = defaultdict(list)
        resets_count, position = self._resets_count, 0
        try:
            while position < len(data):
                position = self._deliveries(data, position, received)
                if position == len(data):
                    break
                end = data.find(_LINE_END, position)
                if end < 0:
                    if len(data) - position > CONTROL_LINE_BYTES_MAX:
                        raise ProtocolError("nats: a control line has no end")
                    break
                stop, words, receiver = end + 2, _NO_WORDS, None
                if data[position] in _MESSAGE_STARTS:
                    words = data[position:end].split()
                    stop += _size(words) + 2
                    if stop > len(data):
                        self._needed_bytes = stop - position
                        break
                    receiver = self.receivers.get(words[2])
                if receiver is not None:
                    received[receiver].append(_frame(words, data, end + 2, stop - 2))
                else:
                    _dispatch(received)  # keep the order: earlier frames first
                    await super().parse(data[position:stop])
                    if self._resets_count != resets_count:
                        return  # the rest is of a broken connection
                position = stop
            self._buffer = bytearray(data[position:])
        finally:
            _dispatch(received)

    def _deliveries(self, data: bytes, position: int, received: defaultdict[FrameReceiver, list[Frame]]) -> int:
        """Parse consecutive complete deliveries; return where they end."""
        while (delivery := _DELIVERY.match(data, position)) is not None:
            subject, number, reply, headers_size, size = delivery.groups()
            start = delivery.end()
            body, stop = start + int(headers_size), start + int(size)
            receiver = self.receivers.get(number)
            if receiver is None or stop + 2 > len(data):
                break
            received[receiver].append(Frame(subject, reply, data[start:body], data[body:stop]))
            position = stop + 2
        return position


def _dispatch(received: defaultdict[FrameReceiver, list[Frame]]) -> None:
    for receiver, frames in received.items():
        receiver.receive(frames)
    received.clear()


def _size(words: list[bytes]) -> int:
    if len(words) < _WORDS_COUNT_MIN or not words[-1].isdigit() or (words[0] == b"HMSG" and not words[-2].isdigit()):
        raise ProtocolError(f"nats: {b' '.join(words)!r} is not a message")
    return int(words[-1])


def _frame(words: list[bytes], chunk: bytes, start: int, stop: int) -> Frame:
    """`MSG <subject> <sid> [reply] <bytes>`, `HMSG <subject> <sid> [reply] <header bytes> <bytes>`."""
    if words[0] == b"MSG":
        return Frame(words[1], words[3] if len(words) == 5 else b"", b"", chunk[start:stop])
    body = start + int(words[-2])
    return Frame(words[1], words[3] if len(words) == 6 else b"", chunk[start:body], chunk[body:stop])


def is_subject(subject: str) -> bool:
    """True for a subject without blanks and line ends, which would break a command."""
    return bool(subject) and _BLANK.search(subject) is None


def is_header(name: str) -> bool:
    """True for a valid header name. Source: NATS ADR-4, "Message Headers" (read 2026-11-21)."""
    return _HEADER_NAME.fullmatch(name) is not None


def header_block(headers: Mapping[str, str], status: str = "") -> bytes:
    """Encode headers; a line end within a value, which would start another header, becomes a blank."""
    lines = "".join(f"{name}: {_LINE_ENDS.sub(' ', value.strip())}\r\n" for name, value in headers.items())
    return f"NATS/1.0{status}\r\n{lines}\r\n".encode()


def parse_headers(block: bytes) -> dict[str, str]:
    """Read `NATS/1.0`, then a `Key: value` a line. Source: NATS ADR-4, "Message Headers" (read 2026-11-21)."""
    headers = {}
    for line in block.split(b"\r\n")[1:]:
        name, separator, value = line.partition(b":")
        if separator:
            headers[name.strip().decode("ascii", "replace")] = value.strip().decode("utf-8", "replace")
    return headers


class Command(NamedTuple):
    """A message to send. `headers` is a whole block or empty; the caller validates subject and headers."""

    subject: str
    reply: str
    headers: bytes
    payload: bytes


def encoded(command: Command) -> bytes:
    """Encode a message."""
    subject, reply, headers, payload = command
    if not headers:
        return b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply.encode(), len(payload), payload)
    return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (
        subject.encode(), reply.encode(), len(headers), len(headers) + len(payload), headers, payload,
    )  # fmt: skip
