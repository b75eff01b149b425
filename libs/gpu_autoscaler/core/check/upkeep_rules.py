"""Rules of the plan check on upkeep. Shares no code with the step: what each act rests on is read again."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import assert_never

from gpu_autoscaler.core.check.preemption_rules import unjustified_preemption, unjustified_requeue
from gpu_autoscaler.core.check.provisioning_rules import unjustified_answer
from gpu_autoscaler.core.check.violation import Violation
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.core.state.telemetry_history import GpuTelemetryHistory, NodeTelemetryHistory
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import (
    AddFinalizer,
    AnnounceIdleJob,
    AnnounceIdleWorkload,
    AnnounceReservationEnd,
    AnswerProvisioningRequest,
    AnyUpkeep,
    AvoidNode,
    CancelIdleJob,
    DrainNode,
    EndIdleWorkload,
    OpenNode,
    Plan,
    RemoveFinalizer,
    RemoveOrphanedNode,
    RequestCheckpoints,
    RequestJobCheckpoint,
    RequestPreemptionCheckpoint,
    RequeueJob,
    UpkeepDecision,
)
from gpu_autoscaler.model.directives import Freeze
from gpu_autoscaler.model.ids import NodeUid, ProviderId
from gpu_autoscaler.model.jobs import JobSpec

# Of each kind in one plan; longest wait for the next attempt; silence of node and lists before a node is removed.
_COUNT_MAX: Mapping[type[UpkeepDecision], int] = {
    RemoveOrphanedNode: 8,
    AddFinalizer: 32,
    RemoveFinalizer: 32,
    AvoidNode: 10,
    OpenNode: 10,
    RequestCheckpoints: 32,
    RequestJobCheckpoint: 32,
    RequestPreemptionCheckpoint: 64,
    RequeueJob: 32,
    CancelIdleJob: 32,
    AnnounceIdleJob: 32,
    AnnounceIdleWorkload: 32,
    EndIdleWorkload: 32,
    AnnounceReservationEnd: 32,
    AnswerProvisioningRequest: 64,
}
_BACKOFF_MAX, _REQUEUE_MAX = timedelta(minutes=10), timedelta(hours=1)
_SILENT = timedelta(minutes=2)
_LIST_LAG = timedelta(minutes=10)


def upkeep_violations(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[Violation]:
    """Yield a sentence for each act that the state does not justify, comes too early, or exceeds a limit."""
    decisions = plan.upkeep_decisions
    counts = Counter(type(decision) for decision in decisions)
    for kind, count in counts.items():
        if count > _COUNT_MAX[kind]:
            excess = [decision for decision in decisions if isinstance(decision, kind)][_COUNT_MAX[kind] :]
            yield Violation(f"{count} acts {kind.tag()} of at most {_COUNT_MAX[kind]} in one plan", *excess)
    seen: set[str] = set()
    for decision in decisions:
        if decision.key in seen:
            yield Violation(f"{decision.key} is decided twice", decision)
        seen.add(decision.key)
        yield from _attempt(decision, plan, state)
        what = _unjustified(decision, plan.as_of, state, policy)
        if what is not None:
            yield Violation(f"{decision.tag()} on {decision.subject}: {what}", decision)
    yield from _closed_fleet(decisions, state)


def _attempt(decision: AnyUpkeep, plan: Plan, state: ClusterState) -> Iterator[Violation]:
    """Yield attempts that do not wait for the last one, and back-offs that are none or too long."""
    known = state.upkeep.get(decision.key)
    if known is not None and plan.as_of < known.retry_at:
        yield Violation(f"{decision.key} is decided again before {known.retry_at.isoformat()}", decision)
    longest = _REQUEUE_MAX if isinstance(decision, RequeueJob) else _BACKOFF_MAX
    if not timedelta() < decision.retry_at - plan.as_of <= longest:
        yield Violation(f"{decision.key} has its next attempt at {decision.retry_at.isoformat()}", decision)


def _unjustified(decision: AnyUpkeep, as_of: datetime, state: ClusterState, policy: ScalingPolicy) -> str | None:
    """Return what the state shows against the act; None: nothing."""
    match decision:
        case RemoveOrphanedNode():
            return _has_instance(decision, as_of, state, policy)
        case AddFinalizer() | RemoveFinalizer():
            is_added = isinstance(decision, AddFinalizer)
            return _needs_none(decision, state, policy) if is_added else _needs_it(decision, state, policy)
        case AvoidNode() | OpenNode():
            return _unjustified_taint(decision, as_of, state, policy)
        case RequestCheckpoints():
            return _is_not_leaving(decision, state)
        case RequestJobCheckpoint():
            return _is_not_due(decision, as_of, state, policy)
        case RequestPreemptionCheckpoint():
            return unjustified_preemption(decision, as_of, state, policy)
        case RequeueJob():
            return unjustified_requeue(decision, as_of, state)
        case CancelIdleJob() | AnnounceIdleJob():
            return _may_work(decision, as_of, state, policy)
        case AnnounceIdleWorkload() | EndIdleWorkload():
            return _workload_may_work(decision, as_of, state, policy)
        case AnnounceReservationEnd():
            return _is_not_over(decision, as_of, state, policy)
        case AnswerProvisioningRequest():
            return unjustified_answer(decision, as_of, state)
        case _:
            assert_never(decision)


def _is_frozen(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> bool:
    records = (record for record in state.directives.values() if record.lifted is None)
    return policy.is_frozen or any(
        isinstance(record.given.directive, Freeze) and record.given.until > as_of for record in records
    )


def _is_of_karpenter(node: NodeObserved) -> bool:
    return any(key == labels.KARPENTER_REGISTERED for key, _ in node.labels) or any(
        taint.key == labels.KARPENTER_UNREGISTERED_TAINT for taint in node.taints
    )


def _is_managed(node: NodeObserved, state: ClusterState) -> bool:
    """True if we bought the node: by its label, or by an order or an instance with its provider id."""
    instance = None if node.provider_id is None else state.instances.get(node.provider_id)
    launches = (order.launched for order in state.orders.values() if order.launched is not None)
    return (
        node.action_id is not None
        or (instance is not None and instance.action_id is not None)
        or (node.provider_id is not None and any(launch.provider_id == node.provider_id for launch in launches))
    )


# ---- orphaned nodes


def _has_instance(
    decision: RemoveOrphanedNode, as_of: datetime, state: ClusterState, policy: ScalingPolicy
) -> str | None:
    node = state.nodes.get(decision.node_uid)
    if node is None or (node.name, node.provider_id) != (decision.node_name, decision.provider_id):
        return "no such node with this instance is known"
    if _is_frozen(state, policy, as_of):
        return "scaling is frozen"
    if not _is_managed(node, state) or _is_of_karpenter(node):
        return "the node is not ours to delete"
    if node.is_ready or node.deleting_since is not None:
        return "the node is ready, or is being deleted"
    silent_since = state.unhealthy_since.get(node.node_uid)
    if silent_since is None or as_of - silent_since < _SILENT:
        return "the node was ready within the last two minutes"
    seen_at = [None if synced is None else synced.seen_at for synced in (state.nodes_synced, state.pods_synced)]
    oldest = timedelta(seconds=policy.watch_age_seconds_max)
    if any(at is None or as_of - at > oldest for at in (*seen_at, state.instances_listed_at)):
        return "nodes, pods or instances were not listed lately"
    return _is_listed(decision.provider_id, as_of, state)


def _is_listed(provider_id: ProviderId, as_of: datetime, state: ClusterState) -> str | None:
    """Return why the instance may run: neither was its end reported two minutes ago, nor do the lists lack it."""
    instance, listed_at = state.instances.get(provider_id), state.instances_listed_at
    confirmed = [record.terminated for record in state.orders.values()]
    confirmed += [record.terminated for record in state.drains.values()]
    ends = [fact.terminated_at for fact in confirmed if fact is not None and fact.provider_id == provider_id]
    if instance is not None and instance.state == "terminated" and instance.terminated_at is not None:
        ends.append(instance.terminated_at)
    if any(as_of - ended_at >= _SILENT for ended_at in ends):
        return None
    seen_at = state.instances_seen_at.get(provider_id)
    if listed_at is not None and (seen_at is None or listed_at - seen_at > _LIST_LAG):
        return None
    return "its instance has not ended for certain"


# ---- finalizers, and deletions by Karpenter


def _needs_none(decision: AddFinalizer | RemoveFinalizer, state: ClusterState, policy: ScalingPolicy) -> str | None:
    node = state.nodes.get(decision.node_uid)
    if node is None or node.name != decision.node_name or not _is_managed(node, state):
        return "no such node of ours is known"
    if not policy.removal.is_finalizer_on or _is_of_karpenter(node):
        return "the policy, or Karpenter, does without"
    return "the node has it, or is being deleted" if node.has_finalizer or node.deleting_since is not None else None


def _needs_it(decision: AddFinalizer | RemoveFinalizer, state: ClusterState, policy: ScalingPolicy) -> str | None:
    node = state.nodes.get(decision.node_uid)
    if node is None or node.name != decision.node_name or not node.has_finalizer:
        return "no such node with it is known"
    if not policy.removal.is_finalizer_on or _is_of_karpenter(node):
        return None
    if node.deleting_since is None:
        return "the node is not being deleted"
    return _is_alive(node, state)


# ---- taints of nodes that new pods avoid


def _unjustified_taint(
    decision: AvoidNode | OpenNode, as_of: datetime, state: ClusterState, policy: ScalingPolicy
) -> str | None:
    node, is_added = state.nodes.get(decision.node_uid), isinstance(decision, AvoidNode)
    if node is None or node.name != decision.node_name or (is_added and not _is_managed(node, state)):
        return "no such node of ours is known"
    if _is_avoided(node) == is_added:
        return "the node has the taint" if is_added else "the node does not have the taint"
    if _is_frozen(state, policy, as_of):
        return "scaling is frozen"
    if is_added and not policy.removal.is_avoid_taint_on:
        return "the policy forbids it"
    if is_added and not any(_is_plain(pod) for pod in state.pods.values()):
        return "every pod with GPUs tolerates the taint"
    return None


def _is_avoided(node: NodeObserved) -> bool:
    return any(taint.key == labels.AVOID_TAINT for taint in node.taints)


def _is_plain(pod: PodObserved) -> bool:
    """True for a pod with GPUs that has not ended, and does not tolerate the taint."""
    tolerates = any(
        each.key in ("", labels.AVOID_TAINT) and each.effect in ("", "PreferNoSchedule")
        for each in pod.demands.tolerations
    )
    return pod.requests.gpu_count > 0 and pod.phase not in ("succeeded", "failed") and not tolerates


def _closed_fleet(decisions: Iterable[AnyUpkeep], state: ClusterState) -> Iterator[Violation]:
    """Yield plans after which new pods avoid each ready node with a GPU that no pod has requested."""
    avoids = [decision for decision in decisions if isinstance(decision, AvoidNode)]
    if not avoids:
        return
    avoided = {node.node_uid for node in state.nodes.values() if _is_avoided(node)}
    avoided |= {decision.node_uid for decision in avoids}
    held_counts: Counter[str | None] = Counter()
    for pod in state.pods.values():
        if pod.phase not in ("succeeded", "failed"):
            held_counts[pod.node_name] += pod.requests.gpu_count
    if not any(
        node.is_ready and not node.is_cordoned and node.allocatable.gpu_count > held_counts[node.name]
        for node in state.nodes.values()
        if node.node_uid not in avoided
    ):
        yield Violation("new pods avoid every node with free GPUs", *avoids)


def _is_alive(node: NodeObserved, state: ClusterState) -> str | None:
    """Return why the instance of a deleted node may run: its end is not reported, and no list lacks it for long."""
    order = None if node.action_id is None else state.orders.get(node.action_id)
    launched = None if order is None or order.launched is None else order.launched.provider_id
    provider_ids = {known for known in (node.provider_id, launched) if known is not None}
    for instance in state.instances.values():
        if instance.provider_id in provider_ids or (
            instance.action_id is not None and instance.action_id == node.action_id
        ):
            provider_ids.add(instance.provider_id)
            if instance.state == "terminated":
                return None
    if order is not None and (order.refused is not None or order.terminated is not None):
        return None
    confirmed = [record.terminated for record in state.orders.values()]
    confirmed += [record.terminated for record in state.drains.values()]
    for fact in confirmed:
        if fact is not None and (
            fact.provider_id in provider_ids
            or (fact.order_action_id is not None and fact.order_action_id == node.action_id)
        ):
            return None
    since, listed_at = node.deleting_since, state.instances_listed_at
    seen_at = [state.instances_seen_at[known] for known in provider_ids if known in state.instances_seen_at]
    if since is not None and listed_at is not None and listed_at - max([since, *seen_at]) > _LIST_LAG:
        return None
    return "its instance has not ended for certain"


def _is_not_leaving(decision: RequestCheckpoints, state: ClusterState) -> str | None:
    node = state.nodes.get(decision.node_uid)
    if node is None or node.name != decision.node_name or node.action_id is None:
        return "no such node of ours is known"
    if node.deleting_since != decision.since or not _is_of_karpenter(node):
        return "Karpenter is not deleting it since then"
    work = (pod for pod in state.pods.values() if pod.node_name == node.name and _is_work(pod))
    return None if any(not _was_asked(pod, decision.since) for pod in work) else "no pod on it remains to be asked"


def _is_work(pod: PodObserved) -> bool:
    return pod.owner_kind not in ("DaemonSet", "Node") and pod.phase not in ("succeeded", "failed")


def _was_asked(pod: PodObserved, since: datetime) -> bool:
    """True if the pod was asked since then; 0.2 wrote the deadline of a request alone."""
    deadline = _annotated_at(pod, labels.CHECKPOINT_REQUESTED)
    asked = _annotated_at(pod, labels.CHECKPOINT_REQUESTED_AT) or deadline
    return deadline is not None and asked is not None and asked >= since


def _annotated_at(pod: PodObserved, key: str) -> datetime | None:
    value = next((value for own, value in pod.annotations if own == key), "")
    try:
        at = datetime.fromisoformat(value)
    except ValueError:
        return None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


# ---- periodic checkpoints


def _is_not_due(
    decision: RequestJobCheckpoint, as_of: datetime, state: ClusterState, policy: ScalingPolicy
) -> str | None:
    job, rules = state.jobs.get(decision.job_id), policy.checkpoints
    if not rules.is_on:
        return "the policy asks no job"
    if job is None or job.queued is None or job.placed is None or job.finished is not None:
        return "no such running job is known"
    ended = job.preempted
    if ended is not None and ended.preemption is not None and ended.attempt >= job.placed.attempt:
        return "its attempt was ended as a whole"
    pods = [
        pod
        for pod in state.pods.values()
        if pod.job_id == decision.job_id and pod.phase == "running" and pod.deleting_since is None
        and any(key == labels.CHECKPOINTED_AT for key, _ in pod.annotations)
    ]  # fmt: skip
    if not pods or {pod.node_name for pod in pods} != set(decision.node_names):
        return "these are not the nodes of its pods that save on request"
    saved = [at for pod in pods if (at := _annotated_at(pod, labels.CHECKPOINTED_AT)) is not None]
    since = max(saved or [pod.started_at or pod.created_at for pod in pods])
    if decision.since != since or decision.requested_at != as_of:
        return f"its last save, or its start, is of {since.isoformat()}"
    setting = job.queued.spec.checkpoint_interval_seconds
    if setting == 0.0 or (isinstance(setting, float) and decision.reason.interval_seconds != setting):
        return f"its interval is {setting:g} s"
    if setting is None and decision.reason.interval_seconds != rules.interval_seconds:
        return f"its interval is {rules.interval_seconds:g} s"
    if setting == "auto" and (what := _is_not_computed(decision, pods, state, policy)) is not None:
        return what
    if as_of - since < timedelta(seconds=decision.reason.interval_seconds):
        return "its last save is not that long ago"
    is_saving = any(_is_saving(pod, as_of) for pod in pods)
    return "its pods were asked, and have time left to save" if is_saving else None


def _is_not_computed(
    decision: RequestJobCheckpoint, pods: list[PodObserved], state: ClusterState, policy: ScalingPolicy
) -> str | None:
    """Return why the interval does not follow from its figures; without figures it is the policy's."""
    rules, reason = policy.checkpoints, decision.reason
    if reason.save_seconds is None or reason.interruption_seconds is None:
        return None if reason.interval_seconds == rules.interval_seconds else "its interval has no figures"
    spans = [
        (saved - asked).total_seconds()
        for pod in pods
        if (saved := _annotated_at(pod, labels.CHECKPOINTED_AT)) is not None
        and (asked := _annotated_at(pod, labels.CHECKPOINT_REQUESTED_AT)) is not None
    ]
    if reason.save_seconds not in spans:
        return "no pod took that long to save"
    if not any(counts.interrupted_count for ends in state.spot_terminations.values() for counts in ends.values()):
        return "no interruption was measured"
    best = (2.0 * reason.save_seconds * reason.interruption_seconds) ** 0.5
    bounded = max(rules.interval_seconds_min, min(rules.interval_seconds_max, best))
    return None if abs(bounded - reason.interval_seconds) < 1.0 else f"its interval would be {bounded:g} s"


