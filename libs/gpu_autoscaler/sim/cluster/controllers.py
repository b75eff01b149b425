"""Kubernetes controllers, the scheduler and the kubelets, driven by events; `simcluster` has the same in ticks.

Source: Kubernetes documentation, "Jobs", "Pod Lifecycle", "Pod disruption conditions" (read 2026-11-21).
"""

import random
from asyncio import TimerHandle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import msgspec
from msgspec.structs import replace

from gpu_autoscaler.kube.protocol import JOBS, NODES, PODS, SERVICES
from gpu_autoscaler.kube.translate.common import condition
from gpu_autoscaler.kube.translate.job import is_over
from gpu_autoscaler.kube.translate.pod import pod_requests
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.sim.cluster.objects import Entry, Kubernetes, is_true, with_condition, with_pod_condition
from gpu_autoscaler.sim.cluster.scheduler import FINISHED, allowed_nodes, fitting_nodes, free_capacity, has_pod_rules
from gpu_autoscaler.sim.cluster.scheduler_scores import best_node
from gpu_autoscaler.sim.virtual_time import VirtualLoop

DISRUPTED = "DisruptionTarget"
START_SECONDS = (2.0, 8.0)  # from binding to ready: image pull and container start
GARBAGE_COLLECTED_SECONDS = 20.0  # from a node object's deletion to garbage collection of its pods
REFUSED_SECONDS = 10.0  # until a Job whose pod was refused tries again
REACTION_SECONDS = 0.2  # until a controller reacts to a change


@dataclass(slots=True)
class Work:
    """A Job's controller's books."""

    job: core.Job
    manifest: dict[str, Any]
    created_count: int = 0
    done: set[int] = field(default_factory=set)
    pods: dict[int, core.Pod] = field(default_factory=dict)  # by index; the last one created for it
    deadline: TimerHandle | None = None  # of its active time, which restarts with each release

    @property
    def members_count(self) -> int:
        return int(self.manifest["spec"]["completions"])


