"""Auto Scaling groups: launch one instance of a pool's group by LaunchInstances, terminate instances by id.

LaunchInstances takes a token and a zone and does not retry: an order results in one instance or a refusal. A usable
group offers one instance type under one purchase option; others are reported. `aws.group_max_sizes` writes MaxSize, so
that AWS launches no more for anybody. Sources: EC2 Auto Scaling API Reference, "LaunchInstances",
"UpdateAutoScalingGroup"; cluster-autoscaler, cloudprovider/aws/README.md (tags of node templates, and why
CapacityRebalance and AZRebalance must be off); read 2026-11-21, 2026-11-22.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.labels import CAPACITY_TYPE, INSTALLATION, INSTANCE_TYPE
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.providers.aws.client import AwsClient
from gpu_autoscaler.providers.aws.desired_capacity import DesiredCapacityGroups
from gpu_autoscaler.providers.aws.node_template import LABEL, NodeTemplate, template_of
from gpu_autoscaler.providers.aws.options import AwsOptions, max_size_by_group, names_by_pool
from gpu_autoscaler.providers.aws.translate import code_of, error_in, failure, is_answered, tags_of
from gpu_autoscaler.providers.preflight import Finding, ok, warning
from gpu_autoscaler.providers.protocol import Order, misconfigured
from gpu_autoscaler.providers.tokens import idempotency_token

UPDATE = "UpdateAutoScalingGroup"
GROUPS_CALL = ("DescribeAutoScalingGroups", "AutoScalingGroups")  # with the key of its answer
EKS_TAG = "eks:nodegroup-name"  # EKS User Guide, "Tag your Amazon EKS resources" (read 2026-11-22)
CLUSTER_AUTOSCALER_TAG = "k8s.io/cluster-autoscaler/enabled"  # cluster-autoscaler, cloudprovider/aws/README.md
GROUPS_KEPT = timedelta(minutes=5)
NODE_TEMPLATE_TYPE = LABEL + INSTANCE_TYPE
# Ours, Karpenter's, and EKS's, whose values are SPOT and ON_DEMAND.
NODE_TEMPLATE_CAPACITY_TYPES = tuple(
    LABEL + label for label in (CAPACITY_TYPE, "karpenter.sh/capacity-type", "eks.amazonaws.com/capacityType")
)


class GroupMaxSizes:
    """MaxSize of groups by aws.group_max_sizes. Never written below the desired capacity, which AWS would lower too."""

    def __init__(self, client: AwsClient, max_sizes: Mapping[str, int]) -> None:
        self._client = client
        self._max_sizes = max_sizes

    def of(self, name: str) -> int | None:
        """Return the group's configured MaxSize; None if it is not ours to write."""
        return self._max_sizes.get(name)

    async def enforce(self, name: str) -> int:
        """Write the configured MaxSize and return it. Raises LaunchRefused if the group exceeds it, TransientError."""
        max_size = self._max_sizes[name]
        for group_data in await self._client.items(*GROUPS_CALL, AutoScalingGroupNames=[name]):
            if group_data["DesiredCapacity"] > max_size:
                raise misconfigured(
                    f"{UPDATE}: group {name} has desired capacity {group_data['DesiredCapacity']}, above its"
                    f" aws.group_max_sizes of {max_size}: MaxSize stays {group_data['MaxSize']} and nothing is bought"
                    " from it until fewer instances run",
                    "MaxSize",
                )
            if group_data["MaxSize"] != max_size:
                await self._client.call(UPDATE, AutoScalingGroupName=name, MaxSize=max_size)
        return max_size

    def finding(self, current_max_size: int, name: str, *, desired_capacity: int) -> Finding:
        """Report how a group's MaxSize compares to the settings. Read-only."""
        max_size, subject = self._max_sizes.get(name), f"aws.group_max_sizes {name}"
        if max_size is None:
            return ok(subject, f"MaxSize is {current_max_size}; it is written only if set in aws.group_max_sizes")
        if desired_capacity > max_size:
            message = (
                f"is {max_size}, below the desired capacity of {desired_capacity}: nothing is launched from the group"
            )
            return warning(subject, message, "raise it, or remove nodes of the group")
        if current_max_size != max_size:
            return ok(subject, f"MaxSize is {current_max_size} and becomes {max_size} with the first order")
        return ok(subject, f"MaxSize is {max_size}, as configured")


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """What one group offers, or why it is not used."""

    name: str
    instance_type: str | None
    zones: tuple[str, ...]
    capacity_type: CapacityType
    uses_desired_capacity: bool = False
    max_size: int = 0  # when last read
    desired_capacity: int = 0  # when last read
    template: NodeTemplate = NodeTemplate()  # of its nodes, as its tags declare it
    problems: tuple[str, ...] = ()  # each rules out purchases
    advice: tuple[str, ...] = ()  # does not rule out purchases

    def sells(self, instance_type: str, zone: str, capacity_type: CapacityType) -> bool:
        return (
            not self.problems
            and (self.instance_type, self.capacity_type) == (instance_type, capacity_type)
            and (zone in self.zones)
        )


