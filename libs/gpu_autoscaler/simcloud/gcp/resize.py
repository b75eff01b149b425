"""Resize requests of groups: several instances, all or none, retried until cancelled."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import msgspec

from gpu_autoscaler.simcloud.gcp.machines import BASE, TRIED_AGAIN_SECONDS, Group, Machines, Wanted, stamp

NEVER = datetime.max.replace(tzinfo=UTC)  # the group does not try these instances individually
RUN_SECONDS = (600, 7 * 86400)  # Compute Engine, "About resize requests in a MIG": ten minutes to seven days


class ResizeRequest(msgspec.Struct, kw_only=True):
    """One request and its state."""

    name: str
    group: Group
    instances: dict[str, dict[str, str]]  # metadata by name
    run_seconds: int
    created_at: datetime
    tried_at: datetime
    state: Literal["ACCEPTED", "SUCCEEDED", "CANCELLED"] = "ACCEPTED"
    error: tuple[str, str] | None = None  # of the last attempt

    def described(self) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "name": self.name,
            "zone": f"{BASE}/zones/{self.group.zone}",
            "creationTimestamp": stamp(self.created_at),
            "state": self.state,
            "instances": [
                {"name": name, "preservedState": {"metadata": metadata}} for name, metadata in self.instances.items()
            ],
            "requestedRunDuration": {"seconds": str(self.run_seconds)},
            "status": {},
        }
        if self.state == "ACCEPTED" and self.error is not None:
            error = {"code": self.error[0], "message": self.error[1]}
            shown["status"] = {"lastAttempt": {"error": {"errors": [error]}}}
        return shown


class ResizeRequests:
    """All requests, by zone, group and name."""

    def __init__(self, machines: Machines, refusal_of: Callable[[str, int], str | None]) -> None:
        """`refusal_of`: why this number of machines of an offer cannot be launched now, None if it can."""
        self._machines = machines
        self._refusal_of = refusal_of
        self.waits_silently = False  # no attempt is made or reported
        self.requests: dict[tuple[str, str, str], ResizeRequest] = {}

    def of_group(self, group: Group) -> list[ResizeRequest]:
        return [request for request in self.requests.values() if request.group is group]

    def violation(self, group: Group, verb: str, name: str, body: dict[str, Any] | None) -> tuple[str, str] | None:
        if verb == "insert":
            return self._body_violation(group, body or {})
        known = self.requests.get((group.zone, group.name, name))
        if known is None:
            return "notFound", f"resize request {name} was not found"
        if verb == "delete" and known.state == "ACCEPTED":
            return "invalid", f"resize request {name} is active: cancel it first"
        return None

    def perform(self, group: Group, verb: str, name: str, body: dict[str, Any] | None, now: datetime) -> None:
        """Execute a valid call: insert, cancel or delete."""
        if verb == "insert":
            self._insert(group, body or {}, now)
        elif verb == "cancel":
            self._cancel(self.requests[group.zone, group.name, name])
        else:
            del self.requests[group.zone, group.name, name]

    def _body_violation(self, group: Group, body: dict[str, Any]) -> tuple[str, str] | None:
        name, names = body.get("name", ""), body.get("instances", [])
        seconds = int(body.get("requestedRunDuration", {}).get("seconds", 0))
        if not name or len(name) > 63:
            return "invalid", "Invalid value for field 'resource.name'"
        if not names or "resizeBy" in body:
            return "invalid", "Exactly one of 'instances' and 'resizeBy' is wanted; this fake takes names"
        if not RUN_SECONDS[0] <= seconds <= RUN_SECONDS[1]:
            return "invalid", "requestedRunDuration must be between 10 minutes and 7 days"
        taken = [
            name
            for name in names
            if name["name"] in group.wanted or (group.zone, name["name"]) in self._machines.machines
        ]
        if (group.zone, group.name, name) in self.requests or taken:
            return "alreadyExists", f"The resource {name!r}, or one of its instances, already exists"
        return None

    def _insert(self, group: Group, body: dict[str, Any], now: datetime) -> None:
        request = ResizeRequest(
            name=body["name"],
            group=group,
            instances={
                instance["name"]: instance.get("preservedState", {}).get("metadata", {})
                for instance in body["instances"]
            },
            run_seconds=int(body["requestedRunDuration"]["seconds"]),
            created_at=now,
            tried_at=now + timedelta(seconds=self._machines.decided_seconds),
        )
        self.requests[group.zone, group.name, request.name] = request
        for name, metadata in request.instances.items():  # members of the group from now on
            group.wanted[name] = Wanted(name=name, metadata=metadata, tried_at=NEVER)
        self.settle(now)

    def _cancel(self, request: ResizeRequest) -> None:
        if request.state == "ACCEPTED":  # a finished one stays as it is
            request.state = "CANCELLED"
            for name in request.instances:
                request.group.wanted.pop(name, None)

    def settle(self, now: datetime) -> None:
        """Try due requests: all instances or none."""
        for request in self.requests.values():
            if request.state != "ACCEPTED" or now < request.tried_at or self.waits_silently:
                continue
            code = self._refusal_of(request.group.offer_key, len(request.instances))
            if code is not None:
                request.error = (code, f"{len(request.instances)} of {request.group.machine_type} cannot be made now.")
                request.tried_at = now + timedelta(seconds=TRIED_AGAIN_SECONDS)
                continue
            request.state, request.error = "SUCCEEDED", None
            for name in request.instances:
                self._machines.make(request.group, request.group.wanted[name], now)
