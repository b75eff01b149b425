"""Azure Resource Manager as one server: scale sets, machines, operations, quotas, sizes and prices.

Calls are recorded. Errors, statuses and formats as in Azure's REST API reference (read 2026-11-22).
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from gpu_autoscaler.simcloud.azure import market
from gpu_autoscaler.simcloud.azure.machines import Machine, Machines
from gpu_autoscaler.simcloud.azure.scale_sets import ScaleSets
from gpu_autoscaler.simcloud.azure.wire import error_answer, read_request, rejected
from gpu_autoscaler.simcloud.rest import RestAnswer, RestCall, RestFake

SUBSCRIPTION = "00000000-0000-4000-8000-000000000000"
GROUP = "gpu"
PAGE_COUNT = 500
RETRY_AFTER = {"Retry-After": "1"}

# HTTP status and message of error codes used by faults; others are a 400.
ERRORS: Mapping[str, tuple[int, str]] = {
    "AllocationFailed": (409, "Allocation failed. We do not have sufficient capacity for the requested VM size."),
    "ZonalAllocationFailed": (409, "Allocation failed. We do not have sufficient capacity in this zone."),
    "OverconstrainedAllocationRequest": (409, "Allocation failed. The request has too many constraints."),
    "OverconstrainedZonalAllocationRequest": (409, "Allocation failed. The request has too many constraints."),
    "SkuNotAvailable": (409, "The requested VM size is currently not available in this location."),
    "OperationNotAllowed": (409, "Operation could not be completed as it results in exceeding approved Cores quota."),
    "QuotaExceeded": (409, "Operation could not be completed as it results in exceeding quota limits."),
    "AuthorizationFailed": (403, "The client does not have authorization to perform this action."),
    "PreconditionFailed": (412, "The If-Match condition is not met."),
    "ExpiredAuthenticationToken": (401, "The access token expiry UTC time is earlier than current UTC time."),
    "TooManyRequests": (429, "The request is being throttled as the limit has been reached."),
    "ServiceUnavailable": (503, "The service is unavailable now, please retry later."),
    "InternalServerError": (500, "The server encountered an internal error."),
    "InvalidParameter": (400, "The value of a parameter is invalid."),
}
# Reported only by the operation that the call started.
OF_ALLOCATION = frozenset(code for code in ERRORS if "Allocation" in code)


class AzureFake(RestFake):
    """One resource group. Set faults on `faults`, times on `machines`, quotas on `quota_vcpus`."""

    def __init__(self, region: str = "westeurope", *, now: Callable[[], datetime] | None = None) -> None:
        super().__init__(now=now)
        self.region = region
        self.machines = Machines(self.now)
        self.scale_sets = ScaleSets(self.machines, self.now, region, self.id_of)
        self.quota_vcpus: dict[str, int] = {}  # name of the quota: vCPUs that may run at once
        self.spot_ratio_of: Callable[[str], float] = lambda _: 1.0  # by offer key: times the usual price
        self.permissions: list[dict[str, Any]] = [{"actions": ["*"], "notActions": []}]  # reported to the caller
        self.autoscale_settings: list[dict[str, Any]] = []
        self.launches_count = 0
        self._operations: dict[str, dict[str, Any]] = {}
        self._numbers = itertools.count(1)
        self._host = ""

    @staticmethod
    def id_of(kind: str, name: str) -> str:
        return f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}/providers/Microsoft.Compute/{kind}/{name}"

    def offer_flexible(self, name: str) -> str:
        """Create a flexible scale set, as users' own tools would."""
        body = {"location": self.region, "zones": list(market.ZONES), "properties": dict(market.FLEXIBLE)}
        self.scale_sets.put(name, body)
        return name

    # ---- base class

    def read_call(
        self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes
    ) -> RestCall:
        self._host = f"http://{headers.get('host', 'localhost')}"
        call = read_request(method, path, query, headers, body)
        subscription, group = call.parameters.get("subscription", SUBSCRIPTION), call.parameters.get("group", GROUP)
        if subscription != SUBSCRIPTION:
            raise rejected(404, "SubscriptionNotFound", f"The subscription '{subscription}' could not be found.")
        if group.lower() != GROUP:
            raise rejected(404, "ResourceGroupNotFound", f"Resource group '{group}' could not be found.")
        return call

    def offer_of(self, call: RestCall) -> str:
        if call.name == "VirtualMachines_CreateOrUpdate":
            return self._machine_of(call).offer_key
        if call.name == "VirtualMachineScaleSets_Update" and self.scale_sets.growth(call) > 0:
            return self.scale_sets.offer_key(call.parameters["scale_set"])
        return ""

    def refuse(self, call: RestCall, code: str) -> RestAnswer:
        """Return the error; allocation failures are reported by the operation, and leave a machine behind."""
        status, message = ERRORS.get(code, (400, f"{code}, as configured in this fake"))
        if code in OF_ALLOCATION and call.name == "VirtualMachines_CreateOrUpdate":
            return self._put_machine(call, failure=(code, message))
        if code in OF_ALLOCATION and call.name == "VirtualMachineScaleSets_Update":
            return self._accepted(200, self.scale_sets.update(call, is_failing=True), (code, message))
        return error_answer(status, code, message, RETRY_AFTER if status == 429 else None)

    def lost(self) -> RestAnswer:
        return error_answer(500, "InternalServerError", ERRORS["InternalServerError"][1])

    def perform(self, call: RestCall) -> RestAnswer:
        if "scale_set" in call.parameters:
            return self._of_scale_sets(call)
        now, names = self.now(), call.parameters
        match call.name:
            case "VirtualMachines_CreateOrUpdate":
                return self._put_machine(call)
            case "VirtualMachines_Get":
                machine = self._found(self.id_of("virtualMachines", names["name"]))
                return RestAnswer(body=machine.described(now, with_view="$expand" in names))
            case "VirtualMachines_List":
                listed = [machine for machine in self.machines.listed() if machine.instance_id is None]
                return self._page(call, [machine.described(now) for machine in listed])
            case "VirtualMachines_Delete":
                machine = self._found(self.id_of("virtualMachines", names["name"]))
                self.machines.delete(machine)
                return self._accepted(202, None, began_at=machine.ended_by_user_at)
        return self._told(call)

    def _told(self, call: RestCall) -> RestAnswer:
        """Answer reads that are not about machines."""
        names = call.parameters
        match call.name:
            case "ResourceSkus_List":
                return RestAnswer(body={"value": market.skus(self.region)})
            case "Usage_List":
                return RestAnswer(body={"value": market.usages(self.quota_vcpus, self._alive())})
            case "RetailPrices_List":
                return RestAnswer(body=market.retail_prices(call, self._host, self.spot_ratio_of))
            case "Operations_Get":
                if names["name"] not in self._operations:
                    raise rejected(404, "NotFound", "The entity was not found.")
                return RestAnswer(body=self._operations[names["name"]])
            case "ActivityLogs_List":
                return RestAnswer(body={"value": self._logged(names.get("$filter", ""))})
            case "Permissions_ListForResourceGroup":
                return RestAnswer(body={"value": self.permissions})
            case "VirtualMachineImages_List":
                image = (names["region"], names["publisher"], names["offer"], names["sku"])
                return RestAnswer(body=market.image_versions(self.region, *image))
            case "AutoscaleSettings_ListByResourceGroup":
                return RestAnswer(body={"value": self.autoscale_settings})
        raise rejected(404, "InvalidResourceType", f"{call.name}: this fake has no such call.")

    def _of_scale_sets(self, call: RestCall) -> RestAnswer:
        names, name = call.parameters, call.parameters["scale_set"]
        match call.name:
            case "VirtualMachineScaleSets_CreateOrUpdate":
                return RestAnswer(status=201, body=self.scale_sets.put(name, call.body))
            case "VirtualMachineScaleSets_Get":
                return RestAnswer(body=self.scale_sets.described(name))
            case "VirtualMachineScaleSets_Update":
                self._see_tags(call.body.get("tags") or {})
                growth = self.scale_sets.growth(call)
                self._see_quota(self.scale_sets.planned(call))
                body = self.scale_sets.update(call)
                self.launches_count += max(growth, 0)
                return self._accepted(200, body)
            case "VirtualMachineScaleSets_DeleteInstances":
                began_at = self.scale_sets.delete(name, call.body["instanceIds"])
                return self._accepted(202, None, began_at=began_at)
            case "VirtualMachineScaleSetVMs_List":
                return self._page(call, self.scale_sets.members(name))
            case "VirtualMachineScaleSetVMs_Get":
                kind = f"virtualMachineScaleSets/{name}/virtualMachines"
                machine = self._found(self.id_of(kind, names["name"]))
                return RestAnswer(body=machine.described(self.now(), with_view="$expand" in names))
        raise rejected(404, "InvalidResourceType", f"{call.name}: this fake has no such call.")

    # ---- machines

    def _put_machine(self, call: RestCall, failure: tuple[str, str] | None = None) -> RestAnswer:
        machine = self._machine_of(call)
        known = self.machines.get(machine.resource_id)
        if known is not None:
            if call.parameters.get("if-none-match") == "*":
                raise rejected(412, "PreconditionFailed", "The resource exists, and If-None-Match is '*'.")
            if known.offer_key != machine.offer_key:
                raise rejected(409, "PropertyChangeNotAllowed", "Changing property 'zones' or priority is not allowed.")
            known.tags = machine.tags
            return self._accepted(200, known.described(self.now()))
        self._see_tags(machine.tags)
        market.see_ceiling(machine, self.spot_ratio_of)
        if failure is None:
            self._see_quota([machine])
            self.launches_count += 1
        machine.failure = failure
        self.machines.begin(machine)
        return self._accepted(201, machine.described(self.now()), failure)

    def _machine_of(self, call: RestCall) -> Machine:
        body, name, now = call.body, call.parameters["name"], self.now()
        properties = body.get("properties", {})
        scale_set = properties.get("virtualMachineScaleSet", {}).get("id")
        if scale_set is not None:
            self.scale_sets.see_member(scale_set.rpartition("/")[2], body.get("zones", []))
        size = properties.get("hardwareProfile", {}).get("vmSize", "")
        if size not in market.SIZES:
            raise rejected(400, "InvalidParameter", f"The value {size} provided for the VM size is not valid.")
        is_spot = properties.get("priority") == "Spot"
        if not is_spot and ("evictionPolicy" in properties or "billingProfile" in properties):
            raise rejected(400, "InvalidParameter", "evictionPolicy and maxPrice are of Spot machines alone.")
        return Machine(
            resource_id=self.id_of("virtualMachines", name),
            name=name,
            location=body["location"],
            zones=body.get("zones", []),
            tags=body.get("tags", {}),
            size=size,
            is_spot=is_spot,
            properties=properties,
            created_at=now,
            runs_at=now + timedelta(seconds=self.machines.boot_seconds),
            shown_at=now + timedelta(seconds=self.machines.shown_after_seconds),
        )

    @staticmethod
    def _see_tags(tags: Mapping[str, str]) -> None:
        # Azure documentation, "Use tags to organize your Azure resources", limits (read 2026-11-22).
        for name, value in tags.items():
            if any(sign in name for sign in "<>%&\\?/") or len(name) > 512 or len(value) > 256:
                raise rejected(400, "InvalidTagName", f"The tag name {name} or its value is invalid.")
        if len(tags) > 50:
            raise rejected(400, "InvalidTagCount", "A resource has at most 50 tags.")

    def _see_quota(self, wanted: Sequence[Machine]) -> None:
        name = market.exceeded_quota(self.quota_vcpus, self._alive(), wanted)
        if name is not None:
            message = f"Operation could not be completed as it results in exceeding approved {name} quota."
            raise rejected(409, "OperationNotAllowed", message)

    def _alive(self) -> list[Machine]:
        now = self.now()
        return [machine for machine in self.machines.there() if machine.is_alive(now)]

    def _found(self, resource_id: str) -> Machine:
        machine = self.machines.get(resource_id)
        if machine is None:
            raise rejected(404, "ResourceNotFound", f"The Resource '{resource_id}' was not found.")
        return machine

    # ---- operations, events and pages

    def _logged(self, wanted: str) -> list[dict[str, Any]]:
        """Return the ends of machines that the filter matches, by deletion or eviction."""
        described = []
        for machine in self.machines.ever():
            if machine.ends_at is not None and f"'{machine.resource_id}'".lower() in wanted.lower():
                what = "EvictSpotVM/action" if machine.ended_by_user_at is None else "delete"
                described.append(
                    {
                        "resourceId": machine.resource_id,
                        "operationName": {"value": f"Microsoft.Compute/virtualMachines/{what}"},
                        "status": {"value": "Started"},
                        "eventTimestamp": (machine.ended_by_user_at or machine.ends_at).isoformat(),
                    }
                )
        return described

    def _accepted(
        self, status: int, body: object, failure: tuple[str, str] | None = None, *, began_at: datetime | None = None
    ) -> RestAnswer:
        """Answer a call whose result is reported by an operation."""
        name = f"00000000-0000-4000-8000-{next(self._numbers):012x}"
        described: dict[str, Any] = {
            "name": name,
            "status": "Succeeded",
            "startTime": (began_at or self.now()).isoformat(),
        }
        if failure is not None:
            described |= {"status": "Failed", "error": {"code": failure[0], "message": failure[1]}}
        self._operations[name] = described
        path = f"/subscriptions/{SUBSCRIPTION}/providers/Microsoft.Compute/locations/{self.region}/operations/{name}"
        link = f"{self._host}{path}?api-version=2024-11-01"
        return RestAnswer(status=status, body=body, headers={"Azure-AsyncOperation": link, "Location": link})

    def _page(self, call: RestCall, every: list[dict[str, Any]]) -> RestAnswer:
        start = int(call.parameters.get("$skiptoken", "0"))
        body: dict[str, Any] = {"value": every[start : start + PAGE_COUNT]}
        if start + PAGE_COUNT < len(every):
            names = call.parameters
            kind = f"virtualMachineScaleSets/{names['scale_set']}/virtualMachines" if "scale_set" in names else ""
            path = self.id_of(kind or "virtualMachines", "").rstrip("/")
            query = f"api-version={names['api-version']}&$skiptoken={start + PAGE_COUNT}"
            body["nextLink"] = f"{self._host}{path}?{query}"
        return RestAnswer(body=body)
