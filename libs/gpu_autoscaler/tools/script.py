"""What a recorded history says of the world that does not depend on who decided: the work that came and how long it
took, what was for sale, how long machines booted, what the cloud refused and took back, and which policies people kept
as documents beside the policy file. Played again by `tools/rerun.py`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from statistics import median

import msgspec
from msgspec.structs import replace

from gpu_autoscaler.core.admission import job_id_of
from gpu_autoscaler.core.fold import fold
from gpu_autoscaler.core.state import JobRecord
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
from gpu_autoscaler.tools.history import Stored
from gpu_autoscaler.tools.recording import Recording

# Of jobs that never ran in the record, where no other did either: what cannot be known is at least said.
RUN_SECONDS_UNKNOWN = 1800.0
NOTICE_SECONDS_UNKNOWN = 30.0  # as the policy's `notice_seconds_default`
_NOT_WORK = frozenset({"DaemonSet", "Node"})  # pods that come with their node
_SERVING = frozenset({"ReplicaSet", "ReplicationController", "StatefulSet"})  # controllers whose pods never end


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """A job that somebody asked for; `request.run_seconds` is how long its work takes, None: to the end."""

    at: Instant
    request: JobRequested
    cancelled_at: Instant | None = None


class Replicas(msgspec.Struct, frozen=True, kw_only=True):
    """Pods of one controller that is none of ours."""

    name: str
    from_at: Instant
    to_at: Instant | None  # None: they stayed
    count: int
    requests: Resources  # of each
    annotations: tuple[tuple[str, str], ...]
    grace_seconds: float


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The cloud did not sell this, for so long."""

    offer: Offer
    code: str
    scope: RefusalScope
    from_at: Instant
    to_at: Instant


class Reclaim(msgspec.Struct, frozen=True, kw_only=True):
    """The cloud gave notice to a machine of this kind."""

    at: Instant
    instance_type: str
    zone: str
    notice_seconds: float
    withdrawn_at: Instant | None = None


class PriceList(msgspec.Struct, frozen=True, kw_only=True):
    """What was for sale from an instant on."""

    at: Instant
    offers: tuple[Offer, ...]


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """The world of a recorded history."""

    from_at: Instant
    to_at: Instant
    arrivals: tuple[Arrival, ...]
    replicas: tuple[Replicas, ...]
    prices: tuple[PriceList, ...]
    boot_seconds: dict[str, tuple[float, ...]]  # by instance type, in the order of the launches
    refusals: tuple[Refusal, ...]
    reclaims: tuple[Reclaim, ...]
    under_way_count: int  # jobs that were there before the beginning: asked for anew at the beginning
    machines_before_count: int  # machines that ran at the beginning; the model begins without any
    guessed_count: int  # jobs that never ran, so that nobody knows how long they take
    never_up_count: int  # machines that never became usable; not played again
    demanding_count: int  # groups of replicas with selectors or tolerations, which are not played again
    documents: tuple[PolicyDocumentsAccepted, ...] = ()  # by instant; the first may be older than the beginning


def is_foreign_work(pod: PodObserved) -> bool:
    """True for a pod that wants GPUs, is of no job of ours and does not come with a node."""
    return pod.job_id is None and pod.requests.gpu_count > 0 and pod.owner_kind not in _NOT_WORK


def is_serving(pod: PodObserved) -> bool:
    """True for foreign work that has no end of its own: its controller replaces what goes."""
    return is_foreign_work(pod) and pod.owner_kind in _SERVING


def script_of(recording: Recording, is_replica: Callable[[PodObserved], bool] = is_foreign_work) -> Script:
    """Return the world of the recording, from its first plan's time on. `is_replica`: which foreign pods are played as
    groups that stay for as long as they were there; the others are left out."""
    facts = recording.facts
    from_at = max(recording.head.from_at, facts[0].at) if facts else recording.head.from_at
    boots, never_up_count = _boots(facts)
    arrivals, under_way_count, guessed_count = _arrivals(recording, from_at)
    replicas, demanding_count = _replicas(recording, from_at, is_replica)
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
        machines_before_count=_machines_before(recording, from_at),
        guessed_count=guessed_count,
        never_up_count=never_up_count,
        demanding_count=demanding_count,
        documents=_documents(recording, from_at),
    )


