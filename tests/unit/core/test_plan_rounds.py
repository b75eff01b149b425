"""Successive plans with delayed and refused launches: limits hold throughout."""

from datetime import timedelta

import msgspec
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from tests.support.accepted import accepted_plan
from tests.support.situations import OFFERS
from tests.support.stories import MINUTE, T0, Story, TimedFact, bought, given, job, node, on_sale, policy, provider_id

from gpu_autoscaler.model.decisions import BuyNode

ROUNDS_MAX = 12
GPUS_MAX = 32


@settings(max_examples=60, deadline=None)
@for_all(
    jobs=st.lists(st.tuples(st.sampled_from((1, 2, 8)), st.integers(1, 4)), max_size=5),
    fates=st.lists(st.sampled_from(("planned", "launched", "ready", "refused")), min_size=1, max_size=8),
)
def test_launches_in_any_stage_count_and_are_not_repeated(jobs: list[tuple[int, int]], fates: list[str]) -> None:
    """One job per round; each launch stops at a drawn stage."""
    under = policy(gpu_count_max=GPUS_MAX)
    story: Story = on_sale(*OFFERS)
    gpus_in_flight = number = 0
    for turn in range(ROUNDS_MAX):
        as_of = T0 + turn * timedelta(seconds=10)
        if turn < len(jobs):
            gpus, members = jobs[turn]
            story += job(f"j{turn}", gpus=gpus, members=members, at=as_of)
        state = given(story, as_of=as_of)
        made = accepted_plan(state, under, as_of)
        purchases = made.purchases
        for decision in purchases:
            fate = fates[number % len(fates)]
            number += 1
            gpus_in_flight += 0 if fate == "refused" else decision.offer.resources.gpu_count
            story += _facts_of(decision, fate, turn)
        assert gpus_in_flight <= GPUS_MAX
        if turn > len(jobs) and "refused" not in fates:
            assert purchases == []


def _facts_of(decision: BuyNode, fate: str, turn: int) -> Story:
    """The decision and its result."""
    at, plan_id = T0 + turn * timedelta(seconds=10), f"plan-{decision.action_id}"
    if fate == "ready":
        name = f"node-{decision.action_id}"
        ready = node(name, decision.offer, at=at, labels=dict(decision.labels))[-1]
        instance_id = provider_id(decision.action_id)
        fact = msgspec.structs.replace(ready.fact, action_id=decision.action_id, provider_id=instance_id)
        return (*bought(decision, at=at, plan_id=plan_id), TimedFact(fact, at))
    return bought(
        decision,
        at=at,
        plan_id=plan_id,
        is_ordered=fate != "planned",
        is_refused=fate == "refused",
        retry_after=30 * MINUTE,
    )
