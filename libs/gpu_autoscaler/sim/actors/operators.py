"""Operators: cordon nodes, tighten PodDisruptionBudgets, override the policy, lower spend limits, add own nodes.

Own nodes have capacity for pods and must not be cordoned, drained or terminated.
"""

import contextlib
import random
from collections.abc import Callable, Mapping
from datetime import timedelta

from msgspec.structs import replace

from gpu_autoscaler.events.envelope import Envelope, Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.policy import PolicyDirectiveGiven, PolicyDirectiveLifted
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.kube.protocol import NODES, PODS
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.directives import BRAKE, AnyDirective, Freeze, Override, PausePool
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.gpu import GIBIBYTE
from gpu_autoscaler.model.ids import FactId, derive_id
from gpu_autoscaler.model.money import cost_micro_usd
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.resources import GPU_RESOURCE
from gpu_autoscaler.sim.actors.policies import Policies
from gpu_autoscaler.sim.adapters.bus import SimBus
from gpu_autoscaler.sim.cluster.cloud import Cloud, Machine
from gpu_autoscaler.sim.cluster.controllers import Workloads
from gpu_autoscaler.sim.cluster.objects import Entry, amounts_text, with_condition
from gpu_autoscaler.sim.cluster.replica_sets import NAMESPACE, ReplicaSets
from gpu_autoscaler.sim.faults.injection import CLOUD, Faults
from gpu_autoscaler.sim.virtual_time import VirtualLoop

CORDONED_SECONDS = (600.0, 6 * 3600.0)
TIGHTENED_SECONDS = (120.0, 1800.0)
RETRY_SECONDS = 60.0  # at a node that the cloud is reclaiming
OWN_NODES_COUNTS = (0, 0, 1, 2)


class Operators:
    """Everybody with write access to the cluster."""

    def __init__(
        self, workloads: Workloads, replica_sets: ReplicaSets, cloud: Cloud, faults: Faults, rng: random.Random
    ) -> None:
        self._cluster = workloads.cluster
        self._loop = workloads.loop
        self._replica_sets = replica_sets
        self._cloud = cloud
        self._faults = faults
        self._rng = rng
        self._acts: Mapping[str, Callable[[], None]] = {
            "node_cordoned": self._cordon,
            "budget_tightened": self._tighten,
        }
        self._cordoned: set[str] = set()  # node names
        self._cluster.listen(self._on_change)

    def begin(self) -> None:
        for number in range(self._rng.choice(OWN_NODES_COUNTS)):
            self._add_own_node(f"own-{number}")
        for name in self._acts:
            self._schedule_next(name)

    def _schedule_next(self, name: str) -> None:
        seconds = self._faults.next_in_seconds(name)
        if seconds is not None:
            self._loop.call_later(seconds, self._act_and_schedule, name)

    def _act_and_schedule(self, name: str) -> None:
        if not self._faults.is_over:
            self._acts[name]()
            self._schedule_next(name)

    def _add_own_node(self, name: str) -> None:
        node_labels = {labels.HOSTNAME: name, labels.GPU_MODEL: "T4", labels.CAPACITY_TYPE: str(CapacityType.ON_DEMAND)}
        amounts = amounts_text(16_000, 64 * GIBIBYTE, 200 * GIBIBYTE, pods=50)
        self._cluster.put(
            NODES,
            core.Node(
                metadata=self._cluster.metadata("", name, labels=node_labels),
                spec=core.NodeSpec(provider_id=f"metal://{name}"),
                status=core.NodeStatus(
                    allocatable={**amounts, GPU_RESOURCE: "2"},
                    conditions=with_condition((), "Ready", "True", self._cluster.now()),
                ),
            ),
        )

    def _cordon(self) -> None:
        candidates = {machine.node_name: machine for machine in self._cloud.alive() if self._may_cordon(machine)}
        if candidates and self._faults.happens("node_cordoned"):
            machine = candidates[self._faults.choose("node_cordoned", sorted(candidates))]
            self._mark(machine, is_cordoned=True)
            seconds = self._faults.seconds("node_cordoned", *CORDONED_SECONDS)
            self._loop.call_later(seconds, self._uncordon, machine)

    def _may_cordon(self, machine: Machine) -> bool:
        node = self._cluster.find(NODES, "", machine.node_name)
        return machine.is_usable and machine.notice is None and node is not None and not node.spec.unschedulable

    def _uncordon(self, machine: Machine) -> None:
        if machine.notice is not None:  # the node stays cordoned for its notice
            self._loop.call_later(RETRY_SECONDS, self._uncordon, machine)
        elif machine.is_alive:
            self._mark(machine, is_cordoned=False)

    def _mark(self, machine: Machine, *, is_cordoned: bool) -> None:
        node = self._cluster.find(NODES, "", machine.node_name)
        if node is not None and node.spec.unschedulable != is_cordoned:
            self._cluster.put(NODES, replace(node, spec=replace(node.spec, unschedulable=is_cordoned)))

    def _tighten(self) -> None:
        names = self._replica_sets.names()
        if names and self._faults.happens("budget_tightened"):
            self._tighten_for_a_while("budget_tightened", names)

    def _tighten_for_a_while(self, fault: str, names: list[str]) -> None:
        loosen = self._replica_sets.tighten(self._faults.choose(fault, names))
        self._loop.call_later(self._faults.seconds(fault, *TIGHTENED_SECONDS), loosen)

    def _on_change(self, plural: str, entry: Entry) -> None:
        """A node was cordoned: another replica fails just then, and a budget of its pods allows no disruption."""
        node = entry.object
        if plural != NODES.plural or not isinstance(node, core.Node):
            return
        name = node.metadata.name
        if entry.is_deleted or not node.spec.unschedulable:
            self._cordoned.discard(name)
        elif name not in self._cordoned:
            self._cordoned.add(name)
            apps = {pod.metadata.labels.get("app", "") for pod in self._cluster.all(PODS) if _is_replica(pod, name)}
            names = sorted(apps & set(self._replica_sets.names()))
            if names and self._faults.strikes("budget_spent_in_drain"):
                self._tighten_for_a_while("budget_spent_in_drain", names)


