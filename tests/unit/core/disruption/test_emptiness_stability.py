"""Nothing is removed and bought again for nothing: a month of a calm world, hour by hour, with prices that waver.

The test takes two days. `python -m tests.unit.core.test_back_and_forth 30` takes thirty and says what was done.
"""

import random
import sys
from collections import Counter
from datetime import datetime, timedelta

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import (
    EPOCH,
    HOUR,
    MINUTE,
    T0,
    Story,
    TimedFact,
    bought,
    instance,
    node,
    offer,
    on_sale,
    planned,
    pod,
    policy,
    record,
)
from tests.support.stories import provider_id as id_of

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import EMPTY_STATE
from gpu_autoscaler.events.node import NodeGone, NodeInstanceListed, NodeListed, NodeObserved
from gpu_autoscaler.events.pod import PodGone, PodListed
from gpu_autoscaler.events.scaling import ScalingNodeDrained, ScalingNodeTerminated
from gpu_autoscaler.model.decisions import BuyNode, DrainNode
from gpu_autoscaler.model.ids import NodeUid, PlanId, PodUid
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.reasons.buy import ReplacesNodes

STEP = 10 * MINUTE
SERVICES = (1, 1, 2, 2, 4, 1, 3, 2)  # GPUs of each replica; none ever comes or goes by itself
KINDS = (("small", 2, 2.2), ("middle", 4, 4.0), ("large", 8, 7.6))


class CalmWorld:
    """Replicas that run for ever, nodes that boot within a step, prices that waver by up to `wavering` each hour."""

    def __init__(self, rules: ScalingPolicy, *, wavering: float, seed: int = 1) -> None:
        self.now = T0
        self.state = EMPTY_STATE
        self.nodes: dict[str, Offer] = {}
        self._orders: dict[str, BuyNode] = {}
        self.done: list[tuple[datetime, BuyNode | DrainNode]] = []
        self._rules = rules
        self._wavering = wavering
        self._chance = random.Random(seed)  # noqa: S311 - prices of a made-up world
        self._pods = {f"p{number}": ("", gpus) for number, gpus in enumerate(SERVICES)}
        self._coming: list[BuyNode] = []
        self._version = 1_000_000
        self._tell(*(pod(name, gpus=gpus) for name, (_, gpus) in self._pods.items()))

    def step(self) -> None:
        """Ten minutes: what was bought is ready, pods are bound, prices are asked for, one plan is made and done."""
        if (self.now - T0) % HOUR == timedelta(0):
            self._tell(self._prices())
        for purchase in self._coming:
            self._arrive(purchase)
        self._coming = []
        self._bind()
        self._list()
        made = accepted_plan(self.state, self._rules, self.now)
        for decision in made.decisions:
            assert isinstance(decision, BuyNode | DrainNode)
            self.done.append((self.now, decision))
            if isinstance(decision, BuyNode):
                self._tell(bought(decision, at=self.now, plan_id=f"plan-{decision.action_id}"))
                self._coming.append(decision)
            else:
                self._drain(decision)
        self.now += STEP

    def _prices(self) -> Story:
        chance = self._chance
        return on_sale(
            *(
                offer(name, gpus=gpus, usd_per_hour=round(usd * (1 + chance.uniform(-1, 1) * self._wavering), 4))
                for name, gpus, usd in KINDS
            ),
            at=self.now,
        )

    def _arrive(self, decision: BuyNode) -> None:
        name = f"n-{decision.action_id[:8]}"
        fact = node(name, decision.offer, at=self.now)[-1].fact
        assert isinstance(fact, NodeObserved)
        fact = msgspec.structs.replace(
            fact, action_id=decision.action_id, provider_id=id_of(decision.action_id), labels=decision.labels
        )
        self.nodes[name] = decision.offer
        self._orders[name] = decision
        self._tell(instance(decision, at=self.now))
        self._tell((TimedFact(fact, self.now),))

    def _bind(self) -> None:
        """Fullest first, as Kubernetes may do it."""
        for name, (on, gpus) in sorted(self._pods.items(), key=lambda each: (-each[1][1], each[0])):
            free = {each: of.resources.gpu_count - self._used(each) for each, of in self.nodes.items()}
            fitting = sorted((left, each) for each, left in free.items() if left >= gpus)
            if not on and fitting:
                self._pods[name] = (fitting[0][1], gpus)
                self._version += 1
                self._tell(pod(name, on=fitting[0][1], gpus=gpus, at=self.now, version=self._version))

    def _used(self, node_name: str) -> int:
        return sum(gpus for on, gpus in self._pods.values() if on == node_name)

    def _drain(self, decision: DrainNode) -> None:
        name, now, plan_id = decision.node_name, self.now, PlanId(f"plan-{decision.action_id}")
        self._tell(planned(decision, plan_id=plan_id, at=now))
        self._tell(instance(self._orders[name], state="terminated", at=now))
        del self.nodes[name]
        for old, (on, gpus) in list(self._pods.items()):
            if on == name:
                del self._pods[old]
                self._version += 1
                again = f"{old.split('-')[0]}-{self._version}"
                self._pods[again] = ("", gpus)
                gone = PodGone(pod_uid=PodUid(f"uid-{old}"), namespace="default", name=old, epoch=EPOCH,
                               version=self._version, node_name=name)  # fmt: skip
                self._tell((TimedFact(gone, now),), pod(again, gpus=gpus, at=now, version=self._version))
        instance_id = decision.provider_id
        assert instance_id is not None
        facts = (
            ScalingNodeDrained(action_id=decision.action_id, plan_id=plan_id, node_uid=decision.node_uid,
                               node_name=name, provider_id=instance_id, drained_at=now),
            ScalingNodeTerminated(action_id=decision.action_id, plan_id=plan_id, provider_id=instance_id,
                                  node_name=name, terminated_at=now,
                                  order_action_id=self.state.nodes[decision.node_uid].action_id),
            NodeGone(node_uid=decision.node_uid, name=name, epoch=EPOCH, version=self._version,
                     provider_id=instance_id),
        )  # fmt: skip
        self._tell(tuple(TimedFact(fact, now) for fact in facts))

    def _list(self) -> None:
        self._version += 1
        version, now = self._version, self.now
        facts = (
            PodListed(epoch=EPOCH, version=version, listed_at=now,
                      pod_uids=tuple(PodUid(f"uid-{name}") for name in self._pods)),
            NodeListed(epoch=EPOCH, version=version, listed_at=now,
                       node_uids=tuple(NodeUid(f"uid-{name}") for name in self.nodes)),
            NodeInstanceListed(
                provider_ids=tuple(id_of(self._orders[name].action_id) for name in self.nodes), listed_at=now
            ),
        )  # fmt: skip
        self._tell(tuple(TimedFact(fact, now) for fact in facts))

    def _tell(self, *stories: Story) -> None:
        self.state = fold(self.state, record([each for story in stories for each in story]))


