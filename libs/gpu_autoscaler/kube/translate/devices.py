"""What claims of devices mean for a pod, and slices of devices for a node: GPUs of NVIDIA's driver, and parts of them.

What a claim asks for is read from the conditions of its requests and of their classes (`products.py`); what it has got
already is counted, and ties the pod to where that is. What cannot be read is said by claim, request and field, so that
nothing is bought for it on a guess. Source: Kubernetes, "Dynamic Resource Allocation"; NVIDIA, "DRA Driver for GPUs",
device classes and attributes (read 2026-11-22).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from gpu_autoscaler.kube.translate.products import GPU_DRIVER, Fit, fit_of, is_about_gpus
from gpu_autoscaler.kube.translate.requirements import requirements
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.kube.wire import devices as wire_devices
from gpu_autoscaler.model import cel
from gpu_autoscaler.model.resources import MIG_RESOURCE_PREFIX, Slices
from gpu_autoscaler.model.scheduling import NodeSelectorTerm

# The driver's own classes, and what all of their devices are, whatever the class itself says.
_CLASSES = {
    GPU_DRIVER: f"device.attributes['{GPU_DRIVER}'].type == 'gpu'",
    "mig.nvidia.com": f"device.attributes['{GPU_DRIVER}'].type == 'mig'",
}
# All GPUs of one machine that can be bought are alike in these.
_ALIKE = frozenset(
    f"{GPU_DRIVER}/{name}"
    for name in ("productName", "brand", "architecture", "cudaComputeCapability", "driverVersion", "cudaDriverVersion")
)
POD_CLAIM_NAME = "resource.kubernetes.io/pod-claim-name"  # on a claim made by a template: what the pod calls it
_KEPT_OFF = ("NoSchedule", "NoExecute")

Key = tuple[str, str]  # namespace and name


class Claims(msgspec.Struct, kw_only=True):
    """What is claimed, as it was last seen."""

    claims: Mapping[Key, wire_devices.ResourceClaim] = {}
    templates: Mapping[Key, wire_devices.ResourceClaimTemplate] = {}
    classes: Mapping[str, wire_devices.DeviceClass] = {}
    made: Mapping[tuple[str, str], wire_devices.ResourceClaim] = {}  # by templates: by the pod's uid and its own name
    first_users: Mapping[Key, core.Pod] = {}  # of several pods that name one claim the first


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod claims."""

    gpu_count: int = 0
    slices: Slices = ()
    gpu_models: tuple[str, ...] = ()  # any of these; empty: whatever model
    gpu_memory_bytes_min: int | None = None  # of one GPU
    alternatives: tuple[tuple[NodeSelectorTerm, ...], ...] = ()  # of each claim that has its devices: where these are
    trouble: str = ""  # why nothing can be bought for it; empty: all of it was read


class Offered(msgspec.Struct, frozen=True, kw_only=True):
    """What a driver offers on a node."""

    gpu_count: int = 0
    slices: Slices = ()
    product: str | None = None


NOTHING_CLAIMED = Claimed()
NOTHING_OFFERED = Offered()


class _Unread(Exception):
    """Why a claim cannot be read."""


class _Named(NamedTuple):
    """One claim of a pod."""

    words: str
    spec: wire_devices.ResourceClaimSpec
    claim: wire_devices.ResourceClaim | None  # None: still to be made
    is_shared: bool


class _Asked(NamedTuple):
    """What one request comes to."""

    device_count: int
    fit: Fit


def claim_keys(pod: core.Pod) -> Iterator[Key]:
    """The claims that the pod names, and that others may name as well."""
    for named in pod.spec.resource_claims:
        if name := named.get("resourceClaimName"):
            yield pod.metadata.namespace, name


def claimed(pod: core.Pod, known: Claims) -> Claimed:
    """Return what the pod claims. A claim that is not there yet, or that another pod gets first, is trouble as well."""
    asked: list[_Asked] = []
    alternatives: list[tuple[NodeSelectorTerm, ...]] = []
    try:
        for named in _named(pod, known):
            allocation = None if named.claim is None else named.claim.status.allocation
            if allocation is None:
                asked += _wanted(pod, named, known)
                continue
            asked += _allocated(pod, named, allocation, known)
            if allocation.node_selector is not None and not pod.spec.node_name:
                alternatives.append(_terms(allocation.node_selector))
        return _sum(asked, tuple(alternatives))
    except _Unread as exc:
        return Claimed(trouble=str(exc))


