"""What protects a pod or node from disruption by choice."""

from datetime import timedelta

import pytest
from tests.support.stories import HOUR, MINUTE, T0, Story, budget, node, pod

from gpu_autoscaler.core.disruption.protection import node_protection, pod_protection
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.events.pod import PodBudgetObserved, PodObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.jobs import OWNERS_TO_COMPLETION
from gpu_autoscaler.model.scheduling import LabelRequirement

TRAINING = LabelRequirement("workload-type", "In", ("training",))


def protection(story: Story, *budgets: Story, after: timedelta = timedelta(0)) -> str | None:
    """What protects the one pod of the story, this long after it started."""
    observed = story[-1].fact
    assert isinstance(observed, PodObserved)
    facts = [told.fact for each in budgets for told in each]
    return pod_protection(observed, [fact for fact in facts if isinstance(fact, PodBudgetObserved)], T0 + after)


def test_a_pod_of_a_controller_may_be_moved() -> None:
    """Without annotations."""
    assert protection(pod("a", on="n1")) is None


@pytest.mark.parametrize(
    ("key", "value", "is_protected"),
    [
        (labels.DO_NOT_DISRUPT, "true", True),
        (labels.DO_NOT_DISRUPT, "false", False),
        (labels.KARPENTER_DO_NOT_DISRUPT, "true", True),
        (labels.KARPENTER_DO_NOT_DISRUPT, "1h30m", True),
        (labels.KARPENTER_DO_NOT_DISRUPT, "45m", False),
        (labels.KARPENTER_DO_NOT_DISRUPT, "0s", False),
        (labels.KARPENTER_DO_NOT_DISRUPT, "yes please", True),
        (labels.KARPENTER_DO_NOT_DISRUPT, "", True),
        (labels.SAFE_TO_EVICT, "false", True),
        (labels.SAFE_TO_EVICT, "true", False),
    ],
)
def test_annotations_protect_a_pod(key: str, value: str, *, is_protected: bool) -> None:
    """An hour into the pod's life; a duration protects until it is over, an invalid value until it is corrected."""
    said = protection(pod("a", on="n1", annotations={key: value}), after=HOUR)

    assert said == (f"annotation {key}={value}" if is_protected else None)


def test_lost_work_or_data_protects_unless_safe_to_evict() -> None:
    """Pods without a controller, and local data."""
    safe = {labels.SAFE_TO_EVICT: "true"}

    assert protection(pod("a", on="n1", owner_kind=None)) == "it has no controller that would recreate it"
    assert protection(pod("a", on="n1", has_local_storage=True)) == "its local storage would be lost"
    assert protection(pod("a", on="n1", owner_kind="Job")) == "it runs to completion and would start over"
    assert protection(pod("a", on="n1", owner_kind="Job", annotations=safe)) is None
    assert protection(pod("a", on="n1", owner_kind=None, has_local_storage=True, annotations=safe)) is None


@pytest.mark.parametrize("owner_kind", sorted(OWNERS_TO_COMPLETION))
def test_training_of_every_kind_that_cannot_save_is_protected(owner_kind: str) -> None:
    """Training operators own their pods themselves; a pod that saves on request may be moved."""
    saves = {labels.CHECKPOINTED_AT: ""}

    assert protection(pod("a", on="n1", owner_kind=owner_kind)) == "it runs to completion and would start over"
    assert protection(pod("a", on="n1", owner_kind=owner_kind, annotations=saves)) is None


def test_an_exhausted_budget_protects_its_pods_even_if_they_are_safe_to_evict() -> None:
    """A budget counts for pods of its selector and namespace while it allows no disruption."""
    train = pod("a", on="n1", labels={"workload-type": "training"}, annotations={labels.SAFE_TO_EVICT: "true"})
    exhausted = budget("keep", match=(TRAINING,), disruptions_allowed=0)

    assert protection(train, exhausted) == "disruption budget default/keep allows no disruption"
    assert protection(train, budget("keep", match=(TRAINING,), disruptions_allowed=1)) is None
    assert protection(train, budget("keep", match=(TRAINING,), disruptions_allowed=0, namespace="other")) is None
    assert protection(pod("a", on="n1"), exhausted) is None
    assert protection(pod("a", on="n1"), budget("all", match=(), disruptions_allowed=0)) is not None


def test_pods_of_the_node_and_finished_pods_are_never_protected() -> None:
    """Nobody would move them, so nothing about them keeps a node."""
    keep = {labels.DO_NOT_DISRUPT: "true"}

    assert protection(pod("a", on="n1", owner_kind="DaemonSet", annotations=keep)) is None
    assert protection(pod("a", on="n1", phase="succeeded", annotations=keep)) is None


@pytest.mark.parametrize(
    ("annotations", "said"),
    [
        ({}, None),
        ({labels.SCALE_DOWN_DISABLED: "true"}, f"annotation {labels.SCALE_DOWN_DISABLED}=true"),
        ({labels.KARPENTER_DO_NOT_DISRUPT: "true"}, f"annotation {labels.KARPENTER_DO_NOT_DISRUPT}=true"),
        ({labels.KARPENTER_DO_NOT_DISRUPT: "10m"}, None),
    ],
)
def test_annotations_protect_a_node(annotations: dict[str, str], said: str | None) -> None:
    """A quarter of an hour into its life."""
    observed = node("n1", annotations=annotations)[-1].fact
    assert isinstance(observed, NodeObserved)

    assert node_protection(observed, T0 + 15 * MINUTE) == said
