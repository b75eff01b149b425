"""What moto's groups lack: LaunchInstances, and capacities that cannot be reached, with their scaling activities.

Source: EC2 Auto Scaling API Reference, "LaunchInstances", "SetDesiredCapacity", "DescribeScalingActivities" (read
2026-11-22).
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import msgspec

from gpu_autoscaler.simcloud.aws.machines import ACCOUNT, Machines
from gpu_autoscaler.simcloud.aws.wire import Call, element


class UnknownGroup(Exception):
    """No group of this name."""


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """A scaling activity of a group."""

    number: int
    at: datetime
    failed_because: str | None  # None: it succeeded


class Groups:
    """Auto Scaling groups of a region, in moto's state. `refused_because` returns why an offer cannot be launched now,
    None if it can."""

    def __init__(
        self, region: str, machines: Machines, now: Callable[[], datetime], refused_because: Callable[[str], str | None]
    ) -> None:
        from moto.autoscaling.models import autoscaling_backends  # noqa: PLC0415 - moto loads slowly

        autoscaling_backends[ACCOUNT].pop(region, None)  # of an earlier fake in this process
        self.backend: Any = autoscaling_backends[ACCOUNT][region]
        self._machines = machines
        self._now = now
        self._refused_because = refused_because
        self._activities: defaultdict[str, list[Activity]] = defaultdict(list)  # by group, oldest first

    def get(self, name: str) -> Any:  # noqa: ANN401 - moto ships no types
        """Return moto's group. Raises UnknownGroup."""
        if name not in self.backend.autoscaling_groups:
            raise UnknownGroup(name)
        return self.backend.autoscaling_groups[name]

    def offer_of(self, call: Call) -> str:
        """Return `type/zone/capacity type` of the launch, empty if the group is unknown."""
        try:
            group = self.get(call.parameters.get("AutoScalingGroupName", ""))
        except UnknownGroup:
            return ""
        return self._offer(group, next(iter(call.listed("AvailabilityZones.member")), ""))

    def _offer(self, group: Any, zone: str) -> str:  # noqa: ANN401 - moto ships no types
        return f"{group.instance_type}/{zone}/{'spot' if self._is_spot(group) else 'on-demand'}"

    def launch(self, call: Call) -> str | None:
        """Launch one instance and return its id; None if the group is at its MaxSize. Raises UnknownGroup."""
        group = self.get(call.parameters["AutoScalingGroupName"])
        if group.desired_capacity + 1 > group.max_size:
            return None
        group.desired_capacity += 1
        return self._make(group, next(iter(call.listed("AvailabilityZones.member")), group.availability_zones[0]))

    def set_number(self, name: str, count: int) -> str | None:
        """Set the desired capacity, launch or terminate instances accordingly; return an error. Raises UnknownGroup.
        Instances protected from scale-in stay; callers must not rely on which of the others end."""
        group = self.get(name)
        if not group.min_size <= count <= group.max_size:
            bound = "above max" if count > group.max_size else "below min"
            limit = group.max_size if count > group.max_size else group.min_size
            return f"New SetDesiredCapacity value {count} is {bound} value {limit} for the AutoScalingGroup."
        group.desired_capacity = count
        self._fill(group)
        too_many = len(group.instance_states) - count
        victims = [
            instance_state for instance_state in group.instance_states if not instance_state.protected_from_scale_in
        ][: max(0, too_many)]
        if victims:
            ids = [victim.instance.id for victim in victims]
            self._machines.backend.terminate_instances(ids)
            self._machines.terminating(ids)
            group.instance_states = [
                instance_state for instance_state in group.instance_states if instance_state not in victims
            ]
        return None

    def activities(self, name: str) -> str:
        """Return the inner answer with the group's activities, newest first."""
        described = "".join(
            "<member>"
            + _inner(
                {
                    "ActivityId": f"00000000-0000-4000-8000-{activity.number:012d}",
                    "AutoScalingGroupName": name,
                    "Description": "Launching a new EC2 instance",
                    "Cause": "an instance was started in response to a difference between desired and actual capacity",
                    "StartTime": activity.at.isoformat(),
                    "EndTime": activity.at.isoformat(),
                    "StatusCode": "Successful" if activity.failed_because is None else "Failed",
                    "StatusMessage": activity.failed_because or "",
                    "Progress": 100,
                }
            )
            + "</member>"
            for activity in reversed(self._activities[name])
        )
        return f"<Activities>{described}</Activities>"

    def _fill(self, group: Any) -> int:  # noqa: ANN401 - moto ships no types
        """Launch missing instances as far as possible, and record activities. Returns how many were launched."""
        launched_count, described = 0, self._activities[group.name]
        while len(group.instance_states) < group.desired_capacity:
            zone = group.availability_zones[0]
            why = self._refused_because(self._offer(group, zone))
            described.append(Activity(number=len(described) + 1, at=self._now(), failed_because=why))
            if why is not None:
                break
            self._make(group, zone)
            launched_count += 1
        return launched_count

    def _make(self, group: Any, zone: str) -> str:  # noqa: ANN401 - moto ships no types
        subnet = self._machines.backend.get_default_subnets()[zone]
        all_subnets, group.vpc_zone_identifier = group.vpc_zone_identifier, subnet.id  # moto takes the first
        try:
            group.replace_autoscaling_group_instances(1, group.get_propagated_tags())
        finally:
            group.vpc_zone_identifier = all_subnets
        instance = group.instance_states[-1].instance
        if self._is_spot(group):
            instance.lifecycle = "spot"
        self._machines.launched([instance.id])
        return str(instance.id)

    def heal(self) -> int:
        """Replace lost instances, as AWS does by itself. Returns how many were launched."""
        launched_count = 0
        for group in self.backend.autoscaling_groups.values():
            group.instance_states = [
                instance_state for instance_state in group.instance_states if self._is_alive(instance_state.instance.id)
            ]
            launched_count += self._fill(group)
        return launched_count

    def _is_alive(self, instance_id: str) -> bool:
        return instance_id in self._machines and self._machines.get(instance_id).state in ("pending", "running")

    def answer(self, call: Call, instance_id: str) -> str:
        instance = self._machines.get(instance_id)
        described = {
            "InstanceType": instance.instance_type,
            "MarketType": "spot" if instance.lifecycle == "spot" else "on-demand",
            "SubnetId": instance.subnet_id,
            "AvailabilityZone": instance.availability_zone,
        }
        ids = f"<InstanceIds>{element('member', instance_id)}</InstanceIds>"
        return self._head(call) + f"<Instances><member>{_inner(described)}{ids}</member></Instances><Errors></Errors>"

    def failure(self, call: Call, code: str, message: str) -> str:
        """Return the inner answer of a failed launch: its HTTP status is 200 as well."""
        described = {"ErrorCode": code, "ErrorMessage": message}
        return self._head(call) + f"<Instances></Instances><Errors><member>{_inner(described)}</member></Errors>"

    @staticmethod
    def _head(call: Call) -> str:
        return _inner({name: call.parameters.get(name, "") for name in ("AutoScalingGroupName", "ClientToken")})

    @staticmethod
    def _is_spot(group: Any) -> bool:  # noqa: ANN401 - moto ships no types
        if group.launch_config is not None:
            return bool(group.launch_config.spot_price)
        template = group.ec2_launch_template
        data: Mapping[str, Any] = template.default_version().data if template else {}
        return bool(data.get("InstanceMarketOptions", {}).get("MarketType") == "spot")


def _inner(values: Mapping[str, object]) -> str:
    return "".join(element(name, value) for name, value in values.items())
