"""A pod whose claim of devices cannot be read is held back with the reason, and never bought for."""

from tests.support.stories import T0, given, node, on_sale, pod, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.explain.status import StatusView, pod_line
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.model.decisions import BuyNode
from gpu_autoscaler.model.reasons.defer import DeviceClaimsUnsupported

TROUBLE = "request gpus has alternatives"


def test_nothing_is_bought_for_a_claim_that_cannot_be_read() -> None:
    """The pod beside it is served; the line of the one that waits says why."""
    state = given(node("n1"), pod("odd", gpus=0, device_trouble=TROUBLE), pod("next", gpus=8), on_sale())
    made = plan(state, policy(), T0)
    assert check(made, state, policy()) == ()
    assert [each for each in made.decisions if isinstance(each, BuyNode)] == []
    held = {each.subject: each.reason for each in made.deferred}
    assert held["pod/uid-odd"] == DeviceClaimsUnsupported(detail=TROUBLE)
    assert TROUBLE in pod_line("odd", StatusView.of(state, policy(), T0, made))


def test_the_second_opinion_refuses_a_purchase_on_a_guess() -> None:
    """What was planned before the claim changed is not right any more."""
    made = plan(given(pod("odd", gpus=8), on_sale()), policy(), T0)
    assert any(isinstance(each, BuyNode) for each in made.decisions)
    now = given(pod("odd", gpus=8, device_trouble=TROUBLE), on_sale())
    assert any(TROUBLE in each for each in check(made, now, policy()))