class Workloads:
    """The controllers of pods and Jobs, the scheduler and the kubelets."""

    def __init__(self, cluster: Kubernetes, loop: VirtualLoop, rng: random.Random) -> None:
        self.cluster = cluster
        self.loop = loop
        self.works: dict[str, Work] = {}  # by Job uid
        self.completed: set[str] = set()  # names of Jobs whose members all completed
        self.ended_at: dict[str, datetime] = {}  # by name of Jobs that completed or failed by themselves
        self._rng = rng
        self.kubelet_dead_since: dict[str, datetime] = {}  # by name of nodes whose kubelet is dead
        # Progress that a new pod's predecessors saved, and whether a pod's volumes are reachable from a node.
        self.saved_seconds: Callable[[core.Pod], float] = lambda _: 0.0
        self.reaches: Callable[[core.Pod, core.Node], bool] = lambda _, __: True
        self.admits: Callable[[core.Pod], bool] = lambda _: True  # whether the API server creates the pod
        self.is_idle: Callable[[core.Pod], bool] = lambda _: False  # whether a pod leaves its GPUs idle
        self._is_scheduling = False
        cluster.listen(self._on_change)

    # ---- Jobs

    def create_job(self, namespace: str, manifest: Mapping[str, Any]) -> core.Job:
        """Create the Job; its pods follow once it is not suspended."""
        body: dict[str, Any] = msgspec.to_builtins(manifest)
        metadata_fields = body["metadata"]
        metadata = self.cluster.metadata(
            namespace, metadata_fields["name"], labels=dict(metadata_fields.get("labels", {}))
        )
        specification = msgspec.convert(body["spec"], core.JobSpecification)
        job = self.cluster.put(JOBS, core.Job(metadata=metadata, spec=specification))
        self.works[metadata.uid] = Work(job, body)
        if not specification.suspend:
            self._released(metadata.uid)
        return job

    def patch_job(self, job: core.Job, manifest: dict[str, Any]) -> core.Job:
        work = self.works[job.metadata.uid]
        work.manifest = manifest
        specification = msgspec.convert(manifest["spec"], core.JobSpecification)
        changed = work.job = self.cluster.put(JOBS, replace(job, spec=specification))
        if job.spec.suspend and not specification.suspend:
            self._released(job.metadata.uid)
        elif specification.suspend and not job.spec.suspend:
            self._suspended(work)
        return changed

    def delete_job(self, job: core.Job) -> None:
        """Delete the Job at once and its pods in the background."""
        work = self.works.pop(job.metadata.uid)
        self.cluster.remove(JOBS, work.job)
        self._delete_pods(work)
        for service in self.cluster.all(SERVICES):
            if any(owner.uid == job.metadata.uid for owner in service.metadata.owner_references):
                self.cluster.remove(SERVICES, service)

    def _delete_pods(self, work: Work) -> None:
        for pod in self._pods_of(work.job.metadata.uid):
            if pod.status.phase in FINISHED:
                self.cluster.remove(PODS, pod)
            else:
                self.delete(pod)

    def _suspended(self, work: Work) -> None:
        """Delete the pods of a suspended Job; none of them counts as failed."""
        if work.deadline is not None:
            work.deadline.cancel()
        for pod in self._pods_of(work.job.metadata.uid):
            if pod.status.phase not in FINISHED:
                self.delete(pod)
        self.loop.call_later(REACTION_SECONDS, self._count, work.job.metadata.uid)

    def _released(self, uid: str) -> None:
        seconds = self.works[uid].manifest["spec"].get("activeDeadlineSeconds")
        if seconds is not None:
            self.works[uid].deadline = self.loop.call_later(seconds, self._deadline_exceeded, uid)
        self.loop.call_later(REACTION_SECONDS, self._fill, uid)

    def _fill(self, uid: str) -> None:
        work = self.works.get(uid)
        if work is None or is_over(work.job) or work.job.spec.suspend:
            return
        for index in range(work.members_count):
            job_pod = work.pods.get(index)
            if index not in work.done and (job_pod is None or self.cluster.current(PODS, job_pod) is None):
                pod = self._new_pod(work, index)
                if not self.admits(pod):
                    self.loop.call_later(REFUSED_SECONDS, self._fill, uid)
                    return
                work.pods[index] = self.cluster.put(PODS, pod)

    def _new_pod(self, work: Work, index: int) -> core.Pod:
        template = work.manifest["spec"]["template"]
        work.created_count += 1
        metadata_fields, job = template["metadata"], work.job.metadata
        owner = core.OwnerReference(kind="Job", name=job.name, uid=job.uid, controller=True)
        metadata = self.cluster.metadata(
            job.namespace,
            f"{job.name}-{index}-{work.created_count}",
            labels=dict(metadata_fields.get("labels", {})),
            annotations=dict(metadata_fields.get("annotations", {})),
            owner_references=(owner,),
        )
        return core.Pod(metadata=metadata, spec=msgspec.convert(template["spec"], core.PodSpec))

    def _deadline_exceeded(self, uid: str) -> None:
        work = self.works.get(uid)
        if work is not None and not is_over(work.job):
            self._end_job(work, "Failed", "DeadlineExceeded", "Job was active longer than specified deadline")
            self._delete_pods(work)

    def _end_job(self, work: Work, condition_type: str, reason: str, message: str) -> None:
        now = self.cluster.now()
        conditions = with_condition(
            work.job.status.conditions, condition_type, "True", now, reason=reason, message=message
        )
        is_complete = condition_type == "Complete"
        status = replace(work.job.status, conditions=conditions, completion_time=now if is_complete else None, ready=0)
        self._put_job(work, status)
        self.ended_at[work.job.metadata.name] = now
        if is_complete:
            self.completed.add(work.job.metadata.name)
        kept_seconds = work.manifest["spec"].get("ttlSecondsAfterFinished")
        if kept_seconds is not None:
            self.loop.call_later(kept_seconds, self._expire, work.job.metadata.uid)

    def _expire(self, uid: str) -> None:
        work = self.works.get(uid)
        if work is not None:
            self.delete_job(work.job)

    def _put_job(self, work: Work, status: core.JobStatus) -> None:
        if status != work.job.status:
            work.job = self.cluster.put(JOBS, replace(work.job, status=status))

    def _count(self, uid: str) -> None:
        work = self.works.get(uid)
        if work is None or is_over(work.job):
            return
        pods = [pod for pod in self._pods_of(uid) if pod.status.phase not in FINISHED]
        ending_count = sum(pod.metadata.deletion_timestamp is not None for pod in pods)
        status = replace(
            work.job.status,
            active=len(pods) - ending_count,
            terminating=ending_count,
            ready=sum(map(is_ready, pods)),
            succeeded=len(work.done),
            conditions=self._suspension(work.job),
        )
        self._put_job(work, status)
        if len(work.done) == work.members_count:
            self._end_job(work, "Complete", "CompletionsReached", "Reached expected number of succeeded pods")

    def _suspension(self, job: core.Job) -> tuple[core.Condition, ...]:
        """Return the Job's conditions with its current suspension; a Job that never was suspended has no such
        condition.
        """
        current = condition(job.status.conditions, "Suspended")
        if current is None and not job.spec.suspend:
            return job.status.conditions
        return with_condition(
            job.status.conditions, "Suspended", "True" if job.spec.suspend else "False", self.cluster.now()
        )

    def _pods_of(self, owner_uid: str) -> list[core.Pod]:
        return [pod for pod in self.cluster.all(PODS) if controller_of(pod) == owner_uid]

    # ---- the scheduler

    def nodes(self) -> list[core.Node]:
        return self.cluster.all(NODES)

    def _on_change(self, plural: str, _: Entry) -> None:
        if plural in (PODS.plural, NODES.plural):
            self.request_scheduling()

    def request_scheduling(self) -> None:
        """A change may let a pod be bound."""
        if not self._is_scheduling:
            self._is_scheduling = True
            self.loop.call_later(REACTION_SECONDS, self._schedule)

    def _schedule(self) -> None:
        """Bind pods that fit, highest priority first, then oldest; mark the others unschedulable."""
        waiting = [pod for pod in self.cluster.all(PODS) if is_waiting(pod)]
        if waiting:
            nodes = self.cluster.all(NODES)
            free = free_capacity(nodes, self.cluster.all(PODS))
            for pod in sorted(waiting, key=lambda pod: -pod.spec.priority):
                candidates = allowed_nodes(pod, nodes, self.cluster.all(PODS)) if has_pod_rules(pod.spec) else nodes
                fitting = fitting_nodes(pod, candidates, free, self.reaches)
                if fitting:
                    name = best_node(pod, fitting, free, nodes, self.cluster.all(PODS)).metadata.name
                    free[name] -= pod_requests(pod)
                    self._bind(pod, name)
                else:
                    self._unschedulable(pod)
        self._is_scheduling = False

    def _unschedulable(self, pod: core.Pod) -> None:
        if condition(pod.status.conditions, "PodScheduled") is None:
            unbound = {"reason": "Unschedulable", "message": "no node has room for it"}
            self.cluster.put(PODS, with_pod_condition(pod, "PodScheduled", "False", self.cluster.now(), **unbound))

    def _bind(self, pod: core.Pod, node_name: str) -> None:
        scheduled = with_pod_condition(pod, "PodScheduled", "True", self.cluster.now())
        bound = self.cluster.put(PODS, replace(scheduled, spec=replace(pod.spec, node_name=node_name)))
        self.loop.call_later(self._rng.uniform(*START_SECONDS), self._start, bound)

    # ---- kubelets

    def _start(self, bound: core.Pod) -> None:
        pod = self._on_living_node(bound)
        if pod is None:
            return
        now = self.cluster.now()
        ready = with_pod_condition(pod, "Ready", "True", now)
        self.cluster.put(PODS, replace(ready, status=replace(ready.status, phase="Running", start_time=now)))
        self._changed(pod)
        run_seconds = pod.metadata.annotations.get(labels.SIMULATED_RUN_SECONDS)
        if run_seconds is not None:
            left_seconds = max(0.0, float(run_seconds) - self.saved_seconds(pod))
            self.loop.call_later(left_seconds, self._succeed, bound)

    def _succeed(self, bound: core.Pod) -> None:
        pod = self._on_living_node(bound)
        if pod is None:
            return
        self._finish(pod, "Succeeded")
        work = self.works.get(controller_of(pod) or "")
        if work is not None:
            work.done.update(index for index, job_pod in work.pods.items() if job_pod.metadata.uid == pod.metadata.uid)
        self._changed(pod)

    def _on_living_node(self, bound: core.Pod) -> core.Pod | None:
        """Return the pod if its kubelet can still act on it."""
        pod = self.cluster.current(PODS, bound)
        if pod is None or pod.metadata.deletion_timestamp is not None or pod.status.phase in FINISHED:
            return None
        return None if bound.spec.node_name in self.kubelet_dead_since else pod

    def _finish(self, pod: core.Pod, phase: Any) -> core.Pod:  # noqa: ANN401 - a literal of the wire
        now = self.cluster.now()
        ended = core.ContainerStatus(state=core.ContainerState(terminated=core.Terminated(finished_at=now)))
        pod = with_pod_condition(pod, "Ready", "False", now)
        return self.cluster.put(
            PODS, replace(pod, status=replace(pod.status, phase=phase, container_statuses=(ended,)))
        )

    def _changed(self, pod: core.Pod) -> None:
        owner = controller_of(pod)
        if owner in self.works:
            self.loop.call_later(REACTION_SECONDS, self._count, owner)

    # ---- deletion

    def disrupt(self, pod: core.Pod, *, grace_seconds: float | None = None) -> None:
        """Delete the pod like an eviction or node loss: its Job does not count it as failed."""
        current = self.cluster.current(PODS, pod)
        if current is not None:
            self.delete(with_pod_condition(current, DISRUPTED, "True", self.cluster.now()), grace_seconds)

    def delete(self, pod: core.Pod, grace_seconds: float | None = None) -> None:
        """Start the pod's termination, or shorten its grace period."""
        grace = pod.spec.termination_grace_period_seconds if grace_seconds is None else grace_seconds
        until = self.cluster.now() + timedelta(seconds=grace)
        current = pod.metadata.deletion_timestamp
        if current is not None and current <= until:
            return
        terminating = self.cluster.put(PODS, replace(pod, metadata=replace(pod.metadata, deletion_timestamp=until)))
        stop_seconds = 0.0 if pod.spec.node_name is None else self._rng.uniform(0.2, max(0.2, grace))
        self.loop.call_later(stop_seconds, self._stopped, terminating)

    def _stopped(self, terminating: core.Pod) -> None:
        pod = self.cluster.current(PODS, terminating)
        if pod is not None and pod.spec.node_name not in self.kubelet_dead_since:
            self.remove_pod(pod)

    def remove_pod(self, pod: core.Pod) -> None:
        """Remove the pod object; its owner replaces it unless the pod counts as failed."""
        if pod.status.phase not in FINISHED:
            pod = self._finish(pod, "Failed")
        self.cluster.remove(PODS, pod)
        uid = controller_of(pod)
        work = self.works.get(uid or "")
        if uid is None or work is None or is_over(work.job):
            return
        was_disrupted = condition(pod.status.conditions, DISRUPTED) is not None
        if pod.status.phase == "Failed" and not was_disrupted and not work.job.spec.suspend:
            self._end_job(work, "Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit")
            self._delete_pods(work)
            return
        self._changed(pod)
        self.loop.call_later(REACTION_SECONDS, self._fill, uid)

    # ---- nodes that end

    def stop_kubelet(self, node_name: str) -> None:
        """The machine is off: its pods stop without a status update."""
        self.kubelet_dead_since.setdefault(node_name, self.cluster.now())

    def remove_node(self, node_name: str) -> None:
        node = self.cluster.find(NODES, "", node_name)
        if node is not None:
            self.cluster.delete(NODES, node)
        for pod in self.cluster.all(PODS):
            if pod.spec.node_name == node_name:
                self.collect_pod(pod)

    def collect_pod(self, pod: core.Pod) -> None:
        """Garbage-collect the pod of a removed node."""
        self.remove_pod(with_pod_condition(pod, DISRUPTED, "True", self.cluster.now()))


def controller_of(pod: core.Pod) -> str | None:
    """Return the uid of the pod's controller."""
    return next((owner.uid for owner in pod.metadata.owner_references if owner.controller), None)


def member_of(pod: core.Pod) -> tuple[str, str]:
    """Return job id and index of a member, as `_make_pod` names it; for other pods "" and the name."""
    job_id = pod.metadata.labels.get(labels.JOB_ID)
    name = pod.metadata.name
    return ("", name) if job_id is None else (job_id, name.rsplit("-", 2)[1])


def is_ready(pod: core.Pod) -> bool:
    """True while the pod is running and ready."""
    return pod.status.phase == "Running" and is_true(pod.status.conditions, "Ready")


def is_waiting(pod: core.Pod) -> bool:
    """True for a pod that the scheduler must bind."""
    return pod.spec.node_name is None and pod.metadata.deletion_timestamp is None and pod.status.phase == "Pending"
