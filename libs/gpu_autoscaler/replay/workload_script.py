"""Which inputs of a recorded history do not depend on decisions?

The work that arrived and its run times, offers and prices, boot times, launch refusals and interruptions of the cloud,
and AutoscalingPolicy objects. Simulated again by `replay/counterfactual.py`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from statistics import median

import msgspec
from msgspec.structs import replace

from gpu_autoscaler.core.intake.admission import job_id_of
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.state import JobRecord
from gpu_autoscaler.events.job import JobCancelRequested, JobFinished, JobPreempted, JobRequested, JobStarted
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.events.pod import PodGone, PodObserved
from gpu_autoscaler.events.policy import PolicyDocumentsAccepted
from gpu_autoscaler.events.scaling import ScalingLaunchRefused, ScalingNodeLaunched
from gpu_autoscaler.events.spot import SpotNoticeReceived, SpotNoticeWithdrawn, SpotOffersSampled
from gpu_autoscaler.model.ids import JobId, PodUid, ProviderId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.providers.protocol import RefusalScope
from gpu_autoscaler.replay.recording import Recording
from gpu_autoscaler.runtime.history import Stored

RUN_SECONDS_UNKNOWN = 1800.0  # of jobs that never ran, if no other job ran either
NOTICE_SECONDS_UNKNOWN = 30.0  # as the policy's `notice_seconds_default`
_NOT_WORK = frozenset({"DaemonSet", "Node"})  # owners of pods that are created with their node
_SERVING = frozenset({"ReplicaSet", "ReplicationController", "StatefulSet"})  # controllers whose pods never end


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """A submitted job; `request.run_seconds` is its run time, None: to the end."""

    at: Instant
    request: JobRequested
    cancelled_at: Instant | None = None


class Replicas(msgspec.Struct, frozen=True, kw_only=True):
    """Pods of a controller that is not ours."""

    name: str
    from_at: Instant
    to_at: Instant | None  # None: until the end
    count: int
    requests: Resources  # per replica
    annotations: tuple[tuple[str, str], ...]
    grace_seconds: float


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A launch refusal, and how long it lasted."""

    offer: Offer
    code: str
    scope: RefusalScope
    from_at: Instant
    to_at: Instant


class Reclaim(msgspec.Struct, frozen=True, kw_only=True):
    """An interruption notice for a machine of this kind."""

    at: Instant
    instance_type: str
    zone: str
    notice_seconds: float
    withdrawn_at: Instant | None = None


