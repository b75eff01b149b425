"""AWS as one WSGI application: moto with tokens, faults, quotas and prices, which it lacks.

Calls are recorded. One fake per process: moto's state is global.
"""

import io
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec

from gpu_autoscaler.simcloud.aws import fleets, market
from gpu_autoscaler.simcloud.aws.bridge import Bridge
from gpu_autoscaler.simcloud.aws.groups import Groups, UnknownGroup
from gpu_autoscaler.simcloud.aws.machines import ACCOUNT, Machines
from gpu_autoscaler.simcloud.aws.reservations import TARGET, Reservations
from gpu_autoscaler.simcloud.aws.wire import BODY_BYTES_MAX, Call, Environ, answer_body, elements, error_body, read_call
from gpu_autoscaler.simcloud.faults import Faults, answer_admin

Respond = Callable[[str, list[tuple[str, str]]], object]
Answer = tuple[int, bytes]
ASKED_MAX = 100_000
LONG_POLL_SECONDS_MAX, LONG_POLL_LOOK_SECONDS = 1.0, 0.02  # wall time; answers may come before the poll ends
_INSTANCE_ID = re.compile(r"<(?:instanceId|member)>(i-[0-9a-f]+)</")
_STARTED = re.compile(r"<launchTime>.*?</launchTime>")
_REASON = re.compile(r"<reason>[^<]*</reason>|<reason ?/>")
_SPOT, _BLOCK = (f"<instanceLifecycle>{of}</instanceLifecycle>".encode() for of in ("spot", "capacity-block"))
_STATE = re.compile(r"<instanceState>.*?</instanceState>", re.DOTALL)

# HTTP status and message of error codes used by faults; others are a 400.
# Source: EC2 API Reference, "Error codes" (read 2026-11-21).
ERRORS = {
    "InsufficientInstanceCapacity": (500, "We currently do not have sufficient capacity in the zone you requested."),
    "RequestLimitExceeded": (503, "Request limit exceeded."),
    "Throttling": (400, "Rate exceeded"),
    "InternalError": (500, "An internal error has occurred"),
    "ServiceUnavailable": (503, "The service is unavailable. Please try again shortly."),
    "UnauthorizedOperation": (403, "You are not authorized to perform this operation."),
    "AccessDenied": (403, "User is not authorized to perform this action."),
    "RequestExpired": (400, "Request has expired."),
    "VcpuLimitExceeded": (400, "You have requested more vCPU capacity than your current vCPU limit allows."),
    "MaxSpotInstanceCountExceeded": (400, "Max spot instance count exceeded"),
    "UnfulfillableCapacity": (400, "Unable to fulfill capacity due to your request configuration."),
}


OF_CAPACITY = (
    "InsufficientInstanceCapacity",
    "UnfulfillableCapacity",
    "VcpuLimitExceeded",
    "MaxSpotInstanceCountExceeded",
)


