"""A fake cloud does wrong what it is told to do wrong, and nothing else; also from outside."""

from typing import Any

import msgspec
import pytest

from gpu_autoscaler.simcloud.admin import answer_admin
from gpu_autoscaler.simcloud.faults import FAULTS_MAX, Fault, Faults


def asked(faults: Faults, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
    """What the door answers."""
    status, answer = answer_admin(method, path, body, faults, [Fault(kind="lost")])
    return status, msgspec.json.decode(answer)


def test_a_fault_meets_its_calls_so_many_times_and_not_the_first() -> None:
    """One is let through, two are met, the fourth passes; other calls and offers never meet it."""
    faults = Faults()
    faults.add(Fault(kind="refused", call="Run*", offer="*/a/spot", code="x", passed_count=1, left_count=2))
    met = [bool(list(faults.met_by("RunInstances", "t4/a/spot"))) for _ in range(4)]
    assert met == [False, True, True, False]
    assert not list(faults.met_by("RunInstances", "t4/b/spot"))
    assert not faults.standing


def test_a_call_is_refused_once() -> None:
    """Of two refusals only the first is used up; what is only slow comes on top."""
    faults = Faults()
    faults.add(Fault(kind="slow", wait_seconds=1))
    faults.add(Fault(kind="refused", code="a", left_count=1))
    faults.add(Fault(kind="refused", code="b", left_count=1))
    assert [fault.code for fault in faults.met_by("Any")] == ["", "a"]
    assert [fault.code for fault in faults.met_by("Any")] == ["", "b"]


def test_the_door_sets_tells_and_clears() -> None:
    """What is wrong with a fault is said; the list of calls is told."""
    faults = Faults()
    status, standing = asked(faults, "POST", "/admin/faults", b'{"kind": "refused", "code": "Throttling"}')
    assert (status, [one["code"] for one in standing]) == (200, ["Throttling"])
    assert asked(faults, "POST", "/admin/faults", b'{"kind": "broken"}')[0] == 400
    assert asked(faults, "GET", "/admin/asked")[1][0]["kind"] == "lost"
    assert asked(faults, "DELETE", "/admin/faults") == (200, [])
    assert asked(faults, "GET", "/admin/elsewhere")[0] == 404


def test_faults_have_a_limit() -> None:
    """Beyond it the next is refused, until they are cleared."""
    faults = Faults()
    for _ in range(FAULTS_MAX):
        faults.add(Fault(kind="lost"))
    with pytest.raises(ValueError, match="clear them first"):
        faults.add(Fault(kind="lost"))
