"""Faults of a fake cloud: one list, checked before each call. Independent of the cloud.

Admin API: GET /admin/asked returns the received calls, oldest first, with their parameters; GET, POST and DELETE of
/admin/faults return the active faults, add a `Fault` (400 with the reason if it is invalid), and clear them.
"""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

FAULTS_MAX = 100

# refused: error `code`, nothing executed · lost: executed, no answer · slow: answered after `wait_seconds`
FaultKind = Literal["refused", "lost", "slow"]


class Fault(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A fault that matching calls meet until it is used up or cleared."""

    kind: FaultKind
    call: str = "*"  # pattern of the call name
    offer: str = "*"  # pattern of `type/zone/capacity type`; empty for calls that launch nothing
    code: str = ""  # the cloud's error code, for refusals
    left_count: Annotated[int, Meta(ge=1)] | None = None  # None: until cleared
    passed_count: Annotated[int, Meta(ge=0)] = 0  # matching calls, or instances of them, that pass first
    wait_seconds: Annotated[float, Meta(ge=0, le=600)] = 0.0  # wall time

    def applies(self, call: str, offer: str, count: int = 1) -> bool:
        """Return whether it applies to this call, and count it; a call for several instances passes whole or not."""
        if self.left_count == 0 or not (fnmatchcase(call, self.call) and fnmatchcase(offer, self.offer)):
            return False
        if self.passed_count >= count:
            self.passed_count -= count
            return False
        if self.left_count is not None:
            self.left_count -= 1
        return True


class Faults:
    """Active faults, in the order in which they were set."""

    def __init__(self) -> None:
        self._standing: list[Fault] = []

    @property
    def standing(self) -> tuple[Fault, ...]:
        return tuple(fault for fault in self._standing if fault.left_count != 0)

    def add(self, fault: Fault) -> None:
        """Activate the fault. Raises ValueError at the limit."""
        self._standing = list(self.standing)
        if len(self._standing) >= FAULTS_MAX:
            raise ValueError(f"{FAULTS_MAX} faults are active already: clear them first")
        self._standing.append(fault)

    def clear(self) -> None:
        self._standing.clear()

    def matching(self, call: str, offer: str = "", count: int = 1) -> Iterator[Fault]:
        """Yield the faults that this call for `count` instances meets; at most one refusal."""
        for fault in self._standing:
            if fault.applies(call, offer, count):
                yield fault
                if fault.kind == "refused":
                    return


def answer_admin(
    method: str, path: str, body: bytes, faults: Faults, calls: Iterable[msgspec.Struct]
) -> tuple[int, bytes]:
    """Return HTTP status and JSON."""
    match method, path:
        case "GET", "/admin/asked":
            return 200, msgspec.json.encode(list(calls))
        case "GET", "/admin/faults":
            return 200, msgspec.json.encode(faults.standing)
        case "DELETE", "/admin/faults":
            faults.clear()
            return 200, b"[]"
        case "POST", "/admin/faults":
            try:
                faults.add(msgspec.json.decode(body, type=Fault))
            except (msgspec.DecodeError, ValueError) as exc:
                return 400, msgspec.json.encode({"error": str(exc)})
            return 200, msgspec.json.encode(faults.standing)
    return 404, msgspec.json.encode({"error": "doors: /admin/asked, /admin/faults"})
