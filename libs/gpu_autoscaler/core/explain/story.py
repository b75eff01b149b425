"""Stories of nodes, pods, jobs and ProvisioningRequests, built from recorded facts alone: back to what began each.

A story starts with the first cause; each sentence carries the time and the stream sequence of its fact.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import assert_never, get_args

from gpu_autoscaler.core.deferred_groups import NO_TRAITS, Traits, deferred_lookup, job_traits, pod_traits
from gpu_autoscaler.core.demand.elastic import job_of_member
from gpu_autoscaler.core.demand.provisioning_requests import consumed_request, request_names
from gpu_autoscaler.core.explain.names import Namer, decision_sentence, deferred_sentence, names_in_history
from gpu_autoscaler.core.intake.admission import job_id_of
from gpu_autoscaler.events import job, node, pod, scaling, spot
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.decisions import (
    AnyDecision,
    AnyUpkeep,
    BuyNode,
    CancelDrain,
    Deferred,
    DrainNode,
    Plan,
    ReleaseInstance,
    UpkeepDecision,
)
from gpu_autoscaler.model.format import counted, duration, instant, listed, money, percent, price
from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.reasons.buy import ReplacesAtRiskNode, ReplacesNodes, UnmetDemand
from gpu_autoscaler.model.reasons.drain import DemandReturned
from gpu_autoscaler.model.reasons.preempt import beneficiary
from gpu_autoscaler.model.reasons.upkeep import AnswerReason


class StoryBuilder:
    """Turns facts about `keys` into sentences, in the order in which they happened; none where an observation repeats
    the previous one of the same object."""

    def __init__(self, keys: frozenset[str], name_of: Namer, deferrals: "PastDeferrals") -> None:
        self._keys = keys
        self._deferrals = deferrals
        self._name_of = name_of
        self._last: dict[str, str] = {}  # the previous sentence about each object

    def sentences(self, recorded: Recorded) -> Iterator[str]:
        """Yield what this fact adds to the story, with its time and stream sequence."""
        fact = recorded.envelope.fact
        if isinstance(fact, scaling.ScalingPlanMade):
            texts = self._plan(fact, recorded.envelope.time)
        elif isinstance(fact, scaling.ScalingDecisionsRestored):
            texts = self._restored(fact)
        else:
            texts = self._fact(fact)
        for text in texts:
            yield f"{instant(recorded.envelope.time)}: {text} [{recorded.stream} {recorded.sequence}]"

    def _plan(self, fact: scaling.ScalingPlanMade, at: datetime) -> Iterator[str]:
        # The members of a gang often get nodes of one type: one sentence with their number.
        counts = Counter(
            decision_sentence(decision, self._name_of)
            for decision in (*fact.plan.decisions, *fact.plan.upkeep_decisions)
            if _is_decided(decision, self._keys)
        )
        for text, count in counts.items():
            yield f"Plan {fact.plan_id}: {f'{count} times: ' if count > 1 else ''}{text}"
        # What defers the whole cluster defers this as well, in plans that cover it at all.
        of_upkeep = _deferred_upkeep(fact.plan, self._keys)
        for deferred in (*self._deferrals.of(fact.plan, self._keys | {"cluster"}, at), *of_upkeep):
            # Plans repeat what still holds every second: once is enough.
            if self._is_news(f"deferred/{deferred.subject}/{deferred.step}", deferred.reason.tag()):
                yield f"Plan {fact.plan_id}: {deferred_sentence(deferred, self._name_of)}"

    def _restored(self, fact: scaling.ScalingDecisionsRestored) -> Iterator[str]:
        for past in fact.past:
            if f"action/{past.decision.action_id}" in self._keys:
                text = decision_sentence(past.decision, self._name_of)
                yield f"Recovered from a lost record: plan {past.plan_id} had decided: {text}"

    def _is_news(self, key: str, text: str) -> bool:
        is_news = self._last.get(key) != text
        self._last[key] = text
        return is_news

    def _fact(self, fact: Fact) -> Iterator[str]:
        if isinstance(fact, node.NodeObserved):
            text: str | None = f"Node {fact.name} {_node_status(fact)}."
        elif isinstance(fact, pod.PodObserved):
            text = f"Pod {fact.namespace}/{fact.name} {_pod_status(fact)}."
        else:
            text = _job_sentence(fact) or _estimate_sentence(fact) or _scaling_sentence(fact) or _other_sentence(fact)
        if text is not None and self._is_news(fact.entity() or "cluster", text):
            yield text


def _node_status(fact: node.NodeObserved) -> str:
    if fact.deleting_since is not None:
        return "is being deleted"
    if fact.is_cordoned:
        return "is cordoned"
    if not fact.is_ready:
        return "is registered, not ready"
    if not fact.allocatable.gpu_count:
        return "is ready, without GPUs that pods can use"
    return f"is ready with {counted(fact.allocatable.gpu_count, 'GPU')}"


def _pod_status(fact: pod.PodObserved) -> str:
    if fact.phase in ("succeeded", "failed"):
        return fact.phase
    if fact.deleting_since is not None:
        return "is being deleted"
    if fact.node_name is not None:
        return f"{'runs' if fact.phase == 'running' else 'is bound'} on node {fact.node_name}"
    if fact.unschedulable_since is not None:
        why = f": {fact.unschedulable_message}" if fact.unschedulable_message else ""
        return f"is unschedulable{why.rstrip('.')}"
    return "is pending"


def _request_status(fact: pod.PodProvisioningObserved) -> str:
    wanted = f"asks for {counted(fact.members_count, 'pod')} by {fact.class_name}"
    trouble = f", and {fact.trouble}" if fact.trouble else ""
    conditions = [f"{known.type}={known.is_true} ({known.reason})" for known in fact.conditions]
    return f"{wanted}{trouble}; status: {', '.join(conditions) or 'none'}"


def _job_sentence(fact: Fact) -> str | None:
    match fact:
        case job.JobRequested():
            gpus = fact.gpu_requirements
            members = f" for each of {fact.members} members" if fact.members > 1 else ""
            budget = ""
            if fact.budget_limit_usd is not None:
                budget = f", with a budget of {money(round(fact.budget_limit_usd * MICRO_USD_PER_USD))}"
            model = f"{' or '.join(gpus.gpu_types)} GPU" if gpus.gpu_types else "GPU"
            request = f"{counted(gpus.gpu_count, model)}{members}{budget}"
            return f"Project {fact.project_id} requested job {fact.job_name} with {request} (priority {fact.priority})."
        case job.JobQueued():
            return f"Job {fact.job_id} was accepted with priority {fact.spec.priority}."
        case job.JobRejected():
            violations = "; ".join(f"{violation.field} {violation.reason}" for violation in fact.violations)
            return f"Job {fact.job_id or fact.job_name} was rejected: {violations}."
        case job.JobCancelRequested():
            by = f" by {fact.requested_by}" if fact.requested_by else ""
            why = f": {fact.note}" if fact.note else ""
            return f"Cancellation of job {fact.job_id} was requested{by}{why}."
        case job.JobPlaced():
            nodes = listed(sorted(set(fact.node_names)))
            return f"Job {fact.job_id} was placed on {nodes} (attempt {fact.attempt}){_measured(fact)}."
        case job.JobPreempted():
            return _preempted_sentence(fact)
        case job.JobStarted():
            return f"All members of job {fact.job_id} run."
        case job.JobFinished():
            why = f": {fact.message.rstrip('.')}" if fact.message else ""
            return f"Job {fact.job_id} {'was cancelled' if fact.outcome == 'cancelled' else fact.outcome}{why}."
        case DemandReported():
            shape = counted(fact.shape.gpu_count, f"{fact.shape.gpu_type} GPU" if fact.shape.gpu_type else "GPU")
            if fact.count is None:
                return f"Source {fact.source} reported that its demand is unknown; its previous report still applies."
            demand = f"{counted(fact.count, 'member')} with {shape} each until {instant(fact.until)}"
            return f"Source {fact.source} reported demand for {demand}."
        case _:
            return None


def _measured(fact: job.JobPlaced) -> str:
    """Return the figures by which the nodes were chosen; empty under policies that do not measure."""
    if not fact.gpu_use_ratios:
        return ""
    of_nodes = dict(zip(fact.node_names, fact.gpu_use_ratios, strict=True))
    figures = (f"{name} {'unknown' if ratio is None else percent(ratio)}" for name, ratio in sorted(of_nodes.items()))
    return f" by the measured use of GPUs: {listed(list(figures))}"


def _preempted_sentence(fact: job.JobPreempted) -> str:
    text = f"Job {fact.job_id} was preempted (attempt {fact.attempt})"
    cause = f": {fact.cause}." if fact.preemption is None else f". {fact.preemption.sentence()}"
    kept = " This used up no retry." if fact.is_own_choice else ""
    return f"{text}{cause}{kept}"


def _estimate_sentence(fact: Fact) -> str | None:
    match fact:
        case job.JobEstimated(estimate=estimate):
            start = "" if estimate.start_at is None else f"Its start is expected about {instant(estimate.start_at)}. "
            return f"{start}{estimate.why}"
        case job.JobEstimateScored(start_error_seconds=float(error)):
            return f"It started {duration(abs(error))} {'later' if error >= 0 else 'earlier'} than expected."
        case job.JobEstimateScored(run=job.RunScore() as score):
            error = score.run_seconds - score.predicted_seconds
            by = "the request" if score.source == "request" else "similar jobs"
            return (
                f"It ran for {duration(score.run_seconds)}, {duration(abs(error))} {'longer' if error >= 0 else 'less'}"
                f" than predicted by {by}."
            )
        case _:
            return None


def _scaling_sentence(fact: Fact) -> str | None:
    match fact:
        case scaling.ScalingNodeOrdered():
            return f"The executor ordered {fact.offer.key} (action {fact.action_id})."
        case scaling.ScalingNodeLaunched():
            at = price(fact.price_micro_usd_per_hour)
            return f"The cloud launched {fact.provider_id} ({fact.instance_type}, {fact.zone}) at {at}."
        case scaling.ScalingLaunchRefused():
            retry = f"the offer is unavailable until {instant(fact.retry_at)}"
            return f"The cloud refused to launch {fact.offer.key}: {fact.code}, {fact.message.rstrip('.')}; {retry}."
        case scaling.ScalingDrainStarted():
            return f"Node {fact.node_name} was cordoned; its drain ends by {instant(fact.deadline_at)}."
        case scaling.ScalingCheckpointRequested():
            deadline = instant(fact.deadline_at)
            where = f" on node {fact.node_name}" if fact.node_name else ""
            return f"{listed(fact.pods)}{where} were asked to save a checkpoint by {deadline}."
        case scaling.ScalingPodEvicted():
            action = "deleted at the deadline" if fact.is_forced else "evicted"
            return f"Pod {fact.pod} on node {fact.node_name} was {action}."
        case scaling.ScalingNodeDrained():
            return f"Node {fact.node_name} is drained."
        case scaling.ScalingDrainCancelled():
            why = f": {fact.abandoned_because}" if fact.abandoned_because else ""
            return f"The drain of node {fact.node_name} was canceled and the node uncordoned{why}."
        case scaling.ScalingNodeTerminated():
            instance = fact.provider_id or f"order {fact.order_action_id}"
            return f"The cloud confirmed the termination of {instance} at {instant(fact.terminated_at)}."
        case scaling.ScalingNodeRemoved():
            why = f"the cloud has confirmed twice since {instant(fact.asked_at)} that {fact.provider_id} is terminated"
            return f"Node {fact.node_name} was deleted from Kubernetes: {why}."
        case _:
            return None


def _other_sentence(fact: Fact) -> str | None:
    match fact:
        case pod.PodGone():
            return f"Pod {fact.namespace}/{fact.name} was deleted."
        case pod.PodProvisioningObserved():
            return f"ProvisioningRequest {fact.namespace}/{fact.name} {_request_status(fact)}."
        case pod.PodProvisioningGone():
            return f"ProvisioningRequest {fact.namespace}/{fact.name} was deleted."
        case node.NodeGone():
            return f"Node {fact.name} was deleted from Kubernetes."
        case node.NodeInstanceObserved():
            return f"The cloud reports {fact.provider_id} as {fact.state}."
        case spot.SpotNoticeReceived():
            when = "without a deadline" if fact.reclaim_at is None else f"at {instant(fact.reclaim_at)}"
            return f"The cloud sent an interruption notice: it reclaims {fact.node_name or fact.provider_id} {when}."
        case spot.SpotNoticeWithdrawn():
            return f"The cloud withdrew its interruption notice for {fact.provider_id}."
        case spot.SpotRebalanceRecommended():
            return f"The cloud reported an elevated interruption risk for {fact.node_name or fact.provider_id}."
        case _:
            return None


# Facts about a cause that belong to the story of its effect; what happens to the cause later is another story.
_BEGINNINGS = (job.JobRequested, job.JobQueued, job.JobPlaced, spot.SpotNoticeReceived, DemandReported)


def why_node(history: Sequence[Recorded], name_or_id: str) -> tuple[str, ...]:
    """Return the story of a node by its name, uid, provider id or the action that bought it; empty: not found."""
    seeds = {f"{kind}/{name_or_id}" for kind in ("node", "instance", "action")}
    seeds |= {
        f"node/{recorded.fact.node_uid}"
        for recorded in history
        if isinstance(recorded.fact, node.NodeObserved | node.NodeGone) and recorded.fact.name == name_or_id
    }
    keys = _connected(history, frozenset(seeds))
    return _story(history, keys, _causes(history, keys))


def why_pod(history: Sequence[Recorded], name_or_id: str) -> tuple[str, ...]:
    """Return the story of a pod by its uid, name, or namespace/name; empty: not found."""
    pods = [
        recorded.fact
        for recorded in history
        if isinstance(recorded.fact, pod.PodObserved | pod.PodGone)
        and name_or_id in (recorded.fact.pod_uid, recorded.fact.name, f"{recorded.fact.namespace}/{recorded.fact.name}")
    ]
    keys = frozenset(f"pod/{pod_fact.pod_uid}" for pod_fact in pods)
    jobs = frozenset(f"job/{pod_fact.job_id}" for pod_fact in pods if pod_fact.job_id is not None)
    return _story_of_work(history, keys, jobs, keys)


def why_job(history: Sequence[Recorded], name_or_id: str) -> tuple[str, ...]:
    """Return the story of a job by its id or its name; empty: not found."""
    keys = frozenset({f"job/{name_or_id}"}) | {
        f"job/{recorded.fact.job_id}"
        for recorded in history
        if isinstance(recorded.fact, job.JobQueued) and recorded.fact.spec.job_name == name_or_id
    }
    pods = frozenset(
        f"pod/{recorded.fact.pod_uid}"
        for recorded in history
        if isinstance(recorded.fact, pod.PodObserved) and f"job/{recorded.fact.job_id}" in keys
    )
    return _story_of_work(history, keys, pods, pods)


def why_request(history: Sequence[Recorded], name_or_id: str) -> tuple[str, ...]:
    """Return the story of a ProvisioningRequest by its uid, name, or namespace/name; empty: not found."""
    known = {
        recorded.fact.request_uid: recorded.fact
        for recorded in history
        if isinstance(recorded.fact, pod.PodProvisioningObserved) and name_or_id in request_names(recorded.fact)
    }
    parts = (*(reason.tag() for reason in get_args(AnswerReason)), *map(str, range(_POD_SETS_COUNT_MAX)))
    keys = frozenset(f"provisioning/{uid}{part}" for uid in known for part in ("", *(f"/{name}" for name in parts)))
    names = {(request.namespace, request.name) for request in known.values()}
    pods = frozenset(
        f"pod/{recorded.fact.pod_uid}"
        for recorded in history
        if isinstance(recorded.fact, pod.PodObserved) and consumed_request(recorded.fact) in names
    )
    return _story_of_work(history, keys, pods, pods)


_POD_SETS_COUNT_MAX = 32  # of its definition


def _story_of_work(
    history: Sequence[Recorded], keys: frozenset[str], causes: frozenset[str], pods: frozenset[str]
) -> tuple[str, ...]:
    """The story of demand: itself, the nodes that were bought for it, and the drains that moved it."""
    if not any(_entity(recorded) in keys for recorded in history):
        return ()
    bought = frozenset(
        f"action/{decision.action_id}"
        for decision in _decisions(history)
        if isinstance(decision, BuyNode) and _demand(decision) & (keys | causes)
    )
    nodes = frozenset(key for key in _connected(history, bought) if key.startswith("node/"))
    actions = bought | frozenset(
        f"action/{recorded.fact.action_id}"
        for recorded in history
        if isinstance(recorded.fact, scaling.ScalingPodEvicted) and recorded.fact.entity() in pods
    )
    return _story(history, keys | actions, causes | nodes | _causes(history, actions))


def _story(history: Sequence[Recorded], keys: frozenset[str], causes: frozenset[str]) -> tuple[str, ...]:
    """Every fact about the keys, and how the causes began; empty without a fact about the keys."""
    demand = frozenset(key for key in causes if not key.startswith("node/"))
    ordered = sorted(history, key=_chronological)
    deferrals = PastDeferrals(ordered, keys | demand)
    if not any(_is_about(recorded, keys, deferrals) for recorded in history):
        return ()
    builder = StoryBuilder(keys | demand, names_in_history(history), deferrals)
    relevant = (
        entry
        for entry in ordered
        if _is_about(entry, keys, deferrals) or _is_beginning(entry, causes, demand, deferrals)
    )
    return tuple(text for recorded in relevant for text in builder.sentences(recorded))


# At equal times: requests come before decisions, and these before their effects.
_STREAM_ORDER = ("JOB", "DEMAND", "SPOT", "POD", "SCALING", "NODE")


def _chronological(recorded: Recorded) -> tuple[datetime, int, int]:
    rank = _STREAM_ORDER.index(recorded.stream) if recorded.stream in _STREAM_ORDER else len(_STREAM_ORDER)
    return (recorded.envelope.time, rank, recorded.sequence)


class PastDeferrals:
    """What the plans of a history deferred for some objects, by what was observed of these at the time of the plan."""

    def __init__(self, ordered: Sequence[Recorded], keys: frozenset[str]) -> None:
        self._traits: dict[str, list[tuple[datetime, Traits]]] = {}  # by key, in the order of time
        for recorded in ordered:
            fact, traits = recorded.fact, None
            if isinstance(fact, pod.PodObserved):
                traits = pod_traits(fact)
            elif isinstance(fact, job.JobQueued):
                traits = job_traits(fact.spec, waits_since=fact.queued_at)
            elif isinstance(fact, job.JobPlaced):
                traits = NO_TRAITS
            key = None if traits is None else fact.entity()
            if traits is not None and key is not None and key in keys:
                self._traits.setdefault(key, []).append((recorded.envelope.time, traits))

    def of(self, plan: Plan, keys: frozenset[str], at: datetime) -> tuple[Deferred, ...]:
        """Return what the plan, published at this time, deferred for objects with these keys."""
        if not plan.deferred_groups:
            return tuple(deferred for deferred in plan.deferred if deferred.subject in keys)
        lookup = deferred_lookup(plan)
        return tuple(deferred for key in sorted(keys) for deferred in lookup.of(key, self._traits_at(key, at)))

    def _traits_at(self, key: str, at: datetime) -> Traits:
        known = self._traits.get(key, [])
        place = bisect_right(known, at, key=lambda entry: entry[0])
        return known[place - 1][1] if place else NO_TRAITS


def _is_about(recorded: Recorded, keys: frozenset[str], deferrals: PastDeferrals) -> bool:
    fact = recorded.fact
    if isinstance(fact, scaling.ScalingDecisionsRestored):
        return any(f"action/{past.decision.action_id}" in keys for past in fact.past)
    if isinstance(fact, scaling.ScalingPlanMade):
        decisions = (*fact.plan.decisions, *fact.plan.upkeep_decisions)
        is_deferred = deferrals.of(fact.plan, keys, recorded.envelope.time) or _deferred_upkeep(fact.plan, keys)
        return bool(is_deferred) or any(_is_decided(decision, keys) for decision in decisions)
    if isinstance(fact, scaling.ScalingPodEvicted) and f"action/{fact.action_id}" in keys:
        return True  # its entity is the pod, and it is a step of the drain
    if isinstance(fact, job.JobPreempted) and fact.preemption is not None:
        return bool(keys & {f"job/{fact.job_id}", f"job/{beneficiary(fact.preemption)}"})
    return _entity(recorded) in keys


def _is_decided(decision: AnyDecision | AnyUpkeep, keys: frozenset[str]) -> bool:
    is_about = isinstance(decision, UpkeepDecision) and not keys.isdisjoint(decision.subjects)
    return is_about or f"action/{decision.action_id}" in keys


def _deferred_upkeep(plan: Plan, keys: frozenset[str]) -> tuple[Deferred, ...]:
    """Return the deferred acts of upkeep on these objects; of many objects a plan names only the first ones."""
    return tuple(
        deferral for deferred in plan.upkeep_deferred for deferral in deferred.each() if deferral.subject in keys
    )


def _is_beginning(recorded: Recorded, causes: frozenset[str], demand: frozenset[str], deferrals: PastDeferrals) -> bool:
    """True for how a cause began: the request, the wait for a node, the notice, the node that became ready. A deferral
    for demand delays it; a deferral for its node is part of that node's story."""
    fact = recorded.fact
    if isinstance(fact, scaling.ScalingPlanMade):
        return bool(deferrals.of(fact.plan, demand, recorded.envelope.time))
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
    for recorded in history:
        if isinstance(recorded.fact, scaling.ScalingPlanMade):
            yield from recorded.fact.plan.decisions
        elif isinstance(recorded.fact, scaling.ScalingDecisionsRestored):
            yield from (past.decision for past in recorded.fact.past)


