"""Ledger of orders for groups that are sized by a desired capacity. Shared by all drivers; does no IO.

A call that sets a number takes no token, so the group itself remembers its orders. A driver reads group and members,
assigns new members to pending orders, oldest first (`with_members`), and returns the order's member if it has one; else
it writes the order (`with_order`) before or with the raised capacity, in a call that fails if the group changed; it
removes an order (`without_order`) only after the capacity is lowered and read back, and only then reports "refused".
Members from before the first pending order are foreign. A group offers one type in one zone under one purchase option.
"""

import base64
import binascii
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gpu_autoscaler.model.ids import ActionId

_PENDING, _FOREIGN, _NOTE = "+", "-", "/"
_SHORT_LENGTH = 22  # of an encoded action id at the end of a word, after the member
_HEX = re.compile(r"[0-9a-f]{32}")  # our own action ids: sixteen bytes, which are encoded in short form


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Orders that a group remembers. An order's `note` is the driver's own: no blanks, slashes or equals signs."""

    assigned: Mapping[str, tuple[ActionId, str]] = {}  # member: order and note; includes members that are gone
    pending: tuple[tuple[ActionId, str], ...] = ()  # orders without a member yet, oldest first
    foreign_members: frozenset[str] = frozenset()  # members that nobody ordered

    def with_members(self, members: Sequence[str]) -> "Ledger":
        """Return the ledger with new members, oldest first, assigned to pending orders."""
        new = [member for member in members if member not in self.assigned and member not in self.foreign_members]
        newly_assigned = dict(zip(new, self.pending, strict=False))
        return Ledger(
            assigned={**self.assigned, **newly_assigned},
            pending=self.pending[len(newly_assigned) :],
            foreign_members=self.foreign_members.intersection(members).union(new[len(newly_assigned) :]),
        )

    def with_order(self, action_id: ActionId, note: str = "") -> "Ledger":
        return msgspec.structs.replace(self, pending=(*self.pending, (action_id, note)))

    def without_order(self, action_id: ActionId) -> "Ledger":
        """Return the ledger without this order."""
        pending = tuple(entry for entry in self.pending if entry[0] != action_id)
        return msgspec.structs.replace(self, pending=pending)

    def with_lost_member(self, action_id: ActionId, member: str) -> "Ledger":
        """Return the ledger with a pending order assigned to a member that was never seen and is gone."""
        note = next(note for pending_id, note in self.pending if pending_id == action_id)
        assigned = {**self.assigned, member: (action_id, note)}
        return msgspec.structs.replace(self.without_order(action_id), assigned=assigned)

    def is_pending(self, action_id: ActionId) -> bool:
        return any(pending_id == action_id for pending_id, _ in self.pending)

    def member_of(self, action_id: ActionId) -> str | None:
        """Return the order's member, which may be gone; None if it has none yet."""
        return next((member for member, (assigned_id, _) in self.assigned.items() if assigned_id == action_id), None)

    def knows(self, action_id: ActionId) -> bool:
        """Return whether the order is pending or has a member."""
        return self.is_pending(action_id) or self.member_of(action_id) is not None

    def encode(self, length_max: int, count_max: int, members: Iterable[str]) -> list[str] | None:
        """Return the ledger as texts of at most this length; of members that are gone only the newest that fit. None if
        even the present members do not fit. Consecutive orders with the same note share its space."""
        alive = set(members)
        gone = sorted((member for member in self.assigned if member not in alive), key=lambda name: (len(name), name))
        kept_count = len(gone)
        while True:
            kept = alive.union(gone[len(gone) - kept_count :])
            packed = _packed(self._words(kept), length_max)
            if packed is not None and len(packed) <= count_max:
                return packed
            if kept_count == 0:
                return None
            kept_count //= 2

    def _words(self, kept: set[str]) -> Iterable[tuple[str | None, str]]:
        """Yield each word with the note that it needs before it, None for any."""
        yield from ((None, f"{_FOREIGN}{foreign_member}") for foreign_member in sorted(self.foreign_members))
        yield from ((None, f"{_PENDING}{action_id}/{note}") for action_id, note in self.pending)
        for member, (action_id, note) in sorted(self.assigned.items(), key=lambda entry: entry[1][1]):
            if member in kept and _HEX.fullmatch(action_id):
                yield note, f"{member}{_shortened(action_id)}"
            elif member in kept:
                yield None, f"{member}={action_id}/{note}"


def decode_ledger(texts: Iterable[str]) -> Ledger:
    """Return the ledger; unreadable words are skipped, as people may write to the tags too."""
    assigned: dict[str, tuple[ActionId, str]] = {}
    pending: list[tuple[ActionId, str]] = []
    foreign_members: set[str] = set()
    for text in texts:
        note = ""
        for word in text.split():
            member, _, order = word.partition("=")
            if word.startswith(_FOREIGN):
                foreign_members.add(word[1:])
            elif word.startswith(_PENDING):
                pending.append(_order_in(word[1:]))
            elif word.startswith(_NOTE):
                note = word[1:]
            elif "=" in word:
                assigned[member] = _order_in(order)
            elif (action_id := _lengthened(word[-_SHORT_LENGTH:])) is not None:
                assigned[word[:-_SHORT_LENGTH]] = (action_id, note)
    return Ledger(assigned=assigned, pending=tuple(pending), foreign_members=frozenset(foreign_members))


def _order_in(text: str) -> tuple[ActionId, str]:
    action_id, _, note = text.partition("/")
    return ActionId(action_id), note


def _shortened(action_id: ActionId) -> str:
    return base64.urlsafe_b64encode(bytes.fromhex(action_id)).decode().rstrip("=")


def _lengthened(text: str) -> ActionId | None:
    try:
        raw = base64.b64decode(f"{text}==", altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    return ActionId(raw.hex()) if len(raw) == 16 else None


def _packed(words: Iterable[tuple[str | None, str]], length_max: int) -> list[str] | None:
    texts: list[str] = []
    current_note = ""
    for note, word in words:
        head = "" if note in (None, current_note) else f"{_NOTE}{note} "
        if texts and len(texts[-1]) + 1 + len(head) + len(word) <= length_max:
            texts[-1] += f" {head}{word}"
        else:  # each text is readable by itself
            current_note = ""
            head = f"{_NOTE}{note} " if note else ""
            if len(head) + len(word) > length_max:
                return None
            texts.append(head + word)
        current_note = current_note if note is None else note
    return texts
