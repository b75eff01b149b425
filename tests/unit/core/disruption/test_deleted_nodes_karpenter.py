"""Nodes that Karpenter ends by itself: whose pods are still to be told to save their work."""

from datetime import timedelta

import pytest
from tests.support.stories import MINUTE, SECOND, T0, Story, given, node, pod

from gpu_autoscaler.core.disruption.deleted_nodes import UnannouncedDeletion, is_announced, unannounced_deletions
from gpu_autoscaler.model.labels import CHECKPOINT_REQUESTED, KARPENTER_REGISTERED

KARPENTERS = {KARPENTER_REGISTERED: "true"}
SINCE = T0 + MINUTE


def asked(at: object) -> dict[str, str]:
    """A pod that was asked to save by then."""
    return {CHECKPOINT_REQUESTED: str(at)}


@pytest.mark.parametrize(
    ("told", "is_due"),
    [
        ({}, True),
        (asked((SINCE + 30 * SECOND).isoformat()), False),
        (asked((SINCE - SECOND).isoformat()), True),  # of a drain that was called back
        (asked("soon"), True),
    ],
)
def test_a_pod_is_told_once_of_each_end(told: dict[str, str], is_due: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """As the pod itself shows it: a process that starts anew tells nobody again."""
    story = (*node("n1", labels=KARPENTERS, deleting_since=SINCE), *pod("p", on="n1", annotations=told))
    assert unannounced_deletions(given(story)) == ((UnannouncedDeletion("n1", SINCE),) if is_due else ())


@pytest.mark.parametrize(
    "story",
    [
        (*node("n1", labels=KARPENTERS), *pod("p", on="n1")),  # it stays
        (*node("n1", labels=KARPENTERS, deleting_since=SINCE, is_ours=False), *pod("p", on="n1")),
        (*node("n1", deleting_since=SINCE), *pod("p", on="n1")),  # our own drain tells them
        node("n1", labels=KARPENTERS, deleting_since=SINCE),
        (*node("n1", labels=KARPENTERS, deleting_since=SINCE), *pod("p", on="n1", owner_kind="DaemonSet")),
        (*node("n1", labels=KARPENTERS, deleting_since=SINCE), *pod("p", on="n1", phase="succeeded")),
    ],
)
def test_nobody_is_told_where_nothing_is_lost_or_another_tells_it(story: Story) -> None:
    """Nodes of others, nodes that we empty, and those without work."""
    assert unannounced_deletions(given(story)) == ()


def test_an_instant_without_a_zone_is_taken_for_utc() -> None:
    """Whoever wrote it."""
    assert is_announced(asked((SINCE + timedelta(seconds=1)).replace(tzinfo=None).isoformat()), SINCE)
