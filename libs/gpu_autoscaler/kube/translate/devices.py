"""Translates device claims of pods, and device slices of nodes: GPUs of NVIDIA's driver, and slices of GPUs.

The request of a claim follows from the conditions of its requests and their classes (`products.py`). Allocated devices
are counted, and bind the pod to their nodes. An unsupported claim is reported with claim, request and field, so that
nothing is bought by guess. Source: Kubernetes, "Dynamic Resource Allocation"; NVIDIA, "DRA Driver for GPUs",
device classes and attributes (read 2026-11-22).
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from gpu_autoscaler.kube.translate.common import requirements
from gpu_autoscaler.kube.translate.products import GPU_DRIVER, Fit, fit_of, is_about_gpus
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.kube.wire import devices as wire_devices
from gpu_autoscaler.model import cel
from gpu_autoscaler.model.resources import MIG_RESOURCE_PREFIX, Slices
from gpu_autoscaler.model.scheduling import NodeSelectorTerm

# The driver's own classes, and a condition that all of their devices satisfy.
_CLASSES = {
    GPU_DRIVER: f"device.attributes['{GPU_DRIVER}'].type == 'gpu'",
    "mig.nvidia.com": f"device.attributes['{GPU_DRIVER}'].type == 'mig'",
}
# All GPUs of an available instance type are equal in these attributes.
_UNIFORM_ATTRIBUTES = frozenset(
    f"{GPU_DRIVER}/{name}"
    for name in ("productName", "brand", "architecture", "cudaComputeCapability", "driverVersion", "cudaDriverVersion")
)
POD_CLAIM_NAME = "resource.kubernetes.io/pod-claim-name"  # on a claim created from a template: its name in the pod
_EXCLUDING_EFFECTS = ("NoSchedule", "NoExecute")

Key = tuple[str, str]  # namespace and name


class Claims(msgspec.Struct, kw_only=True):
    """The last observed claims, templates and classes."""

    claims: dict[Key, wire_devices.ResourceClaim] = {}
    templates: dict[Key, wire_devices.ResourceClaimTemplate] = {}
    classes: dict[str, wire_devices.DeviceClass] = {}
    made: dict[tuple[str, str], wire_devices.ResourceClaim] = {}  # from templates, by pod uid and name in the pod
    first_users: dict[Key, core.Pod] = {}  # the first pod that names a shared claim


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """The devices that a pod claims."""

    gpu_count: int = 0
    slices: Slices = ()
    gpu_models: tuple[str, ...] = ()  # any of these; empty: any model
    gpu_memory_bytes_min: int | None = None  # of one GPU
    alternatives: tuple[tuple[NodeSelectorTerm, ...], ...] = ()  # node selector terms of each allocated claim
    problem: str = ""  # why nothing can be bought for it; empty: all claims are supported


class Offered(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of a driver on a node."""

    gpu_count: int = 0
    slices: Slices = ()
    product: str | None = None


NOTHING_CLAIMED = Claimed()


class _UnsupportedClaim(Exception):
    """Why a claim is unsupported."""


class _PodClaim(NamedTuple):
    """One claim of a pod."""

    label: str  # kind and name, for messages
    spec: wire_devices.ResourceClaimSpec
    claim: wire_devices.ResourceClaim | None  # None: not created yet
    is_shared: bool


class _RequestedDevices(NamedTuple):
    """The devices of one request."""

    device_count: int
    fit: Fit


def claim_keys(pod: core.Pod) -> Iterator[Key]:
    """Yield the claims that the pod names, which other pods may share."""
    for named in pod.spec.resource_claims:
        if name := named.get("resourceClaimName"):
            yield pod.metadata.namespace, name


def claimed(pod: core.Pod, known: Claims) -> Claimed:
    """Return the pod's devices. A missing claim, or a shared one that another pod gets first, is a problem too."""
    requested: list[_RequestedDevices] = []
    alternatives: list[tuple[NodeSelectorTerm, ...]] = []
    try:
        for named in _pod_claims(pod, known):
            allocation = None if named.claim is None else named.claim.status.allocation
            if allocation is None:
                requested += _pending_requests(pod, named, known)
                continue
            requested += _allocated(pod, named, allocation, known)
            if allocation.node_selector is not None and not pod.spec.node_name:
                alternatives.append(_terms(allocation.node_selector))
        return _combine(requested, tuple(alternatives))
    except _UnsupportedClaim as exc:
        return Claimed(problem=str(exc))


