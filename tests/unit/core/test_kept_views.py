"""The picture of all nodes is kept while nothing is said of one, and never longer."""

from tests.support.stories import HOUR, MINUTE, SECOND, T0, bought, given, node, pod, policy, purchase, record

from gpu_autoscaler.core.fold import fold
from gpu_autoscaler.core.life import NodePhase, node_views
from gpu_autoscaler.core.plan import plan


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


def test_a_plan_is_equal_whether_its_picture_was_kept_or_not() -> None:
    """A plan after another one, on the same nodes, is the plan that a fresh process makes."""
    ground = given(*(node(f"n{number}") for number in range(5)), pod("there", on="n1", gpus=8))
    plan(ground, policy(), T0)
    state = fold(ground, record(pod("waits", gpus=8)))
    anew = given(*(node(f"n{number}") for number in range(5)), pod("there", on="n1", gpus=8))

    assert plan(state, policy(), T0) == plan(fold(anew, record(pod("waits", gpus=8))), policy(), T0)
