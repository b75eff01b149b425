"""The Job controller: creates pods, counts how they end, replaces evicted ones, and finishes jobs."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from gpu_autoscaler.simcluster.answers import ApiRefusal
from gpu_autoscaler.simcluster.api import Api, DeleteOptions
from gpu_autoscaler.simcluster.controllers.protocol import Agenda, Recorder
from gpu_autoscaler.simcluster.kinds import JOBS, PODS
from gpu_autoscaler.simcluster.objects import (
    Json,
    clone,
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

INDEX_KEY = "batch.kubernetes.io/job-completion-index"
BACKOFF_SECONDS = 10.0  # DefaultJobPodFailureBackOff, doubled with every failure in a row
BACKOFF_SECONDS_MAX = 600.0  # MaxJobPodFailureBackOff

Action = Literal["Count", "Ignore", "FailJob"]


@dataclass(slots=True)
class Ledger:
    """State of a job's pods beyond those that still exist."""

    settled: set[str] = field(default_factory=set)  # uids that need no more counting
    vanished: dict[str, Json] = field(default_factory=dict)  # by uid: deleted before they were counted
    succeeded_count: int = 0
    failed_count: int = 0
    done_indexes: set[int] = field(default_factory=set)
    failures_in_a_row: int = 0
    create_after: datetime | None = None

    def succeeded(self, job: Json) -> int:
        return len(self.done_indexes) if is_indexed(job) else self.succeeded_count


def is_indexed(job: Json) -> bool:
    """Return whether each completion of the job has its own index."""
    return bool(job["spec"].get("completionMode") == "Indexed")


def index_of(pod: Json) -> int | None:
    """Return the pod's completion index, None where it has none."""
    text = (pod["metadata"].get("annotations") or {}).get(INDEX_KEY, "")
    return int(text) if text.isdigit() else None


def is_active(pod: Json, job: Json) -> bool:
    """Return whether the pod still takes one of the job's places.

    A terminating pod is replaced at once, unless the job asks to wait until it has failed.
    """
    if is_finished(pod):
        return False
    return not is_terminating(pod) or job["spec"].get("podReplacementPolicy") == "Failed"


def action_for(pod: Json, job: Json) -> tuple[Action, str]:
    """Return what a failed pod means for its job, and the message where the job fails by it."""
    rules = (job["spec"].get("podFailurePolicy") or {}).get("rules") or ()
    for number, rule in enumerate(rules):
        why = _rule_match(rule, pod)
        if why:
            action: Action = rule["action"] if rule["action"] in ("Ignore", "FailJob") else "Count"
            name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
            return action, f"{why.format(name=name)} matching {rule['action']} rule at index {number}"
    return "Count", ""


def _rule_match(rule: Json, pod: Json) -> str:
    """Return how the rule matches the pod, "" where it does not."""
    status = pod.get("status") or {}
    for wanted in rule.get("onPodConditions") or ():
        for pod_condition in status.get("conditions") or ():
            if pod_condition["type"] == wanted["type"] and pod_condition["status"] == wanted.get("status", "True"):
                return f"Pod {{name}} has condition {pod_condition['type']}"
    codes: Json = rule.get("onExitCodes") or {}
    for container in (status.get("containerStatuses") or ()) if codes else ():
        ended = container.get("state", {}).get("terminated")
        if not ended or ended["exitCode"] == 0 or codes.get("containerName", container["name"]) != container["name"]:
            continue
        if (ended["exitCode"] in codes["values"]) is (codes["operator"] == "In"):
            return f"Container {container['name']} for pod {{name}} failed with exit code {ended['exitCode']}"
    return ""


def backoff_seconds(failures_in_a_row: int) -> float:
    """Return the wait before the next pod after this many consecutive failures."""
    return min(BACKOFF_SECONDS * 2.0 ** (failures_in_a_row - 1), BACKOFF_SECONDS_MAX) if failures_in_a_row else 0.0


def indexes_text(indexes: Iterable[int]) -> str:
    """Return indexes as the status shows them: `0,1,3-5`."""
    runs: list[list[int]] = []
    for index in sorted(indexes):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def places_to_fill(job: Json, ledger: Ledger, active: Sequence[Json]) -> list[int | None]:
    """Return the indexes of the pods to create now; None for each pod of a job without indexes."""
    spec = job["spec"]
    parallelism, completions = int(spec.get("parallelism", 1)), spec.get("completions")
    if is_indexed(job):
        taken = {index_of(pod) for pod in active} | ledger.done_indexes
        free: list[int | None] = [index for index in range(completions or 0) if index not in taken]
        return free[: max(0, parallelism - len(active))]
    wanted = parallelism if completions is None else min(parallelism, completions - ledger.succeeded_count)
    if completions is None and ledger.succeeded_count:
        wanted = 0  # a work queue: once one pod has succeeded, no new ones start
    return [None] * max(0, wanted - len(active))


def surplus(job: Json, ledger: Ledger, active: Sequence[Json]) -> list[Json]:
    """Return the pods that are too many after parallelism went down; the youngest go."""
    parallelism, completions = int(job["spec"].get("parallelism", 1)), job["spec"].get("completions")
    allowed = parallelism if completions is None else min(parallelism, completions - ledger.succeeded(job))
    oldest_first = sorted(active, key=lambda pod: int(pod["metadata"]["resourceVersion"]))
    return oldest_first[max(0, allowed) :] if len(active) > max(0, allowed) else []


def pod_for(job: Json, index: int | None) -> Json:
    """Return the pod to create for a job's place."""
    template: Json = clone(job["spec"]["template"])
    metadata, spec = template.get("metadata") or {}, template["spec"]
    name = job["metadata"]["name"]
    if index is not None:
        for field_name in ("labels", "annotations"):
            metadata[field_name] = {**(metadata.get(field_name) or {}), INDEX_KEY: str(index)}
        spec["hostname"] = f"{name}-{index}"
        source = {"apiVersion": "v1", "fieldPath": f"metadata.labels['{INDEX_KEY}']"}
        entry = {"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef": source}}
        for container in spec["containers"]:
            container["env"] = [*(container.get("env") or []), entry]
    metadata["generateName"] = f"{name}-" if index is None else f"{name}-{index}-"
    metadata.pop("name", None)
    metadata["ownerReferences"] = [JOBS.controller_reference(job)]
    return {"metadata": metadata, "spec": spec}


def is_pod_of(pod: Json, job: Json) -> bool:
    """Return whether the job controls the pod."""
    return controller_uid(pod) == str(job["metadata"]["uid"])


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
