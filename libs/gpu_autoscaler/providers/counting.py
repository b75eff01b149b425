"""Orders of groups that are told a number: which newcomer is whose, and what still stands. Knows no cloud, does no IO.

A call that sets a number takes no token, so the group itself has to remember. A driver that counts

1. reads group and members, and takes in the newcomers (`seen`): one for each standing order, the oldest first;
2. returns the member of an order that has one;
3. writes a new order (`ordered`) on the group *before or with* the raised number, in a call that fails if the group was
   changed since it was read: who comes after a crash finds the order there and raises nothing again;
4. takes an order back (`withdrawn`) only once the number is lowered again and read back, and only then says "refused".

Members that were there before the first standing order belong to nobody, and are never taken for a newcomer. Members
are interchangeable, so a group sells one type in one zone under one purchase option.
"""

import base64
import binascii
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gpu_autoscaler.model.ids import ActionId

_STANDING, _STRANGER, _NOTE = "+", "-", "/"
_SHORT_LENGTH = 22  # at the end of a word, behind the member
_HEX = re.compile(r"[0-9a-f]{32}")  # as our own actions are called: sixteen bytes, and short as such


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """What a group remembers. `note` of an order is the driver's own: without blanks, slashes and equals signs."""

    named: Mapping[str, tuple[ActionId, str]] = {}  # member: its order, with the note; members that are gone too
    standing: tuple[tuple[ActionId, str], ...] = ()  # orders without a member yet, oldest first
    strangers: frozenset[str] = frozenset()  # members that nobody ordered

    def seen(self, members: Sequence[str]) -> "Ledger":
        """Return it with the newcomers among these members, oldest first, given to the orders that stand."""
        new = [member for member in members if member not in self.named and member not in self.strangers]
        given = dict(zip(new, self.standing, strict=False))
        return Ledger(
            named={**self.named, **given},
            standing=self.standing[len(given) :],
            strangers=self.strangers.intersection(members).union(new[len(given) :]),
        )

    def ordered(self, action_id: ActionId, note: str = "") -> "Ledger":
        """Return it with one more order that stands."""
        return msgspec.structs.replace(self, standing=(*self.standing, (action_id, note)))

    def withdrawn(self, action_id: ActionId) -> "Ledger":
        """Return it without this order."""
        left = tuple(one for one in self.standing if one[0] != action_id)
        return msgspec.structs.replace(self, standing=left)

    def missed(self, action_id: ActionId, member: str) -> "Ledger":
        """Return it with an order that stands given to a member that nobody has seen, and that is gone."""
        note = next(note for one, note in self.standing if one == action_id)
        return msgspec.structs.replace(self.withdrawn(action_id), named={**self.named, member: (action_id, note)})

    def stands(self, action_id: ActionId) -> bool:
        """Return whether the order has no member yet."""
        return any(one == action_id for one, _ in self.standing)

    def member_of(self, action_id: ActionId) -> str | None:
        """Return the order's member, which may be gone; None: it has none yet."""
        return next((member for member, (one, _) in self.named.items() if one == action_id), None)

    def texts(self, length_max: int, count_max: int, members: Iterable[str]) -> list[str] | None:
        """Return it as texts of that length; of members that are gone the newest, as far as there is room.

        None: there is no room even for what is there. Orders that share a note share the room that it takes.
        """
        alive = set(members)
        gone = sorted((one for one in self.named if one not in alive), key=lambda one: (len(one), one))
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
        """Yield each word with the note that it stands under, None for any."""
        yield from ((None, f"{_STRANGER}{stranger}") for stranger in sorted(self.strangers))
        yield from ((None, f"{_STANDING}{action_id}/{note}") for action_id, note in self.standing)
        for member, (action_id, note) in sorted(self.named.items(), key=lambda one: one[1][1]):
            if member in kept and _HEX.fullmatch(action_id):
                yield note, f"{member}{_shortened(action_id)}"
            elif member in kept:
                yield None, f"{member}={action_id}/{note}"


def decode_ledger(texts: Iterable[str]) -> Ledger:
    """Return what the texts say; what cannot be understood is skipped, as people may write there too."""
    named: dict[str, tuple[ActionId, str]] = {}
    standing: list[tuple[ActionId, str]] = []
    strangers: set[str] = set()
    for text in texts:
        noted = ""
        for word in text.split():
            member, _, order = word.partition("=")
            if word.startswith(_STRANGER):
                strangers.add(word[1:])
            elif word.startswith(_STANDING):
                standing.append(_order_in(word[1:]))
            elif word.startswith(_NOTE):
                noted = word[1:]
            elif "=" in word:
                named[member] = _order_in(order)
            elif (action_id := _lengthened(word[-_SHORT_LENGTH:])) is not None:
                named[word[:-_SHORT_LENGTH]] = (action_id, noted)
    return Ledger(named=named, standing=tuple(standing), strangers=frozenset(strangers))


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
    noted = ""
    for note, word in words:
        head = "" if note in (None, noted) else f"{_NOTE}{note} "
        if texts and len(texts[-1]) + 1 + len(head) + len(word) <= length_max:
            texts[-1] += f" {head}{word}"
        else:  # each text can be read by itself
            noted = ""
            head = f"{_NOTE}{note} " if note else ""
            if len(head) + len(word) > length_max:
                return None
            texts.append(head + word)
        noted = noted if note is None else note
    return texts
