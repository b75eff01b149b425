"""Endless list-and-watch: all objects of a kind first, then every change, in order, without gaps.

The watches of common libraries decode slowly, do not list again after 410, and hang on a dead connection.
Source: Kubernetes API concepts, "Efficient detection of changes" (read 2026-11-21).
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from datetime import datetime
from typing import Any, Protocol

import aiohttp
import msgspec
import structlog

from gpu_autoscaler.kube.api_errors import HistoryLost, error_from_status, read_status
from gpu_autoscaler.kube.protocol import (
    RESTORED_COMMAND,
    Bookmark,
    Changed,
    Deleted,
    Kind,
    Listed,
    NotFound,
    Now,
    ObjectT,
    WatchItem,
    decoded,
)
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model.errors import AutoscalerError, PermanentError, TransientError

# The server closes a watch after this long, so that even a quiet one proves to be alive. Bookmarks do not suffice: in
# kube-apiserver 1.36 a kind gets one per minute only if something changed since our list
# (pkg/storage/cacher; read 2026-11-21).
WATCH_SECONDS = 60
SILENCE_SECONDS_MAX = 90.0  # without data for longer the connection is dead, whatever TCP reports
WAIT_SECONDS_MIN, WAIT_SECONDS_MAX = 0.1, 10.0  # back-off while the server is away; doubled each time, with jitter
CLOCK_SECONDS = 1.0  # how much earlier, by the server's clock, a watch may end
RETRY_AFTER_SECONDS_MAX = 60.0  # the longest honored Retry-After
ABSENT_SECONDS = 60.0  # between two attempts to list a kind that is not installed
LINE_BYTES_MAX = 16 * 2**20  # etcd refuses objects above 1.5 MiB; the margin covers encodings

_event_decoder = msgspec.json.Decoder(core.WatchEvent)
log = structlog.get_logger()


class Reader(Protocol):
    """The two calls that a watch consists of."""

    async def list_page(self, kind: Kind[Any], query: Mapping[str, str]) -> core.Page:
        """Return one page of a list."""

    async def open_watch(
        self, kind: Kind[Any], query: Mapping[str, str], *, read_seconds_max: float
    ) -> aiohttp.ClientResponse:
        """Open a watch."""


async def list_and_watch(reader: Reader, kind: Kind[Any], *, label_selector: str, now: Now) -> AsyncIterator[WatchItem]:
    """Yield Listed, then Changed, Deleted and Bookmark from its version on; Listed again whenever history is lost.
    Refusals (a missing permission, an unknown kind) are logged and retried like outages: a source never ends."""
    selector = {"labelSelector": label_selector} if label_selector else {}
    version: int | None = None  # None: nothing listed yet, or history lost
    quiet_until: datetime | None = None  # when the server closed the last watch, which had shown every change
    is_absent = False  # an empty list of an optional kind was reported
    backoff = _Backoff()
    while True:
        retry_after_seconds, was_open = 0.0, False  # requested by the server; whether a watch was answered
        try:
            if version is None:
                listed = await _list(reader, kind, selector, now)
                version, is_absent, backoff.last_data_at = listed.version, False, _seconds()
                quiet_until = None
                yield listed
            else:
                await _require_history(reader, kind, selector, version)
                if quiet_until is not None:
                    # Proves as much as a bookmark. Without a change since our list the server sends none, as its
                    # version would be older than the list's.
                    yield Bookmark(kind=kind, version=version, seen_at=quiet_until)
                    quiet_until = None
            opened_at = _seconds()
            # Explicit closing: a dropped generator would keep the connection until garbage collection.
            async with contextlib.aclosing(_watch(reader, kind, selector, version, now)) as items:
                async for item in items:
                    version = item.version if isinstance(item, Bookmark) else item.object.version
                    backoff.reset()
                    yield item
            is_timely = _seconds() - opened_at >= WATCH_SECONDS - CLOCK_SECONDS  # closed by the server as requested
            quiet_until = now() if is_timely else None
            if is_timely or backoff.last_data_at >= opened_at:
                backoff.reset()
                continue  # closed regularly: continue from the last version
            # A proxy closes watches early; retrying at once would overload the server.
            was_open = True
            log.warning("watch closed early, retry scheduled", kind=kind.plural, wait_seconds=backoff.wait_seconds)
        except NotFound as exc:
            if not kind.is_optional:
                log.warning("kind not found, retry scheduled", kind=kind.path(), error=str(exc))
            elif not is_absent:
                is_absent = True
                yield Listed(kind=kind, objects=(), version=0, seen_at=now())
            version, backoff.wait_seconds = None, ABSENT_SECONDS if kind.is_optional else backoff.wait_seconds
        except HistoryLost as exc:
            log.info("watch history lost, list scheduled", kind=kind.plural, version=version, error=str(exc))
            version = None
        except AutoscalerError as exc:
            # The state ages meanwhile, and actions that need fresh data are deferred.
            log.warning("watch interrupted, retry scheduled", kind=kind.plural, error=str(exc))
            retry_after_seconds = min(getattr(exc, "retry_after_seconds", None) or 0.0, RETRY_AFTER_SECONDS_MAX)
            was_open = isinstance(exc, _Interrupted)
        if was_open and _seconds() - backoff.last_data_at > SILENCE_SECONDS_MAX:
            version = None  # watches end early without data: list again
        await backoff.wait(retry_after_seconds)


class _Interrupted(TransientError):
    """An open watch was interrupted."""


class _Backoff:
    """The time of the last data, and the wait before the next request."""

    def __init__(self) -> None:
        self.last_data_at = _seconds()
        self.wait_seconds = WAIT_SECONDS_MIN

    def reset(self) -> None:
        self.last_data_at, self.wait_seconds = _seconds(), WAIT_SECONDS_MIN

    async def wait(self, retry_after_seconds: float) -> None:
        """Wait, plus `retry_after_seconds` as requested by the server; double the next wait."""
        # Jitter: after an outage the watches of all replicas must not return at once.
        jitter = random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, no security
        await asyncio.sleep(retry_after_seconds + self.wait_seconds * jitter)
        self.wait_seconds = min(self.wait_seconds * 2, max(WAIT_SECONDS_MAX, self.wait_seconds))


def _seconds() -> float:
    return asyncio.get_running_loop().time()


async def list_objects(
    reader: Reader, kind: Kind[ObjectT], selector: Mapping[str, str]
) -> tuple[list[ObjectT], core.ListMetadata]:
    """Return the objects of all pages, with the metadata of the last one."""
    objects: list[ObjectT] = []
    query = dict(selector)
    while True:
        page = await reader.list_page(kind, query)
        objects += [kind.decode(item, "list") for item in page.items or ()]
        if not page.metadata.continue_:
            return objects, page.metadata
        query["continue"] = page.metadata.continue_


async def _require_history(reader: Reader, kind: Kind[Any], selector: Mapping[str, str], version: int) -> None:
    """Ask for the newest version before a watch continues from this one. Raises HistoryLost if it is older.

    Versions decrease where etcd is restored from a backup. The server accepts a watch from a version that it has not
    reached, and sends nothing until then (kubernetes/kubernetes issue 107457, and recorded with 1.36.3).
    """
    page = await reader.list_page(kind, {**selector, "limit": "1"})  # without a version: never from a stale cache
    newest = int(page.metadata.resource_version)
    if newest < version:
        log.error(
            "resource version of the API server decreased",
            kind=kind.plural,
            version=newest,
            version_seen=version,
            step=f"if etcd was restored from a backup: {RESTORED_COMMAND}, then restart the pod watcher",
        )
        raise HistoryLost(f"watch {kind.plural}: the newest version is {newest}, and {version} was seen before")


async def _list(reader: Reader, kind: Kind[Any], selector: Mapping[str, str], now: Now) -> Listed:
    seen_at = now()  # before the first page: the list is at least this recent
    objects, metadata = await list_objects(reader, kind, selector)
    return Listed(kind=kind, objects=tuple(objects), version=int(metadata.resource_version), seen_at=seen_at)


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
    """Yield whole lines of the body; aiohttp's `readline` is limited to 128 KiB, which an object may exceed."""
    rest = b""
    try:
        async for chunk in response.content.iter_any():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if line:
                    yield line
            if len(rest) > LINE_BYTES_MAX:
                raise PermanentError(f"watch {kind.plural}: a line longer than {LINE_BYTES_MAX} bytes")
        if rest:  # closed regularly, but not by the server
            raise _Interrupted(f"watch {kind.plural}: closed in the middle of a line")
    except (aiohttp.ClientError, TimeoutError) as exc:
        raise _Interrupted(f"watch {kind.plural}: connection lost: {exc!r}") from exc


def _item(kind: Kind[Any], line: bytes, now: Now) -> Changed | Deleted | Bookmark:
    try:
        event = _event_decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise TransientError(f"watch {kind.plural}: truncated line, connection broke: {exc}") from exc
    if event.type == "ERROR":
        status = read_status(0, bytes(event.object))
        raise error_from_status(status.code, status, {}, f"watch {kind.plural}")
    if event.type == "BOOKMARK":  # an object of the kind with null fields, such as a pod's containers
        return Bookmark(kind=kind, version=decoded(core.Object, event.object, "bookmark").version, seen_at=now())
    # An undecodable object ends the watch: skipping it would hide a pod or node, which is worse than stale data that is
    # known to be stale.
    changed = kind.decode(event.object, "watch")
    if event.type == "DELETED":
        return Deleted(kind=kind, object=changed, seen_at=now())
    return Changed(kind=kind, object=changed, seen_at=now())
