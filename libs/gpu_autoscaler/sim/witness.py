"""The promises, held against the world's own truth at every step; what services believe counts for nothing here.

Numbers are those of the design notes, "Promises". What can only be said at the end stands in `settling.py`.
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
DRAINED_SECONDS_MIN = 15.0  # a notice that was read so long before its end leaves time to empty the node
JUST_SAVED_SECONDS = 900.0  # a drain by choice takes no longer
LAST_CALL_SECONDS = 10.0  # before a pod's grace period is all that is left: earlier nobody hurries who still saves
CALM_SECONDS = 60.0  # without a fault before: what was late because of one has caught up
# Who reads a notice, who decides, and what carries it. What else is wrong (prices, launches, telemetry, other services)
# is no excuse.
NOTICE_PATH = (BROKER, RECORD, KUBERNETES, STORE, "notices", "prices", "pod_watcher", "scaler", "scaler-2")
WITHDRAWN_SECONDS = 60.0  # until everybody has heard that a notice no longer stands
ORDERED_SECONDS = 180.0  # from the plan that buys a machine to its launch, at most
AT_WORK_SECONDS = 90.0  # a pod that has run for so long in calm times is known to everybody


class Broken:
    """A promise that was not kept."""

    __slots__ = ("at", "promise", "what")

    def __init__(self, promise: str, what: str, at: datetime) -> None:
        self.promise = promise
        self.what = what
        self.at = at

    def __str__(self) -> str:
        return f"{self.promise}: {self.what} ({self.at.isoformat()})"


class Witness:
    """Sees what is done to the world, and says at once when a promise breaks."""

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
        """`jobs`: as the store has them; `calm_since`: when the last fault at these places was over, in the loop's
        seconds."""
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
        self._read_at: dict[str, float] = {}  # by node name: when its notice was first read
        self._left_by_choice: set[str] = set()  # names of nodes that once drained without a notice
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
        """Put it on record, and end the run: what follows from a broken promise is no news."""
        self.broken.append(Broken(promise, what, self._loop.now()))
        self._loop.stop()

    # ---- never two launches for one action, never more than the limits

    def launched(self, machine: Machine) -> None:
        """A machine was made."""
        action_id = machine.order.action_id
        if action_id in self._launched:
            self.breaks("one launch for one action", f"{action_id} bought a second machine, {machine.provider_id}")
        if action_id not in self._decided:
            self.breaks("one launch for one action", f"{machine.provider_id} was bought for {action_id}, of no plan")
        self._launched.add(action_id)
        self._ceilings.launched(machine)
        self._purse.launched(machine)

    def asked(self, order: Order, known_to: int) -> None:
        """Somebody is about to ask for a machine."""
        self._courtesy.asked(order.action_id, known_to)

    def deleted(self, message: Message) -> None:
        """Somebody deleted an event of the cloud's queue."""
        self._hearing.deleted(message)

    # ---- never a voluntary removal of what must not be disturbed

    def withdrawn(self, machine: Machine) -> None:
        """The cloud took a notice back."""
        self._recalls.withdrawn(machine)

    def disturbed(self, pod: wire.Pod, *, is_forced: bool) -> None:
        """Somebody asks for the pod's eviction, or deletes it against all budgets."""
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
        """A service ends a machine that lives."""
        if self._workloads.cluster.find(NODES, "", machine.node_name) is None:
            return  # somebody deleted the node's object, which dooms what runs there whoever ends the machine
        is_due = machine.notice is not None and (
            machine.notice.reclaim_at is None or machine.notice.reclaim_at <= self._loop.now()
        )
        running = [pod for pod in self._cloud.pods_on(machine) if pod.metadata.deletion_timestamp is None]
        if running and not is_due:
            names = ", ".join(pod.metadata.name for pod in running)
            self.breaks("no voluntary removal", f"{machine.node_name} was ended with work on it: {names}")

    def removed(self, node: wire.Node) -> None:
        """A service deletes a node's object."""
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
            return True  # somebody deleted it by hand
        if machine.notice is not None or machine.has_broken_gpu or self._is_overdue(machine) or self._is_dud(machine):
            return True  # be it the second notice, after a first that was taken back
        withdrawn_at = self._recalls.withdrawn_at(machine.node_name)
        if withdrawn_at is None:
            return False
        # Whoever has not heard of it yet acts on the notice in good faith; troubles make that take longer.
        return self._loop.time() - max(withdrawn_at, self._calm_since(*NOTICE_PATH)) < WITHDRAWN_SECONDS

    def _is_dud(self, machine: Machine) -> bool:
        """True for a machine that was not what was bought when its time to boot was over."""
        seconds = (self._loop.now() - machine.launched_at).total_seconds()
        return not machine.is_usable and (
            machine.was_held or seconds >= self._policies.now.boot_seconds_max - ORDERED_SECONDS
        )

    def _is_overdue(self, machine: Machine) -> bool:
        """True for a machine so old that nothing protects what runs there any more."""
        rules = self._policies.now.removal
        if rules.expire_seconds_max is None:
            return False
        seconds = rules.expire_seconds_max * (1 - rules.expire_jitter_ratio) + rules.expire_overtime_seconds
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
        """True where the pod was asked to save before it was told to go, and did."""
        told = pod.metadata.annotations
        said = told.get(labels.CHECKPOINTED_AT)
        if not said or labels.CHECKPOINT_REQUESTED not in told:
            return False
        return self._loop.now() - datetime.fromisoformat(said) < timedelta(seconds=JUST_SAVED_SECONDS)

    # ---- one plan after the other

    def lost(self) -> None:
        """The broker lost everything: plans are counted anew."""
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
        """Under a freeze nothing is bought, and nothing goes but what the cloud takes."""
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

    # ---- a notice is answered

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
        """Look again when the time for each part of the answer is over."""
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
        """Soon after it is read nothing new lands there, and what runs there is told."""
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
        """At its deadline nothing is left that was not at least told to go."""
        if self._is_to_be_answered(machine, read_at):
            for pod in self._staying(machine):
                what = f"{pod.metadata.name} on {machine.node_name} is still there when the machine is taken"
                self.breaks("a notice is answered", what)

    def _see_whether_told(self, pod: wire.Pod, machine: Machine) -> None:
        """A pod that goes because of a notice has heard of it, so that it could save its work."""
        read_at = self._read_at.get(machine.node_name)
        if read_at is None or machine.notice is None or machine.node_name in self._left_by_choice:
            return  # it goes for another reason, or for none any more
        is_told = labels.CHECKPOINT_REQUESTED in pod.metadata.annotations
        if not is_told and pod.metadata.deletion_timestamp is None and self._is_to_be_answered(machine, read_at):
            what = f"{pod.metadata.name} on {machine.node_name} was not told before it went"
            self.breaks("a notice is answered", what)
        if is_told and self._is_still_saving(pod, machine) and self._is_to_be_answered(machine, read_at):
            self.breaks("a notice is answered", f"{pod.metadata.name} on {machine.node_name} had to go while it saved")

    def _is_still_saving(self, pod: wire.Pod, machine: Machine) -> bool:
        """True where a pod that can save was asked, has not saved since the notice, and has time left to do so."""
        said = pod.metadata.annotations.get(labels.CHECKPOINTED_AT)
        reclaim_at = None if machine.notice is None else machine.notice.reclaim_at
        if said is None or reclaim_at is None or pod.metadata.deletion_timestamp is not None:
            return False
        left_seconds = (reclaim_at - self._loop.now()).total_seconds() - pod.spec.termination_grace_period_seconds
        noticed_at = self._loop.now() - timedelta(seconds=self._loop.time() - self._read_at[machine.node_name])
        return left_seconds > LAST_CALL_SECONDS and (not said or datetime.fromisoformat(said) < noticed_at)

    def _staying(self, machine: Machine) -> list[wire.Pod]:
        """Pods at work there that nobody has told to go."""
        return [pod for pod in self._cloud.pods_on(machine) if pod.metadata.deletion_timestamp is None]

    def _is_to_be_answered(self, machine: Machine, read_at: float) -> bool:
        """True where the notice stands and no fault lay on the way of the answer, nor in the minute before."""
        stands = machine.notice is not None and machine.is_alive
        return stands and self._was_calm_on_notices_path(read_at)

    def _was_calm_on_notices_path(self, at: float) -> bool:
        return self._was_calm_since(at, *NOTICE_PATH)

    def _was_calm_since(self, at: float, *places: str) -> bool:
        """No fault was in force at these places, from a minute before `at` until now; at none at all for none given."""
        return self._calm_since(*places) < at - CALM_SECONDS
