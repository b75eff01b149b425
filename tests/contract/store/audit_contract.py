"""Contract of every store's audit trail."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from tests.contract.store.contract import T0, Open

from gpu_autoscaler.model.audit import AuditEntry, AuditFilter, ChainCheck, Link, instant_text
from gpu_autoscaler.store.protocol import Store, StreamPosition

RunScript = Callable[[str], Awaitable[None]]  # runs SQL statements beside the store


def act(number: int, **changes: Any) -> AuditEntry:  # noqa: ANN401 - fields of an entry
    """Return an entry of an hour of its own."""
    fields: dict[str, Any] = {
        "entry_id": f"e-{number}",
        "at": instant_text(T0 + timedelta(hours=number)),
        "who": "anna",
        "authentication": "oidc",
        "verb": "cancel",
        "object": f"job/{number}",
        "project_id": "research",
    }
    return AuditEntry(**(fields | changes))


async def chain_of(store: Store) -> ChainCheck:
    """Check the whole trail, page by page."""
    check, cursor = ChainCheck((await store.audit()).anchor), None
    while True:
        page = await store.audit(cursor=cursor, count_max=3, is_oldest_first=True)
        for row in page.rows:
            check.take(row)
        cursor = page.next_cursor
        if cursor is None:
            check.finish(anchor=page.anchor, head=page.head)
            return check


# What somebody does to a trail of eight entries in the database, in the SQL of every store, and what the check says.
_SWAP = """
UPDATE audit SET number = CASE number WHEN 5 THEN -6 ELSE -5 END WHERE number IN (5, 6);
UPDATE audit SET number = -number WHERE number < 0;
"""
_INSERT = """
UPDATE audit SET number = -number - 1 WHERE number > 4;
UPDATE audit SET number = -number WHERE number < 0;
INSERT INTO audit SELECT 5, 'added', '', entry, hash FROM audit WHERE number = 4;
"""
_MOVE_ANCHOR = """
DELETE FROM audit WHERE number < 5;
UPDATE audit_chain SET anchor_number = 4, anchor_hash = 'a' || substr(head_hash, 2);
"""
TAMPERED = {
    "UPDATE audit SET entry = replace(entry, 'upkeep 4', 'upkeep 5') WHERE number = 5": "entry 5 does not have its",
    "UPDATE audit SET hash = replace(hash, substr(hash, 1, 8), '00000000') WHERE number = 5": "entry 5 does not have",
    "DELETE FROM audit WHERE number = 5": "entry 5 is missing",
    "DELETE FROM audit WHERE number > 5": "entry 6 is missing, and all up to entry 8",
    "DELETE FROM audit WHERE number < 5": "entry 1 is missing",
    _SWAP: "entry 5 says that it is entry 6",
    _INSERT: "entry 5 says that it is entry 4",
    _MOVE_ANCHOR: "entry 5 does not have its hash",
    "UPDATE audit SET entry = 'overwritten' WHERE number = 5": "entry 5 says that it is entry None",
}


class AuditContract:
    """The audit trail: one chain, whoever appends to it."""

    async def test_entries_are_a_chain_and_one_id_is_one_entry(self, open_store: Open) -> None:
        """Two openings of a store append to one chain; a repeated entry adds nothing."""
        stores = [await open_store(), await open_store()]
        await asyncio.gather(
            *(store.append_audit([act(number), act(number + 1)]) for number in range(0, 20, 2) for store in stores)
        )
        assert await stores[0].append_audit([act(3), act(3)]) == 0
        check = await chain_of(stores[1])
        assert (check.violation, check.entries_count) == (None, 20)
        for store in stores:
            await store.close()

    async def test_pages_hold_the_wanted_entries_in_either_order(self, open_store: Open) -> None:
        """By each field, and by time; a page names the next one."""
        store = await open_store()
        await store.append_audit([act(number, who="bob" if number % 3 == 0 else "anna") for number in range(10)])
        await store.append_audit([act(10, outcome="refused", status=403, project_id=None, entry_point="nats")])

        async def found(wanted: AuditFilter, *, is_oldest_first: bool = False) -> list[int]:
            numbers, cursor = [], None
            while True:
                page = await store.audit(wanted, cursor=cursor, count_max=2, is_oldest_first=is_oldest_first)
                numbers += [row.number for row in page.rows]
                cursor = page.next_cursor
                if cursor is None:
                    return numbers

        assert await found(AuditFilter(who="bob")) == [10, 7, 4, 1]
        assert await found(AuditFilter(who="bob"), is_oldest_first=True) == [1, 4, 7, 10]
        assert await found(AuditFilter(who="bob", project_id="vision")) == []
        for wanted in (AuditFilter(outcome="refused"), AuditFilter(object="job/10"), AuditFilter(entry_point="nats")):
            assert await found(wanted) == [11]
        since, until = (instant_text(T0 + timedelta(hours=hours)) for hours in (2, 5))
        assert await found(AuditFilter(from_at=since, before_at=until)) == [5, 4, 3]
        assert await found(AuditFilter()) == list(range(11, 0, -1))
        await store.close()

    async def test_facts_of_a_stream_are_added_once(self, open_store: Open) -> None:
        """The same part again adds nothing, nor a fact whose act has an entry; the position is that of the entries."""
        store = await open_store()
        assert await store.audit_position("JOB") == 0
        await store.append_audit([act(1, fact_id="f-1")])
        facts = [act(number, entry_id=f"fact/{number}", fact_id=f"f-{number}") for number in (1, 2)]
        part = StreamPosition(stream="JOB", after=0, until=7)
        assert await store.project_audit(facts, part)
        assert not await store.project_audit(facts, part)
        assert await store.audit_position("JOB") == 7
        other = act(2, entry_id="fact/other", fact_id="f-2", object="job/other")
        assert await store.project_audit([*facts, other], StreamPosition(stream="JOB", after=7, until=9))
        entries = [row.document["entry_id"] for row in (await store.audit(is_oldest_first=True)).rows]
        assert entries == ["e-1", "fact/2", "fact/other"], "an id of another fact hides no act"
        assert await store.audit_position("DEMAND") == 0
        await store.close()

    async def test_a_cut_chain_can_be_checked(self, open_store: Open) -> None:
        """Expired entries go, at most as many as asked for; an entry records it, and what is left follows from it."""
        store = await open_store()
        await store.append_audit([act(number) for number in range(10)])
        before, at = T0 + timedelta(hours=6), T0 + timedelta(days=400)
        whole = await chain_of(store)
        assert await store.cut_audit(before=before, at=at, count_max=4) == 4
        assert await store.cut_audit(before=before, at=at, count_max=4) == 2
        assert await store.cut_audit(before=before, at=at, count_max=4) == 0
        trail = await store.audit(is_oldest_first=True)
        assert [row.number for row in trail.rows] == [7, 8, 9, 10, 11, 12]
        assert [row.document["object"] for row in trail.rows[-2:]] == ["audit/1-4", "audit/5-6"]
        assert (trail.anchor.number, trail.head.number) == (6, 12)
        check = await chain_of(store)
        assert check.violation is None
        assert whole.last in {Link(number=row.number, hash=row.hash) for row in trail.rows}, "nothing is hashed anew"
        assert await store.cut_audit(before=at + timedelta(days=1), at=at, count_max=100) == 6
        assert (await chain_of(store)).violation is None
        assert await store.cut_audit(before=at + timedelta(days=1), at=at) == 0, "an entry about a cut needs no cut"
        await store.close()


class SqlAuditContract:
    """The trail in a database, which others may change as well. The implementation provides `run_script` too."""

    @pytest.mark.parametrize(("script", "broken"), TAMPERED.items())
    async def test_what_was_done_to_the_trail_is_found(
        self, open_store: Open, run_script: RunScript, script: str, broken: str
    ) -> None:
        """An entry that was changed, removed, inserted or moved, at the beginning and at the end as well."""
        store = await open_store()
        await store.append_audit([act(number, reason=f"upkeep {number}") for number in range(8)])
        assert (await chain_of(store)).violation is None
        await run_script(script)
        violation = (await chain_of(store)).violation
        assert violation is not None
        assert violation.startswith(broken)
        await store.close()
