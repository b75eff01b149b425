"""Values that conditions on devices are about, and what is true of them: true, false, or not known (None). Pure.

Used by `cel.py`, which reads the conditions, and by whoever describes a device.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from gpu_autoscaler.model.resources import parse_quantity_milli

_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")


class Amount(NamedTuple):
    """A quantity in thousandths, between these two."""

    low_milli: int
    high_milli: int


class Version(NamedTuple):
    """A semantic version without a pre-release."""

    major: int
    minor: int
    patch: int


class VagueWord(ABC):
    """A word of which not everything is known."""

    @abstractmethod
    def is_word(self, word: str) -> bool | None:
        """Whether it is this one; None: it may be."""

    @abstractmethod
    def has_part(self, part: str) -> bool | None:
        """Whether it contains this; None: it may."""


Value = object | None  # bool, int, str, Amount, Version, VagueWord, Items; None: not known
Names = Mapping[str, Value]


class Device(NamedTuple):
    """What is known of a device, its attributes and capacity by the domain and their name in it."""

    driver: str
    attributes: Mapping[str, Names]
    capacity: Mapping[str, Names]
    is_all: bool  # it has nothing else; False: it may


class OneDomain(NamedTuple):
    """One domain of a device."""

    names: Names
    is_all: bool

    def __contains__(self, name: object) -> bool:
        return name in self.names


class AllDomains(NamedTuple):
    """All domains of a device."""

    domains: Mapping[str, Names]
    is_all: bool


class Items(NamedTuple):
    """A list in a condition."""

    items: tuple[Value, ...]


def amount(text: str) -> Amount:
    """Return a quantity as Kubernetes writes it. Raises ValueError."""
    milli = parse_quantity_milli(text)
    return Amount(milli, milli)


def version(text: str) -> Version | None:
    """Return the version; None for one with more than three numbers."""
    found = _VERSION.fullmatch(text)
    return None if found is None else Version(int(found[1]), int(found[2]), int(found[3]))


def part_of(whole: Value, key: Value) -> Value:
    """Return what a value has by this name; None: not known, or an error in CEL."""
    if not isinstance(key, str):
        return None
    match whole:
        case Device():
            parts = {
                "driver": whole.driver,
                "attributes": AllDomains(whole.attributes, whole.is_all),
                "capacity": AllDomains(whole.capacity, whole.is_all),
            }
            return parts.get(key)
        case AllDomains():
            return OneDomain(whole.domains.get(key, {}), whole.is_all)
        case OneDomain():
            return whole.names.get(key)
    return None


def any_of(values: Iterable[Value]) -> bool | None:
    """True where one is, whatever of the others is not known."""
    is_known = True
    for value in values:
        if value is True:
            return True
        is_known = is_known and value is False
    return False if is_known else None


def not_of(value: Value) -> bool | None:
    """Return the opposite, where it is known."""
    return not value if isinstance(value, bool) else None


def is_in(item: Value, whole: Value) -> bool | None:
    """Return whether a list has the item, or a map the key."""
    match whole:
        case OneDomain():
            return True if item in whole else False if whole.is_all and isinstance(item, str) else None
        case AllDomains():
            return True if item in whole.domains else False if whole.is_all and isinstance(item, str) else None
        case Items():
            return any_of(compare("==", item, each) for each in whole.items)
    return None


def compare(sign: str, left: Value, right: Value) -> bool | None:
    """Return what a comparison says of two values."""
    if sign == "!=":
        return not_of(compare("==", left, right))
    if sign == "==":
        return _is_same(left, right)
    if isinstance(left, bool) or isinstance(right, bool):
        return None
    if isinstance(left, _Order) and isinstance(right, int):
        return left.than(sign, right)
    if isinstance(left, int) and isinstance(right, int):
        return _holds(sign, left, right)
    return None


def _holds(sign: str, left: int, right: int) -> bool:
    return {
        "==": left == right,
        "<": left < right,
        "<=": left <= right,
        ">": left > right,
        ">=": left >= right,
    }[sign]


def _is_same(left: Value, right: Value) -> bool | None:
    if left is None or right is None:
        return None
    if isinstance(left, Amount) and isinstance(right, Amount):
        return _order(left, right).than("==", 0)
    if isinstance(left, _Order) and isinstance(right, int):
        return left.than("==", right)
    if isinstance(left, VagueWord) and isinstance(right, str):
        return left.is_word(right)
    if type(left) is not type(right) or not isinstance(left, bool | int | str | Version):
        return None
    return left == right


class _Order(NamedTuple):
    """What one is to another: -1, 0 or 1, or one of several of these."""

    may_be: frozenset[int]

    def than(self, sign: str, number: int) -> bool | None:
        """How this compares with a number."""
        found = {_holds(sign, each, number) for each in self.may_be}
        return found.pop() if len(found) == 1 else None


def _order(left: Value, right: Value) -> _Order:
    if isinstance(left, Amount) and isinstance(right, Amount):
        may_be = {
            -1: left.low_milli < right.high_milli,
            0: left.low_milli <= right.high_milli and right.low_milli <= left.high_milli,
            1: left.high_milli > right.low_milli,
        }
        return _Order(frozenset(each for each, is_possible in may_be.items() if is_possible))
    if isinstance(left, Version) and isinstance(right, Version):
        return _Order(frozenset({(left > right) - (left < right)}))
    return _Order(frozenset({-1, 0, 1}))


def amount_of(said: Value) -> Amount | None:
    """Return `quantity(said)`."""
    try:
        return amount(said) if isinstance(said, str) else None
    except ValueError:
        return None


def version_of(said: Value) -> Version | None:
    """Return `semver(said)`."""
    return version(said) if isinstance(said, str) else None


def _has_part(whole: Value, part: Value) -> bool | None:
    if not isinstance(part, str):
        return None
    if isinstance(whole, str):
        return part in whole
    return whole.has_part(part) if isinstance(whole, VagueWord) else None


def _on_words(judge: Callable[[str, str], bool]) -> Callable[[Value, Value], bool | None]:
    return lambda whole, part: judge(whole, part) if isinstance(whole, str) and isinstance(part, str) else None


METHODS: Mapping[str, tuple[int, Callable[..., Value]]] = {
    "compareTo": (1, _order),
    "isGreaterThan": (1, lambda left, right: _order(left, right).than(">", 0)),
    "isLessThan": (1, lambda left, right: _order(left, right).than("<", 0)),
    "contains": (1, _has_part),
    "startsWith": (1, _on_words(str.startswith)),
    "endsWith": (1, _on_words(str.endswith)),
    "lowerAscii": (0, lambda whole: whole.lower() if isinstance(whole, str) else None),
    "upperAscii": (0, lambda whole: whole.upper() if isinstance(whole, str) else None),
}
