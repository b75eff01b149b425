"""Managed groups, their instances, and operations, by our clock.

A group that cannot create an instance keeps trying until the request is deleted, as the real ones do. Deleted instances
leave only operations. Sources: Compute Engine, "Managed instance groups", "Instance life cycle"; read 2026-11-21.
"""

import hashlib
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import msgspec

from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.simcloud.gcp.catalog import KINDS, is_added

PROJECT, PROJECT_NUMBER = "fake-project", "123456789012"
BASE = f"https://www.googleapis.com/compute/v1/projects/{PROJECT}"
_RESERVED = "-reserved-"  # in the names of templates
ENDING_SECONDS = 5.0  # fixture: from the deletion request until the instance is gone
TRIED_AGAIN_SECONDS = 30.0  # fixture: a group's retry interval
MOUNTAIN_VIEW = timezone(timedelta(hours=-8))  # UTC offset of Compute Engine's timestamps


class Operation(msgspec.Struct, kw_only=True):
    """A request or event."""

    name: str
    kind: str
    zone: str
    target: str
    began_at: datetime
    ends_at: datetime
    error: tuple[str, str] | None = None
    request_id: str | None = None

    def described(self, now: datetime) -> dict[str, Any]:
        is_done = now >= self.ends_at
        shown: dict[str, Any] = {
            "name": self.name,
            "operationType": self.kind,
            "zone": f"{BASE}/zones/{self.zone}",
            "targetLink": self.target,
            "status": "DONE" if is_done else "RUNNING",
            "progress": 100 if is_done else 0,
            "insertTime": stamp(self.began_at),
            "startTime": stamp(self.began_at),
        }
        if is_done:
            shown["endTime"] = stamp(self.ends_at)
        if is_done and self.error is not None:
            shown["error"] = {"errors": [{"code": self.error[0], "message": self.error[1]}]}
        if self.request_id is not None:
            shown["clientOperationId"] = self.request_id
        return shown


class Machine(msgspec.Struct, kw_only=True):
    """A created instance."""

    name: str
    zone: str
    group: str
    machine_type: str
    is_spot: bool
    reservation: str | None
    metadata: dict[str, str]
    created_at: datetime
    runs_at: datetime
    shown_at: datetime
    stopped_at: datetime | None = None  # stopped, and still existing
    gone_at: datetime | None = None  # when its deletion completes

    def status(self, now: datetime) -> str:
        if self.gone_at is not None:
            return "STOPPING"
        if self.stopped_at is not None:
            return "TERMINATED"
        return "RUNNING" if now >= self.runs_at else "STAGING"

    @property
    def is_alive(self) -> bool:
        """True until its end begins."""
        return self.gone_at is None and self.stopped_at is None

    @property
    def capacity_type(self) -> CapacityType:
        return _capacity_type(self.reservation, is_spot=self.is_spot)

    @property
    def url(self) -> str:
        return f"{BASE}/zones/{self.zone}/instances/{self.name}"

    def described(self, now: datetime) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "name": self.name,
            "id": str(int(hashlib.sha256(self.url.encode()).hexdigest()[:15], 16)),
            "selfLink": self.url,
            "zone": f"{BASE}/zones/{self.zone}",
            "machineType": f"{BASE}/zones/{self.zone}/machineTypes/{self.machine_type}",
            "status": self.status(now),
            "creationTimestamp": stamp(self.created_at),
            "scheduling": _scheduling(is_spot=self.is_spot),
            "metadata": {"items": [{"key": key, "value": value} for key, value in self.metadata.items()]},
        }
        if self.reservation is not None:
            shown["reservationAffinity"] = affinity_of(self.reservation)
        if self.stopped_at is not None:
            shown["lastStopTimestamp"] = stamp(self.stopped_at)
        return shown


class Wanted(msgspec.Struct, kw_only=True):
    """A requested name in a group, and its progress."""

    name: str
    metadata: dict[str, str]
    tried_at: datetime
    error: tuple[str, str] | None = None  # of the last attempt
    is_made: bool = False