class AwsFake:
    """One region of one account. Set faults on `faults`, times on `machines`, quotas and prices by attribute."""

    def __init__(self, region: str = "eu-west-1", *, now: Callable[[], datetime] | None = None) -> None:
        os.environ.setdefault("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")  # moto's switch: skip loading thousands of images
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app  # noqa: PLC0415 - as in machines

        self.region = region
        self.now = now or (lambda: datetime.now(UTC))
        self.faults = Faults()
        self.machines = Machines(region, self.now)
        self.groups = Groups(region, self.machines, self.now, self._refused_in_a_group)
        self.bridge = Bridge(region, self.now)
        self.reservations = Reservations(self.now, self.machines.is_alive)
        self.asked: deque[Call] = deque(maxlen=ASKED_MAX)
        self.quota_vcpus: dict[str, int] = {}  # pattern of instance types: vCPUs that may run at once
        self.spot_ratio_of: Callable[[str], float] = lambda _: 1.0  # by offer key: times the usual price
        self.scores: dict[str, int] = {}  # by zone id: answers of GetSpotPlacementScores
        self.fleet_missing_count = 0  # instances that a fleet lacks despite MinTargetCapacity
        self.placement_groups: dict[str, str] = {}  # name: strategy
        self.launches_count, self.fleets_count = 0, 0
        self._moto: Callable[[Environ, Respond], Iterable[bytes]] = DomainDispatcherApplication(create_backend_app)
        self._tokens: dict[str, tuple[dict[str, str], bytes]] = {}  # token: request and answer
        self.lock = threading.Lock()  # held while answering, and by readers of `machines`

    def __call__(self, environ: Environ, respond: Respond) -> Iterable[bytes]:
        if environ.get("PATH_INFO", "").startswith("/admin/"):
            return self._answer_admin(environ, respond)
        call = read_call(environ)
        if call.name == "ReceiveMessage":
            call = self._waited(call, environ)
        with self.lock:
            self.asked.append(call)
            self.machines.settle()
            struck = list(self.faults.matching(call.name, self._offer_of(call), fleets.count_of(call)))
            refused = next((fault for fault in struck if fault.kind == "refused"), None)
            status, body = self._refuse(call, refused.code) if refused else self._perform(call, environ)
        for fault in struck:
            time.sleep(fault.wait_seconds)
            if fault.kind == "lost":
                status, body = self._error(call, "InternalError")
        kind = "application/x-amz-json-1.1" if call.protocol == "json" else "text/xml; charset=utf-8"
        respond(f"{status} .", [("Content-Type", kind), ("Content-Length", str(len(body)))])
        return [body]

    def _waited(self, call: Call, environ: Environ) -> Call:
        """Wait for a message like a long poll, then forward without waiting: moto would block all other calls."""
        parameters = msgspec.json.decode(call.parameters["body"])
        ends_at = time.monotonic() + min(parameters.pop("WaitTimeSeconds", 0), LONG_POLL_SECONDS_MAX)
        while time.monotonic() < ends_at and not self.bridge.has_news(parameters["QueueUrl"]):
            time.sleep(LONG_POLL_LOOK_SECONDS)
        body = msgspec.json.encode({**parameters, "WaitTimeSeconds": 0})
        environ["wsgi.input"], environ["CONTENT_LENGTH"] = io.BytesIO(body), str(len(body))
        return call

    def _answer_admin(self, environ: Environ, respond: Respond) -> Iterable[bytes]:
        length = min(int(environ.get("CONTENT_LENGTH") or 0), BODY_BYTES_MAX)
        sent = environ["wsgi.input"].read(length)
        with self.lock:
            status, body = answer_admin(environ["REQUEST_METHOD"], environ["PATH_INFO"], sent, self.faults, self.asked)
        respond(f"{status} .", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    def asked_of(self, name: str) -> list[Call]:
        return [call for call in self.asked if call.name == name]

    def _perform(self, call: Call, environ: Environ) -> Answer:
        match call.name:
            case "RunInstances":
                return self._once(call, lambda: self._run_instances(call, environ))
            case "CreateFleet":
                return self._once(call, lambda: self._create_fleet(call, environ))
            case "LaunchInstances":
                return self._once(call, lambda: self._launch_instances(call))
            case "SetDesiredCapacity" | "DescribeScalingActivities":
                return self._count_group(call)
            case "DescribeSpotPriceHistory":
                return 200, answer_body(call, market.spot_history(call, self.zones, self.now(), self.spot_ratio_of))
            case "GetSpotPlacementScores" | "DescribeCapacityReservations" | "DescribePlacementGroups":
                return self._described(call)
            case "GetProducts":
                return 200, market.products(call, self.region)
            case "ListServiceQuotas":
                return 200, market.quotas(self.quota_vcpus)
            case "CompleteLifecycleAction" | "RecordLifecycleActionHeartbeat":
                is_done = call.name == "CompleteLifecycleAction"
                if self.bridge.hook_told(call.parameters["LifecycleActionToken"], is_done=is_done):
                    return 200, answer_body(call, "")
                return self._error(call, "ValidationError", "No active Lifecycle Action found with token")
            case "":
                return 400, error_body(call, "MissingAction", "The request names no action.")
        return self._told(call, environ)

    def _described(self, call: Call) -> Answer:
        """Answer calls that moto does not implement."""
        if call.name == "GetSpotPlacementScores":
            return 200, answer_body(call, market.placement_scores(self.region, self.scores))
        if call.name == "DescribeCapacityReservations":
            return 200, answer_body(call, self.reservations.described())
        wanted = call.listed("Filter.1.Value")
        items = [
            {"groupName": name, "strategy": strategy, "state": "available"}
            for name, strategy in self.placement_groups.items()
            if name in wanted
        ]
        return 200, answer_body(call, elements("placementGroupSet", items))

    def _told(self, call: Call, environ: Environ) -> Answer:
        """Return moto's answer with what it does not know about our machines."""
        status, body = self._forward(environ)
        if call.name == "TerminateInstances" and status == 200:
            self.machines.terminating(call.listed("InstanceId"))
        if call.name == "TerminateInstanceInAutoScalingGroup" and status == 200:
            self.machines.terminating([call.parameters["InstanceId"]])
        return status, self.reservations.dressed(body) if call.name == "DescribeInstances" else body

    @property
    def zones(self) -> list[str]:
        return sorted({subnet.availability_zone for subnet in self.machines.backend.get_default_subnets().values()})

    def offer_template(self, name: str, instance_type: str = "m5.large", *, is_spot: bool = False) -> list[str]:
        """Create a launch template of this name; return the subnets, one per zone."""
        data: dict[str, Any] = {"ImageId": "ami-00000000000000000", "InstanceType": instance_type}
        if is_spot:
            data["InstanceMarketOptions"] = {"MarketType": "spot"}
        self.machines.backend.create_launch_template(name, "", data, {})
        subnets: dict[str, Any] = self.machines.backend.get_default_subnets()
        return [str(subnet.id) for _, subnet in sorted(subnets.items())]

    # ---- launches

    def _once(self, call: Call, perform: Callable[[], Answer]) -> Answer:
        """Execute once per token; a repeat gets the first answer with current states, another request an error. Source:
        EC2 Developer Guide, "Ensuring idempotency in Amazon EC2 API requests" (read 2026-11-21)."""
        token = call.parameters.get("ClientToken", "")
        if token in self._tokens:
            parameters, answered = self._tokens[token]
            if _without_zone(parameters) != _without_zone(call.parameters):
                why = "The request uses the same client token as a previous, but non-identical request."
                return self._error(call, "IdempotentParameterMismatch", why)
            return 200, self._with_states(answered)
        status, body = perform()
        if status == 200 and token and b"<ErrorCode>" not in body:
            self._tokens[token] = (call.parameters, body)
        return status, body

    def _run_instances(self, call: Call, environ: Environ) -> Answer:
        name = call.parameters.get("LaunchTemplate.LaunchTemplateName")
        if name is not None and name not in self.machines.backend.launch_template_name_to_ids:
            # moto answers a dry run before it looks up the template; EC2 looks it up first.
            why = f"The specified launch template, with template name {name}, does not exist."
            return self._error(call, "InvalidLaunchTemplateName.NotFoundException", why)
        placed_in = call.parameters.get("Placement.GroupName")
        if placed_in is not None and placed_in not in self.placement_groups:
            why = f"The Placement Group '{placed_in}' is unknown."
            return self._error(call, "InvalidPlacementGroup.Unknown", why)
        exceeded = market.exceeded_quota(call, self.quota_vcpus, self.machines.backend.all_running_instances())
        if exceeded is not None:
            return self._error(call, exceeded)
        offer = self._offer_of(call)
        if market.is_above_ceiling(call, offer, self.zones, self.spot_ratio_of):
            return self._error(
                call, "SpotMaxPriceTooLow", "Your Spot request price is lower than the minimum required."
            )
        refused = self.reservations.refused(call, offer.split("/")[1])
        if refused is not None:
            return self._error(call, *refused)
        status, body = self._forward(environ)
        if status == 200:
            ids = _INSTANCE_ID.findall(body.decode())
            self.launches_count += len(ids)
            self.machines.launched(ids, call.parameters.get("UserData", ""), market.usd_per_hour_max(call))
            if self.reservations.take(call, ids):
                for instance_id in ids:
                    self.machines.get(instance_id).lifecycle = "capacity-block"  # for moto any market is spot
                body = body.replace(_SPOT, _BLOCK)
            body = self.reservations.dressed(self._with_states(body))
        return status, body

    def _create_fleet(self, call: Call, environ: Environ) -> Answer:
        if (wrong := fleets.wrong_in(call)) is not None:
            return self._error(call, *wrong)
        single, count, ids = fleets.one_of(call), fleets.count_of(call), list[str]()
        exceeded = market.exceeded_quota(single, self.quota_vcpus, self.machines.backend.all_running_instances(), count)
        if exceeded is not None and "DryRun" not in call.parameters:
            return self._empty_fleet(call, exceeded, ERRORS[exceeded][1])
        for _ in range(count - self.fleet_missing_count):
            status, body = self._run_instances(single, fleets.environ_of(single, environ))
            if status != 200:
                code, message = fleets.error_in(body)
                is_late = code == "SpotMaxPriceTooLow"  # found by EC2 while launching; other codes reject the request
                return self._empty_fleet(call, code, message) if is_late else self._error(call, code, message)
            ids += _INSTANCE_ID.findall(body.decode())
        self.fleets_count += 1
        return 200, answer_body(call, fleets.made(call, self.fleets_count, ids))

    def _empty_fleet(self, call: Call, code: str, message: str) -> Answer:
        self.fleets_count += 1
        return 200, answer_body(call, fleets.empty(call, self.fleets_count, {code: message}))

    def _launch_instances(self, call: Call) -> Answer:
        try:
            instance_id = self.groups.launch(call)
        except UnknownGroup as unknown:
            return self._error(call, "ValidationError", f"AutoScalingGroup name not found - {unknown}")
        if instance_id is None:
            return self._error(call, "ValidationError", "The group is at its MaxSize.")
        self.launches_count += 1
        return 200, answer_body(call, self.groups.answer(call, instance_id))

    def _count_group(self, call: Call) -> Answer:
        name = call.parameters["AutoScalingGroupName"]
        if call.name == "DescribeScalingActivities":
            return 200, answer_body(call, self.groups.activities(name))
        before = len(self.machines.seen())
        try:
            why = self.groups.set_number(name, int(call.parameters["DesiredCapacity"]))
        except UnknownGroup:
            return self._error(call, "ValidationError", f"AutoScalingGroup name not found - {name}")
        self.launches_count += len(self.machines.seen()) - before
        return self._error(call, "ValidationError", why) if why else (200, answer_body(call, ""))

    def _refused_in_a_group(self, offer: str) -> str | None:
        """Return a group's message if a fault on RunInstances applies to its launch; None if it succeeds."""
        struck = [fault for fault in self.faults.matching("RunInstances", offer) if fault.kind == "refused"]
        if not struck:
            return None
        market_name = "Spot" if offer.endswith("/spot") else "On-Demand"
        _, words = ERRORS.get(struck[0].code, (400, "as configured in this fake."))
        return f"Could not launch {market_name} Instances. {struck[0].code} - {words} Launching EC2 instance failed."

    def _refuse(self, call: Call, code: str) -> Answer:
        """Return the error; LaunchInstances reports missing capacity in its answer, as does a fleet, which uses up its
        token."""
        if call.name == "CreateFleet" and code in OF_CAPACITY:
            return self._once(call, lambda: self._empty_fleet(call, code, ERRORS[code][1]))
        if call.name == "LaunchInstances" and code in OF_CAPACITY:
            return 200, answer_body(call, self.groups.failure(call, code, ERRORS[code][1]))
        return self._error(call, code)

    def _with_states(self, body: bytes) -> bytes:
        """Return a launch's answer with the current state and reason of its first instance."""
        text = _REASON.sub("", body.decode())
        first = next((instance_id for instance_id in _INSTANCE_ID.findall(text) if instance_id in self.machines), None)
        if first is None:
            return body
        machine = self.machines.get(first)
        state = f"<instanceState><code>{machine.state_code}</code><name>{machine.state}</name></instanceState>"
        text = _STATE.sub(f"{state}<reason>{machine.state_transition_reason}</reason>", text)
        return _STARTED.sub(f"<launchTime>{machine.launch_time.isoformat()}</launchTime>", text).encode()

    def _offer_of(self, call: Call) -> str:
        if call.name == "LaunchInstances":
            return self.groups.offer_of(call)
        if call.name == "CreateFleet":
            call = fleets.one_of(call)
        if call.name != "RunInstances":
            return ""
        subnets: Any = self.machines.backend.get_default_subnets().values()
        wanted = call.parameters.get("SubnetId")
        zone = next((subnet.availability_zone for subnet in subnets if subnet.id == wanted), "")
        is_spot = call.parameters.get("InstanceMarketOptions.MarketType") == "spot"
        bought_as = "reserved" if TARGET in call.parameters else "spot" if is_spot else "on-demand"
        return f"{call.parameters.get('InstanceType', '')}/{zone}/{bought_as}"

    def _forward(self, environ: Environ) -> Answer:
        statuses: list[str] = []

        def respond(status: str, _headers: list[tuple[str, str]], *_: object) -> None:
            statuses.append(status)

        body = b"".join(self._moto(environ, respond))
        return int(statuses[0].split(" ", 1)[0]), body

    @staticmethod
    def _error(call: Call, code: str, message: str | None = None) -> Answer:
        status, words = ERRORS.get(code, (400, f"{code}, as configured in this fake"))
        return status, error_body(call, code, message or words)


def _without_zone(parameters: dict[str, str]) -> dict[str, str]:
    """Return the parameters that two requests of one token must share: all but region and zone."""
    return {name: value for name, value in parameters.items() if not name.startswith("AvailabilityZones")}


__all__ = ["ACCOUNT", "AwsFake"]
