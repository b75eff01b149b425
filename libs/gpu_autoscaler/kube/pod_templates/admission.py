"""Admission of job requests with a pod template: every violation of both, or the job and its completed template.

The gateway and the scheduler admit with this module; without a template it adds nothing to `core/intake/admission.py`.
"""

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import msgspec

from gpu_autoscaler.core.intake import admission
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.kube.pod_templates.resources import (
    MAIN_NAMES,
    completed,
    devices,
    main_index,
    member_demands,
    member_resources,
    pod_of,
    resource_conflicts,
)
from gpu_autoscaler.kube.pod_templates.schema import schema_violations
from gpu_autoscaler.kube.pod_templates.security import dangerous_fields, object_of, objects_of
from gpu_autoscaler.model.jobs import ContainerRequest, JobSpec, Runtime, Violation, template_digest
from gpu_autoscaler.model.resources import GPU_RESOURCE

# Part of one fact and of one Kubernetes object, with the same reasons and the same limit as command and environment of
# the short form (`core/intake/admission.py`).
TEMPLATE_BYTES_MAX = 128 * 1024
CLAIMS_COUNT_MAX = 32  # volumes with a PersistentVolumeClaim: the scheduler reads each. Project default.
VIOLATIONS_COUNT_MAX = 50  # of one template; the last one then tells how many more there are
FIELD = "pod_template"
_NO_CONTAINER = ContainerRequest(image="")
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SCHEDULERS = {Runtime.VOLCANO: "volcano"}
# Fields of the pod's spec that gpu-autoscaler sets or that placement cannot follow, each with what to do instead.
_OWN_FIELDS = {
    "activeDeadlineSeconds": "set max_duration_hours of the request",
    "ephemeralContainers": "they cannot be part of a template",
    "hostname": "the kind of the job names its members",
    "nodeName": "pods are bound by Kubernetes' scheduler; use nodeSelector or affinity",
    "overhead": "the runtime class sets it; use runtimeClassName",
    "preemptionPolicy": "set priority of the request",
    "priority": "set priority of the request",
    "priorityClassName": "set priority of the request",
    "resourceClaims": "set gpu_requirements of the request",
    "resources": "set the resources of its containers",
    "schedulingGates": "members start together without them",
    "schedulingGroup": "members of a job are a gang already",
    "subdomain": "the kind of the job names its members",
}


