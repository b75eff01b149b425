"""Pods with missing volumes are deferred, and no node is bought for them."""

from tests.support.accepted import accepted_plan
from tests.support.stories import T0, given, node, on_sale, pod, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.explain.status import StatusView, pod_line
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.reasons.defer import VolumeNotReady

TROUBLE = "claim default/data does not exist"


def test_nothing_is_bought_for_a_pod_whose_volume_is_missing() -> None:
    """Another pod is served, also with the capacity it would use."""
    state = given(node("n1"), pod("stuck", gpus=8, volume_trouble=TROUBLE), pod("next", gpus=8), on_sale())
    result = accepted_plan(state, policy(), T0)
    assert result.purchases == []
    held = {each.subject: each.reason for each in result.deferred}
    assert held["pod/uid-stuck"] == VolumeNotReady(detail=TROUBLE)
    line = pod_line("stuck", StatusView.of(state, policy(), T0, result))
    assert TROUBLE in line


def test_the_plan_check_rejects_a_purchase_for_a_missing_volume() -> None:
    """Planned before the claim was deleted."""
    bought_for = given(pod("stuck", gpus=8), on_sale())
    result = plan(bought_for, policy(), T0)
    now = given(pod("stuck", gpus=8, volume_trouble=TROUBLE), on_sale())
    assert any(TROUBLE in violation for violation in check(result, now, policy()))


def test_one_blocked_member_blocks_its_group() -> None:
    """A gang starts whole or not at all."""
    group = {labels.POD_GROUP_LABELS[0]: "train"}
    state = given(pod("m0", gpus=8, labels=group), pod("m1", gpus=8, labels=group, volume_trouble=TROUBLE), on_sale())
    result = plan(state, policy(), T0)
    assert result.purchases == []
    assert {each.subject: each.reason for each in result.deferred if each.subject.startswith("pod/")} == dict.fromkeys(
        ("pod/uid-m0", "pod/uid-m1"), VolumeNotReady(detail=TROUBLE)
    )
