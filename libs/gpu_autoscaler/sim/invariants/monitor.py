"""Checks invariants on every event against the true state of the simulation, whatever the services believe.

Invariants of the end of a run are in `quiescence.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobCancelRequested, JobFinished, JobPlaced, JobPreempted
from gpu_autoscaler.events.scaling import (
    ScalingDrainCancelled,
    ScalingDrainStarted,
    ScalingLaunchRefused,
    ScalingNodeDrained,
    ScalingPlanMade,
)
from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.kube.protocol import NODES
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, DrainNode, Plan, ReleaseInstance
from gpu_autoscaler.model.ids import ActionId, JobId
from gpu_autoscaler.model.reasons.drain import NodeIdle
from gpu_autoscaler.providers.protocol import Order
from gpu_autoscaler.sim.actors.policies import Policies
from gpu_autoscaler.sim.adapters.interruption_queue import QueueMessage
from gpu_autoscaler.sim.cluster.cloud import Cloud, Machine
from gpu_autoscaler.sim.cluster.controllers import Workloads, controller_of
from gpu_autoscaler.sim.cluster.objects import Entry
from gpu_autoscaler.sim.faults.injection import BROKER, KUBERNETES, RECORD, STORE
from gpu_autoscaler.sim.invariants import (
    BUSY_JOBS_KEPT,
    DEFERRED_BOUNDED,
    FOREIGN_NODES_UNTOUCHED,
    FREEZE_OBEYED,
    NO_VOLUNTARY_REMOVAL,
    NOTICES_HANDLED,
    ONE_LAUNCH,
    ONE_PLAN,
)
from gpu_autoscaler.sim.invariants.brake import BrakeInvariant
from gpu_autoscaler.sim.invariants.directives import DirectivesInvariant
from gpu_autoscaler.sim.invariants.disruption import (
    DisruptionBudgetsInvariant,
    FinalizersInvariant,
    NoticesReceivedInvariant,
    RetriesInvariant,
    StaleDataInvariant,
    WithdrawnNoticesInvariant,
)
from gpu_autoscaler.sim.invariants.limits import LimitsInvariant, RemovalPaceInvariant
from gpu_autoscaler.sim.invariants.liveness import BurstWaitInvariant
from gpu_autoscaler.sim.invariants.observer import Observer
from gpu_autoscaler.sim.invariants.placement import PlacementInvariant
from gpu_autoscaler.sim.invariants.purchases import DuplicatePurchasesInvariant, GangsInvariant, RefusedOffersInvariant
from gpu_autoscaler.sim.invariants.quotas import QuotasInvariant, ResourceQuotasInvariant
from gpu_autoscaler.sim.invariants.spend import SpendInvariant
from gpu_autoscaler.sim.invariants.upkeep import UpkeepInvariant
from gpu_autoscaler.sim.virtual_time import VirtualLoop
from gpu_autoscaler.store.protocol import JobRow

CORDONED_SECONDS = 2.0
DRAINED_SECONDS_MIN = 15.0  # a notice read this long before its deadline leaves time to empty the node
JUST_SAVED_SECONDS = 900.0  # longer than a voluntary drain
ANSWER_SECONDS_BEFORE = 5.0  # clocks of nodes differ a little
SAVE_DEADLINE_SECONDS = 10.0  # before the last moment that leaves the pod its grace period
CALM_SECONDS = 60.0  # without a fault: delayed work has caught up
# The path of a notice. Faults elsewhere (prices, launches, telemetry, other services) excuse nothing.
NOTICE_PATH = (BROKER, RECORD, KUBERNETES, STORE, "notices", "prices", "pod_watcher", "scaler", "scaler-2")
WITHDRAWN_SECONDS = 60.0  # until every process knows that a notice was withdrawn
ORDERED_SECONDS = 180.0  # at most, from the plan that buys a machine to its launch
DEFERRED_GROUPS_COUNT_MAX, DEFERRED_BYTES_MAX = 200, 64 * 1024  # of a plan, however much work waits
RUNNING_KNOWN_SECONDS = 90.0  # a pod that has run this long without faults is known to every process


class InvariantViolation:
    """A violated invariant."""

    __slots__ = ("at", "invariant", "what")

    def __init__(self, invariant: str, what: str, at: datetime) -> None:
        self.invariant = invariant
        self.what = what
        self.at = at

    def __str__(self) -> str:
        return f"{self.invariant}: {self.what} ({self.at.isoformat()})"


class InvariantMonitor(Observer):
    """Observes every action on the simulation and reports violations at once."""

    def __init__(
        self,
        loop: VirtualLoop,
        workloads: Workloads,
        cloud: Cloud,
        policies: Policies,
        jobs: Mapping[JobId, JobRow],
        *,
        calm_since: Callable[..., float],
    ) -> None:
        """`jobs`: as in the store; `calm_since`: when the last fault at these places ended, in seconds of the loop."""
        self.violations: list[InvariantViolation] = []
        self.lost_listeners: list[Callable[[], None]] = []
        self._loop = loop
        self._workloads = workloads
        self._cloud = cloud
        self._policies = policies
        self._calm_since = calm_since
        self._launched: set[ActionId] = set()
        self._decided: set[ActionId] = set()
        self._last_plan_sequence = 0
        self._received_at: dict[str, float] = {}  # by node name: when its notice was first received
        self._voluntarily_drained: set[str] = set()  # names of nodes that were drained voluntarily
        self._forced_since: dict[str, datetime] = {}  # by node name: when its forced drain has asked its pods to save
        self._duplicate_purchases = DuplicatePurchasesInvariant(workloads, cloud, policies, jobs, self.report)
        self._limits = LimitsInvariant(cloud, policies, self.report)
        self._brake = BrakeInvariant(cloud, policies, self.report)
        self._spend = SpendInvariant(loop, cloud, workloads.cluster, policies, jobs, self.report, calm_since=calm_since)
        self._spend.is_braked = lambda: self._brake.is_tripped
        self._removal_pace = RemovalPaceInvariant(cloud, policies, self.report)
        self._disruption_budgets = DisruptionBudgetsInvariant(workloads, cloud, self.report)
        self._gangs = GangsInvariant(jobs, cloud, self.report)
        self._quotas = QuotasInvariant(workloads, policies, jobs, self.report)
        self._resource_quotas = ResourceQuotasInvariant(workloads.cluster, jobs, self.report)
        self._burst_waits = BurstWaitInvariant(self.report)
        self._finalizers = FinalizersInvariant(workloads, cloud, self.report)
        self._placement = PlacementInvariant(workloads, cloud, jobs, self.report)
        self._stale_data = StaleDataInvariant(policies, self.report)
        self._directives = DirectivesInvariant(cloud, policies, self.report)
        self._refused_offers = RefusedOffersInvariant(self.report)
        self._upkeep = UpkeepInvariant(workloads.cluster, cloud, self.report)
        self._withdrawn_notices = WithdrawnNoticesInvariant(loop, cloud, self.report, calm_since=calm_since)
        self._retries = RetriesInvariant(policies, self.report)
        self._notices_received = NoticesReceivedInvariant(workloads, cloud, self.report, self._was_calm_on_notice_path)
        self.lost_listeners += [
            self._brake.streams_lost,
            self._directives.streams_lost,
            self._refused_offers.streams_lost,
            self._retries.streams_lost,
            self._stale_data.streams_lost,
            self._upkeep.streams_lost,
        ]
        cloud.launch_listeners.append(self.on_launch)
        workloads.cluster.listen(self._on_change)

    def report(self, invariant: str, what: str) -> None:
        """Record the violation and end the run: later violations would only follow from it."""
        self.violations.append(InvariantViolation(invariant, what, self._loop.now()))
        self._loop.stop()

    # ---- one launch per action; limits are never exceeded

    def on_launch(self, machine: Machine) -> None:
        """A machine was launched."""
        action_id = machine.order.action_id
        if action_id in self._launched:
            self.report(ONE_LAUNCH, f"{action_id} launched a second machine, {machine.provider_id}")
        if action_id not in self._decided:
            self.report(ONE_LAUNCH, f"{machine.provider_id} was launched for {action_id}, which is in no plan")
        self._launched.add(action_id)
        self._limits.on_launch(machine)
        self._spend.on_launch(machine)

    def launch_requested(self, order: Order, reported_up_to: int) -> None:
        self._refused_offers.launch_requested(order.action_id, reported_up_to)

    def message_deleted(self, message: QueueMessage) -> None:
        """A message of the interruption queue was deleted."""
        self._notices_received.message_deleted(message)

    # ---- no voluntary removal of protected work

    def notice_withdrawn(self, machine: Machine) -> None:
        """The cloud withdrew a notice."""
        self._received_at.pop(machine.node_name, None)
        self._withdrawn_notices.notice_withdrawn(machine)

    def pod_disrupted(self, pod: core.Pod, *, is_forced: bool) -> None:
        machine = self._cloud.of_node(pod.spec.node_name)
        if machine is None and pod.spec.node_name is not None:
            self.report(
                FOREIGN_NODES_UNTOUCHED,
                f"{pod.metadata.name} was evicted from {pod.spec.node_name}, which is not managed",
            )
        if machine is None or not machine.is_alive:
            return
        if self._is_at_risk(machine):
            self._check_notified(pod, machine)
            return
        if not machine.gpu_fault:  # a damaged node may be drained for its damage, which uses up a retry
            self._retries.evicted_by_choice(pod)
        if self._spend.may_disrupt(machine, pod):
            return
        name = f"{pod.metadata.namespace}/{pod.metadata.name} on {machine.node_name}"
        if is_forced:
            self.report(NO_VOLUNTARY_REMOVAL, f"{name} was force-deleted, but its node is not at risk")
        elif (protection := self._protection(pod)) is not None:
            self.report(NO_VOLUNTARY_REMOVAL, f"{name} was evicted, but {protection}")

    def machine_terminated(self, machine: Machine) -> None:
        if self._workloads.cluster.find(NODES, "", machine.node_name) is None:
            return  # the node object was deleted by hand, so its pods are lost anyway
        is_due = machine.notice is not None and (
            machine.notice.reclaim_at is None or machine.notice.reclaim_at <= self._loop.now()
        )
        running = [pod for pod in self._cloud.pods_on(machine) if pod.metadata.deletion_timestamp is None]
        if running and not is_due:
            names = ", ".join(pod.metadata.name for pod in running)
            self.report(NO_VOLUNTARY_REMOVAL, f"{machine.node_name} was terminated with running pods: {names}")

    def node_deleted(self, node: core.Node) -> None:
        self._upkeep.node_deleted(node)
        machine = self._cloud.of_node(node.metadata.name)
        if machine is None:
            self.report(FOREIGN_NODES_UNTOUCHED, f"{node.metadata.name} was deleted, but is not managed")
        elif machine.state != "terminated":
            self.report(NO_VOLUNTARY_REMOVAL, f"{node.metadata.name} was deleted, but its machine is {machine.state}")

    def taints_patched(self, node: core.Node, keys: Sequence[str]) -> None:
        self._upkeep.taints_patched(node, keys)

    def finalizers_patched(self, node: core.Node, finalizers: Sequence[str]) -> None:
        self._upkeep.finalizers_patched(node, finalizers)

    def pod_annotated(self, pod: core.Pod, annotations: Mapping[str, str]) -> None:
        self._upkeep.pod_annotated(pod, annotations)

    def _on_change(self, plural: str, entry: Entry) -> None:
        node = entry.object
        is_cordoned = plural == NODES.plural and isinstance(node, core.Node) and node.spec.unschedulable
        if is_cordoned and self._cloud.of_node(node.metadata.name) is None:
            self.report(FOREIGN_NODES_UNTOUCHED, f"{node.metadata.name} was cordoned, but is not managed")

    def _is_at_risk(self, machine: Machine) -> bool:
        node = self._workloads.cluster.find(NODES, "", machine.node_name)
        if node is not None and node.metadata.deletion_timestamp is not None:
            return True  # deleted by hand
        if (
            machine.notice is not None
            or machine.has_broken_gpu
            or self._is_overdue(machine)
            or self._failed_to_boot(machine)
        ):
            return True  # possibly a second notice after a withdrawn one
        withdrawn_at = self._withdrawn_notices.withdrawn_at(machine.node_name)
        if withdrawn_at is None:
            return False
        # A process that does not know of the withdrawal yet still acts on the notice; faults delay its knowledge.
        return self._loop.time() - max(withdrawn_at, self._calm_since(*NOTICE_PATH)) < WITHDRAWN_SECONDS

    def _failed_to_boot(self, machine: Machine) -> bool:
        """True for a machine that was not usable when its boot timeout ended."""
        seconds = (self._loop.now() - machine.launched_at).total_seconds()
        return not machine.is_usable and (
            machine.was_delayed or seconds >= self._policies.now.boot_seconds_max - ORDERED_SECONDS
        )

    def _is_overdue(self, machine: Machine) -> bool:
        """True for a machine so old that nothing protects its pods any more."""
        rules = self._policies.now.removal
        if rules.expire_seconds_max is None:
            return False
        seconds = rules.expire_seconds_max * (1 - rules.expire_jitter_ratio) + rules.expire_grace_seconds
        return (self._loop.now() - machine.launched_at).total_seconds() >= seconds

    def _protection(self, pod: core.Pod) -> str | None:
        annotations = pod.metadata.annotations
        if pod.metadata.deletion_timestamp is not None:
            return None
        if annotations.get(labels.DO_NOT_DISRUPT) == "true":
            return "it must not be disrupted"
        if annotations.get(labels.SAFE_TO_EVICT) == "false":
            return "it is not safe to evict"
        owner = next(
            (owner_reference.kind for owner_reference in pod.metadata.owner_references if owner_reference.controller),
            None,
        )
        if owner == "Job" and annotations.get(labels.SAFE_TO_EVICT) != "true" and not self._has_just_saved(pod):
            return "its work would restart from zero"
        return None if owner is not None or controller_of(pod) is not None else "no controller would recreate it"

    def _has_just_saved(self, pod: core.Pod) -> bool:
        """True if the pod was asked for a checkpoint before its eviction and has saved since."""
        annotations = pod.metadata.annotations
        saved_at, asked_at = annotations.get(labels.CHECKPOINTED_AT), annotations.get(labels.CHECKPOINT_REQUESTED_AT)
        if not saved_at or not asked_at:
            return False
        at = datetime.fromisoformat(saved_at)
        is_answer = at >= datetime.fromisoformat(asked_at) - timedelta(seconds=ANSWER_SECONDS_BEFORE)
        return is_answer and self._loop.now() - at < timedelta(seconds=JUST_SAVED_SECONDS)

    # ---- one plan per parent

    def streams_lost(self) -> None:
        """All streams are lost: plan sequences restart."""
        self._last_plan_sequence = 0
        for listener in self.lost_listeners:
            listener()

    def _on_plan(self, plan: Plan, sequence: int) -> None:
        if plan.parent_sequence != self._last_plan_sequence:
            self.report(
                ONE_PLAN, f"plan #{sequence} has the parent #{plan.parent_sequence}, not #{self._last_plan_sequence}"
            )
        self._last_plan_sequence = sequence
        self._check_deferred(plan)
        self._withdrawn_notices.on_plan(plan)
        is_calm = self._was_calm_since(self._loop.time())
        self._duplicate_purchases.on_plan(plan, is_calm=is_calm)
        self._gangs.on_plan(plan)
        self._resource_quotas.on_plan(plan, is_calm=is_calm)
        self._placement.on_plan(plan, is_calm=is_calm)
        self._disruption_budgets.on_plan(plan, is_calm=is_calm)
        self._spend.on_plan(plan, is_calm=is_calm)
        for drain in plan.drains:
            if drain.is_voluntary and isinstance(drain.reason, NodeIdle):
                self._check_idle(drain.node_name)
        self._decided.update(decision.action_id for decision in plan.purchases)

    def _check_deferred(self, plan: Plan) -> None:
        """A plan that grows with the work that waits would become larger than the broker's messages."""
        groups, bytes_count = len(plan.deferred_groups), len(msgspec.json.encode(plan.deferred_groups))
        if plan.deferred or groups > DEFERRED_GROUPS_COUNT_MAX or bytes_count > DEFERRED_BYTES_MAX:
            what = f"{len(plan.deferred)} objects one by one, and {groups} groups of {bytes_count} bytes"
            self.report(DEFERRED_BOUNDED, f"the plan defers {what}")

    def _check_frozen(self, plan_made: ScalingPlanMade) -> None:
        """A frozen cluster buys nothing and removes only what the cloud reclaims."""
        if not self._policies.by_digest[plan_made.policy_digest].is_frozen:
            return
        for decision in plan_made.plan.decisions:
            if isinstance(decision, BuyNode | ReleaseInstance) or (
                isinstance(decision, DrainNode) and decision.is_voluntary
            ):
                self.report(
                    FREEZE_OBEYED, f"plan {plan_made.plan_id} decides {decision.action_id}: {decision.reason.tag()}"
                )

    def _check_idle(self, node_name: str) -> None:
        machine, now = self._cloud.of_node(node_name), self._loop.now()
        if machine is None or not self._was_calm_since(self._loop.time() - RUNNING_KNOWN_SECONDS):
            return
        for pod in self._cloud.pods_on(machine):
            started_at = pod.status.start_time or now
            if pod.metadata.deletion_timestamp is None and (now - started_at).total_seconds() > RUNNING_KNOWN_SECONDS:
                self.report(
                    NO_VOLUNTARY_REMOVAL, f"{node_name} was drained as idle, but {pod.metadata.name} runs there"
                )

    def pod_refused(self, pod: core.Pod, quota: core.ResourceQuota) -> None:
        """The API server does not create a pod of a released Job."""
        if self._was_calm_since(self._loop.time()):
            self._resource_quotas.on_refused(pod, quota)

    # ---- interruption notices

    def on_fact(self, recorded: Recorded) -> None:
        """A fact was stored."""
        fact = recorded.fact
        self._brake.on_fact(recorded)
        self._directives.on_fact(recorded)
        self._refused_offers.on_fact(recorded)
        self._stale_data.on_fact(recorded)
        self._upkeep.on_fact(recorded)
        if isinstance(fact, ScalingPlanMade) and self._was_calm_since(self._loop.time() - 2 * RUNNING_KNOWN_SECONDS):
            self._upkeep.check_asked(self._loop.now(), self._policies)
        if isinstance(fact, ScalingPlanMade):
            self._on_plan(fact.plan, recorded.sequence)
            self._check_frozen(fact)
            self._burst_waits.on_plan(fact.plan, self._policies.by_digest[fact.policy_digest])
            is_calm = self._was_calm_since(self._loop.time())
            self._removal_pace.on_plan(fact.plan, fact.policy_digest, self._loop.now(), is_calm=is_calm)
        if isinstance(fact, ScalingLaunchRefused):
            self._duplicate_purchases.order_ended(fact.action_id)
            self._spend.order_ended(fact.action_id)
            self._placement.order_ended(fact.action_id)
        self._quotas.on_fact(fact)
        if isinstance(fact, JobPlaced):
            self._gangs.on_placed(fact)
            self._placement.on_placed(fact, is_calm=self._was_calm_since(self._loop.time()))
        if isinstance(fact, JobPreempted):
            self._retries.on_preempted(fact, is_calm=self._was_calm_since(self._loop.time()))
        if isinstance(fact, JobFinished):
            self._retries.on_finished(fact, is_calm=self._was_calm_since(self._loop.time()))
        self._on_drain_step(fact)
        if isinstance(fact, SpotNoticeReceived):
            self._notices_received.notice_received(fact)
            self._schedule_checks(fact)
        if isinstance(fact, JobCancelRequested) and fact.action_id is not None:
            self.report(BUSY_JOBS_KEPT, f"{fact.job_id}: {fact.note}")

    def _on_drain_step(self, fact: Fact) -> None:
        match fact:
            case ScalingDrainStarted() if fact.is_voluntary:
                self._voluntarily_drained.add(fact.node_name)
            case ScalingDrainStarted():
                self._forced_since.setdefault(fact.node_name, fact.started_at)
            case ScalingNodeDrained() | ScalingDrainCancelled():
                self._removal_pace.drain_ended(fact.node_name)
                self._forced_since.pop(fact.node_name, None)
                if isinstance(fact, ScalingNodeDrained) and fact.node_name not in self._voluntarily_drained:
                    self._withdrawn_notices.on_drained(fact)
            case _:
                pass

    def _schedule_checks(self, notice: SpotNoticeReceived) -> None:
        """Check each part of the response after its time limit."""
        machine = self._cloud.of_id(notice.provider_id)
        if machine is None:
            return
        received_at = self._received_at.setdefault(machine.node_name, self._loop.time())
        self._loop.call_later(CORDONED_SECONDS, self._check_cordoned, machine, received_at)
        if machine.notice is not None and machine.notice.reclaim_at is not None:
            remaining_seconds = (machine.notice.reclaim_at - self._loop.now()).total_seconds()
            if remaining_seconds >= DRAINED_SECONDS_MIN:
                self._loop.call_later(remaining_seconds - 1.0, self._check_emptied, machine, received_at)

    def _check_cordoned(self, machine: Machine, received_at: float) -> None:
        """Soon after the notice is received the node is cordoned and its pods are notified."""
        node = self._workloads.cluster.find(NODES, "", machine.node_name)
        if node is None or not self._must_be_handled(machine, received_at):
            return
        if not node.spec.unschedulable:
            self.report(NOTICES_HANDLED, f"{machine.node_name} accepts pods 2 s after its notice was received")
        for pod in self._remaining_pods(machine):
            if not self._is_notified(pod, machine, received_at):
                what = f"{pod.metadata.name} on {machine.node_name} was not notified within 2 s"
                self.report(NOTICES_HANDLED, what)

    def _check_emptied(self, machine: Machine, received_at: float) -> None:
        """Just before the deadline every pod has been evicted."""
        if self._must_be_handled(machine, received_at):
            for pod in self._remaining_pods(machine):
                what = f"{pod.metadata.name} on {machine.node_name} still runs when the machine is reclaimed"
                self.report(NOTICES_HANDLED, what)

    def _check_notified(self, pod: core.Pod, machine: Machine) -> None:
        """A pod evicted for a notice was notified before, so that it could save its work."""
        received_at = self._received_at.get(machine.node_name)
        if received_at is None or machine.notice is None or machine.node_name in self._voluntarily_drained:
            return  # evicted for another cause
        is_notified = self._is_notified(pod, machine, received_at)
        if not is_notified and pod.metadata.deletion_timestamp is None and self._must_be_handled(machine, received_at):
            what = f"{pod.metadata.name} on {machine.node_name} was evicted without being notified"
            self.report(NOTICES_HANDLED, what)
        if (
            is_notified
            and self._is_still_saving(pod, machine, received_at)
            and self._must_be_handled(machine, received_at)
        ):
            self.report(NOTICES_HANDLED, f"{pod.metadata.name} on {machine.node_name} was evicted during its save")

    def _is_notified(self, pod: core.Pod, machine: Machine, received_at: float) -> bool:
        """True if the pod was asked to save since the notice or just before, or by a forced drain that is older."""
        asked_at, since = pod.metadata.annotations.get(labels.CHECKPOINT_REQUESTED_AT), self._answers_from(received_at)
        since = min(since, self._forced_since.get(machine.node_name, since))
        return asked_at is not None and datetime.fromisoformat(asked_at) >= since

    def _is_still_saving(self, pod: core.Pod, machine: Machine, received_at: float) -> bool:
        """True if a pod that can save was asked, has not saved since the notice or just before, and has time left."""
        saved_at = pod.metadata.annotations.get(labels.CHECKPOINTED_AT)
        reclaim_at = None if machine.notice is None else machine.notice.reclaim_at
        if saved_at is None or reclaim_at is None or pod.metadata.deletion_timestamp is not None:
            return False
        remaining_seconds = (reclaim_at - self._loop.now()).total_seconds() - pod.spec.termination_grace_period_seconds
        return remaining_seconds > SAVE_DEADLINE_SECONDS and (
            not saved_at or datetime.fromisoformat(saved_at) < self._answers_from(received_at)
        )

    def _answers_from(self, received_at: float) -> datetime:
        """Return the time from which a request or a save belongs to the notice: its own, less what clocks differ."""
        return self._loop.now() - timedelta(seconds=self._loop.time() - received_at + ANSWER_SECONDS_BEFORE)

    def _remaining_pods(self, machine: Machine) -> list[core.Pod]:
        """Return running pods that have not been evicted."""
        return [pod for pod in self._cloud.pods_on(machine) if pod.metadata.deletion_timestamp is None]

    def _must_be_handled(self, machine: Machine, received_at: float) -> bool:
        """True if the notice is active and no fault delayed the response since the minute before it."""
        is_active = machine.notice is not None and machine.is_alive
        return is_active and self._was_calm_on_notice_path(received_at)

    def _was_calm_on_notice_path(self, at: float) -> bool:
        return self._was_calm_since(at, *NOTICE_PATH)

    def _was_calm_since(self, at: float, *places: str) -> bool:
        """True if no fault was active at these places from a minute before `at` until now; without places: anywhere."""
        return self._calm_since(*places) < at - CALM_SECONDS
