"""Every change of a chain is found, and the first broken entry is named."""

import hashlib
import json
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_autoscaler.model.audit import (
    BEGINNING,
    FIRST_HASH,
    AuditEntry,
    AuditRow,
    ChainCheck,
    Link,
    canonical,
    chained,
    cut_entry,
    instant_text,
    next_row,
)
from gpu_autoscaler.model.errors import PermanentError

Rows = list[AuditRow]


def entry(number: int, who: str = "anna") -> AuditEntry:
    """Return an entry of the first minutes of a day."""
    at = f"2026-11-21T00:{number:02d}:00.000000Z"
    return AuditEntry(entry_id=f"e-{number}", at=at, who=who, verb="cancel", object=f"job/{number}", reason="näh")


def rows_of(entries: list[AuditEntry], after: Link = BEGINNING) -> Rows:
    """Return the chain of these entries."""
    rows: Rows = []
    for each in entries:
        row = next_row(after, each)
        rows.append(row)
        after = link_of(row)
    return rows


def link_of(row: AuditRow) -> Link:
    """Return the position of an entry."""
    return Link(number=row.number, hash=row.hash)


def checked(rows: Rows, head: Link, *, anchor: Link = BEGINNING, expected: Link | None = None) -> ChainCheck:
    """Check a chain up to its head."""
    check = ChainCheck(anchor)
    if expected is not None:
        check.expect(expected)
    for row in rows:
        check.take(row)
    check.finish(anchor=anchor, head=head)
    return check


TEN = rows_of([entry(number) for number in range(1, 11)])
HEAD = link_of(TEN[-1])


