"""Reads what the broker sends, many messages at a time, beneath nats-py, which keeps connection, sign-in and reconnect.

nats-py gives each message an object, a dictionary of headers, a place in a queue and a task's turn; most of the time of
a long read went there. Subjects that carry many messages are *tapped* instead: their frames go to who listens
as they are, all that came together at once. Everything else is handed on to nats-py, frame by frame.
Source of the protocol: NATS documentation, "NATS Protocol / Client Protocol" (read 2026-11-21).
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
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
# As a stream delivers: subject, subscription, reply, bytes of headers, bytes of both. Everything else is looked at word
# by word.
_DELIVERY = re.compile(rb"HMSG (\S+) (\d+) (\S+) (\d+) (\d+)\r\n")
CONTROL_LINE_BYTES_MAX = 64 * 1024  # INFO of a large cluster; what is longer without an end is no NATS server


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One message as it was on the wire."""

    subject: bytes
    reply: bytes  # empty: no answer is wanted
    headers: bytes  # the whole block with its first line; empty: none
    payload: bytes

    @property
    def status(self) -> tuple[str, str]:
        """The server's inline status and its words, such as ("404", "No Messages"); ("", "") where it has none."""
        line = self.headers[len(_HEADERS_START) : self.headers.find(_LINE_END)].strip()
        code, _, words = line.partition(b" ")
        return code.decode("ascii", "replace"), words.strip().decode("utf-8", "replace")


class Tap(Protocol):
    """Takes the frames of a tapped subject."""

    def take(self, frames: Sequence[Frame]) -> None:
        """Keep what came together, and wake who waits for it; nothing else is done here."""
        ...


class TappedParser(Parser):
    """nats-py's parser with a short way for tapped subscriptions."""

    def __init__(self, client: Client) -> None:
        self.taps: dict[bytes, Tap] = {}  # by the number of the subscription
        self.pieces_count = 0  # of the stream, as they came from the socket
        self._rest = bytearray()
        self._wanted_bytes = 0  # no use in looking before so much is there
        self._resets_count = 0
        super().__init__(client)

    def reset(self) -> None:
        """Forget half a frame: the connection that it came over is gone."""
        super().reset()
        self._rest = bytearray()
        self._wanted_bytes = 0
        self._resets_count += 1

    async def parse(self, data: bytes = b"") -> None:
        """Take a piece of the stream. Raises ProtocolError for what no NATS server sends."""
        self.pieces_count += 1
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted_bytes:
                return
            data, self._rest = bytes(self._rest), bytearray()
        self._wanted_bytes = 0
        taken: defaultdict[Tap, list[Frame]] = defaultdict(list)
        resets_count, position = self._resets_count, 0
        try:
            while position < len(data):
                position = self._deliveries(data, position, taken)
                if position == len(data):
                    break
                end = data.find(_LINE_END, position)
                if end < 0:
                    if len(data) - position > CONTROL_LINE_BYTES_MAX:
                        raise ProtocolError("nats: a control line has no end")
                    break
                stop, words, tap = end + 2, _NO_WORDS, None
                if data[position] in _MESSAGE_STARTS:
                    words = data[position:end].split()
                    stop += _size(words) + 2
                    if stop > len(data):
                        self._wanted_bytes = stop - position
                        break
                    tap = self.taps.get(words[2])
                if tap is not None:
                    taken[tap].append(_frame(words, data, end + 2, stop - 2))
                else:
                    _give(taken)  # what came before it is known before it
                    await super().parse(data[position:stop])
                    if self._resets_count != resets_count:
                        return  # what follows came over a connection that is gone
                position = stop
            self._rest = bytearray(data[position:])
        finally:
            _give(taken)

    def _deliveries(self, data: bytes, position: int, taken: defaultdict[Tap, list[Frame]]) -> int:
        """Take the deliveries that stand here in a row, as far as they are all there; return where they end."""
        while (delivery := _DELIVERY.match(data, position)) is not None:
            subject, number, reply, headers_size, size = delivery.groups()
            start = delivery.end()
            body, stop = start + int(headers_size), start + int(size)
            tap = self.taps.get(number)
            if tap is None or stop + 2 > len(data):
                break
            taken[tap].append(Frame(subject, reply, data[start:body], data[body:stop]))
            position = stop + 2
        return position