def _documents(recording: Recording, from_at: datetime) -> tuple[PolicyDocumentsAccepted, ...]:
    """Which documents were in force: those at the beginning, and each change after it."""
    before = recording.head.state.policy_documents
    later = [fact for each in recording.facts if isinstance(fact := each.recorded.fact, PolicyDocumentsAccepted)]
    told: list[PolicyDocumentsAccepted] = []
    for fact in sorted(later if before is None else [before, *later], key=lambda one: one.accepted_at):
        if fact.accepted_at <= from_at:
            told.clear()
        if not told or told[-1].documents != fact.documents:  # said again now and then, so that it is not forgotten
            told.append(fact)
    return tuple(told)


# ---- work


class _Job(msgspec.Struct):
    asked_at: datetime
    request: JobRequested
    started_at: datetime | None = None
    ended_at: datetime | None = None
    outcome: str = ""
    cancelled_at: datetime | None = None
    is_running: bool = False

    def ran_seconds(self, from_at: datetime) -> float | None:
        """How long its last attempt ran to its end, from the beginning on; None: it did not."""
        if self.started_at is None or self.ended_at is None or self.outcome == "cancelled":
            return None
        return max(1.0, (self.ended_at - max(self.started_at, from_at)).total_seconds())


def _arrivals(recording: Recording, from_at: datetime) -> tuple[tuple[Arrival, ...], int, int]:
    jobs = [job for job in _jobs(recording).values() if job.ended_at is None or job.ended_at > from_at]
    known = [seconds for job in jobs if (seconds := job.ran_seconds(from_at)) is not None]
    typical = median(known) if known else RUN_SECONDS_UNKNOWN
    found, guessed_count = [], 0
    for job in sorted(jobs, key=lambda each: (each.asked_at, each.request.job_id or "")):
        seconds = job.ran_seconds(from_at)
        if seconds is None and job.started_at is None and job.outcome != "cancelled":
            guessed_count += job.request.run_seconds is None
            seconds = typical if job.request.run_seconds is None else job.request.run_seconds
        found.append(
            Arrival(
                at=max(job.asked_at, from_at),
                request=replace(job.request, run_seconds=seconds),
                cancelled_at=job.cancelled_at,
            )
        )
    return tuple(found), sum(job.asked_at < from_at for job in jobs), guessed_count


def _jobs(recording: Recording) -> dict[JobId, _Job]:
    """Every job that was asked for, with what became of it."""
    jobs = {job_id: job for job_id, record in recording.head.state.jobs.items() if (job := _known(job_id, record))}
    for each in recording.facts:
        fact = each.recorded.fact
        if isinstance(fact, JobRequested):
            job_id = job_id_of(fact.job_id, each.recorded.envelope.id)
            jobs.setdefault(job_id, _Job(asked_at=each.at, request=replace(fact, job_id=job_id)))
        elif isinstance(fact, JobStarted | JobPreempted | JobFinished | JobCancelRequested):
            job = jobs.get(fact.job_id)
            if job is not None:
                _happened(job, fact, each.at)
    return jobs


def _known(job_id: JobId, record: JobRecord) -> _Job | None:
    if record.requested is None or record.requested_at is None or record.finished is not None:
        return None
    job = _Job(asked_at=record.requested_at, request=replace(record.requested, job_id=job_id))
    job.started_at = None if record.started is None else record.started.started_at
    return job


