"""Scale sets: flexible ones, which machines join by reference, and uniform ones with a capacity.

A capacity that cannot be reached stays: a machine is created as soon as there is capacity, wanted or not.
"""

import itertools
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from gpu_autoscaler.simcloud.azure.machines import Machine, Machines
from gpu_autoscaler.simcloud.azure.wire import rejected
from gpu_autoscaler.simcloud.rest import RestCall


class _Set(msgspec.Struct, kw_only=True):
    body: dict[str, Any]
    version: int
    state: str = "Succeeded"


class ScaleSets:
    """Scale sets of a resource group."""

    def __init__(
        self, machines: Machines, now: Callable[[], datetime], region: str, id_of: Callable[[str, str], str]
    ) -> None:
        self._machines = machines
        self._now = now
        self._region = region
        self._id_of = id_of
        self._sets: dict[str, _Set] = {}
        self._versions = itertools.count(1)
        self._members = itertools.count(0)

    def put(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Create the scale set; a uniform one creates its first machines."""
        self._sets[name] = _Set(body=body, version=next(self._versions))
        self._grow(name, self.capacity(name))
        return self.described(name)

    def get(self, name: str) -> dict[str, Any]:
        """Return the body of a set, to read or change. Raises Rejected."""
        return self._get(name).body

    def capacity(self, name: str) -> int:
        return int((self._get(name).body.get("sku") or {}).get("capacity", 0))

    def described(self, name: str) -> dict[str, Any]:
        """Return the set in Azure's format. Raises Rejected."""
        scale_set = self._get(name)
        properties = {
            "provisioningState": scale_set.state,
            "orchestrationMode": "Uniform",
            **scale_set.body["properties"],
        }
        known = {"id": self._id_of("virtualMachineScaleSets", name), "name": name, "etag": f'"{scale_set.version}"'}
        return {**scale_set.body, **known, "properties": properties}

    def see_member(self, name: str, zones: Sequence[str]) -> None:
        """Raise Rejected for a machine that cannot join this flexible set."""
        described = self.described(name)
        if described["properties"]["orchestrationMode"] != "Flexible":
            raise rejected(400, "InvalidParameter", f"{name} is uniform: a machine cannot say that it belongs to it.")
        if not set(zones) <= set(described.get("zones") or ()):
            raise rejected(400, "InvalidParameter", f"{name} has no zone {', '.join(zones)}.")

    def offer_key(self, name: str) -> str:
        """Return `type/zone/capacity type` of a uniform set."""
        return self._new_member(name).offer_key

    def growth(self, call: RestCall) -> int:
        wanted = (call.body.get("sku") or {}).get("capacity")
        return 0 if wanted is None else int(wanted) - self.capacity(call.parameters["scale_set"])

    def planned(self, call: RestCall) -> list[Machine]:
        return [self._new_member(call.parameters["scale_set"]) for _ in range(self.growth(call))]

    def update(self, call: RestCall, *, is_failing: bool = False) -> dict[str, Any]:
        """Apply tags and capacity. Raises Rejected if the ETag does not match."""
        name = call.parameters["scale_set"]
        scale_set, believed = self._get(name), call.parameters.get("if-match")
        if believed not in (None, "*", f'"{scale_set.version}"'):
            raise rejected(412, "PreconditionFailed", "The If-Match condition is not met: the resource has changed.")
        growth = self.growth(call)
        scale_set.body |= {key: call.body[key] for key in ("sku", "tags", "zones") if key in call.body}
        scale_set.body["properties"] |= call.body.get("properties") or {}
        scale_set.version = next(self._versions)
        scale_set.state = "Failed" if is_failing else "Succeeded"
        if not is_failing:
            self._grow(name, growth)
        return self.described(name)

    def delete(self, name: str, instance_ids: Sequence[str]) -> datetime | None:
        """Start deleting these machines and lower the capacity; return when. Raises Rejected for unknown ones."""
        scale_set = self._get(name)
        members = {machine.instance_id: machine for machine in self._there(name)}
        for instance_id in instance_ids:
            if instance_id not in members:
                raise rejected(404, "InstanceIdNotFound", f"{instance_id} is no instance of {name}.")
            if members[instance_id].ends_at is None:
                scale_set.body["sku"]["capacity"] -= 1
            self._machines.delete(members[instance_id])
        scale_set.version = next(self._versions)
        return max((members[instance_id].ended_by_user_at or self._now() for instance_id in instance_ids), default=None)

    def members(self, name: str) -> list[dict[str, Any]]:
        now, prefix = self._now(), self._member_id(name, "").lower()
        self._get(name)
        return [
            machine.described(now)
            for machine in self._machines.listed()
            if machine.resource_id.lower().startswith(prefix)
        ]

    def _there(self, name: str) -> list[Machine]:
        prefix = self._member_id(name, "").lower()
        return [machine for machine in self._machines.there() if machine.resource_id.lower().startswith(prefix)]

    def _grow(self, name: str, count: int) -> None:
        for _ in range(count):
            self._machines.begin(self._new_member(name))
        for machine in reversed(self._there(name)[count:] if count < 0 else []):
            self._machines.delete(machine)  # its own choice, as Azure's

    def _new_member(self, name: str) -> Machine:
        body, now = self._get(name).body, self._now()
        number = str(next(self._members))
        profile = body["properties"].get("virtualMachineProfile") or {}
        return Machine(
            resource_id=self._member_id(name, number),
            name=f"{name}_{number}",
            location=self._region,
            zones=list(body.get("zones") or ()),
            tags=dict(body.get("tags") or {}),  # of the set at this time; they cannot be changed afterwards
            size=(body.get("sku") or {}).get("name", ""),
            is_spot=profile.get("priority") == "Spot",
            properties={},
            created_at=now,
            runs_at=now + timedelta(seconds=self._machines.boot_seconds),
            shown_at=now + timedelta(seconds=self._machines.shown_after_seconds),
            instance_id=number,
        )

    def _member_id(self, name: str, number: str) -> str:
        return self._id_of("virtualMachineScaleSets", f"{name}/virtualMachines/{number}")

    def _get(self, name: str) -> _Set:
        scale_set = self._sets.get(name)
        if scale_set is None:
            raise rejected(404, "ResourceNotFound", f"The scale set '{name}' was not found.")
        return scale_set
