"""The writes of the audit trail, in SQL for both databases. The row of the chain is locked first, so that all processes
append to one chain, in one order."""

from collections.abc import Sequence

from gpu_autoscaler.model.audit import AuditEntry, AuditRow, Link, cut_entry, next_row
from gpu_autoscaler.store.operations import Operation
from gpu_autoscaler.store.protocol import StreamPosition
from gpu_autoscaler.store.rows import Row, integer

CHAIN_COLUMNS = "anchor_number, anchor_hash, head_number, head_hash"
# An update that changes nothing locks the row in both databases.
_LOCK = f"UPDATE audit_chain SET head_number = head_number RETURNING {CHAIN_COLUMNS}"  # noqa: S608 - constants
_ADD = """
INSERT INTO audit (number, entry_id, act_key, entry, hash) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (entry_id) DO NOTHING RETURNING number
"""
_MOVE = """
INSERT INTO audit_positions (stream, sequence) VALUES (?, ?)
ON CONFLICT (stream) DO UPDATE SET sequence = excluded.sequence
"""


def audit_row(row: Row) -> AuditRow:
    """Return the entry in a row of `number, entry, hash`."""
    number, text, digest = row
    return AuditRow(number=integer(number), text=str(text), hash=str(digest))


def chain_links(row: Row) -> tuple[Link, Link]:
    """Return anchor and head in a row of CHAIN_COLUMNS."""
    anchor_number, anchor_hash, head_number, head_hash = row
    return (
        Link(number=integer(anchor_number), hash=str(anchor_hash)),
        Link(number=integer(head_number), hash=str(head_hash)),
    )


def page_query(where: Sequence[str], *, is_oldest_first: bool) -> str:
    """Return the query of a page with its chain, in one statement: a cut in between would look like a missing entry.

    Without entries one row is found, whose first columns are empty.
    """
    order = f"ORDER BY number {'ASC' if is_oldest_first else 'DESC'}"
    page = f"SELECT number, entry, hash FROM audit WHERE {' AND '.join(where)} {order} LIMIT ?"  # noqa: S608 - no values
    return f"SELECT number, entry, hash, {CHAIN_COLUMNS} FROM audit_chain LEFT JOIN ({page}) AS page ON TRUE {order}"  # noqa: S608 - no values


def append_audit(entries: Sequence[AuditEntry]) -> Operation[int]:
    """Add entries that are not stored yet; return how many were new."""
    (chain,) = yield _LOCK, ()
    _, head = chain_links(chain)
    last = yield from _append(head, entries)
    return last.number - head.number


def project_audit(entries: Sequence[AuditEntry], position: StreamPosition) -> Operation[bool]:
    """Add entries of recorded facts, and move the position in their stream; False if another process has moved it."""
    (chain,) = yield _LOCK, ()
    known = yield "SELECT sequence FROM audit_positions WHERE stream = ?", (position.stream,)
    if (integer(known[0][0]) if known else 0) != position.after:
        return False
    lacking = []
    for entry in entries:
        if not (yield "SELECT 1 FROM audit WHERE act_key = ? LIMIT 1", (entry.act_key,)):
            lacking.append(entry)  # noqa: PERF401 - a comprehension cannot yield
    yield from _append(chain_links(chain)[1], lacking)
    yield _MOVE, (position.stream, position.until)
    return True


def _append(head: Link, entries: Sequence[AuditEntry]) -> Operation[Link]:
    last = head
    for entry in entries:
        row = next_row(last, entry)
        if (yield _ADD, (row.number, entry.entry_id, entry.act_key, row.text, row.hash)):
            last = Link(number=row.number, hash=row.hash)
    if last != head:
        yield "UPDATE audit_chain SET head_number = ?, head_hash = ?", (last.number, last.hash)
    return last


def cut_audit(before_at: str, at: str, count_max: int) -> Operation[int]:
    """Remove the oldest entries from before this instant, and add an entry about it; return how many. Raises as
    `cut_entry`."""
    (chain,) = yield _LOCK, ()
    anchor, head = chain_links(chain)
    stored = yield "SELECT number, entry, hash FROM audit ORDER BY number LIMIT ?", (count_max,)
    entry = cut_entry(anchor, map(audit_row, stored), before_at=before_at, at=at)
    if entry is None or entry.cut is None:
        return 0
    yield "DELETE FROM audit WHERE number <= ?", (entry.cut.number,)
    yield "UPDATE audit_chain SET anchor_number = ?, anchor_hash = ?", (entry.cut.number, entry.cut.hash)
    yield from _append(head, (entry,))
    return entry.cut.number - anchor.number
