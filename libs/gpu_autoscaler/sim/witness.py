"""Checks invariants on every event against the true state of the simulation, whatever the services believe.

Invariants of the end of a run are in `quiescence.py`.
"""

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta

from gpu_autoscaler.core.idle_jobs import REQUESTED_BY as IDLE_JOBS_BY
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.job import JobCancelRequested, JobPlaced
from gpu_autoscaler.events.scaling import (
    ScalingDrainCancelled,
    ScalingDrainStarted,
    ScalingLaunchRefused,
    ScalingNodeDrained,
    ScalingPlanMade,
)
from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.kube import wire
from gpu_autoscaler.kube.protocol import NODES
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, DrainNode, Plan, ReleaseInstance
from gpu_autoscaler.model.ids import ActionId, JobId
from gpu_autoscaler.model.reasons import NodeIdle
from gpu_autoscaler.providers.protocol import Order
from gpu_autoscaler.sim.bursts import Bursts
from gpu_autoscaler.sim.ceilings import Ceilings
from gpu_autoscaler.sim.cloud import Cloud, Machine
from gpu_autoscaler.sim.courtesy import Courtesy
from gpu_autoscaler.sim.events import Message
from gpu_autoscaler.sim.faults import BROKER, KUBERNETES, RECORD, STORE
from gpu_autoscaler.sim.goings import Goings
from gpu_autoscaler.sim.hearing import Hearing
from gpu_autoscaler.sim.holding import Holding
from gpu_autoscaler.sim.kubernetes import Entry
from gpu_autoscaler.sim.obedience import Obedience
from gpu_autoscaler.sim.permission import Permission
from gpu_autoscaler.sim.pictures import Pictures
from gpu_autoscaler.sim.policies import Policies
from gpu_autoscaler.sim.purse import Purse
from gpu_autoscaler.sim.recalls import Recalls
from gpu_autoscaler.sim.shelter import Shelter
from gpu_autoscaler.sim.thrift import Thrift
from gpu_autoscaler.sim.timeline import VirtualLoop
from gpu_autoscaler.sim.wholeness import Wholeness
from gpu_autoscaler.sim.workloads import Workloads, controller_of
from gpu_autoscaler.store.protocol import JobRow

CORDONED_SECONDS = 2.0
DRAINED_SECONDS_MIN = 15.0  # a notice read this long before its deadline leaves time to empty the node
JUST_SAVED_SECONDS = 900.0  # longer than a voluntary drain
LAST_CALL_SECONDS = 10.0  # before the last moment that leaves the pod its grace period
CALM_SECONDS = 60.0  # without a fault: delayed work has caught up
# The path of a notice. Faults elsewhere (prices, launches, telemetry, other services) excuse nothing.
NOTICE_PATH = (BROKER, RECORD, KUBERNETES, STORE, "notices", "prices", "pod_watcher", "scaler", "scaler-2")
WITHDRAWN_SECONDS = 60.0  # until every process knows that a notice was withdrawn
ORDERED_SECONDS = 180.0  # at most, from the plan that buys a machine to its launch
AT_WORK_SECONDS = 90.0  # a pod that has run this long without faults is known to every process


class Broken:
    """A violated invariant."""

    __slots__ = ("at", "promise", "what")

    def __init__(self, promise: str, what: str, at: datetime) -> None:
        self.promise = promise
        self.what = what
        self.at = at

    def __str__(self) -> str:
        return f"{self.promise}: {self.what} ({self.at.isoformat()})"


