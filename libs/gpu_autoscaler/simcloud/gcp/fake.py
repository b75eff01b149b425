"""Fake Compute Engine and billing catalog: the calls that the driver makes, with faults."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.gcp.translate import quota_metric
from gpu_autoscaler.simcloud.gcp import catalog
from gpu_autoscaler.simcloud.gcp.description import description
from gpu_autoscaler.simcloud.gcp.machines import BASE, PROJECT, Group, Machine, Machines, stamp, template_properties
from gpu_autoscaler.simcloud.gcp.resize import ResizeRequests
from gpu_autoscaler.simcloud.rest import Rejected, RestAnswer, RestCall, RestFake


class Reservation(msgspec.Struct, kw_only=True):
    """One reservation that must be targeted by name."""

    name: str
    zone: str
    machine_type: str
    count: int
    created_at: datetime

    def used_count(self, machines: Iterable[Machine]) -> int:
        return sum(1 for machine in machines if (machine.zone, machine.reservation) == (self.zone, self.name))

    def described(self, machines: Iterable[Machine]) -> dict[str, Any]:
        return {
            "name": self.name,
            "zone": f"{BASE}/zones/{self.zone}",
            "status": "READY",
            "creationTimestamp": stamp(self.created_at),
            "specificReservationRequired": True,
            "specificReservation": {
                "count": str(self.count),
                "inUseCount": str(self.used_count(machines)),
                "instanceProperties": {"machineType": self.machine_type},
            },
        }


CREATE = "instanceGroupManagers.createInstances"
REQUESTS = "instanceGroupManagerResizeRequests"
INSERT = f"{REQUESTS}.insert"
LAUNCHES = (CREATE, INSERT)
REQUEST_KEPT = timedelta(minutes=60)  # Compute Engine API v1, `requestId`
QUOTA_GPUS = 1024.0  # fixture: of unset quotas
# Errors that are the answer itself; all other launch errors appear later, with the instance.
# Source: Compute Engine, "Resolve API errors"; Cloud APIs, "Errors" (read 2026-11-21).
ERRORS = {
    "authError": (401, "Invalid Credentials"),
    "forbidden": (403, "Required permission is missing"),
    "accessNotConfigured": (403, "Compute Engine API has not been used in project before or it is disabled."),
    "rateLimitExceeded": (403, "Rate Limit Exceeded"),
    "invalid": (400, "Invalid value for field"),
    "notFound": (404, "The resource was not found"),
    "alreadyExists": (409, "The resource already exists"),
    "conditionNotMet": (412, "Supplied fingerprint does not match current"),
    "backendError": (503, "Internal error. Please try again or contact Google Support."),
}
_FILTER = re.compile(r'^(\w+) eq "(.*)"$')


class GcpFake(RestFake):
    """One project in one region. Set faults on `faults`, times and groups on `machines`, quotas by attribute."""

    def __init__(self, *, now: Callable[[], datetime] | None = None) -> None:
        """Raises ImportError if googleapiclient is not installed."""
        super().__init__(now=now)
        self._description = description()
        self.machines = Machines(self.now, self._refusal_of)
        self.resizes = ResizeRequests(self.machines, self._refusal_of)
        self.room: dict[str, int] = {}  # by offer key: maximum number at once
        self.quota_gpus: dict[str, float] = {}  # metric: GPUs that may run at once
        self.reservations: dict[tuple[str, str], Reservation] = {}  # by zone and name
        self.missing_permissions: set[str] = set()  # as testIamPermissions reports; calls are refused by faults
        self.lists_behind_count = 0  # lists of managed instances that are still empty
        self.spot_ratio_of: Callable[[str], float] = lambda _: 1.0  # by offer key: times the usual price
        self.unseen_zones: set[str] = set()  # unreachable for lists
        self._next_code: str | None = None

    def offer_everything(self, machine_types: Iterable[str] = tuple(catalog.KINDS)) -> list[str]:
        """Add a group for each type in each zone, spot and on-demand; return their names for settings."""
        groups = [
            self.machines.add_group(zone, name, is_spot=is_spot)
            for name in machine_types
            for zone in catalog.ZONES
            for is_spot in (False, True)
        ]
        return [f"*={group.zone}/{group.name}" for group in groups]

    def reserve(self, name: str, machine_type: str, zone: str, count: int) -> str:
        """Add a reservation and a group that targets it; return the group's name for settings."""
        self.reservations[zone, name] = Reservation(
            name=name, zone=zone, machine_type=machine_type, count=count, created_at=self.now()
        )
        group = self.machines.add_group(
            zone, machine_type, is_spot=False, name=f"{machine_type}-{name}", reservation=name
        )
        return f"*={zone}/{group.name}"

    # ---- base class

    def read_call(
        self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes
    ) -> RestCall:
        match = self._description.find(method, path)
        if match is None:
            raise self._rejected("notFound", f"{method} {path} is no call of this API")
        called, parameters = match
        try:
            sent = msgspec.json.decode(body) if body else None
        except msgspec.DecodeError as exc:
            raise self._rejected("invalid", f"Invalid JSON payload received. {exc}") from exc
        violations = [
            *self._description.query_violations(called, query),
            *self._description.body_violations(called, sent),
        ]
        if violations:
            raise self._rejected("invalid", "Invalid JSON payload received. " + " ".join(violations))
        if not headers.get("authorization", "").startswith("Bearer "):
            raise self._rejected("authError", "Request is missing required authentication credential.")
        if parameters.get("project", PROJECT) != PROJECT:
            why = f"Required 'compute' permission for 'projects/{parameters['project']}', or it does not exist"
            raise self._rejected("forbidden", why)
        return RestCall(name=called.name, parameters={**parameters, **query}, body=sent)

    def offer_of(self, call: RestCall) -> str:
        if call.name not in LAUNCHES:
            return ""
        group = self.machines.groups.get((call.parameters["zone"], call.parameters["instanceGroupManager"]))
        return "" if group is None else group.offer_key

    def refuse(self, call: RestCall, code: str) -> RestAnswer:
        """Return the error; later launch errors are accepted now and appear with the instance."""
        if code in ERRORS or call.name not in LAUNCHES:
            return self._error(code)
        self._next_code = code
        try:
            return self.perform(call)
        finally:
            self._next_code = None

    def lost(self) -> RestAnswer:
        return self._error("backendError")

    def perform(self, call: RestCall) -> RestAnswer:
        self.machines.settle()
        self.resizes.settle(self.now())
        handlers: dict[str, Callable[[RestCall], Any]] = {
            CREATE: self._create,
            "instanceGroupManagers.deleteInstances": self._delete_instances,
            "instanceGroupManagers.listManagedInstances": self._list_managed,
            "instanceGroupManagers.list": self._list_groups,
            "instances.aggregatedList": self._list_everywhere,
            "instances.get": lambda request: self._machine(request).described(self.now()),
            "instances.delete": self._delete,
            **{f"{REQUESTS}.{verb}": self._resize for verb in ("insert", "get", "list", "cancel", "delete")},
            "zoneOperations.list": self._list_operations,
            "zoneOperations.get": self._operation,
            "instanceTemplates.get": self._template,
            "regionInstanceTemplates.get": self._template,
            "machineTypes.get": self._machine_type,
            "regions.get": self._region,
            "reservations.get": self._reservation,
            "projects.get": lambda _: self._project(),
            "projects.testIamPermissions": self._granted,
            "advice.capacityHistory": self._history,
            "services.skus.list": lambda request: self._page(request, "skus", catalog.skus(), size="pageSize"),
        }
        if call.name not in handlers:
            raise self._rejected("notFound", f"{call.name} is not in this fake")
        return RestAnswer(body=handlers[call.name](call))

    # ---- launches and deletions

    def _create(self, call: RestCall) -> dict[str, Any]:
        group, request_id = self._group(call), call.parameters.get("requestId")
        for known in self.machines.operations:
            if request_id is not None and known.request_id == request_id and self.now() - known.began_at < REQUEST_KEPT:
                return known.described(self.now())
        instances = call.body.get("instances", ())
        for instance in instances:
            if instance["name"] in group.wanted or (group.zone, instance["name"]) in self.machines.machines:
                raise self._rejected("alreadyExists", f"Instance {instance['name']!r} already exists")
        for instance in instances:
            self.machines.want(group, instance["name"], instance.get("preservedState", {}).get("metadata", {}))
        return self._recorded("compute.instanceGroupManagers.createInstances", group, request_id)

    def _delete_instances(self, call: RestCall) -> dict[str, Any]:
        group = self._group(call)
        names = [url.rpartition("/")[2] for url in call.body.get("instances", ())]
        strange = [name for name in names if name not in group.wanted]
        if strange and not call.body.get("skipInstancesOnValidationError"):
            raise self._rejected("invalid", f"{', '.join(strange)} are no members of {group.name}")
        for name in names:
            self.machines.unwant(group, name)
        return self._recorded("compute.instanceGroupManagers.deleteInstances", group)

    def _delete(self, call: RestCall) -> dict[str, Any]:
        machine = self._machine(call)
        if machine.gone_at is None:
            self.machines.delete(machine)
        return next(
            operation for operation in reversed(self.machines.operations) if operation.target == machine.url
        ).described(self.now())

    def _resize(self, call: RestCall) -> dict[str, Any]:
        group, verb = self._group(call), call.name.rpartition(".")[2]
        if verb == "list":
            return self._page(call, "items", [request.described() for request in self.resizes.of_group(group)])
        name = call.parameters.get("resizeRequest", "")
        violation = self.resizes.violation(group, verb, name, call.body)
        if violation is not None:
            raise self._rejected(*violation)
        if verb == "get":
            return self.resizes.requests[group.zone, group.name, name].described()
        self.resizes.perform(group, verb, name, call.body, self.now())
        return self._recorded(call.name, group)

    def _recorded(self, kind: str, group: Group, request_id: str | None = None) -> dict[str, Any]:
        target = f"{BASE}/zones/{group.zone}/instanceGroupManagers/{group.name}"
        operation = self.machines.record(kind, group.zone, target, ends_at=self.now(), request_id=request_id)
        return operation.described(self.now())

    def _refusal_of(self, offer_key: str, count: int = 1) -> str | None:
        """Return why the machines cannot be launched: a fault of this request, an active one, or a quota."""
        if self._next_code is not None:
            return self._next_code
        standing = (
            fault.code
            for fault in self.faults.standing
            if fault.kind == "refused" and fault.code not in ERRORS and fnmatchcase(offer_key, fault.offer)
        )
        code = next(standing, None) or self._lacking_reservation(offer_key)
        groups = self.machines.groups
        taken = sum(
            groups[machine.zone, machine.group].offer_key == offer_key for machine in self.machines.machines.values()
        )
        if code is None and offer_key in self.room and taken + count > self.room[offer_key]:
            code = "ZONE_RESOURCE_POOL_EXHAUSTED"
        return code or ("QUOTA_EXCEEDED" if self._is_above_quota(offer_key, count) else None)

    def _lacking_reservation(self, offer_key: str) -> str | None:
        name, zone, word = offer_key.split("/")
        if word != CapacityType.RESERVED:
            return None
        kept = (
            reservation
            for reservation in self.reservations.values()
            if (reservation.machine_type, reservation.zone) == (name, zone)
        )
        has_room = any(
            reservation.used_count(self.machines.machines.values()) < reservation.count for reservation in kept
        )
        return None if has_room else "RESERVATION_CAPACITY_EXCEEDED"

    def _is_above_quota(self, offer_key: str, count: int) -> bool:
        name, _, word = offer_key.split("/")
        kind = catalog.KINDS[name]
        metric = quota_metric(kind, CapacityType(word))
        if metric not in self.quota_gpus:
            return False
        running = [
            catalog.KINDS[machine.machine_type].resources.gpu_count
            for machine in self.machines.machines.values()
            if quota_metric(catalog.KINDS[machine.machine_type], machine.capacity_type) == metric
        ]
        return sum(running) + count * kind.resources.gpu_count > self.quota_gpus[metric]

    # ---- what is there

    def _list_managed(self, call: RestCall) -> dict[str, Any]:
        group, now = self._group(call), self.now()
        shown = []
        wanted_now = () if self.lists_behind_count > 0 else tuple(group.wanted.values())
        self.lists_behind_count = max(0, self.lists_behind_count - 1)
        for wanted in wanted_now:
            machine = self.machines.machines.get((group.zone, wanted.name))
            row: dict[str, Any] = {
                "name": wanted.name,
                "instance": f"{BASE}/zones/{group.zone}/instances/{wanted.name}",
                "currentAction": "CREATING" if machine is None else "NONE" if machine.gone_at is None else "DELETING",
            }
            if machine is not None:
                row["instanceStatus"] = machine.status(now)
            if wanted.error is not None:
                error = {"code": wanted.error[0], "message": wanted.error[1]}
                row["lastAttempt"] = {"errors": {"errors": [error]}}
            shown.append(row)
        return self._page(call, "managedInstances", shown)

    def _list_groups(self, call: RestCall) -> dict[str, Any]:
        zone = call.parameters["zone"]
        if zone not in catalog.ZONES:
            raise self._rejected("notFound", f"The resource 'projects/{PROJECT}/zones/{zone}' was not found")
        return self._page(
            call, "items", [group.shown() for group in self.machines.groups.values() if group.zone == zone]
        )

    def _list_everywhere(self, call: RestCall) -> dict[str, Any]:
        matching = self._matching(call, [machine.described(self.now()) for machine in self.machines.shown()])
        page = self._page(call, "instances", matching)
        items: dict[str, Any] = {f"zones/{zone}": {} for zone in catalog.ZONES}
        for machine in page.pop("instances"):
            items[f"zones/{machine['zone'].rpartition('/')[2]}"].setdefault("instances", []).append(machine)
        for scope, shown in items.items():
            if scope.rpartition("/")[2] in self.unseen_zones:
                shown["warning"] = {"code": "UNREACHABLE", "message": "The zone could not be reached."}
            elif not shown:
                shown["warning"] = {"code": "NO_RESULTS_ON_PAGE", "message": "There are no results on this page."}
        return {**page, "items": items}

    def _list_operations(self, call: RestCall) -> dict[str, Any]:
        zone = call.parameters["zone"]
        described = [
            operation.described(self.now())
            for operation in reversed(self.machines.operations)
            if operation.zone == zone
        ]
        if call.parameters.get("orderBy") != "creationTimestamp desc":
            described.reverse()
        return self._page(call, "items", self._matching(call, described))

    def _operation(self, call: RestCall) -> dict[str, Any]:
        name = call.parameters["operation"]
        operation = next((operation for operation in self.machines.operations if operation.name == name), None)
        if operation is None:
            raise self._rejected("notFound", f"operation {name} was not found")
        return operation.described(self.now())

    # ---- offers

    def _template(self, call: RestCall) -> dict[str, Any]:
        name = call.parameters["instanceTemplate"]
        properties = template_properties(name)
        if properties is None:
            raise self._rejected("notFound", f"instance template {name} was not found")
        return {"name": name, "properties": properties}

    def _machine_type(self, call: RestCall) -> dict[str, Any]:
        described = catalog.machine_type(call.parameters["machineType"], call.parameters["zone"])
        if described is None:
            raise self._rejected("notFound", f"machine type {call.parameters['machineType']} was not found")
        return described

    def _region(self, call: RestCall) -> dict[str, Any]:
        if call.parameters["region"] != catalog.REGION:
            raise self._rejected("notFound", f"region {call.parameters['region']} was not found")
        metrics = catalog.quota_metrics()
        quotas = [
            {"metric": metric, "limit": self.quota_gpus.get(metric, QUOTA_GPUS), "usage": 0.0} for metric in metrics
        ]
        zones = [f"{BASE}/zones/{zone}" for zone in catalog.ZONES]
        return {"name": catalog.REGION, "status": "UP", "quotas": quotas, "zones": zones}

    def _reservation(self, call: RestCall) -> dict[str, Any]:
        reservation = self.reservations.get((call.parameters["zone"], call.parameters["reservation"]))
        if reservation is None:
            raise self._rejected("notFound", f"reservation {call.parameters['reservation']} was not found")
        return reservation.described(self.machines.machines.values())

    def _project(self) -> dict[str, Any]:
        limit = self.quota_gpus.get("GPUS_ALL_REGIONS", QUOTA_GPUS)
        return {"name": PROJECT, "quotas": [{"metric": "GPUS_ALL_REGIONS", "limit": limit, "usage": 0.0}]}

    def _granted(self, call: RestCall) -> dict[str, Any]:
        return {
            "permissions": [
                permission for permission in call.body["permissions"] if permission not in self.missing_permissions
            ]
        }

    def _history(self, call: RestCall) -> dict[str, Any]:
        zone = call.body["locationPolicy"]["location"].rpartition("/")[2]
        name = call.body["instanceProperties"]["machineType"]
        if name not in catalog.KINDS:
            raise self._rejected("invalid", f"machine type {name} has no history")
        described = catalog.capacity_history(name, zone, self.now(), self.spot_ratio_of(f"{name}/{zone}/spot"))
        return {"machineType": name, "location": f"{BASE}/zones/{zone}", **described}

    # ---- wire format

    def _group(self, call: RestCall) -> Group:
        key = (call.parameters["zone"], call.parameters["instanceGroupManager"])
        if key not in self.machines.groups:
            raise self._rejected("notFound", f"The group {'/'.join(key)} was not found")
        return self.machines.groups[key]

    def _machine(self, call: RestCall) -> Machine:
        wanted = (call.parameters["zone"], call.parameters["instance"])
        for machine in self.machines.shown():
            if (machine.zone, machine.name) == wanted:
                return machine
        raise self._rejected("notFound", f"The instance {'/'.join(wanted)} was not found")

    def _matching(self, call: RestCall, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        text = call.parameters.get("filter")
        if text is None:
            return list(items)
        condition = _FILTER.match(text)
        if condition is None:
            raise self._rejected("invalid", f"Invalid value for field 'filter': {text!r}")
        pattern = re.compile(condition[2])
        return [item for item in items if pattern.fullmatch(str(item.get(condition[1], "")))]

    def _page(
        self, call: RestCall, name: str, items: Sequence[dict[str, Any]], *, size: str = "maxResults"
    ) -> dict[str, Any]:
        start, count = int(call.parameters.get("pageToken", "0")), int(call.parameters.get(size, "500"))
        page: dict[str, Any] = {name: list(items[start : start + count])}
        if start + count < len(items):
            page["nextPageToken"] = str(start + count)
        return page

    def _rejected(self, code: str, message: str) -> Rejected:
        return Rejected(self._error(code, message))

    @staticmethod
    def _error(code: str, message: str | None = None) -> RestAnswer:
        status, words = ERRORS.get(code, (400, f"{code}, as configured in this fake"))
        text = message or words
        error = {"code": status, "message": text, "errors": [{"reason": code, "message": text, "domain": "global"}]}
        return RestAnswer(status=status, body={"error": error})


__all__ = ["PROJECT", "GcpFake"]
