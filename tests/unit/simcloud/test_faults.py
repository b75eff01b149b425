"""Faults of simulated clouds: applied as configured, also over HTTP."""

from typing import Any

import msgspec
import pytest

from gpu_autoscaler.simcloud.faults import FAULTS_MAX, Fault, Faults, answer_admin


def asked(faults: Faults, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
    """What the door answers."""
    status, answer = answer_admin(method, path, body, faults, [Fault(kind="lost")])
    return status, msgspec.json.decode(answer)


def test_a_fault_applies_to_its_calls_for_its_count() -> None:
    """One call passes, two fail, the fourth passes; other calls and offers are not affected."""
    faults = Faults()
    faults.add(Fault(kind="refused", call="Run*", offer="*/a/spot", code="x", passed_count=1, left_count=2))
    met = [bool(list(faults.matching("RunInstances", "t4/a/spot"))) for _ in range(4)]
    assert met == [False, True, True, False]
    assert not list(faults.matching("RunInstances", "t4/b/spot"))
    assert not faults.standing


def test_a_call_uses_one_refusal() -> None:
    """Of two refusals only the first is used up; a delay applies in addition."""
    faults = Faults()
    faults.add(Fault(kind="slow", wait_seconds=1))
    faults.add(Fault(kind="refused", code="a", left_count=1))
    faults.add(Fault(kind="refused", code="b", left_count=1))
    assert [fault.code for fault in faults.matching("Any")] == ["", "a"]
    assert [fault.code for fault in faults.matching("Any")] == ["", "b"]


def test_faults_are_set_listed_and_cleared_over_http() -> None:
    """An invalid fault is refused with a message; received calls are listed."""
    faults = Faults()
    status, standing = asked(faults, "POST", "/admin/faults", b'{"kind": "refused", "code": "Throttling"}')
    assert (status, [one["code"] for one in standing]) == (200, ["Throttling"])
    assert asked(faults, "POST", "/admin/faults", b'{"kind": "broken"}')[0] == 400
    assert asked(faults, "GET", "/admin/asked")[1][0]["kind"] == "lost"
    assert asked(faults, "DELETE", "/admin/faults") == (200, [])
    assert asked(faults, "GET", "/admin/elsewhere")[0] == 404


def test_faults_have_a_limit() -> None:
    """Above it the next is refused, until they are cleared."""
    faults = Faults()
    for _ in range(FAULTS_MAX):
        faults.add(Fault(kind="lost"))
    with pytest.raises(ValueError, match="clear them first"):
        faults.add(Fault(kind="lost"))