class Witness:
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
        self.broken: list[Broken] = []
        self.lost_listeners: list[Callable[[], None]] = []
        self._loop = loop
        self._workloads = workloads
        self._cloud = cloud
        self._policies = policies
        self._calm_since = calm_since
        self._launched: set[ActionId] = set()
        self._decided: set[ActionId] = set()
        self._last_plan_sequence = 0
        self._read_at: dict[str, float] = {}  # by node name: when its notice was first received
        self._left_by_choice: set[str] = set()  # names of nodes that were drained voluntarily
        self._thrift = Thrift(workloads, cloud, policies, jobs, self.breaks)
        self._ceilings = Ceilings(cloud, policies, self.breaks)
        self._purse = Purse(loop, cloud, workloads.cluster, policies, jobs, self.breaks, calm_since=calm_since)
        self._goings = Goings(cloud, policies, self.breaks)
        self._permission = Permission(workloads, cloud, self.breaks)
        self._wholeness = Wholeness(jobs, cloud, self.breaks)
        self._bursts = Bursts(self.breaks)
        self._holding = Holding(workloads, cloud, self.breaks)
        self._shelter = Shelter(workloads, cloud, jobs, self.breaks)
        self._pictures = Pictures(policies, self.breaks)
        self._obedience = Obedience(cloud, policies, self.breaks)
        self._courtesy = Courtesy(self.breaks)
        self._recalls = Recalls(loop, cloud, self.breaks, calm_since=calm_since)
        self._hearing = Hearing(workloads, cloud, self.breaks, self._was_calm_on_notices_path)
        self.lost_listeners += [self._obedience.lost, self._courtesy.lost, self._pictures.lost]
        cloud.launch_listeners.append(self.launched)
        workloads.cluster.listen(self._changed)

    def breaks(self, promise: str, what: str) -> None:
        """Record the violation and end the run: later violations would only follow from it."""
        self.broken.append(Broken(promise, what, self._loop.now()))
        self._loop.stop()

    # ---- one launch per action; limits are never exceeded

    def launched(self, machine: Machine) -> None:
        """A machine was launched."""
        action_id = machine.order.action_id
        if action_id in self._launched:
            self.breaks("one launch for one action", f"{action_id} bought a second machine, {machine.provider_id}")
        if action_id not in self._decided:
            self.breaks("one launch for one action", f"{machine.provider_id} was bought for {action_id}, of no plan")
        self._launched.add(action_id)
        self._ceilings.launched(machine)
        self._purse.launched(machine)

    def asked(self, order: Order, known_to: int) -> None:
        """A process is about to launch a machine."""
        self._courtesy.asked(order.action_id, known_to)

    def deleted(self, message: Message) -> None:
        """A message of the interruption queue was deleted."""
        self._hearing.deleted(message)

    # ---- no voluntary removal of protected work

    def withdrawn(self, machine: Machine) -> None:
        """The cloud withdrew a notice."""
        self._recalls.withdrawn(machine)

    def disturbed(self, pod: wire.Pod, *, is_forced: bool) -> None:
        """A process evicts the pod, or deletes it regardless of its budgets."""
        machine = self._cloud.of_node(pod.spec.node_name)
        if machine is None and pod.spec.node_name is not None:
            self.breaks(
                "nodes of others", f"{pod.metadata.name} was told to leave {pod.spec.node_name}, which is not ours"
            )
        if machine is None or not machine.is_alive:
            return
        if self._is_doomed(machine):
            self._see_whether_told(pod, machine)
            return
        if self._purse.may_disturb(machine, pod):
            return
        name = f"{pod.metadata.namespace}/{pod.metadata.name} on {machine.node_name}"
        if is_forced:
            self.breaks("no voluntary removal", f"{name} was deleted by force, and nothing threatens its node")
        elif (why := self._protection(pod)) is not None:
            self.breaks("no voluntary removal", f"{name} was evicted, and {why}")

    def ended(self, machine: Machine) -> None:
        """A process terminates a running machine."""
        if self._workloads.cluster.find(NODES, "", machine.node_name) is None:
            return  # the node object was deleted by hand, so its pods are lost anyway
        is_due = machine.notice is not None and (
            machine.notice.reclaim_at is None or machine.notice.reclaim_at <= self._loop.now()
        )
        running = [pod for pod in self._cloud.pods_on(machine) if pod.metadata.deletion_timestamp is None]
        if running and not is_due:
            names = ", ".join(pod.metadata.name for pod in running)
            self.breaks("no voluntary removal", f"{machine.node_name} was ended with work on it: {names}")

    def removed(self, node: wire.Node) -> None:
        """A process deletes a node object."""
        machine = self._cloud.of_node(node.metadata.name)
        if machine is None:
            self.breaks("nodes of others", f"{node.metadata.name} was deleted, which is not ours")
        elif machine.state != "terminated":
            self.breaks("no voluntary removal", f"{node.metadata.name} was deleted, and its machine is {machine.state}")

    def _changed(self, plural: str, entry: Entry) -> None:
        node = entry.object
        is_cordoned = plural == NODES.plural and isinstance(node, wire.Node) and node.spec.unschedulable
        if is_cordoned and self._cloud.of_node(node.metadata.name) is None:
            self.breaks("nodes of others", f"{node.metadata.name} was cordoned, which is not ours")

    def _is_doomed(self, machine: Machine) -> bool:
        node = self._workloads.cluster.find(NODES, "", machine.node_name)
        if node is not None and node.metadata.deletion_timestamp is not None:
            return True  # deleted by hand
        if machine.notice is not None or machine.has_broken_gpu or self._is_overdue(machine) or self._is_dud(machine):
            return True  # possibly a second notice after a withdrawn one
        withdrawn_at = self._recalls.withdrawn_at(machine.node_name)
        if withdrawn_at is None:
            return False
        # A process that does not know of the withdrawal yet still acts on the notice; faults delay its knowledge.
        return self._loop.time() - max(withdrawn_at, self._calm_since(*NOTICE_PATH)) < WITHDRAWN_SECONDS

    def _is_dud(self, machine: Machine) -> bool:
        """True for a machine that was not usable when its boot timeout ended."""
        seconds = (self._loop.now() - machine.launched_at).total_seconds()
        return not machine.is_usable and (
            machine.was_held or seconds >= self._policies.now.boot_seconds_max - ORDERED_SECONDS
        )

    def _is_overdue(self, machine: Machine) -> bool:
        """True for a machine so old that nothing protects its pods any more."""
        rules = self._policies.now.removal
        if rules.expire_seconds_max is None:
            return False
        seconds = rules.expire_seconds_max * (1 - rules.expire_jitter_ratio) + rules.expire_grace_seconds
        return (self._loop.now() - machine.launched_at).total_seconds() >= seconds

    def _protection(self, pod: wire.Pod) -> str | None:
        annotations = pod.metadata.annotations
        if pod.metadata.deletion_timestamp is not None:
            return None
        if annotations.get(labels.DO_NOT_DISRUPT) == "true":
            return "it must not be disrupted"
        if annotations.get(labels.SAFE_TO_EVICT) == "false":
            return "it is not safe to evict"
        owner = next((one.kind for one in pod.metadata.owner_references if one.controller), None)
        if owner == "Job" and annotations.get(labels.SAFE_TO_EVICT) != "true" and not self._has_just_saved(pod):
            return "its work would start over"
        return None if owner is not None or controller_of(pod) is not None else "nobody would make it again"

    def _has_just_saved(self, pod: wire.Pod) -> bool:
        """True if the pod was asked for a checkpoint before its eviction and has saved."""
        told = pod.metadata.annotations
        said = told.get(labels.CHECKPOINTED_AT)
        if not said or labels.CHECKPOINT_REQUESTED not in told:
            return False
        return self._loop.now() - datetime.fromisoformat(said) < timedelta(seconds=JUST_SAVED_SECONDS)

    # ---- one plan per parent

    def lost(self) -> None:
        """All streams are lost: plan sequences restart."""
        self._last_plan_sequence = 0
        for listener in self.lost_listeners:
            listener()

    def _planned(self, plan: Plan, sequence: int) -> None:
        if plan.parent_sequence != self._last_plan_sequence:
            self.breaks(
                "one plan for one parent",
                f"plan #{sequence} knows #{plan.parent_sequence}, not #{self._last_plan_sequence}",
            )
        self._last_plan_sequence = sequence
        self._recalls.planned(plan)
        is_calm = self._was_calm_since(self._loop.time())
        self._thrift.planned(plan, is_calm=is_calm)
        self._wholeness.planned(plan)
        self._shelter.planned(plan, is_calm=is_calm)
        self._permission.planned(plan, is_calm=is_calm)
        self._purse.planned(plan, is_calm=is_calm)
        for decision in plan.decisions:
            if isinstance(decision, DrainNode) and decision.is_voluntary and isinstance(decision.reason, NodeIdle):
                self._see_idle(decision.node_name)
        self._decided.update(each.action_id for each in plan.decisions if isinstance(each, BuyNode))

    def _see_frozen(self, made: ScalingPlanMade) -> None:
        """A frozen cluster buys nothing and removes only what the cloud reclaims."""
        if not self._policies.by_digest[made.policy_digest].is_frozen:
            return
        for one in made.plan.decisions:
            if isinstance(one, BuyNode | ReleaseInstance) or (isinstance(one, DrainNode) and one.is_voluntary):
                self.breaks("a freeze holds", f"plan {made.plan_id} decides {one.action_id}: {one.reason.tag()}")

    def _see_idle(self, node_name: str) -> None:
        machine, now = self._cloud.of_node(node_name), self._loop.now()
        if machine is None or not self._was_calm_since(self._loop.time() - AT_WORK_SECONDS):
            return
        for pod in self._cloud.pods_on(machine):
            started_at = pod.status.start_time or now
            if pod.metadata.deletion_timestamp is None and (now - started_at).total_seconds() > AT_WORK_SECONDS:
                self.breaks("no voluntary removal", f"{node_name} was called idle, and {pod.metadata.name} runs there")

    # ---- interruption notices

    def heard(self, recorded: Recorded) -> None:
        """A fact was stored."""
        self._obedience.heard(recorded)
        self._courtesy.heard(recorded)
        self._pictures.heard(recorded)
        if isinstance(recorded.fact, ScalingPlanMade):
            self._planned(recorded.fact.plan, recorded.sequence)
            self._see_frozen(recorded.fact)
            self._bursts.planned(recorded.fact.plan, self._policies.by_digest[recorded.fact.policy_digest])
            is_calm = self._was_calm_since(self._loop.time())
            self._goings.planned(recorded.fact.plan, recorded.fact.policy_digest, self._loop.now(), is_calm=is_calm)
        if isinstance(recorded.fact, ScalingLaunchRefused):
            self._thrift.refused(recorded.fact.action_id)
            self._purse.over(recorded.fact.action_id)
            self._shelter.over(recorded.fact.action_id)
        if isinstance(recorded.fact, JobPlaced):
            self._wholeness.placed(recorded.fact)
            self._shelter.placed(recorded.fact, is_calm=self._was_calm_since(self._loop.time()))
        if isinstance(recorded.fact, ScalingDrainStarted) and recorded.fact.is_voluntary:
            self._left_by_choice.add(recorded.fact.node_name)
        if isinstance(recorded.fact, ScalingNodeDrained | ScalingDrainCancelled):
            self._goings.over(recorded.fact.node_name)
        if isinstance(recorded.fact, ScalingNodeDrained) and recorded.fact.node_name not in self._left_by_choice:
            self._recalls.drained(recorded.fact)
        if isinstance(recorded.fact, SpotNoticeReceived):
            self._hearing.read(recorded.fact)
            self._see_answered(recorded.fact)
        if isinstance(recorded.fact, JobCancelRequested) and recorded.fact.requested_by == IDLE_JOBS_BY:
            self.breaks("no job is ended on what a sensor says", f"{recorded.fact.job_id}: {recorded.fact.note}")

    def _see_answered(self, notice: SpotNoticeReceived) -> None:
        """Check each part of the response after its time limit."""
        machine, read_at = self._cloud.of_id(notice.provider_id), self._loop.time()
        if machine is None:
            return
        self._read_at.setdefault(machine.node_name, read_at)
        self._loop.call_later(CORDONED_SECONDS, self._see_cordoned, machine, read_at)
        if machine.notice is not None and machine.notice.reclaim_at is not None:
            left_seconds = (machine.notice.reclaim_at - self._loop.now()).total_seconds()
            if left_seconds >= DRAINED_SECONDS_MIN:
                self._loop.call_later(left_seconds - 1.0, self._see_emptied, machine, read_at)

    def _see_cordoned(self, machine: Machine, read_at: float) -> None:
        """Soon after the notice is received the node is cordoned and its pods are notified."""
        node = self._workloads.cluster.find(NODES, "", machine.node_name)
        if node is None or not self._is_to_be_answered(machine, read_at):
            return
        if not node.spec.unschedulable:
            self.breaks("a notice is answered", f"{machine.node_name} takes pods 2 s after its notice was read")
        for pod in self._staying(machine):
            if labels.CHECKPOINT_REQUESTED not in pod.metadata.annotations:
                what = f"{pod.metadata.name} on {machine.node_name} was not told within 2 s"
                self.breaks("a notice is answered", what)

    def _see_emptied(self, machine: Machine, read_at: float) -> None:
        """Just before the deadline every pod has been evicted."""
        if self._is_to_be_answered(machine, read_at):
            for pod in self._staying(machine):
                what = f"{pod.metadata.name} on {machine.node_name} is still there when the machine is taken"
                self.breaks("a notice is answered", what)

    def _see_whether_told(self, pod: wire.Pod, machine: Machine) -> None:
        """A pod evicted for a notice was notified before, so that it could save its work."""
        read_at = self._read_at.get(machine.node_name)
        if read_at is None or machine.notice is None or machine.node_name in self._left_by_choice:
            return  # evicted for another cause
        is_told = labels.CHECKPOINT_REQUESTED in pod.metadata.annotations
        if not is_told and pod.metadata.deletion_timestamp is None and self._is_to_be_answered(machine, read_at):
            what = f"{pod.metadata.name} on {machine.node_name} was not told before it went"
            self.breaks("a notice is answered", what)
        if is_told and self._is_still_saving(pod, machine) and self._is_to_be_answered(machine, read_at):
            self.breaks("a notice is answered", f"{pod.metadata.name} on {machine.node_name} had to go while it saved")

    def _is_still_saving(self, pod: wire.Pod, machine: Machine) -> bool:
        """True if a pod that can save was asked, has not saved since the notice, and has time left."""
        said = pod.metadata.annotations.get(labels.CHECKPOINTED_AT)
        reclaim_at = None if machine.notice is None else machine.notice.reclaim_at
        if said is None or reclaim_at is None or pod.metadata.deletion_timestamp is not None:
            return False
        left_seconds = (reclaim_at - self._loop.now()).total_seconds() - pod.spec.termination_grace_period_seconds
        noticed_at = self._loop.now() - timedelta(seconds=self._loop.time() - self._read_at[machine.node_name])
        return left_seconds > LAST_CALL_SECONDS and (not said or datetime.fromisoformat(said) < noticed_at)

    def _staying(self, machine: Machine) -> list[wire.Pod]:
        """Return running pods that have not been evicted."""
        return [pod for pod in self._cloud.pods_on(machine) if pod.metadata.deletion_timestamp is None]

    def _is_to_be_answered(self, machine: Machine, read_at: float) -> bool:
        """True if the notice is active and no fault delayed the response since the minute before it."""
        stands = machine.notice is not None and machine.is_alive
        return stands and self._was_calm_on_notices_path(read_at)

    def _was_calm_on_notices_path(self, at: float) -> bool:
        return self._was_calm_since(at, *NOTICE_PATH)

    def _was_calm_since(self, at: float, *places: str) -> bool:
        """True if no fault was active at these places from a minute before `at` until now; without places: anywhere."""
        return self._calm_since(*places) < at - CALM_SECONDS
