"""What a cloud does wrong when it is told to: one list of faults, asked before each call. No cloud's words."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

FAULTS_MAX = 100

# refused: the error `code`, and nothing is done · lost: done, and not told · slow: told after `wait_seconds`
FaultKind = Literal["refused", "lost", "slow"]


class Fault(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What calls that match meet with, until it is used up or cleared."""

    kind: FaultKind
    call: str = "*"  # pattern of the call's name
    offer: str = "*"  # pattern of `type/zone/capacity type`; a call that buys nothing has the empty name
    code: str = ""  # the cloud's own word, of refusals
    left_count: Annotated[int, Meta(ge=1)] | None = None  # None: until cleared
    passed_count: Annotated[int, Meta(ge=0)] = 0  # calls that match, or instances of theirs, that are let through first
    wait_seconds: Annotated[float, Meta(ge=0, le=600)] = 0.0  # wall time

    def strikes(self, call: str, offer: str, count: int = 1) -> bool:
        """Return whether it meets this call, and count it; one for several instances is let through whole, or not."""
        if self.left_count == 0 or not (fnmatchcase(call, self.call) and fnmatchcase(offer, self.offer)):
            return False
        if self.passed_count >= count:
            self.passed_count -= count
            return False
        if self.left_count is not None:
            self.left_count -= 1
        return True


class Faults:
    """The faults that stand, in the order in which they were set."""

    def __init__(self) -> None:
        self._standing: list[Fault] = []

    @property
    def standing(self) -> tuple[Fault, ...]:
        """What calls may still meet with."""
        return tuple(fault for fault in self._standing if fault.left_count != 0)

    def add(self, fault: Fault) -> None:
        """Let calls meet with it from now on. Raises ValueError at the limit."""
        self._standing = list(self.standing)
        if len(self._standing) >= FAULTS_MAX:
            raise ValueError(f"{FAULTS_MAX} faults are set already: clear them first")
        self._standing.append(fault)

    def clear(self) -> None:
        """Nothing goes wrong any more."""
        self._standing.clear()

    def met_by(self, call: str, offer: str = "", count: int = 1) -> Iterator[Fault]:
        """Yield what this call, for so many instances, meets with; at most one refusal."""
        for fault in self._standing:
            if fault.strikes(call, offer, count):
                yield fault
                if fault.kind == "refused":
                    return