def lived(days: float, *, wavering: float, **changes: object) -> CalmWorld:
    """Return the world after `days` days."""
    world = CalmWorld(policy(disruption_ratio_max=0.3, **changes), wavering=wavering)
    while world.now < T0 + timedelta(days=days):
        world.step()
    return world


def returns(world: CalmWorld, cooldown: timedelta) -> list[str]:
    """Purchases of a kind of which a node was removed within the cooldown before, though nobody asked for more."""
    found = []
    gone: dict[str, datetime] = {}
    kinds = {id_of(each.action_id): each.offer.instance_type for _, each in world.done if isinstance(each, BuyNode)}
    for at, decision in world.done:
        if isinstance(decision, DrainNode) and decision.provider_id in kinds:
            gone[kinds[decision.provider_id]] = at
        elif isinstance(decision, BuyNode):
            kind = decision.offer.instance_type
            if kind in gone and at - gone[kind] < cooldown:
                found.append(f"{kind} goes at {gone[kind]} and is bought again at {at}: {decision.reason.tag()}")
    return found


def test_steady_work_reaches_a_steady_state() -> None:
    """At steady prices nothing is bought or removed after the first day."""
    world = lived(2, wavering=0.0)

    assert [each for at, each in world.done if at > T0 + timedelta(days=1)] == []


@pytest.mark.parametrize("wavering", [0.1, 0.3])
def test_changing_prices_cause_no_oscillation(wavering: float) -> None:
    """Each move saves enough, lasts for its payback time, and no type is bought again within its cooldown."""
    world = lived(2, wavering=wavering)
    moves = [at for at, each in world.done if isinstance(each, BuyNode) and isinstance(each.reason, ReplacesNodes)]

    assert returns(world, timedelta(seconds=policy().scale_down_cooldown_seconds)) == []
    assert len(moves) <= 2 * 24 / policy().removal.replacement_payback_hours * len(SERVICES)


if __name__ == "__main__":
    for waver in (0.0, 0.1, 0.3):
        month = lived(float(sys.argv[1]), wavering=waver)
        counts = Counter(f"{type(each).__name__} {each.reason.tag()}" for _, each in month.done)
        sys.stdout.write(
            f"prices waver by {waver:.0%}: {dict(counts)}, back and forth: {len(returns(month, 10 * MINUTE))}\n"
        )
