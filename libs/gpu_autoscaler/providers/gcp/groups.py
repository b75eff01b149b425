"""Zonal managed instance groups: what each offers, and what rules out its use.

A group launches what its one template says: one machine type under one purchase option. It must not act on its own:
with autohealing or an autoscaler it would launch or delete instances as well.
Sources: Compute Engine API v1, `InstanceGroupManager`, `InstanceProperties`; Compute Engine, "About repairing VMs in a
MIG" (defaultActionOnFailure); GKE, "Node pools" (their groups are GKE's); read 2026-11-21.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.gcp.catalog import KNOWN_INSTANCE_TYPES
from gpu_autoscaler.providers.gcp.client import GcpClient
from gpu_autoscaler.providers.gcp.options import ANY_POOL, GcpOptions, GroupName, group_names
from gpu_autoscaler.providers.gcp.translate import (
    InstanceType,
    capacity_type_of,
    denied_kind,
    group_suffix,
    last_of,
    parse_instance_type,
    reservation_of,
)
from gpu_autoscaler.providers.protocol import Order, misconfigured

GROUPS_KEPT = timedelta(minutes=5)
GKE_PREFIX = "gke-"


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """What one group offers, or why it is not used."""

    pool: str
    zone: str
    name: str
    kind: InstanceType | None = None
    capacity_type: CapacityType = CapacityType.ON_DEMAND
    reservation: str | None = None
    run_seconds: int | None = None  # of gangs launched by resize requests; None: no resize requests
    problems: tuple[str, ...] = ()  # each rules out purchases
    advice: tuple[str, ...] = ()  # does not rule out purchases

    @property
    def offer_key(self) -> str | None:
        """The group's only offer; None if the group is not used."""
        if self.problems or self.kind is None:
            return None
        return f"{self.kind.name}/{self.zone}/{self.capacity_type}"

    @property
    def suffix(self) -> str:
        """Suffix of the names of its instances."""
        return group_suffix(self.zone, self.name)


