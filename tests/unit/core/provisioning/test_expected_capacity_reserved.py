"""Nodes on their way are reserved for the work they were bought for."""

from tests.support.stories import MINUTE, T0, bought, given, job, offer, on_sale, policy, purchase

from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.model.decisions import BuyNode
from gpu_autoscaler.model.reasons.buy import UnmetDemand

T4 = offer("g4dn.xlarge", gpus=1, model="T4", gpu_memory_gib=16, cpu=4, memory_gib=16, usd_per_hour=0.5)
T4_FOUR = offer("g4dn.12xlarge", gpus=4, model="T4", gpu_memory_gib=16, cpu=48, memory_gib=192, usd_per_hour=1.4)


def test_a_coming_node_is_not_taken_by_later_work() -> None:
    """Else the waiting work is bought for again with each arrival, even a more urgent one."""
    reason = UnmetDemand(demand=("job/large",), offers_considered=1, price_micro_usd_per_hour=1_400_000)
    order = bought(purchase("order", T4_FOUR, reason=reason))
    newcomer = job("small", gpus=1, priority=1000, at=T0 + MINUTE)
    state = given(job("large", gpus=4), order, newcomer, on_sale(T4, T4_FOUR), as_of=T0 + MINUTE)

    (decision,) = plan(state, policy(), T0 + MINUTE).decisions

    assert isinstance(decision, BuyNode)
    assert decision.offer == T4
    assert isinstance(decision.reason, UnmetDemand)
    assert decision.reason.demand == ("job/small",)
