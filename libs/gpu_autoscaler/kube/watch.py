"""List-then-watch that never ends: the whole kind first, then every change, in order, without gaps.

The usual libraries' watches decode slowly, do not list again after 410, and wait for ever on a dead connection;
hence our own. Source: Kubernetes API concepts, "Efficient detection of changes" (read 2026-11-21).
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Protocol

import aiohttp
import msgspec
import structlog

from gpu_autoscaler.kube.api_errors import HistoryLost, read_status, refusal
from gpu_autoscaler.kube.protocol import Bookmark, Changed, Deleted, Kind, Listed, NotFound, Now, WatchItem, decoded
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model.errors import AutoscalerError, PermanentError, TransientError

# The server closes a watch after this long, so that a quiet one gives a sign of life at least this often. Bookmarks are
# no matter of course: in kube-apiserver 1.36 a kind gets one a minute only where something happened since our list
# (pkg/storage/cacher; read 2026-11-21).
WATCH_SECONDS = 60
SILENCE_SECONDS_MAX = 90.0  # longer without a byte: the connection is dead, whatever TCP says
WAIT_SECONDS_MIN, WAIT_SECONDS_MAX = 0.1, 10.0  # back-off while the server is away; doubled each time, with jitter
CLOCK_SECONDS = 1.0  # how much sooner than ours the server's clock may say that a watch's time is over
RETRY_AFTER_SECONDS_MAX = 60.0  # a server that wants to be left alone for longer is asked all the same
ABSENT_SECONDS = 60.0  # between two looks for a kind that is not installed
LINE_BYTES_MAX = 16 * 2**20  # etcd refuses objects above 1.5 MiB; encodings differ, hence the margin

_event_decoder = msgspec.json.Decoder(core.WatchEvent)
log = structlog.get_logger()


class Reader(Protocol):
    """The two calls that a watch is made of."""

    async def list_page(self, kind: Kind[Any], query: Mapping[str, str]) -> core.Page:
        """Return one page of a list."""
        ...

    async def open_watch(
        self, kind: Kind[Any], query: Mapping[str, str], *, read_seconds_max: float
    ) -> aiohttp.ClientResponse:
        """Open a watch."""
        ...


async def read_for_ever(reader: Reader, kind: Kind[Any], *, label_selector: str, now: Now) -> AsyncIterator[WatchItem]:
    """Yield Listed, then Changed, Deleted and Bookmark from its version on; Listed again whenever history is lost.

    Refusals (a missing right, an unknown kind) are logged and tried again like outages: a source has no end.
    """
    selector = {"labelSelector": label_selector} if label_selector else {}
    version: int | None = None  # None: nothing listed yet, or history lost
    is_absent = False  # told that there is none of an optional kind
    pace = _Pace()
    while True:
        told_seconds, was_open = 0.0, False  # how long the server wants to be left alone; whether a watch was answered
        try:
            if version is None:
                listed = await _list(reader, kind, selector, now)
                version, is_absent, pace.heard_at = listed.version, False, _seconds()
                yield listed
            opened_at = _seconds()
            # Explicit closing: a generator that is dropped half-way would keep the connection until collected.
            async with contextlib.aclosing(_watch(reader, kind, selector, version, now)) as items:
                async for item in items:
                    version = item.version if isinstance(item, Bookmark) else item.object.version
                    pace.goes_well()
                    yield item
            if _seconds() - opened_at >= WATCH_SECONDS - CLOCK_SECONDS:
                # Closed by the server itself, at the time that we asked for. That proves as much as a bookmark, and
                # where nothing happened since our list there is none: its version would be older than the list's.
                pace.goes_well()
                yield Bookmark(kind=kind, version=version, seen_at=now())
            if pace.heard_at >= opened_at:
                continue  # closed in good order: go on from the last version
            # Something between us and the server closes watches before their time; asking on and on would be a storm.
            was_open = True
            log.warning("watch closed without a word, trying again", kind=kind.plural, wait_seconds=pace.wait_seconds)
        except NotFound as exc:
            if not kind.is_optional:
                log.warning("kind not found, trying again", kind=kind.path(), error=str(exc))
            elif not is_absent:
                is_absent = True
                yield Listed(kind=kind, objects=(), version=0, seen_at=now())
            version, pace.wait_seconds = None, ABSENT_SECONDS if kind.is_optional else pace.wait_seconds
        except HistoryLost as exc:
            log.info("watch history lost, listing again", kind=kind.plural, version=version, error=str(exc))
            version = None
        except AutoscalerError as exc:
            # The state ages meanwhile, and what depends on its freshness holds still by itself.
            log.warning("watch interrupted, trying again", kind=kind.plural, error=str(exc))
            told_seconds = min(getattr(exc, "retry_after_seconds", None) or 0.0, RETRY_AFTER_SECONDS_MAX)
            was_open = isinstance(exc, _BrokeOff)
        if was_open and _seconds() - pace.heard_at > SILENCE_SECONDS_MAX:
            version = None  # watches begin, say nothing and end before their time: a list says how things are
        await pace.wait(told_seconds)


class _BrokeOff(TransientError):
    """A watch that was answered ended in the middle."""


class _Pace:
    """How long it was quiet, and how long to wait before the next question."""

    def __init__(self) -> None:
        self.heard_at = _seconds()
        self.wait_seconds = WAIT_SECONDS_MIN

    def goes_well(self) -> None:
        """The server speaks."""
        self.heard_at, self.wait_seconds = _seconds(), WAIT_SECONDS_MIN

    async def wait(self, told_seconds: float) -> None:
        """Wait, the next time for twice as long. `told_seconds` is what the server asked for on top."""
        # Jitter: after an outage all watches of all replicas come back; not in the same instant.
        jitter = random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, decides nothing
        await asyncio.sleep(told_seconds + self.wait_seconds * jitter)
        self.wait_seconds = min(self.wait_seconds * 2, max(WAIT_SECONDS_MAX, self.wait_seconds))


def _seconds() -> float:
    return asyncio.get_running_loop().time()


async def _list(reader: Reader, kind: Kind[Any], selector: Mapping[str, str], now: Now) -> Listed:
    seen_at = now()  # before the first page: the list shows the world no older than this
    objects: list[core.Object] = []
    query = dict(selector)
    while True:
        page = await reader.list_page(kind, query)
        objects += [kind.decode(item, "list") for item in page.items or ()]
        if not page.metadata.continue_:
            version = int(page.metadata.resource_version)
            return Listed(kind=kind, objects=tuple(objects), version=version, seen_at=seen_at)
        query["continue"] = page.metadata.continue_


async def _watch(
    reader: Reader, kind: Kind[Any], selector: Mapping[str, str], version: int, now: Now
) -> AsyncGenerator[Changed | Deleted | Bookmark, None]:
    query = {
        **selector,
        "watch": "1",
        "resourceVersion": str(version),
        "allowWatchBookmarks": "true",
        "timeoutSeconds": str(WATCH_SECONDS),
    }
    response = await reader.open_watch(kind, query, read_seconds_max=SILENCE_SECONDS_MAX)
    try:
        async with contextlib.aclosing(_lines(response, kind)) as lines:
            async for line in lines:
                yield _item(kind, line, now)
    finally:
        response.close()


async def _lines(response: aiohttp.ClientResponse, kind: Kind[Any]) -> AsyncGenerator[bytes, None]:
    """Whole lines of the body; aiohttp's own `readline` gives up at 128 KiB, which an object may exceed."""
    rest = b""
    try:
        async for chunk in response.content.iter_any():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if line:
                    yield line
            if len(rest) > LINE_BYTES_MAX:
                raise PermanentError(f"watch {kind.plural}: a line longer than {LINE_BYTES_MAX} bytes")
        if rest:  # closed in good order, and yet not by the server
            raise _BrokeOff(f"watch {kind.plural}: closed in the middle of a line")
    except (aiohttp.ClientError, TimeoutError) as exc:
        raise _BrokeOff(f"watch {kind.plural}: connection lost: {exc!r}") from exc


def _item(kind: Kind[Any], line: bytes, now: Now) -> Changed | Deleted | Bookmark:
    try:
        event = _event_decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise TransientError(f"watch {kind.plural}: half a line, the connection broke: {exc}") from exc
    if event.type == "ERROR":
        status = read_status(0, bytes(event.object))
        raise refusal(status.code, status, {}, f"watch {kind.plural}")
    if event.type == "BOOKMARK":  # an empty object of the kind, whose parts are null: a pod's containers are
        return Bookmark(kind=kind, version=decoded(core.Object, event.object, "bookmark").version, seen_at=now())
    # An object that does not decode ends the watch: to skip it would make a pod or node invisible, which is worse
    # than a stale picture that says it is stale.
    thing = kind.decode(event.object, "watch")
    if event.type == "DELETED":
        return Deleted(kind=kind, object=thing, seen_at=now())
    return Changed(kind=kind, object=thing, seen_at=now())
