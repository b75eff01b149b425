"""The audit trail: entries in a hash chain, and the check of a chain. No IO.

The hash of an entry is over the hash of the entry before it and its own canonical JSON. Whoever changes, removes or
inserts an entry must compute all later hashes anew. docs/audit.md has what that proves, and what it does not.
"""

import hashlib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from itertools import takewhile
from typing import Any, Literal

import msgspec

from gpu_autoscaler.model.errors import PermanentError

FIRST_HASH = "0" * 64  # before the first entry
CUT_VERB = "cut_audit"

Authentication = Literal[
    "shared token",  # one of the settings
    "kubernetes",  # TokenReview
    "oidc",
    "broker",  # the subject, which the broker grants to one user
    "none",  # nobody checks the name: a gateway on loopback, or an unknown caller
    "recorded",  # as the recorded fact says
    "internal",  # gpu-autoscaler itself
]
EntryPoint = Literal["rest", "cli", "page", "nats", "stream", "retention"]
Outcome = Literal["allowed", "refused", "failed"]


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A position in the chain."""

    number: int = 0  # of the entry; 0: before the first one
    hash: str = FIRST_HASH


BEGINNING = Link()


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Who did what, when, and through which entry point."""

    number: int = 0  # from 1, without gaps; the store sets it
    entry_id: str  # an entry is stored once
    at: str  # cluster time, UTC, with microseconds
    who: str = ""  # empty: unknown
    authentication: Authentication = "none"  # how the name is known
    entry_point: EntryPoint = "rest"  # cli and page are REST, distinguished by what the client says of itself
    agent: str = ""  # User-Agent, as the client says
    verb: str = ""
    object: str = ""  # job/<id>, directive/<key>, demand/<source>; empty: unknown
    project_id: str | None = None  # None: unknown, or it belongs to none
    outcome: Outcome = "allowed"  # allowed: granted, and passed on; refused: with the status; failed: could not be done
    status: int | None = None  # of the answer, unless it is a success
    reason: str = ""  # of a directive or a cancellation, or why the request was refused
    fact_id: str = ""  # of the recorded fact that gives the act effect
    unlisted_count: int = 0  # further refusals of the caller that have no entry of their own
    cut: Link | None = None  # the last removed entry, of an entry about expired ones

    @property
    def act_key(self) -> str:
        """What makes this act that of its fact; empty: it has none."""
        return f"{self.fact_id} {self.verb} {self.object}" if self.fact_id else ""


class AuditRow(msgspec.Struct, frozen=True, kw_only=True):
    """A stored entry."""

    number: int
    text: str  # canonical JSON of the entry
    hash: str

    @property
    def document(self) -> dict[str, Any]:
        """The entry as plain data; of a text that is none, the text."""
        try:
            document = msgspec.json.decode(self.text)
        except msgspec.DecodeError:
            document = None
        return document if isinstance(document, dict) else {"unreadable": self.text}


class AuditFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which entries are wanted; None does not restrict."""

    who: str | None = None
    verb: str | None = None
    object: str | None = None
    project_id: str | None = None
    entry_point: str | None = None
    outcome: str | None = None
    from_at: str | None = None
    before_at: str | None = None

    def wants(self, document: Mapping[str, Any]) -> bool:
        """Return whether the entry is wanted."""
        at = str(document["at"])
        return (
            all(document[name] == value for name, value in self.equal.items())
            and (self.from_at is None or at >= self.from_at)
            and (self.before_at is None or at < self.before_at)
        )

    @property
    def equal(self) -> dict[str, str]:
        """The fields that have one value, with it."""
        names = ("who", "verb", "object", "project_id", "entry_point", "outcome")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


EVERY_ENTRY = AuditFilter()


def instant_text(at: datetime) -> str:
    """Return an instant as entries have it: of one length, so that texts are in the order of time."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def canonical(document: object) -> str:
    """Return JSON with sorted keys and without spaces."""
    return msgspec.json.encode(document, order="sorted").decode()


def chained(previous_hash: str, text: str) -> str:
    """Return the hash of an entry: SHA-256, in hex, over the hash before it, a line feed, and its canonical JSON."""
    return hashlib.sha256(f"{previous_hash}\n{text}".encode()).hexdigest()


