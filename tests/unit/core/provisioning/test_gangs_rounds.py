"""Plan after plan for a gang whose orders are refused, never answered, or never boot: whole or not at all."""

import random
from datetime import datetime, timedelta

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import (
    MINUTE,
    T0,
    Story,
    TimedFact,
    bought,
    given,
    instance,
    job,
    node,
    offer,
    on_sale,
    planned,
    policy,
    provider_id,
)

from gpu_autoscaler.events.scaling import ScalingNodeTerminated
from gpu_autoscaler.model.decisions import BuyNode, DrainNode, Plan, ReleaseInstance
from gpu_autoscaler.model.ids import ActionId, PlanId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.drain import GangAbandoned

MEMBERS_COUNT = 4
ROUND = 2 * MINUTE
ROUNDS_COUNT = 120  # four hours
UNDER = policy(disruption_ratio_max=1.0)
SALE = (
    offer(),
    offer(zone="zone-b", usd_per_hour=10.5),
    offer(capacity_type=CapacityType.ON_DEMAND, usd_per_hour=32.0),
)
# A gang that fails each time is tried after 1, 2, 4, 8, 16 and then each 30 minutes; and each try takes its time.
TRIES_COUNT_MAX = 14


class _World:
    """What became of each purchase, as told so far."""

    def __init__(self, seed: int, fates: tuple[str, ...]) -> None:
        self.chance = random.Random(seed)  # noqa: S311 - a run is to be the same each time
        self.fates = fates
        self.alive: dict[ActionId, Story] = {}  # nodes and orders that cost money, or may
        self.bought_at: dict[ActionId, datetime] = {}
        self.over: list[Story] = []

    def story(self, now: datetime) -> Story:
        """All of it, as seen at this instant."""
        told = [job("train", gpus=8, members=MEMBERS_COUNT), on_sale(*SALE, at=now), *self.over, *self.alive.values()]
        return tuple(each for story in told for each in story)

    def carry_out(self, made: Plan, now: datetime) -> None:
        """Buy as each fate says; what is given back or drained is gone at once."""
        for decision in made.decisions:
            if isinstance(decision, BuyNode):
                self._buy(decision, now)
            elif isinstance(decision, ReleaseInstance):
                self._end(decision, decision.order_action_id, now)
            elif isinstance(decision, DrainNode):
                self._end(decision, ActionId(decision.node_name.removeprefix("of-")), now)

    def _buy(self, decision: BuyNode, now: datetime) -> None:
        fate = self.chance.choice(self.fates)
        plan_id = f"plan-{decision.action_id}"
        if fate == "refused":
            after = timedelta(minutes=self.chance.choice((3, 10)))
            self.over.append(bought(decision, at=now, plan_id=plan_id, is_refused=True, retry_after=after))
            return
        story = bought(decision, at=now, plan_id=plan_id, is_launched=fate != "unanswered")
        if fate == "ready":
            ready = node(f"of-{decision.action_id}", decision.offer, at=now, labels=dict(decision.labels))[-1]
            mine = {"action_id": decision.action_id, "provider_id": provider_id(decision.action_id)}
            story = (*story, TimedFact(msgspec.structs.replace(ready.fact, **mine), now))
        self.alive[decision.action_id] = story
        self.bought_at[decision.action_id] = now

    def _end(self, decision: ReleaseInstance | DrainNode, order: ActionId, now: datetime) -> None:
        story = self.alive.pop(order)
        purchase = next(each.fact.plan.decisions[0] for each in story if hasattr(each.fact, "plan"))
        is_launched = any(hasattr(each.fact, "launched_at") for each in story)
        gone = ScalingNodeTerminated(
            action_id=decision.action_id,
            plan_id=PlanId(f"plan-{decision.action_id}"),
            provider_id=provider_id(order) if is_launched else None,
            order_action_id=order,
            node_name=None,
            terminated_at=now,
        )
        ordered = tuple(each for each in story if not hasattr(each.fact, "node_uid"))
        ended = instance(purchase, state="terminated", at=now) if is_launched else ()
        plan_id = f"plan-{decision.action_id}"
        self.over.append((*ordered, *planned(decision, plan_id=plan_id, at=now), TimedFact(gone, now), *ended))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "fates",
    [
        ("ready", "refused"),
        ("ready", *("refused",) * 9),
        ("ready", "unanswered"),
        ("ready", "launched"),
        ("refused", "refused", "refused", "ready", "unanswered", "launched"),
    ],
    ids=["refusals", "hardly anything", "lost answers", "nodes that never come up", "everything"],
)
def test_a_gang_is_complete_in_time_or_released(fates: tuple[str, ...], seed: int) -> None:
    """No node of an incomplete gang outlives the deadline, and tries have a back-off."""
    world = _World(seed, fates)
    given_up: list[datetime] = []
    for number in range(ROUNDS_COUNT):
        now = T0 + number * ROUND
        state = given(world.story(now), as_of=now)
        made = accepted_plan(state, UNDER, now)
        if any(isinstance(each.reason, GangAbandoned) for each in made.decisions):
            given_up.append(now)
        world.carry_out(made, now)
        ready_count = sum(1 for story in world.alive.values() if any(hasattr(one.fact, "node_uid") for one in story))
        if ready_count >= MEMBERS_COUNT:
            return
        ages = [(now - world.bought_at[each]).total_seconds() for each in world.alive]
        assert max(ages, default=0.0) <= UNDER.gangs.complete_seconds_max
    assert len(given_up) <= TRIES_COUNT_MAX