def _happened(job: _Job, fact: JobStarted | JobPreempted | JobFinished | JobCancelRequested, at: datetime) -> None:
    match fact:
        case JobStarted():
            # A second word about the same start is none; a start after a loss is one.
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
    """Pods that want GPUs and are of no job of ours, by controller; as many as there were at a time at most."""
    seen: dict[PodUid, PodObserved] = {uid: pod for uid, pod in recording.head.state.pods.items() if is_replica(pod)}
    gone: dict[PodUid, datetime] = {}
    for each in recording.facts:
        fact = each.recorded.fact
        if isinstance(fact, PodObserved) and is_replica(fact):
            seen[fact.pod_uid] = fact
            if fact.finished_at is not None:
                gone.setdefault(fact.pod_uid, fact.finished_at)
        elif isinstance(fact, PodGone):
            gone.setdefault(fact.pod_uid, each.at)
    groups: defaultdict[str, list[PodObserved]] = defaultdict(list)
    for uid, pod in seen.items():
        if gone.get(uid, recording.head.to_at) > from_at:
            groups[pod.owner_uid or uid].append(pod)
    found = [_group(pods, gone, from_at) for pods in groups.values()]
    return (
        tuple(sorted(found, key=lambda one: (one.from_at, one.name))),
        sum(any(pod.demands.node_selector or pod.demands.node_affinity for pod in pods) for pods in groups.values()),
    )


def _group(pods: Sequence[PodObserved], gone: dict[PodUid, datetime], from_at: datetime) -> Replicas:
    changes = [(pod.created_at, 1) for pod in pods] + [(gone[uid], -1) for pod in pods if (uid := pod.pod_uid) in gone]
    count = most = 0
    for _, change in sorted(changes):  # of two at one instant the one that goes is first: it is replaced
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
        (each.at, fact) for each in recording.facts if isinstance(fact := each.recorded.fact, SpotOffersSampled)
    ]
    for at, sample in samples:
        offers = tuple(sorted(sample.offers, key=lambda offer: offer.key))
        if at <= from_at:
            lists = [PriceList(at=from_at, offers=offers)]
        elif not lists or lists[-1].offers != offers:
            lists.append(PriceList(at=at, offers=offers))
    return tuple(lists)


def _boots(facts: Iterable[Stored]) -> tuple[dict[str, tuple[float, ...]], int]:
    """From launch to GPUs that pods can use."""
    launched: dict[ProviderId, ScalingNodeLaunched] = {}
    booted: dict[ProviderId, float] = {}
    for each in facts:
        fact = each.recorded.fact
        if isinstance(fact, ScalingNodeLaunched):
            launched.setdefault(fact.provider_id, fact)
        elif isinstance(fact, NodeObserved) and fact.provider_id in launched and fact.is_ready:
            seconds = (each.at - launched[fact.provider_id].launched_at).total_seconds()
            if fact.allocatable.gpu_count or not fact.gpu_model:
                booted.setdefault(fact.provider_id, max(1.0, seconds))
    by_type: defaultdict[str, list[float]] = defaultdict(list)
    for provider_id, fact in launched.items():
        if provider_id in booted:
            by_type[fact.instance_type].append(booted[provider_id])
    return {name: tuple(seconds) for name, seconds in by_type.items()}, len(launched) - len(booted)


def _refusals(facts: Iterable[Stored], from_at: datetime) -> Iterable[Refusal]:
    for each in facts:
        fact = each.recorded.fact
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
    found: dict[tuple[str, str], Reclaim] = {}
    for each in recording.facts:
        fact = each.recorded.fact
        if isinstance(fact, ScalingNodeLaunched):
            kinds.setdefault(fact.provider_id, fact)
        elif isinstance(fact, SpotNoticeReceived) and fact.provider_id in kinds and each.at >= from_at:
            kind = kinds[fact.provider_id]
            if kind.capacity_type is CapacityType.SPOT:
                deadline = fact.reclaim_at
                left = NOTICE_SECONDS_UNKNOWN if deadline is None else (deadline - fact.received_at).total_seconds()
                reclaim = Reclaim(
                    at=each.at, instance_type=kind.instance_type, zone=kind.zone, notice_seconds=max(0.0, left)
                )
                found.setdefault((fact.provider_id, fact.provider_event), reclaim)
        elif isinstance(fact, SpotNoticeWithdrawn) and (key := (fact.provider_id, fact.provider_event)) in found:
            found[key] = replace(found[key], withdrawn_at=fact.withdrawn_at)
    return found.values()


def _machines_before(recording: Recording, from_at: datetime) -> int:
    """Machines that ran when it begins."""
    state = fold(recording.head.state, [each.recorded for each in recording.facts if each.at < from_at])
    return sum(instance.state in ("pending", "running") for instance in state.instances.values())