def _is_saving(pod: PodObserved, as_of: datetime) -> bool:
    deadline, saved = _annotated_at(pod, labels.CHECKPOINT_REQUESTED), _annotated_at(pod, labels.CHECKPOINTED_AT)
    asked = _annotated_at(pod, labels.CHECKPOINT_REQUESTED_AT) or deadline
    is_open = asked is not None and (saved is None or saved < asked - timedelta(seconds=5))
    return is_open and deadline is not None and as_of < deadline


# ---- idle jobs


def _may_work(
    decision: CancelIdleJob | AnnounceIdleJob, as_of: datetime, state: ClusterState, policy: ScalingPolicy
) -> str | None:
    rules, job = policy.idle_jobs, state.jobs.get(decision.job_id)
    if not rules.is_on or _is_frozen(state, policy, as_of):
        return "the policy, or a freeze, forbids it"
    if job is None or job.queued is None or job.finished is not None or job.cancel_requested is not None:
        return "the job is not running"
    pods = _pods_of(job.queued.spec, state)
    if (what := _are_unfit(pods, job.queued.spec)) is not None:
        return what
    if (what := _may_be_busy(pods, as_of, state, policy)) is not None:
        return what
    if isinstance(decision, CancelIdleJob):
        return _was_not_announced(pods, as_of, state, policy)
    if {(pod.namespace, pod.name) for pod in pods} != {(decision.namespace, named.name) for named in decision.pods}:
        return "these are not all its pods with GPUs"
    grace = timedelta(seconds=rules.grace_seconds)
    is_now = decision.announced_at == as_of and decision.ends_at == as_of + grace
    return None if is_now else "it is announced for another time"


