"""AWS as one WSGI application: moto's answers behind tokens, faults, quotas and prices that moto lacks.

It records what was asked. One fake a process: moto keeps its books in globals.
"""

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

from gpu_autoscaler.simcloud.admin import answer_admin
from gpu_autoscaler.simcloud.aws import market
from gpu_autoscaler.simcloud.aws.groups import Groups, UnknownGroup
from gpu_autoscaler.simcloud.aws.machines import ACCOUNT, Machines
from gpu_autoscaler.simcloud.aws.wire import Call, Environ, answer_body, error_body, read_call
from gpu_autoscaler.simcloud.faults import Faults

Respond = Callable[[str, list[tuple[str, str]]], object]
Answer = tuple[int, bytes]
ASKED_MAX = 100_000
_INSTANCE_ID = re.compile(r"<(?:instanceId|member)>(i-[0-9a-f]+)</")
_STARTED = re.compile(r"<launchTime>.*?</launchTime>")
_REASON = re.compile(r"<reason>[^<]*</reason>|<reason ?/>")
_STATE = re.compile(r"<instanceState>.*?</instanceState>", re.DOTALL)

# HTTP status and words of the errors that faults are told by; what is not here is a 400.
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
}


OF_CAPACITY = ("InsufficientInstanceCapacity", "VcpuLimitExceeded", "MaxSpotInstanceCountExceeded")


