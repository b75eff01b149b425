"""Answers kept for as long as they are asked from the very same records. Used by readings that repeat, tick after tick.

Records are frozen and `fold` replaces only what a fact changed, so what is the same object is the same content: a kept
answer is the answer that computing it again would give. Nothing is ever compared by value here, as that would take as
long as computing.
"""

from collections.abc import Callable, Hashable, Mapping
from functools import wraps
from itertools import compress
from operator import is_not
from typing import Generic, TypeVar, TypeVarTuple

Args = TypeVarTuple("Args")
Answer = TypeVar("Answer")
T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)


def remembered(count_max: int) -> Callable[[Callable[[*Args], Answer]], Callable[[*Args], Answer]]:
    """Keep the function's answers to the last `count_max` different arguments; of frozen arguments only."""

    def decorate(function: Callable[[*Args], Answer]) -> Callable[[*Args], Answer]:
        # The arguments are kept with the answer: an object that is kept shares its id with no other.
        answers: dict[tuple[int, ...], tuple[tuple[*Args], Answer]] = {}

        @wraps(function)
        def ask(*args: *Args) -> Answer:
            key = tuple(map(id, args))
            found = answers.get(key)
            if found is None:
                if len(answers) >= count_max:
                    answers.pop(next(iter(answers)))
                found = answers[key] = (args, function(*args))
            return found[1]

        return ask

    return decorate


def changed(before: Mapping[Key, object], now: Mapping[Key, object]) -> set[Key]:
    """Return the keys that came, went, or have another object than before."""
    if before is now:
        return set()
    found = set(compress(now, map(is_not, now.values(), map(before.get, now))))  # of ten thousand, most often, one
    came_count = sum(key not in before for key in found)
    if len(before) + came_count != len(now):
        found.update(key for key in before if key not in now)
    return found


class Kept(Generic[T]):
    """Things by the identities that they were made from, until they go unused while `count_max` others are made.

    A thing has to hold on to what it was made from, for the reason above.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._young: dict[tuple[int, ...], T] = {}
        self._old: dict[tuple[int, ...], T] = {}

    def get(self, key: tuple[int, ...]) -> T | None:
        """Return the thing; None: it has to be made."""
        found = self._young.get(key)
        if found is None and (found := self._old.get(key)) is not None:
            self.put(key, found)
        return found

    def put(self, key: tuple[int, ...], thing: T) -> None:
        """Keep it."""
        if len(self._young) >= self._count_max:
            self._old, self._young = self._young, {}
        self._young[key] = thing
