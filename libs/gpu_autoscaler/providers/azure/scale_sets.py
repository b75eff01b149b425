"""What a scale set sells, and what has to be changed before anything is bought from it.

One interruption has one successor: where Azure restores, repairs or scales the set by itself, both it and we would buy
one. Sources: Azure documentation, "Orchestration modes", "Automatic instance repairs", "Use Azure Spot Virtual Machine
Scale Sets" (try to restore), "Overview of autoscale", "Modify a scale set" (overprovisioning); read 2026-11-22.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal

import msgspec

from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.azure.calls import AzureClient
from gpu_autoscaler.providers.azure.translate import INSTALLATION_TAG, Denied, read_tags, zone_name

SETS_KEPT = timedelta(minutes=5)
Mode = Literal["Flexible", "Uniform"]


class ScaleSet(msgspec.Struct, frozen=True, kw_only=True):
    """One scale set as it was read last. A flexible one sells any size, a uniform one its own."""

    name: str
    mode: Mode
    zones: tuple[str, ...] = ()
    instance_type: str | None = None  # None: any
    capacity_type: CapacityType | None = None
    problems: tuple[str, ...] = ()  # that stop purchases
    advice: tuple[str, ...] = ()  # that does not

    def sells(self, instance_type: str, zone: str, capacity_type: CapacityType) -> bool:
        """Return whether an order for this may go to the set."""
        return (
            not self.problems
            and zone in self.zones
            and self.instance_type in (None, instance_type)
            and self.capacity_type in (None, capacity_type)
        )


class ScaleSets:
    """The scale sets of the settings."""

    def __init__(self, calls: AzureClient, installation: str, modes: Mapping[str, Mode]) -> None:
        """`modes`: how each set of the settings has to be orchestrated, by its name."""
        self._calls = calls
        self._installation = installation
        self._modes = modes
        self._sets: tuple[ScaleSet, ...] = ()
        self._read_at: datetime | None = None

    async def read(self, now: datetime) -> Sequence[ScaleSet]:
        """Return every set; one that is missing has that for its problem. Raises TransientError."""
        if self._read_at is None or now - self._read_at >= SETS_KEPT:
            scaled = await self._scaled_by_others()
            self._sets = tuple([await self._read_one(name, mode, scaled) for name, mode in self._modes.items()])
            self._read_at = now
        return self._sets

    async def _read_one(self, name: str, mode: Mode, scaled: Mapping[str, str]) -> ScaleSet:
        told = await self._calls.find("VirtualMachineScaleSets_Get", scale_set=name)
        if told is None:
            return ScaleSet(name=name, mode=mode, problems=(f"there is no such scale set in {self._calls.group_id}",))
        problems = problems_of(told, mode, self._calls.region)
        autoscaler = scaled.get(self._calls.id_of("virtualMachineScaleSets", name).lower())
        if autoscaler is not None:
            problems.append(f"Azure's autoscale setting {autoscaler} changes its number as well; turn that off")
        zones = zones_in(told, self._calls.region)
        if mode == "Flexible":
            return ScaleSet(name=name, mode=mode, zones=zones, problems=tuple(problems))
        owner = read_tags(told).get(INSTALLATION_TAG)
        if owner is None:
            problems.append(f"nobody's installation is named on it; tag it {INSTALLATION_TAG} with the id of yours")
        elif self._installation not in (owner, "*"):
            problems.append(f"its tag {INSTALLATION_TAG} names another installation, {owner}")
        if len(zones) > 1:
            problems.append(f"it is in {len(zones)} zones, of which Azure chooses; make a scale set for each zone")
        profile = told["properties"].get("virtualMachineProfile") or {}
        is_spot = profile.get("priority") in ("Spot", "Low")
        if is_spot and profile.get("evictionPolicy") != "Delete":
            problems.append("its spot machines are stopped and not deleted; set its eviction policy to Delete")
        return ScaleSet(
            name=name,
            mode=mode,
            zones=zones,
            instance_type=(told.get("sku") or {}).get("name", ""),
            capacity_type=CapacityType.SPOT if is_spot else CapacityType.ON_DEMAND,
            problems=tuple(problems),
        )

    async def _scaled_by_others(self) -> dict[str, str]:
        """Return the autoscale settings that are on, by the id of what they scale; none where we may not look."""
        try:
            return {
                str(one["properties"].get("targetResourceUri", "")).lower(): one["name"]
                async for one in self._calls.pages("AutoscaleSettings_ListByResourceGroup")
                if one["properties"].get("enabled", True)
            }
        except Denied:
            return {}


def zones_in(told: Mapping[str, Any], region: str) -> tuple[str, ...]:
    """Return the zones that a set's machines may be in, as nodes are labelled with them."""
    return tuple(sorted(zone_name(region, [zone]) for zone in told.get("zones") or ())) or (zone_name(region, ()),)


def problems_of(told: Mapping[str, Any], wanted_mode: Mode, region: str) -> list[str]:
    """Return what stops purchases from this set, each with what is to be changed."""
    properties, found = told["properties"], []
    mode = properties.get("orchestrationMode", "Uniform")
    if mode != wanted_mode:
        setting = "azure.scale_set" if mode == "Flexible" else "azure.scale_sets"
        found.append(f"its orchestration is {mode}; name it in {setting}")
    if told["location"].lower().replace(" ", "") != region.lower():
        found.append(f"it is in {told['location']}; set azure.region to that")
    if (properties.get("automaticRepairsPolicy") or {}).get("enabled"):
        found.append("its automatic repairs are on, so that Azure and we would both replace a machine; turn them off")
    if (properties.get("spotRestorePolicy") or {}).get("enabled"):
        found.append("it tries to restore spot machines, so that Azure and we would both replace one; turn that off")
    if mode == "Uniform" and properties.get("overprovision", True):
        found.append("it overprovisions: Azure makes more than are asked for, and ends some of them; turn that off")
    return found
