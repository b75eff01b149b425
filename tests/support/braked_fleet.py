"""A fleet whose plans are folded as they are made: what one plan removes by force counts for the next."""

from datetime import datetime, timedelta

from msgspec.structs import replace
from tests.support.accepted import accepted_plan
from tests.support.money import ledger
from tests.support.purchases import instance, notice, offer, provider_id, purchase
from tests.support.stories import node, pod
from tests.support.timed_facts import EPOCH, T0, Story, TimedFact, record

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.policy.disruption_settings import BrakePolicy, RemovalPolicy
from gpu_autoscaler.core.policy.limit_settings import LimitsPolicy, SpendPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.forced_removals import tripped_brake
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.node import NodeInstanceListed, NodeListed, NodeObserved
from gpu_autoscaler.events.pod import PodListed
from gpu_autoscaler.events.policy import PolicyDirectiveLifted
from gpu_autoscaler.events.scaling import ScalingNodeTerminated, ScalingPlanMade
from gpu_autoscaler.model.decisions import Cut, DrainNode, Plan
from gpu_autoscaler.model.directives import BRAKE
from gpu_autoscaler.model.ids import ActionId, NodeUid, PlanId, PodUid
from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.reasons.drain import SpotReclaim

# All nodes have to go at once: nothing is left of the day's budget.
BROKE = ScalingPolicy(
    limits=LimitsPolicy(spend=SpendPolicy(day_micro_usd_max=1)), removal=RemovalPolicy(expire_seconds_max=None)
)


def braked(rules: ScalingPolicy, **changes: object) -> ScalingPolicy:
    """Return the policy with these settings of the brake."""
    return replace(rules, removal=replace(rules.removal, brake=BrakePolicy(**changes)))  # type: ignore[arg-type]


class BrakedFleet:
    """Nodes of 10 USD an hour by default; every plan passes the plan check and is folded."""

    def __init__(self, rules: ScalingPolicy, now: datetime = T0) -> None:
        self.rules = rules
        self.now = now
        self.state: ClusterState = EMPTY_STATE
        self.planned_on: ClusterState = EMPTY_STATE  # what the last plan was made of
        self.facts: list[Recorded] = []
        self.plans: list[Plan] = []
        self._names: list[str] = []
        self._sequences: dict[str, int] = {}
        self.tell(ledger(at=now))

    def tell(self, *stories: Story) -> None:
        """Publish and fold the facts."""
        for told in record([fact for story in stories for fact in story]):
            sequence = self._sequences[told.stream] = self._sequences.get(told.stream, 0) + 1
            self.facts.append(replace(told, sequence=sequence))
            self.state = fold(self.state, self.facts[-1:])

    def fact(self, fact: Fact) -> None:
        """Publish one fact now."""
        self.tell((TimedFact(fact, self.now),))

    def add(self, name: str, *, has_work: bool = True, usd: float | None = 10.0, created_at: datetime = T0) -> None:
        """Add a node, usually with work on it; `usd`: its price an hour, None: unknown."""
        price = None if usd is None else round(usd * MICRO_USD_PER_USD)
        sold = replace(offer(), price_micro_usd_per_hour=price)
        self._names.append(name)
        self.tell(
            with_finalizer(node(name, sold, at=created_at)), instance(purchase(f"buy-{name}", sold), at=created_at)
        )
        if has_work:
            self.tell(pod(f"work-{name}", on=name, gpus=8, at=created_at))

    def silence(self, name: str) -> None:
        """The node stops reporting."""
        self.tell(with_finalizer(node(name, is_ready=False, version=2, at=self.now))[-1:])

    def notice(self, name: str) -> None:
        """The cloud reclaims the node."""
        self.tell(notice(name, reclaim_at=self.now + timedelta(minutes=2), at=self.now))

    def look(self) -> None:
        """Publish whole lists."""
        pods = tuple(PodUid(f"uid-work-{name}") for name in self._names)
        nodes = tuple(NodeUid(f"uid-{name}") for name in self._names)
        version = 1_000_000 + len(self.facts)
        self.fact(PodListed(epoch=EPOCH, version=version, pod_uids=pods, listed_at=self.now))
        self.fact(NodeListed(epoch=EPOCH, version=version, node_uids=nodes, listed_at=self.now))
        instances = tuple(provider_id(f"buy-{name}") for name in self._names)
        self.fact(NodeInstanceListed(provider_ids=instances, listed_at=self.now))

    def plan(self) -> Plan:
        """Plan now on whole lists."""
        self.look()
        self.planned_on = self.state
        made = accepted_plan(self.state, self.rules, self.now)
        self.plans.append(made)
        name = PlanId(f"plan-{len(self.plans)}")
        self.fact(ScalingPlanMade(plan_id=name, plan=made, cut=Cut(), policy_digest="p", core_digest="c"))
        return made

    def end(self, drain: DrainNode) -> None:
        """The cloud has ended the drained instance."""
        self.fact(
            ScalingNodeTerminated(
                action_id=drain.action_id,
                plan_id=PlanId(f"plan-{len(self.plans)}"),
                provider_id=drain.provider_id,
                order_action_id=ActionId(f"buy-{drain.node_name}"),
                node_name=drain.node_name,
                terminated_at=self.now,
            )
        )

    def resume(self) -> None:
        """A person resumes."""
        brake = tripped_brake(self.state)
        assert brake is not None
        self.fact(PolicyDirectiveLifted(key=BRAKE, lifted_by="ada", lifted_at=self.now, tripped_at=brake.tripped_at))


def with_finalizer(story: Story) -> Story:
    """Return the story with our finalizer on its nodes, as some seconds after they joined: no plan has to add it."""
    return tuple(
        TimedFact(replace(told.fact, has_finalizer=True), told.at) if isinstance(told.fact, NodeObserved) else told
        for told in story
    )


def forced(made: Plan) -> list[str]:
    """Names of the nodes that the plan removes by force, for another cause than a notice."""
    drains = (decision for decision in made.drains if not decision.is_voluntary)
    return [drain.node_name for drain in drains if not isinstance(drain.reason, SpotReclaim)]


def noticed(made: Plan) -> list[str]:
    """Names of the nodes that the plan drains for a notice."""
    drains = made.drains
    return [drain.node_name for drain in drains if isinstance(drain.reason, SpotReclaim)]
