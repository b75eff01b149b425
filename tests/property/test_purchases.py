"""What limits allow while a plan buys, in any order of purchases, undone gangs and members that come to new nodes.

A basket remembers its answers; here each is computed from nothing.
"""

from functools import cache

from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from tests.support.money import at_most, ledger
from tests.support.stories import T0, given, job, offer, on_sale

from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.limits.limits import billing_scope_of, limit_usage_of
from gpu_autoscaler.core.policy.limit_settings import LimitsPolicy, PartLimit
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.basket import Basket
from gpu_autoscaler.core.provisioning.offers import OfferCatalog
from gpu_autoscaler.core.state.state import ClusterState

SALE = (
    offer("g4dn.xlarge", gpus=1, model="T4", gpu_memory_gib=16, cpu=4, memory_gib=16, usd_per_hour=0.5),
    offer("g4dn.12xlarge", gpus=4, model="T4", gpu_memory_gib=16, cpu=48, memory_gib=192, usd_per_hour=1.4),
    offer(),
)
# T0 is at noon: the longest jobs may last beyond the day.
HOURS, PROJECTS, MEMBERS = (1, 7, 60), ("research", "vision"), (1, 3)
jobs = st.sampled_from(range(len(HOURS) * len(PROJECTS) * len(MEMBERS)))
steps = st.tuples(st.sampled_from(("buy", "undo", "assign")), jobs, st.integers(0, 5))
spends = st.builds(at_most, day=st.sampled_from((None, 20.0, 120.0)), month=st.sampled_from((None, 300.0)))
project_limits = st.builds(PartLimit, name=st.just("research"), gpu_count_max=st.sampled_from((None, 4)), spend=spends)
rules = st.builds(
    ScalingPolicy,
    limits=st.builds(LimitsPolicy, spend=spends, projects=st.tuples(project_limits)),
    nodes_count_max=st.sampled_from((100, 2, 6)),
    gpu_count_max=st.sampled_from((None, 8)),
)


@cache
def waiting() -> ClusterState:
    """A job of each time, project and size."""
    kinds = [(hours, project, members) for hours in HOURS for project in PROJECTS for members in MEMBERS]
    stories = (
        job(f"j{number}", gpus=1, members=members, project_id=project, duration_seconds_max=hours * 3600.0)
        for number, (hours, project, members) in enumerate(kinds)
    )
    return given(ledger(), on_sale(*SALE), *stories)


@for_all(rules, st.lists(steps, max_size=12))
@settings(max_examples=60, deadline=None)
def test_limits_are_evaluated_for_what_is_in_the_basket(under: ScalingPolicy, done: list[tuple[str, int, int]]) -> None:
    """Whether something can be bought is what the limits say of each offering beside the purchases so far."""
    draft = Draft.start(waiting(), T0, under)
    catalog = OfferCatalog(draft.views, waiting(), under, draft.as_of)
    basket = Basket(draft, catalog, under)
    for step, number, count in done:
        item = draft.demand[number]
        if step == "assign":
            keys = [f"action/{bought.decision.action_id}" for bought in basket.purchases()]
            basket.assign(item, tuple(keys[count : count + 1]))
        else:
            before, free_mark, mark = basket.purchases(), draft.free_capacity.mark(), basket.mark()
            basket.buy(item, item.member_count)
            if step == "undo":
                draft.free_capacity.rollback(free_mark)
                basket.rollback(mark)
                assert basket.purchases() == before
        usage = limit_usage_of(draft, under)
        for purchase in basket.purchases():
            usage.add(purchase.decision.pool, purchase.decision.offer, billing_scope_of(purchase.decision))
        for asked in draft.demand:
            excesses = [usage.excess(entry.pool.name, entry.offer, asked.billing_scope) for entry in catalog.offerings]
            assert basket.has_offering_within_limits(asked.billing_scope) == (None in excesses)
