"""Values in conditions on devices, and operations on them in three-valued logic; None is unknown. Pure."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from gpu_autoscaler.model.resources import parse_quantity_milli

_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")


class Amount(NamedTuple):
    """A quantity in thousandths, within this range."""

    low_milli: int
    high_milli: int


class Version(NamedTuple):
    """A semantic version without a pre-release."""

    major: int
    minor: int
    patch: int


class PartialString(ABC):
    """A string that is only partly known."""

    @abstractmethod
    def is_word(self, word: str) -> bool | None:
        """Whether it equals `word`; None if unknown."""

    @abstractmethod
    def has_part(self, part: str) -> bool | None:
        """Whether it contains `part`; None if unknown."""


Value = object | None  # bool, int, str, Amount, Version, PartialString, Items; None: unknown
Names = Mapping[str, Value]


class Device(NamedTuple):
    """What is known of a device: attributes and capacity by domain and name."""

    driver: str
    attributes: Mapping[str, Names]
    capacity: Mapping[str, Names]
    is_all: bool  # False: it may have others


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
    match = _VERSION.fullmatch(text)
    return None if match is None else Version(int(match[1]), int(match[2]), int(match[3]))


def part_of(whole: Value, key: Value) -> Value:
    """Return the member of a value by name; None if unknown, or an error in CEL."""
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
    """True if any value is true, even if others are unknown."""
    is_known = True
    for value in values:
        if value is True:
            return True
        is_known = is_known and value is False
    return False if is_known else None


def not_of(value: Value) -> bool | None:
    """Return the negation; None if unknown."""
    return not value if isinstance(value, bool) else None


def is_in(item: Value, whole: Value) -> bool | None:
    """Return whether a list has the item, or a map the key."""
    match whole:
        case OneDomain():
            return True if item in whole else False if whole.is_all and isinstance(item, str) else None
        case AllDomains():
            return True if item in whole.domains else False if whole.is_all and isinstance(item, str) else None
        case Items():
            return any_of(compare("==", item, other) for other in whole.items)
    return None


def compare(sign: str, left: Value, right: Value) -> bool | None:
    """Return the result of a comparison; None if unknown."""
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
    return {"==": left == right, "<": left < right, "<=": left <= right, ">": left > right, ">=": left >= right}[sign]


def _is_same(left: Value, right: Value) -> bool | None:
    if left is None or right is None:
        return None
    if isinstance(left, Amount) and isinstance(right, Amount):
        return _order(left, right).than("==", 0)
    if isinstance(left, _Order) and isinstance(right, int):
        return left.than("==", right)
    if isinstance(left, PartialString) and isinstance(right, str):
        return left.is_word(right)
    if type(left) is not type(right) or not isinstance(left, bool | int | str | Version):
        return None
    return left == right


class _Order(NamedTuple):
    """The possible results of a comparison: -1, 0, 1."""

    may_be: frozenset[int]

    def than(self, sign: str, number: int) -> bool | None:
        """Compare with a number; None if the possible results disagree."""
        results = {_holds(sign, result, number) for result in self.may_be}
        return results.pop() if len(results) == 1 else None


def _order(left: Value, right: Value) -> _Order:
    if isinstance(left, Amount) and isinstance(right, Amount):
        may_be = {
            -1: left.low_milli < right.high_milli,
            0: left.low_milli <= right.high_milli and right.low_milli <= left.high_milli,
            1: left.high_milli > right.low_milli,
        }
        return _Order(frozenset(result for result, is_possible in may_be.items() if is_possible))
    if isinstance(left, Version) and isinstance(right, Version):
        return _Order(frozenset({(left > right) - (left < right)}))
    return _Order(frozenset({-1, 0, 1}))


def amount_of(text: Value) -> Amount | None:
    """Return `quantity(text)`."""
    try:
        return amount(text) if isinstance(text, str) else None
    except ValueError:
        return None


def version_of(text: Value) -> Version | None:
    """Return `semver(text)`."""
    return version(text) if isinstance(text, str) else None


def _has_part(whole: Value, part: Value) -> bool | None:
    if not isinstance(part, str):
        return None
    if isinstance(whole, str):
        return part in whole
    return whole.has_part(part) if isinstance(whole, PartialString) else None


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
