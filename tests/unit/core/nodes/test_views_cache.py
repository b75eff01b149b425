"""The picture of all nodes is kept while nothing is said of one, and never longer."""

import random
from datetime import datetime

from tests.support.stories import (
    EPOCH,
    HOUR,
    MINUTE,
    SECOND,
    T0,
    Story,
    Told,
    bought,
    given,
    node,
    pod,
    policy,
    purchase,
    record,
)

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.nodes.views import NodePhase, node_views
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.state.queries import pods_by_node
from gpu_autoscaler.events.node import NodeInstanceListed
from gpu_autoscaler.events.pod import PodGone
from gpu_autoscaler.model.ids import PodUid, ProviderId


def test_a_pod_that_waits_leaves_the_picture_as_it_was() -> None:
    """Neither it nor the time that passes makes a thousand nodes be read again."""
    before = given(node("n1"), pod("there", on="n1"))
    after = fold(before, record(pod("waits", gpus=8)))

    assert node_views(after, T0 + SECOND) is node_views(before, T0)


def test_a_pod_on_a_node_is_seen() -> None:
    """What is kept of a node is told anew as soon as one of its pods has gone."""
    before = given(node("n1"), pod("there", on="n1"))
    after = fold(before, record(pod("there", on="n1", phase="succeeded", version=2)))

    assert node_views(before, T0)[0].empty_since is None
    assert node_views(after, T0)[0].empty_since is not None


def test_a_deadline_that_passes_is_seen_though_nothing_is_said() -> None:
    """Forward and back again: at each instant the view is that of the instant."""
    state = given(bought(purchase("buy-a")), as_of=T0 + HOUR)
    (view,) = node_views(state, T0)
    assert view.usable_by is not None
    late = view.usable_by

    phases = [node_views(state, at)[0].phase for at in (T0, late - SECOND, late, late + MINUTE, late - SECOND)]

    assert phases[0] is not NodePhase.FAILED
    assert phases == [phases[0], phases[0], NodePhase.FAILED, NodePhase.FAILED, phases[0]]


def test_a_list_of_the_cloud_that_says_nothing_new_leaves_the_picture_as_it_was() -> None:
    """One comes every few seconds. That it leaves an instance out for too long is seen, and that it has it again."""
    before = given(node("n1"), node("n2"))
    ids = tuple(view.provider_id for view in node_views(before, T0) if view.provider_id is not None)

    def listed(at: datetime, provider_ids: tuple[ProviderId, ...]) -> Story:
        return (Told(NodeInstanceListed(provider_ids=provider_ids, listed_at=at), at),)

    state = fold(before, record(listed(T0 + SECOND, ids)))
    again = fold(state, record(listed(T0 + MINUTE, ids)))
    without = fold(again, record(listed(T0 + HOUR, ids[:1])))
    back = fold(without, record(listed(T0 + HOUR + SECOND, ids)))

    assert len(ids) == 2
    assert node_views(again, T0) is node_views(state, T0)
    assert [view.phase for view in node_views(without, T0)] == [NodePhase.READY, NodePhase.LOST]
    assert node_views(back, T0) == node_views(state, T0)


def test_what_is_put_together_anew_in_parts_is_the_whole() -> None:
    """Pods that come, end, move and go in any order: by node they are what reading all of them again would give."""
    chance, state = random.Random(7), given(*(node(f"n{number}") for number in range(6)))  # noqa: S311 - a seed
    for version in range(2, 200):
        name, phase = f"p{chance.randrange(30)}", chance.choice(("running", "running", "succeeded", "pending"))
        on = None if phase == "pending" else f"n{chance.randrange(6)}"
        story = pod(name, on=on, phase=phase, version=version)
        if chance.random() < 0.2:
            gone = PodGone(pod_uid=PodUid(f"uid-{name}"), namespace="default", name=name, epoch=EPOCH, version=version)
            story = (Told(gone, T0),)
        state = fold(state, record(story))
        bound = [each for each in state.pods.values() if each.node_name is not None and each.phase == "running"]
        by_node = {name: [each.pod_uid for each in pods] for name, pods in pods_by_node(state).items()}

        assert by_node == {
            name: sorted(each.pod_uid for each in bound if each.node_name == name)
            for name in sorted({each.node_name for each in bound if each.node_name is not None})
        }
        assert {view.name for view in node_views(state, T0) if view.empty_since is None} == set(by_node)


def test_a_plan_is_equal_whether_its_picture_was_kept_or_not() -> None:
    """A plan after another one, on the same nodes, is the plan that a fresh process makes."""
    ground = given(*(node(f"n{number}") for number in range(5)), pod("there", on="n1", gpus=8))
    plan(ground, policy(), T0)
    state = fold(ground, record(pod("waits", gpus=8)))
    anew = given(*(node(f"n{number}") for number in range(5)), pod("there", on="n1", gpus=8))

    assert plan(state, policy(), T0) == plan(fold(anew, record(pod("waits", gpus=8))), policy(), T0)