class Group(msgspec.Struct, kw_only=True):
    """A zonal managed group. `described`: what the API shows beside names and sizes; tests may change it."""

    name: str
    zone: str
    machine_type: str
    is_spot: bool
    described: dict[str, Any]
    wanted: dict[str, Wanted] = {}
    reservation: str | None = None  # from which its machines are launched exclusively

    @property
    def offer_key(self) -> str:
        """The group's only offer."""
        return f"{self.machine_type}/{self.zone}/{_capacity_type(self.reservation, is_spot=self.is_spot)}"

    @property
    def template(self) -> str:
        """The template's name."""
        if self.reservation is not None:
            return f"{self.machine_type}{_RESERVED}{self.reservation}"
        return template_name(self.machine_type, is_spot=self.is_spot)

    def shown(self) -> dict[str, Any]:
        template = f"{BASE}/global/instanceTemplates/{self.template}"
        return {
            "name": self.name,
            "zone": f"{BASE}/zones/{self.zone}",
            "baseInstanceName": self.name,
            "instanceTemplate": template,
            "versions": [{"instanceTemplate": template}],
            "targetSize": len(self.wanted),
            "listManagedInstancesResults": "PAGINATED",
            "instanceLifecyclePolicy": {"defaultActionOnFailure": "DO_NOTHING"},
            "updatePolicy": {"type": "OPPORTUNISTIC"},
            "status": {"isStable": True},
            **self.described,
        }


