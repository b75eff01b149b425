"""Invariants of acts of upkeep, whatever a process believes.

No act happens that no recorded plan decided; each has its cause in the true state; none is decided again before its
back-off is over. Jobs that save on request are asked in time: an interruption costs them an interval of work at most.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

from gpu_autoscaler.core.disruption.protection import has_answered, save_request
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.job import JobCancelRequested, JobPreempted, JobQueued
from gpu_autoscaler.events.scaling import ScalingDecisionsRestored, ScalingPlanMade
from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.kube.protocol import NODES, PODS
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import (
    AddFinalizer,
    AnnounceReservationEnd,
    AnyDecision,
    AnyUpkeep,
    AvoidNode,
    CancelIdleJob,
    DrainNode,
    OpenNode,
    Plan,
    RemoveFinalizer,
    RemoveOrphanedNode,
    RequestCheckpoints,
    RequestJobCheckpoint,
    RequestPreemptionCheckpoint,
    UpkeepDecision,
    upkeep_key,
)
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.sim.actors.policies import Policies
from gpu_autoscaler.sim.cluster.cloud import Cloud
from gpu_autoscaler.sim.cluster.controllers import is_ready
from gpu_autoscaler.sim.cluster.objects import Kubernetes
from gpu_autoscaler.sim.invariants import CHECKPOINTS_ASKED, UPKEEP_DECIDED, UPKEEP_JUSTIFIED, UPKEEP_REPEATED

ASKED_LATE = timedelta(seconds=180.0)  # a start, a tick and a write, without faults
GONE_MIN = timedelta(seconds=120.0)  # the time that others have to remove the node of an instance that has ended


class UpkeepInvariant:
    """Compares each act with the decisions of all plans so far, and with cluster and cloud.

    A loss of the streams makes no act undecided, but its attempts are forgotten with the plans.
    """

    def __init__(self, cluster: Kubernetes, cloud: Cloud, report: Callable[[str, str], None]) -> None:
        self._cluster = cluster
        self._cloud = cloud
        self._report = report
        self._decided: set[str] = set()  # keys of acts
        self._retry_at: dict[str, datetime] = {}  # of the last attempt, by key
        self._job_retry_at: dict[str, datetime] = {}  # of the last request to each job to save
        self._save_seconds: dict[JobId, float] = {}  # before a preemption
        self._intervals: dict[JobId, float | str | None] = {}  # in seconds, as the jobs ask for them
        self._asking: set[str] = set()  # names of nodes whose pods a plan had asked; a drain asks for checkpoints too

    def on_fact(self, recorded: Recorded) -> None:
        """A fact was stored."""
        match recorded.fact:
            case ScalingPlanMade(plan=plan):
                self._on_plan(plan)
            case JobQueued(job_id=job_id, spec=spec):
                self._intervals[job_id] = spec.checkpoint_interval_seconds
            case ScalingDecisionsRestored(past=past):
                self._add_asking([entry.decision for entry in past])
            case JobPreempted(preemption=reason) as preempted if reason is not None:
                self._check_saved(preempted)
            case JobCancelRequested(action_id=str()) as cancellation:
                self._check(CancelIdleJob, f"job/{cancellation.job_id}", cancellation.job_id)
            case SpotNoticeReceived(kind="paid_period_over") as notice:
                self._check(AnnounceReservationEnd, f"instance/{notice.provider_id}", notice.provider_id)
                self._check_reservation(notice)
            case _:
                pass

    def node_deleted(self, node: core.Node) -> None:
        name, machine = node.metadata.name, self._cloud.of_node(node.metadata.name)
        self._check(RemoveOrphanedNode, f"node/{node.metadata.uid}", name)
        ended_at = None if machine is None else machine.terminated_at
        if ended_at is not None and self._cluster.now() - ended_at < GONE_MIN:
            self._report(UPKEEP_JUSTIFIED, f"{name} was deleted, but its machine ended only at {ended_at.isoformat()}")

    def streams_lost(self) -> None:
        """All plans are lost."""
        self._retry_at.clear()

    def finalizers_patched(self, node: core.Node, finalizers: Sequence[str]) -> None:
        """A process changes the finalizers of a node; the removal of an orphaned node includes it."""
        subject = f"node/{node.metadata.uid}"
        if labels.TERMINATION_FINALIZER in finalizers:
            self._check(AddFinalizer, subject, node.metadata.name)
        elif upkeep_key(RemoveOrphanedNode.tag(), subject) not in self._decided:
            self._check(RemoveFinalizer, subject, node.metadata.name)

    def taints_patched(self, node: core.Node, keys: Sequence[str]) -> None:
        """A process changes the taints of a node: only ours, and as a plan has decided."""
        before, after = {taint.key for taint in node.spec.taints}, set(keys)
        if before ^ after != {labels.AVOID_TAINT}:
            self._report(UPKEEP_JUSTIFIED, f"{node.metadata.name}: taints {sorted(before)} became {sorted(after)}")
        kind = AvoidNode if labels.AVOID_TAINT in after else OpenNode
        self._check(kind, f"node/{node.metadata.uid}", node.metadata.name)

    def pod_annotated(self, pod: core.Pod, annotations: Mapping[str, str]) -> None:
        """A process annotates a pod; a drain of its node asks for a checkpoint too."""
        asked = {pod.spec.node_name, f"job/{pod.metadata.labels.get(labels.JOB_ID)}"}
        if labels.CHECKPOINT_REQUESTED in annotations and asked.isdisjoint(self._asking):
            self._report(UPKEEP_DECIDED, f"{pod.metadata.name}: no plan has decided to ask for a checkpoint")

    def _on_plan(self, plan: Plan) -> None:
        for decision in plan.upkeep_decisions:
            retry_at = self._retry_at.get(decision.key)
            if retry_at is not None and plan.as_of < retry_at:
                what = f"{decision.key} was decided again at {plan.as_of.isoformat()}, before {retry_at.isoformat()}"
                self._report(UPKEEP_REPEATED, what)
            self._retry_at[decision.key] = decision.retry_at
            self._decided.add(decision.key)
            if isinstance(decision, RequestCheckpoints):
                self._check_deletion(decision)
            if isinstance(decision, RequestJobCheckpoint):
                self._check_interval(decision)
            if isinstance(decision, RequestPreemptionCheckpoint):
                self._asking.add(decision.subject)
                self._save_seconds[decision.job_id] = (decision.deadline_at - decision.requested_at).total_seconds()
        self._add_asking((*plan.decisions, *plan.upkeep_decisions))

    def check_asked(self, as_of: datetime, policies: Policies) -> None:
        """No fault disturbs: every job that saves on request was asked an interval after its last save."""
        rules = policies.now.checkpoints
        saved_at: dict[str, datetime] = {}
        for pod in self._cluster.all(PODS):
            if rules.is_on and is_ready(pod) and labels.CHECKPOINTED_AT in pod.metadata.annotations:
                job_id, started_at = pod.metadata.labels.get(labels.JOB_ID, ""), pod.status.start_time or as_of
                saved = pod.metadata.annotations[labels.CHECKPOINTED_AT]
                at = datetime.fromisoformat(saved) if saved else started_at
                saved_at[job_id] = max(at, saved_at.get(job_id, at))
        for job_id, at in saved_at.items():
            interval = self._intervals.get(JobId(job_id), 0.0)
            if interval == 0.0:
                continue
            longest = max(rules.interval_seconds_max, rules.interval_seconds) if interval == "auto" else interval
            late_at = at + timedelta(seconds=float(longest or rules.interval_seconds)) + ASKED_LATE
            if as_of > max(late_at, self._job_retry_at.get(job_id, at) + ASKED_LATE):
                self._report(CHECKPOINTS_ASKED, f"{job_id} has not saved since {at.isoformat()}, and was not asked")

    def _check_interval(self, decision: RequestJobCheckpoint) -> None:
        interval = self._intervals.get(decision.job_id)
        seconds = (decision.requested_at - decision.since).total_seconds()
        if isinstance(interval, float) and (interval == 0.0 or seconds < interval):
            self._report(UPKEEP_JUSTIFIED, f"{decision.job_id} is asked after {seconds:.0f} s, not {interval:.0f} s")
        self._job_retry_at[decision.job_id] = decision.retry_at
        self._asking.add(decision.subject)

    def _check_saved(self, preempted: JobPreempted) -> None:
        """Pods that save on request were asked, and have saved since or had the time to. Those that are young may be
        unknown to the scheduler; those that are deleted already end by another decision."""
        young_since = preempted.preempted_at - ASKED_LATE
        for pod in self._cluster.all(PODS):
            annotations, started_at = pod.metadata.annotations, pod.status.start_time
            is_member = pod.metadata.labels.get(labels.JOB_ID) == preempted.job_id
            if not is_member or labels.CHECKPOINTED_AT not in annotations or not is_ready(pod):
                continue
            if started_at is None or started_at > young_since or pod.metadata.deletion_timestamp is not None:
                continue
            request = save_request(annotations)
            key = upkeep_key(RequestPreemptionCheckpoint.tag(), f"job/{preempted.job_id}", str(preempted.attempt))
            if request is None or key not in self._decided:
                self._report(UPKEEP_DECIDED, f"{pod.metadata.name} was preempted, and no plan has asked it to save")
                continue
            seconds = self._save_seconds.get(preempted.job_id, 0.0)
            has_had_time = preempted.preempted_at >= request.requested_at + timedelta(seconds=seconds)
            if not has_had_time and not has_answered(annotations, request.requested_at):
                self._report(UPKEEP_JUSTIFIED, f"{pod.metadata.name} was preempted while it saved")

    def _check_deletion(self, decision: RequestCheckpoints) -> None:
        """Only Karpenter evicts at once; pods of other nodes are asked when their drain is decided."""
        node = self._cluster.find(NODES, "", decision.node_name)
        if node is not None and labels.KARPENTER_REGISTERED not in node.metadata.labels:
            self._report(UPKEEP_JUSTIFIED, f"checkpoints on {decision.node_name}: Karpenter does not manage the node")

    def _check_reservation(self, notice: SpotNoticeReceived) -> None:
        machines = (machine for machine in self._cloud.machines if machine.provider_id == notice.provider_id)
        if all(machine.offer.paid_until != notice.reclaim_at for machine in machines):
            self._report(UPKEEP_JUSTIFIED, f"{notice.provider_id}: no reservation ends at {notice.reclaim_at}")

    def _add_asking(self, decisions: Sequence[AnyDecision | AnyUpkeep]) -> None:
        asking = (decision for decision in decisions if isinstance(decision, DrainNode | RequestCheckpoints))
        self._asking.update(decision.node_name for decision in asking)

    def _check(self, kind: type[UpkeepDecision], subject: str, name: str) -> None:
        key = upkeep_key(kind.tag(), subject)
        if key not in self._decided:
            self._report(UPKEEP_DECIDED, f"{name}: no plan has decided {key}")
