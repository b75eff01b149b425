"""What a run cost and what its work went through, read from the world itself: the same for whoever acted in it.

What is saved of work, and what is lost, follows from the habits in `saving.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.kube import wire
from gpu_autoscaler.kube.protocol import JOBS, PODS
from gpu_autoscaler.kube.translate.common import condition
from gpu_autoscaler.kube.translate.job import is_over
from gpu_autoscaler.kube.translate.pod import pod_requests
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.jobs import PRIORITY_NAMES
from gpu_autoscaler.model.money import MICRO_USD_PER_USD, cost_micro_usd
from gpu_autoscaler.sim.binding import FINISHED
from gpu_autoscaler.sim.cloud import Cloud
from gpu_autoscaler.sim.kubernetes import Entry
from gpu_autoscaler.sim.saving import SAVING_WORK, Saving
from gpu_autoscaler.sim.stakes import Held, storm_ratio
from gpu_autoscaler.sim.workloads import DISRUPTED, Workloads, is_ready

SERVING = "serving"  # the class of replicas that stay, beside the priorities of jobs
ALL = "all"  # jobs of every priority

_NAMES = {value: name for name, value in PRIORITY_NAMES.items()}


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """How long work of one class did not run though it was wanted: before its start, and after each interruption."""

    count: int
    mean_seconds: float
    p50_seconds: float
    p95_seconds: float
    max_seconds: float


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What one system made of one world, from its beginning to the end of its hours and of the last job."""

    world: str
    system: str
    hours: float
    cost_usd: float
    waiting: dict[str, Waiting]  # by priority, of replicas (`serving`), and of `all` jobs
    node_hours: float | None  # None: no nodes were chosen, as of a bound that is computed
    gpu_hours_bought: float | None
    gpu_hours_used: float
    lost_gpu_hours: float  # done, and to be done again
    evicted_count: int  # pods, by somebody's choice
    interrupted_count: int  # pods, because the cloud took their machine
    jobs_count: int
    failed_count: int
    unfinished_count: int  # when the run was given up
    interrupted_jobs_count: int = 0  # jobs with such a pod
    recovered_jobs_count: int = 0  # of them, those that ended well
    storm_ratio: float | None = None  # of the GPU-hours bought: those that one storm could have taken; None: no nodes
    broken: tuple[str, ...] = ()  # promises of our system that did not hold; none of others is asked

    @property
    def gpu_used_ratio(self) -> float | None:
        """GPU-hours in which work ran, of those that were bought."""
        return self.gpu_hours_used / self.gpu_hours_bought if self.gpu_hours_bought else None


@dataclass(slots=True)
class _Run:
    """One pod, from its start to its end."""

    pod: wire.Pod
    member: tuple[str, str]  # job and index; for replicas the group and the pod
    gpu_count: int
    started_at: datetime
    told_at: datetime | None = None  # to save
    ending_at: datetime | None = None  # told to end, with time enough to save


@dataclass(slots=True)
class _Member:
    """One place of a job, through all pods that held it."""

    saved_seconds: float = 0.0
    ran_seconds: float = 0.0
    ended_at: datetime | None = None


@dataclass(slots=True)
class _Job:
    """What was asked for, and its places."""

    request: JobRequested
    asked_at: datetime
    members: dict[tuple[str, str], _Member] = field(default_factory=dict)
    failed_at: datetime | None = None
    is_interrupted: bool = False

    @property
    def is_done(self) -> bool:
        """True once every place has run to its end."""
        return all(each.ended_at is not None for each in self.members.values())