def offered(slices: Iterable[wire_devices.ResourceSlice]) -> Offered:
    """Return the whole GPUs and the parts of GPUs in these slices of one node.

    Slices of an older generation of their pool do not count, nor devices that are tainted, nor parts that are cut out
    of a GPU as they are asked for: that GPU counts.
    """
    ours = [one for one in slices if one.spec.driver == GPU_DRIVER]
    newest: dict[str, int] = {}
    for one in ours:
        newest[one.spec.pool.name] = max(newest.get(one.spec.pool.name, 0), one.spec.pool.generation)
    devices = [
        device
        for one in ours
        if one.spec.pool.generation == newest[one.spec.pool.name]
        for device in one.spec.devices
        if not any(taint.effect in _KEPT_OFF for taint in device.taints)
    ]
    gpus = [device for device in devices if _word(device, "type") in (None, "gpu")]
    parts = [device for device in devices if _word(device, "type") == "mig" and not device.consumes_counters]
    profiles = Counter(f"{MIG_RESOURCE_PREFIX}{profile}" for device in parts if (profile := _word(device, "profile")))
    products = {product for device in (*gpus, *parts) if (product := _word(device, "productName")) is not None}
    return Offered(
        gpu_count=len(gpus),
        slices=tuple(sorted(profiles.items())),
        product=products.pop() if len(products) == 1 else None,
    )


def _named(pod: core.Pod, known: Claims) -> Iterator[_Named]:
    """Each claim of the pod, and what it is called. Raises _Unread for one that is not there."""
    namespace = pod.metadata.namespace
    for named in pod.spec.resource_claims:
        if template := named.get("resourceClaimTemplateName"):
            words = f"ResourceClaimTemplate {namespace}/{template}"
            made = known.made.get((pod.metadata.uid, named.get("name", "")))
            if made is not None:
                yield _Named(words, made.spec, made, is_shared=False)
            elif (found := known.templates.get((namespace, template))) is not None:
                yield _Named(words, found.spec.spec, None, is_shared=False)
            else:
                raise _Unread(f"{words} does not exist")
            continue
        name = named.get("resourceClaimName", "")
        claim = known.claims.get((namespace, name))
        if claim is None:
            raise _Unread(f"ResourceClaim {namespace}/{name} does not exist")
        yield _Named(f"ResourceClaim {namespace}/{name}", claim.spec, claim, is_shared=True)


def _wanted(pod: core.Pod, named: _Named, known: Claims) -> list[_Asked]:
    """What a claim asks for that has nothing yet. The first of the pods that name it gets it, with a place for all."""
    others = () if named.claim is None else named.claim.status.reserved_for
    first = next((user.name for user in others if user.uid != pod.metadata.uid), None)
    if named.is_shared and first is None:
        user = known.first_users.get((pod.metadata.namespace, named.words.rpartition("/")[2]), pod)
        first = None if user.metadata.uid == pod.metadata.uid else user.metadata.name
    if first is not None:
        raise _Unread(f"{named.words} is shared with {first}, and goes where that one is")
    devices = named.spec.devices
    asked = [_read(request, known, f"{named.words}, request {request.name}") for request in devices.requests]
    for constraint in devices.constraints:
        attribute = constraint.get("matchAttribute")
        if attribute not in _ALIKE and sum(each.device_count for each in asked) > 1:
            said = f"matchAttribute {attribute}" if attribute else ", ".join(sorted(constraint))
            raise _Unread(f"{named.words}, constraints, {said}: which GPUs of a machine have that in common")
    return asked


def _allocated(pod: core.Pod, named: _Named, allocation: wire_devices.Allocation, known: Claims) -> Iterator[_Asked]:
    """What a claim has got; of several pods that share it, it counts for the first one that it is reserved for."""
    users = () if named.claim is None else named.claim.status.reserved_for
    if named.is_shared and (not users or users[0].uid != pod.metadata.uid):
        return
    requests: dict[str, wire_devices.ExactRequest] = {}
    for request in named.spec.devices.requests:
        if request.exactly is not None:
            requests[request.name] = request.exactly
        requests |= {f"{request.name}/{one.name}": one for one in request.first_available}
    for result in allocation.devices.results:
        if result.driver != GPU_DRIVER or result.admin_access:
            continue
        try:
            yield _Asked(1, _fit(requests[result.request], known, named.words))
        except (_Unread, KeyError):
            yield _Asked(1, Fit())  # a device of the driver that is taken, whatever it was asked for as


