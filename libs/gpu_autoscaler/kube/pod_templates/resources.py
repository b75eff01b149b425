"""The amounts of a pod template's containers: completed from the request, and what they need of a node together."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from gpu_autoscaler.kube.translate.pod import pod_demands, pod_requests
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model.jobs import JobSpec, ResourceRequest, Runtime, Violation
from gpu_autoscaler.model.resources import GPU_RESOURCE, Resources, is_slice, parse_quantity_milli
from gpu_autoscaler.model.scheduling import NodeDemands

Template = Mapping[str, Any]
_CONTAINERS = ("initContainers", "containers")
# The name that a kind of job requires of the container that does the work; the first container otherwise.
MAIN_NAMES = {Runtime.PYTORCHJOB: "pytorch"}


def main_index(spec: Mapping[str, Any], runtime: Runtime) -> int | None:
    """Return the index of the container that does the job's work; None if there is none, and if it is malformed."""
    containers = spec.get("containers")
    if not isinstance(containers, list) or not containers:
        return None
    name = MAIN_NAMES.get(runtime)
    names = [container.get("name") if isinstance(container, dict) else None for container in containers]
    return 0 if name is None else names.index(name) if name in names else None


def completed(template: Template, resources: ResourceRequest, main: int) -> dict[str, Any]:
    """Return the template with a request for every limit, a limit for every request of memory and GPUs, and the
    request's CPU, memory and disk for the main container, where it names none."""
    defaults = {"cpu": resources.cpu, "memory": resources.memory, "ephemeral-storage": resources.ephemeral_storage}
    spec = dict(template["spec"])
    for part in _CONTAINERS:
        if part in spec:
            is_main_part = part == "containers"
            spec[part] = [
                _completed(container, defaults if is_main_part and index == main else {})
                for index, container in enumerate(spec[part])
            ]
    return {**template, "spec": spec}


def _completed(container: Mapping[str, Any], defaults: Mapping[str, str]) -> dict[str, Any]:
    given = container.get("resources", {})
    limits = {name: str(amount) for name, amount in given.get("limits", {}).items()}
    requests = limits | {name: str(amount) for name, amount in given.get("requests", {}).items()}
    requests = {name: amount for name, amount in defaults.items() if parse_quantity_milli(amount) > 0} | requests
    for name, amount in requests.items():
        if name == "memory" or _is_device(name):
            limits.setdefault(name, amount)
    amounts = {name: value for name, value in (("requests", requests), ("limits", limits)) if value}
    return {**container, **({"resources": {**given, **amounts}} if amounts else {})}


def resource_conflicts(template: Template, resources: ResourceRequest, main: int, at: str) -> Iterator[Violation]:
    """Yield the amounts that both the request and its template name, with other values."""
    requests = template["spec"]["containers"][main].get("resources", {}).get("requests", {})
    default = ResourceRequest()
    for field, name in (("cpu", "cpu"), ("memory", "memory"), ("ephemeral_storage", "ephemeral-storage")):
        amount, text = getattr(resources, field), requests.get(name)
        if text is None or amount == getattr(default, field) or _is_equal(amount, str(text)):
            continue
        path = f"{at}.spec.containers[{main}].resources.requests.{name}"
        yield Violation(f"resources.{field}", f"is {amount!r}, but {path} is {str(text)!r}; remove one of them")


def _is_equal(first: str, second: str) -> bool:
    try:
        return parse_quantity_milli(first) == parse_quantity_milli(second)
    except ValueError:
        return True  # reported as no quantity


def devices(template: Template) -> dict[str, int]:
    """Return how many GPUs and parts of GPUs the containers request, by resource name."""
    counts: dict[str, int] = {}
    for container in template["spec"].get("containers", ()):
        given = container.get("resources", {})
        for name, amount in {**given.get("requests", {}), **given.get("limits", {})}.items():
            if _is_device(name):
                counts[name] = counts.get(name, 0) + parse_quantity_milli(str(amount)) // 1000
    return counts


def _is_device(name: str) -> bool:
    return name == GPU_RESOURCE or is_slice(name)


def with_devices(template: Template, wanted: Resources, main: int) -> dict[str, Any]:
    """Return the template whose main container requests the job's GPUs, unless containers request them already."""
    amounts = {name: str(count) for name, count in ((GPU_RESOURCE, wanted.gpu_count), *wanted.slices) if count}
    if not amounts or devices(template):
        return dict(template)
    containers = list(template["spec"]["containers"])
    given = containers[main].get("resources", {})
    requests, limits = ({**given.get(part, {}), **amounts} for part in ("requests", "limits"))
    containers[main] = {**containers[main], "resources": {**given, "requests": requests, "limits": limits}}
    return {**template, "spec": {**template["spec"], "containers": containers}}


def pod_of(template: Template, namespace: str = "") -> core.Pod:
    """Return a pod of the completed template. Raises msgspec.ValidationError for values that Kubernetes refuses."""
    metadata = {"name": "member", "namespace": namespace}
    return msgspec.convert({"metadata": metadata, "spec": template["spec"]}, core.Pod)


def member_resources(template: Template, spec: JobSpec, main: int) -> Resources:
    """Return what a pod needs of its node: init containers and sidecars included, as Kubernetes counts them."""
    return pod_requests(pod_of(with_devices(template, spec.member_resources, main)))


def member_demands(template: Template) -> NodeDemands:
    """Return node selector, required node affinity and tolerations."""
    return pod_demands(pod_of(template).spec)
