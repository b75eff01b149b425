"""Nodes that Karpenter ends by itself: whose pods have to be notified to save their work."""

from datetime import timedelta

import pytest
from tests.support.stories import MINUTE, SECOND, T0, Story, given, node, pod

from gpu_autoscaler.core.disruption.deleted_nodes import UnannouncedDeletion, is_announced, unannounced_deletions
from gpu_autoscaler.model.ids import NodeUid
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
def test_a_pod_is_notified_once_for_each_deletion(told: dict[str, str], is_due: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """The pod's annotation shows it, also after a restart."""
    story = (*node("n1", labels=KARPENTERS, deleting_since=SINCE), *pod("p", on="n1", annotations=told))
    assert unannounced_deletions(given(story)) == (
        (UnannouncedDeletion("n1", NodeUid("uid-n1"), SINCE),) if is_due else ()
    )


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
def test_no_pod_is_notified_without_need(story: Story) -> None:
    """Foreign nodes, nodes that we drain, and nodes without work."""
    assert unannounced_deletions(given(story)) == ()


def test_an_instant_without_a_zone_is_utc() -> None:
    """Whoever wrote it."""
    assert is_announced(asked((SINCE + timedelta(seconds=1)).replace(tzinfo=None).isoformat()), SINCE)
