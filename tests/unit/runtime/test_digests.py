"""What was asked for has the digest that earlier versions have kept of it."""

from tests.support.stories import request

from gpu_autoscaler.runtime.digests import request_digest


def test_a_request_keeps_the_digest_of_earlier_versions() -> None:
    """Who repeats one after an upgrade is answered as before; the figure is that of the version in tests/upgrade."""
    asked = request("train", priority="high", members=2)
    assert request_digest(asked) == "a9255b67f3ea572daf9ec6acd151510e"
    assert request_digest(request("other", priority="high", members=2)) == request_digest(asked), "ids apart"


def test_what_later_versions_can_say_is_part_of_the_request() -> None:
    """Another annotation is another request, and so is every later field that says something."""
    changes: tuple[dict[str, object], ...] = ({}, {"pod_annotations": {"a": "b"}}, {"min_members": 1}, {"runtime": "x"})
    assert len({request_digest(request("train", **each)) for each in changes}) == len(changes)
