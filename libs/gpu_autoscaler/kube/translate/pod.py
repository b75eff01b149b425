"""Translates pods to facts.

Source: Kubernetes API reference v1.36, "Pod"; Kubernetes, "Sidecar Containers", resource sharing (read 2026-11-21).
"""

from collections import Counter
from collections.abc import Iterable
from datetime import datetime

import msgspec

from gpu_autoscaler.events.pod import PodGone, PodObserved, PodPhase
from gpu_autoscaler.kube.translate.common import GPU_MODEL_LABELS, amounts, condition, honored, pairs, requirements
from gpu_autoscaler.kube.translate.pod_affinity import pod_constraints, preferences
from gpu_autoscaler.kube.translate.related_objects import NO_RELATED_OBJECTS, RelatedObjects
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.gpu import gpu_model_name
from gpu_autoscaler.model.ids import JobId, PodUid
from gpu_autoscaler.model.resources import GPU_RESOURCE, NO_RESOURCES, Resources, Slices, is_slice
from gpu_autoscaler.model.scheduling import NodeDemands, NodeSelectorTerm, Toleration, all_terms

_PHASES: dict[str, PodPhase] = {
    "Pending": "pending",
    "Running": "running",
    "Succeeded": "succeeded",
    "Failed": "failed",
    "Unknown": "unknown",
}


def pod_observed(pod: core.Pod, *, epoch: int, related: RelatedObjects = NO_RELATED_OBJECTS) -> PodObserved:
    """Return the pod as a fact, with the demands of related objects. Raises PermanentError for an invalid quantity."""
    metadata, spec, status = pod.metadata, pod.spec, pod.status
    if metadata.creation_timestamp is None:
        raise PermanentError(f"pod {metadata.namespace}/{metadata.name} has no creationTimestamp")
    scheduled = condition(status.conditions, "PodScheduled")
    is_unschedulable = scheduled is not None and scheduled.status == "False" and scheduled.reason == "Unschedulable"
    ready = condition(status.conditions, "Ready")
    owner = next((owner for owner in metadata.owner_references if owner.controller), None)
    demands = pod_demands(spec)
    devices = related.devices
    models = devices.gpu_models or gpu_models(demands)
    if related.alternatives:
        demands = msgspec.structs.replace(demands, node_affinity=all_terms(demands.node_affinity, related.alternatives))
    return PodObserved(
        epoch=epoch,
        version=max(pod.version, related.version),
        pod_uid=PodUid(metadata.uid),
        namespace=metadata.namespace,
        name=metadata.name,
        phase=_PHASES[status.phase],
        requests=pod_requests(pod) + Resources(gpu_count=devices.gpu_count, slices=devices.slices),
        created_at=metadata.creation_timestamp,
        node_name=spec.node_name or None,
        is_ready=ready is not None and ready.status == "True",
        unschedulable_since=scheduled.last_transition_time if scheduled and is_unschedulable else None,
        unschedulable_message=scheduled.message if scheduled and is_unschedulable else "",
        is_gated=bool(spec.scheduling_gates),
        started_at=status.start_time,
        finished_at=_finished_at(status),
        deleting_since=metadata.deletion_timestamp,
        priority=spec.priority,
        demands=demands,
        pod_affinity=pod_constraints(pod),
        gpu_model=models[0] if len(models) == 1 else None,
        gpu_models=models if len(models) > 1 else (),
        gpu_memory_bytes_min=devices.gpu_memory_bytes_min,
        labels=pairs(metadata.labels),
        annotations=honored(metadata.annotations),
        owner_kind=owner.kind if owner else None,
        owner_uid=owner.uid if owner else None,
        has_local_storage=_has_local_storage(pod),
        grace_seconds=spec.termination_grace_period_seconds,
        job_id=_job_id(metadata),
        volume_trouble=related.problem,
        device_trouble=devices.problem,
        group_count_min=related.group_count_min,
        preferences=preferences(pod),
    )


def pod_gone(pod: core.Pod, *, epoch: int) -> PodGone:
    """Return the deletion of the pod as a fact."""
    return PodGone(
        epoch=epoch,
        version=pod.version,
        pod_uid=PodUid(pod.metadata.uid),
        namespace=pod.metadata.namespace,
        name=pod.metadata.name,
        node_name=pod.spec.node_name or None,
        job_id=_job_id(pod.metadata),
        phase=_PHASES[pod.status.phase],
    )


