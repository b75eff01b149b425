"""What the witness says of a node that is emptied after its notice was taken back."""

from collections.abc import Iterator

import pytest

from gpu_autoscaler.events.envelope import Envelope
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.scaling import ScalingNodeDrained, ScalingPlanMade
from gpu_autoscaler.model.decisions import AnyDecision, BuyNode, Cut, DrainNode, Plan
from gpu_autoscaler.model.ids import ActionId, FactId, NodeUid, PlanId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.buy import BelowMinimum
from gpu_autoscaler.model.reasons.drain import DrainReason, NodeDeleted, NodeExpired, SpotReclaim
from gpu_autoscaler.providers.protocol import Order
from gpu_autoscaler.runtime.digests import policy_digest
from gpu_autoscaler.sim.cluster.cloud import Machine
from gpu_autoscaler.sim.simulation import Setting, Simulation
from gpu_autoscaler.sim.virtual_time import ORIGIN
from gpu_autoscaler_services.simulation import ROLES

NODE_UID = NodeUid("uid")
DELETED, EXPIRED = NodeDeleted(deleted_at=ORIGIN), NodeExpired(age_seconds=10_020.0, age_seconds_max=8_219.0)
RECLAIMED = SpotReclaim(notice_id="spot_notice/one", kind="terminate", reclaim_at=None)


class Story:
    """A world without services: what they would have said is told here, and its witness listens."""

    def __init__(self) -> None:
        self.world = Simulation(Setting(seed=1, kinds=()), ROLES)
        self.machine = self._bought()

    def pass_seconds(self, seconds: float) -> None:
        """Let so much time pass."""
        self.world.loop.call_later(seconds, self.world.loop.stop)
        self.world.loop.run_forever()

    def warn_and_take_back(self) -> None:
        """The cloud shows a notice, and takes it back after half a minute."""
        self.world.cloud.warn(self.machine, 120.0)
        self.pass_seconds(30.0)
        self.world.cloud.withdraw(self.machine)
        self.world.monitor.notice_withdrawn(self.machine)

    def drain(self, reason: DrainReason, action: str, *, after_seconds: float = 30.0) -> None:
        """Decide it now, by force; so much later the node is empty."""
        action_id, name = ActionId(action), self.machine.node_name
        self._plan(
            DrainNode(
                action_id=action_id,
                node_uid=NODE_UID,
                node_name=name,
                provider_id=self.machine.provider_id,
                is_voluntary=False,
                deadline_at=self.world.loop.now(),
                reason=reason,
            )
        )
        self.world.loop.call_later(after_seconds, self._drained, action_id)

    @property
    def broken(self) -> list[str]:
        """What the witness says."""
        return [f"{each.promise}: {each.what}" for each in self.world.monitor.broken]

    def _bought(self) -> Machine:
        world, pool = self.world, self.world.policies.now.pools[0].name
        offer = next(each for each in world.cloud.offers if each.capacity_type is CapacityType.SPOT)
        installation = world.identity.installation
        order = Order(
            action_id=ActionId("buy"), installation=installation, pool=pool, offer=offer, labels=(), taints=()
        )
        self._plan(
            BuyNode(
                action_id=order.action_id,
                pool=pool,
                offer=offer,
                labels=(),
                taints=(),
                deadline_at=world.loop.now(),
                reason=BelowMinimum(nodes_count=0, nodes_count_min=1),
            )
        )
        return world.cloud.launch(order, visible_in_seconds=0.0, comes_up=False, shows_gpus=False)

    def _plan(self, decision: AnyDecision) -> None:
        last = self.world.bus.facts["SCALING"]
        parent = max((each.sequence for each in last if isinstance(each.fact, ScalingPlanMade)), default=0)
        made = ScalingPlanMade(
            plan_id=PlanId(f"plan-{decision.action_id}"),
            plan=Plan(as_of=self.world.loop.now(), parent_sequence=parent, decisions=(decision,)),
            cut=Cut(),
            policy_digest=policy_digest(self.world.policies.now),
            core_digest="core",
        )
        self._say(made)

    def _drained(self, action_id: ActionId) -> None:
        self._say(
            ScalingNodeDrained(
                action_id=action_id,
                plan_id=PlanId(f"plan-{action_id}"),
                node_uid=NODE_UID,
                node_name=self.machine.node_name,
                provider_id=self.machine.provider_id,
                drained_at=self.world.loop.now(),
            )
        )

    def _say(self, fact: Fact) -> None:
        self.world.bus.publish(
            Envelope(id=FactId(fact.condition() or "fact"), source="/story", time=self.world.loop.now(), fact=fact)
        )


@pytest.fixture
def story() -> Iterator[Story]:
    """A machine that runs, its end left to the test."""
    description = Story()
    yield description
    description.world.loop.close()


@pytest.mark.parametrize("reason", [EXPIRED, DELETED], ids=["expired", "deleted"])
def test_a_node_that_stayed_may_go_for_another_cause(story: Story, reason: DrainReason) -> None:
    """Hours after its notice was taken back it is too old, or somebody deletes it: that drain runs to its end."""
    story.pass_seconds(600.0)
    story.warn_and_take_back()
    story.pass_seconds(9_000.0)
    story.drain(reason, "later")
    story.pass_seconds(60.0)
    assert story.broken == []


def test_a_drain_for_a_notice_that_was_taken_back_is_called_off(story: Story) -> None:
    """Whoever empties the node all the same is told."""
    story.pass_seconds(600.0)
    story.drain(RECLAIMED, "for-the-notice", after_seconds=90.0)
    story.warn_and_take_back()
    story.pass_seconds(120.0)
    name = story.machine.node_name
    assert story.broken == [f"a notice is answered: {name} was drained on, its notice taken back long ago"]


def test_a_node_may_be_empty_before_anybody_hears_that_its_notice_is_gone(story: Story) -> None:
    """The notice is taken back a moment before the last pod has left."""
    story.pass_seconds(600.0)
    story.drain(RECLAIMED, "for-the-notice", after_seconds=40.0)
    story.warn_and_take_back()
    story.pass_seconds(120.0)
    assert story.broken == []
