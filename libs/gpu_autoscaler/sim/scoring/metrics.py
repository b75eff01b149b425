"""Cost, waiting and lost work of a run, computed from the true state of the simulation, equally for all systems.

Saved and lost work follow from `actors/checkpointing.py`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec

from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.kube.protocol import JOBS, PODS
from gpu_autoscaler.kube.translate.common import condition
from gpu_autoscaler.kube.translate.job import is_over
from gpu_autoscaler.kube.translate.pod import pod_requests
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.jobs import PRIORITY_NAMES
from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.sim.actors.checkpointing import CHECKPOINTING_WORKLOAD, CheckpointSettings
from gpu_autoscaler.sim.cluster.cloud import Cloud
from gpu_autoscaler.sim.cluster.controllers import DISRUPTED, Workloads, is_ready, member_of
from gpu_autoscaler.sim.cluster.objects import Entry
from gpu_autoscaler.sim.cluster.scheduler import FINISHED
from gpu_autoscaler.sim.scoring.causes import NodeHistory, PodRun, micro_usd_by_cause

# How much of a fleet one storm could have taken: what is spot, of one type, in one zone. Used by the tally.


class BilledMachine(NamedTuple):
    """A machine while it is billed."""

    offer: Offer
    from_at: datetime
    to_at: datetime


def storm_ratio(machines: Iterable[BilledMachine]) -> float | None:
    """Return the share of GPU-hours in the spot pool that held most GPUs at each moment.

    None without GPUs. On-demand and reserved machines are in no spot pool.
    """
    changes = sorted(_changes(machines), key=lambda change: change[0])
    gpus_by_pool: Counter[tuple[str, str]] = Counter()
    gpu_count, total_gpu_seconds, exposed_gpu_seconds = 0, 0.0, 0.0
    for (at, offer, count), until in zip(changes, [at for at, _, _ in changes[1:]], strict=False):
        gpu_count += count
        if offer.capacity_type is CapacityType.SPOT:
            gpus_by_pool[offer.instance_type, offer.zone] += count
        seconds = (until - at).total_seconds()
        total_gpu_seconds += gpu_count * seconds
        exposed_gpu_seconds += max(gpus_by_pool.values(), default=0) * seconds
    return exposed_gpu_seconds / total_gpu_seconds if total_gpu_seconds else None


def _changes(machines: Iterable[BilledMachine]) -> Sequence[tuple[datetime, Offer, int]]:
    result = []
    for machine in machines:
        count = machine.offer.resources.gpu_count
        if count and machine.to_at > machine.from_at:
            result += [(machine.from_at, machine.offer, count), (machine.to_at, machine.offer, -count)]
    return result


SERVING = "serving"  # class of service replicas, beside the job priorities
ALL = "all"  # jobs of every priority

_NAMES = {value: name for name, value in PRIORITY_NAMES.items()}


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """Time in which work of one class was wanted but did not run: before its start and after interruptions."""

    count: int
    mean_seconds: float
    p50_seconds: float
    p95_seconds: float
    max_seconds: float


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one system in one scenario, from the start to the end of the hours and of the last job."""

    world: str
    system: str
    hours: float
    cost_usd: float
    waiting: dict[str, Waiting]  # by priority, `serving` and `all` jobs
    node_hours: float | None  # None: a computed bound has no nodes
    gpu_hours_bought: float | None
    gpu_hours_used: float
    lost_gpu_hours: float  # work that had to be repeated
    evicted_count: int  # pods ended by the system's choice, evicted or with their suspended Job
    interrupted_count: int  # pods whose machine was reclaimed
    jobs_count: int
    failed_count: int
    unfinished_count: int  # at the time limit
    interrupted_jobs_count: int = 0  # jobs with an interrupted pod
    recovered_jobs_count: int = 0  # of those, completed ones
    storm_ratio: float | None = None  # share of the bought GPU-hours exposed to one spot reclaim storm; None: no nodes
    broken: tuple[str, ...] = ()  # violated invariants of our system; baselines are not checked
    micro_usd_by_cause: dict[str, int] = {}  # adds up to the bill; empty: a computed bound

    @property
    def gpu_used_ratio(self) -> float | None:
        """Share of the bought GPU-hours in which work ran."""
        return self.gpu_hours_used / self.gpu_hours_bought if self.gpu_hours_bought else None