class Machines:
    """All resources of the project. `now` may be a test's clock."""

    def __init__(self, now: Callable[[], datetime], refusal_of: Callable[[str], str | None]) -> None:
        """`refusal_of`: why an offer cannot be launched now, None if it can."""
        self._clock = now
        self._refusal_of = refusal_of
        self.boot_seconds = 0.0
        self.decided_seconds = 0.0  # from a request until the group created the instance, or failed to
        self.shown_after_seconds = 0.0
        self.groups: dict[tuple[str, str], Group] = {}  # by zone and name
        self.machines: dict[tuple[str, str], Machine] = {}
        self.operations: list[Operation] = []
        self.launches_count = 0
        self.ended_at: dict[str, datetime] = {}  # by name, of deleted ones

    def add_group(
        self, zone: str, machine_type: str, *, is_spot: bool, name: str | None = None, reservation: str | None = None
    ) -> Group:
        name = name or template_name(machine_type, is_spot=is_spot)
        group = Group(
            name=name,
            zone=zone,
            machine_type=machine_type,
            is_spot=is_spot,
            described={},
            wanted={},
            reservation=reservation,
        )
        self.groups[zone, name] = group
        return group

    def _now(self) -> datetime:
        """Return the time in milliseconds, Google's precision."""
        now = self._clock()
        return now.replace(microsecond=now.microsecond // 1000 * 1000)

    def want(self, group: Group, name: str, metadata: dict[str, str]) -> None:
        group.wanted[name] = Wanted(
            name=name, metadata=metadata, tried_at=self._now() + timedelta(seconds=self.decided_seconds)
        )
        self.settle()

    def unwant(self, group: Group, name: str) -> None:
        """Cancel the request of this name, and delete its instance if there is one."""
        machine = self.machines.get((group.zone, name))
        if machine is None:
            group.wanted.pop(name, None)
        elif machine.gone_at is None:
            self.delete(machine)

    def delete(self, machine: Machine) -> None:
        machine.gone_at = self._now() + timedelta(seconds=ENDING_SECONDS)
        self.record("delete", machine.zone, machine.url, ends_at=machine.gone_at)

    def stop(self, name: str) -> datetime:
        """Stop the instance from within; it continues to exist."""
        machine = self._named(name)
        machine.stopped_at = self._now()
        return machine.stopped_at

    def preempt(self, name: str) -> datetime:
        """Preempt the instance, and delete it, as the template says."""
        machine, now = self._named(name), self._now()
        self.record("compute.instances.preempted", machine.zone, machine.url, ends_at=now)
        machine.gone_at = now
        self.record("delete", machine.zone, machine.url, ends_at=now)
        self.settle()
        return now

    def settle(self) -> None:
        now = self._now()
        for group in self.groups.values():
            for wanted in group.wanted.values():
                if not wanted.is_made and now >= wanted.tried_at:
                    self._try(group, wanted, now)
        for key, machine in list(self.machines.items()):
            if machine.gone_at is not None and now >= machine.gone_at:
                self.ended_at[machine.name] = machine.gone_at
                self.groups[machine.zone, machine.group].wanted.pop(machine.name, None)
                del self.machines[key]

    def record(
        self,
        kind: str,
        zone: str,
        target: str,
        *,
        ends_at: datetime,
        error: tuple[str, str] | None = None,
        request_id: str | None = None,
    ) -> Operation:
        operation = Operation(
            name=f"operation-{len(self.operations)}",
            kind=kind,
            zone=zone,
            target=target,
            began_at=self._now(),
            ends_at=ends_at,
            error=error,
            request_id=request_id,
        )
        self.operations.append(operation)
        return operation

    def shown(self, zone: str | None = None) -> Iterator[Machine]:
        now = self._now()
        for machine in self.machines.values():
            if now >= machine.shown_at and zone in (None, machine.zone):
                yield machine

    def stock(self, name: str, count: int) -> None:
        """Create copies of an instance, without individual launches."""
        model = self._named(name)
        group = self.groups[model.zone, model.group]
        prefix = name[: len("gpu-00000000-")]
        for number in range(count):
            twin = msgspec.structs.replace(model, name=f"{prefix}{number:032x}-{name[-6:]}")
            self.machines[twin.zone, twin.name] = twin
            group.wanted[twin.name] = Wanted(
                name=twin.name, metadata=twin.metadata, tried_at=twin.created_at, is_made=True
            )

    def _try(self, group: Group, wanted: Wanted, now: datetime) -> None:
        code = self._refusal_of(group.offer_key)
        target = f"{BASE}/zones/{group.zone}/instances/{wanted.name}"
        if code is not None:
            wanted.error = (code, f"{group.machine_type} in {group.zone} cannot be made now.")
            wanted.tried_at = now + timedelta(seconds=TRIED_AGAIN_SECONDS)
            self.record("insert", group.zone, target, ends_at=now, error=wanted.error)
            return
        self.make(group, wanted, now)

    def make(self, group: Group, wanted: Wanted, now: datetime) -> None:
        target = f"{BASE}/zones/{group.zone}/instances/{wanted.name}"
        wanted.is_made, wanted.error = True, None
        self.launches_count += 1
        creator = f"projects/{PROJECT_NUMBER}/zones/{group.zone}/instanceGroupManagers/{group.name}"
        self.machines[group.zone, wanted.name] = Machine(
            name=wanted.name,
            zone=group.zone,
            group=group.name,
            machine_type=group.machine_type,
            is_spot=group.is_spot,
            reservation=group.reservation,
            metadata={"created-by": creator, **wanted.metadata},
            created_at=now,
            runs_at=now + timedelta(seconds=self.boot_seconds),
            shown_at=now + timedelta(seconds=self.shown_after_seconds),
        )
        self.record("insert", group.zone, target, ends_at=now)

    def _named(self, name: str) -> Machine:
        return next(machine for machine in self.machines.values() if machine.name == name)


def template_name(machine_type: str, *, is_spot: bool) -> str:
    """Return the fake's name for the template of a machine type."""
    return f"{machine_type}-{'spot' if is_spot else 'on-demand'}"


def template_properties(name: str) -> dict[str, Any] | None:
    """Return the instance properties of a template, None if there is none of this name."""
    head, _, reservation = name.partition(_RESERVED)
    if reservation:
        base = template_properties(template_name(head, is_spot=False))
        return None if base is None else {**base, "reservationAffinity": affinity_of(reservation)}
    is_spot = name.endswith("-spot")
    machine_type = name.removesuffix("-spot").removesuffix("-on-demand")
    if machine_type not in KINDS or machine_type == name:
        return None
    properties: dict[str, Any] = {"machineType": machine_type, "scheduling": _scheduling(is_spot=is_spot)}
    if not is_spot:
        properties["reservationAffinity"] = {"consumeReservationType": "NO_RESERVATION"}
    kind = KINDS[machine_type]
    if is_added(machine_type):
        properties["guestAccelerators"] = [
            {"acceleratorType": kind.accelerator, "acceleratorCount": kind.resources.gpu_count}
        ]
    return properties


def _scheduling(*, is_spot: bool) -> dict[str, Any]:
    spot = {"provisioningModel": "SPOT", "preemptible": True, "instanceTerminationAction": "DELETE"}
    return {"provisioningModel": "STANDARD", "onHostMaintenance": "TERMINATE"} | (spot if is_spot else {})


def affinity_of(reservation: str) -> dict[str, Any]:
    """Return the properties that target this reservation exclusively."""
    return {
        "consumeReservationType": "SPECIFIC_RESERVATION",
        "key": "compute.googleapis.com/reservation-name",
        "values": [reservation],
    }


def _capacity_type(reservation: str | None, *, is_spot: bool) -> CapacityType:
    if reservation is not None:
        return CapacityType.RESERVED
    return CapacityType.SPOT if is_spot else CapacityType.ON_DEMAND


def stamp(at: datetime) -> str:
    """Return an instant in Compute Engine's format."""
    return at.astimezone(MOUNTAIN_VIEW).isoformat(timespec="milliseconds")
