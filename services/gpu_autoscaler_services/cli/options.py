"""What commands have in common: examples in their help, and durations as options."""

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from cyclopts import App, Parameter, Token

Function = TypeVar("Function", bound=Callable[..., Any])

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"(?:\d+[smhd])+")


def epilogue(examples: Sequence[str]) -> str:
    """Return the end of a help page: command lines without the program."""
    return "\n".join(("Examples:", *(f"  gpu-autoscaler {example}" for example in examples)))


class CommandGroup:
    """Commands under a common first word. The help of each shows its own examples, that of the group all."""

    def __init__(self, name: str, *examples: str) -> None:
        self.app = App(name=name, help_format="plaintext", help_epilogue=epilogue(examples))
        self._examples = examples

    def command(self, function: Function) -> Function:
        """Add a function as the command of its name."""
        name = function.__name__.rstrip("_")
        examples = [example for example in self._examples if example.split()[1] == name]
        self.app.command(function, name=name, help_epilogue=epilogue(examples))
        return function


def _seconds(_: type, tokens: Sequence[Token]) -> float:
    text = tokens[0].value
    if not _DURATION.fullmatch(text):
        raise ValueError(f"{text!r} is not a duration; examples: 90m, 2h, 1h30m, 3d")
    return float(sum(int(count) * _UNIT_SECONDS[unit] for count, unit in re.findall(r"(\d+)([smhd])", text)))


def _seconds_or_number(declared: type, tokens: Sequence[Token]) -> float:
    try:
        return float(tokens[0].value)
    except ValueError:
        return _seconds(declared, tokens)


Duration = Annotated[float, Parameter(converter=_seconds, metavar="DURATION")]
DurationOrSeconds = Annotated[float, Parameter(converter=_seconds_or_number, metavar="DURATION")]
