"""What the invariant monitor reports when a node is drained after its notice was withdrawn."""

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
    """A simulation without services: their facts are published by the test, and the monitor observes."""

    def __init__(self) -> None:
        self.simulation = Simulation(Setting(seed=1, kinds=()), ROLES)
        self.machine = self._bought()

    def pass_seconds(self, seconds: float) -> None:
        """Let time pass."""
        self.simulation.loop.call_later(seconds, self.simulation.loop.stop)
        self.simulation.loop.run_forever()

    def warn_and_withdraw(self) -> None:
        """The cloud shows a notice, and withdraws it after half a minute."""
        self.simulation.cloud.warn(self.machine, 120.0)
        self.pass_seconds(30.0)
        self.simulation.cloud.withdraw(self.machine)
        self.simulation.monitor.notice_withdrawn(self.machine)

    def drain(self, reason: DrainReason, action: str, *, after_seconds: float = 30.0) -> None:
        """Decide a forced drain now; the node is empty later."""
        action_id, name = ActionId(action), self.machine.node_name
        self._plan(
            DrainNode(
                action_id=action_id,
                node_uid=NODE_UID,
                node_name=name,
                provider_id=self.machine.provider_id,
                is_voluntary=False,
                deadline_at=self.simulation.loop.now(),
                reason=reason,
            )
        )
        self.simulation.loop.call_later(after_seconds, self._drained, action_id)

    @property
    def violations(self) -> list[str]:
        """Return the violations."""
        return [f"{item.invariant}: {item.what}" for item in self.simulation.monitor.violations]

    def _bought(self) -> Machine:
        simulation, pool = self.simulation, self.simulation.policies.now.pools[0].name
        offer = next(item for item in simulation.cloud.offers if item.capacity_type is CapacityType.SPOT)
        installation = simulation.identity.installation
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
                deadline_at=simulation.loop.now(),
                reason=BelowMinimum(nodes_count=0, nodes_count_min=1),
            )
        )
        return simulation.cloud.launch(order, visible_in_seconds=0.0, comes_up=False, shows_gpus=False)

    def _plan(self, decision: AnyDecision) -> None:
        last = self.simulation.bus.facts["SCALING"]
        parent = max((item.sequence for item in last if isinstance(item.fact, ScalingPlanMade)), default=0)
        made = ScalingPlanMade(
            plan_id=PlanId(f"plan-{decision.action_id}"),
            plan=Plan(as_of=self.simulation.loop.now(), parent_sequence=parent, decisions=(decision,)),
            cut=Cut(),
            policy_digest=policy_digest(self.simulation.policies.now),
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
                drained_at=self.simulation.loop.now(),
            )
        )

    def _say(self, fact: Fact) -> None:
        self.simulation.bus.publish(
            Envelope(id=FactId(fact.condition() or "fact"), source="/story", time=self.simulation.loop.now(), fact=fact)
        )


@pytest.fixture
def story() -> Iterator[Story]:
    """A running machine; the test decides its end."""
    story_ = Story()
    yield story_
    story_.simulation.loop.close()


@pytest.mark.parametrize("reason", [EXPIRED, DELETED], ids=["expired", "deleted"])
def test_a_node_with_a_withdrawn_notice_may_be_drained_for_another_cause(story: Story, reason: DrainReason) -> None:
    """Hours after the withdrawal the node is expired or deleted: that drain runs to its end."""
    story.pass_seconds(600.0)
    story.warn_and_withdraw()
    story.pass_seconds(9_000.0)
    story.drain(reason, "later")
    story.pass_seconds(60.0)
    assert story.violations == []


def test_a_drain_for_a_withdrawn_notice_must_be_canceled(story: Story) -> None:
    """A drain that continues is reported."""
    story.pass_seconds(600.0)
    story.drain(RECLAIMED, "for-the-notice", after_seconds=90.0)
    story.warn_and_withdraw()
    story.pass_seconds(120.0)
    name = story.machine.node_name
    what = f"{name} was drained for a notice withdrawn long before"
    assert story.violations == [f"interruption notices are handled: {what}"]


def test_a_node_may_be_empty_before_the_withdrawal_is_known(story: Story) -> None:
    """The notice is withdrawn just before the last pod has left."""
    story.pass_seconds(600.0)
    story.drain(RECLAIMED, "for-the-notice", after_seconds=40.0)
    story.warn_and_withdraw()
    story.pass_seconds(120.0)
    assert story.violations == []
