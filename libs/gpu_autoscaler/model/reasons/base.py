"""The base of all reasons.

A reason is data: a log line, a metric label (its tag) and a sentence are three views of one struct. To add a reason,
write a struct with its sentence and remedy in the module of its kind, and name it in the union at the end of that
module. `docs/reference/reasons.md` lists all reasons.
"""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Literal, TypeVar

import msgspec

from gpu_autoscaler.model.format import duration, percent, price

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


class IdleRule(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The rule that sets how long an empty node is kept, with its figures."""

    name: Literal["idle_seconds", "idle_seconds_max", "break_even", "unneeded"]
    boot_seconds: float | None = None  # of break_even: what a new boot takes; None: other rules
    node_micro_usd_per_hour: int | None = None  # of break_even: what keeping the node costs; None: unknown
    waiting_micro_usd_per_hour: int | None = None  # of break_even: the value of work that waits; None: other rules
    # Of unneeded: the arrivals of the last two hours, replayed from this many instants, use the node so often within
    # the time that it would be kept otherwise.
    starts_count: int | None = None  # of unneeded: instants of the recent past that were tried; None: other rules
    uses_count: int | None = None  # of unneeded: those after which the node would have been used; None: other rules
    use_ratio_min: float | None = None  # of the instants, from which keeping it pays; None: other rules
    kept_seconds: float | None = None  # of unneeded: how long it would be kept otherwise; None: other rules

    @property
    def break_even_seconds(self) -> float | None:
        """Idle time that costs as much as a new boot; None: unknown, or the time is set."""
        if self.boot_seconds is None or not self.node_micro_usd_per_hour:
            return None
        return self.boot_seconds * (1.0 + (self.waiting_micro_usd_per_hour or 0) / self.node_micro_usd_per_hour)

    def sentence(self) -> str:
        """Return why the time is as it is."""
        if self.name == "idle_seconds":
            return "That is the idle_seconds of the policy or the pool."
        if self.name == "unneeded":
            kept = "an unknown time" if self.kept_seconds is None else duration(self.kept_seconds)
            return (
                f"That is removal.unneeded_idle_seconds: replayed from {self.starts_count} instants of the last two"
                f" hours, the work that arrived within {kept} needs the node, besides all other free GPUs,"
                f" {self.uses_count} times; keeping it pays from {percent(self.use_ratio_min or 0.0)} of them on."
            )
        if self.boot_seconds is None or self.node_micro_usd_per_hour is None:
            return "That is idle_seconds_max of the policy, since the cost of the node is unknown or zero."
        figures = (
            f"keeping the node costs {price(self.node_micro_usd_per_hour)}, a new boot takes"
            f" {duration(self.boot_seconds)} at that price and at {price(self.waiting_micro_usd_per_hour)} for work"
            " that waits"
        )
        rule = "idle_seconds_max of the policy, below break-even" if self.name == "idle_seconds_max" else "break-even"
        return f"That is {rule}: {figures}."
