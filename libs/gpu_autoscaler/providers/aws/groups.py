"""Auto Scaling groups: one more instance of a pool's group by LaunchInstances, one less by naming it. Never a count.

LaunchInstances takes a token and a zone and retries nothing, so an order stays an order: one instance, or a refusal.
SetDesiredCapacity is never called: it sets an absolute number, and AWS then chooses who goes.

A group sells one instance type under one purchase option; another is refused by name, as its answer could be anything.
Sources: EC2 Auto Scaling API Reference, "LaunchInstances"; cluster-autoscaler, cloudprovider/aws/README.md (the tags of
node templates, and why CapacityRebalance and AZRebalance are to be off); read 2026-11-21.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.labels import INSTALLATION, INSTANCE_TYPE
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.aws.calls import AwsCalls
from gpu_autoscaler.providers.aws.translate import failure, tags_of
from gpu_autoscaler.providers.protocol import LaunchRefused, Order
from gpu_autoscaler.providers.tokens import token_of

GROUPS_KEPT = timedelta(minutes=5)
NODE_TEMPLATE_TYPE = f"k8s.io/cluster-autoscaler/node-template/label/{INSTANCE_TYPE}"


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """What one group sells, or why nothing is bought from it."""

    name: str
    instance_type: str | None
    zones: tuple[str, ...]
    capacity_type: CapacityType
    problems: tuple[str, ...] = ()  # that stop purchases
    advice: tuple[str, ...] = ()  # that does not

    def sells(self, instance_type: str, zone: str, capacity_type: CapacityType) -> bool:
        """Return whether an order for this may go to the group."""
        return (
            not self.problems
            and (self.instance_type, self.capacity_type) == (instance_type, capacity_type)
            and (zone in self.zones)
        )


class AwsGroups:
    """The groups of the settings, by the pools that they stand for."""

    def __init__(self, calls: AwsCalls, names_by_pool: Mapping[str, str]) -> None:
        self._calls = calls
        self._names_by_pool = names_by_pool
        self._groups: Mapping[str, Group] = {}  # by name
        self._read_at: datetime | None = None

    def stands_for(self, pool: str) -> bool:
        """Return whether the pool's instances come from a group."""
        return pool in self._names_by_pool

    async def read(self, now: datetime) -> Sequence[Group]:
        """Return every group of the settings; one that is missing has that for its problem. Raises TransientError."""
        if not self._names_by_pool:
            return ()
        if self._read_at is None or now - self._read_at >= GROUPS_KEPT:
            names = sorted(set(self._names_by_pool.values()))
            told = {
                one["AutoScalingGroupName"]: one
                async for page in self._calls.pages("DescribeAutoScalingGroups", AutoScalingGroupNames=names)
                for one in page["AutoScalingGroups"]
            }
            self._groups = {name: await self._read_one(name, told.get(name)) for name in names}
            self._read_at = now
        return tuple(self._groups.values())

    async def launch(self, order: Order, now: datetime) -> str:
        """Return the id of the order's instance, tagged. Raises LaunchRefused, PermanentError, TransientError."""
        await self.read(now)
        group, offer = self._groups[self._names_by_pool[order.pool]], order.offer
        if not group.sells(offer.instance_type, offer.zone, offer.capacity_type):
            why = "; ".join(group.problems) or (
                f"it sells {group.instance_type} as {group.capacity_type} in {', '.join(group.zones)}"
            )
            raise LaunchRefused(
                f"group {group.name} of pool {order.pool} does not sell {offer.key}: {why};"
                " see aws.groups and the policy",
                code="GroupSellsOther",
                kind="configuration",
                scope="offer",
            )
        answer = await self._calls.call(
            "LaunchInstances",
            AutoScalingGroupName=group.name,
            RequestedCapacity=1,
            ClientToken=token_of(order.installation, order.action_id),
            AvailabilityZones=[offer.zone],
            RetryStrategy="none",
        )
        made: list[str] = [
            instance_id for one in answer.get("Instances", ()) for instance_id in one.get("InstanceIds", ())
        ]
        if not made:
            error: Mapping[str, str] = next(iter(answer.get("Errors", ())), {})
            code, message = error.get("ErrorCode", "NoAnswer"), error.get("ErrorMessage", "nothing made, and no reason")
            raise failure("LaunchInstances", code, message, of_launch=True)
        # The call takes no tags. Lost in between, the same token brings us here again; what the group itself gives its
        # instances (`doctor` asks for our installation's tag there) says until then whose it is.
        await self._calls.call("CreateTags", Resources=made, Tags=tags_of(order))
        return made[0]

    async def terminate(self, instance_id: str) -> None:
        """End the instance and want one less: the group makes no other. Raises TransientError, PermanentError."""
        await self._calls.call(
            "TerminateInstanceInAutoScalingGroup", InstanceId=instance_id, ShouldDecrementDesiredCapacity=True
        )

    async def _read_one(self, name: str, told: Mapping[str, Any] | None) -> Group:
        if told is None:
            return Group(
                name=name,
                instance_type=None,
                zones=(),
                capacity_type=CapacityType.ON_DEMAND,
                problems=(f"there is no such group in {self._calls.region}",),
            )
        tags = {tag["Key"]: tag["Value"] for tag in told.get("Tags", ())}
        propagated = {tag["Key"] for tag in told.get("Tags", ()) if tag.get("PropagateAtLaunch")}
        data = await self._template_data(told)
        types = types_of(told, data, tags)
        capacity_type = capacity_type_of(told, data)
        return Group(
            name=name,
            instance_type=types[0] if len(types) == 1 else None,
            zones=tuple(sorted(told["AvailabilityZones"])),
            capacity_type=capacity_type or CapacityType.ON_DEMAND,
            problems=tuple(_problems(told, types, capacity_type)),
            advice=tuple(_advice(told, propagated)),
        )

    async def _template_data(self, told: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what the group's launch template says, empty where there is none, or we may not look."""
        mixed = told.get("MixedInstancesPolicy", {}).get("LaunchTemplate", {}).get("LaunchTemplateSpecification")
        template = told.get("LaunchTemplate") or mixed
        if template is None:
            return {}
        try:
            answer = await self._calls.call(
                "DescribeLaunchTemplateVersions",
                LaunchTemplateId=template["LaunchTemplateId"],
                Versions=[template.get("Version", "$Default")],
            )
        except TransientError:
            return {}  # its tags may tell; a group of which nothing is known sells nothing
        data: Mapping[str, Any] = answer["LaunchTemplateVersions"][0]["LaunchTemplateData"]
        return data


def types_of(told: Mapping[str, Any], data: Mapping[str, Any], tags: Mapping[str, str]) -> list[str]:
    """Return the instance types of a group: its overrides, its template's, or those of cluster-autoscaler's tag."""
    overrides = told.get("MixedInstancesPolicy", {}).get("LaunchTemplate", {}).get("Overrides", ())
    named = sorted({one["InstanceType"] for one in overrides if "InstanceType" in one})
    if named:
        return named
    found = data.get("InstanceType") or tags.get(NODE_TEMPLATE_TYPE)
    return [found] if found else []


def capacity_type_of(told: Mapping[str, Any], data: Mapping[str, Any]) -> CapacityType | None:
    """Return the group's purchase option, None for one that mixes them."""
    policy = told.get("MixedInstancesPolicy")
    if policy is None:
        is_spot = data.get("InstanceMarketOptions", {}).get("MarketType") == "spot"
        return CapacityType.SPOT if is_spot else CapacityType.ON_DEMAND
    # Defaults: no base, and all above it on-demand (EC2 Auto Scaling API Reference, "InstancesDistribution").
    distribution = policy.get("InstancesDistribution", {})
    base, percent = (
        distribution.get("OnDemandBaseCapacity", 0),
        distribution.get("OnDemandPercentageAboveBaseCapacity", 100),
    )
    if percent == 100:
        return CapacityType.ON_DEMAND
    return CapacityType.SPOT if percent == 0 and base == 0 else None


def _problems(told: Mapping[str, Any], types: Sequence[str], capacity_type: CapacityType | None) -> list[str]:
    found = []
    if not types:
        found.append(
            f"its instance type cannot be read; allow ec2:DescribeLaunchTemplateVersions or tag it {NODE_TEMPLATE_TYPE}"
        )
    if len(types) > 1:
        found.append(f"it has several instance types ({', '.join(types)}); make a group for each")
    if capacity_type is None:
        found.append("it mixes spot and on-demand; make a group for each")
    if told.get("LaunchConfigurationName"):
        found.append(
            "it uses a launch configuration, from which AWS launches nothing by order; give it a launch template"
        )
    if told.get("CapacityRebalance"):
        found.append("CapacityRebalance is on, so that AWS and we would both replace an instance; turn it off")
    if any(process["ProcessName"] == "Launch" for process in told.get("SuspendedProcesses", ())):
        found.append("its Launch process is suspended; resume it")
    return found


def _advice(told: Mapping[str, Any], propagated: set[str]) -> list[str]:
    found = []
    if INSTALLATION not in propagated:
        found.append(f"give it the tag {INSTALLATION} with our installation's id, propagated at launch")
    suspended = {process["ProcessName"] for process in told.get("SuspendedProcesses", ())}
    if "AZRebalance" not in suspended and len(told["AvailabilityZones"]) > 1:
        found.append("suspend AZRebalance, or AWS may end a busy node to even out its zones")
    if told["MinSize"] > 0:
        found.append(f"its MinSize is {told['MinSize']}: below that no node is removed; set it to 0")
    return found
