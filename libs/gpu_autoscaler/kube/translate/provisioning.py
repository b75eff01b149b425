"""Translates ProvisioningRequests with their PodTemplates to facts.

The pods of a request are made of its templates and read as pods that exist.

Sources: kubernetes/autoscaler, cluster-autoscaler/provisioningrequest (parameters, conditions); Kueue v0.9.0,
pkg/controller/admissionchecks/provisioning (what it requests; read 2026-11-27); Kubernetes, "Pod Priority and
Preemption" (names without a class, global default; read 2026-11-28).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import cast, get_args

import msgspec

from gpu_autoscaler.events.pod import PodProvisioningGone, PodProvisioningObserved
from gpu_autoscaler.kube.translate.common import honored
from gpu_autoscaler.kube.translate.devices import Key, claim_keys
from gpu_autoscaler.kube.translate.pod import pod_observed
from gpu_autoscaler.kube.translate.related_objects import RelatedObjects
from gpu_autoscaler.kube.wire import core, provisioning
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.demands import PodSet, ProvisioningClass, ProvisioningCondition, ProvisioningConditionType
from gpu_autoscaler.model.errors import PermanentError

# Parameters of a request. Sources: provisioningrequest/besteffortatomic and checkcapacity.
_VALID_SECONDS = "ValidUntilSeconds"
_TRIED_ONCE = "noRetry"


def is_served(request: provisioning.ProvisioningRequest) -> bool:
    """True for the classes that are served; others belong to other controllers."""
    return request.spec.provisioning_class_name in get_args(ProvisioningClass)


def pods_to_come(
    request: provisioning.ProvisioningRequest,
    templates: Mapping[Key, provisioning.PodTemplate],
    classes: Iterable[provisioning.PriorityClass],
) -> tuple[core.Pod, ...]:
    """Return a pod of each pod set as it will be created. Raises PermanentError for a missing template or class."""
    return tuple(_pod(request, pods.pod_template_ref.name, templates, classes) for pods in request.spec.pod_sets)


def provisioning_observed(
    request: provisioning.ProvisioningRequest,
    pods: Sequence[core.Pod],
    related: Sequence[RelatedObjects],
    trouble: str = "",
    *,
    epoch: int,
    version: int,
) -> PodProvisioningObserved:
    """Return the request as a fact, with the related objects of each pod. What makes it impossible to serve is its
    `trouble`, also one that was found before."""
    metadata, spec = request.metadata, request.spec
    if metadata.creation_timestamp is None:
        raise PermanentError(f"ProvisioningRequest {metadata.namespace}/{metadata.name} has no creationTimestamp")
    pod_sets: tuple[PodSet, ...] = ()
    valid_seconds: float | None = None
    try:
        valid_seconds = _valid_seconds(spec.parameters)
        pod_sets = tuple(_pod_sets(request, pods, related))
    except PermanentError as exc:
        trouble = trouble or str(exc)
    return PodProvisioningObserved(
        epoch=epoch,
        version=version,
        request_uid=metadata.uid,
        namespace=metadata.namespace,
        name=metadata.name,
        class_name=cast("ProvisioningClass", spec.provisioning_class_name),
        created_at=metadata.creation_timestamp,
        members_count=sum(pods.count for pods in spec.pod_sets),
        pod_sets=pod_sets,
        within=next(filter(None, map(_within, pods)), None) if pod_sets else None,
        valid_seconds=valid_seconds,
        is_tried_once=spec.parameters.get(_TRIED_ONCE) == "true",
        trouble=trouble,
        conditions=tuple(_conditions(request)),
    )


def provisioning_gone(request: provisioning.ProvisioningRequest, *, epoch: int) -> PodProvisioningGone:
    """Return the deletion of the request as a fact."""
    metadata = request.metadata
    return PodProvisioningGone(
        epoch=epoch, version=request.version, request_uid=metadata.uid, namespace=metadata.namespace, name=metadata.name
    )


def _valid_seconds(parameters: Mapping[str, str]) -> float | None:
    text = parameters.get(_VALID_SECONDS)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not isfinite(seconds) or seconds <= 0:
        raise PermanentError(f"parameter {_VALID_SECONDS} is {text[:64]!r}, not a positive number of seconds")
    return seconds


def _pod(
    request: provisioning.ProvisioningRequest,
    name: str,
    templates: Mapping[Key, provisioning.PodTemplate],
    classes: Iterable[provisioning.PriorityClass],
) -> core.Pod:
    template = templates.get((request.metadata.namespace, name))
    if template is None:
        raise PermanentError(f"PodTemplate {request.metadata.namespace}/{name} does not exist")
    metadata, spec = template.template.metadata, template.template.spec
    metadata = core.Metadata(
        name=name,
        namespace=request.metadata.namespace,
        resource_version="0",
        creation_timestamp=request.metadata.creation_timestamp,
        labels=metadata.labels,
        annotations=metadata.annotations,
    )
    return core.Pod(
        metadata=metadata, spec=msgspec.structs.replace(spec, priority=_priority(spec.priority_class_name, classes))
    )


def _priority(class_name: str, classes: Iterable[provisioning.PriorityClass]) -> int:
    """Return the priority that the API server will set: of the class, or of the default one for pods that name none."""
    if class_name:
        values = [known.value for known in classes if known.metadata.name == class_name]
        if not values:
            raise PermanentError(f"PriorityClass {class_name} does not exist")
    else:
        values = [known.value for known in classes if known.global_default]
    return min(values, default=0)  # of several defaults, the lowest


def _pod_sets(
    request: provisioning.ProvisioningRequest, pods: Sequence[core.Pod], related: Sequence[RelatedObjects]
) -> Iterator[PodSet]:
    """Yield the pod sets with their pods as they will be observed. Raises PermanentError for an invalid quantity or
    requirement."""
    users = Counter[Key]()  # by device claim: how many pods name it
    for pod, pod_set in zip(pods, request.spec.pod_sets, strict=bool(pods)):
        users.update(dict.fromkeys(claim_keys(pod), pod_set.count))
    for pod, pod_set, found in zip(pods, request.spec.pod_sets, related, strict=bool(pods)):
        observed = pod_observed(pod, epoch=0, related=found)
        # An allocated claim asks for no further devices, and binds the pods to its nodes.
        is_new = bool(found.devices.gpu_count or found.devices.slices) and not found.devices.alternatives
        shared = next((key for key in claim_keys(pod) if users[key] > 1 and is_new), None)
        yield PodSet(
            count=pod_set.count,
            requests=observed.requests,
            priority=observed.priority,
            demands=observed.demands,
            pod_affinity=observed.pod_affinity,
            gpu_models=observed.gpu_models or tuple(filter(None, (observed.gpu_model,))),
            gpu_memory_bytes_min=observed.gpu_memory_bytes_min,
            labels=observed.labels,
            preferences=observed.preferences,
            volume_trouble=observed.volume_trouble,
            device_trouble=observed.device_trouble or ("" if shared is None else _why_shared(shared, users[shared])),
        )


def _why_shared(key: Key, count: int) -> str:
    return f"ResourceClaim {key[0]}/{key[1]} is shared by {count} pods of the request; name a ResourceClaimTemplate"


def _within(pod: core.Pod) -> str | None:
    """Return the node label whose value all pods share; None: any nodes."""
    annotations = dict(honored(pod.metadata.annotations))
    return next((annotations[key] for key in labels.GANG_WITHIN if annotations.get(key)), None)


def _conditions(request: provisioning.ProvisioningRequest) -> Iterator[ProvisioningCondition]:
    for condition in request.status.conditions:
        if condition.type in get_args(ProvisioningConditionType) and condition.last_transition_time is not None:
            yield ProvisioningCondition(
                type=cast("ProvisioningConditionType", condition.type),
                is_true=condition.status == "True",
                since=condition.last_transition_time,
                reason=condition.reason,
            )