def next_row(head: Link, entry: AuditEntry) -> AuditRow:
    """Return the row of an entry that follows the head."""
    number = head.number + 1
    text = canonical(msgspec.structs.replace(entry, number=number))
    return AuditRow(number=number, text=text, hash=chained(head.hash, text))


def cut_entry(anchor: Link, stored: Iterable[AuditRow], *, before_at: str, at: str) -> AuditEntry | None:
    """Return the entry about the removal of the first rows that are older than `before_at`; its `cut` is the last of
    them. None: there are none. Raises PermanentError if one of them does not follow from those before it."""
    expired = tuple(takewhile(lambda row: str(row.document.get("at", "")) < before_at, stored))
    if all(row.document.get("verb") == CUT_VERB for row in expired):
        return None  # each cut adds an entry: it goes with the next others
    check = ChainCheck(anchor)
    for row in expired:
        check.take(row)
    if check.violation is not None:
        raise PermanentError(
            f"audit trail not cut: {check.violation}; run `gpu-autoscaler audit verify`, and restore a backup"
        )
    return AuditEntry(
        entry_id=f"cut/{check.last.number}",
        at=at,
        who="gpu-autoscaler",
        authentication="internal",
        entry_point="retention",
        verb=CUT_VERB,
        object=f"audit/{anchor.number + 1}-{check.last.number}",
        reason=f"older than {before_at}",
        cut=check.last,
    )


class ChainCheck:
    """Checks entries in order, and remembers the first that does not follow from those before it."""

    def __init__(self, after: Link = BEGINNING) -> None:
        self.violation: str | None = None
        self.entries_count = 0
        self._last = after
        self._cut: Link | None = None
        self._sought: dict[int, str] = {}

    @property
    def last(self) -> Link:
        """The last entry that follows."""
        return self._last

    def expect(self, link: Link) -> None:
        """Seek an entry with this number and hash."""
        if link.number <= self._last.number and link != self._last:
            self._broken(f"entry {link.number} is not in the chain: it begins after entry {self._last.number}")
        elif link.number > self._last.number:
            self._sought[link.number] = link.hash

    def take(self, row: AuditRow) -> None:
        """Check the next entry. Nothing after a violation is checked."""
        if self.violation is not None:
            return
        number = self._last.number + 1
        document = row.document
        if row.number != number:
            missing = f"entry {number} is missing" if row.number > number else f"entry {row.number} comes twice"
            self._broken(f"{missing}: entry {row.number} follows entry {number - 1}")
        elif document.get("number") != number:
            self._broken(f"entry {number} says that it is entry {document.get('number')!r}: it was moved or changed")
        elif chained(self._last.hash, row.text) != row.hash:
            self._broken(f"entry {number} does not have its hash: it was changed, or an entry before it")
        elif self._sought.pop(number, row.hash) != row.hash:
            self._broken(f"entry {number} has another hash than expected: entries up to it were replaced")
        else:
            self.entries_count += 1
            self._last = Link(number=number, hash=row.hash)
            if document.get("cut") is not None:
                self._cut = msgspec.convert(document["cut"], Link)

    def finish(self, *, anchor: Link, head: Link) -> None:
        """Check the end: all entries up to the head are there, and what is left out was removed by retention.

        `anchor`: the last removed entry, as the store has it; of an export that begins later, where it begins.
        """
        if self.violation is not None:
            return
        if self._last.number < head.number:
            first, last = self._last.number + 1, head.number
            self._broken(f"entry {first} is missing, and all up to entry {last}, which was the last")
        elif self._last.number == head.number and self._last.hash != head.hash:
            self._broken(f"entry {head.number} has another hash than the head of the chain")
        elif self._sought:
            self._broken(f"entry {min(self._sought)} is missing: the chain ends with entry {self._last.number}")
        elif anchor.number and self._cut != anchor:
            self._broken(f"entries up to {anchor.number} are missing, and no entry records their removal")

    def _broken(self, violation: str) -> None:
        self.violation = self.violation or violation