def offered(slices: Iterable[wire_devices.ResourceSlice]) -> Offered:
    """Return the whole GPUs and GPU slices in these resource slices of one node. Outdated generations of a pool and
    tainted devices do not count, nor partitions that are created on demand: there the whole GPU counts."""
    ours = [resource_slice for resource_slice in slices if resource_slice.spec.driver == GPU_DRIVER]
    newest: dict[str, int] = {}
    for resource_slice in ours:
        pool = resource_slice.spec.pool
        newest[pool.name] = max(newest.get(pool.name, 0), pool.generation)
    devices = [
        device
        for resource_slice in ours
        if resource_slice.spec.pool.generation == newest[resource_slice.spec.pool.name]
        for device in resource_slice.spec.devices
        if not any(taint.effect in _EXCLUDING_EFFECTS for taint in device.taints)
    ]
    gpus = [device for device in devices if _text_attribute(device, "type") in (None, "gpu")]
    parts = [device for device in devices if _text_attribute(device, "type") == "mig" and not device.consumes_counters]
    profiles = Counter(
        f"{MIG_RESOURCE_PREFIX}{profile}" for device in parts if (profile := _text_attribute(device, "profile"))
    )
    products = {
        product for device in (*gpus, *parts) if (product := _text_attribute(device, "productName")) is not None
    }
    return Offered(
        gpu_count=len(gpus),
        slices=tuple(sorted(profiles.items())),
        product=products.pop() if len(products) == 1 else None,
    )


def _pod_claims(pod: core.Pod, known: Claims) -> Iterator[_PodClaim]:
    """Yield each claim of the pod. Raises _UnsupportedClaim for a missing one."""
    namespace = pod.metadata.namespace
    for named in pod.spec.resource_claims:
        if template := named.get("resourceClaimTemplateName"):
            label = f"ResourceClaimTemplate {namespace}/{template}"
            generated = known.made.get((pod.metadata.uid, named.get("name", "")))
            if generated is not None:
                yield _PodClaim(label, generated.spec, generated, is_shared=False)
            elif (existing := known.templates.get((namespace, template))) is not None:
                yield _PodClaim(label, existing.spec.spec, None, is_shared=False)
            else:
                raise _UnsupportedClaim(f"{label} does not exist")
            continue
        name = named.get("resourceClaimName", "")
        claim = known.claims.get((namespace, name))
        if claim is None:
            raise _UnsupportedClaim(f"ResourceClaim {namespace}/{name} does not exist")
        yield _PodClaim(f"ResourceClaim {namespace}/{name}", claim.spec, claim, is_shared=True)


def _pending_requests(pod: core.Pod, named: _PodClaim, known: Claims) -> list[_RequestedDevices]:
    """Return the requests of an unallocated claim. A shared claim counts for the first pod that names it."""
    others = () if named.claim is None else named.claim.status.reserved_for
    first = next((user.name for user in others if user.uid != pod.metadata.uid), None)
    if named.is_shared and first is None:
        user = known.first_users.get((pod.metadata.namespace, named.label.rpartition("/")[2]), pod)
        first = None if user.metadata.uid == pod.metadata.uid else user.metadata.name
    if first is not None:
        raise _UnsupportedClaim(f"{named.label} is shared with pod {first} and will be allocated on its node")
    devices = named.spec.devices
    requested = [_read(request, known, f"{named.label}, request {request.name}") for request in devices.requests]
    for constraint in devices.constraints:
        attribute = constraint.get("matchAttribute")
        if attribute not in _UNIFORM_ATTRIBUTES and sum(devices.device_count for devices in requested) > 1:
            name = f"matchAttribute {attribute}" if attribute else ", ".join(sorted(constraint))
            raise _UnsupportedClaim(f"{named.label}, constraints, {name}: unknown which GPUs of a machine satisfy it")
    return requested


def _allocated(
    pod: core.Pod, named: _PodClaim, allocation: wire_devices.Allocation, known: Claims
) -> Iterator[_RequestedDevices]:
    """Yield the devices of an allocated claim; a shared one counts for the first pod that it is reserved for."""
    users = () if named.claim is None else named.claim.status.reserved_for
    if named.is_shared and (not users or users[0].uid != pod.metadata.uid):
        return
    requests: dict[str, wire_devices.ExactRequest] = {}
    for request in named.spec.devices.requests:
        if request.exactly is not None:
            requests[request.name] = request.exactly
        requests |= {f"{request.name}/{option.name}": option for option in request.first_available}
    for result in allocation.devices.results:
        if result.driver != GPU_DRIVER or result.admin_access:
            continue
        try:
            yield _RequestedDevices(1, _fit(requests[result.request], known, named.label))
        except (_UnsupportedClaim, KeyError):
            yield _RequestedDevices(1, Fit())  # an allocated device of the driver, whatever its request


