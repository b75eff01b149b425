"""The Job controller: creates pods, counts how they end, replaces evicted ones, and finishes jobs."""

import itertools
from datetime import datetime, timedelta

from gpu_autoscaler.simcluster.answers import ApiRefusal
from gpu_autoscaler.simcluster.api import Api, DeleteOptions
from gpu_autoscaler.simcluster.controllers.job_rules import (
    Ledger,
    action_for,
    backoff_seconds,
    index_of,
    indexes_text,
    is_active,
    is_indexed,
    is_pod_of,
    places_to_fill,
    pod_for,
    surplus,
)
from gpu_autoscaler.simcluster.controllers.protocol import Agenda
from gpu_autoscaler.simcluster.controllers.recorder import Recorder
from gpu_autoscaler.simcluster.kinds import JOBS, PODS
from gpu_autoscaler.simcluster.objects import (
    Json,
    controller_uid,
    is_finished,
    is_terminating,
    is_true,
    key_of,
    moment_of,
    phase_of,
    set_condition,
    stamp,
)
from gpu_autoscaler.simcluster.store import Change

PODS_PER_SYNC_MAX = 500  # MaxPodCreateDeletePerSync of the real controller
JOBS_PER_STEP_MAX = 50  # a step must not block the event loop; the rest follows in the next

_End = tuple[str, str]  # reason, message