def _is_replica(pod: core.Pod, node_name: str) -> bool:
    return pod.spec.node_name == node_name and pod.metadata.namespace == NAMESPACE


# Operators who temporarily override the policy through the gateway; some lift the directive early.

OVERRIDES = "operator_overrules"
OVERRIDE_SECONDS = (120.0, 2400.0)
LIFTED_RATIO = 0.3
AFTERWARDS_SECONDS = 600.0  # until deferred work is done and surplus nodes are removed


class OverridingOperators:
    """Everybody who may give directives."""

    def __init__(self, loop: VirtualLoop, bus: SimBus, policies: Policies, faults: Faults) -> None:
        self._loop = loop
        self._bus = bus
        self._policies = policies
        self._faults = faults
        self._count = 0
        self._active: dict[str, PolicyDirectiveGiven] = {}  # by key: directives that may be active

    def override(self) -> None:
        seconds = self._faults.seconds(OVERRIDES, *OVERRIDE_SECONDS)
        pool = self._faults.choose(OVERRIDES, sorted(pool_policy.name for pool_policy in self._policies.now.pools))
        directives: Mapping[str, AnyDirective] = {
            "freeze": Freeze(),
            "pause": PausePool(pool=pool),
            "least": Override(nodes_count_min=6),
            "least of a pool": Override(pool=pool, gpu_count_min=4),
            "most": Override(nodes_count_max=2),
            "most of a kind": Override(gpu_model="T4", gpu_count_max=2),
            "target": Override(nodes_count_min=3, nodes_count_max=3),
        }
        directive = directives[self._faults.choose(OVERRIDES, sorted(directives))]
        now = self._loop.now()
        until = now + timedelta(seconds=seconds)
        given = PolicyDirectiveGiven(directive=directive, reason="upkeep", given_by="ada", given_at=now, until=until)
        self._active[directive.key] = given
        self._faults.disturb(seconds + AFTERWARDS_SECONDS, CLOUD)
        self._publish(given)
        if self._faults.seconds(OVERRIDES, 0.0, 1.0) < LIFTED_RATIO:
            self._loop.call_later(self._faults.seconds(OVERRIDES, 0.0, seconds), self._lift, directive.key)

    def end(self) -> None:
        for key in sorted(self._active):
            self._lift(key)

    def _lift(self, key: str) -> None:
        if key in self._active:
            del self._active[key]
            self._publish(PolicyDirectiveLifted(key=key, lifted_by="bo", lifted_at=self._loop.now()))

    def _publish(self, fact: Fact) -> None:
        self._count += 1
        name = FactId(derive_id("directive", self._count))
        with contextlib.suppress(TransientError):  # the gateway reports the error, and the operator does not retry
            self._bus.publish(Envelope(id=name, source="/gateway", time=self._loop.now(), fact=fact))