class GcpGroups:
    """The groups of the settings."""

    def __init__(self, client: GcpClient, options: GcpOptions) -> None:
        self._client = client
        self._names = group_names(options)
        self._region = options.region
        self._region_zones: tuple[str, ...] = ()
        self._templates_read = _Templates(client)
        self._groups: tuple[Group, ...] = ()
        self._read_at: datetime | None = None

    async def read(self, now: datetime) -> Sequence[Group]:
        """Return all groups of the settings; a missing one has a problem. Raises TransientError."""
        listed = {zone: await self._list(zone) for zone in await self.zones()}
        names = [name for group_name in self._names for name in self._zoned(group_name, listed)]
        groups = [await self._read_one(name, listed.get(name.zone)) for name in names]
        self._groups, self._read_at = tuple(_mark_conflicts(groups)), now
        return self._groups

    async def zones(self) -> Sequence[str]:
        """Return the zones of all groups, sorted; for a group without a zone, those of the region. Raises
        TransientError."""
        if not self._region_zones and self._region and not all(name.zone for name in self._names):
            region = await self._client.call("regions.get", region=self._region)
            self._region_zones = tuple(last_of(url) for url in region["zones"])
        return sorted({*self._region_zones, *(name.zone for name in self._names if name.zone)})

    def _zoned(self, name: GroupName, listed: Mapping[str, Mapping[str, Any] | None]) -> Sequence[GroupName]:
        """Return the name with each zone that has such a group; itself if it has a zone or none has such a group."""
        if name.zone:
            return (name,)
        zones = [zone for zone in self._region_zones if name.name in (listed[zone] or ())]
        return [msgspec.structs.replace(name, zone=zone) for zone in zones] or (name,)

    async def of(self, order: Order, now: datetime, *, for_gang: bool = False) -> Group:
        """Return the group of the order's pool that offers it. Raises LaunchRefused, TransientError."""
        if self._read_at is None or now - self._read_at >= GROUPS_KEPT:
            await self.read(now)
        groups = [group for group in self._groups if group.pool in (order.pool, ANY_POOL)]
        for group in groups:
            if group.offer_key == order.offer.key and (group.run_seconds is not None or not for_gang):
                return group
        known = "; ".join(
            f"{group.name} " + ("; ".join(group.problems) or f"offers {group.offer_key}") for group in groups
        )
        raise misconfigured(
            f"no group of pool {order.pool} offers {order.offer.key}: {known or 'it has none'}; check gcp.groups and"
            " the policy",
            "NoGroup",
        )

    def by_suffix(self, suffix: str) -> Group | None:
        """Return the group whose instance names have this suffix, as last read."""
        return next((group for group in self._groups if group.suffix == suffix), None)

    async def _list(self, zone: str) -> Mapping[str, Mapping[str, Any]] | None:
        """Return the zone's groups by name, None if there is no such zone."""
        try:
            pages = [page async for page in self._client.pages("instanceGroupManagers.list", zone=zone)]
        except TransientError as exc:
            if denied_kind(exc) != "configuration":
                raise
            return None
        return {group["name"]: group for page in pages for group in page.get("items", ())}

    async def _read_one(self, group_name: GroupName, listed: Mapping[str, Mapping[str, Any]] | None) -> Group:
        bare = Group(pool=group_name.pool, zone=group_name.zone, name=group_name.name)
        if group_name.name.startswith(GKE_PREFIX):
            why = "it belongs to a GKE node pool, which GKE sizes itself; create a managed instance group of your own"
            return msgspec.structs.replace(bare, problems=(why,))
        if not group_name.zone:
            where = f"not found in any zone of {self._region} of project {self._client.project}"
            return msgspec.structs.replace(bare, problems=(f"{where}; regional groups are not supported",))
        if listed is None or group_name.name not in listed:
            where = f"no zone {group_name.zone}" if listed is None else f"not found in {group_name.zone}"
            return msgspec.structs.replace(bare, problems=(f"{where} of project {self._client.project}",))
        group_data = listed[group_name.name]
        properties = await self._templates_read.properties(group_data)
        if properties is None:
            return msgspec.structs.replace(bare, problems=("its instance template does not exist",))
        kind = await self._templates_read.kind(group_name.zone, properties)
        problems = _problems(group_data, properties, is_shared=group_name.is_shared)
        if group_name.gang_type is not None:
            problems += _resize_request_problems(properties, group_name.gang_type)
        if kind is None:
            what = last_of(properties.get("machineType", ""))
            problems.append(f"its machine type {what!r} is not offered in {group_name.zone}, or has no NVIDIA GPUs")
        return msgspec.structs.replace(
            bare,
            kind=kind,
            capacity_type=capacity_type_of(properties),
            reservation=reservation_of(properties),
            run_seconds=group_name.run_seconds,
            problems=tuple(problems),
            advice=tuple(_advice(group_data, properties)),
        )


