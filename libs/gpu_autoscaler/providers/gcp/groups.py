"""Zonal managed groups: what each sells, and why nothing is bought from one that could answer with something else.

A group makes what its one template says, so it sells one machine type under one purchase option. It must not act on its
own: a group that repairs, or that has an autoscaler, would buy or remove beside us.
Sources: Compute Engine API v1, `InstanceGroupManager`, `InstanceProperties`; Compute Engine, "About repairing VMs in a
MIG" (defaultActionOnFailure); GKE, "Node pools" (their groups are GKE's); read 2026-11-21.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.gcp.calls import GcpClient
from gpu_autoscaler.providers.gcp.known_kinds import KNOWN_INSTANCE_TYPES
from gpu_autoscaler.providers.gcp.options import ANY_POOL, GroupName
from gpu_autoscaler.providers.gcp.translate import (
    Kind,
    capacity_type_of,
    denied_kind,
    group_suffix,
    kind_of,
    last_of,
    reservation_of,
)
from gpu_autoscaler.providers.protocol import LaunchRefused, Order

GROUPS_KEPT = timedelta(minutes=5)
GKE_PREFIX = "gke-"


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """What one group sells, or why nothing is bought from it."""

    pool: str
    zone: str
    name: str
    kind: Kind | None = None
    capacity_type: CapacityType = CapacityType.ON_DEMAND
    reservation: str | None = None
    run_seconds: int | None = None  # of what is made by resize requests, as gangs are; None: nothing is
    problems: tuple[str, ...] = ()  # that stop purchases
    advice: tuple[str, ...] = ()  # that does not

    @property
    def offer_key(self) -> str | None:
        """The one offer that it stands for, None where nothing is bought from it."""
        if self.problems or self.kind is None:
            return None
        return f"{self.kind.name}/{self.zone}/{self.capacity_type}"

    @property
    def suffix(self) -> str:
        """How the names of its instances end."""
        return group_suffix(self.zone, self.name)


class GcpGroups:
    """The groups of the settings."""

    def __init__(self, calls: GcpClient, names: Sequence[GroupName]) -> None:
        self._calls = calls
        self._names = names
        self._parts = _Parts(calls)
        self._groups: tuple[Group, ...] = ()
        self._read_at: datetime | None = None

    async def read(self, now: datetime) -> Sequence[Group]:
        """Return every group of the settings; one that is missing has that for its problem. Raises TransientError."""
        shown = {zone: await self._shown(zone) for zone in sorted({named.zone for named in self._names})}
        read = [await self._read_one(named, shown[named.zone]) for named in self._names]
        self._groups, self._read_at = tuple(_without_doubles(read)), now
        return self._groups

    async def of(self, order: Order, now: datetime, *, is_together: bool = False) -> Group:
        """Return the group of the order's pool that sells its offer. Raises LaunchRefused, TransientError."""
        if self._read_at is None or now - self._read_at >= GROUPS_KEPT:
            await self.read(now)
        groups = [group for group in self._groups if group.pool in (order.pool, ANY_POOL)]
        for one in groups:
            if one.offer_key == order.offer.key and (one.run_seconds is not None or not is_together):
                return one
        told = "; ".join(_told(group) for group in groups) or "it has none"
        raise LaunchRefused(
            f"NoGroup: no group of pool {order.pool} sells {order.offer.key}: {told}; see gcp.groups and the policy",
            code="NoGroup",
            kind="configuration",
            scope="offer",
        )

    def by_suffix(self, suffix: str) -> Group | None:
        """Return the group whose instances' names end so, as it was last read."""
        return next((group for group in self._groups if group.suffix == suffix), None)

    async def _shown(self, zone: str) -> Mapping[str, Mapping[str, Any]] | None:
        """Return the zone's groups by name, None where there is no such zone."""
        try:
            pages = [page async for page in self._calls.pages("instanceGroupManagers.list", zone=zone)]
        except TransientError as exc:
            if denied_kind(exc) != "configuration":
                raise
            return None
        return {one["name"]: one for page in pages for one in page.get("items", ())}

    async def _read_one(self, named: GroupName, shown: Mapping[str, Mapping[str, Any]] | None) -> Group:
        bare = Group(pool=named.pool, zone=named.zone, name=named.name)
        if named.name.startswith(GKE_PREFIX):
            why = "it is a GKE node pool's, which GKE sizes and resets itself; make a managed group of your own"
            return msgspec.structs.replace(bare, problems=(why,))
        if shown is None or named.name not in shown:
            where = f"there is no zone {named.zone}" if shown is None else f"there is no such group in {named.zone}"
            return msgspec.structs.replace(bare, problems=(f"{where} of project {self._calls.project}",))
        told = shown[named.name]
        properties = await self._parts.properties(told)
        if properties is None:
            return msgspec.structs.replace(bare, problems=("its instance template is not there",))
        kind = await self._parts.kind(named.zone, properties)
        problems = _problems(told, properties, is_shared=named.is_shared)
        if named.together_type is not None:
            problems += _together_problems(properties, named.together_type)
        if kind is None:
            what = last_of(properties.get("machineType", ""))
            problems.append(f"its machine type {what!r} is not sold in {named.zone}, or has GPUs that are not NVIDIA's")
        return msgspec.structs.replace(
            bare,
            kind=kind,
            capacity_type=capacity_type_of(properties),
            reservation=reservation_of(properties),
            run_seconds=named.run_seconds,
            problems=tuple(problems),
            advice=tuple(_advice(told, properties)),
        )