class AwsFake:
    """One region of one account. Set faults on `faults`, times on `machines`, quotas and prices by attribute."""

    def __init__(self, region: str = "eu-west-1", *, now: Callable[[], datetime] | None = None) -> None:
        os.environ.setdefault("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")  # moto's switch; thousands are never looked at
        from moto.moto_server.werkzeug_app import (  # noqa: PLC0415 - as in machines
            DomainDispatcherApplication,
            create_backend_app,
        )

        self.region = region
        self.now = now or (lambda: datetime.now(UTC))
        self.faults = Faults()
        self.machines = Machines(region, self.now)
        self.groups = Groups(region, self.machines)
        self.asked: deque[Call] = deque(maxlen=ASKED_MAX)
        self.quota_vcpus: dict[str, int] = {}  # pattern of instance types: vCPUs that may run at once
        self.launches_count = 0
        self._moto: Callable[[Environ, Respond], Iterable[bytes]] = DomainDispatcherApplication(create_backend_app)
        self._tokens: dict[str, tuple[dict[str, str], bytes]] = {}  # token: what was asked, what was answered
        self.lock = threading.Lock()  # held while a call is answered; also for who looks at `machines` meanwhile

    def __call__(self, environ: Environ, respond: Respond) -> Iterable[bytes]:
        """Answer one request."""
        if environ.get("PATH_INFO", "").startswith("/admin/"):
            return self._answer_admin(environ, respond)
        call = read_call(environ)
        with self.lock:
            self.asked.append(call)
            self.machines.settle()
            struck = list(self.faults.met_by(call.name, self._offer_of(call)))
            refused = next((fault for fault in struck if fault.kind == "refused"), None)
            status, body = self._refuse(call, refused.code) if refused else self._perform(call, environ)
        for fault in struck:
            time.sleep(fault.wait_seconds)
            if fault.kind == "lost":
                status, body = self._error(call, "InternalError")
        kind = "application/x-amz-json-1.1" if call.protocol == "json" else "text/xml; charset=utf-8"
        respond(f"{status} .", [("Content-Type", kind), ("Content-Length", str(len(body)))])
        return [body]

    def _answer_admin(self, environ: Environ, respond: Respond) -> Iterable[bytes]:
        with self.lock:
            status, body = answer_admin(environ, self.faults, self.asked)
        respond(f"{status} .", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    def asked_of(self, name: str) -> list[Call]:
        """Return the calls of this name, oldest first."""
        return [call for call in self.asked if call.name == name]

    def _perform(self, call: Call, environ: Environ) -> Answer:
        match call.name:
            case "RunInstances":
                return self._once(call, lambda: self._run_instances(call, environ))
            case "LaunchInstances":
                return self._once(call, lambda: self._launch_instances(call))
            case "DescribeSpotPriceHistory":
                return 200, answer_body(call, market.spot_history(call, self.zones, self.now()))
            case "GetProducts":
                return 200, market.products(call, self.region)
            case "ListServiceQuotas":
                return 200, market.quotas(self.quota_vcpus)
            case "":
                return 400, error_body(call, "MissingAction", "The request names no action.")
        status, body = self._forward(environ)
        if call.name == "TerminateInstances" and status == 200:
            self.machines.terminating(call.listed("InstanceId"))
        if call.name == "TerminateInstanceInAutoScalingGroup" and status == 200:
            self.machines.terminating([call.parameters["InstanceId"]])
        return status, body

    @property
    def zones(self) -> list[str]:
        """The zones of the region."""
        return sorted({subnet.availability_zone for subnet in self.machines.backend.get_default_subnets().values()})

    def offer_template(self, name: str, instance_type: str = "m5.large", *, is_spot: bool = False) -> list[str]:
        """Have a launch template of this name; returns the subnets, one a zone."""
        data: dict[str, Any] = {"ImageId": "ami-00000000000000000", "InstanceType": instance_type}
        if is_spot:
            data["InstanceMarketOptions"] = {"MarketType": "spot"}
        self.machines.backend.create_launch_template(name, "", data, {})
        subnets: dict[str, Any] = self.machines.backend.get_default_subnets()
        return [str(subnet.id) for _, subnet in sorted(subnets.items())]

    # ---- launches

    def _once(self, call: Call, perform: Callable[[], Answer]) -> Answer:
        """Do it once for each token; a repeat gets the first answer with the states of now, another request none.

        Source: EC2 Developer Guide, "Ensuring idempotency in Amazon EC2 API requests" (read 2026-11-21).
        """
        token = call.parameters.get("ClientToken", "")
        if token in self._tokens:
            asked, answered = self._tokens[token]
            if _without_zone(asked) != _without_zone(call.parameters):
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
            # moto answers a trial (DryRun) before it looks for the template; EC2 looks first.
            why = f"The specified launch template, with template name {name}, does not exist."
            return self._error(call, "InvalidLaunchTemplateName.NotFoundException", why)
        exceeded = market.exceeded_quota(call, self.quota_vcpus, self.machines.backend.all_running_instances())
        if exceeded is not None:
            return self._error(call, exceeded)
        status, body = self._forward(environ)
        if status == 200:
            ids = _INSTANCE_ID.findall(body.decode())
            self.launches_count += len(ids)
            self.machines.launched(ids, call.parameters.get("UserData", ""))
            body = self._with_states(body)
        return status, body

    def _launch_instances(self, call: Call) -> Answer:
        try:
            made = self.groups.launch(call)
        except UnknownGroup as unknown:
            return self._error(call, "ValidationError", f"AutoScalingGroup name not found - {unknown}")
        if made is None:
            return self._error(call, "ValidationError", "The group is at its MaxSize.")
        self.launches_count += 1
        return 200, answer_body(call, self.groups.answer(call, made))

    def _refuse(self, call: Call, code: str) -> Answer:
        """Answer with the error; what stands in the way of capacity is no error of LaunchInstances, but its answer."""
        if call.name == "LaunchInstances" and code in OF_CAPACITY:
            return 200, answer_body(call, self.groups.failure(call, code, ERRORS[code][1]))
        return self._error(call, code)

    def _with_states(self, body: bytes) -> bytes:
        """Return a launch's answer with the state and reason that its instance, or the first of many, is in now."""
        text = _REASON.sub("", body.decode())
        first = next((one for one in _INSTANCE_ID.findall(text) if one in self.machines), None)
        if first is None:
            return body
        machine = self.machines.get(first)
        state = f"<instanceState><code>{machine.state_code}</code><name>{machine.state}</name></instanceState>"
        text = _STATE.sub(f"{state}<reason>{machine.state_transition_reason}</reason>", text)
        return _STARTED.sub(f"<launchTime>{machine.launch_time.isoformat()}</launchTime>", text).encode()

    def _offer_of(self, call: Call) -> str:
        """Return `type/zone/capacity type` of what a launch asks for, empty for other calls."""
        if call.name == "LaunchInstances":
            return self.groups.offer_of(call)
        if call.name != "RunInstances":
            return ""
        subnets: Any = self.machines.backend.get_default_subnets().values()
        wanted = call.parameters.get("SubnetId")
        zone = next((subnet.availability_zone for subnet in subnets if subnet.id == wanted), "")
        is_spot = call.parameters.get("InstanceMarketOptions.MarketType") == "spot"
        return f"{call.parameters.get('InstanceType', '')}/{zone}/{'spot' if is_spot else 'on-demand'}"

    def _forward(self, environ: Environ) -> Answer:
        """Let moto answer."""
        said: list[str] = []

        def respond(status: str, _headers: list[tuple[str, str]], *_: object) -> None:
            said.append(status)

        body = b"".join(self._moto(environ, respond))
        return int(said[0].split(" ", 1)[0]), body

    @staticmethod
    def _error(call: Call, code: str, message: str | None = None) -> Answer:
        status, words = ERRORS.get(code, (400, f"{code}, as this fake was told to say"))
        return status, error_body(call, code, message or words)


def _without_zone(parameters: dict[str, str]) -> dict[str, str]:
    """The parameters by which two requests of one token differ: region and zone are not among them."""
    return {name: value for name, value in parameters.items() if not name.startswith("AvailabilityZones")}


__all__ = ["ACCOUNT", "AwsFake"]