class _Templates:
    """Templates and machine types of groups. Both are immutable, so each is read once."""

    def __init__(self, client: GcpClient) -> None:
        self._client = client
        self._templates: dict[str, Mapping[str, Any]] = {}
        self._types: dict[tuple[str, str], Mapping[str, Any]] = {}

    async def properties(self, group_data: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the instance properties of a group's template; None if it does not exist."""
        versions = group_data.get("versions", ())
        url = group_data.get("instanceTemplate") or (versions[0].get("instanceTemplate") if versions else "")
        if url not in self._templates:
            name, parts = last_of(url), url.split("/")
            if "regions" in parts:
                region = parts[parts.index("regions") + 1]
                template = await self._client.find("regionInstanceTemplates.get", region=region, instanceTemplate=name)
            else:
                template = await self._client.find("instanceTemplates.get", instanceTemplate=name)
            if template is None:
                return None
            self._templates[url] = template.get("properties", {})
        return self._templates[url]

    async def kind(self, zone: str, properties: Mapping[str, Any]) -> InstanceType | None:
        """Return the machine type; None if the zone does not offer it. From the built-in table if reading is denied."""
        name, added = last_of(properties.get("machineType", "")), properties.get("guestAccelerators", ())
        if (zone, name) not in self._types:
            try:
                machine_type = await self._client.find("machineTypes.get", zone=zone, machineType=name)
            except TransientError as exc:
                if denied_kind(exc) == "permission" and name in KNOWN_INSTANCE_TYPES and not added:
                    return KNOWN_INSTANCE_TYPES[name]
                raise
            if machine_type is None:
                return None
            self._types[zone, name] = machine_type
        return parse_instance_type(self._types[zone, name], added)


def _mark_conflicts(groups: Sequence[Group]) -> list[Group]:
    """Return the groups; two that offer the same machine type with different GPUs are indistinguishable by labels."""
    first: dict[tuple[str, str], Group] = {}
    marked = []
    for group in groups:
        if group.kind is None:
            marked.append(group)
            continue
        other = first.setdefault((group.kind.name, group.zone), group)
        if other.kind != group.kind:
            why = (
                f"it offers {group.kind.name} with other GPUs than group {other.name}; a zone can have only one of them"
            )
            group = msgspec.structs.replace(group, problems=(*group.problems, why))  # noqa: PLW2901 - adds the conflict
        marked.append(group)
    return marked


def _problems(group_data: Mapping[str, Any], properties: Mapping[str, Any], *, is_shared: bool) -> list[str]:
    problems = []
    if len({version.get("instanceTemplate") for version in group_data.get("versions", ())}) > 1:
        problems.append("it has several templates (canary update); finish the update, or create a group for each")
    if group_data.get("distributionPolicy"):
        problems.append("it is regional, so Google would choose the zone; create a zonal group")
    if group_data.get("status", {}).get("autoscaler") and not is_shared:
        problems.append("its own autoscaler sizes it; delete the autoscaler")
    if group_data.get("instanceLifecyclePolicy", {}).get("defaultActionOnFailure") != "DO_NOTHING":
        problems.append(
            "it repairs failed instances: Google and gpu-autoscaler would both replace them;"
            " set instanceLifecyclePolicy.defaultActionOnFailure to DO_NOTHING"
        )
    if properties.get("scheduling", {}).get("provisioningModel") in ("FLEX_START", "RESERVATION_BOUND"):
        model = properties["scheduling"]["provisioningModel"]
        problems.append(f"its provisioning model is {model}, with an end date of its own; use SPOT or STANDARD")
    return problems


def _resize_request_problems(properties: Mapping[str, Any], wanted_type: str) -> list[str]:
    """Return what rules out resize requests (Compute Engine, "About resize requests in a MIG", limitations)."""
    problems = []
    machine_type = last_of(properties.get("machineType", ""))
    if machine_type != wanted_type:
        problems.append(
            f"it launches {machine_type}, not {wanted_type} as in gcp.resize_request_groups; correct the setting"
        )
    if capacity_type_of(properties) is CapacityType.SPOT:
        problems.append("resize requests do not support spot; remove it from gcp.resize_request_groups")
    if properties.get("reservationAffinity", {}).get("consumeReservationType") != "NO_RESERVATION":
        problems.append("resize requests require consumeReservationType NO_RESERVATION in its template")
    return problems


def _advice(group_data: Mapping[str, Any], properties: Mapping[str, Any]) -> list[str]:
    advice = []
    scheduling = properties.get("scheduling", {})
    if group_data.get("status", {}).get("autoscaler"):
        advice.append(
            "make sure that its autoscaler, accepted by gcp.shared_groups, only adds: it may delete a busy node"
        )
    is_spot = capacity_type_of(properties) is CapacityType.SPOT
    if is_spot and scheduling.get("instanceTerminationAction") != "DELETE":
        advice.append("set instanceTerminationAction to DELETE, or preempted machines keep their disks and their cost")
    if group_data.get("updatePolicy", {}).get("type") == "PROACTIVE":
        advice.append("set updatePolicy.type to OPPORTUNISTIC, or a new template replaces busy nodes at once")
    return advice