def _combine(requested: Iterable[_RequestedDevices], alternatives: tuple[tuple[NodeSelectorTerm, ...], ...]) -> Claimed:
    """Combine all requests of a pod. Raises _UnsupportedClaim when no GPU satisfies all of them."""
    counts, models, leasts = Counter[str](), None, list[int]()
    for devices in requested:
        if not devices.device_count:
            continue
        counts[devices.fit.profile] += devices.device_count
        if devices.fit.models is not None:
            both = devices.fit.models if models is None else models & devices.fit.models
            if not both:
                names = " and ".join("/".join(sorted(group)) for group in (models or (), devices.fit.models))
                raise _UnsupportedClaim(f"the pod's claims require GPUs of {names}")
            models = both
        if devices.fit.memory_bytes_min is not None:
            leasts.append(devices.fit.memory_bytes_min)
    return Claimed(
        gpu_count=counts.pop("", 0),
        slices=tuple(sorted((f"{MIG_RESOURCE_PREFIX}{profile}", count) for profile, count in counts.items())),
        gpu_models=tuple(sorted(models or ())),
        gpu_memory_bytes_min=max(leasts, default=None),
        alternatives=alternatives,
    )


def _read(request: wire_devices.DeviceRequest, known: Claims, what: str) -> _RequestedDevices:
    """Return the devices of a request. Raises _UnsupportedClaim, naming claim, request and field."""
    if request.exactly is not None:
        return _read_exactly(request.exactly, known, what)
    options = [
        _read_exactly(option, known, f"{what}, firstAvailable {option.name}") for option in request.first_available
    ]
    if not options:
        raise _UnsupportedClaim(f"{what} has neither exactly nor firstAvailable")
    if len(set(options)) > 1:
        alternatives = " or ".join(
            f"{option.device_count} x {'/'.join(sorted(option.fit.models or ())) or 'any GPU'}"
            f"{f' ({option.fit.profile})' if option.fit.profile else ''}"
            for option in options
        )
        raise _UnsupportedClaim(
            f"{what}, firstAvailable: it has alternatives ({alternatives}), and its allocation is unknown in advance"
        )
    return options[0]


def _read_exactly(exact: wire_devices.ExactRequest, known: Claims, what: str) -> _RequestedDevices:
    if exact.admin_access:
        return _RequestedDevices(0, Fit())
    fit = _fit(exact, known, what)
    if exact.capacity and exact.capacity.get("requests"):
        raise _UnsupportedClaim(f"{what}, capacity: it requests a share of a device")
    if exact.allocation_mode != "ExactCount":
        raise _UnsupportedClaim(
            f"{what}, allocationMode: {exact.allocation_mode} requests an unknown number of devices"
        )
    return _RequestedDevices(exact.count, fit)


def _fit(exact: wire_devices.ExactRequest, known: Claims, what: str) -> Fit:
    """Return the devices that satisfy the conditions of the class and of the request."""
    name = exact.device_class_name
    device_class = known.classes.get(name)
    if device_class is None:
        raise _UnsupportedClaim(f"{what}, deviceClassName: DeviceClass {name} does not exist; install its driver")
    conditions = _conditions(device_class.spec.selectors, f"{what}, deviceClassName {name}")
    conditions += [cel.condition(_CLASSES[name])] if name in _CLASSES else []
    if name not in _CLASSES and not is_about_gpus(conditions):
        raise _UnsupportedClaim(
            f"{what}, deviceClassName: it is for devices of class {name}, and which machines have them is not known"
        )
    conditions += _conditions(exact.selectors, f"{what}, selectors")
    fit = fit_of(conditions)
    if isinstance(fit, str):
        raise _UnsupportedClaim(f"{what}, {'selectors' if exact.selectors else f'deviceClassName {name}'}: {fit}")
    return fit


def _conditions(selectors: Iterable[wire_devices.DeviceSelector], what: str) -> list[cel.Condition]:
    try:
        return [cel.condition(selector.cel.expression) for selector in selectors]
    except cel.CelUnsupported as exc:
        raise _UnsupportedClaim(f"{what}: {exc}") from exc


def _terms(selector: core.NodeSelector) -> tuple[NodeSelectorTerm, ...]:
    return tuple(
        NodeSelectorTerm(requirements(term.match_expressions) + requirements(term.match_fields))
        for term in selector.node_selector_terms
    )


def _text_attribute(device: wire_devices.Device, attribute: str) -> str | None:
    """Return a string attribute, with or without the driver's prefix."""
    value = device.attributes.get(attribute) or device.attributes.get(f"{GPU_DRIVER}/{attribute}")
    return None if value is None else value.string
