"""Invariants of acts of upkeep, whatever a process believes.

No act happens that no recorded plan decided; each has its cause in the true state; none is decided again before its
back-off is over.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.job import JobCancelRequested
from gpu_autoscaler.events.scaling import ScalingDecisionsRestored, ScalingPlanMade
from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.kube.protocol import NODES
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import (
    AddFinalizer,
    AnnounceReservationEnd,
    AnyDecision,
    AnyUpkeep,
    CancelIdleJob,
    DrainNode,
    Plan,
    RemoveFinalizer,
    RemoveOrphanedNode,
    RequestCheckpoints,
    UpkeepDecision,
    upkeep_key,
)
from gpu_autoscaler.sim.cluster.cloud import Cloud
from gpu_autoscaler.sim.cluster.objects import Kubernetes
from gpu_autoscaler.sim.invariants import UPKEEP_DECIDED, UPKEEP_JUSTIFIED, UPKEEP_REPEATED

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
        self._asking: set[str] = set()  # names of nodes whose pods a plan had asked; a drain asks for checkpoints too

    def on_fact(self, recorded: Recorded) -> None:
        """A fact was stored."""
        match recorded.fact:
            case ScalingPlanMade(plan=plan):
                self._on_plan(plan)
            case ScalingDecisionsRestored(past=past):
                self._add_asking([entry.decision for entry in past])
            case JobCancelRequested(action_id=str()) as cancellation:
                self._check(CancelIdleJob, f"job/{cancellation.job_id}", cancellation.job_id)
            case SpotNoticeReceived(kind="paid_period_over") as notice:
                self._check(AnnounceReservationEnd, f"instance/{notice.provider_id}", notice.provider_id)
                self._check_reservation(notice)
            case _:
                pass

    def node_deleted(self, node: core.Node) -> None:
        """A process deletes a node object."""
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

    def pod_annotated(self, pod: core.Pod, annotations: Mapping[str, str]) -> None:
        """A process annotates a pod; a drain of its node asks for a checkpoint too."""
        if labels.CHECKPOINT_REQUESTED in annotations and pod.spec.node_name not in self._asking:
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
        self._add_asking((*plan.decisions, *plan.upkeep_decisions))

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
