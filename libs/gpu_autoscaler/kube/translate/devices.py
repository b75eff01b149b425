"""What claims of devices mean for a pod, and slices of devices for a node: whole GPUs of NVIDIA's driver.

The plain case is read: so many GPUs, of a named product or of any. What cannot be read is said, so that nothing is
bought for it on a guess. Source: Kubernetes, "Dynamic Resource Allocation"; NVIDIA, "DRA Driver for GPUs", device
classes and attributes (read 2026-11-21).
"""

import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from gpu_autoscaler.kube import wire, wire_devices
from gpu_autoscaler.model.gpu import GPU_MODELS, gpu_model_name

GPU_DRIVER = GPU_CLASS = "gpu.nvidia.com"
# device.attributes["gpu.nvidia.com"].productName == "NVIDIA H100 80GB HBM3", and the same of `type`.
_ATTRIBUTE = re.compile(
    r"""\s*device\.attributes\[\s*(?:"gpu\.nvidia\.com"|'gpu\.nvidia\.com')\s*\]\.(productName|type)"""
    r"""\s*==\s*(?:"([^"]*)"|'([^']*)')\s*"""
)
_DRIVER = re.compile(r"""\s*device\.driver\s*==\s*(?:"gpu\.nvidia\.com"|'gpu\.nvidia\.com')\s*""")

Key = tuple[str, str]  # namespace and name


class Claims(msgspec.Struct, kw_only=True):
    """What is claimed, as it was last seen."""

    claims: Mapping[Key, wire_devices.ResourceClaim] = {}
    templates: Mapping[Key, wire_devices.ResourceClaimTemplate] = {}
    classes: frozenset[str] = frozenset()


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod claims."""

    gpu_count: int = 0
    gpu_model: str | None = None  # None: any
    trouble: str = ""  # why nothing can be bought for it; empty: all of it was read


class Offered(msgspec.Struct, frozen=True, kw_only=True):
    """What a driver offers on a node."""

    gpu_count: int = 0
    product: str | None = None


NOTHING_CLAIMED = Claimed()
NOTHING_OFFERED = Offered()


class _Unread(Exception):
    """Why a claim cannot be read."""


def claimed(pod: wire.Pod, known: Claims) -> Claimed:
    """Return what the pod claims. A claim that is not there yet, or that others have, is trouble as well."""
    try:
        return _claimed(pod, known)
    except _Unread as exc:
        return Claimed(trouble=str(exc))


def _claimed(pod: wire.Pod, known: Claims) -> Claimed:
    count, models = 0, set[str]()
    for spec in _specs(pod, known):
        for request in spec.devices.requests:
            found, model = _read(request, known)
            count += found
            models |= {model} if model else set()
        if spec.devices.constraints:
            raise _Unread("its devices must have something in common")
    if len(models) > 1:
        raise _Unread(f"it wants GPUs of {' and '.join(sorted(models))} in one pod")
    return Claimed(gpu_count=count, gpu_model=next(iter(models), None))


def offered(slices: Iterable[wire_devices.ResourceSlice]) -> Offered:
    """Return the whole GPUs in these slices of one node. Slices of an older generation of their pool do not count."""
    ours = [one for one in slices if one.spec.driver == GPU_DRIVER]
    newest: dict[str, int] = {}
    for one in ours:
        newest[one.spec.pool.name] = max(newest.get(one.spec.pool.name, 0), one.spec.pool.generation)
    gpus = [
        device
        for one in ours
        if one.spec.pool.generation == newest[one.spec.pool.name]
        for device in one.spec.devices
        if _word(device, "type") in (None, "gpu")
    ]
    products = {product for device in gpus if (product := _word(device, "productName")) is not None}
    return Offered(gpu_count=len(gpus), product=products.pop() if len(products) == 1 else None)


def _specs(pod: wire.Pod, known: Claims) -> Iterator[wire_devices.ResourceClaimSpec]:
    namespace = pod.metadata.namespace
    for named in pod.spec.resource_claims:
        if template := named.get("resourceClaimTemplateName"):
            found = known.templates.get((namespace, template))
            if found is None:
                raise _Unread(f"ResourceClaimTemplate {namespace}/{template} does not exist")
            yield found.spec.spec
            continue
        name = named.get("resourceClaimName", "")
        claim = known.claims.get((namespace, name))
        if claim is None:
            raise _Unread(f"ResourceClaim {namespace}/{name} does not exist")
        others = [user.name for user in claim.status.reserved_for if user.uid != pod.metadata.uid]
        if others:
            raise _Unread(f"ResourceClaim {namespace}/{name} is shared with {others[0]}, and goes where that one is")
        yield claim.spec


def _read(request: wire_devices.DeviceRequest, known: Claims) -> tuple[int, str | None]:
    """How many GPUs, and of which model. Raises _Unread."""
    exact, what = request.exactly, f"request {request.name}"
    if exact is None:
        raise _Unread(f"{what} has alternatives")
    if exact.admin_access:
        return 0, None
    if exact.device_class_name != GPU_CLASS:
        raise _Unread(
            f"{what} is for devices of class {exact.device_class_name}, and which machines have them is not known"
        )
    if exact.device_class_name not in known.classes:
        raise _Unread(f"there is no DeviceClass {exact.device_class_name}: its driver is not installed")
    if exact.allocation_mode != "ExactCount":
        raise _Unread(f"{what} is for {exact.allocation_mode} devices of a node, however many these are")
    models = {model for one in exact.selectors for model in _models(one.cel.expression, what)}
    if len(models) > 1:
        raise _Unread(f"{what} wants a GPU to be {' and '.join(sorted(models))}")
    return exact.count, next(iter(models), None)


def _models(expression: str, what: str) -> Iterator[str]:
    """The models that a condition names. Raises _Unread for whatever says more, or something else."""
    for part in expression.split("&&"):
        if _DRIVER.fullmatch(part):
            continue
        found = _ATTRIBUTE.fullmatch(part)
        if found is None:
            raise _Unread(f"{what} has a condition that is not understood: {part.strip()[:120]}")
        attribute, value = found[1], found[2] or found[3] or ""
        if attribute == "productName":
            model = gpu_model_name(value)
            if model is None:
                raise _Unread(f"{what} is for a {value[:60]}, which is no GPU model that is known")
            if GPU_MODELS[model].memory_bytes is None:
                raise _Unread(f"{what} is for a {value[:60]}, and {model} is sold in sizes that are not told apart")
            yield model
        elif value != "gpu":
            raise _Unread(f"{what} is for a part of a GPU ({value[:60]})")


def _word(device: wire_devices.Device, attribute: str) -> str | None:
    """An attribute's word; drivers may write their own name before it."""
    found = device.attributes.get(attribute) or device.attributes.get(f"{GPU_DRIVER}/{attribute}")
    return None if found is None else found.string
