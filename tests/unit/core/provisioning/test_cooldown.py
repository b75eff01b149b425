"""The scale-up cooldown: after a purchase the next one waits, unless it is urgent. Off by default."""

import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import MINUTE, T0, Story, bought, given, job, node, notice, on_sale, pod, policy, purchase
from tests.unit.core.provisioning.test_scale_up import held

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.limit_settings import LimitsPolicy
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.defer_limits import Cooldown

RULES = policy(limits=LimitsPolicy(scale_up_cooldown_seconds=180.0))
WANTED = UnmetDemand(demand=("job/first",), offers_considered=1, price_micro_usd_per_hour=10_000_000)
FIRST: Story = (*job("first"), *bought(purchase("buy-first", reason=WANTED), is_launched=False))


def planned(*stories: Story, minutes: float = 1.0) -> Plan:
    """The plan this long after the first purchase, accepted by the plan check."""
    as_of = T0 + minutes * MINUTE
    state = given(FIRST, on_sale(), *stories, as_of=as_of)
    return accepted_plan(state, RULES, as_of)


def test_the_next_purchase_waits() -> None:
    """Two minutes remain, as the reason reports; then it is bought."""
    assert held(planned(job("second")), "job/second", Cooldown).remaining_seconds == 120.0
    assert len(planned(job("second"), minutes=3.0).purchases) == 1


def test_by_default_nothing_waits() -> None:
    """Waiting work is bought for at once."""
    state = given(FIRST, on_sale(), job("second"), as_of=T0 + MINUTE)

    assert len(plan(state, policy(), T0 + MINUTE).purchases) == 1


@pytest.mark.parametrize(
    "urgent",
    [job("second", priority=1000), (*node("n"), *notice("n", reclaim_at=T0 + 3 * MINUTE), *pod("a", on="n", gpus=8))],
    ids=["high priority", "a notice"],
)
def test_urgent_work_does_not_wait(urgent: Story) -> None:
    """High priority, and work that loses its node."""
    assert len(planned(urgent).purchases) == 1


def test_the_plan_check_computes_the_cooldown_itself() -> None:
    """A plan made without the cooldown is rejected with it."""
    state = given(FIRST, on_sale(), job("second"), as_of=T0 + MINUTE)
    (mistake,) = check(plan(state, policy(), T0 + MINUTE), state, RULES)

    assert "the cooldown is 180 s" in mistake
