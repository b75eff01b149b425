"""Checkpointing work: how often it saves, how long a save takes, and how it reacts to a drain.

Jobs of one workload type checkpoint, all others restart from zero. A checkpoint holds the progress at its start; work
continues during the write. The durations are fixtures; real frameworks checkpoint every few minutes to every few hours.
"""

import random
from collections.abc import Callable
from functools import partial

import msgspec
from msgspec.structs import replace

from gpu_autoscaler.kube.protocol import PODS
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.sim.cluster.controllers import Workloads, is_ready, member_of
from gpu_autoscaler.sim.cluster.objects import Entry
from gpu_autoscaler.sim.cluster.scheduler import FINISHED

CHECKPOINTING_WORKLOAD = "training"
SAVED_EVERY_SECONDS = 1800.0
SAVE_SECONDS = 20.0


class CheckpointSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoint settings of the work of a scenario."""

    every_seconds: float = SAVED_EVERY_SECONDS
    write_seconds_min: float = SAVE_SECONDS
    write_seconds_max: float = SAVE_SECONDS
    saves_on_request: bool = True  # saves when the annotation requests it
    annotates: bool = False  # annotates its pod when it has saved, as `can_save` of the core reads it
    saves_at_end: bool = True  # saves on termination if the grace period is long enough

    def write_seconds(self, job_id: str) -> float:
        """Return the duration of each save of this job, log-uniformly distributed over jobs."""
        share = random.Random(f"write/{job_id}").random()
        return float(self.write_seconds_min * (self.write_seconds_max / self.write_seconds_min) ** share)


# In runs with faults half of the training jobs checkpoint, each with its own duration.
FAULT_RUN_CHECKPOINTS = CheckpointSettings(write_seconds_min=5.0, write_seconds_max=90.0, annotates=True)


def checkpoint_write_seconds(pod: core.Pod) -> float | None:
    """Return the duration of a save of the pod's job in a run with faults; None: it does not checkpoint."""
    job_id = pod.metadata.labels.get(labels.JOB_ID, "")
    trains = labels.workload_type_of(pod.metadata.labels) == CHECKPOINTING_WORKLOAD
    takes_part = trains and random.Random(f"saves/{job_id}").random() < 0.5
    return FAULT_RUN_CHECKPOINTS.write_seconds(job_id) if takes_part else None


class CheckpointingPods:
    """Pods that annotate their checkpoints: an empty value first, then the end of each requested save.

    A member's next pod resumes from what was saved (`saved_seconds`): a save that is annotated has happened.
    """

    def __init__(self, workloads: Workloads, write_seconds: Callable[[core.Pod], float | None]) -> None:
        """`write_seconds`: the duration of a save of the pod; None: it does not checkpoint."""
        self._workloads = workloads
        self._cluster = workloads.cluster
        self._write_seconds = write_seconds
        self._announced: set[str] = set()
        self._requested: set[tuple[str, str]] = set()  # pod uid and deadline
        self._saved_seconds: dict[tuple[str, str], float] = {}  # progress by member
        self._resumed_seconds: dict[str, float] = {}  # progress at the start of each pod, by uid
        self._cluster.listen(self._on_change)

    def saved_seconds(self, pod: core.Pod) -> float:
        """Return the progress with which this pod starts: what former pods of its member saved."""
        return self._resumed_seconds.get(pod.metadata.uid, 0.0)

    def _on_change(self, plural: str, entry: Entry) -> None:
        pod = entry.object
        if plural != PODS.plural or entry.is_deleted or not isinstance(pod, core.Pod) or not is_ready(pod):
            return
        seconds = self._write_seconds(pod)
        if seconds is None:
            return
        annotations, uid = pod.metadata.annotations, pod.metadata.uid
        resumed = self._resumed_seconds.setdefault(uid, self._saved_seconds.get(member_of(pod), 0.0))
        if labels.CHECKPOINTED_AT not in annotations and uid not in self._announced:
            self._announced.add(uid)
            self._workloads.loop.call_later(0.0, partial(self._annotate, pod))
        request = (uid, annotations.get(labels.CHECKPOINT_REQUESTED, ""))
        if request[1] and request not in self._requested:
            self._requested.add(request)
            now = self._cluster.now()
            progress = resumed + (now - (pod.status.start_time or now)).total_seconds()
            self._workloads.loop.call_later(seconds, partial(self._annotate, pod, saved_seconds=progress))

    def _annotate(self, before: core.Pod, *, saved_seconds: float | None = None) -> None:
        """Annotate the end of a save with this progress; None: that the pod can save."""
        pod = self._cluster.current(PODS, before)
        if pod is None or pod.status.phase in FINISHED or pod.spec.node_name in self._workloads.kubelet_dead_since:
            return
        if saved_seconds is not None:
            self._saved_seconds[member_of(pod)] = saved_seconds
        checkpoint = {labels.CHECKPOINTED_AT: "" if saved_seconds is None else self._cluster.now().isoformat()}
        annotations = {**pod.metadata.annotations, **checkpoint}
        self._cluster.put(PODS, replace(pod, metadata=replace(pod.metadata, annotations=annotations)))
