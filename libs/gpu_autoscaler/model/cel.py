"""Conditions on devices in CEL, as far as they can be judged exactly: true, false, or not known. Pure.

A condition is asked about a device that is there, or about one that could be bought, of which not everything is known.
Whatever follows from what is known is answered; the rest is None, and never guessed. What this reader does not know
(arithmetic, macros, regular expressions) is refused by name. No CEL library of the package index knows Kubernetes'
quantities and versions, or values that are not known. Source: cel-spec, "Language Definition" (logical operators take a
known side over an error); Kubernetes, "Common Expression Language in Kubernetes", quantity and semver libraries;
`k8s.io/dynamic-resource-allocation/cel` (read 2026-11-22).
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from gpu_autoscaler.model.cel_values import (
    METHODS,
    Device,
    Items,
    Value,
    amount_of,
    any_of,
    compare,
    is_in,
    not_of,
    part_of,
    version_of,
)

_TOKEN = re.compile(
    r"""\s*(?:(?P<word>"[^"\\\n]*"|'[^'\\\n]*')|(?P<number>\d+(?![\w.]))|(?P<name>[A-Za-z_]\w*)|"""
    r"""(?P<sign>&&|\|\||==|!=|<=|>=|[<>!().,\[\]-]))"""
)
_DEPTH_MAX = 40
_QUOTED_CHARACTERS = 120


class CelUnread(ValueError):
    """The condition says more than this reader knows."""


class Condition(NamedTuple):
    """A condition that was read."""

    judge: Callable[[Device], bool | None]
    words: tuple[str, ...]  # every word in quotes


_Judge = Callable[[Device], Value]


def condition(expression: str) -> Condition:
    """Return the condition. Raises CelUnread with what is not understood."""
    reader = _Reader(expression)
    judge = reader.whole()

    def judged(device: Device) -> bool | None:
        value = judge(device)
        return value if isinstance(value, bool) else None

    return Condition(judged, tuple(reader.words))


class _Reader:
    """A recursive descent over one condition."""

    def __init__(self, expression: str) -> None:
        self._expression = expression
        self._tokens = list(self._split())
        self._at = 0
        self._depth = 0
        self.words: list[str] = []

    def whole(self) -> _Judge:
        """The whole of it."""
        found = self._either()
        if self._at < len(self._tokens):
            raise self._unread()
        return found

    def _split(self) -> Iterator[tuple[str, str]]:
        at, text = 0, self._expression.rstrip()
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None or found.lastgroup is None:
                raise CelUnread(f"a condition is not understood at {text[at:].strip()[:_QUOTED_CHARACTERS]}")
            yield found.lastgroup, found[found.lastgroup]
            at = found.end()

    def _unread(self) -> CelUnread:
        rest = "".join(text for _, text in self._tokens[self._at :]) or "its end"
        return CelUnread(
            f"a condition is not understood at {rest[:_QUOTED_CHARACTERS]}: "
            f"{self._expression.strip()[:_QUOTED_CHARACTERS]}"
        )

    def _take(self, *signs: str) -> str | None:
        if self._at < len(self._tokens) and self._tokens[self._at][1] in signs:
            self._at += 1
            return self._tokens[self._at - 1][1]
        return None

    def _need(self, sign: str) -> None:
        if self._take(sign) is None:
            raise self._unread()

    def _next(self, kind: str) -> str | None:
        if self._at < len(self._tokens) and self._tokens[self._at][0] == kind:
            self._at += 1
            return self._tokens[self._at - 1][1]
        return None

    # ---- operators, the weakest first

    def _either(self) -> _Judge:
        self._depth += 1
        if self._depth > _DEPTH_MAX:
            raise CelUnread("a condition is nested too deeply")
        sides = [self._both()]
        while self._take("||"):
            sides.append(self._both())
        self._depth -= 1
        return sides[0] if len(sides) == 1 else lambda device: any_of(side(device) for side in sides)

    def _both(self) -> _Judge:
        sides = [self._compared()]
        while self._take("&&"):
            sides.append(self._compared())
        return sides[0] if len(sides) == 1 else lambda device: not_of(any_of(not_of(side(device)) for side in sides))

    def _compared(self) -> _Judge:
        left = self._one()
        sign = self._take("==", "!=", "<=", ">=", "<", ">", "in")
        if sign is None:
            return left
        right = self._one()
        if sign == "in":
            return lambda device: is_in(left(device), right(device))
        return lambda device: compare(sign, left(device), right(device))

    def _one(self) -> _Judge:
        if self._take("!"):
            inner = self._one()
            return lambda device: not_of(inner(device))
        if self._take("-"):
            digits = self._next("number")
            if digits is None:
                raise self._unread()
            return _constant(-int(digits))
        return self._parts(self._start())

    def _start(self) -> _Judge:
        if (quoted := self._next("word")) is not None:
            self.words.append(quoted[1:-1])
            return _constant(quoted[1:-1])
        if (digits := self._next("number")) is not None:
            return _constant(int(digits))
        if self._take("("):
            inner = self._either()
            self._need(")")
            return inner
        if self._take("["):
            items = self._listed("]")
            return lambda device: Items(tuple(item(device) for item in items))
        if self._take("true", "false"):
            return _constant(self._tokens[self._at - 1][1] == "true")
        if self._take("device"):
            return lambda device: device
        if (name := self._take("quantity", "semver")) is not None:
            self._need("(")
            (said,) = self._arguments(1)
            make = amount_of if name == "quantity" else version_of
            return lambda device: make(said(device))
        if self._take("has"):
            return self._has()
        raise self._unread()

    def _parts(self, whole: _Judge) -> _Judge:
        """What follows a value: .name, [name], .method(...)."""
        while True:
            if self._take("["):
                key = self._either()
                self._need("]")
                whole = _member(whole, key)
            elif self._take("."):
                name = self._next("name")
                if name is None:
                    raise self._unread()
                if not self._take("("):
                    whole = _member(whole, _constant(name))
                    continue
                if name not in METHODS:
                    self._at -= 2
                    raise self._unread()
                count, method = METHODS[name]
                whole = _called(method, whole, self._arguments(count))
            else:
                return whole

    def _has(self) -> _Judge:
        self._need("(")
        whole = self._start()
        keys: list[_Judge] = []
        while not self._take(")"):
            if self._take("["):
                keys.append(self._either())
                self._need("]")
                continue
            self._need(".")
            name = self._next("name")
            if name is None:
                raise self._unread()
            keys.append(_constant(name))
        if not keys:
            raise self._unread()
        for key in keys[:-1]:
            whole = _member(whole, key)
        return lambda device: is_in(keys[-1](device), whole(device))

    def _listed(self, end: str) -> list[_Judge]:
        found: list[_Judge] = []
        while not self._take(end):
            if found:
                self._need(",")
            found.append(self._either())
        return found

    def _arguments(self, count: int) -> list[_Judge]:
        found = self._listed(")")
        if len(found) != count:
            raise self._unread()
        return found


def _constant(value: Value) -> _Judge:
    return lambda _: value


def _member(whole: _Judge, key: _Judge) -> _Judge:
    return lambda device: part_of(whole(device), key(device))


def _called(method: Callable[..., Value], whole: _Judge, arguments: list[_Judge]) -> _Judge:
    return lambda device: method(whole(device), *(each(device) for each in arguments))