class PriceList(msgspec.Struct, frozen=True, kw_only=True):
    """Offers since an instant."""

    at: Instant
    offers: tuple[Offer, ...]


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a recorded history."""

    from_at: Instant
    to_at: Instant
    arrivals: tuple[Arrival, ...]
    replicas: tuple[Replicas, ...]
    prices: tuple[PriceList, ...]
    boot_seconds: dict[str, tuple[float, ...]]  # by instance type, in launch order
    refusals: tuple[Refusal, ...]
    reclaims: tuple[Reclaim, ...]
    under_way_count: int  # jobs submitted before the start: submitted again at the start
    machines_before_count: int  # machines that ran at the start; the simulation starts without
    guessed_count: int  # jobs that never ran, so their run time is unknown
    never_up_count: int  # machines that never became usable; not simulated
    demanding_count: int  # groups of replicas with selectors or affinities, which are ignored
    documents: tuple[PolicyDocumentsAccepted, ...] = ()  # by instant; the first may predate the start


def is_foreign_work(pod: PodObserved) -> bool:
    """Return True for a pod that requests GPUs, belongs to no job of ours and is not created with a node."""
    return pod.job_id is None and pod.requests.gpu_count > 0 and pod.owner_kind not in _NOT_WORK


def is_serving(pod: PodObserved) -> bool:
    """Return True for foreign work that does not end by itself: its controller replaces lost pods."""
    return is_foreign_work(pod) and pod.owner_kind in _SERVING


def script_of(recording: Recording, is_replica: Callable[[PodObserved], bool] = is_foreign_work) -> Script:
    """Return the inputs of the recording. Foreign pods for which `is_replica` is true are simulated as groups for as
    long as they existed; others are ignored."""
    facts = recording.facts
    from_at = max(recording.head.from_at, facts[0].at) if facts else recording.head.from_at
    boots, never_up_count = _boots(facts)
    arrivals, under_way_count, guessed_count = _arrivals(recording, from_at)
    replicas, demanding_count = _replicas(recording, from_at, is_replica)
    state = fold(recording.head.state, [stored.recorded for stored in recording.facts if stored.at < from_at])
    return Script(
        from_at=from_at,
        to_at=recording.head.to_at,
        arrivals=arrivals,
        replicas=replicas,
        prices=_prices(recording, from_at),
        boot_seconds=boots,
        refusals=tuple(_refusals(facts, from_at)),
        reclaims=tuple(_reclaims(recording, from_at)),
        under_way_count=under_way_count,
        machines_before_count=sum(instance.state in ("pending", "running") for instance in state.instances.values()),
        guessed_count=guessed_count,
        never_up_count=never_up_count,
        demanding_count=demanding_count,
        documents=_documents(recording, from_at),
    )


def _documents(recording: Recording, from_at: datetime) -> tuple[PolicyDocumentsAccepted, ...]:
    """Return the policy objects at the start, and each later change."""
    before = recording.head.state.policy_documents
    later = [fact for stored in recording.facts if isinstance(fact := stored.recorded.fact, PolicyDocumentsAccepted)]
    changes: list[PolicyDocumentsAccepted] = []
    for fact in sorted(later if before is None else [before, *later], key=lambda fact: fact.accepted_at):
        if fact.accepted_at <= from_at:
            changes.clear()
        if not changes or changes[-1].documents != fact.documents:  # republished periodically without a change
            changes.append(fact)
    return tuple(changes)


# ---- work


class _Job(msgspec.Struct):
    requested_at: datetime
    request: JobRequested
    started_at: datetime | None = None
    ended_at: datetime | None = None
    outcome: str = ""
    cancelled_at: datetime | None = None
    is_running: bool = False

    def ran_seconds(self, from_at: datetime) -> float | None:
        """Return the run time of the last attempt since `from_at`; None if it did not end by itself."""
        if self.started_at is None or self.ended_at is None or self.outcome == "cancelled":
            return None
        return max(1.0, (self.ended_at - max(self.started_at, from_at)).total_seconds())


def _arrivals(recording: Recording, from_at: datetime) -> tuple[tuple[Arrival, ...], int, int]:
    jobs = [job for job in _jobs(recording).values() if job.ended_at is None or job.ended_at > from_at]
    run_times = [seconds for job in jobs if (seconds := job.ran_seconds(from_at)) is not None]
    typical = median(run_times) if run_times else RUN_SECONDS_UNKNOWN
    arrivals, guessed_count = [], 0
    for job in sorted(jobs, key=lambda job: (job.requested_at, job.request.job_id or "")):
        seconds = job.ran_seconds(from_at)
        if seconds is None and job.started_at is None and job.outcome != "cancelled":
            guessed_count += job.request.run_seconds is None
            seconds = typical if job.request.run_seconds is None else job.request.run_seconds
        arrivals.append(
            Arrival(
                at=max(job.requested_at, from_at),
                request=replace(job.request, run_seconds=seconds),
                cancelled_at=job.cancelled_at,
            )
        )
    return tuple(arrivals), sum(job.requested_at < from_at for job in jobs), guessed_count


def _jobs(recording: Recording) -> dict[JobId, _Job]:
    jobs = {
        job_id: job for job_id, record in recording.head.state.jobs.items() if (job := _initial_job(job_id, record))
    }
    for stored in recording.facts:
        fact = stored.recorded.fact
        if isinstance(fact, JobRequested):
            job_id = job_id_of(fact.job_id, stored.recorded.envelope.id)
            jobs.setdefault(job_id, _Job(requested_at=stored.at, request=replace(fact, job_id=job_id)))
        elif isinstance(fact, JobStarted | JobPreempted | JobFinished | JobCancelRequested):
            job = jobs.get(fact.job_id)
            if job is not None:
                _update(job, fact, stored.at)
    return jobs


def _initial_job(job_id: JobId, record: JobRecord) -> _Job | None:
    if record.requested is None or record.requested_at is None or record.finished is not None:
        return None
    job = _Job(requested_at=record.requested_at, request=replace(record.requested, job_id=job_id))
    job.started_at = None if record.started is None else record.started.started_at
    return job


def _update(job: _Job, fact: JobStarted | JobPreempted | JobFinished | JobCancelRequested, at: datetime) -> None:
    match fact:
        case JobStarted():
            # A repeated report of the same start is ignored; a start after a preemption counts.
            job.started_at, job.is_running = (job.started_at if job.is_running else fact.started_at), True
        case JobPreempted():
            job.is_running = False
        case JobFinished():
            job.ended_at, job.outcome = job.ended_at or fact.finished_at, job.outcome or fact.outcome
        case JobCancelRequested():
            job.cancelled_at = job.cancelled_at or at


def _replicas(
    recording: Recording, from_at: datetime, is_replica: Callable[[PodObserved], bool]
) -> tuple[tuple[Replicas, ...], int]:
    """Return foreign GPU pods by controller, with their peak number, and the number of groups with selectors."""
    pods_by_uid: dict[PodUid, PodObserved] = {
        uid: pod for uid, pod in recording.head.state.pods.items() if is_replica(pod)
    }
    gone: dict[PodUid, datetime] = {}
    for stored in recording.facts:
        fact = stored.recorded.fact
        if isinstance(fact, PodObserved) and is_replica(fact):
            pods_by_uid[fact.pod_uid] = fact
            if fact.finished_at is not None:
                gone.setdefault(fact.pod_uid, fact.finished_at)
        elif isinstance(fact, PodGone):
            gone.setdefault(fact.pod_uid, stored.at)
    groups: defaultdict[str, list[PodObserved]] = defaultdict(list)
    for uid, pod in pods_by_uid.items():
        if gone.get(uid, recording.head.to_at) > from_at:
            groups[pod.owner_uid or uid].append(pod)
    replicas = [_group(pods, gone, from_at) for pods in groups.values()]
    return (
        tuple(sorted(replicas, key=lambda group: (group.from_at, group.name))),
        sum(any(pod.demands.node_selector or pod.demands.node_affinity for pod in pods) for pods in groups.values()),
    )


def _group(pods: Sequence[PodObserved], gone: dict[PodUid, datetime], from_at: datetime) -> Replicas:
    changes = [(pod.created_at, 1) for pod in pods] + [(gone[uid], -1) for pod in pods if (uid := pod.pod_uid) in gone]
    count = most = 0
    for _, change in sorted(changes):  # at one instant, removals count before additions: a replacement
        count += change
        most = max(most, count)
    first = min(pods, key=lambda pod: pod.created_at)
    return Replicas(
        name=f"{first.namespace}-{first.name}",
        from_at=max(from_at, first.created_at),
        to_at=max(gone[pod.pod_uid] for pod in pods) if count == 0 else None,
        count=most,
        requests=first.requests,
        annotations=first.annotations,
        grace_seconds=first.grace_seconds,
    )


# ---- the cloud


def _prices(recording: Recording, from_at: datetime) -> tuple[PriceList, ...]:
    lists: list[PriceList] = []
    first = recording.head.state.offers
    samples = [(from_at, first)] if first is not None else []
    samples += [
        (stored.at, fact) for stored in recording.facts if isinstance(fact := stored.recorded.fact, SpotOffersSampled)
    ]
    for at, sample in samples:
        offers = tuple(sorted(sample.offers, key=lambda offer: offer.key))
        if at <= from_at:
            lists = [PriceList(at=from_at, offers=offers)]
        elif not lists or lists[-1].offers != offers:
            lists.append(PriceList(at=at, offers=offers))
    return tuple(lists)


def _boots(facts: Iterable[Stored]) -> tuple[dict[str, tuple[float, ...]], int]:
    """Return seconds from launch to usable GPUs by instance type, and the number of machines never usable."""
    launched: dict[ProviderId, ScalingNodeLaunched] = {}
    booted: dict[ProviderId, float] = {}
    for stored in facts:
        fact = stored.recorded.fact
        if isinstance(fact, ScalingNodeLaunched):
            launched.setdefault(fact.provider_id, fact)
        elif isinstance(fact, NodeObserved) and fact.provider_id in launched and fact.is_ready:
            seconds = (stored.at - launched[fact.provider_id].launched_at).total_seconds()
            if fact.allocatable.gpu_count or not fact.gpu_model:
                booted.setdefault(fact.provider_id, max(1.0, seconds))
    by_type: defaultdict[str, list[float]] = defaultdict(list)
    for provider_id, fact in launched.items():
        if provider_id in booted:
            by_type[fact.instance_type].append(booted[provider_id])
    return {name: tuple(seconds) for name, seconds in by_type.items()}, len(launched) - len(booted)


def _refusals(facts: Iterable[Stored], from_at: datetime) -> Iterable[Refusal]:
    for stored in facts:
        fact = stored.recorded.fact
        if isinstance(fact, ScalingLaunchRefused) and fact.retry_at > from_at:
            yield Refusal(
                offer=fact.offer, code=fact.code, scope=fact.scope, from_at=fact.refused_at, to_at=fact.retry_at
            )


def _reclaims(recording: Recording, from_at: datetime) -> Iterable[Reclaim]:
    kinds = {
        order.launched.provider_id: order.launched
        for order in recording.head.state.orders.values()
        if order.launched is not None
    }
    reclaims: dict[tuple[str, str], Reclaim] = {}
    for stored in recording.facts:
        fact = stored.recorded.fact
        if isinstance(fact, ScalingNodeLaunched):
            kinds.setdefault(fact.provider_id, fact)
        elif isinstance(fact, SpotNoticeReceived) and fact.provider_id in kinds and stored.at >= from_at:
            kind = kinds[fact.provider_id]
            if kind.capacity_type is CapacityType.SPOT:
                deadline = fact.reclaim_at
                left = NOTICE_SECONDS_UNKNOWN if deadline is None else (deadline - fact.received_at).total_seconds()
                reclaim = Reclaim(
                    at=stored.at, instance_type=kind.instance_type, zone=kind.zone, notice_seconds=max(0.0, left)
                )
                reclaims.setdefault((fact.provider_id, fact.provider_event), reclaim)
        elif isinstance(fact, SpotNoticeWithdrawn) and (key := (fact.provider_id, fact.provider_event)) in reclaims:
            reclaims[key] = replace(reclaims[key], withdrawn_at=fact.withdrawn_at)
    return reclaims.values()
