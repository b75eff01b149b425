"""The base of all reasons.

A reason is data: a log line, a metric label (its tag) and a sentence are three views of one struct. To add a reason,
write a struct with its sentence and remedy in the module of its kind, and name it in the union at the end of that
module. `docs/reference/reasons.md` lists all reasons.
"""

from abc import abstractmethod
from collections.abc import Iterable
from typing import TypeVar

import msgspec

LISTED_COUNT_MAX = 5  # names in one reason; the others are counted
Name = TypeVar("Name", bound=str)


class Reason(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag_field="reason"):
    """Base of all reasons; subclasses are tagged with a snake_case name."""

    @classmethod
    def tag(cls) -> str:
        """The reason's name on the wire and in metric labels."""
        return str(cls.__struct_config__.tag)

    @abstractmethod
    def sentence(self) -> str:
        """Return what is the case and why, in one or more whole sentences."""

    @abstractmethod
    def remedy(self) -> str | None:
        """Return the next step in one or more whole sentences; None: there is nothing to do."""


class ReasonWithoutRemedy(Reason, frozen=True, kw_only=True):
    """Base of reasons that leave nothing to do."""

    def remedy(self) -> None:
        """None: there is no next step."""


def first_listed(names: Iterable[Name]) -> tuple[tuple[Name, ...], int]:
    """Return the first names, at most `LISTED_COUNT_MAX`, and how many more there are."""
    every = tuple(names)
    return every[:LISTED_COUNT_MAX], max(0, len(every) - LISTED_COUNT_MAX)
