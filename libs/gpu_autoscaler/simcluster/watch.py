"""Watches: the stream of changes after a version, with bookmarks, 410 and an end.

A watch only stores its position in the log. A reader too slow for the log's length gets 410, as from the real server.
Times here are wall time: they belong to the connection, not to the cluster.
"""

import asyncio
import random
from collections.abc import Iterable, Mapping

import msgspec
from aiohttp import web

from gpu_autoscaler.simcluster import answers
from gpu_autoscaler.simcluster.faults import Faults
from gpu_autoscaler.simcluster.kinds import Kind
from gpu_autoscaler.simcluster.listing import positive_integer
from gpu_autoscaler.simcluster.objects import Json
from gpu_autoscaler.simcluster.selectors import Test, query_test
from gpu_autoscaler.simcluster.store import Change, ChangeType, Record, Store

# The real server sends a bookmark about once a minute (KEP-956); here sooner, so that tests and demos see them.
BOOKMARK_SECONDS = 5.0
# Without timeoutSeconds the real server picks 30 to 60 minutes (`--min-request-timeout`, read 2026-11-21).
TIMEOUT_SECONDS_MIN = 1800
INITIAL_EVENTS_END = "k8s.io/initial-events-end"
# Content of a bookmark besides its version: an empty object of the kind, as a real server's encoder writes it.
_BLANKS: dict[str, Json] = {
    "pods": {"spec": {"containers": None}, "status": {}},
    "nodes": {"spec": {}, "status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 0}}}},
    "jobs.batch": {"spec": {"template": {"metadata": {}, "spec": {"containers": None}}}, "status": {}},
    "poddisruptionbudgets.policy": {
        "spec": {},
        "status": dict.fromkeys(("disruptionsAllowed", "currentHealthy", "desiredHealthy", "expectedPods"), 0),
    },
}


def encoded(kind: Kind, record: Record, *, with_kind: bool = True) -> bytes:
    """Return the object as this kind shows it; list items of built-in kinds carry no apiVersion and kind."""
    body = msgspec.json.encode(kind.view(record.object)) if kind.view else record.encoded
    if not with_kind:
        return body
    return b'{"kind":"%b","apiVersion":"%b",%b' % (kind.kind.encode(), kind.api_version.encode(), body[1:])


class Watch:
    """One watch of one client: position, and filter."""

    def __init__(self, store: Store, kind: Kind, namespace: str | None, query: Mapping[str, str]) -> None:
        """Raise ApiRefusal 400 or 422 for an invalid query."""
        self._store = store
        self._kind = kind
        self._table = store.table(kind.table)
        self._namespace = namespace
        self._test: Test | None = query_test(kind, query.get("labelSelector", ""), query.get("fieldSelector", ""))
        self._bookmarks = query.get("allowWatchBookmarks", "").lower() in ("1", "true")
        self._wants_initial = query.get("sendInitialEvents", "").lower() in ("1", "true")
        match = query.get("resourceVersionMatch", "")
        if bool(match) != ("sendInitialEvents" in query) or match not in ("", "NotOlderThan"):
            rule = "Forbidden: resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided"
            if not match:
                rule = "Forbidden: sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"
            options = Kind(group="meta.k8s.io", kind="ListOptions", plural="listoptions")
            raise answers.invalid(options, "", [("resourceVersionMatch", "FieldValueForbidden", rule)])
        self._start = positive_integer(query.get("resourceVersion", ""), "resourceVersion")
        timeout = positive_integer(query.get("timeoutSeconds", ""), "timeoutSeconds")
        spread = random.uniform(1, 2)  # noqa: S311 - spreads reconnects, decides nothing
        self._timeout_seconds = timeout or TIMEOUT_SECONDS_MIN * spread

    async def run(self, request: web.Request, faults: Faults) -> web.StreamResponse:
        """Stream until the timeout, the client disconnects, history is lost, or a fault cuts the watch."""
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        wake = asyncio.Event()

        def cut() -> None:
            if request.transport is not None:
                request.transport.abort()

        self._table.waiting.add(wake)
        faults.watches.add(cut)
        try:
            await self._stream(response, wake)
        except ConnectionError:
            return response  # the client disconnected
        finally:
            self._table.waiting.discard(wake)
            faults.watches.discard(cut)
        return response

    async def _stream(self, response: web.StreamResponse, wake: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_seconds
        seen = self._start
        if not seen or self._wants_initial:
            seen = max(seen, self._store.version)
            await response.write(b"".join(self._initial_lines(seen)))
        bookmark_at = loop.time() + BOOKMARK_SECONDS
        while True:
            wake.clear()
            is_over = loop.time() >= deadline
            has_bookmarks = self._bookmarks and seen <= self._store.version  # none from a version of the future
            changes = self._table.log.since(seen)
            if changes is None:
                refusal = answers.watch_too_old(seen, self._table.log.dropped_through)
                await response.write(_line("ERROR", msgspec.json.encode(refusal.status)))
                return
            if changes:
                seen = changes[-1].record.version
                await response.write(b"".join(self._lines(changes)))
            elif has_bookmarks and (is_over or loop.time() >= bookmark_at):
                # Only here, where nothing is unsent: a reader continues from a bookmark.
                seen = self._store.version
                await response.write(self._bookmark(seen))
                bookmark_at = loop.time() + BOOKMARK_SECONDS
            elif not is_over:
                await _sleep_or(wake, min(deadline, bookmark_at if has_bookmarks else deadline) - loop.time())
            if is_over:
                return

    def _initial_lines(self, version: int) -> Iterable[bytes]:
        for key in self._table.keys(self._namespace):
            record = self._table.records[key]
            if self._test is None or self._test(record.object):
                yield _line("ADDED", encoded(self._kind, record))
        if self._wants_initial and self._bookmarks:
            yield self._bookmark(version, {"annotations": {INITIAL_EVENTS_END: "true"}})

    def _lines(self, changes: Iterable[Change]) -> Iterable[bytes]:
        for change in changes:
            if self._namespace and not change.record.key.startswith(self._namespace + "/"):
                continue
            seen_as = change.type if self._test is None else _as_seen(change, self._test)
            if seen_as:
                yield _line(seen_as, encoded(self._kind, change.record))

    def _bookmark(self, version: int, metadata: Json | None = None) -> bytes:
        body = {
            "kind": self._kind.kind,
            "apiVersion": self._kind.api_version,
            "metadata": {"resourceVersion": str(version), **(metadata or {})},
            **_BLANKS.get(self._kind.table, {}),
        }
        return _line("BOOKMARK", msgspec.json.encode(body))


def _as_seen(change: Change, test: Test) -> ChangeType | None:
    """Return the change type for a watch with a selector: objects enter and leave the selection."""
    was_in = change.previous is not None and test(change.previous.object)
    is_in = change.type != "DELETED" and test(change.record.object)
    if was_in and is_in:
        return "MODIFIED"
    if is_in:
        return "ADDED"
    return "DELETED" if was_in else None


def _line(line_type: str, body: bytes) -> bytes:
    return b'{"type":"%b","object":%b}\n' % (line_type.encode(), body)


async def _sleep_or(wake: asyncio.Event, seconds: float) -> None:
    """Return when woken or at the timeout."""
    try:
        await asyncio.wait_for(wake.wait(), timeout=max(seconds, 0.0))
    except TimeoutError:
        return
