"""Life cycle of Azure's machines by our clock: boot, delayed listing, failure, slow deletion, eviction.

A deleted machine is gone: no call reports it afterwards.
"""

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import msgspec

TERMINATING_SECONDS = 5.0  # fixture: from the deletion request until the machine is gone


class Machine(msgspec.Struct, kw_only=True):
    """One virtual machine, of either orchestration mode."""

    resource_id: str
    name: str
    location: str
    zones: list[str]
    tags: dict[str, str]
    size: str
    is_spot: bool
    properties: dict[str, Any]  # as requested
    created_at: datetime
    runs_at: datetime
    shown_at: datetime
    instance_id: str | None = None  # of uniform orchestration
    failure: tuple[str, str] | None = None  # code and message of a failed allocation
    ends_at: datetime | None = None
    ended_by_user_at: datetime | None = None

    @property
    def offer_key(self) -> str:
        """`type/zone/capacity type`."""
        zone = f"{self.location}-{self.zones[0]}" if self.zones else "0"
        return f"{self.size}/{zone}/{'spot' if self.is_spot else 'on-demand'}"

    def is_there(self, now: datetime) -> bool:
        return self.ends_at is None or now < self.ends_at

    def is_alive(self, now: datetime) -> bool:
        """Return whether it runs or is starting."""
        return self.failure is None and self.is_there(now)

    def state(self, now: datetime) -> str:
        """Return `provisioningState`."""
        if self.ends_at is not None:
            return "Deleting"
        if self.failure is not None:
            return "Failed"
        return "Succeeded" if now >= self.runs_at else "Creating"

    def described(self, now: datetime, *, with_view: bool = False) -> dict[str, Any]:
        state = {"provisioningState": self.state(now), "timeCreated": self.created_at.isoformat()}
        properties: dict[str, Any] = self.properties | state
        # Passwords and scripts are never returned.
        system = properties.get("osProfile")
        if isinstance(system, dict):
            properties["osProfile"] = {k: v for k, v in system.items() if k not in ("adminPassword", "customData")}
        if with_view:
            properties["instanceView"] = {"statuses": [self._status(now)]}
        described: dict[str, Any] = {
            "id": self.resource_id,
            "name": self.name,
            "location": self.location,
            "tags": self.tags,
            "properties": properties,
        }
        if self.instance_id is not None:
            described |= {"instanceId": self.instance_id, "sku": {"name": self.size, "tier": "Standard"}}
        return described | {"zones": self.zones} if self.zones else described

    def _status(self, now: datetime) -> dict[str, str]:
        if self.failure is not None:
            code, message = self.failure
            return {"code": f"ProvisioningState/failed/{code}", "level": "Error", "message": message}
        return {"code": f"ProvisioningState/{self.state(now).lower()}", "level": "Info"}


class Machines:
    """All machines ever created, by id in lower case. `now` may be a test's clock."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        self.boot_seconds = 0.0
        self.shown_after_seconds = 0.0
        self._now = now
        self._machines: dict[str, Machine] = {}

    def begin(self, machine: Machine) -> Machine:
        self._machines[machine.resource_id.lower()] = machine
        return machine

    def get(self, resource_id: str) -> Machine | None:
        """Return the machine if it can be read."""
        machine = self._machines.get(resource_id.lower())
        return machine if machine is not None and machine.is_there(self._now()) else None

    def there(self) -> Iterator[Machine]:
        now = self._now()
        return (machine for machine in self._machines.values() if machine.is_there(now))

    def listed(self) -> list[Machine]:
        now = self._now()
        return [machine for machine in self.there() if now >= machine.shown_at]

    def ever(self) -> list[Machine]:
        """Return all machines, including deleted ones."""
        return list(self._machines.values())

    def delete(self, machine: Machine) -> None:
        """Start the deletion; idempotent."""
        if machine.ends_at is None:
            now = self._now()
            # A machine that was never allocated has nothing to stop.
            machine.ends_at = now if machine.failure else now + timedelta(seconds=TERMINATING_SECONDS)
            machine.ended_by_user_at = now

    def evict(self, resource_id: str) -> datetime:
        """Evict it, with eviction policy Delete; return the time."""
        now = self._now()
        self._machines[resource_id.lower()].ends_at = now
        return now

    def stock(self, resource_id: str, count: int) -> None:
        """Create copies of a machine, with its tags: a large fleet without individual launches."""
        model = self._machines[resource_id.lower()]
        head = model.resource_id.rpartition("/")[0]
        for number in range(count):
            name = f"copy-{number}"
            self.begin(msgspec.structs.replace(model, resource_id=f"{head}/{name}", name=name, tags=dict(model.tags)))
