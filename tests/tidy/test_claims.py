"""A mark that claims a call is held against what was asked of the fakes."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.claims import Claims

from gpu_autoscaler.simcloud.gcp.fake import GcpFake
from gpu_autoscaler.simcloud.rest import RestCall


def item(name: str, *, on: str, calls: tuple[str, ...]) -> Any:  # noqa: ANN401 - what of an item is read
    """A test under a mark on this class."""

    def marks(_: str) -> Iterator[tuple[Any, pytest.Mark]]:
        yield SimpleNamespace(nodeid=on), pytest.Mark("cloud", ("gcp",), {"calls": calls}, _ispytest=True)

    return SimpleNamespace(nodeid=f"{on}::{name}", iter_markers_with_node=marks)


def asked(*names: str) -> None:
    """Have a fake that is asked for this."""
    fake = GcpFake()
    for name in names:
        fake.asked.append(RestCall(name=name, parameters={}))
    assert [call.name for call in fake.asked] == [*names]


def test_an_uncalled_method_is_reported_after_the_last_test() -> None:
    """Each test of a class may make some of the calls; the report waits until all have passed."""
    first, last = (item(name, on="TestX", calls=("zones.get", "disks.get")) for name in ("a", "b"))
    claims = Claims()
    claims.expect([first, last])
    claims.begin(first)
    asked("zones.get")
    claims.passed(first)
    assert claims.broken(first) == []
    claims.begin(last)
    claims.passed(last)
    (said,) = claims.broken(last)
    assert "the call disks.get of gcp, which nobody made" in said


def test_calls_that_were_made_are_what_was_claimed() -> None:
    """By whichever of the tests; what one asked is not the next one's, which has a mark of its own."""
    first, other = item("a", on="TestX", calls=("zones.get",)), item("b", on="TestY", calls=("zones.get",))
    claims = Claims()
    claims.expect([first, other])
    for one, names in ((first, ("zones.get", "disks.get")), (other, ("disks.get",))):
        claims.begin(one)
        asked(*names)
        claims.passed(one)
    assert claims.broken(first) == []
    assert len(claims.broken(other)) == 1