def _was_not_announced(
    pods: list[PodObserved], as_of: datetime, state: ClusterState, policy: ScalingPolicy
) -> str | None:
    """Return why these idle pods may not end yet: their end was not announced, or they worked since."""
    announced = [
        (_annotated_at(pod, labels.IDLE_ANNOUNCED_AT), _annotated_at(pod, labels.IDLE_ENDS_AT)) for pod in pods
    ]
    if any(at is None or ends_at is None or as_of < ends_at for at, ends_at in announced):
        return "it was not announced, or its grace is not over"
    since = min((at for at, _ in announced if at is not None), default=as_of)
    return _may_be_busy(pods, as_of, state, policy, since=since)


def _workload_may_work(
    decision: AnnounceIdleWorkload | EndIdleWorkload, as_of: datetime, state: ClusterState, policy: ScalingPolicy
) -> str | None:
    rules = policy.idle_jobs
    is_opted_in = decision.namespace in rules.namespaces or decision.namespace in state.opted_in_namespaces
    if not is_opted_in or _is_frozen(state, policy, as_of):
        return "its namespace did not opt in, or a freeze forbids it"
    named = [state.pods.get(pod.pod_uid) for pod in decision.pods]
    pods = [pod for pod in named if pod is not None and pod.namespace == decision.namespace]
    if not pods or len(pods) != len(decision.pods) or any(pod.job_id is not None for pod in pods):
        return "these are not pods of a workload outside of our queue"
    alike = [pod for pod in state.pods.values() if pod in pods or _has_same_owner(pod, pods[0])]
    living = [pod for pod in alike if pod.requests.has_gpus and pod.phase not in ("succeeded", "failed")]
    if len(living) != len(pods) or not all(pod is pods[0] or _has_same_owner(pod, pods[0]) for pod in pods):
        return "these are not all pods with GPUs of one workload"
    if (what := _may_not_end(pods)) is not None or (what := _may_be_busy(pods, as_of, state, policy)) is not None:
        return what
    if isinstance(decision, AnnounceIdleWorkload):
        return None if decision.announced_at == as_of else "it is announced for another time"
    if (decision.owner_kind, decision.owner_uid) != (pods[0].owner_kind, pods[0].owner_uid or ""):
        return f"its pods belong to a {pods[0].owner_kind}"
    if pods[0].owner_kind not in (None, "Job", "ReplicaSet", "StatefulSet"):
        return f"a {pods[0].owner_kind} is not ended"
    return _was_not_announced(pods, as_of, state, policy)


