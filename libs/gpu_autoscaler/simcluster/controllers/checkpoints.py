"""Programs that save on request: running pods that have the annotation `checkpointed-at`, as trainers write it.

A save takes `save-seconds` and is then annotated. It holds the progress at the request; the next pod of the same Job
and index resumes from there.
"""

from datetime import datetime, timedelta
from functools import partial
from typing import NamedTuple

from gpu_autoscaler.model import labels
from gpu_autoscaler.simcluster.api import Api
from gpu_autoscaler.simcluster.controllers.protocol import Agenda
from gpu_autoscaler.simcluster.kinds import JOBS, PODS
from gpu_autoscaler.simcluster.objects import (
    Json,
    controller_uid,
    is_terminating,
    key_of,
    phase_of,
    seconds_in_annotation,
    stamp_micro,
)
from gpu_autoscaler.simcluster.store import Change

SAVE_SECONDS = 20.0  # without the annotation `save-seconds`
_INDEX = "batch.kubernetes.io/job-completion-index"


class _Start(NamedTuple):
    """When the program of a pod began, and with which progress."""

    at: datetime
    resumed_seconds: float


class _Save(NamedTuple):
    """A save that ends later."""

    key: str
    uid: str
    progress_seconds: float


class Checkpoints:
    """All programs that save, as one controller."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._agenda: Agenda[_Save] = Agenda()
        self._starts: dict[str, _Start] = {}  # by pod uid
        self._requests: dict[str, str] = {}  # the last request of each pod, by pod uid
        self._saved_seconds: dict[str, dict[str, float]] = {}  # progress by Job uid and index

    def begin(self, pod: Json, now: datetime) -> float:
        """Return the seconds of work that the program need not repeat, as it starts."""
        job_uid, index = _member_of(pod)
        start = _Start(now, self._saved_seconds.get(job_uid, {}).get(index, 0.0))
        if labels.CHECKPOINTED_AT in _annotations(pod):
            self._starts[pod["metadata"]["uid"]] = start
        return start.resumed_seconds

    def on_change(self, change: Change) -> None:
        item, uid = change.record.object, change.record.object["metadata"]["uid"]
        if change.type == "DELETED":
            self._starts.pop(uid, None)
            self._requests.pop(uid, None)
            if change.table == JOBS.table:
                self._saved_seconds.pop(uid, None)
        elif change.table == PODS.table and uid in self._starts and _is_running(item):
            self._asked(item, uid)

    def step(self, now: datetime) -> None:
        for save in self._agenda.take_due(now):
            pod = self._api.find(PODS, save.key)
            if pod is None or pod["metadata"]["uid"] != save.uid or not _is_running(pod):
                continue
            job_uid, index = _member_of(pod)
            self._saved_seconds.setdefault(job_uid, {})[index] = save.progress_seconds
            self._api.modify(PODS, save.key, partial(_annotate, saved_at=now))

    def _asked(self, pod: Json, uid: str) -> None:
        request = _annotations(pod).get(labels.CHECKPOINT_REQUESTED)
        if not request or self._requests.get(uid) == request:
            return
        self._requests[uid] = request
        seconds, now, start = seconds_in_annotation(pod, "save-seconds"), self._api.now(), self._starts[uid]
        ends_at = now + timedelta(seconds=SAVE_SECONDS if seconds is None else seconds)
        progress_seconds = start.resumed_seconds + (now - start.at).total_seconds()
        self._agenda.add(ends_at, _Save(key_of(pod), uid, progress_seconds))


def _annotate(pod: Json, saved_at: datetime) -> None:
    pod["metadata"]["annotations"][labels.CHECKPOINTED_AT] = stamp_micro(saved_at)


def _is_running(pod: Json) -> bool:
    return phase_of(pod) == "Running" and not is_terminating(pod)


def _member_of(pod: Json) -> tuple[str, str]:
    """Return the Job and the index of a pod; a pod of its own is no other pod's member."""
    return controller_uid(pod) or str(pod["metadata"]["uid"]), str(_annotations(pod).get(_INDEX, ""))


def _annotations(pod: Json) -> Json:
    return pod["metadata"].get("annotations") or {}