class Admitted(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted job, and the template that its members are made from."""

    spec: JobSpec
    template: dict[str, Any] | None = None  # completed with the request's amounts; None: the short form

    @property
    def template_bytes(self) -> bytes | None:
        """The template as the store keeps it."""
        return None if self.template is None else msgspec.json.encode(self.template)


def admit(
    request: JobRequested,
    *,
    event_id: str,
    at: datetime,
    now: datetime,
    policy: ScalingPolicy,
    supply: admission.Supply,
) -> Admitted | tuple[Violation, ...]:
    """Return the job with every default filled in, or every violation of the request and its template."""
    digest = request.pod_template_digest
    stray = () if digest is None else (Violation("pod_template_digest", "is set by gpu-autoscaler; remove it"),)
    template = request.pod_template
    if template is None:
        spec = admission.admit(request, event_id=event_id, at=at, now=now, policy=policy, supply=supply)
        if stray or not isinstance(spec, JobSpec):
            return (*stray, *(() if isinstance(spec, JobSpec) else spec))
        return Admitted(spec=spec)
    violations = (*stray, *template_violations(request, template))
    # The request without its template: of the container, what the kind of the job needs.
    command = ("-",) if entrypoint(template) else ()
    short = msgspec.structs.replace(request, pod_template=None, container=ContainerRequest(image="-", command=command))
    spec = admission.admit(short, event_id=event_id, at=at, now=now, policy=policy, supply=supply)
    if not isinstance(spec, JobSpec):
        paths = {"container.command": f"{FIELD}.spec.containers[0].command"}
        others = (
            msgspec.structs.replace(violation, field=paths.get(violation.field, violation.field)) for violation in spec
        )
        return (*violations, *others)
    return violations or _admitted(request, template, spec)


def _admitted(request: JobRequested, template: Mapping[str, Any], spec: JobSpec) -> Admitted | tuple[Violation, ...]:
    main = main_index(template["spec"], spec.runtime)
    assert main is not None, "the template has no violations"  # noqa: S101 - a bug of ours
    full = completed(template, request.resources, main)
    resources = member_resources(full, spec, main)
    wanted = {name: count for name, count in ((GPU_RESOURCE, spec.member_resources.gpu_count),) if count}
    wanted |= dict(spec.member_resources.slices)
    needed = {name: count for name, count in ((GPU_RESOURCE, resources.gpu_count), *resources.slices) if count}
    if needed != wanted or devices(full) not in ({}, wanted):
        listed = _listed(devices(full) or needed)
        reason = f"request {listed}, but gpu_requirements is {_listed(wanted)} a member; remove one, or make them equal"
        return (Violation(f"{FIELD}.spec.containers", reason),)
    return Admitted(
        spec=msgspec.structs.replace(
            spec,
            image="",  # releases without templates refuse to run it, instead of running the image alone
            command=(),
            member_resources=resources,
            template_digest=template_digest(full),
            demands=member_demands(full),
        ),
        template=full,
    )


def _listed(amounts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(amounts.items())) or "no GPU"


def entrypoint(template: Mapping[str, Any]) -> tuple[str, ...]:
    """Return command and arguments of the first container, the entrypoint of a RayJob; empty: none, or malformed."""
    containers = objects_of(object_of(template.get("spec")).get("containers"))
    first = containers[0] if containers else {}
    parts = (first.get(name) for name in ("command", "args"))
    return tuple(str(word) for words in parts if isinstance(words, list) for word in words)


def template_violations(request: JobRequested, template: Mapping[str, Any]) -> tuple[Violation, ...]:
    """Return every violation of the template, and of other fields of the request beside it."""
    size_bytes = len(msgspec.json.encode(template))
    if size_bytes > TEMPLATE_BYTES_MAX:
        most = f"has {size_bytes / 1024:.0f} KiB; at most {TEMPLATE_BYTES_MAX // 1024} are allowed"
        return (Violation(FIELD, f"{most}; move large data into the image, a ConfigMap or a volume"),)
    violations = [
        *schema_violations(template, FIELD),
        *_danger_violations(request, template),
        *_metadata_violations(request, object_of(template.get("metadata"))),
        *_spec_violations(request, object_of(template.get("spec"))),
    ]
    violations = violations or list(_typed_violations(request, template))
    if len(violations) <= VIOLATIONS_COUNT_MAX:
        return tuple(violations)
    left_count = len(violations) - VIOLATIONS_COUNT_MAX + 1
    return (
        *violations[: VIOLATIONS_COUNT_MAX - 1],
        Violation(FIELD, f"has {left_count} more violations; correct these"),
    )


def _danger_violations(request: JobRequested, template: Mapping[str, Any]) -> Iterator[Violation]:
    if not request.dangerous_fields_allowed:
        for path in dangerous_fields(template):
            yield Violation(f"{FIELD}.{path}", "reaches beyond the pod; remove it, or get the right to use such fields")


def _metadata_violations(request: JobRequested, metadata: Mapping[str, Any]) -> Iterator[Violation]:
    at = f"{FIELD}.metadata"
    for name in metadata:
        if name not in ("labels", "annotations"):
            yield Violation(f"{at}.{name}"[:200], "is not used for the members of a job; remove it")
    labels, annotations = _texts(metadata.get("labels")), _texts(metadata.get("annotations"))
    # Fields of the template's metadata follow the rules of the request's own.
    alike = msgspec.structs.replace(request, pod_labels=labels, pod_annotations=annotations)
    names = {"pod_labels": f"{at}.labels", "pod_annotations": f"{at}.annotations"}
    for violation in admission.pod_metadata_violations(alike):
        yield Violation(names[violation.field], violation.reason)
    for own, other, field in (
        (request.pod_labels, labels, "pod_labels"),
        (request.pod_annotations, annotations, "pod_annotations"),
    ):
        for key in sorted(own.keys() & other.keys()):
            if own[key] != other[key]:
                yield Violation(field, f"{key!r} has another value in {names[field]}; remove one of them")


def _spec_violations(request: JobRequested, spec: Mapping[str, Any]) -> Iterator[Violation]:
    at = f"{FIELD}.spec"
    if request.container != _NO_CONTAINER:
        yield Violation("container", f"is set beside {FIELD}; set it in {at}.containers, and remove it here")
    for name, remedy in _OWN_FIELDS.items():
        if name in spec:
            yield Violation(f"{at}.{name}", f"is not for templates of jobs: {remedy}")
    if spec.get("restartPolicy", "Never") != "Never":
        yield Violation(f"{at}.restartPolicy", "must be Never, or left out: a failed member ends the job")
    scheduler = _SCHEDULERS.get(_runtime(request), "default-scheduler")
    if spec.get("schedulerName", scheduler) != scheduler:
        yield Violation(f"{at}.schedulerName", f"must be {scheduler}, or left out")
    containers, before = objects_of(spec.get("containers")), objects_of(spec.get("initContainers"))
    if not containers:
        yield Violation(f"{at}.containers", "is empty; add the container to run")
    elif main_index(spec, _runtime(request)) is None:
        name = MAIN_NAMES.get(_runtime(request), "")
        yield Violation(f"{at}.containers", f"has none named {name!r}; a {request.runtime} finds its container by name")
    claims_count = sum("persistentVolumeClaim" in volume for volume in objects_of(spec.get("volumes")))
    if claims_count > CLAIMS_COUNT_MAX:
        yield Violation(f"{at}.volumes", f"have {claims_count} claims; at most {CLAIMS_COUNT_MAX} are allowed")
    volumes = {str(volume.get("name")) for volume in objects_of(spec.get("volumes"))}
    seen = set[str]()
    for part, items in (("initContainers", before), ("containers", containers)):
        for index, container in enumerate(items):
            path = f"{at}.{part}[{index}]"
            yield from _container_violations(container, path, volumes, seen)
            seen.add(str(container.get("name")))


def _container_violations(
    container: Mapping[str, Any], at: str, volumes: set[str], seen: set[str]
) -> Iterator[Violation]:
    name, image = container.get("name"), container.get("image")
    if isinstance(name, str) and not _DNS_LABEL.fullmatch(name):
        yield Violation(f"{at}.name", f"{name[:60]!r} is not a DNS label: lower-case letters, digits and `-`")
    elif isinstance(name, str) and name in seen:
        yield Violation(f"{at}.name", f"{name!r} is the name of another container; choose another one")
    if not isinstance(image, str) or not image.strip():
        yield Violation(f"{at}.image", "is empty; set the image to run")
    elif len(image) > admission.IMAGE_LENGTH_MAX or any(character.isspace() for character in image):
        most = f"is not an image reference of at most {admission.IMAGE_LENGTH_MAX} characters"
        yield Violation(f"{at}.image", f"{image[:60]!r} {most}; correct it")
    for part in ("volumeMounts", "volumeDevices"):
        for index, mount in enumerate(objects_of(container.get(part))):
            if isinstance(mount.get("name"), str) and mount["name"] not in volumes:
                yield Violation(f"{at}.{part}[{index}].name", f"{mount['name']!r} is none of the volumes; add it")


def _typed_violations(request: JobRequested, template: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield violations of a template that has the fields and types of Kubernetes."""
    spec = template.get("spec")
    if spec is None:
        yield Violation(f"{FIELD}.spec", "is missing; add the spec of the pods")
        return
    main = main_index(spec, _runtime(request))
    assert main is not None, "the template has containers"  # noqa: S101 - a bug of ours
    yield from resource_conflicts(template, request.resources, main, FIELD)
    try:
        pod = pod_of(_without_resources(template))
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        yield Violation(f"{FIELD}{path.rstrip('`')}", f"is invalid: {reason}; correct it")
        return
    affinity = pod.spec.affinity and pod.spec.affinity.node_affinity
    required = affinity.required if affinity else None
    terms = required.node_selector_terms if required else ()
    if required and (not terms or any(not term.match_expressions and not term.match_fields for term in terms)):
        field = "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms"
        yield Violation(f"{FIELD}.spec.{field}", "has no condition, so that no node matches; add one, or remove it")


def _without_resources(template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template without amounts, which may be numbers until it is completed."""
    spec = dict(template["spec"])
    for part in ("initContainers", "containers"):
        spec[part] = [
            {name: value for name, value in container.items() if name != "resources"}
            for container in spec.get(part, ())
        ]
    return {**template, "spec": spec}


def _runtime(request: JobRequested) -> Runtime:
    """Return the requested runtime; an unknown one is a violation of its own."""
    name = request.runtime.lower()
    return Runtime(name) if name in set(Runtime) else Runtime.JOB


def _texts(value: object) -> dict[str, str]:
    return {key: text for key, text in object_of(value).items() if isinstance(text, str)}
