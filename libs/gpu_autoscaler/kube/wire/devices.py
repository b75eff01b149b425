"""Dynamic resource allocation on the wire: what pods claim of devices, and what drivers offer on nodes.

Source: Kubernetes API reference v1.36, resource.k8s.io/v1, "ResourceClaim", "ResourceClaimTemplate", "DeviceClass",
"ResourceSlice" (read 2026-11-22). How a device is configured is not read.
"""

from typing import Any

import msgspec

from gpu_autoscaler.kube.wire.core import NodeSelector, Object


class _Wire(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Base, as in `wire.py`."""


class CelSelector(_Wire, frozen=True, kw_only=True):
    """A condition on a device, in CEL."""

    expression: str = ""


class DeviceSelector(_Wire, frozen=True, kw_only=True):
    """A condition on a device."""

    cel: CelSelector = CelSelector()


class ExactRequest(_Wire, frozen=True, kw_only=True):
    """Devices of one class."""

    device_class_name: str = ""
    selectors: tuple[DeviceSelector, ...] = ()
    allocation_mode: str = "ExactCount"
    count: int = 1
    admin_access: bool = False  # to look at devices that others use
    capacity: dict[str, Any] | None = None  # so much of each device, which others may share


class SubRequest(ExactRequest, frozen=True, kw_only=True):
    """One of several alternatives."""

    name: str


class DeviceRequest(_Wire, frozen=True, kw_only=True):
    """Devices, said exactly or as alternatives, the one that is liked best first."""

    name: str
    exactly: ExactRequest | None = None
    first_available: tuple[SubRequest, ...] = ()


class DeviceClaim(_Wire, frozen=True, kw_only=True):
    """All that is claimed, and what the devices must have in common."""

    requests: tuple[DeviceRequest, ...] = ()
    constraints: tuple[dict[str, Any], ...] = ()


class ResourceClaimSpec(_Wire, frozen=True, kw_only=True):
    """What is claimed."""

    devices: DeviceClaim = DeviceClaim()


class Consumer(_Wire, frozen=True, kw_only=True):
    """Who may use what was allocated."""

    name: str = ""
    uid: str = ""


class AllocatedDevice(_Wire, frozen=True, kw_only=True):
    """One device that a claim has got."""

    request: str = ""  # its name; of an alternative request/alternative
    driver: str = ""
    admin_access: bool = False


class AllocatedDevices(_Wire, frozen=True, kw_only=True):
    """All devices that a claim has got."""

    results: tuple[AllocatedDevice, ...] = ()


class Allocation(_Wire, frozen=True, kw_only=True):
    """What a claim has got, and from which nodes it can be used."""

    devices: AllocatedDevices = AllocatedDevices()
    node_selector: NodeSelector | None = None


class ResourceClaimStatus(_Wire, frozen=True, kw_only=True):
    """Who has it, and what it has got."""

    allocation: Allocation | None = None
    reserved_for: tuple[Consumer, ...] = ()


class ResourceClaim(Object, frozen=True, kw_only=True):
    """A claim that pods name."""

    spec: ResourceClaimSpec = ResourceClaimSpec()
    status: ResourceClaimStatus = ResourceClaimStatus()


class TemplateSpec(_Wire, frozen=True, kw_only=True):
    """The claim that is made for each pod."""

    spec: ResourceClaimSpec = ResourceClaimSpec()


class ResourceClaimTemplate(Object, frozen=True, kw_only=True):
    """A claim of its own for each pod that names it."""

    spec: TemplateSpec = TemplateSpec()


class DeviceClassSpec(_Wire, frozen=True, kw_only=True):
    """What all of its devices are."""

    selectors: tuple[DeviceSelector, ...] = ()


class DeviceClass(Object, frozen=True, kw_only=True):
    """A kind of device."""

    spec: DeviceClassSpec = DeviceClassSpec()


class DeviceAttribute(_Wire, frozen=True, kw_only=True):
    """What a device is, where that is a word."""

    string: str | None = None


class DeviceTaint(_Wire, frozen=True, kw_only=True):
    """Why a device is not to be used."""

    effect: str = ""


class Device(_Wire, frozen=True, kw_only=True):
    """One device."""

    name: str
    attributes: dict[str, DeviceAttribute] = {}
    consumes_counters: tuple[dict[str, Any], ...] = ()  # it is cut out of what others of these are cut out of as well
    taints: tuple[DeviceTaint, ...] = ()


class DevicePool(_Wire, frozen=True, kw_only=True):
    """Which slices belong together: those of an older generation are out of date."""

    name: str = ""
    generation: int = 0


class ResourceSliceSpec(_Wire, frozen=True, kw_only=True):
    """Devices of one driver on one node."""

    driver: str = ""
    node_name: str = ""
    pool: DevicePool = DevicePool()
    devices: tuple[Device, ...] = ()


class ResourceSlice(Object, frozen=True, kw_only=True):
    """What a driver offers."""

    spec: ResourceSliceSpec = ResourceSliceSpec()
