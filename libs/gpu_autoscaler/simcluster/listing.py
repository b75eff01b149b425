"""Lists: whole, in pages, and at an older version, which is rebuilt from the log.

Source: Kubernetes documentation, "Kubernetes API Concepts: Retrieving large results sets in chunks" and "Semantics for
get and list" (read 2026-11-21).
"""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from gpu_autoscaler.simcluster import answers
from gpu_autoscaler.simcluster.kinds import Kind
from gpu_autoscaler.simcluster.objects import Json
from gpu_autoscaler.simcluster.selectors import Test, query_test
from gpu_autoscaler.simcluster.store import Record, Store, Table

TOKEN_VERSION = "meta.k8s.io/v1"  # noqa: S105 - the format's name, no secret


@dataclass(frozen=True, slots=True)
class Page:
    """One answer to a list: its objects, their version, and the continue token."""

    records: list[Record]
    version: int
    token: str = ""
    left_count: int = 0


@dataclass(frozen=True, slots=True)
class _Start:
    version: int  # 0: whatever is current
    after: str  # key of the last object before this page, "" for the first page
    exact: bool


def list_page(store: Store, kind: Kind, namespace: str | None, query: Mapping[str, str]) -> Page:
    """Return the requested page. Raises ApiRefusal 400, 410, 504."""
    table = store.table(kind.table)
    test = query_test(kind, query.get("labelSelector", ""), query.get("fieldSelector", ""))
    limit = positive_integer(query.get("limit", ""), "limit")
    start = _start(store, table, query, limit)
    if start.exact and start.version < store.version:
        if start.version < table.log.dropped_through:
            raise (answers.continue_expired(make_token(-1, start.after)) if start.after else answers.list_expired())
        records, version = _as_of(table, start.version), start.version
        keys = sorted(key for key in records if namespace is None or key.startswith(namespace + "/"))
    else:
        records, version, keys = table.records, store.version, table.keys(namespace)
    if start.after:
        keys = [key for key in keys if key > start.after]
    return _cut(records, keys, version, test, 0 if query.get("resourceVersion") == "0" else limit)


def positive_integer(text: str, name: str) -> int:
    """Return a query's whole number, 0 where it is missing. Raises ApiRefusal 400."""
    if text and not text.isdigit():
        raise answers.bad_request(f'invalid value for {name}: "{text}": must be a non-negative integer')
    return int(text or 0)


def make_token(version: int, after: str) -> str:
    """Return a continue token: opaque to clients, shaped as the real one."""
    raw = msgspec.json.encode({"v": TOKEN_VERSION, "rv": version, "start": after + "\0"})
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _read_token(token: str) -> tuple[int, str]:
    try:
        raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        content: Json = msgspec.json.decode(raw, type=dict)
        return int(content["rv"]), str(content["start"]).rstrip("\0")
    except (binascii.Error, msgspec.DecodeError, KeyError, ValueError) as exc:
        raise answers.bad_request(f"invalid continue token: continue key is not valid: {exc}") from exc


def _start(store: Store, table: Table, query: Mapping[str, str], limit: int) -> _Start:
    if query.get("continue"):
        version, after = _read_token(query["continue"])
        return _Start(0, after, exact=False) if version < 0 else _Start(version, after, exact=True)
    version = positive_integer(query.get("resourceVersion", ""), "resourceVersion")
    match = query.get("resourceVersionMatch", "")
    if version > store.version:
        raise answers.version_of_the_future(version, store.version)
    exact = match == "Exact" or (not match and limit > 0 and version > 0)
    if exact and version < table.log.dropped_through:
        raise answers.list_expired()
    return _Start(version, "", exact=exact)


def _as_of(table: Table, version: int) -> dict[str, Record]:
    """Return the records at a version that the log still covers."""
    records = dict(table.records)
    for change in reversed(table.log.since(version) or ()):
        if change.previous is None:
            records.pop(change.record.key, None)
        else:
            records[change.record.key] = change.previous
    return records


def _cut(records: Mapping[str, Record], keys: list[str], version: int, test: Test | None, limit: int) -> Page:
    chosen: list[Record] = []
    for index, key in enumerate(keys):
        record = records[key]
        if test and not test(record.object):
            continue
        if limit and len(chosen) == limit:
            # With a selector the server does not know how many are left, and omits the count.
            left = 0 if test else len(keys) - index
            return Page(chosen, version, make_token(version, chosen[-1].key), left)
        chosen.append(record)
    return Page(chosen, version)