def _demand(decision: AnyDecision) -> frozenset[str]:
    reason = decision.reason
    kinds = UnmetDemand | ReplacesAtRiskNode | ReplacesNodes | DemandReturned
    keys = reason.demand if isinstance(reason, kinds) else ()
    # Members of reported demand are numbered; the report covers all of them.
    sources = frozenset(key.rpartition("/")[0] if key.startswith("demand/") else key for key in keys)
    # An elastic member is part of its job's story.
    return frozenset(key if (job_id := job_of_member(key)) is None else f"job/{job_id}" for key in sources)


def _causes(history: Sequence[Recorded], keys: frozenset[str]) -> frozenset[str]:
    """The demand and the instances that the decisions among the keys were made for."""
    causes: set[str] = set()
    for decision in _decisions(history):
        if f"action/{decision.action_id}" not in keys:
            continue
        causes |= _demand(decision)
        if isinstance(decision.reason, ReplacesAtRiskNode):
            at_risk = _connected(history, frozenset({f"node/{decision.reason.node_uid}"}))
            causes |= {key for key in at_risk if key.startswith("instance/")}
        if isinstance(decision, DrainNode) and decision.provider_id is not None:
            causes.add(f"instance/{decision.provider_id}")
    return frozenset(causes)


def _connected(history: Sequence[Recorded], seeds: frozenset[str]) -> frozenset[str]:
    """The seeds and every other name of the same nodes: instance, Kubernetes node, purchase, drain, release."""
    groups = [group for recorded in history for group in _names(recorded.fact)]
    keys = set(seeds)
    is_growing = True
    while is_growing:  # each round adds a name or is the last one
        more = {key for group in groups if not keys.isdisjoint(group) for key in group} - keys
        keys |= more
        is_growing = bool(more)
    return frozenset(keys)


def _names(fact: Fact) -> Iterator[frozenset[str]]:
    """Keys that the fact uses for the same node."""
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