def _give(taken: defaultdict[Tap, list[Frame]]) -> None:
    for tap, frames in taken.items():
        tap.take(frames)
    taken.clear()


def _size(words: list[bytes]) -> int:
    if len(words) < _WORDS_COUNT_MIN or not words[-1].isdigit() or (words[0] == b"HMSG" and not words[-2].isdigit()):
        raise ProtocolError(f"nats: {b' '.join(words)!r} begins no message")
    return int(words[-1])


def _frame(words: list[bytes], chunk: bytes, start: int, stop: int) -> Frame:
    """`MSG <subject> <sid> [reply] <bytes>`, `HMSG <subject> <sid> [reply] <header bytes> <bytes>`."""
    if words[0] == b"MSG":
        return Frame(words[1], words[3] if len(words) == 5 else b"", b"", chunk[start:stop])
    body = start + int(words[-2])
    return Frame(words[1], words[3] if len(words) == 6 else b"", chunk[start:body], chunk[body:stop])


def tapped_client() -> Client:
    """A client that `tap` works with."""
    client = Client()
    client._ps = TappedParser(client)  # noqa: SLF001 - the one seam; tests/unit/bus/test_nats_wire.py holds it
    return client


def _parser(client: Client) -> TappedParser:
    parser = client._ps  # noqa: SLF001
    assert isinstance(parser, TappedParser), "the client is made with `tapped_client`"  # noqa: S101 - ours
    return parser


def pieces_count(client: Client) -> int:
    """How many pieces were read from the broker so far: while it grows, the connection carries."""
    return _parser(client).pieces_count


async def tap(client: Client, subject: str, taker: Tap) -> Subscription:
    """Subscribe, also after each reconnect; frames go to `taker` until `untap`."""
    subscription = await client.subscribe(subject, cb=_untapped)
    _parser(client).taps[_number(subscription)] = taker
    return subscription


async def untap(client: Client, subscription: Subscription) -> None:
    """Stop listening; what is on its way is dropped."""
    _parser(client).taps.pop(_number(subscription), None)
    if not client.is_closed:
        await subscription.unsubscribe()


def _number(subscription: Subscription) -> bytes:
    return b"%d" % subscription._id  # noqa: SLF001 - it has no other name for it


async def _untapped(_: Msg) -> None:
    """What came between the subscription and its tap: nobody had asked for anything yet."""


def is_subject(subject: str) -> bool:
    """True where the words of a command stay apart: a blank or an end of line would begin another one."""
    return bool(subject) and _BLANK.search(subject) is None


def is_header(name: str) -> bool:
    """True for what may stand before the colon. Source: NATS ADR-4, "Message Headers" (read 2026-11-21)."""
    return _HEADER_NAME.fullmatch(name) is not None


def header_block(headers: Mapping[str, str]) -> bytes:
    """Headers as they are sent; an end of line within a value, which would begin another header, becomes a blank."""
    lines = "".join(f"{name}: {_LINE_ENDS.sub(' ', value.strip())}\r\n" for name, value in headers.items())
    return f"NATS/1.0\r\n{lines}\r\n".encode()


def command(subject: str, reply: str, headers: bytes, payload: bytes) -> bytes:
    """A message as it is sent. `headers` is a whole block or empty; both are checked by the caller."""
    if not headers:
        return b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply.encode(), len(payload), payload)
    return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (
        subject.encode(), reply.encode(), len(headers), len(headers) + len(payload), headers, payload,
    )  # fmt: skip


async def send(client: Client, commands: list[bytes]) -> None:
    """Write commands in one piece, behind what nats-py has still to write."""
    await client._send_command(b"".join(commands))  # noqa: SLF001 - `publish` takes one at a time
    await client._flush_pending()  # noqa: SLF001