class Jobs:
    """Reconciles the pods of every job with its spec."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._recorder = Recorder(api, "job-controller")
        self._ledgers: dict[str, Ledger] = {}  # by job uid
        self._key_of_uid: dict[str, str] = {}
        self._stale: dict[str, None] = {}
        self._later: Agenda[str] = Agenda()

    def on_change(self, change: Change) -> None:
        """Record changed jobs, and jobs whose pods changed."""
        key, item = change.record.key, change.record.object
        if change.table == JOBS.table:
            uid = item["metadata"]["uid"]
            if change.type == "DELETED":
                self._ledgers.pop(uid, None)
                self._key_of_uid.pop(uid, None)
            else:
                self._key_of_uid[uid] = key
                self._stale[key] = None
        elif change.table == PODS.table:
            owner = controller_uid(item)
            if owner in self._key_of_uid:
                self._stale[self._key_of_uid[owner]] = None
                if change.type == "DELETED":
                    self._ledger(owner).vanished[item["metadata"]["uid"]] = item

    def step(self, now: datetime) -> None:
        """Reconcile the jobs that need it."""
        for key in self._later.take_due(now):
            self._stale[key] = None
        for key in list(itertools.islice(self._stale, JOBS_PER_STEP_MAX)):
            del self._stale[key]
            job = self._api.find(JOBS, key)
            if job is not None and not is_terminating(job):
                self._sync(key, job, now)

    def _ledger(self, uid: str) -> Ledger:
        return self._ledgers.setdefault(uid, Ledger())

    def _sync(self, key: str, job: Json, now: datetime) -> None:
        ledger = self._ledger(job["metadata"]["uid"])
        pods = [pod for pod in self._api.owned_by(PODS, job["metadata"]["uid"]) if is_pod_of(pod, job)]
        if is_true(job, "Complete") or is_true(job, "Failed"):
            self._after_the_end(key, job, pods, ledger, now)
            return
        end = self._count(job, ledger, pods, now) or self._overdue(key, job, now)
        if end is None and ledger.failed_count > job["spec"]["backoffLimit"]:
            end = ("BackoffLimitExceeded", "Job has reached the specified backoff limit")
        if end is not None:
            self._delete(ledger, [pod for pod in pods if not is_finished(pod)])
            self._write(key, job, ledger, now, failure=end)
        elif job["spec"].get("suspend"):
            self._delete(ledger, [pod for pod in pods if not is_finished(pod)])
            self._write(key, job, ledger, now)
        else:
            active = [pod for pod in pods if is_active(pod, job)]
            complete = self._is_complete(job, ledger, active)
            if complete:
                self._delete(ledger, active)
            else:
                self._delete(ledger, surplus(job, ledger, active))
                self._create(key, job, ledger, active, now)
            self._write(key, job, ledger, now, complete=complete)

    def _count(self, job: Json, ledger: Ledger, pods: list[Json], now: datetime) -> _End | None:
        """Settle every pod that ended since; return the end of the job if a failed pod causes it."""
        gone, ledger.vanished = ledger.vanished, {}
        end: _End | None = None
        has_policy = bool(job["spec"].get("podFailurePolicy"))
        for pod in (*gone.values(), *pods):
            uid, phase = pod["metadata"]["uid"], phase_of(pod)
            # Without a failure policy a pod counts as failed as soon as its deletion begins.
            lost = phase not in ("Succeeded", "Failed") and (uid in gone or (is_terminating(pod) and not has_policy))
            if uid in ledger.settled or not (lost or is_finished(pod)):
                continue
            ledger.settled.add(uid)
            if phase == "Succeeded":
                self._count_success(ledger, pod)
                continue
            action, message = action_for(pod, job)
            if action == "FailJob":
                end = end or ("PodFailurePolicy", message)
            if action != "Ignore":
                ledger.failed_count += 1
                ledger.failures_in_a_row += 1
                ledger.create_after = now + timedelta(seconds=backoff_seconds(ledger.failures_in_a_row))
        ledger.settled.difference_update(gone)
        return end

    @staticmethod
    def _count_success(ledger: Ledger, pod: Json) -> None:
        ledger.succeeded_count += 1
        ledger.failures_in_a_row = 0
        index = index_of(pod)
        if index is not None:
            ledger.done_indexes.add(index)

    def _overdue(self, key: str, job: Json, now: datetime) -> _End | None:
        """Return the end of a job that exceeded its deadline; schedule a check otherwise."""
        seconds, started = job["spec"].get("activeDeadlineSeconds"), job["status"].get("startTime")
        if seconds is None or started is None or job["spec"].get("suspend"):
            return None
        deadline = moment_of(started) + timedelta(seconds=seconds)
        if now >= deadline:
            return "DeadlineExceeded", "Job was active longer than specified deadline"
        self._later.add(deadline, key)
        return None

    @staticmethod
    def _is_complete(job: Json, ledger: Ledger, active: list[Json]) -> bool:
        completions = job["spec"].get("completions")
        if completions is None:
            return ledger.succeeded_count > 0 and not active
        return ledger.succeeded(job) >= int(completions)

    def _create(self, key: str, job: Json, ledger: Ledger, active: list[Json], now: datetime) -> None:
        places = places_to_fill(job, ledger, active)
        if places and ledger.create_after is not None and ledger.create_after > now:
            self._later.add(ledger.create_after, key)
            return
        namespace = job["metadata"]["namespace"]
        for index in places[:PODS_PER_SYNC_MAX]:
            try:
                self._api.create(PODS, namespace, pod_for(job, index))
            except ApiRefusal as refusal:
                self._recorder.record(JOBS, job, "Warning", "FailedCreate", f"Error creating: {refusal}")
                self._later.add(now + timedelta(seconds=backoff_seconds(1)), key)
                return
        if len(places) > PODS_PER_SYNC_MAX:
            self._stale[key] = None

    def _delete(self, ledger: Ledger, pods: list[Json]) -> None:
        """Delete pods that the job no longer needs: they are not counted."""
        for pod in pods:
            ledger.settled.add(pod["metadata"]["uid"])
            if not is_terminating(pod):
                self._api.delete(PODS, key_of(pod), DeleteOptions(propagation="Background"))

    def _after_the_end(self, key: str, job: Json, pods: list[Json], ledger: Ledger, now: datetime) -> None:
        """Remove remaining pods, and the job itself after its time to live."""
        self._delete(ledger, [pod for pod in pods if not is_finished(pod)])
        ledger.vanished.clear()
        self._write(key, job, ledger, now)
        ttl = job["spec"].get("ttlSecondsAfterFinished")
        if ttl is None:
            return
        # Whoever writes a condition need not say since when.
        times = [entry.get("lastTransitionTime") for entry in job["status"]["conditions"]]
        ended = max((moment_of(time) for time in times if time is not None), default=now)
        due = ended + timedelta(seconds=ttl)
        if now >= due:
            self._api.delete(JOBS, key, DeleteOptions(propagation="Background"))
        else:
            self._later.add(due, key)

    def _write(
        self, key: str, job: Json, ledger: Ledger, now: datetime, *, failure: _End | None = None, complete: bool = False
    ) -> None:
        """Write the status; events for what begins and ends."""
        pods = self._api.owned_by(PODS, job["metadata"]["uid"])

        def write(new: Json) -> None:
            _count_pods(new, pods, ledger)
            _write_suspension(new, now)
            if failure is not None:
                _conclude(new, now, ("FailureTarget", "Failed"), failure)
            elif complete:
                end = ("CompletionsReached", "Reached expected number of succeeded pods")
                _conclude(new, now, ("SuccessCriteriaMet", "Complete"), end)
                new["status"]["completionTime"] = stamp(now)

        self._api.modify(JOBS, key, write)
        if failure is not None:
            self._recorder.record(JOBS, job, "Warning", failure[0], failure[1])
        elif complete:
            self._recorder.record(JOBS, job, "Normal", "Completed", "Job completed")


def _count_pods(job: Json, pods: list[Json], ledger: Ledger) -> None:
    """Write the counts; zero counts are left out where the real controller leaves them out."""
    running = [pod for pod in pods if not is_finished(pod)]
    status = job["status"]
    counts = {
        "active": sum(not is_terminating(pod) for pod in running),
        "succeeded": ledger.succeeded(job),
        "failed": ledger.failed_count,
    }
    for name, count in counts.items():
        status.pop(name, None)
        if count:
            status[name] = count
    status["ready"] = sum(is_true(pod, "Ready") and not is_terminating(pod) for pod in running)
    status["terminating"] = sum(map(is_terminating, running))
    status["uncountedTerminatedPods"] = {}
    if is_indexed(job) and ledger.done_indexes:
        status["completedIndexes"] = indexes_text(ledger.done_indexes)


def _write_suspension(job: Json, now: datetime) -> None:
    if is_true(job, "Complete") or is_true(job, "Failed"):
        return
    if job["spec"].get("suspend"):
        if not is_true(job, "Suspended"):
            _set_job_condition(job, now, "Suspended", "True", ("JobSuspended", "Job suspended"))
        job["status"].pop("startTime", None)
        return
    if is_true(job, "Suspended"):
        _set_job_condition(job, now, "Suspended", "False", ("JobResumed", "Job resumed"))
    job["status"].setdefault("startTime", stamp(now))


def _conclude(job: Json, now: datetime, condition_types: tuple[str, ...], end: _End) -> None:
    for condition_type in condition_types:
        _set_job_condition(job, now, condition_type, "True", end)


def _set_job_condition(job: Json, now: datetime, condition_type: str, status: str, end: _End) -> None:
    at = stamp(now)
    set_condition(job, now, condition_type, status=status, lastProbeTime=at, reason=end[0], message=end[1])