def test_a_chain_as_it_was_written_is_whole() -> None:
    """An empty one as well; the hashes can be computed with any tool."""
    check = checked(TEN, HEAD)
    assert (check.violation, check.entries_count, check.last) == (None, 10, HEAD)
    assert checked([], BEGINNING).violation is None
    text = json.dumps(json.loads(TEN[0].text), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert TEN[0].hash == hashlib.sha256(f"{'0' * 64}\n{text}".encode()).hexdigest()
    assert chained(FIRST_HASH, canonical(TEN[0].document)) == TEN[0].hash


def changed(rows: Rows) -> Rows:
    """Somebody else did it."""
    rows[4] = replace(rows[4], text=rows[4].text.replace("anna", "anne"))
    return rows


def changed_with_its_hash(rows: Rows) -> Rows:
    """The hash of the changed entry fits; that of the next one does not."""
    text = rows[4].text.replace("anna", "anne")
    rows[4] = replace(rows[4], text=text, hash=chained(rows[3].hash, text))
    return rows


def inserted(rows: Rows) -> Rows:
    """An entry that takes the place of another one, which moves up with all that follow."""
    added = next_row(link_of(rows[3]), entry(99))
    moved = [replace(row, number=row.number + 1) for row in rows[4:]]
    return [*rows[:4], added, *moved]


def reordered(rows: Rows) -> Rows:
    """Two entries in each other's place."""
    rows[4], rows[5] = replace(rows[5], number=5), replace(rows[4], number=6)
    return rows


def unreadable(rows: Rows) -> Rows:
    """No JSON any more."""
    rows[4] = replace(rows[4], text="overwritten")
    return rows


def written_anew(rows: Rows) -> Rows:
    """All hashes fit, but for the head, which the store has beside."""
    return rows_of([entry(row.number, "anne") for row in rows])


@pytest.mark.parametrize(
    ("tamper", "broken"),
    [
        (changed, "entry 5 does not have its hash"),
        (changed_with_its_hash, "entry 6 does not have its hash"),
        (lambda rows: [*rows[:4], *rows[5:]], "entry 5 is missing"),
        (lambda rows: rows[1:], "entry 1 is missing"),
        (lambda rows: rows[:8], "entry 9 is missing, and all up to entry 10"),
        (lambda rows: [*rows[:4], rows[4], *rows[4:]], "entry 5 comes twice"),
        (inserted, "entry 6 says that it is entry 5"),
        (reordered, "entry 5 says that it is entry 6"),
        (lambda rows: [*rows[:4], rows[5], rows[4], *rows[6:]], "entry 5 is missing"),
        (unreadable, "entry 5 says that it is entry None"),
        (written_anew, "entry 10 has another hash"),
    ],
)
def test_what_was_done_to_a_chain_is_found(tamper: Callable[[Rows], Rows], broken: str) -> None:
    """The first broken entry is named, and no later one."""
    violation = checked(tamper(list(TEN)), HEAD).violation
    assert violation is not None
    assert violation.startswith(broken)


def test_a_chain_computed_anew_is_found_by_what_was_kept_elsewhere_alone() -> None:
    """With its head it is whole: a hash chain proves no more than that."""
    forged = rows_of([entry(number, "anne") for number in range(1, 11)])
    head = link_of(forged[-1])
    assert checked(forged, head).violation is None
    for number in (1, 7, 10):
        kept = link_of(TEN[number - 1])
        assert checked(TEN, HEAD, expected=kept).violation is None
        assert str(checked(forged, head, expected=kept).violation).startswith(f"entry {number} has another hash than")
        shorter = rows_of([entry(count) for count in range(1, number)])
        shorter_head = link_of(shorter[-1]) if shorter else BEGINNING
        violation = checked(shorter, shorter_head, expected=kept).violation
        assert violation == f"entry {number} is missing: the chain ends with entry {number - 1}"


def cut_chain(number: int) -> tuple[Rows, Link]:
    """Return what is left of the ten after those up to this number are cut, with the anchor."""
    about = cut_entry(BEGINNING, TEN, before_at=f"2026-11-21T00:{number + 1:02d}:00.000000Z", at=entry(30).at)
    assert about is not None
    assert about.cut == link_of(TEN[number - 1])
    return [*TEN[number:], next_row(HEAD, about)], about.cut


def test_a_cut_is_recorded_in_the_chain() -> None:
    """What is left is whole; whoever removes more and moves the anchor is found."""
    rows, anchor = cut_chain(4)
    assert checked(rows, link_of(rows[-1]), anchor=anchor).violation is None
    moved = link_of(rows[0])
    violation = checked(rows[1:], link_of(rows[-1]), anchor=moved).violation
    assert violation == "entries up to 5 are missing, and no entry records their removal"
    kept = checked(rows, link_of(rows[-1]), anchor=anchor, expected=link_of(TEN[1])).violation
    assert kept == "entry 2 is not in the chain: it begins after entry 4"


def test_a_broken_part_is_not_cut() -> None:
    """Retention would remove the proof."""
    with pytest.raises(PermanentError, match="audit trail not cut: entry 5 does not have its hash"):
        cut_entry(BEGINNING, changed(list(TEN)), before_at=entry(9).at, at=entry(30).at)
    about = cut_entry(BEGINNING, changed(list(TEN)), before_at=entry(4).at, at=entry(30).at)
    assert about is not None, "entries before the broken one expire"
    assert cut_entry(BEGINNING, TEN, before_at=entry(1).at, at=entry(30).at) is None


def test_texts_of_instants_are_in_the_order_of_time() -> None:
    """With or without a fraction of a second."""
    early = datetime(2026, 11, 21, tzinfo=UTC)
    assert (
        instant_text(early) < instant_text(early.replace(microsecond=500_000)) < instant_text(early.replace(second=1))
    )


_TEXTS = st.text(max_size=20)
_ENTRIES = st.builds(
    AuditEntry, entry_id=_TEXTS, at=_TEXTS, who=_TEXTS, agent=_TEXTS, verb=_TEXTS, object=_TEXTS, reason=_TEXTS,
    status=st.none() | st.integers(100, 599),
)  # fmt: skip


@for_all(st.lists(_ENTRIES, min_size=1, max_size=12), st.data())
def test_any_change_of_any_chain_is_found(entries: list[AuditEntry], data: st.DataObject) -> None:
    """Of whatever texts; also after an export, which goes through JSON. Entries before the change are not blamed."""
    rows = rows_of(entries)
    head = link_of(rows[-1])
    exported = [replace(row, text=canonical(json.loads(row.text))) for row in rows]
    assert checked(exported, head).violation is None
    place = data.draw(st.integers(0, len(rows) - 1))
    kind = data.draw(st.sampled_from(("change", "remove", "swap", "repeat", "hash")))
    forged = list(rows)
    if kind == "change":
        other = replace(entries[place], number=place + 1, who=entries[place].who + "!")
        forged[place] = replace(rows[place], text=canonical(other))
    elif kind == "remove":
        del forged[place]
    elif kind == "repeat":
        forged.insert(place, forged[place])
    elif kind == "hash":
        forged[place] = replace(rows[place], hash="f" * 64)
    else:
        other_place = (place + 1) % len(rows)
        forged[place], forged[other_place] = forged[other_place], forged[place]
    check = checked(forged, head)
    if forged == rows:  # a swap of one entry with itself
        assert check.violation is None
    else:
        assert check.violation is not None
        assert check.last.number <= place + 1