def _sum(asked: Iterable[_Asked], alternatives: tuple[tuple[NodeSelectorTerm, ...], ...]) -> Claimed:
    """All requests of a pod together. Raises _Unread where no GPU is right for all of them."""
    counts, models, leasts = Counter[str](), None, list[int]()
    for one in asked:
        if not one.device_count:
            continue
        counts[one.fit.profile] += one.device_count
        if one.fit.models is not None:
            both = one.fit.models if models is None else models & one.fit.models
            if not both:
                words = " and ".join("/".join(sorted(each)) for each in (models or (), one.fit.models))
                raise _Unread(f"its claims want GPUs of {words} in one pod")
            models = both
        if one.fit.memory_bytes_min is not None:
            leasts.append(one.fit.memory_bytes_min)
    return Claimed(
        gpu_count=counts.pop("", 0),
        slices=tuple(sorted((f"{MIG_RESOURCE_PREFIX}{profile}", count) for profile, count in counts.items())),
        gpu_models=tuple(sorted(models or ())),
        gpu_memory_bytes_min=max(leasts, default=None),
        alternatives=alternatives,
    )


def _read(request: wire_devices.DeviceRequest, known: Claims, what: str) -> _Asked:
    """What a request comes to. Raises _Unread, which names the claim, the request and the field."""
    if request.exactly is not None:
        return _read_exactly(request.exactly, known, what)
    found = [_read_exactly(one, known, f"{what}, firstAvailable {one.name}") for one in request.first_available]
    if not found:
        raise _Unread(f"{what} says neither exactly nor firstAvailable")
    if len(set(found)) > 1:
        words = " or ".join(
            f"{each.device_count} x {'/'.join(sorted(each.fit.models or ())) or 'any GPU'}"
            f"{f' ({each.fit.profile})' if each.fit.profile else ''}"
            for each in found
        )
        raise _Unread(f"{what}, firstAvailable: it has alternatives ({words}), and which it gets nobody knows before")
    return found[0]


def _read_exactly(exact: wire_devices.ExactRequest, known: Claims, what: str) -> _Asked:
    if exact.admin_access:
        return _Asked(0, Fit())
    fit = _fit(exact, known, what)
    if exact.capacity and exact.capacity.get("requests"):
        raise _Unread(f"{what}, capacity: it is for a part of a device that others share")
    if exact.allocation_mode != "ExactCount":
        raise _Unread(
            f"{what}, allocationMode: it is for {exact.allocation_mode} devices of a node, however many these are"
        )
    return _Asked(exact.count, fit)


def _fit(exact: wire_devices.ExactRequest, known: Claims, what: str) -> Fit:
    """Which devices they are, by the conditions of their class and their own."""
    name = exact.device_class_name
    found = known.classes.get(name)
    if found is None:
        raise _Unread(f"{what}, deviceClassName: there is no DeviceClass {name}: its driver is not installed")
    conditions = _conditions(found.spec.selectors, f"{what}, deviceClassName {name}")
    conditions += [cel.condition(_CLASSES[name])] if name in _CLASSES else []
    if name not in _CLASSES and not is_about_gpus(conditions):
        raise _Unread(
            f"{what}, deviceClassName: it is for devices of class {name}, and which machines have them is not known"
        )
    conditions += _conditions(exact.selectors, f"{what}, selectors")
    fit = fit_of(conditions)
    if isinstance(fit, str):
        raise _Unread(f"{what}, {'selectors' if exact.selectors else f'deviceClassName {name}'}: {fit}")
    return fit


def _conditions(selectors: Iterable[wire_devices.DeviceSelector], what: str) -> list[cel.Condition]:
    try:
        return [cel.condition(one.cel.expression) for one in selectors]
    except cel.CelUnread as exc:
        raise _Unread(f"{what}: {exc}") from exc


def _terms(selector: core.NodeSelector) -> tuple[NodeSelectorTerm, ...]:
    return tuple(
        NodeSelectorTerm(requirements(term.match_expressions) + requirements(term.match_fields))
        for term in selector.node_selector_terms
    )


def _word(device: wire_devices.Device, attribute: str) -> str | None:
    """An attribute's word; drivers may write their own name before it."""
    found = device.attributes.get(attribute) or device.attributes.get(f"{GPU_DRIVER}/{attribute}")
    return None if found is None else found.string
