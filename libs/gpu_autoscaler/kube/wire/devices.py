"""Dynamic resource allocation: the device claims of pods, and the devices of drivers on nodes.

Source: Kubernetes API reference v1.36, resource.k8s.io/v1, "ResourceClaim", "ResourceClaimTemplate", "DeviceClass",
"ResourceSlice" (read 2026-11-22). How a device is configured is not read.
"""

from typing import Any

import msgspec

from gpu_autoscaler.kube.wire.core import NodeSelector, Object, Wire


class CelSelector(Wire, frozen=True, kw_only=True):
    """A CEL expression on a device."""

    expression: str = ""


class DeviceSelector(Wire, frozen=True, kw_only=True):
    """A device selector."""

    cel: CelSelector = CelSelector()


class ExactRequest(Wire, frozen=True, kw_only=True):
    """A request for devices of one class."""

    device_class_name: str = ""
    selectors: tuple[DeviceSelector, ...] = ()
    allocation_mode: str = "ExactCount"
    count: int = 1
    admin_access: bool = False  # for monitoring devices in use
    capacity: dict[str, Any] | None = None  # a share of each device


class SubRequest(ExactRequest, frozen=True, kw_only=True):
    """One of several alternative requests."""

    name: str


class DeviceRequest(Wire, frozen=True, kw_only=True):
    """A request for devices: exact, or alternatives in order of preference."""

    name: str
    exactly: ExactRequest | None = None
    first_available: tuple[SubRequest, ...] = ()


class DeviceClaim(Wire, frozen=True, kw_only=True):
    """All requests of a claim, and constraints between their devices."""

    requests: tuple[DeviceRequest, ...] = ()
    constraints: tuple[dict[str, Any], ...] = ()


class ResourceClaimSpec(Wire, frozen=True, kw_only=True):
    """The spec of a claim."""

    devices: DeviceClaim = DeviceClaim()


class Consumer(Wire, frozen=True, kw_only=True):
    """A user of an allocated claim."""

    name: str = ""
    uid: str = ""


class AllocatedDevice(Wire, frozen=True, kw_only=True):
    """One device allocated to a claim."""

    request: str = ""  # its name; for an alternative `request/alternative`
    driver: str = ""
    admin_access: bool = False


class AllocatedDevices(Wire, frozen=True, kw_only=True):
    """All devices allocated to a claim."""

    results: tuple[AllocatedDevice, ...] = ()


class Allocation(Wire, frozen=True, kw_only=True):
    """The allocation of a claim: its devices, and the nodes that can use them."""

    devices: AllocatedDevices = AllocatedDevices()
    node_selector: NodeSelector | None = None


class ResourceClaimStatus(Wire, frozen=True, kw_only=True):
    """The status of a claim."""

    allocation: Allocation | None = None
    reserved_for: tuple[Consumer, ...] = ()


class ResourceClaim(Object, frozen=True, kw_only=True):
    """A ResourceClaim."""

    spec: ResourceClaimSpec = ResourceClaimSpec()
    status: ResourceClaimStatus = ResourceClaimStatus()


class TemplateSpec(Wire, frozen=True, kw_only=True):
    """The claim created for each pod."""

    spec: ResourceClaimSpec = ResourceClaimSpec()


class ResourceClaimTemplate(Object, frozen=True, kw_only=True):
    """A ResourceClaimTemplate: a separate claim for each pod that names it."""

    spec: TemplateSpec = TemplateSpec()


class DeviceClassSpec(Wire, frozen=True, kw_only=True):
    """The spec of a device class."""

    selectors: tuple[DeviceSelector, ...] = ()


class DeviceClass(Object, frozen=True, kw_only=True):
    """A DeviceClass."""

    spec: DeviceClassSpec = DeviceClassSpec()


class DeviceAttribute(Wire, frozen=True, kw_only=True):
    """A string attribute of a device."""

    string: str | None = None


class DeviceTaint(Wire, frozen=True, kw_only=True):
    """A taint of a device."""

    effect: str = ""


class Device(Wire, frozen=True, kw_only=True):
    """A device."""

    name: str
    attributes: dict[str, DeviceAttribute] = msgspec.field(default_factory=dict)
    consumes_counters: tuple[dict[str, Any], ...] = ()  # shares counters with other devices, such as slices of one GPU
    taints: tuple[DeviceTaint, ...] = ()


class DevicePool(Wire, frozen=True, kw_only=True):
    """The pool of a slice; slices of an older generation are outdated."""

    name: str = ""
    generation: int = 0


class ResourceSliceSpec(Wire, frozen=True, kw_only=True):
    """The spec of a ResourceSlice: devices of one driver on one node."""

    driver: str = ""
    node_name: str = ""
    pool: DevicePool = DevicePool()
    devices: tuple[Device, ...] = ()


class ResourceSlice(Object, frozen=True, kw_only=True):
    """A ResourceSlice."""

    spec: ResourceSliceSpec = ResourceSliceSpec()