class Tally:
    """Hears everything that changes in the cluster, and keeps the sums."""

    def __init__(self, workloads: Workloads, cloud: Cloud, saving: Saving | None = None) -> None:
        self._saving = saving or Saving()
        self.last_ended_at: datetime | None = None
        self._workloads = workloads
        self._cluster = workloads.cluster
        self._cloud = cloud
        self._jobs: dict[str, _Job] = {}
        self._open_count = 0
        self._runs: dict[str, _Run] = {}  # by uid of the pod
        self._replicas: dict[str, datetime] = {}  # that wait, since when
        self._replicas_waited: list[float] = []
        self._disrupted: set[str] = set()
        self._evicted_count = self._interrupted_count = 0
        self._used: list[tuple[datetime, datetime, int]] = []
        self._lost_gpu_seconds = 0.0
        self._cluster.listen(self._heard)
        workloads.saved_seconds = self.saved_seconds

    # ---- what happens

    def asked(self, request: JobRequested) -> None:
        """Somebody asked for a job."""
        assert request.job_id is not None, "a scene's jobs have ids"  # noqa: S101 - a bug of the scene
        job = self._jobs[request.job_id] = _Job(request, self._cluster.now())
        job.members = {(request.job_id, str(index)): _Member() for index in range(request.members)}
        self._open_count += 1

    def is_over(self) -> bool:
        """True once every job that was asked for has ended."""
        return self._open_count == 0

    def saved_seconds(self, pod: wire.Pod) -> float:
        """How much of its work the pod need not do again."""
        member = self._member(pod)
        return 0.0 if member is None else member.saved_seconds

    # ---- hearing

    def _heard(self, plural: str, entry: Entry) -> None:
        if plural == PODS.plural:
            assert isinstance(entry.object, wire.Pod)  # noqa: S101 - of this kind
            self._heard_pod(entry.object, is_deleted=entry.is_deleted)
        elif plural == JOBS.plural:
            assert isinstance(entry.object, wire.Job)  # noqa: S101 - of this kind
            self._heard_job(entry.object, is_deleted=entry.is_deleted)

    def _heard_job(self, job: wire.Job, *, is_deleted: bool) -> None:
        known = self._jobs.get(job.metadata.name)
        if known is not None and known.failed_at is None and not known.is_done and (is_deleted or is_over(job)):
            failed = condition(job.status.conditions, "Failed")
            if is_deleted or (failed is not None and failed.status == "True"):
                known.failed_at = self._cluster.now()
                self._ended()

    def _heard_pod(self, pod: wire.Pod, *, is_deleted: bool) -> None:
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
            self._note_told(run, pod, now)

    def _replica_waits(self, pod: wire.Pod, now: datetime, *, is_deleted: bool) -> None:
        if is_deleted or pod.metadata.deletion_timestamp is not None:
            self._replicas.pop(pod.metadata.uid, None)
        else:
            self._replicas.setdefault(pod.metadata.uid, now)

    def _count_disruption(self, pod: wire.Pod) -> None:
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

    def _begin(self, pod: wire.Pod, now: datetime) -> None:
        waited_since = self._replicas.pop(pod.metadata.uid, None)
        if waited_since is not None:
            self._replicas_waited.append((now - waited_since).total_seconds())
        self._runs[pod.metadata.uid] = _Run(pod, _place_of(pod), pod_requests(pod).gpu_count, now)

    def _note_told(self, run: _Run, pod: wire.Pod, now: datetime) -> None:
        is_asked = labels.CHECKPOINT_REQUESTED in pod.metadata.annotations
        if run.told_at is None and is_asked and self._saving.is_told:
            run.told_at = now
        ends_at = pod.metadata.deletion_timestamp
        if run.ending_at is None and ends_at is not None and self._saving.saves_at_end:
            is_long_enough = (ends_at - now).total_seconds() >= self._saving.write_seconds(run.member[0])
            run.ending_at = now if is_long_enough else None

    def _end(self, run: _Run, now: datetime, *, is_done: bool) -> None:
        silent_at = self._workloads.silent_since.get(run.pod.spec.node_name or "")
        ended_at = now if silent_at is None else max(run.started_at, min(now, silent_at))
        ran_seconds = (ended_at - run.started_at).total_seconds()
        self._used.append((run.started_at, ended_at, run.gpu_count))
        member = self._member(run.pod)
        if member is None:
            return
        member.ran_seconds += ran_seconds
        if is_done:
            member.ended_at = now
            job = self._jobs[run.member[0]]
            if job.is_done:
                self._ended()
            return
        saved = self._saved_of(run, member, ended_at) if self._saves(run) else 0.0
        self._lost_gpu_seconds += (member.saved_seconds + ran_seconds - saved) * run.gpu_count
        member.saved_seconds = saved

    def _saves(self, run: _Run) -> bool:
        return self._jobs[run.member[0]].request.workload_type == SAVING_WORK

    def write_seconds(self, pod: wire.Pod) -> float | None:
        """How long a save of this pod takes; None: its work starts over."""
        job = self._jobs.get(pod.metadata.labels.get(labels.JOB_ID, ""))
        if job is None or job.request.workload_type != SAVING_WORK:
            return None
        return self._saving.write_seconds(str(job.request.job_id))

    def _saved_of(self, run: _Run, member: _Member, ended_at: datetime) -> float:
        """How much of the member's work is saved when this run ends."""
        every, write_seconds = self._saving.every_seconds, self._saving.write_seconds(run.member[0])
        written = member.saved_seconds + (ended_at - run.started_at).total_seconds() - write_seconds
        saved = max(member.saved_seconds, written // every * every)
        for told_at in (run.told_at, run.ending_at):
            # A pod that is told to end stops when it has saved; the machine may have stopped before.
            is_in_time = told_at is not None and (
                told_at is run.ending_at or (ended_at - told_at).total_seconds() >= write_seconds
            )
            if told_at is not None and is_in_time:
                told = member.saved_seconds + (min(told_at, ended_at) - run.started_at).total_seconds()
                saved = max(saved, told)
        return saved

    def _ended(self) -> None:
        self._open_count -= 1
        self.last_ended_at = self._cluster.now()

    def _member(self, pod: wire.Pod) -> _Member | None:
        job = self._jobs.get(pod.metadata.labels.get(labels.JOB_ID, ""))
        return None if job is None else job.members.get(_place_of(pod))

    # ---- sums

    def score(self, *, world: str, system: str, began_at: datetime, hours: float, broken: Sequence[str] = ()) -> Score:
        """Return the sums of these hours, and on to the end of the last job; to now where some have not ended."""
        until = began_at + timedelta(hours=hours)
        if self._open_count:
            until = self._cluster.now()
        elif self.last_ended_at is not None:
            until = max(until, self.last_ended_at)
        machines = [
            (machine, max(0.0, (min(machine.terminated_at or until, until) - machine.launched_at).total_seconds()))
            for machine in self._cloud.machines
        ]
        cost = sum(
            cost_micro_usd(
                machine.price_micro_usd_per_hour, min(machine.terminated_at or until, until) - machine.launched_at
            )
            for machine, seconds in machines
            if seconds > 0
        )
        used = [*self._used, *((run.started_at, until, run.gpu_count) for run in self._runs.values())]
        used_seconds = sum(
            max(0.0, (min(ended_at, until) - started_at).total_seconds()) * count
            for started_at, ended_at, count in used
        )
        return Score(
            world=world,
            system=system,
            hours=_hours((until - began_at).total_seconds()),
            cost_usd=round(cost / MICRO_USD_PER_USD, 2),
            waiting=self._waiting(until),
            node_hours=_hours(sum(seconds for _, seconds in machines)),
            gpu_hours_bought=_hours(sum(each.offer.resources.gpu_count * seconds for each, seconds in machines)),
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
                Held(each.offer, each.launched_at, min(each.terminated_at or until, until)) for each, _ in machines
            ),
            broken=tuple(broken),
        )

    def _waiting(self, until: datetime) -> dict[str, Waiting]:
        by_class: dict[str, list[float]] = {}
        for job in self._jobs.values():
            waited = max(self._waited(job, member, until) for member in job.members.values())
            by_class.setdefault(class_of(job.request), []).append(waited)
            by_class.setdefault(ALL, []).append(waited)
        standing = [(until - since).total_seconds() for since in self._replicas.values()]
        if replicas := [*self._replicas_waited, *standing]:
            by_class[SERVING] = replicas
        return {name: waiting_of(waits) for name, waits in sorted(by_class.items())}

    def _waited(self, job: _Job, member: _Member, until: datetime) -> float:
        ended_at = member.ended_at or job.failed_at or until
        running = (
            (until - run.started_at).total_seconds()
            for run in self._runs.values()
            if job.members.get(run.member) is member
        )
        return max(0.0, (ended_at - job.asked_at).total_seconds() - member.ran_seconds - sum(running))


def class_of(request: JobRequested) -> str:
    """Return the name of the request's priority."""
    priority = request.priority
    return priority if isinstance(priority, str) else _NAMES.get(priority, str(priority))


def waiting_of(waits: Sequence[float]) -> Waiting:
    """Return the figures of these seconds, of which there is at least one; quantiles by nearest rank."""
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


def _place_of(pod: wire.Pod) -> tuple[str, str]:
    """The place that a pod holds: a Job's controller names its pods after Job, index and number."""
    job_id = pod.metadata.labels.get(labels.JOB_ID)
    name = pod.metadata.name
    return ("", name) if job_id is None else (job_id, name.rsplit("-", 2)[1])


def _hours(seconds: float) -> float:
    return round(seconds / 3600.0, 3)