def _has_same_owner(pod: PodObserved, first: PodObserved) -> bool:
    """True for pods of one JobSet, else of one owner."""
    own, others = (dict(known.labels).get(labels.JOBSET_NAME) for known in (pod, first))
    if own is not None or others is not None:
        return own == others and pod.namespace == first.namespace
    return pod.owner_uid is not None and pod.owner_uid == first.owner_uid


def _may_be_busy(
    pods: list[PodObserved], as_of: datetime, state: ClusterState, policy: ScalingPolicy, since: datetime | None = None
) -> str | None:
    """Return which pod is not known to have been idle since then, or for as long as the policy says."""
    rules = policy.idle_jobs
    if not _is_observed(state, policy, as_of):
        return "telemetry of too few nodes is known"
    uids = {node.name: uid for uid, node in state.nodes.items()}
    since = since or as_of - timedelta(seconds=rules.idle_seconds)
    for pod in pods:
        uid = uids.get(pod.node_name or "", NodeUid(""))
        gpus = _reliable_gpus(uid, state, policy, as_of)
        held = [gpu for gpu in gpus if gpu.pod == f"{pod.namespace}/{pod.name}"]
        count = pod.requests.gpu_count + sum(number for _, number in pod.requests.slices)
        if len(held) != count or not all(_was_idle(gpu, since, rules.busy_ratio_max) for gpu in held):
            return f"pod {pod.name} is not known to be idle"
    return None