# Operators who temporarily set a hard spend limit below the cost of the running nodes. Purchases reserve all
# that they may cost, so only a lowered limit can be exceeded by running nodes.

LOWERS_SPEND_LIMIT = "operator_lowers_money"
COVERED_SECONDS = (0.0, 2400.0)  # of the current fleet that the limit still covers: from none to an orderly drain
LOWERED_SECONDS = (1800.0, 7200.0)


class SpendLimitOperators:
    """Everybody who lowers spend limits."""

    def __init__(self, loop: VirtualLoop, cloud: Cloud, policies: Policies, faults: Faults) -> None:
        self._loop = loop
        self._cloud = cloud
        self._policies = policies
        self._faults = faults
        self._count = 0

    def lower(self) -> None:
        """Set a limit that covers the running nodes for a short time only."""
        self._count += 1
        covered = timedelta(seconds=self._faults.seconds(LOWERS_SPEND_LIMIT, *COVERED_SECONDS))
        reserve = sum(cost_micro_usd(machine.price_micro_usd_per_hour, covered) for machine in self._cloud.alive())
        self._policies.lower_spend_limit(self._spent_today_micro_usd() + reserve)
        self._loop.call_later(self._faults.seconds(LOWERS_SPEND_LIMIT, *LOWERED_SECONDS), self._restore, self._count)

    def _spent_today_micro_usd(self) -> int:
        now = self._loop.now()
        midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
        return sum(
            cost_micro_usd(machine.price_micro_usd_per_hour, min(machine.terminated_at or now, now) - since)
            for machine in self._cloud.machines
            if (since := max(machine.launched_at, midnight)) < min(machine.terminated_at or now, now)
        )

    def _restore(self, number: int) -> None:
        """Restore the limit, unless another was set since or the faults are over."""
        if number == self._count and not self._faults.is_over:
            self._policies.restore_spend_limit()


# Operators who resume removals by force after the brake has tripped. They look before they do, and never forget it.

RESUME_SECONDS = (120.0, 1200.0)
RESUMED_KNOWN_SECONDS = 120.0  # until the scaler knows of it


class ResumingOperators:
    """Everybody who is called when the brake trips."""

    def __init__(self, loop: VirtualLoop, bus: SimBus, rng: random.Random) -> None:
        self._loop = loop
        self._bus = bus
        self._rng = rng
        self._called: set[Instant] = set()  # trips that somebody attends to
        bus.listen(self._on_fact)

    def _on_fact(self, recorded: Recorded) -> None:
        fact = recorded.fact
        if isinstance(fact, ScalingPlanMade) and fact.plan.brake is not None:
            tripped_at = fact.plan.brake.tripped_at
            if tripped_at not in self._called:
                self._called.add(tripped_at)
                self._loop.call_later(self._rng.uniform(*RESUME_SECONDS), self._resume, tripped_at)

    def _resume(self, tripped_at: Instant) -> None:
        now = self._loop.now()
        resumed = PolicyDirectiveLifted(key=BRAKE, lifted_by="bo", lifted_at=now, tripped_at=tripped_at)
        name = FactId(derive_id("resume", tripped_at.isoformat(), now.isoformat()))
        try:
            self._bus.publish(Envelope(id=name, source="/gateway", time=now, fact=resumed))
        except TransientError:  # the gateway reports the error, and the operator tries again
            self._called.discard(tripped_at)
        # A resume may be lost with its stream.
        self._loop.call_later(RESUMED_KNOWN_SECONDS, self._called.discard, tripped_at)
