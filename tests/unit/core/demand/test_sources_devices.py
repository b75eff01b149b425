"""Pods with unsupported device claims are deferred, and no node is bought for them."""

from tests.support.accepted import accepted_plan
from tests.support.stories import T0, given, node, on_sale, pod, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.explain.status import StatusView, pod_line
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.model.reasons.defer import DeviceClaimsUnsupported

TROUBLE = "request gpus has alternatives"


def test_nothing_is_bought_for_an_unsupported_claim() -> None:
    """Another pod is served; the deferral names the claim."""
    state = given(node("n1"), pod("odd", gpus=0, device_trouble=TROUBLE), pod("next", gpus=8), on_sale())
    result = accepted_plan(state, policy(), T0)
    assert result.purchases == []
    held = {each.subject: each.reason for each in result.deferred}
    assert held["pod/uid-odd"] == DeviceClaimsUnsupported(detail=TROUBLE)
    assert TROUBLE in pod_line("odd", StatusView.of(state, policy(), T0, result))


def test_the_plan_check_rejects_a_purchase_for_an_unsupported_claim() -> None:
    """Planned before the claim changed."""
    result = plan(given(pod("odd", gpus=8), on_sale()), policy(), T0)
    assert result.purchases
    now = given(pod("odd", gpus=8, device_trouble=TROUBLE), on_sale())
    assert any(TROUBLE in each for each in check(result, now, policy()))
