"""Cached views: the same objects while nothing changes, and never stale."""

import random
from datetime import datetime

from tests.support.stories import (
    EPOCH,
    HOUR,
    MINUTE,
    SECOND,
    T0,
    Story,
    TimedFact,
    bought,
    given,
    node,
    pod,
    policy,
    purchase,
    record,
)

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.nodes.lifecycle import NodePhase
from gpu_autoscaler.core.nodes.views import node_views
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.state.queries import pods_by_node
from gpu_autoscaler.events.node import NodeInstanceListed
from gpu_autoscaler.events.pod import PodGone
from gpu_autoscaler.model.ids import PodUid, ProviderId


def test_a_pending_pod_does_not_change_views() -> None:
    """Neither does the passing of time."""
    before = given(node("n1"), pod("there", on="n1"))
    views = node_views(before, T0)
    after = fold(before, record(pod("waits", gpus=8)))

    assert node_views(after, T0 + SECOND) is views


def test_a_pod_of_a_node_changes_its_view() -> None:
    """At once."""
    before = given(node("n1"), pod("there", on="n1"))
    after = fold(before, record(pod("there", on="n1", phase="succeeded", version=2)))

    assert node_views(before, T0)[0].empty_since is None
    assert node_views(after, T0)[0].empty_since is not None


def test_a_passed_deadline_changes_the_view() -> None:
    """Without a fact, forward and back in time."""
    state = given(bought(purchase("buy-a")), as_of=T0 + HOUR)
    (view,) = node_views(state, T0)
    assert view.usable_by is not None
    late = view.usable_by

    phases = [node_views(state, at)[0].phase for at in (T0, late - SECOND, late, late + MINUTE, late - SECOND)]

    assert phases[0] is not NodePhase.FAILED
    assert phases == [phases[0], phases[0], NodePhase.FAILED, NodePhase.FAILED, phases[0]]


def test_an_unchanged_list_does_not_change_views() -> None:
    """An instance that is missing for too long, or shows again, does."""
    before = given(node("n1"), node("n2"))
    ids = tuple(view.provider_id for view in node_views(before, T0) if view.provider_id is not None)

    def listed(at: datetime, provider_ids: tuple[ProviderId, ...]) -> Story:
        return (TimedFact(NodeInstanceListed(provider_ids=provider_ids, listed_at=at), at),)

    state = fold(before, record(listed(T0 + SECOND, ids)))
    again = fold(state, record(listed(T0 + MINUTE, ids)))
    without = fold(again, record(listed(T0 + HOUR, ids[:1])))
    back = fold(without, record(listed(T0 + HOUR + SECOND, ids)))

    assert len(ids) == 2
    assert node_views(again, T0) is node_views(state, T0)
    assert [view.phase for view in node_views(without, T0)] == [NodePhase.READY, NodePhase.LOST]
    assert node_views(back, T0) == node_views(state, T0)


def test_incremental_pods_by_node_equal_a_full_computation() -> None:
    """For pods that are added, finished, moved and deleted in any order."""
    chance, state = random.Random(7), given(*(node(f"n{number}") for number in range(6)))  # noqa: S311 - a seed
    for version in range(2, 200):
        name, phase = f"p{chance.randrange(30)}", chance.choice(("running", "running", "succeeded", "pending"))
        on = None if phase == "pending" else f"n{chance.randrange(6)}"
        story = pod(name, on=on, phase=phase, version=version)
        if chance.random() < 0.2:
            gone = PodGone(pod_uid=PodUid(f"uid-{name}"), namespace="default", name=name, epoch=EPOCH, version=version)
            story = (TimedFact(gone, T0),)
        state = fold(state, record(story))
        bound = [each for each in state.pods.values() if each.node_name is not None and each.phase == "running"]
        by_node = {name: [each.pod_uid for each in pods] for name, pods in pods_by_node(state).items()}

        assert by_node == {
            name: sorted(each.pod_uid for each in bound if each.node_name == name)
            for name in sorted({each.node_name for each in bound if each.node_name is not None})
        }
        assert {view.name for view in node_views(state, T0) if view.empty_since is None} == set(by_node)


def test_a_plan_does_not_depend_on_caches() -> None:
    """It equals the plan of a fresh process."""
    ground = given(*(node(f"n{number}") for number in range(5)), pod("there", on="n1", gpus=8))
    plan(ground, policy(), T0)
    state = fold(ground, record(pod("waits", gpus=8)))
    fresh = given(*(node(f"n{number}") for number in range(5)), pod("there", on="n1", gpus=8))

    assert plan(state, policy(), T0) == plan(fold(fresh, record(pod("waits", gpus=8))), policy(), T0)
