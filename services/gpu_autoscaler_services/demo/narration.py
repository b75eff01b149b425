"""Sentences for the important facts of a running cluster."""

from collections import Counter
from datetime import datetime

from gpu_autoscaler.core.disruption.protection import checkpointed_at
from gpu_autoscaler.core.explain.names import Namer, reason_sentence
from gpu_autoscaler.events import job, node, pod, scaling, spot
from gpu_autoscaler.events.cost import CostBudgetCrossed
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.decisions import (
    AnyDecision,
    BuyNode,
    CancelDrain,
    DrainNode,
    ReleaseInstance,
    RequestPreemptionCheckpoint,
)
from gpu_autoscaler.model.money import MICRO_USD_PER_USD


class Narrator:
    """Describes each event once; remembers which nodes were reported ready."""

    def __init__(self) -> None:
        self._ready_nodes: set[str] = set()
        self._pods: dict[str, str] = {}  # pod/<uid> -> pod/<namespace>/<name>
        self._saved_at: dict[str, datetime] = {}  # by pod uid: its last save

    def lines(self, fact: Fact) -> tuple[str, ...]:
        """Return sentences for the fact, mostly none or one."""
        match fact:
            case scaling.ScalingPlanMade(plan=plan):
                lines = [decision_line(decision, lambda key: self._pods.get(key, key)) for decision in plan.decisions]
                asked = (act for act in plan.upkeep_decisions if isinstance(act, RequestPreemptionCheckpoint))
                return _counted([*lines, *(f"decided: {act.sentence()}" for act in asked)])
            case node.NodeObserved(is_ready=True, action_id=str()):
                return self._node_ready(fact)
            case pod.PodObserved():
                return self._pod(fact)
            case _:
                line = _job_line(fact) or _scaling_line(fact)
                return () if line is None else (line,)

    def _pod(self, fact: pod.PodObserved) -> tuple[str, ...]:
        self._pods[f"pod/{fact.pod_uid}"] = f"pod/{fact.namespace}/{fact.name}"
        saved_at = checkpointed_at(dict(fact.annotations))
        if saved_at is None or saved_at == self._saved_at.get(fact.pod_uid):
            return ()
        self._saved_at[fact.pod_uid] = saved_at
        return (f"pod {fact.namespace}/{fact.name} saved a checkpoint on request",)

    def _node_ready(self, fact: node.NodeObserved) -> tuple[str, ...]:
        has_gpus = fact.gpu_model is None or fact.allocatable.gpu_count > 0
        if fact.name in self._ready_nodes or not has_gpus:
            return ()
        self._ready_nodes.add(fact.name)
        gpus = f" with {fact.allocatable.gpu_count} x {fact.gpu_model}" if fact.gpu_model else ""
        return (f"node {fact.name} is ready{gpus} ({fact.instance_type}, {fact.capacity_type}, {fact.zone})",)


def _counted(lines: list[str]) -> tuple[str, ...]:
    """Return equal lines once with their number: nodes of a gang are bought alike."""
    counts = Counter(lines)
    return tuple(line if count == 1 else f"{line} ({count} times)" for line, count in counts.items())


def decision_line(decision: AnyDecision, name_of: Namer) -> str:
    """Return the decision with its reason."""
    reason = reason_sentence(decision.reason, name_of)
    match decision:
        case BuyNode(offer=offer):
            price = "" if offer.price_micro_usd_per_hour is None else f" at ${usd(offer.price_micro_usd_per_hour)}/h"
            return f"decided to buy {offer.key}{price}: {reason}"
        case DrainNode(node_name=name):
            return f"decided to drain {name}: {reason}"
        case CancelDrain(node_name=name):
            return f"decided to keep {name}, canceling its drain: {reason}"
        case ReleaseInstance(provider_id=provider_id):
            return f"decided to release {provider_id or 'an order'}: {reason}"


def usd(micro_usd: int) -> str:
    """Return dollars with two decimals."""
    return f"{micro_usd / MICRO_USD_PER_USD:,.2f}"


def _job_line(fact: Fact) -> str | None:
    match fact:
        case job.JobRequested(job_name=name, members=members, gpu_requirements=gpus, priority=priority):
            kind = " or ".join(gpus.gpu_types) or "any GPU"
            size = f"{members} x {gpus.gpu_count}" if members > 1 else f"{gpus.gpu_count}"
            return f"job {name} requested: {size} x {kind}, priority {priority}"
        case job.JobRejected(job_name=name, violations=violations):
            return f"job {name or '?'} rejected: " + "; ".join(f"{item.field}: {item.reason}" for item in violations)
        case job.JobQueued(spec=spec):
            return f"job {spec.job_name} accepted, waiting for capacity for {spec.member_count} member(s)"
        case job.JobPlaced(job_id=job_id, node_names=names, attempt=attempt):
            retry = f" (attempt {attempt})" if attempt > 1 else ""
            return f"job {job_id} placed on {', '.join(sorted(set(names)))}{retry}"
        case job.JobStarted(job_id=job_id):
            return f"job {job_id} running"
        case job.JobPreempted(job_id=job_id, cause=cause, preemption=reason):
            return f"job {job_id} preempted: {cause if reason is None else reason.sentence()}"
        case job.JobFinished(job_id=job_id, outcome=outcome, message=message):
            return f"job {job_id} {outcome}" + (f": {message}" if message else "")
        case job.JobCancelRequested(job_id=job_id, requested_by=caller):
            return f"job {job_id}: cancellation requested" + (f" by {caller}" if caller else "")
        case _:
            return None


def _scaling_line(fact: Fact) -> str | None:
    match fact:
        case scaling.ScalingNodeLaunched(provider_id=provider_id, capacity_type=capacity_type):
            return f"the cloud launched {provider_id} ({capacity_type})"
        case scaling.ScalingLaunchRefused(offer=offer, code=code, message=message):
            error = message if code in message else f"{code}, {message}"
            return f"the cloud refused {offer.key}: {error}"
        case scaling.ScalingDrainStarted(node_name=name, deadline_at=deadline_at):
            return f"node {name} cordoned, drain deadline {deadline_at:%H:%M:%S}"
        case scaling.ScalingPodEvicted(pod=pod_name, node_name=name, is_forced=is_forced):
            return f"pod {pod_name} {'forcibly deleted' if is_forced else 'evicted'} from {name}"
        case scaling.ScalingNodeDrained(node_name=name):
            return f"node {name} drained"
        case scaling.ScalingDrainCancelled(node_name=name):
            return f"node {name} uncordoned, drain canceled"
        case scaling.ScalingNodeTerminated(node_name=name, provider_id=provider_id):
            return f"instance {provider_id or '(never launched)'}{f' of node {name}' if name else ''} terminated"
        case scaling.ScalingNodeRemoved(node_name=name):
            return f"node {name} deleted from Kubernetes: its instance is gone"
        case spot.SpotNoticeReceived(node_name=name, provider_id=provider_id, reclaim_at=reclaim_at):
            when = "soon" if reclaim_at is None else f"at {reclaim_at:%H:%M:%S}"
            return f"NOTICE: the cloud reclaims {name or provider_id} {when}"
        case spot.SpotRebalanceRecommended(node_name=name, provider_id=provider_id):
            return f"rebalance recommendation: {name or provider_id} has an elevated interruption risk"
        case CostBudgetCrossed(scope=scope, scope_id=scope_id, mark_ratio=mark_ratio):
            return f"the budget of {scope} {scope_id} exceeded {mark_ratio:.0%}"
        case _:
            return None
