"""What a scale set offers, and what must change before it is used.

An interrupted machine must have one successor: if Azure restores, repairs or scales the set by itself, both Azure and
gpu-autoscaler would launch one. Sources: Azure documentation, "Orchestration modes", "Automatic instance repairs", "Use
Azure Spot Virtual Machine Scale Sets" (try to restore), "Overview of autoscale", "Modify a scale set"
(overprovisioning); read 2026-11-22.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal

import msgspec

from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.azure.client import AzureClient
from gpu_autoscaler.providers.azure.translate import INSTALLATION_TAG, Denied, read_tags, zone_name

SETS_KEPT = timedelta(minutes=5)
Mode = Literal["Flexible", "Uniform"]


class ScaleSet(msgspec.Struct, frozen=True, kw_only=True):
    """A scale set as last read. A flexible one offers any size, a uniform one its own."""

    name: str
    mode: Mode
    zones: tuple[str, ...] = ()
    instance_type: str | None = None  # None: any
    capacity_type: CapacityType | None = None
    problems: tuple[str, ...] = ()  # each rules out purchases
    advice: tuple[str, ...] = ()  # does not rule out purchases

    def sells(self, instance_type: str, zone: str, capacity_type: CapacityType) -> bool:
        return (
            not self.problems
            and zone in self.zones
            and self.instance_type in (None, instance_type)
            and self.capacity_type in (None, capacity_type)
        )


class ScaleSets:
    """The scale sets of the settings."""

    def __init__(self, client: AzureClient, installation: str, modes: Mapping[str, Mode]) -> None:
        """`modes`: required orchestration mode of each configured set, by name."""
        self._client = client
        self._installation = installation
        self._modes = modes
        self._sets: tuple[ScaleSet, ...] = ()
        self._read_at: datetime | None = None

    async def read(self, now: datetime) -> Sequence[ScaleSet]:
        """Return all sets; a missing one has a problem. Raises TransientError."""
        if self._read_at is None or now - self._read_at >= SETS_KEPT:
            autoscalers = await self._autoscalers()
            self._sets = tuple([await self._read_one(name, mode, autoscalers) for name, mode in self._modes.items()])
            self._read_at = now
        return self._sets

    async def _read_one(self, name: str, mode: Mode, autoscalers: Mapping[str, str]) -> ScaleSet:
        set_data = await self._client.find("VirtualMachineScaleSets_Get", scale_set=name)
        if set_data is None:
            return ScaleSet(name=name, mode=mode, problems=(f"not found in {self._client.group_id}",))
        problems = problems_of(set_data, mode, self._client.region)
        autoscaler = autoscalers.get(self._client.id_of("virtualMachineScaleSets", name).lower())
        if autoscaler is not None:
            problems.append(f"Azure's autoscale setting {autoscaler} also sizes it; disable that setting")
        zones = zones_in(set_data, self._client.region)
        if mode == "Flexible":
            return ScaleSet(name=name, mode=mode, zones=zones, problems=tuple(problems))
        owner = read_tags(set_data).get(INSTALLATION_TAG)
        if owner is None:
            problems.append(f"it has no owner; tag it {INSTALLATION_TAG} with your installation's id")
        elif self._installation not in (owner, "*"):
            problems.append(f"its tag {INSTALLATION_TAG} names another installation, {owner}")
        if len(zones) > 1:
            problems.append(f"it is in {len(zones)} zones, so Azure would choose; create a scale set for each zone")
        profile = set_data["properties"].get("virtualMachineProfile") or {}
        is_spot = profile.get("priority") in ("Spot", "Low")
        if is_spot and profile.get("evictionPolicy") != "Delete":
            problems.append("its spot machines are deallocated on eviction; set its eviction policy to Delete")
        return ScaleSet(
            name=name,
            mode=mode,
            zones=zones,
            instance_type=(set_data.get("sku") or {}).get("name", ""),
            capacity_type=CapacityType.SPOT if is_spot else CapacityType.ON_DEMAND,
            problems=tuple(problems),
        )

    async def _autoscalers(self) -> dict[str, str]:
        """Return enabled autoscale settings by the id of their target; none if reading them is not allowed."""
        try:
            return {
                str(setting["properties"].get("targetResourceUri", "")).lower(): setting["name"]
                async for setting in self._client.pages("AutoscaleSettings_ListByResourceGroup")
                if setting["properties"].get("enabled", True)
            }
        except Denied:
            return {}


def zones_in(set_data: Mapping[str, Any], region: str) -> tuple[str, ...]:
    """Return the set's zones in the form of node labels."""
    return tuple(sorted(zone_name(region, [zone]) for zone in set_data.get("zones") or ())) or (zone_name(region, ()),)


def problems_of(set_data: Mapping[str, Any], required_mode: Mode, region: str) -> list[str]:
    """Return what rules out purchases from this set, each with its fix."""
    properties, problems = set_data["properties"], []
    mode = properties.get("orchestrationMode", "Uniform")
    if mode != required_mode:
        setting = "azure.scale_set" if mode == "Flexible" else "azure.scale_sets"
        problems.append(f"its orchestration mode is {mode}; name it in {setting}")
    if set_data["location"].lower().replace(" ", "") != region.lower():
        problems.append(f"it is in {set_data['location']}; set azure.region to that")
    if (properties.get("automaticRepairsPolicy") or {}).get("enabled"):
        problems.append(
            "its automatic repairs are on: Azure and gpu-autoscaler would both replace a machine; turn them off"
        )
    if (properties.get("spotRestorePolicy") or {}).get("enabled"):
        problems.append("it restores spot machines: Azure and gpu-autoscaler would both replace one; turn that off")
    if mode == "Uniform" and properties.get("overprovision", True):
        problems.append("it overprovisions: Azure creates more machines than ordered and deletes some; turn that off")
    return problems