def _has_local_storage(pod: core.Pod) -> bool:
    """True if a move would lose files: not those in memory, and none of volumes that are marked as safe to lose.

    Source: cluster-autoscaler, `utils/drain/drain.go` (read 2026-11-24).
    """
    safe = set(pod.metadata.annotations.get(labels.SAFE_TO_EVICT_VOLUMES, "").split(","))
    return any(
        volume.name not in safe
        for volume in pod.spec.volumes
        if volume.host_path or (volume.empty_dir and volume.empty_dir.medium != "Memory")
    )


def pod_requests(pod: core.Pod) -> Resources:
    """Return the resources that the scheduler reserves for the pod, the pod itself included.

    The larger of all containers with all sidecars, and of each init container with the sidecars started before it; plus
    the overhead of the runtime class.
    """
    of = f"pod {pod.metadata.namespace}/{pod.metadata.name}"
    sidecars, peak = NO_RESOURCES, NO_RESOURCES
    for container in pod.spec.init_containers:
        needs = _container_requests(container, of)
        if container.restart_policy == "Always":
            sidecars = sidecars + needs
            peak = _larger(peak, sidecars)
        else:
            peak = _larger(peak, sidecars + needs)
    together = sidecars
    for container in pod.spec.containers:
        together = together + _container_requests(container, of)
    return _larger(together, peak) + amounts(pod.spec.overhead, of=of) + Resources(pod_count=1)


def _container_requests(container: core.Container, of: str) -> Resources:
    # Extended resources are requested by their limit; the server copies it into the requests, older servers did not.
    gpus = {key: value for key, value in container.resources.limits.items() if key == GPU_RESOURCE or is_slice(key)}
    return amounts({**container.resources.requests, **gpus}, of=of)


def _larger(first: Resources, second: Resources) -> Resources:
    return Resources(
        cpu_milli=max(first.cpu_milli, second.cpu_milli),
        memory_bytes=max(first.memory_bytes, second.memory_bytes),
        gpu_count=max(first.gpu_count, second.gpu_count),
        ephemeral_storage_bytes=max(first.ephemeral_storage_bytes, second.ephemeral_storage_bytes),
        slices=_larger_slices(first.slices, second.slices)
        if first.slices and second.slices
        else first.slices or second.slices,
    )


def _larger_slices(first: Slices, second: Slices) -> Slices:
    return tuple(sorted((Counter(dict(first)) | Counter(dict(second))).items()))


def _finished_at(status: core.PodStatus) -> datetime | None:
    if status.phase not in ("Succeeded", "Failed"):
        return None
    ends = [
        container.state.terminated.finished_at for container in status.container_statuses if container.state.terminated
    ]
    return max((end for end in ends if end is not None), default=None)


def pod_demands(spec: core.PodSpec) -> NodeDemands:
    """Return node selector, required node affinity and tolerations of a pod."""
    required = spec.affinity.node_affinity.required if spec.affinity and spec.affinity.node_affinity else None
    return NodeDemands(
        node_selector=pairs(spec.node_selector),
        node_affinity=tuple(
            # A field (metadata.name, as in DaemonSets) is kept under its own name, which no label has.
            NodeSelectorTerm(requirements(term.match_expressions) + requirements(term.match_fields))
            for term in (required.node_selector_terms if required else ())
        ),
        tolerations=tuple(
            Toleration(
                key=toleration.key, operator=toleration.operator, value=toleration.value, effect=toleration.effect
            )
            for toleration in spec.tolerations
        ),
    )


def gpu_models(demands: NodeDemands) -> tuple[str, ...]:
    """Return the models of which the pod requires one, by selector or by every term of its node affinity, in order."""
    chosen = dict(demands.node_selector)
    selected = _models_named(chosen[key] for key in GPU_MODEL_LABELS if key in chosen)
    if selected:
        return selected[:1]
    of_terms = [
        _models_named(
            value
            for key in GPU_MODEL_LABELS
            for requirement in term.requirements
            if requirement.key == key and requirement.operator == "In"
            for value in requirement.values
        )
        for term in demands.node_affinity
    ]
    return tuple(dict.fromkeys(name for names in of_terms for name in names)) if all(of_terms) else ()


def _models_named(values: Iterable[str]) -> tuple[str, ...]:
    names = (gpu_model_name(value) for value in values)
    return tuple(dict.fromkeys(name for name in names if name is not None))


def _job_id(metadata: core.Metadata) -> JobId | None:
    job_id = metadata.labels.get(labels.JOB_ID)
    return JobId(job_id) if job_id else None
