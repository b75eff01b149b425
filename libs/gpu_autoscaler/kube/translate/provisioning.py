"""Translates ProvisioningRequests with their PodTemplates to facts.

Sources: kubernetes/autoscaler, cluster-autoscaler/provisioningrequest (parameters, conditions); Kueue v0.9.0,
pkg/controller/admissionchecks/provisioning (what it requests; read 2026-11-27).
"""

from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from typing import cast, get_args

from gpu_autoscaler.events.pod import PodProvisioningGone, PodProvisioningObserved
from gpu_autoscaler.kube.translate.common import honored, pairs
from gpu_autoscaler.kube.translate.pod import gpu_models, pod_demands, pod_requests
from gpu_autoscaler.kube.translate.pod_affinity import pod_constraints, preferences
from gpu_autoscaler.kube.wire import core, provisioning
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.demands import PodSet, ProvisioningClass, ProvisioningCondition, ProvisioningConditionType
from gpu_autoscaler.model.errors import PermanentError

# Parameters of a request. Sources: provisioningrequest/besteffortatomic and checkcapacity.
_VALID_SECONDS = "ValidUntilSeconds"
_TRIED_ONCE = "noRetry"

TemplateOf = Callable[[str, str], provisioning.PodTemplate | None]  # by namespace and name


def is_served(request: provisioning.ProvisioningRequest) -> bool:
    """True for the classes that are served; others belong to other controllers."""
    return request.spec.provisioning_class_name in get_args(ProvisioningClass)


def provisioning_observed(
    request: provisioning.ProvisioningRequest, template_of: TemplateOf, *, epoch: int, version: int
) -> PodProvisioningObserved:
    """Return the request as a fact. What makes it impossible to serve is its `trouble`."""
    metadata, spec = request.metadata, request.spec
    if metadata.creation_timestamp is None:
        raise PermanentError(f"ProvisioningRequest {metadata.namespace}/{metadata.name} has no creationTimestamp")
    trouble = ""
    pod_sets: tuple[PodSet, ...] = ()
    within: str | None = None
    valid_seconds: float | None = None
    try:
        valid_seconds = _valid_seconds(spec.parameters)
        templates = [_template(request, pods.pod_template_ref.name, template_of) for pods in spec.pod_sets]
        pod_sets = tuple(
            _pod_set(template, pods.count) for template, pods in zip(templates, spec.pod_sets, strict=True)
        )
        within = next(filter(None, map(_within, templates)), None)
    except PermanentError as exc:
        trouble = str(exc)
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
        within=within,
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


def _template(
    request: provisioning.ProvisioningRequest, name: str, template_of: TemplateOf
) -> provisioning.PodTemplate:
    template = template_of(request.metadata.namespace, name)
    if template is None:
        raise PermanentError(f"PodTemplate {request.metadata.namespace}/{name} does not exist")
    return template


def _pod_set(template: provisioning.PodTemplate, count: int) -> PodSet:
    """Return the pods as they will be observed. Raises PermanentError for an invalid quantity or requirement."""
    metadata, spec = template.template.metadata, template.template.spec
    named = core.Metadata(
        name=template.metadata.name,
        namespace=template.metadata.namespace,
        labels=metadata.labels,
        annotations=metadata.annotations,
    )
    pod = core.Pod(metadata=named, spec=spec)
    demands = pod_demands(spec)
    return PodSet(
        count=count,
        requests=pod_requests(pod),
        priority=spec.priority,
        demands=demands,
        pod_affinity=pod_constraints(pod),
        gpu_models=gpu_models(demands),
        labels=pairs(metadata.labels),
        preferences=preferences(pod),
    )


def _within(template: provisioning.PodTemplate) -> str | None:
    """Return the node label whose value all pods share; None: any nodes."""
    annotations = dict(honored(template.template.metadata.annotations))
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
