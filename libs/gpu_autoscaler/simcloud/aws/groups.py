"""LaunchInstances, which moto lacks: one instance more of a group, in the zone that is asked for, or a reason.

Source: EC2 Auto Scaling API Reference, "LaunchInstances" (read 2026-11-21).
"""

from collections.abc import Mapping
from typing import Any

from gpu_autoscaler.simcloud.aws.machines import ACCOUNT, Machines
from gpu_autoscaler.simcloud.aws.wire import Call, element


class UnknownGroup(Exception):
    """There is no group of this name."""


class Groups:
    """Auto Scaling groups of a region, in moto's books."""

    def __init__(self, region: str, machines: Machines) -> None:
        from moto.autoscaling.models import autoscaling_backends  # noqa: PLC0415 - moto loads slowly

        autoscaling_backends[ACCOUNT].pop(region, None)  # of an earlier fake in this process
        self.backend: Any = autoscaling_backends[ACCOUNT][region]
        self._machines = machines

    def get(self, name: str) -> Any:  # noqa: ANN401 - moto ships no types
        """Return moto's group. Raises UnknownGroup."""
        if name not in self.backend.autoscaling_groups:
            raise UnknownGroup(name)
        return self.backend.autoscaling_groups[name]

    def offer_of(self, call: Call) -> str:
        """Return `type/zone/capacity type` of what the launch asks for, empty where the group is unknown."""
        try:
            group = self.get(call.parameters.get("AutoScalingGroupName", ""))
        except UnknownGroup:
            return ""
        zone = next(iter(call.listed("AvailabilityZones.member")), "")
        return f"{group.instance_type}/{zone}/{'spot' if self._is_spot(group) else 'on-demand'}"

    def launch(self, call: Call) -> str | None:
        """Make one instance and return its id; None where the group is as large as it may be. Raises UnknownGroup."""
        group = self.get(call.parameters["AutoScalingGroupName"])
        if group.desired_capacity + 1 > group.max_size:
            return None
        zone = next(iter(call.listed("AvailabilityZones.member")), group.availability_zones[0])
        subnet = self._machines.backend.get_default_subnets()[zone]
        all_subnets, group.vpc_zone_identifier = group.vpc_zone_identifier, subnet.id  # moto takes the first
        try:
            group.desired_capacity += 1
            group.replace_autoscaling_group_instances(1, group.get_propagated_tags())
        finally:
            group.vpc_zone_identifier = all_subnets
        made = group.instance_states[-1].instance
        if self._is_spot(group):
            made.lifecycle = "spot"
        self._machines.launched([made.id])
        return str(made.id)

    def answer(self, call: Call, instance_id: str) -> str:
        """Return the inner answer of a launch that made this instance."""
        made = self._machines.get(instance_id)
        one = {
            "InstanceType": made.instance_type,
            "MarketType": "spot" if made.lifecycle == "spot" else "on-demand",
            "SubnetId": made.subnet_id,
            "AvailabilityZone": made.availability_zone,
        }
        ids = f"<InstanceIds>{element('member', instance_id)}</InstanceIds>"
        return self._head(call) + f"<Instances><member>{_inner(one)}{ids}</member></Instances><Errors></Errors>"

    def failure(self, call: Call, code: str, message: str) -> str:
        """Return the inner answer of a launch that made nothing: HTTP says 200 all the same."""
        one = {"ErrorCode": code, "ErrorMessage": message}
        return self._head(call) + f"<Instances></Instances><Errors><member>{_inner(one)}</member></Errors>"

    @staticmethod
    def _head(call: Call) -> str:
        return _inner({name: call.parameters.get(name, "") for name in ("AutoScalingGroupName", "ClientToken")})

    @staticmethod
    def _is_spot(group: Any) -> bool:  # noqa: ANN401 - moto ships no types
        template = group.ec2_launch_template
        data: Mapping[str, Any] = template.default_version().data if template else {}
        return bool(data.get("InstanceMarketOptions", {}).get("MarketType") == "spot")


def _inner(values: Mapping[str, object]) -> str:
    return "".join(element(name, value) for name, value in values.items())