def _pods_of(spec: JobSpec, state: ClusterState) -> list[PodObserved]:
    """Return the pods of the job with GPUs that have not ended; of an elastic job only those with a node."""
    is_elastic = spec.member_count_min is not None
    return [
        pod
        for pod in state.pods.values()
        if pod.job_id == spec.job_id
        and pod.requests.has_gpus
        and pod.phase not in ("succeeded", "failed")
        and (pod.node_name is not None or not is_elastic)
    ]


def _are_unfit(pods: list[PodObserved], spec: JobSpec) -> str | None:
    """Return why these pods are not a job that may be ended as a whole."""
    if not spec.gang_count <= len(pods) <= spec.member_count:
        return f"it has {len(pods)} pods, of {spec.gang_count} to {spec.member_count}"
    return _may_not_end(pods)


def _may_not_end(pods: list[PodObserved]) -> str | None:
    if any(pod.phase != "running" or pod.node_name is None or pod.deleting_since is not None for pod in pods):
        return "one of its pods does not run, or is being deleted"
    keep = {labels.DO_NOT_DISRUPT, labels.KARPENTER_DO_NOT_DISRUPT, labels.IDLE_ALLOWED}
    if any(key in keep and value == "true" for pod in pods for key, value in pod.annotations):
        return "one of its pods must not be disrupted"
    return None


