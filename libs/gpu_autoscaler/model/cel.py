"""Evaluates CEL conditions on devices in three-valued logic: true, false or unknown. Pure.

A device may exist already, or be one that could be bought and whose attributes are only partly known. The result is
None where it depends on an unknown value. Unsupported syntax (arithmetic, macros, regular expressions) is rejected by
name. No CEL library of the package index supports Kubernetes' quantities and versions together with unknown values.
Source: cel-spec, "Language Definition" (logical operators prefer a known side over an error); Kubernetes, "Common
Expression Language in Kubernetes", quantity and semver libraries; `k8s.io/dynamic-resource-allocation/cel` (read
2026-11-22).
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from gpu_autoscaler.model import cel_values as values

_TOKEN = re.compile(
    r"""\s*(?:(?P<word>"[^"\\\n]*"|'[^'\\\n]*')|(?P<number>\d+(?![\w.]))|(?P<name>[A-Za-z_]\w*)|"""
    r"""(?P<sign>&&|\|\||==|!=|<=|>=|[<>!().,\[\]-]))"""
)
_DEPTH_MAX = 40
_QUOTED_CHARACTERS = 120


class CelUnsupported(ValueError):
    """The condition uses unsupported syntax."""


class Condition(NamedTuple):
    """A parsed condition."""

    judge: Callable[[values.Device], bool | None]
    words: tuple[str, ...]  # every quoted string


_Judge = Callable[[values.Device], values.Value]


def condition(expression: str) -> Condition:
    """Parse a condition. Raises CelUnsupported naming what is not understood."""
    reader = _Reader(expression)
    judge = reader.whole()

    def judged(device: values.Device) -> bool | None:
        value = judge(device)
        return value if isinstance(value, bool) else None

    return Condition(judged, tuple(reader.words))


class _Reader:
    """A recursive-descent parser of one condition."""

    def __init__(self, expression: str) -> None:
        self._expression = expression
        self._tokens = list(self._split())
        self._at = 0
        self._depth = 0
        self.words: list[str] = []

    def whole(self) -> _Judge:
        judge = self._or()
        if self._at < len(self._tokens):
            raise self._unsupported()
        return judge

    def _split(self) -> Iterator[tuple[str, str]]:
        at, text = 0, self._expression.rstrip()
        while at < len(text):
            token = _TOKEN.match(text, at)
            if token is None or token.lastgroup is None:
                raise CelUnsupported(f"a condition is not understood at {text[at:].strip()[:_QUOTED_CHARACTERS]}")
            yield token.lastgroup, token[token.lastgroup]
            at = token.end()

    def _unsupported(self) -> CelUnsupported:
        rest = "".join(text for _, text in self._tokens[self._at :]) or "its end"
        return CelUnsupported(
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
            raise self._unsupported()

    def _next(self, kind: str) -> str | None:
        if self._at < len(self._tokens) and self._tokens[self._at][0] == kind:
            self._at += 1
            return self._tokens[self._at - 1][1]
        return None

    # ---- operators, lowest precedence first

    def _or(self) -> _Judge:
        self._depth += 1
        if self._depth > _DEPTH_MAX:
            raise CelUnsupported("a condition is nested too deeply")
        sides = [self._and()]
        while self._take("||"):
            sides.append(self._and())
        self._depth -= 1
        return sides[0] if len(sides) == 1 else lambda device: values.any_of(side(device) for side in sides)

    def _and(self) -> _Judge:
        sides = [self._comparison()]
        while self._take("&&"):
            sides.append(self._comparison())
        return (
            sides[0]
            if len(sides) == 1
            else lambda device: values.not_of(values.any_of(values.not_of(side(device)) for side in sides))
        )

    def _comparison(self) -> _Judge:
        left = self._unary()
        sign = self._take("==", "!=", "<=", ">=", "<", ">", "in")
        if sign is None:
            return left
        right = self._unary()
        if sign == "in":
            return lambda device: values.is_in(left(device), right(device))
        return lambda device: values.compare(sign, left(device), right(device))

    def _unary(self) -> _Judge:
        if self._take("!"):
            inner = self._unary()
            return lambda device: values.not_of(inner(device))
        if self._take("-"):
            digits = self._next("number")
            if digits is None:
                raise self._unsupported()
            return _constant(-int(digits))
        return self._postfix(self._primary())

    def _primary(self) -> _Judge:
        if (quoted := self._next("word")) is not None:
            self.words.append(quoted[1:-1])
            return _constant(quoted[1:-1])
        if (digits := self._next("number")) is not None:
            return _constant(int(digits))
        if self._take("("):
            inner = self._or()
            self._need(")")
            return inner
        if self._take("["):
            items = self._listed("]")
            return lambda device: values.Items(tuple(item(device) for item in items))
        if self._take("true", "false"):
            return _constant(self._tokens[self._at - 1][1] == "true")
        if self._take("device"):
            return lambda device: device
        if (name := self._take("quantity", "semver")) is not None:
            self._need("(")
            (argument,) = self._arguments(1)
            make = values.amount_of if name == "quantity" else values.version_of
            return lambda device: make(argument(device))
        if self._take("has"):
            return self._has()
        raise self._unsupported()

    def _postfix(self, whole: _Judge) -> _Judge:
        """What follows a value: .name, [name], .method(...)."""
        while True:
            if self._take("["):
                key = self._or()
                self._need("]")
                whole = _member(whole, key)
            elif self._take("."):
                name = self._next("name")
                if name is None:
                    raise self._unsupported()
                if not self._take("("):
                    whole = _member(whole, _constant(name))
                    continue
                if name not in values.METHODS:
                    self._at -= 2
                    raise self._unsupported()
                count, method = values.METHODS[name]
                whole = _called(method, whole, self._arguments(count))
            else:
                return whole

    def _has(self) -> _Judge:
        self._need("(")
        whole = self._primary()
        keys: list[_Judge] = []
        while not self._take(")"):
            if self._take("["):
                keys.append(self._or())
                self._need("]")
                continue
            self._need(".")
            name = self._next("name")
            if name is None:
                raise self._unsupported()
            keys.append(_constant(name))
        if not keys:
            raise self._unsupported()
        for key in keys[:-1]:
            whole = _member(whole, key)
        return lambda device: values.is_in(keys[-1](device), whole(device))

    def _listed(self, end: str) -> list[_Judge]:
        items: list[_Judge] = []
        while not self._take(end):
            if items:
                self._need(",")
            items.append(self._or())
        return items

    def _arguments(self, count: int) -> list[_Judge]:
        arguments = self._listed(")")
        if len(arguments) != count:
            raise self._unsupported()
        return arguments


def _constant(value: values.Value) -> _Judge:
    return lambda _: value


def _member(whole: _Judge, key: _Judge) -> _Judge:
    return lambda device: values.part_of(whole(device), key(device))


def _called(method: Callable[..., values.Value], whole: _Judge, arguments: list[_Judge]) -> _Judge:
    return lambda device: method(whole(device), *(argument(device) for argument in arguments))