class _Parts:
    """What groups are made of: templates and machine types. Neither ever changes, so each is asked for once."""

    def __init__(self, calls: GcpClient) -> None:
        self._calls = calls
        self._templates: dict[str, Mapping[str, Any]] = {}
        self._types: dict[tuple[str, str], Mapping[str, Any]] = {}

    async def properties(self, told: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return what a group makes its instances from, None where that is not there."""
        versions = told.get("versions", ())
        url = told.get("instanceTemplate") or (versions[0].get("instanceTemplate") if versions else "")
        if url not in self._templates:
            name, parts = last_of(url), url.split("/")
            if "regions" in parts:
                region = parts[parts.index("regions") + 1]
                found = await self._calls.find("regionInstanceTemplates.get", region=region, instanceTemplate=name)
            else:
                found = await self._calls.find("instanceTemplates.get", instanceTemplate=name)
            if found is None:
                return None
            self._templates[url] = found.get("properties", {})
        return self._templates[url]

    async def kind(self, zone: str, properties: Mapping[str, Any]) -> Kind | None:
        """Return the machine, None where the zone does not sell it. From the bundled table where we may not ask."""
        name, added = last_of(properties.get("machineType", "")), properties.get("guestAccelerators", ())
        if (zone, name) not in self._types:
            try:
                found = await self._calls.find("machineTypes.get", zone=zone, machineType=name)
            except TransientError as exc:
                if denied_kind(exc) == "permission" and name in KNOWN_INSTANCE_TYPES and not added:
                    return KNOWN_INSTANCE_TYPES[name]
                raise
            if found is None:
                return None
            self._types[zone, name] = found
        return kind_of(self._types[zone, name], added)


def _told(group: Group) -> str:
    return f"{group.name} " + ("; ".join(group.problems) or f"sells {group.offer_key}")


def _without_doubles(groups: Sequence[Group]) -> list[Group]:
    """Two groups may sell one offer, but it has to be the same machine: Kubernetes' label tells them not apart."""
    first: dict[tuple[str, str], Group] = {}
    found = []
    for one in groups:
        if one.kind is None:
            found.append(one)
            continue
        other = first.setdefault((one.kind.name, one.zone), one)
        if other.kind != one.kind:
            why = f"it sells {one.kind.name} with other GPUs than group {other.name}; a zone can have but one of them"
            one = msgspec.structs.replace(one, problems=(*one.problems, why))  # noqa: PLW2901 - the same group, told more
        found.append(one)
    return found


def _problems(told: Mapping[str, Any], properties: Mapping[str, Any], *, is_shared: bool) -> list[str]:
    found = []
    if len({version.get("instanceTemplate") for version in told.get("versions", ())}) > 1:
        found.append("it has several templates (a canary); finish the update, or make a group for each")
    if told.get("distributionPolicy"):
        found.append("it is regional, so that the zone would be Google's choice; make a zonal group")
    if told.get("status", {}).get("autoscaler") and not is_shared:
        found.append("it has an autoscaler of its own, so that two would size it; delete the autoscaler")
    if told.get("instanceLifecyclePolicy", {}).get("defaultActionOnFailure") != "DO_NOTHING":
        found.append(
            "it repairs what fails, so that Google and we would both replace it;"
            " set instanceLifecyclePolicy.defaultActionOnFailure to DO_NOTHING"
        )
    if properties.get("scheduling", {}).get("provisioningModel") in ("FLEX_START", "RESERVATION_BOUND"):
        model = properties["scheduling"]["provisioningModel"]
        found.append(f"its template is {model}, which ends by a date of its own; use SPOT or STANDARD")
    return found


def _together_problems(properties: Mapping[str, Any], wanted_type: str) -> list[str]:
    """Why no resize request is made of it (Compute Engine, "About resize requests in a MIG", limitations)."""
    found = []
    machine_type = last_of(properties.get("machineType", ""))
    if machine_type != wanted_type:
        found.append(f"it makes {machine_type}, and not {wanted_type} as gcp.together_groups says; correct the setting")
    if capacity_type_of(properties) is CapacityType.SPOT:
        found.append("resize requests take no spot; take it out of gcp.together_groups")
    if properties.get("reservationAffinity", {}).get("consumeReservationType") != "NO_RESERVATION":
        found.append("for resize requests set consumeReservationType of its template to NO_RESERVATION")
    return found


def _advice(told: Mapping[str, Any], properties: Mapping[str, Any]) -> list[str]:
    found = []
    scheduling = properties.get("scheduling", {})
    if told.get("status", {}).get("autoscaler"):
        found.append("see that its own autoscaler, which stays by gcp.shared_groups, only adds: it may end a busy node")
    is_spot = capacity_type_of(properties) is CapacityType.SPOT
    if is_spot and scheduling.get("instanceTerminationAction") != "DELETE":
        found.append("set instanceTerminationAction to DELETE, or machines that were taken keep their disks, and cost")
    if told.get("updatePolicy", {}).get("type") == "PROACTIVE":
        found.append("set updatePolicy.type to OPPORTUNISTIC, or a new template replaces busy nodes at once")
    return found