def _reliable_gpus(
    uid: NodeUid, state: ClusterState, policy: ScalingPolicy, as_of: datetime
) -> tuple[GpuTelemetryHistory, ...]:
    """Return the GPUs of a ready node of ours with recent, changing and possible figures, not all of them zero."""
    node, window = state.nodes.get(uid), state.telemetry.get(uid)
    gpus = () if window is None else window.gpus
    reads_any = any(gpu.memory_used_bytes_max or gpu.utilization_ratio_max for gpu in gpus)
    if node is None or not node.is_ready or not _is_managed(node, state) or not reads_any:
        return ()
    history = state.telemetry_history.get(uid)
    return () if history is None or not _is_reliable(history, policy, as_of) else history.gpus


def _is_reliable(history: NodeTelemetryHistory, policy: ScalingPolicy, as_of: datetime) -> bool:
    rules = policy.utilization
    age_seconds = (as_of - history.seen_until).total_seconds()
    unchanged_seconds = (history.seen_until - history.changed_at).total_seconds()
    is_recent = age_seconds <= rules.telemetry_age_seconds_max
    return is_recent and unchanged_seconds < rules.unchanged_seconds_max and history.busy_ratio is not None


def _is_observed(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> bool:
    """False if reliable telemetry of so few nodes is known that the figures as a whole are doubtful."""
    rules = policy.utilization
    young = timedelta(seconds=rules.telemetry_age_seconds_max)
    ready = [node for node in state.nodes.values() if node.is_ready and _is_managed(node, state)]
    leaving = {record.decision.node_uid for record in state.drains.values() if isinstance(record.decision, DrainNode)}
    ended = {known.provider_id for known in state.instances.values() if known.state != "running"}
    due_count = sum(
        node.allocatable.has_gpus
        and node.node_uid not in leaving
        and node.provider_id not in ended
        and not node.is_cordoned
        and node.deleting_since is None
        and (usable := state.usable.get(node.node_uid)) is not None
        and as_of - usable.since >= young
        for node in ready
    )
    histories = (state.telemetry_history.get(node.node_uid) for node in ready)
    reliable_count = sum(history is not None and _is_reliable(history, policy, as_of) for history in histories)
    return reliable_count >= rules.telemetry_coverage_ratio_min * due_count


def _was_idle(gpu: GpuTelemetryHistory, since: datetime, busy_ratio_max: float) -> bool:
    """True if the GPU was observed at or below the ratio from then on."""
    return any(percent <= busy_ratio_max * 100 and at <= since for percent, at in gpu.utilization)


# ---- ends of paid reservations


def _is_not_over(
    decision: AnnounceReservationEnd, as_of: datetime, state: ClusterState, policy: ScalingPolicy
) -> str | None:
    instance = state.instances.get(decision.provider_id)
    if instance is None or instance.state == "terminated" or instance.action_id is None:
        return "no such living instance of ours is known"
    order = state.orders.get(instance.action_id)
    until = None if order is None or order.decision is None else order.decision.offer.paid_until
    if until is None or until != decision.reclaim_at:
        return "its order has no reservation that ends then"
    if as_of < until - timedelta(seconds=policy.reservation_drain_seconds):
        return "its work need not move yet"
    known = (record.notice for record in state.notices.values())
    is_known = any(
        (notice.provider_id, notice.kind, notice.reclaim_at) == (decision.provider_id, "paid_period_over", until)
        for notice in known
    )
    return "the notice is known" if is_known else None
