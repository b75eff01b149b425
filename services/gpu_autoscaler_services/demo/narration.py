"""Facts as sentences, as they happen: what a person wants to hear of a running cluster, and no more."""

from collections import Counter

from gpu_autoscaler.events.cost import CostBudgetCrossed
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import (
    JobCancelRequested,
    JobFinished,
    JobPlaced,
    JobPreempted,
    JobQueued,
    JobRejected,
    JobRequested,
    JobStarted,
)
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.events.scaling import (
    ScalingDrainCancelled,
    ScalingDrainStarted,
    ScalingLaunchRefused,
    ScalingNodeDrained,
    ScalingNodeLaunched,
    ScalingNodeRemoved,
    ScalingNodeTerminated,
    ScalingPlanMade,
    ScalingPodEvicted,
)
from gpu_autoscaler.events.spot import SpotNoticeReceived, SpotRebalanceRecommended
from gpu_autoscaler.model.decisions import AnyDecision, BuyNode, CancelDrain, DrainNode, ReleaseInstance
from gpu_autoscaler.model.money import MICRO_USD_PER_USD


class Narrator:
    """Tells each thing once; remembers only which nodes were said to be ready."""

    def __init__(self) -> None:
        self._ready_nodes: set[str] = set()

    def tell(self, fact: Fact) -> tuple[str, ...]:
        """The sentences that this fact is worth; mostly none or one."""
        match fact:
            case ScalingPlanMade(plan=plan):
                return _counted([decision_line(decision) for decision in plan.decisions])
            case NodeObserved(is_ready=True, action_id=str()):
                return self._node_ready(fact)
            case _:
                line = _job_line(fact) or _scaling_line(fact)
                return () if line is None else (line,)

    def _node_ready(self, node: NodeObserved) -> tuple[str, ...]:
        has_gpus = node.gpu_model is None or node.allocatable.gpu_count > 0
        if node.name in self._ready_nodes or not has_gpus:
            return ()
        self._ready_nodes.add(node.name)
        gpus = f" with {node.allocatable.gpu_count} x {node.gpu_model}" if node.gpu_model else ""
        return (f"node {node.name} is ready{gpus} ({node.instance_type}, {node.capacity_type}, {node.zone})",)


def _counted(lines: list[str]) -> tuple[str, ...]:
    """Equal lines once, with how often: a gang's nodes are bought alike."""
    counts = Counter(lines)
    return tuple(line if count == 1 else f"{line} ({count} times)" for line, count in counts.items())


def decision_line(decision: AnyDecision) -> str:
    """A decision with its reason, in one line."""
    why = decision.reason.sentence()
    match decision:
        case BuyNode(offer=offer):
            price = "" if offer.price_micro_usd_per_hour is None else f" at ${usd(offer.price_micro_usd_per_hour)}/h"
            return f"decided to buy {offer.key}{price}: {why}"
        case DrainNode(node_name=name):
            return f"decided to drain {name}: {why}"
        case CancelDrain(node_name=name):
            return f"decided to keep {name} after all: {why}"
        case ReleaseInstance(provider_id=provider_id):
            return f"decided to give back {provider_id or 'an order'}: {why}"


def usd(micro_usd: int) -> str:
    """Dollars with two digits."""
    return f"{micro_usd / MICRO_USD_PER_USD:,.2f}"


def _job_line(fact: Fact) -> str | None:
    match fact:
        case JobRequested(job_name=name, members=members, gpu_requirements=gpus, priority=priority):
            kind = " or ".join(gpus.gpu_types) or "any GPU"
            size = f"{members} x {gpus.gpu_count}" if members > 1 else f"{gpus.gpu_count}"
            return f"job {name} was requested: {size} x {kind}, priority {priority}"
        case JobRejected(job_name=name, mistakes=mistakes):
            return f"job {name or '?'} was rejected: " + "; ".join(f"{item.field}: {item.reason}" for item in mistakes)
        case JobQueued(spec=spec):
            return f"job {spec.job_name} is accepted and waits for {spec.member_count} place(s)"
        case JobPlaced(job_id=job_id, node_names=names, attempt=attempt):
            again = f" (attempt {attempt})" if attempt > 1 else ""
            return f"job {job_id} has room for all its members on {', '.join(sorted(set(names)))}{again}"
        case JobStarted(job_id=job_id):
            return f"job {job_id} runs"
        case JobPreempted(job_id=job_id, cause=cause):
            return f"job {job_id} was preempted: {cause}"
        case JobFinished(job_id=job_id, outcome=outcome, message=message):
            return f"job {job_id} {outcome}" + (f": {message}" if message else "")
        case JobCancelRequested(job_id=job_id, requested_by=who):
            return f"job {job_id} is to be cancelled" + (f" ({who})" if who else "")
        case _:
            return None


def _scaling_line(fact: Fact) -> str | None:
    match fact:
        case ScalingNodeLaunched(provider_id=provider_id, capacity_type=capacity_type):
            return f"the cloud made {provider_id} ({capacity_type})"
        case ScalingLaunchRefused(offer=offer, code=code, message=message):
            told = message if code in message else f"{code}, {message}"
            return f"the cloud refused {offer.key}: {told}"
        case ScalingDrainStarted(node_name=name, deadline_at=deadline_at):
            return f"node {name} is cordoned; to be empty by {deadline_at:%H:%M:%S}"
        case ScalingPodEvicted(pod=pod, node_name=name, is_forced=is_forced):
            return f"pod {pod} was {'forced off' if is_forced else 'moved from'} {name}"
        case ScalingNodeDrained(node_name=name):
            return f"node {name} is empty"
        case ScalingDrainCancelled(node_name=name):
            return f"node {name} is uncordoned and stays"
        case ScalingNodeTerminated(node_name=name, provider_id=provider_id):
            return f"instance {provider_id or '(never made)'}{f' of node {name}' if name else ''} is gone"
        case ScalingNodeRemoved(node_name=name):
            return f"node {name} is taken out of Kubernetes: its instance is gone"
        case SpotNoticeReceived(node_name=name, provider_id=provider_id, reclaim_at=reclaim_at):
            when = "soon" if reclaim_at is None else f"at {reclaim_at:%H:%M:%S}"
            return f"NOTICE: the cloud takes {name or provider_id} back {when}"
        case SpotRebalanceRecommended(node_name=name, provider_id=provider_id):
            return f"hint: {name or provider_id} is likelier to be taken back"
        case CostBudgetCrossed(scope=scope, scope_id=scope_id, mark_ratio=mark_ratio):
            return f"the budget of {scope} {scope_id} passed {mark_ratio:.0%}"
        case _:
            return None