class AwsGroups:
    """The groups of the settings, by pool."""

    def __init__(self, client: AwsClient, options: AwsOptions, installation: str) -> None:
        desired_capacity_names = names_by_pool(options.desired_capacity_groups)
        self._client = client
        self._names_by_pool = names_by_pool(options.groups) | desired_capacity_names
        self._desired_capacity_names = frozenset(desired_capacity_names.values())
        self._shared_names = frozenset(options.shared_groups)
        self._by_desired_capacity = DesiredCapacityGroups(client, installation)
        self._max_sizes = GroupMaxSizes(client, max_size_by_group(options.group_max_sizes))
        self._groups: Mapping[str, Group] = {}  # by name
        self._read_at: datetime | None = None

    def has_pool(self, pool: str) -> bool:
        return pool in self._names_by_pool

    def with_node_template(self, offer: Offer) -> Offer:
        """Return the offer as its groups launch it: labels and taints by pool, resources of the smallest group."""
        marks, resources = [], offer.resources
        for pool, name in sorted(self._names_by_pool.items()):
            group = self._groups.get(name)
            if group is not None and group.sells(offer.instance_type, offer.zone, offer.capacity_type):
                pool_marks, resources = group.template.marks(pool), group.template.capped(resources)
                marks += [] if pool_marks is None else [pool_marks]
        if not marks and resources == offer.resources:
            return offer
        return msgspec.structs.replace(offer, marks=tuple(marks), resources=resources)

    async def read(self, now: datetime) -> Sequence[Group]:
        """Return all groups of the settings; a missing one has a problem. Raises TransientError."""
        if not self._names_by_pool:
            return ()
        if self._read_at is None or now - self._read_at >= GROUPS_KEPT:
            names = sorted(set(self._names_by_pool.values()))
            groups = await self._client.items(*GROUPS_CALL, AutoScalingGroupNames=names)
            by_name = {group["AutoScalingGroupName"]: group for group in groups}
            self._groups = {name: await self._read_one(name, by_name.get(name)) for name in names}
            self._read_at = now
        return tuple(self._groups.values())

    async def launch(self, order: Order, now: datetime) -> str:
        """Return the id of the order's instance, tagged. Raises LaunchRefused, PermanentError, TransientError."""
        await self.read(now)
        group, offer = self._groups[self._names_by_pool[order.pool]], order.offer
        if not group.sells(offer.instance_type, offer.zone, offer.capacity_type):
            why = "; ".join(group.problems) or (
                f"it offers {group.instance_type} as {group.capacity_type} in {', '.join(group.zones)}"
            )
            raise misconfigured(
                f"group {group.name} of pool {order.pool} does not offer {offer.key}: {why}; check aws.groups and the"
                " policy",
                "OfferNotInGroup",
            )
        await self._enforce_max_size(group)
        if group.uses_desired_capacity:
            return await self._by_desired_capacity.launch(order, group.name, now)
        answer = await self._client.call(
            "LaunchInstances",
            AutoScalingGroupName=group.name,
            RequestedCapacity=1,
            ClientToken=idempotency_token(order.installation, order.action_id),
            AvailabilityZones=[offer.zone],
            RetryStrategy="none",
        )
        instance_ids: list[str] = [
            instance_id for instance in answer.get("Instances", ()) for instance_id in instance.get("InstanceIds", ())
        ]
        if not instance_ids:
            error: Mapping[str, str] = next(iter(answer.get("Errors", ())), {})
            code = error.get("ErrorCode", "NoAnswer")
            message = error.get("ErrorMessage", "nothing launched, no reason given")
            raise failure("LaunchInstances", code, message, of_launch=True)
        # The call takes no tags. If CreateTags is lost, a retry with the same token repeats it; until then the tags
        # that the group itself propagates (`doctor` asks for our installation's tag) identify the owner.
        await self._client.call("CreateTags", Resources=instance_ids, Tags=tags_of(order))
        return instance_ids[0]

    def max_size_finding(self, group: Group) -> Finding:
        """Report how the group's MaxSize compares to the settings. Read-only."""
        return self._max_sizes.finding(group.max_size, group.name, desired_capacity=group.desired_capacity)

    async def _enforce_max_size(self, group: Group) -> None:
        """Write the configured MaxSize, if any, before a launch."""
        max_size = self._max_sizes.of(group.name)
        if max_size is not None and group.max_size != max_size:
            updated = msgspec.structs.replace(group, max_size=await self._max_sizes.enforce(group.name))
            self._groups = {**self._groups, group.name: updated}

    async def terminate(self, instance_id: str) -> bool:
        """Terminate the instance without a successor; False if it is in no group any more. Raises TransientError,
        PermanentError."""
        try:
            await self._client.call(
                "TerminateInstanceInAutoScalingGroup", InstanceId=instance_id, ShouldDecrementDesiredCapacity=True
            )
        except TransientError as exc:
            if _is_of_no_group(exc):
                return False
            raise
        return True

    async def detach(self, instance_id: str, name: str) -> None:
        """Detach the instance and lower the desired capacity, so that AWS launches no successor. Raises
        TransientError."""
        try:
            await self._client.call(
                "DetachInstances",
                AutoScalingGroupName=name,
                InstanceIds=[instance_id],
                ShouldDecrementDesiredCapacity=True,
            )
        except TransientError as exc:
            if not _is_of_no_group(exc):
                raise

    async def _own_policies(self, name: str) -> list[str]:
        """Return the group's own scaling policies; empty if reading them is not allowed. Raises TransientError."""
        try:
            policies = await self._client.items("DescribePolicies", "ScalingPolicies", AutoScalingGroupName=name)
        except TransientError as exc:
            if not is_answered(exc):
                raise
            return []
        return [policy["PolicyName"] for policy in policies]

    async def _read_one(self, name: str, group_data: Mapping[str, Any] | None) -> Group:
        if group_data is None:
            return Group(
                name=name,
                instance_type=None,
                zones=(),
                capacity_type=CapacityType.ON_DEMAND,
                problems=(f"not found in {self._client.region}",),
            )
        tags = {tag["Key"]: tag["Value"] for tag in group_data.get("Tags", ())}
        propagated = {tag["Key"] for tag in group_data.get("Tags", ()) if tag.get("PropagateAtLaunch")}
        data = await self._template_data(group_data)
        types, template = types_of(group_data, data, tags), template_of(tags)
        capacity_type = capacity_type_of(group_data, data, tags)
        uses_desired_capacity, is_shared = name in self._desired_capacity_names, name in self._shared_names
        specific_problems = (
            _problems_by_desired_capacity(group_data, propagated)
            if uses_desired_capacity
            else _problems_by_launch(group_data)
        )
        policies = await self._own_policies(name)
        return Group(
            name=name,
            instance_type=types[0] if len(types) == 1 else None,
            zones=tuple(sorted(group_data["AvailabilityZones"])),
            capacity_type=capacity_type or CapacityType.ON_DEMAND,
            uses_desired_capacity=uses_desired_capacity,
            max_size=group_data["MaxSize"],
            desired_capacity=group_data["DesiredCapacity"],
            template=template,
            problems=(
                *_problems(group_data, types, capacity_type, self._max_sizes.of(name)),
                *specific_problems,
                *_other_controllers(tags, () if is_shared else policies),
            ),
            advice=(
                *_advice(group_data, propagated),
                *_shared_advice(policies if is_shared else ()),
                *(f"correct its tag {key}: it cannot be parsed" for key in template.unread),
            ),
        )

    async def _template_data(self, group_data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the group's launch template data; empty if it has none, or reading it is not allowed. Raises
        TransientError."""
        mixed = group_data.get("MixedInstancesPolicy", {}).get("LaunchTemplate", {}).get("LaunchTemplateSpecification")
        template = group_data.get("LaunchTemplate") or mixed
        if template is None:
            return await self._configuration(group_data.get("LaunchConfigurationName"))
        try:
            answer = await self._client.call(
                "DescribeLaunchTemplateVersions",
                LaunchTemplateId=template["LaunchTemplateId"],
                Versions=[template.get("Version", "$Default")],
            )
        except TransientError as exc:
            if not is_answered(exc):
                raise
            return {}  # its tags may still say it; an unknown group is not used
        data: Mapping[str, Any] = answer["LaunchTemplateVersions"][0]["LaunchTemplateData"]
        return data

    async def _configuration(self, name: str | None) -> Mapping[str, Any]:
        """Return a launch configuration in the form of template data; empty and errors as `_template_data`."""
        if name is None:
            return {}
        try:
            answer = await self._client.call("DescribeLaunchConfigurations", LaunchConfigurationNames=[name])
        except TransientError as exc:
            if not is_answered(exc):
                raise
            return {}
        for configuration in answer["LaunchConfigurations"]:
            market = {"MarketType": "spot"} if configuration.get("SpotPrice") else {}
            return {"InstanceType": configuration["InstanceType"], "InstanceMarketOptions": market}
        return {}


def types_of(group_data: Mapping[str, Any], data: Mapping[str, Any], tags: Mapping[str, str]) -> list[str]:
    """Return a group's instance types: of its overrides, its template, or cluster-autoscaler's tag."""
    overrides = group_data.get("MixedInstancesPolicy", {}).get("LaunchTemplate", {}).get("Overrides", ())
    override_types = sorted({override["InstanceType"] for override in overrides if "InstanceType" in override})
    if override_types:
        return override_types
    instance_type = data.get("InstanceType") or tags.get(NODE_TEMPLATE_TYPE)
    return [instance_type] if instance_type else []


def capacity_type_of(
    group_data: Mapping[str, Any], data: Mapping[str, Any], tags: Mapping[str, str]
) -> CapacityType | None:
    """Return the group's purchase option; None if it mixes them, or neither template nor tag says it."""
    policy = group_data.get("MixedInstancesPolicy")
    if policy is None and not data:
        values = {tags[key].lower().replace("_", "-") for key in NODE_TEMPLATE_CAPACITY_TYPES if key in tags}
        return next((kind for kind in (CapacityType.SPOT, CapacityType.ON_DEMAND) if values == {kind.value}), None)
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


def _other_controllers(tags: Mapping[str, str], policies: Sequence[str]) -> list[str]:
    """Return other controllers that size the group; they rule out purchases."""
    problems = []
    if policies:
        names = ", ".join(sorted(policies))
        problems.append(f"its own scaling policies {names} size it; delete them or name another group")
    if EKS_TAG in tags:
        problems.append(
            f"it belongs to the EKS managed node group {tags[EKS_TAG]}, which EKS sizes and repairs itself; create a"
            " group of your own for these nodes"
        )
    return problems


def _shared_advice(policies: Sequence[str]) -> list[str]:
    if not policies:
        return []
    message = f"its own scaling policies {', '.join(sorted(policies))} are accepted by aws.shared_groups"
    return [f"{message}: keep them from terminating nodes bought here (scale-in protection), or delete them"]


def _is_of_no_group(exc: TransientError) -> bool:
    """Return whether AWS says that the instance is in no group, or not in this one, any more."""
    words = str(error_in(exc.__cause__).get("Message", "")).lower()
    return code_of(exc) == "ValidationError" and ("not found" in words or "not part of" in words)


def _problems(
    group_data: Mapping[str, Any], types: Sequence[str], capacity_type: CapacityType | None, max_size: int | None
) -> list[str]:
    problems = []
    if not types:
        problems.append(
            f"its instance type is unknown; allow ec2:DescribeLaunchTemplateVersions or tag it {NODE_TEMPLATE_TYPE}"
        )
    if len(types) > 1:
        problems.append(f"it has several instance types ({', '.join(types)}); create one group for each")
    if capacity_type is None and group_data.get("MixedInstancesPolicy"):
        problems.append("it mixes spot and on-demand; create one group for each")
    elif capacity_type is None:
        problems.append(
            "its purchase option is unknown; allow ec2:DescribeLaunchTemplateVersions or tag it"
            f" {NODE_TEMPLATE_CAPACITY_TYPES[0]} with {CapacityType.SPOT} or {CapacityType.ON_DEMAND}"
        )
    if group_data.get("CapacityRebalance"):
        problems.append("CapacityRebalance is on: AWS and gpu-autoscaler would both replace an instance; turn it off")
    if max_size is not None and group_data["MinSize"] > max_size:
        problems.append(
            f"its MinSize of {group_data['MinSize']} exceeds its aws.group_max_sizes of {max_size}; lower MinSize"
        )
    if group_data["MaxSize"] == 0 and max_size is None:
        problems.append("its MaxSize is 0, so it launches nothing; raise it")
    if any(process["ProcessName"] == "Launch" for process in group_data.get("SuspendedProcesses", ())):
        problems.append("its Launch process is suspended; resume it")
    return problems


def _problems_by_launch(group_data: Mapping[str, Any]) -> list[str]:
    """Return what rules out LaunchInstances."""
    if not group_data.get("LaunchConfigurationName"):
        return []
    step = "give it a launch template, or name it in aws.desired_capacity_groups"
    return [f"it uses a launch configuration, which LaunchInstances does not support; {step}"]


def _problems_by_desired_capacity(group_data: Mapping[str, Any], propagated: set[str]) -> list[str]:
    """Return what rules out sizing by desired capacity: AWS could launch another type, or terminate other nodes."""
    problems = []
    if len(group_data["AvailabilityZones"]) != 1:
        problems.append(
            "it is sized by desired capacity in several zones, so AWS would choose; create a group for each"
        )
    if not group_data.get("NewInstancesProtectedFromScaleIn"):
        problems.append(
            "it is sized by desired capacity without scale-in protection of new instances: AWS could terminate a busy"
            " one; turn the protection on"
        )
    if INSTALLATION not in propagated:
        problems.append(
            f"it is sized by desired capacity and lacks tag {INSTALLATION} with our id, propagated at launch; add it"
        )
    return problems


def _advice(group_data: Mapping[str, Any], propagated: set[str]) -> list[str]:
    advice = []
    if INSTALLATION not in propagated:
        advice.append(f"add tag {INSTALLATION} with our installation's id, propagated at launch")
    if any(tag["Key"] == CLUSTER_AUTOSCALER_TAG for tag in group_data.get("Tags", ())):
        advice.append("make sure that cluster-autoscaler, whose tag it carries, does not run: both would size it")
    suspended = {process["ProcessName"] for process in group_data.get("SuspendedProcesses", ())}
    if "AZRebalance" not in suspended and len(group_data["AvailabilityZones"]) > 1:
        advice.append("suspend AZRebalance, or AWS may terminate a busy node to rebalance zones")
    if group_data["MinSize"] > 0:
        advice.append(f"its MinSize is {group_data['MinSize']}, below which no node is terminated; set it to 0")
    return advice
