"""A month of changing work with telemetry: no node is removed and replaced without a new fact.

A loop of the core alone (facts, state, plan, facts), ten minutes a step, so that a month takes minutes; what services
and faults make of it is the simulator's. The test takes days, `python -m tests.unit.core.test_hysteresis 30` a month.
"""

import random
import sys
from collections import Counter
from datetime import datetime, timedelta

import pytest
from tests.support.stories import HOUR, MINUTE, T0, TimedFact, pod, policy
from tests.support.stories import provider_id as id_of
from tests.support.telemetry import minute
from tests.unit.core.disruption.test_emptiness_stability import STEP, CalmWorld

from gpu_autoscaler.core.policy.disruption_settings import RemovalPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.events.pod import PodGone
from gpu_autoscaler.model.decisions import BuyNode, DrainNode
from gpu_autoscaler.model.ids import PodUid
from gpu_autoscaler.model.reasons.buy import ReplacesNodes, UnmetDemand

COOLDOWN = timedelta(hours=1)
RULES = policy(disruption_ratio_max=0.3, scale_down_cooldown_seconds=COOLDOWN.total_seconds())
# A policy without what holds nodes still, to see that the world would show it.
RESTLESS = policy(
    disruption_ratio_max=1.0, scale_down_cooldown_seconds=0.0, consolidation_saving_ratio_min=0.0,
    removal=RemovalPolicy(replacement_payback_hours=1.0, checkpoint_interval_seconds=0.0),
)  # fmt: skip


class LivingWorld(CalmWorld):
    """The calm world, and in it work for some hours that comes by day more than by night."""

    def __init__(self, rules: ScalingPolicy, *, seed: int) -> None:
        self.arrived: dict[str, datetime] = {}  # by the first part of a pod's name, which it keeps when it moves
        self._ends: dict[str, datetime] = {}
        self._luck = random.Random(f"living/{seed}")  # noqa: S311 - work of a made-up world
        super().__init__(rules, wavering=0.0, seed=seed)
        self.arrived |= dict.fromkeys(self._pods, T0)

    def step(self) -> None:
        """Some work comes, some is done, every GPU was seen each minute, and then what the calm world does."""
        by_day = 1.0 if 8 <= self.now.hour < 18 else 0.2
        if self._luck.random() < 0.12 * by_day:
            name = f"w{len(self.arrived)}"
            gpus = self._luck.choice((1, 1, 2, 4, 8))
            self.arrived[name] = self.now
            self._ends[name] = self.now + self._luck.uniform(0.3, 8.0) * HOUR
            self._pods[name] = ("", gpus)
            self._tell(pod(name, gpus=gpus, at=self.now))
        for name in [each for each in self._pods if self._ends.get(each.split("-")[0], self.now + STEP) <= self.now]:
            self._finish(name)
        for name, of in self.nodes.items():
            busy = round(self._luck.choice((0.02, 0.1, 0.6, 0.95)), 2) if self._used(name) else 0.0
            for number in range(10):
                at = self.now - STEP + number * MINUTE
                self._tell(minute(name, at, gpus=of.resources.gpu_count, busy=busy))
        super().step()

    def _finish(self, name: str) -> None:
        on, _ = self._pods.pop(name)
        self._version += 1
        gone = PodGone(pod_uid=PodUid(f"uid-{name}"), namespace="default", name=name, epoch=1,
                       version=self._version, node_name=on or None)  # fmt: skip
        self._tell((TimedFact(gone, self.now),))


def lived(days: float, *, seed: int, rules: ScalingPolicy = RULES) -> LivingWorld:
    """Return the world after `days` days."""
    world = LivingWorld(rules, seed=seed)
    while world.now < T0 + timedelta(days=days):
        world.step()
    return world


def unfounded(world: LivingWorld) -> list[str]:
    """Purchases of a kind of which a node went within the cooldown before, though nobody came since.

    There are no notices, refusals, nor changes of prices or policy here: new work is all that can be said for them.
    """
    found, gone = [], dict[str, datetime]()
    kinds = {id_of(each.action_id): each.offer.instance_type for _, each in world.done if isinstance(each, BuyNode)}
    for at, decision in world.done:
        if isinstance(decision, DrainNode) and decision.provider_id in kinds:
            gone[kinds[decision.provider_id]] = at
        elif isinstance(decision, BuyNode):
            went_at = gone.get(decision.offer.instance_type)
            if went_at is not None and at - went_at < COOLDOWN and not _is_new(decision, went_at, at, world):
                kind = decision.offer.instance_type
                found.append(f"{kind} goes at {went_at} and comes again at {at}: {decision.reason.tag()}")
    return found


def _is_new(decision: BuyNode, went_at: datetime, at: datetime, world: LivingWorld) -> bool:
    if isinstance(decision.reason, ReplacesNodes) and decision.reason.cause == "expired":
        return True  # another one is too old as well
    if not isinstance(decision.reason, UnmetDemand):
        return False
    # Either for new work, or for work whose capacity the new work has taken.
    return any(went_at < came_at <= at for came_at in world.arrived.values())


@pytest.mark.parametrize("seed", [1, 2])
def test_no_node_is_removed_and_bought_again(seed: int) -> None:
    """In two days of changing work."""
    world = lived(2, seed=seed)
    counts = Counter(type(each) for _, each in world.done)

    assert unfounded(world) == []
    assert counts[BuyNode] > 5
    assert counts[DrainNode] > 5


def test_a_policy_without_cooldown_oscillates() -> None:
    """The same world buys back to save cost what it has just removed."""
    assert unfounded(lived(1, seed=2, rules=RESTLESS))


if __name__ == "__main__":
    for number in (1, 2, 3):
        month = lived(float(sys.argv[1]), seed=number)
        told = Counter(f"{type(each).__name__} {each.reason.tag()}" for _, each in month.done)
        sys.stdout.write(f"seed {number}: {dict(told)}, without something new: {len(unfounded(month))}\n")
