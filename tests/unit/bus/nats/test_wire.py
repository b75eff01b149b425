"""What the broker sends reaches who tapped it whole and in order, however it was cut, and the rest reaches nats-py."""

from collections.abc import Sequence

import pytest
from nats.aio.client import Client
from nats.errors import ProtocolError

from gpu_autoscaler.bus.nats.wire import Command, Frame, FrameParser, encoded

HEADERS = b"NATS/1.0\r\nNats-Msg-Id: a\r\n\r\n"
BODY = b"MSG x 7 3\r\nno!\r\n"  # looks like another one
SENT = (
    b"MSG in.box 7 5\r\nhello\r\n"
    b"PING\r\n"
    b"HMSG in.box 7 $JS.ACK.S.c.1.1.1.1.0 %d %d\r\n"
    % (len(HEADERS), len(HEADERS) + len(BODY))
    + HEADERS
    + BODY
    + b"\r\n"
    + b"MSG other 8 re.ply 2\r\nhi\r\n"
    + b"MSG in.box 7 re.ply 0\r\n\r\n"
)
TAPPED = [
    Frame(b"in.box", b"", b"", b"hello"),
    Frame(b"in.box", b"$JS.ACK.S.c.1.1.1.1.0", HEADERS, BODY),
    Frame(b"in.box", b"re.ply", b"", b""),
]


class Listener:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.told_count = 0

    def receive(self, frames: Sequence[Frame]) -> None:
        """As `Tap` says."""
        self.frames.extend(frames)
        self.told_count += 1


class Rest(Client):
    """The client beneath, as far as the parser speaks to it."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[object] = []

    async def _process_ping(self) -> None:
        self.heard.append("ping")

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        self.heard.append((sid, subject, reply, data, headers))


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 7, 40, len(SENT)])
async def test_frames_are_the_same_however_they_are_cut(piece_bytes: int) -> None:
    """A read ends anywhere, also within a control line or between two messages."""
    listener, rest = Listener(), Rest()
    parser = FrameParser(rest)
    parser.receivers[b"7"] = listener

    for start in range(0, len(SENT), piece_bytes):
        await parser.parse(SENT[start : start + piece_bytes])

    assert listener.frames == TAPPED
    assert rest.heard == ["ping", (8, b"other", b"re.ply", b"hi", None)]


async def test_a_listener_is_woken_once_for_messages_of_one_read() -> None:
    """A thousand messages of one read wake their reader once."""
    listener = Listener()
    parser = FrameParser(Rest())
    parser.receivers[b"7"] = listener

    await parser.parse(b"MSG in.box 7 1\r\nx\r\n" * 1000)

    assert (len(listener.frames), listener.told_count) == (1000, 1)


async def test_half_a_frame_does_not_outlive_its_connection() -> None:
    """What a new connection sends is read from its own beginning."""
    listener = Listener()
    parser = FrameParser(Rest())
    parser.receivers[b"7"] = listener

    await parser.parse(b"MSG in.box 7 5\r\nhel")
    parser.reset()
    await parser.parse(b"MSG in.box 7 2\r\nhi\r\n")

    assert [frame.payload for frame in listener.frames] == [b"hi"]


@pytest.mark.parametrize(
    "sent",
    [b"HELLO\r\n", b"MSG a\r\n", b"MSG in.box 7 -1\r\n", b"HMSG in.box 7 x 5\r\nhello\r\n", b"HTTP/1.1 400 No\r\n"],
)
async def test_what_no_nats_server_sends_is_refused(sent: bytes) -> None:
    """It is a protocol error, upon which the client connects anew."""
    parser = FrameParser(Rest())
    parser.receivers[b"7"] = Listener()

    with pytest.raises(ProtocolError):
        await parser.parse(sent)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"NATS/1.0 404 No Messages\r\n\r\n", ("404", "No Messages")),
        (b"NATS/1.0 503\r\n\r\n", ("503", "")),
        (b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 1\r\n\r\n", ("100", "Idle Heartbeat")),
        (HEADERS, ("", "")),
        (b"", ("", "")),
    ],
)
def test_the_servers_word_is_read(headers: bytes, status: tuple[str, str]) -> None:
    """Source: NATS ADR-4, "Message Headers", inline status (read 2026-11-21)."""
    assert Frame(b"in.box", b"", headers, b"").status == status


async def test_what_is_sent_can_be_read() -> None:
    """A command is one message, with headers and without."""
    assert encoded(Command("a.b", "in.box", b"", b"hello")) == b"PUB a.b in.box 5\r\nhello\r\n"
    assert encoded(Command("a.b", "in.box", HEADERS, b"x")) == b"HPUB a.b in.box 28 29\r\n" + HEADERS + b"x\r\n"