@dataclass(slots=True)
class _StartedPod:
    """One pod from its start to its end."""

    pod: core.Pod
    member: tuple[str, str]  # job and index; for replicas "" and the pod name
    gpu_count: int
    started_at: datetime
    save_requests: dict[str, datetime] = field(default_factory=dict)  # each request to save, by its deadline
    terminating_at: datetime | None = None  # terminating, with enough time to save


@dataclass(slots=True)
class _Member:
    """One member of a job, over all its pods."""

    saved_seconds: float = 0.0
    ran_seconds: float = 0.0
    ended_at: datetime | None = None


@dataclass(slots=True)
class _Job:
    """A requested job and its members."""

    request: JobRequested
    requested_at: datetime
    members: dict[tuple[str, str], _Member] = field(default_factory=dict)
    failed_at: datetime | None = None
    is_interrupted: bool = False

    @property
    def is_done(self) -> bool:
        return all(member.ended_at is not None for member in self.members.values())


class MetricsCollector:
    """Observes all changes in the cluster and computes the score."""

    def __init__(self, workloads: Workloads, cloud: Cloud, checkpoints: CheckpointSettings | None = None) -> None:
        self._checkpoints = checkpoints or CheckpointSettings()
        self.last_ended_at: datetime | None = None
        self._workloads = workloads
        self._cluster = workloads.cluster
        self._cloud = cloud
        self._jobs: dict[str, _Job] = {}
        self._open_count = 0
        self._runs: dict[str, _StartedPod] = {}  # by pod uid
        self._replicas: dict[str, datetime] = {}  # waiting replicas, and since when
        self._replicas_waited: list[float] = []
        self._disrupted: set[str] = set()
        self._evicted_count = self._interrupted_count = 0
        self._ended_runs: list[PodRun] = []
        self._node_history = NodeHistory(self._cluster)
        self._lost_gpu_seconds = 0.0
        self._cluster.listen(self._on_change)
        workloads.saved_seconds = self.saved_seconds

    # ---- events

    def job_requested(self, request: JobRequested) -> None:
        assert request.job_id is not None, "a scenario's jobs have ids"  # noqa: S101 - a bug of the scenario
        job = self._jobs[request.job_id] = _Job(request, self._cluster.now())
        job.members = {(request.job_id, str(index)): _Member() for index in range(request.members)}
        self._open_count += 1

    def is_over(self) -> bool:
        return self._open_count == 0

    def saved_seconds(self, pod: core.Pod) -> float:
        member = self._member(pod)
        return 0.0 if member is None else member.saved_seconds

    # ---- observation

    def _on_change(self, plural: str, entry: Entry) -> None:
        if plural == PODS.plural:
            assert isinstance(entry.object, core.Pod)  # noqa: S101 - of this kind
            self._on_pod(entry.object, is_deleted=entry.is_deleted)
        elif plural == JOBS.plural:
            assert isinstance(entry.object, core.Job)  # noqa: S101 - of this kind
            self._on_job(entry.object, is_deleted=entry.is_deleted)

    def _on_job(self, job: core.Job, *, is_deleted: bool) -> None:
        known = self._jobs.get(job.metadata.name)
        if known is not None and known.failed_at is None and not known.is_done and (is_deleted or is_over(job)):
            failed = condition(job.status.conditions, "Failed")
            if is_deleted or (failed is not None and failed.status == "True"):
                known.failed_at = self._cluster.now()
                self._job_ended()

    def _on_pod(self, pod: core.Pod, *, is_deleted: bool) -> None:
        uid, now = pod.metadata.uid, self._cluster.now()
        self._count_disruption(pod)
        run = self._runs.get(uid)
        if run is None:
            if is_ready(pod) and not is_deleted:
                self._begin(pod, now)
            elif self._member(pod) is None:
                self._replica_waits(pod, now, is_deleted=is_deleted)
        elif pod.status.phase in FINISHED or is_deleted:
            self._end(self._runs.pop(uid), now, is_done=pod.status.phase == "Succeeded")
        else:
            self._note_save_request(run, pod, now)

    def _replica_waits(self, pod: core.Pod, now: datetime, *, is_deleted: bool) -> None:
        if is_deleted or pod.metadata.deletion_timestamp is not None:
            self._replicas.pop(pod.metadata.uid, None)
        else:
            self._replicas.setdefault(pod.metadata.uid, now)

    def _count_disruption(self, pod: core.Pod) -> None:
        if pod.spec.node_name is None or pod.metadata.uid in self._disrupted or pod.status.phase == "Succeeded":
            return
        if condition(pod.status.conditions, DISRUPTED) is None:
            return
        self._disrupted.add(pod.metadata.uid)
        machine = self._cloud.of_node(pod.spec.node_name)
        if machine is not None and (machine.notice is not None or machine.reclaimed_at is not None):
            self._interrupted_count += 1
            job = self._jobs.get(pod.metadata.labels.get(labels.JOB_ID, ""))
            if job is not None:
                job.is_interrupted = True
        else:
            self._evicted_count += 1

    def _begin(self, pod: core.Pod, now: datetime) -> None:
        waited_since = self._replicas.pop(pod.metadata.uid, None)
        if waited_since is not None:
            self._replicas_waited.append((now - waited_since).total_seconds())
        self._runs[pod.metadata.uid] = _StartedPod(pod, member_of(pod), pod_requests(pod).gpu_count, now)

    def _note_save_request(self, run: _StartedPod, pod: core.Pod, now: datetime) -> None:
        deadline = pod.metadata.annotations.get(labels.CHECKPOINT_REQUESTED)
        if deadline is not None and self._checkpoints.saves_on_request:
            run.save_requests.setdefault(deadline, now)
        ends_at = pod.metadata.deletion_timestamp
        if run.terminating_at is None and ends_at is not None and self._checkpoints.saves_at_end:
            is_long_enough = (ends_at - now).total_seconds() >= self._checkpoints.write_seconds(run.member[0])
            run.terminating_at = now if is_long_enough else None

    def _end(self, run: _StartedPod, now: datetime, *, is_done: bool) -> None:
        silent_at = self._workloads.kubelet_dead_since.get(run.pod.spec.node_name or "")
        ended_at = now if silent_at is None else max(run.started_at, min(now, silent_at))
        ran_seconds = (ended_at - run.started_at).total_seconds()
        self._ended_runs.append(PodRun(run.pod, run.started_at, ended_at))
        member = self._member(run.pod)
        if member is None:
            return
        member.ran_seconds += ran_seconds
        if is_done:
            member.ended_at = now
            job = self._jobs[run.member[0]]
            if job.is_done:
                self._job_ended()
            return
        if silent_at is None and run.pod.metadata.uid not in self._disrupted:
            self._evicted_count += 1  # its Job was suspended, which Kubernetes does not call a disruption
        is_checkpointing = self._jobs[run.member[0]].request.workload_type == CHECKPOINTING_WORKLOAD
        saved = self._saved_of(run, member, ended_at) if is_checkpointing else 0.0
        self._lost_gpu_seconds += (member.saved_seconds + ran_seconds - saved) * run.gpu_count
        member.saved_seconds = saved

    def write_seconds(self, pod: core.Pod) -> float | None:
        """Return how long a save of this pod takes; None: its work does not checkpoint."""
        job = self._jobs.get(pod.metadata.labels.get(labels.JOB_ID, ""))
        if job is None or job.request.workload_type != CHECKPOINTING_WORKLOAD:
            return None
        return self._checkpoints.write_seconds(str(job.request.job_id))

    def _saved_of(self, run: _StartedPod, member: _Member, ended_at: datetime) -> float:
        """Return the saved progress of the member at the end of this run."""
        every, write_seconds = self._checkpoints.every_seconds, self._checkpoints.write_seconds(run.member[0])
        written = member.saved_seconds + (ended_at - run.started_at).total_seconds() - write_seconds
        saved = max(member.saved_seconds, written // every * every)
        # On a requested save the machine may stop before it is written; a terminating pod stops after its save.
        began = [at for at in run.save_requests.values() if (ended_at - at).total_seconds() >= write_seconds]
        if run.terminating_at is not None:
            began.append(min(run.terminating_at, ended_at))
        for began_at in began:
            saved = max(saved, member.saved_seconds + (began_at - run.started_at).total_seconds())
        return saved

    def _job_ended(self) -> None:
        self._open_count -= 1
        self.last_ended_at = self._cluster.now()

    def _member(self, pod: core.Pod) -> _Member | None:
        job = self._jobs.get(pod.metadata.labels.get(labels.JOB_ID, ""))
        return None if job is None else job.members.get(member_of(pod))

    # ---- score

    def score(self, *, world: str, system: str, began_at: datetime, hours: float, broken: Sequence[str] = ()) -> Score:
        """Return the score up to the end of the hours and of the last job; up to now where jobs are unfinished."""
        until = began_at + timedelta(hours=hours)
        if self._open_count:
            until = self._cluster.now()
        elif self.last_ended_at is not None:
            until = max(until, self.last_ended_at)
        ended = [min(machine.terminated_at or until, until) for machine in self._cloud.machines]
        billed = [
            (machine, ended_at, (ended_at - machine.launched_at).total_seconds())
            for machine, ended_at in zip(self._cloud.machines, ended, strict=True)
            if ended_at > machine.launched_at
        ]
        runs = [*self._ended_runs, *(PodRun(run.pod, run.started_at, until) for run in self._runs.values())]
        micro_usd = micro_usd_by_cause(
            ((machine, ended_at) for machine, ended_at, _ in billed), runs, self._node_history, self._cloud.listed()
        )
        used_seconds = sum(
            max(0.0, (min(run.to_at, until) - run.from_at).total_seconds()) * pod_requests(run.pod).gpu_count
            for run in runs
        )
        return Score(
            world=world,
            system=system,
            hours=_hours((until - began_at).total_seconds()),
            cost_usd=round(sum(micro_usd.values()) / MICRO_USD_PER_USD, 2),
            waiting=self._waiting(until),
            node_hours=_hours(sum(seconds for _, _, seconds in billed)),
            gpu_hours_bought=_hours(sum(machine.offer.resources.gpu_count * seconds for machine, _, seconds in billed)),
            gpu_hours_used=_hours(used_seconds),
            lost_gpu_hours=_hours(self._lost_gpu_seconds),
            evicted_count=self._evicted_count,
            interrupted_count=self._interrupted_count,
            jobs_count=len(self._jobs),
            failed_count=sum(job.failed_at is not None for job in self._jobs.values()),
            unfinished_count=self._open_count,
            interrupted_jobs_count=sum(job.is_interrupted for job in self._jobs.values()),
            recovered_jobs_count=sum(job.is_interrupted and job.is_done for job in self._jobs.values()),
            storm_ratio=storm_ratio(
                BilledMachine(machine.offer, machine.launched_at, ended_at) for machine, ended_at, _ in billed
            ),
            broken=tuple(broken),
            micro_usd_by_cause={str(cause): amount for cause, amount in micro_usd.items()},
        )

    def _waiting(self, until: datetime) -> dict[str, Waiting]:
        by_class: dict[str, list[float]] = {}
        for job in self._jobs.values():
            waited = max(self._waited(job, member, until) for member in job.members.values())
            by_class.setdefault(class_of(job.request), []).append(waited)
            by_class.setdefault(ALL, []).append(waited)
        still_waiting = [(until - since).total_seconds() for since in self._replicas.values()]
        if replicas := [*self._replicas_waited, *still_waiting]:
            by_class[SERVING] = replicas
        return {name: waiting_of(waits) for name, waits in sorted(by_class.items())}

    def _waited(self, job: _Job, member: _Member, until: datetime) -> float:
        ended_at = member.ended_at or job.failed_at or until
        running = (
            (until - run.started_at).total_seconds()
            for run in self._runs.values()
            if job.members.get(run.member) is member
        )
        return max(0.0, (ended_at - job.requested_at).total_seconds() - member.ran_seconds - sum(running))


def class_of(request: JobRequested) -> str:
    """Return the name of the request's priority."""
    priority = request.priority
    return priority if isinstance(priority, str) else _NAMES.get(priority, str(priority))


def waiting_of(waits: Sequence[float]) -> Waiting:
    """Return the statistics of at least one duration; quantiles by nearest rank."""
    ordered = sorted(waits)
    return Waiting(
        count=len(ordered),
        mean_seconds=round(sum(ordered) / len(ordered), 1),
        p50_seconds=round(_rank(ordered, 0.5), 1),
        p95_seconds=round(_rank(ordered, 0.95), 1),
        max_seconds=round(ordered[-1], 1),
    )


def _rank(ordered: Sequence[float], share: float) -> float:
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def _hours(seconds: float) -> float:
    return round(seconds / 3600.0, 3)
