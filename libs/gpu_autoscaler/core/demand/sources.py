"""Demand: all work that needs capacity, from every source, in the order in which it is served."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from gpu_autoscaler.core.demand.elastic import elastic_members
from gpu_autoscaler.core.demand.items import DemandItem, DemandSource
from gpu_autoscaler.core.demand.provisioning_requests import (
    OPEN_COUNT_MAX,
    booked_requests,
    is_check,
    is_only_checked,
    missing_counts,
    open_requests,
    request_key,
)
from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.intake.reported_demand import spec_of
from gpu_autoscaler.core.nodes.views import NodeView, Selected, table_of
from gpu_autoscaler.core.placement.pod_affinity import Rules, pod_constraints_of, rules_of
from gpu_autoscaler.core.placement.preferences import job_preferences, pod_preferences
from gpu_autoscaler.core.placement.shapes import Shape
from gpu_autoscaler.core.state import queries
from gpu_autoscaler.core.state.lineage import Changes, Derivation, part_of
from gpu_autoscaler.core.state.state import ClusterState, JobRecord, ReportedDemandRecord
from gpu_autoscaler.events.pod import PodObserved, PodProvisioningObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import JobId, PodUid
from gpu_autoscaler.model.jobs import PRIORITY_DEFAULT, PRIORITY_NAMES, JobSpec
from gpu_autoscaler.model.observed import aware_instant
from gpu_autoscaler.model.reasons.defer import DeferReason, DeviceClaimsUnsupported, GroupIncomplete, VolumeNotReady
from gpu_autoscaler.model.reasons.defer_limits import ProvisioningRequestsLimit
from gpu_autoscaler.model.resources import GPU_RESOURCE
from gpu_autoscaler.model.scheduling import (
    NO_DEMANDS,
    LabelRequirement,
    NodeDemands,
    NodeSelectorTerm,
    Toleration,
    all_terms,
)

# ---- inferred unschedulable pods: the scheduler needs seconds to try every pod of a burst


def infer_unschedulable(items: list[DemandItem]) -> list[DemandItem]:
    """Treat new pods as unschedulable if an equal pod is. Members of pod groups and of jobs are never inferred."""
    unschedulable = {
        _requirements(item) for item in items if item.source is DemandSource.PENDING_POD and item.gang is None
    }
    if not unschedulable:
        return items
    return [
        msgspec.structs.replace(item, source=DemandSource.PENDING_POD, is_inferred_unschedulable=True)
        if item.source is DemandSource.ARRIVING_POD and item.job_id is None and _requirements(item) in unschedulable
        else item
        for item in items
    ]


def _requirements(item: DemandItem) -> tuple[object, ...]:
    return item.shape, item.priority, item.project, item.blocked, item.gang


# ---- pod groups (Coscheduling, Kueue, Volcano) as gangs. Of a group with a minimum that many pods are a gang, running
# pods included; further pods are ordinary. Without a minimum all pending pods are the gang.

_KEYS = (*labels.POD_GROUP_LABELS, labels.POD_GROUP_ANNOTATION)
_MINIMA = (*labels.POD_GROUP_MIN_AVAILABLE, labels.POD_GROUP_TOTAL_COUNT)


def group_into_gangs(
    items: list[DemandItem], unbound: tuple[PodObserved, ...], pods: Mapping[PodUid, PodObserved]
) -> list[DemandItem]:
    """Group pending pods of one pod group into a gang with the best priority and waiting time of its members."""
    groups = {pod.pod_uid: group for pod in unbound if (group := group_of(pod))}
    if not groups:
        return items
    gangs: dict[str, list[DemandItem]] = {}
    for item in items:
        group = groups.get(PodUid(item.key.removeprefix("pod/")), "")
        if group and item.source is DemandSource.PENDING_POD:
            gangs.setdefault(group, []).append(item)
    grouped: dict[str, DemandItem] = {}
    for gang, members in gangs.items():
        minima = (_count_min(pods[PodUid(item.key.removeprefix("pod/"))]) for item in members)
        known = [count for count in minima if count is not None]
        grouped.update(_as_gang(gang, members, max(known, default=None), pods))
    return [grouped.get(item.key, item) for item in items]


def _as_gang(
    gang: str, members: list[DemandItem], count_min: int | None, pods: Mapping[PodUid, PodObserved]
) -> dict[str, DemandItem]:
    priority, since = max(item.priority for item in members), min(item.since for item in members)
    needed_count = len(members)
    blocked: DeferReason | None = None
    if count_min is not None:
        bound_count = _bound_counts(pods)[gang]
        needed_count = max(0, count_min - bound_count)
        if needed_count > len(members):
            present = len(members) + bound_count
            blocked = GroupIncomplete(group=gang, members_present=present, members_count_min=count_min)
    first = sorted(members, key=lambda item: (-item.priority, item.since, item.key))[:needed_count]
    deadline = min((item.start_by_at for item in members if item.start_by_at is not None), default=None)
    within = next(filter(None, (_within(pods[PodUid(item.key.removeprefix("pod/"))]) for item in first)), None)
    blocked = blocked or next((item.blocked for item in first if item.blocked is not None), None)
    return {
        item.key: msgspec.structs.replace(
            item, gang=gang, priority=priority, since=since, blocked=blocked, within=within, start_by_at=deadline
        )
        for item in first
    }


def group_of(pod: PodObserved) -> str:
    """Return `group/<namespace>/<name>` of the pod; empty: none, or the pod of a managed job."""
    if pod.job_id is not None:
        return ""
    names = {key: value for key, value in (*pod.annotations, *pod.labels) if value and key in _KEYS}
    name = next((names[key] for key in _KEYS if key in names), "")
    is_none = not name or name.startswith(labels.POD_GROUP_GENERATED_PREFIX)
    return "" if is_none else f"group/{pod.namespace}/{name}"


def _count_min(pod: PodObserved) -> int | None:
    """Return the minimum of the pod group: of its object, else of the pod."""
    if pod.group_count_min is not None:
        return pod.group_count_min
    metadata = dict((*pod.annotations, *pod.labels))
    return next((int(metadata[key]) for key in _MINIMA if metadata.get(key, "").isdigit()), None)


def _within(pod: PodObserved) -> str | None:
    """Return the node label whose value all members share; None: any nodes."""
    annotations = dict(pod.annotations)
    return next((annotations[key] for key in labels.GANG_WITHIN if annotations.get(key)), None)


@cached_by_identity(4)
def _bound_counts(pods: Mapping[PodUid, PodObserved]) -> Counter[str]:
    return Counter(
        group
        for pod in pods.values()
        if pod.node_name is not None
        and pod.phase != "failed"
        and pod.deleting_since is None
        and (group := group_of(pod))
    )


# Kubernetes reserves priorities from here on for critical system pods
# (Kubernetes documentation, "Pod Priority and Preemption", read 2026-11-21).
_CRITICAL_POD_PRIORITY_MIN = 2_000_000_000

# Of jobs with GPUs. The nodes' GPU taint, which the API server's ExtendedResourceToleration tolerates for pods that ask
# for GPUs (Kubernetes documentation, "Admission Control in Kubernetes", read 2026-11-21), and the taint that people put
# on GPU nodes by hand (docs/decisions.md#pool-templates). The scheduler names the nodes of jobs, also avoided ones.
GPU_TOLERATIONS = (
    Toleration(key=GPU_RESOURCE, operator="Exists"),
    Toleration(key="gpu", value="true", effect="NoSchedule"),
    Toleration(key=labels.AVOID_TAINT, operator="Exists", effect="PreferNoSchedule"),
)
_GPU_DEMANDS = NodeDemands(tolerations=GPU_TOLERATIONS)


def demand(state: ClusterState, views: tuple[NodeView, ...], as_of: datetime) -> tuple[DemandItem, ...]:
    """Return all work without a lasting node, in the order in which it is served: placed work first, capacity checks
    and then reported demand last, between them by priority, start deadline and waiting time."""
    leaving = {view.name: view for view in table_of(views, _LEAVING)}
    index = queries.pod_index(state)
    sources = ((pod, _source(pod, leaving)) for name in leaving for pod in index.by_node.get(name, ()))
    rules = rules_of(state)
    moving = [_pod_item(pod, source, state, leaving, rules) for pod, source in sources if source is not None]
    items = [*_UNBOUND.of(state).items.values(), *moving]
    items = infer_unschedulable(group_into_gangs(items, tuple(index.unbound.values()), state.pods))
    items.extend(_job_items(state, index.members))
    if state.provisioning:
        items.extend(_request_items(state, rules, as_of))
    reports = (record for record in state.reported_demand.values() if as_of < record.reported.until)
    items.extend(item for record in reports for item in _reported_items(record))
    return tuple(sorted(items, key=_serving_order))


_LEAVING = Selected(lambda view: view.node is not None and (view.notice is not None or view.drain is not None))


def _serving_order(item: DemandItem) -> tuple[bool, bool, bool, int, bool, datetime, datetime, str, str]:
    is_reported, is_elastic = item.source is DemandSource.REPORTED, item.source is DemandSource.ELASTIC_MEMBER
    is_check = item.source is DemandSource.CAPACITY_CHECK  # of what all other work leaves free
    deadline = item.start_by_at or queries.NO_START_DEADLINE
    owner = item.gang or item.key
    return item.is_whole, is_reported, is_check, -item.priority, is_elastic, deadline, item.since, owner, item.key


@cached_by_identity(256)
def _reported_items(record: ReportedDemandRecord) -> tuple[DemandItem, ...]:
    """One item per member: they are independent of each other."""
    report, spec = record.reported, spec_of(record.reported)
    shape = job_shape(spec)
    return tuple(
        DemandItem(
            key=f"demand/{report.source}/{number}",
            source=DemandSource.REPORTED,
            shape=shape,
            member_count=1,
            priority=spec.priority,
            since=record.reported_at,
        )
        for number in range(1, (report.count or 0) + 1)
    )


def _request_items(state: ClusterState, rules: Rules, as_of: datetime) -> Iterator[DemandItem]:
    """Members of ProvisioningRequests, by pod set: all of open ones, of booked ones those without a pod."""
    for position, request in enumerate(open_requests(state, as_of)):
        source = DemandSource.CAPACITY_CHECK if is_check(request) else DemandSource.PROVISIONING
        counts = [pods.count for pods in request.pod_sets]
        blocked: DeferReason | None = next(
            (reason for pod in _pods_to_come(request) if (reason := _blocked(pod)) is not None), None
        )
        if position >= OPEN_COUNT_MAX:
            blocked = ProvisioningRequestsLimit(open_count_max=OPEN_COUNT_MAX)
        for item in _members_of(request, counts, source, rules):
            yield msgspec.structs.replace(item, blocked=blocked)
    for request in booked_requests(state, as_of):
        yield from _members_of(request, missing_counts(request, state), DemandSource.BOOKED, rules)


def _members_of(
    request: PodProvisioningObserved, counts: Sequence[int], source: DemandSource, rules: Rules
) -> Iterator[DemandItem]:
    for number, (pod, count) in enumerate(zip(_pods_to_come(request), counts, strict=True)):
        if count:
            yield DemandItem(
                key=f"{request_key(request)}/{number}",
                source=source,
                shape=pod_shape(pod, None, rules),
                member_count=count,
                gang=request_key(request),
                within=request.within,
                priority=pod_priority(pod, None),
                since=request.created_at,
                created_at=request.created_at,
                project=dict(pod.labels).get(labels.PROJECT_ID),
            )


@cached_by_identity(2 * OPEN_COUNT_MAX)
def _pods_to_come(request: PodProvisioningObserved) -> tuple[PodObserved, ...]:
    """Return a pod of each pod set as it will be observed."""
    return tuple(
        PodObserved(
            epoch=request.epoch,
            version=request.version,
            pod_uid=PodUid(f"{request.request_uid}/{number}"),
            namespace=request.namespace,
            name=request.name,
            phase="pending",
            requests=pods.requests,
            created_at=request.created_at,
            priority=pods.priority,
            demands=pods.demands,
            pod_affinity=pods.pod_affinity,
            gpu_models=pods.gpu_models,
            gpu_memory_bytes_min=pods.gpu_memory_bytes_min,
            labels=pods.labels,
            volume_trouble=pods.volume_trouble,
            device_trouble=pods.device_trouble,
            preferences=pods.preferences,
        )
        for number, pods in enumerate(request.pod_sets)
    )


def job_shape(spec: JobSpec) -> Shape:
    """Return the shape of each member of a job, equal to that of its pods."""
    return Shape(
        resources=msgspec.structs.replace(spec.member_resources, pod_count=1),
        gpu_models=spec.models,
        gpu_memory_bytes_min=None if spec.member_resources.slices else spec.gpu_memory_bytes_min,
        demands=_job_demands(spec),
        is_spot_allowed=spec.is_preemptible,
        preferences=job_preferences(spec),
    )


def _job_demands(spec: JobSpec) -> NodeDemands:
    """Node requirements of the pods besides model and capacity type, whose labels depend on who launched the node."""
    if not spec.member_resources.has_gpus:
        return spec.demands
    least = share_memory(spec)
    own = _GPU_DEMANDS if least is None else msgspec.structs.replace(_GPU_DEMANDS, node_affinity=(least,))
    if spec.demands == NO_DEMANDS:
        return own
    return NodeDemands(
        node_selector=spec.demands.node_selector,
        node_affinity=all_terms(own.node_affinity, (spec.demands.node_affinity,)),
        tolerations=tuple(dict.fromkeys((*spec.demands.tolerations, *own.tolerations))),
    )


def share_memory(spec: JobSpec) -> NodeSelectorTerm | None:
    """Return the minimum size of a GPU replica as a node selector; None: part of the resource name."""
    least = spec.gpu_memory_bytes_min
    if least is None or not spec.member_resources.slices:
        return None
    return NodeSelectorTerm((LabelRequirement(labels.GPU_SHARE_MEMORY, "Gt", (str(least // 2**20 - 1),)),))


def pod_shape(pod: PodObserved, spec: JobSpec | None, rules: Rules) -> Shape:
    """Return the shape of a pod; `spec` is that of its managed job, `rules` are those of all pods."""
    models = pod.gpu_models or (() if pod.gpu_model is None else (pod.gpu_model,))
    return Shape(
        resources=msgspec.structs.replace(pod.requests, pod_count=1),
        gpu_models=models or (() if spec is None else spec.models),
        pod_constraints=pod_constraints_of(pod, rules),
        gpu_memory_bytes_min=_memory_min(pod, spec),
        demands=pod.demands,
        is_spot_allowed=pod.priority < _CRITICAL_POD_PRIORITY_MIN if spec is None else spec.is_preemptible,
        preferences=pod_preferences(pod) if spec is None else job_preferences(spec),
    )


def _memory_min(pod: PodObserved, spec: JobSpec | None) -> int | None:
    """Minimum memory of one whole GPU, by the claims of the pod or its job."""
    if pod.gpu_memory_bytes_min is not None or spec is None or pod.requests.slices:
        return pod.gpu_memory_bytes_min
    return spec.gpu_memory_bytes_min


def job_spec(state: ClusterState, job_id: JobId | None) -> JobSpec | None:
    """Return the accepted job; None if there is none or it has aged out."""
    job = None if job_id is None else state.jobs.get(job_id)
    return None if job is None or job.queued is None else job.queued.spec


def pod_priority(pod: PodObserved, spec: JobSpec | None) -> int:
    """Return the priority of the job; of other pods low, medium or high by the sign of the Kubernetes priority."""
    if spec is not None:
        return spec.priority
    if pod.priority == 0:
        return PRIORITY_DEFAULT
    return PRIORITY_NAMES["high"] if pod.priority > 0 else PRIORITY_NAMES["low"]


def _source(pod: PodObserved, leaving: Mapping[str, NodeView]) -> DemandSource | None:
    if pod.deleting_since is not None or pod.is_gated or not queries.counts_for_idleness(pod):
        return None
    if pod.node_name is None and is_only_checked(pod):
        return DemandSource.CHECKED_POD
    if pod.node_name is None:
        return DemandSource.ARRIVING_POD if pod.unschedulable_since is None else DemandSource.PENDING_POD
    view = leaving.get(pod.node_name)
    # A bare pod is not recreated and needs no other node.
    if view is None or pod.owner_kind is None or not queries.is_workload(pod):
        return None
    return DemandSource.AT_RISK_POD if view.notice is not None else DemandSource.MOVING_POD


def _pod_item(
    pod: PodObserved, source: DemandSource, state: ClusterState, leaving: Mapping[str, NodeView], rules: Rules
) -> DemandItem:
    spec, annotations = job_spec(state, pod.job_id), dict(pod.annotations)
    job = None if pod.job_id is None else state.jobs.get(pod.job_id)
    view = None if pod.node_name is None else leaving.get(pod.node_name)
    return DemandItem(
        key=f"pod/{pod.pod_uid}",
        source=source,
        shape=pod_shape(pod, spec, rules),
        member_count=1,
        priority=pod_priority(pod, spec),
        since=pod.unschedulable_since or pod.created_at,
        created_at=pod.created_at,
        start_by_at=aware_instant(annotations.get(labels.START_BY, "")) if spec is None else spec.start_by_at,
        job_id=pod.job_id,
        project=dict(pod.labels).get(labels.PROJECT_ID) if spec is None else spec.project_id,
        work_seconds_max=None if spec is None else spec.duration_seconds_max,
        leaves=None if view is None else view.node_uid,
        prefers=_placed_on(job) if source is DemandSource.ARRIVING_POD else (),
        blocked=_blocked(pod),
    )


class _UnboundItems(NamedTuple):
    """Items of the pods without a node, and the rules of all pods that they were made with."""

    rules: Rules
    items: Mapping[PodUid, DemandItem]

    @classmethod
    def of(cls, state: ClusterState, known: Mapping[PodUid, DemandItem]) -> "_UnboundItems":
        """Make the items that are not known."""
        rules, items = rules_of(state), dict[PodUid, DemandItem]()
        for uid, pod in queries.pod_index(state).unbound.items():
            source = None if uid in known else _source(pod, {})
            if uid in known:
                items[uid] = known[uid]
            elif source is not None:
                items[uid] = _pod_item(pod, source, state, {}, rules)
        return cls(rules, items)

    def updated(self, state: ClusterState, changes: Changes) -> "_UnboundItems | None":
        """Make the items of changed pods and jobs again; all of them after a change of the rules."""
        if rules_of(state) is not self.rules:
            return None
        pods, jobs = changes.get("pods", frozenset()), changes.get("jobs", frozenset())
        kept = {uid: item for uid, item in self.items.items() if uid not in pods and item.job_id not in jobs}
        return _UnboundItems.of(state, kept)


_UNBOUND = Derivation(("pods", "jobs"), lambda state: _UnboundItems.of(state, {}), _UnboundItems.updated)


def _blocked(pod: PodObserved) -> VolumeNotReady | DeviceClaimsUnsupported | None:
    if pod.device_trouble:
        return DeviceClaimsUnsupported(detail=pod.device_trouble)
    return VolumeNotReady(detail=pod.volume_trouble) if pod.volume_trouble else None


def _job_items(state: ClusterState, pods_per_job: Mapping[JobId, int]) -> Iterator[DemandItem]:
    """Members of jobs that do not exist as pods yet. Existing pods are items of their own."""
    for job_id, job in _TO_COME.of(state).items():
        if job.queued is None:
            continue
        spec, is_queued = job.queued.spec, queries.is_waiting(job)
        shape = job_shape(spec)
        count = spec.gang_count if is_queued or job.placed is None else len(job.placed.node_uids)
        present_count = pods_per_job.get(job_id, 0) if not queries.is_moving(job) else _staying_count(state, job_id)
        present_count += job.completed_count if is_queued else 0
        missing_count = count - present_count
        # Enough members have completed, but the job waits: it goes on with another one, which needs a place and quota.
        is_rest = is_queued and missing_count <= 0 and present_count < spec.member_count
        is_rest = is_rest and all(map(queries.is_finished, queries.job_pods(state, job_id)))
        missing_count = 1 if is_rest else missing_count
        if missing_count > 0:
            yield DemandItem(
                key=f"job/{job_id}",
                source=DemandSource.QUEUED_JOB if is_queued else DemandSource.PLACED_JOB,
                shape=shape,
                member_count=missing_count,
                # A single member needs a domain as well, which the elastic ones follow.
                gang=f"job/{job_id}" if missing_count > 1 or spec.within is not None else None,
                within=spec.within,
                start_by_at=spec.start_by_at,
                priority=spec.priority,
                since=job.queued.queued_at,
                job_id=job_id,
                project=spec.project_id,
                work_seconds_max=spec.duration_seconds_max,
                prefers=() if is_queued else _placed_on(job),
            )
        placed_count = 0 if is_queued or job.placed is None else len(job.placed.node_uids) + job.completed_count
        present_count = max(placed_count, present_count + is_rest)
        yield from elastic_members(spec, shape, job.queued.queued_at, present_count)


def _staying_count(state: ClusterState, job_id: JobId) -> int:
    """Return the members of a job that moves which need no new place: finished ones, and those that wait for one."""
    members = filter(queries.is_member, queries.job_pods(state, job_id))
    return sum(1 for pod in members if queries.is_finished(pod) or pod.node_name is None)


def _is_to_come(job: JobRecord) -> bool:
    """True for an accepted job, not all of whose pods may exist."""
    is_over = job.queued is None or job.finished is not None or job.cancel_requested is not None
    return not is_over and (queries.is_waiting(job) or is_unbound(job))


_TO_COME: Derivation[Mapping[JobId, JobRecord]] = part_of("jobs", _is_to_come)


def _placed_on(job: JobRecord | None) -> tuple[str, ...]:
    """Keys of the bins of the placement, each once."""
    if job is None or job.placed is None:
        return ()
    return tuple(dict.fromkeys(f"node/{node_uid}" for node_uid in job.placed.node_uids))


def is_unbound(job: JobRecord) -> bool:
    """True for a placed job that has not started since: missing pods are yet to be created."""
    return job.placed is not None and (job.started is None or job.started.started_at < job.placed.placed_at)
