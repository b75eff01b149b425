"""Why things are as they are, in sentences, from recorded facts alone: back to the job, pod or notice that began it.

A story is told first cause first, each sentence with the instant and the place in the record of its fact. Called by
`gpu-autoscaler why`, the gateway and the dashboard.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import assert_never

from gpu_autoscaler.core.admission import job_id_of
from gpu_autoscaler.core.further import job_of_member
from gpu_autoscaler.core.words.sentences import decision_sentence, held_back_sentence, sentence
from gpu_autoscaler.core.words.telling import Teller
from gpu_autoscaler.events import job, node, pod, scaling, spot
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.decisions import AnyDecision, BuyNode, CancelDrain, DrainNode, ReleaseInstance
from gpu_autoscaler.model.reasons import DemandReturned, ReplacesAtRiskNode, ReplacesNodes, UnmetDemand

__all__ = ["decision_sentence", "held_back_sentence", "sentence", "why_job", "why_node", "why_pod"]

# Facts of a cause that belong into the story of its effect; its later life is a story of its own.
_BEGINNINGS = (job.JobRequested, job.JobQueued, job.JobPlaced, spot.SpotNoticeReceived, DemandReported)


def why_node(history: Sequence[Recorded], name_or_id: str) -> tuple[str, ...]:
    """Return the story of a node by its name, uid, provider id or the action that bought it; empty: not found."""
    seeds = {f"{kind}/{name_or_id}" for kind in ("node", "instance", "action")}
    seeds |= {
        f"node/{each.fact.node_uid}"
        for each in history
        if isinstance(each.fact, node.NodeObserved | node.NodeGone) and each.fact.name == name_or_id
    }
    keys = _connected(history, frozenset(seeds))
    return _story(history, keys, _causes(history, keys))


def why_pod(history: Sequence[Recorded], name_or_id: str) -> tuple[str, ...]:
    """Return the story of a pod by its uid, name, or namespace/name; empty: not found."""
    pods = [
        each.fact
        for each in history
        if isinstance(each.fact, pod.PodObserved | pod.PodGone)
        and name_or_id in (each.fact.pod_uid, each.fact.name, f"{each.fact.namespace}/{each.fact.name}")
    ]
    keys = frozenset(f"pod/{each.pod_uid}" for each in pods)
    jobs = frozenset(f"job/{each.job_id}" for each in pods if each.job_id is not None)
    return _story_of_work(history, keys, jobs, keys)


def why_job(history: Sequence[Recorded], name_or_id: str) -> tuple[str, ...]:
    """Return the story of a job by its id or its name; empty: not found."""
    keys = frozenset({f"job/{name_or_id}"}) | {
        f"job/{each.fact.job_id}"
        for each in history
        if isinstance(each.fact, job.JobQueued) and each.fact.spec.job_name == name_or_id
    }
    pods = frozenset(
        f"pod/{each.fact.pod_uid}"
        for each in history
        if isinstance(each.fact, pod.PodObserved) and f"job/{each.fact.job_id}" in keys
    )
    return _story_of_work(history, keys, pods, pods)


def _story_of_work(
    history: Sequence[Recorded], keys: frozenset[str], causes: frozenset[str], pods: frozenset[str]
) -> tuple[str, ...]:
    """The story of demand: itself, the nodes that were bought for it, and the drains that moved it."""
    if not any(_entity(each) in keys for each in history):
        return ()
    bought = _bought_for(history, keys | causes)
    nodes = frozenset(key for key in _connected(history, bought) if key.startswith("node/"))
    actions = bought | _evicting(history, pods)
    return _story(history, keys | actions, causes | nodes | _causes(history, actions))


def _story(history: Sequence[Recorded], keys: frozenset[str], causes: frozenset[str]) -> tuple[str, ...]:
    """Tell every fact about the keys, and of the causes how they began. Without a fact about the keys: nothing."""
    if not any(_is_about(each, keys) for each in history):
        return ()
    demand = frozenset(key for key in causes if not key.startswith("node/"))
    teller = Teller(keys | demand)
    told: list[str] = []
    for each in sorted(history, key=_as_it_happened):
        if _is_about(each, keys) or _is_beginning(each, causes, demand):
            told.extend(teller.tell(each))
    return tuple(told)


# At equal instants: what is asked for comes before what is decided, and that before what it did.
_STREAM_ORDER = ("JOB", "DEMAND", "SPOT", "POD", "SCALING", "NODE")


def _as_it_happened(recorded: Recorded) -> tuple[datetime, int, int]:
    rank = _STREAM_ORDER.index(recorded.stream) if recorded.stream in _STREAM_ORDER else len(_STREAM_ORDER)
    return (recorded.envelope.time, rank, recorded.sequence)


def _is_about(recorded: Recorded, keys: frozenset[str]) -> bool:
    fact = recorded.fact
    if isinstance(fact, scaling.ScalingDecisionsRestored):
        return any(f"action/{past.decision.action_id}" in keys for past in fact.past)
    if isinstance(fact, scaling.ScalingPlanMade):
        return any(f"action/{decision.action_id}" in keys for decision in fact.plan.decisions) or any(
            held.subject in keys for held in fact.plan.deferred
        )
    if isinstance(fact, scaling.ScalingPodEvicted) and f"action/{fact.action_id}" in keys:
        return True  # the pod's own word, and a step of the drain
    return _entity(recorded) in keys


def _is_beginning(recorded: Recorded, causes: frozenset[str], demand: frozenset[str]) -> bool:
    """True for how a cause began: the request, the wait for a node, the notice, the node that became ready.

    What is held back for demand delays it; what is held back for its node is that node's own story.
    """
    fact = recorded.fact
    if isinstance(fact, scaling.ScalingPlanMade):
        return any(held.subject in demand for held in fact.plan.deferred)
    if _entity(recorded) not in causes:
        return False
    return (
        isinstance(fact, _BEGINNINGS)
        or (isinstance(fact, pod.PodObserved) and fact.unschedulable_since is not None)
        or (isinstance(fact, node.NodeObserved) and fact.is_ready and not fact.is_cordoned)
    )


def _entity(recorded: Recorded) -> str | None:
    fact = recorded.fact
    if isinstance(fact, job.JobRequested):
        return f"job/{job_id_of(fact.job_id, recorded.envelope.id)}"
    if isinstance(fact, job.JobRejected):
        return f"job/{job_id_of(fact.job_id, fact.request_id)}"
    return fact.entity()


def _decisions(history: Iterable[Recorded]) -> Iterator[AnyDecision]:
    for each in history:
        if isinstance(each.fact, scaling.ScalingPlanMade):
            yield from each.fact.plan.decisions
        elif isinstance(each.fact, scaling.ScalingDecisionsRestored):
            yield from (past.decision for past in each.fact.past)


def _demand(decision: AnyDecision) -> frozenset[str]:
    reason = decision.reason
    kinds = UnmetDemand | ReplacesAtRiskNode | ReplacesNodes | DemandReturned
    keys = reason.demand if isinstance(reason, kinds) else ()
    # The members of a wish are numbered; what was said is one word for all of them.
    named = frozenset(key.rpartition("/")[0] if key.startswith("demand/") else key for key in keys)
    # A member beyond its job's gang is part of the job's story.
    return frozenset(key if (job_id := job_of_member(key)) is None else f"job/{job_id}" for key in named)


def _bought_for(history: Sequence[Recorded], demand: frozenset[str]) -> frozenset[str]:
    """The purchases that were decided for any of this demand."""
    return frozenset(
        f"action/{decision.action_id}"
        for decision in _decisions(history)
        if isinstance(decision, BuyNode) and _demand(decision) & demand
    )


def _evicting(history: Sequence[Recorded], pods: frozenset[str]) -> frozenset[str]:
    """The drains that told any of these pods to go."""
    return frozenset(
        f"action/{each.fact.action_id}"
        for each in history
        if isinstance(each.fact, scaling.ScalingPodEvicted) and each.fact.entity() in pods
    )


def _causes(history: Sequence[Recorded], keys: frozenset[str]) -> frozenset[str]:
    """What the decisions among the keys were made for, or because of."""
    causes: set[str] = set()
    for decision in _decisions(history):
        if f"action/{decision.action_id}" not in keys:
            continue
        causes |= _demand(decision)
        if isinstance(decision.reason, ReplacesAtRiskNode):
            doomed = _connected(history, frozenset({f"node/{decision.reason.node_uid}"}))
            causes |= {key for key in doomed if key.startswith("instance/")}
        if isinstance(decision, DrainNode) and decision.provider_id is not None:
            causes.add(f"instance/{decision.provider_id}")
    return frozenset(causes)


def _connected(history: Sequence[Recorded], seeds: frozenset[str]) -> frozenset[str]:
    """The seeds and every other name of the same nodes: instance, Kubernetes node, purchase, drain, release."""
    groups = [group for each in history for group in _names(each.fact)]
    keys = set(seeds)
    is_growing = True
    while is_growing:  # each round adds a name or is the last one
        more = {key for group in groups if not keys.isdisjoint(group) for key in group} - keys
        keys |= more
        is_growing = bool(more)
    return frozenset(keys)


def _names(fact: Fact) -> Iterator[frozenset[str]]:
    """Names that the fact uses for one and the same node."""
    match fact:
        case node.NodeObserved():
            yield _keys(("node", fact.node_uid), ("instance", fact.provider_id), ("action", fact.action_id))
        case node.NodeGone() | scaling.ScalingNodeRemoved():
            yield _keys(("node", fact.node_uid), ("instance", fact.provider_id))
        case node.NodeInstanceObserved() | scaling.ScalingNodeLaunched():
            yield _keys(("instance", fact.provider_id), ("action", fact.action_id))
        case scaling.ScalingNodeTerminated():
            names = (("action", fact.action_id), ("action", fact.order_action_id), ("instance", fact.provider_id))
            yield _keys(*names)
        case scaling.ScalingDrainCancelled():
            yield _keys(("action", fact.action_id), ("action", fact.drain_action_id), ("node", fact.node_uid))
        case scaling.ScalingPlanMade():
            for decision in fact.plan.decisions:
                yield _decided_names(decision)
        case scaling.ScalingDecisionsRestored():
            for past in fact.past:
                yield _decided_names(past.decision)
        case _:
            pass


def _decided_names(decision: AnyDecision) -> frozenset[str]:
    action = ("action", decision.action_id)
    match decision:
        case BuyNode():
            return _keys(action)
        case DrainNode():
            return _keys(action, ("node", decision.node_uid), ("instance", decision.provider_id))
        case CancelDrain():
            return _keys(action, ("action", decision.drain_action_id), ("node", decision.node_uid))
        case ReleaseInstance():
            return _keys(action, ("action", decision.order_action_id), ("instance", decision.provider_id))
        case _:
            assert_never(decision)


def _keys(*names: tuple[str, str | None]) -> frozenset[str]:
    return frozenset(f"{kind}/{name}" for kind, name in names if name is not None)
