"""Auto Scaling groups: one more instance of a pool's group by LaunchInstances, one less by naming it.

LaunchInstances takes a token and a zone and retries nothing, so an order stays an order: one instance, or a refusal.
Groups that do not allow it are told a number, by choice (`providers/aws/counted.py`).

A group sells one instance type under one purchase option; another is refused by name, as its answer could be anything.
Sources: EC2 Auto Scaling API Reference, "LaunchInstances"; cluster-autoscaler, cloudprovider/aws/README.md (the tags of
node templates, and why CapacityRebalance and AZRebalance are to be off); read 2026-11-21.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.labels import CAPACITY_TYPE, INSTALLATION, INSTANCE_TYPE
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.providers.aws.calls import AwsClient
from gpu_autoscaler.providers.aws.counted import DesiredCapacityGroups
from gpu_autoscaler.providers.aws.maxima import GroupMaxSizes
from gpu_autoscaler.providers.aws.node_template import LABEL, NodeTemplate, template_of
from gpu_autoscaler.providers.aws.options import AwsOptions, maxima_by_group, names_by_pool
from gpu_autoscaler.providers.aws.translate import failure, is_answered, tags_of
from gpu_autoscaler.providers.findings import Finding
from gpu_autoscaler.providers.protocol import LaunchRefused, Order
from gpu_autoscaler.providers.tokens import idempotency_token

EKS_TAG = "eks:nodegroup-name"  # EKS User Guide, "Tag your Amazon EKS resources" (read 2026-11-22)
CLUSTER_AUTOSCALER_TAG = "k8s.io/cluster-autoscaler/enabled"  # S65; cluster-autoscaler, cloudprovider/aws/README.md
GROUPS_KEPT = timedelta(minutes=5)
NODE_TEMPLATE_TYPE = LABEL + INSTANCE_TYPE
# Ours, Karpenter's, and that of EKS, which writes SPOT and ON_DEMAND.
NODE_TEMPLATE_CAPACITY_TYPES = tuple(
    LABEL + label for label in (CAPACITY_TYPE, "karpenter.sh/capacity-type", "eks.amazonaws.com/capacityType")
)


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """What one group sells, or why nothing is bought from it."""

    name: str
    instance_type: str | None
    zones: tuple[str, ...]
    capacity_type: CapacityType
    is_counted: bool = False  # told a number
    max_count: int = 0  # its MaxSize, when it was read
    wanted_count: int = 0  # its DesiredCapacity, then
    template: NodeTemplate = NodeTemplate()  # what its tags say of its nodes
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

    def __init__(self, calls: AwsClient, options: AwsOptions, installation: str) -> None:
        counted = names_by_pool(options.desired_capacity_groups)
        self._calls = calls
        self._names_by_pool = names_by_pool(options.groups) | counted
        self._counted_names = frozenset(counted.values())
        self._shared_names = frozenset(options.shared_groups)
        self._counted = DesiredCapacityGroups(calls, installation)
        self._maxima = GroupMaxSizes(calls, maxima_by_group(options.group_max_sizes))
        self._groups: Mapping[str, Group] = {}  # by name
        self._read_at: datetime | None = None

    def stands_for(self, pool: str) -> bool:
        """Return whether the pool's instances come from a group."""
        return pool in self._names_by_pool

    def dressed(self, offer: Offer) -> Offer:
        """Return the offer as the groups that sell it make it: labels and taints by pool, amounts of the least."""
        marks, resources = [], offer.resources
        for pool, name in sorted(self._names_by_pool.items()):
            group = self._groups.get(name)
            if group is not None and group.sells(offer.instance_type, offer.zone, offer.capacity_type):
                own, resources = group.template.marks(pool), group.template.least(resources)
                marks += [] if own is None else [own]
        if not marks and resources == offer.resources:
            return offer
        return msgspec.structs.replace(offer, marks=tuple(marks), resources=resources)

    async def read(self, now: datetime) -> Sequence[Group]:
        """Return every group of the settings; one that is missing has that for its problem. Raises TransientError."""
        if not self._names_by_pool:
            return ()
        if self._read_at is None or now - self._read_at >= GROUPS_KEPT:
            names = sorted(set(self._names_by_pool.values()))
            told = {
                group["AutoScalingGroupName"]: group
                async for page in self._calls.pages("DescribeAutoScalingGroups", AutoScalingGroupNames=names)
                for group in page["AutoScalingGroups"]
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
        await self._keep_maximum(group)
        if group.is_counted:
            return await self._counted.launch(order, group.name, now)
        answer = await self._calls.call(
            "LaunchInstances",
            AutoScalingGroupName=group.name,
            RequestedCapacity=1,
            ClientToken=idempotency_token(order.installation, order.action_id),
            AvailabilityZones=[offer.zone],
            RetryStrategy="none",
        )
        made: list[str] = [
            instance_id for instance in answer.get("Instances", ()) for instance_id in instance.get("InstanceIds", ())
        ]
        if not made:
            error: Mapping[str, str] = next(iter(answer.get("Errors", ())), {})
            code, message = error.get("ErrorCode", "NoAnswer"), error.get("ErrorMessage", "nothing made, and no reason")
            raise failure("LaunchInstances", code, message, of_launch=True)
        # The call takes no tags. Lost in between, the same token brings us here again; what the group itself gives its
        # instances (`doctor` asks for our installation's tag there) says until then whose it is.
        await self._calls.call("CreateTags", Resources=made, Tags=tags_of(order))
        return made[0]

    def finding_of_maximum(self, group: Group) -> Finding:
        """Say how the group's MaxSize stands to the settings. Changes nothing."""
        return self._maxima.finding(group.max_count, group.name, wanted=group.wanted_count)

    async def _keep_maximum(self, group: Group) -> None:
        """Have the maximum be ours where the settings say so, before anything is bought."""
        most = self._maxima.of(group.name)
        if most is not None and group.max_count != most:
            kept = msgspec.structs.replace(group, max_count=await self._maxima.keep(group.name))
            self._groups = {**self._groups, group.name: kept}

    async def terminate(self, instance_id: str) -> bool:
        """End the instance and want one less: the group makes no other. False for one that is in no group any more.

        Raises TransientError, PermanentError.
        """
        try:
            await self._calls.call(
                "TerminateInstanceInAutoScalingGroup", InstanceId=instance_id, ShouldDecrementDesiredCapacity=True
            )
        except TransientError as exc:
            if _is_of_no_group(exc):
                return False
            raise
        return True

    async def detach(self, instance_id: str, name: str) -> None:
        """Take the instance out of its group, and want one less: when it goes, AWS makes no other. Raises
        TransientError."""
        try:
            await self._calls.call(
                "DetachInstances",
                AutoScalingGroupName=name,
                InstanceIds=[instance_id],
                ShouldDecrementDesiredCapacity=True,
            )
        except TransientError as exc:
            if not _is_of_no_group(exc):
                raise

    async def _own_policies(self, name: str) -> list[str]:
        """By which policies the group sets its own size; none where we may not ask. Raises TransientError."""
        try:
            pages = [page async for page in self._calls.pages("DescribePolicies", AutoScalingGroupName=name)]
        except TransientError as exc:
            if not is_answered(exc):
                raise
            return []
        return [policy["PolicyName"] for page in pages for policy in page["ScalingPolicies"]]

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
        capacity_type, is_counted = capacity_type_of(told, data, tags), name in self._counted_names
        problems, template = _problems(told, types, capacity_type, self._maxima.of(name)), template_of(tags)
        policies = await self._own_policies(name)
        is_shared = name in self._shared_names
        return Group(
            name=name,
            instance_type=types[0] if len(types) == 1 else None,
            zones=tuple(sorted(told["AvailabilityZones"])),
            capacity_type=capacity_type or CapacityType.ON_DEMAND,
            is_counted=is_counted,
            max_count=told["MaxSize"],
            wanted_count=told["DesiredCapacity"],
            template=template,
            problems=(
                *problems,
                *(_of_counted(told, propagated) if is_counted else _of_launched(told)),
                *_others(tags, () if is_shared else policies),
            ),
            advice=(
                *_advice(told, propagated),
                *_of_shared(policies if is_shared else ()),
                *(f"correct its tag {key}: it is not read" for key in template.unread),
            ),
        )

    async def _template_data(self, told: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what the group's launch template says, empty where there is none, or we may not look.

        Raises TransientError.
        """
        mixed = told.get("MixedInstancesPolicy", {}).get("LaunchTemplate", {}).get("LaunchTemplateSpecification")
        template = told.get("LaunchTemplate") or mixed
        if template is None:
            return await self._configuration(told.get("LaunchConfigurationName"))
        try:
            answer = await self._calls.call(
                "DescribeLaunchTemplateVersions",
                LaunchTemplateId=template["LaunchTemplateId"],
                Versions=[template.get("Version", "$Default")],
            )
        except TransientError as exc:
            if not is_answered(exc):
                raise
            return {}  # its tags may tell; a group of which nothing is known sells nothing
        data: Mapping[str, Any] = answer["LaunchTemplateVersions"][0]["LaunchTemplateData"]
        return data

    async def _configuration(self, name: str | None) -> Mapping[str, Any]:
        """Return what a launch configuration says, in a template's words; empty as `_template_data`, and raises so."""
        if name is None:
            return {}
        try:
            answer = await self._calls.call("DescribeLaunchConfigurations", LaunchConfigurationNames=[name])
        except TransientError as exc:
            if not is_answered(exc):
                raise
            return {}
        for told in answer["LaunchConfigurations"]:
            market = {"MarketType": "spot"} if told.get("SpotPrice") else {}
            return {"InstanceType": told["InstanceType"], "InstanceMarketOptions": market}
        return {}


def types_of(told: Mapping[str, Any], data: Mapping[str, Any], tags: Mapping[str, str]) -> list[str]:
    """Return the instance types of a group: its overrides, its template's, or those of cluster-autoscaler's tag."""
    overrides = told.get("MixedInstancesPolicy", {}).get("LaunchTemplate", {}).get("Overrides", ())
    named = sorted({override["InstanceType"] for override in overrides if "InstanceType" in override})
    if named:
        return named
    found = data.get("InstanceType") or tags.get(NODE_TEMPLATE_TYPE)
    return [found] if found else []


def capacity_type_of(told: Mapping[str, Any], data: Mapping[str, Any], tags: Mapping[str, str]) -> CapacityType | None:
    """Return the group's purchase option, None for one that mixes them, or of which neither template nor tag tells."""
    policy = told.get("MixedInstancesPolicy")
    if policy is None and not data:
        said = {tags[key].lower().replace("_", "-") for key in NODE_TEMPLATE_CAPACITY_TYPES if key in tags}
        return next((one for one in (CapacityType.SPOT, CapacityType.ON_DEMAND) if said == {one.value}), None)
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


def _others(tags: Mapping[str, str], policies: Sequence[str]) -> list[str]:
    """Who else sets the size of the group, or makes and ends its instances: then nothing is bought from it by us."""
    found = []
    if policies:
        found.append(f"it scales itself by {', '.join(sorted(policies))}: delete that, or name another group")
    if EKS_TAG in tags:
        found.append(
            f"it belongs to the EKS managed node group {tags[EKS_TAG]}, which EKS sizes, repairs and replaces by rules"
            " of its own; make a group of your own for these nodes"
        )
    return found


def _of_shared(policies: Sequence[str]) -> list[str]:
    """What the user has taken on with a group that sizes itself, too."""
    if not policies:
        return []
    said = f"its own policies {', '.join(sorted(policies))} stay, by aws.shared_groups"
    return [f"{said}: see that they leave alone what is bought here, as by protection from scale-in, or delete them"]


def _is_of_no_group(exc: TransientError) -> bool:
    """AWS's words for an instance that is in no group, or not in this one, any more."""
    error = getattr(exc.__cause__, "response", {}).get("Error", {})
    words = str(error.get("Message", "")).lower()
    return error.get("Code") == "ValidationError" and ("not found" in words or "not part of" in words)


def _problems(
    told: Mapping[str, Any], types: Sequence[str], capacity_type: CapacityType | None, most: int | None
) -> list[str]:
    found = []
    if not types:
        found.append(
            f"its instance type cannot be read; allow ec2:DescribeLaunchTemplateVersions or tag it {NODE_TEMPLATE_TYPE}"
        )
    if len(types) > 1:
        found.append(f"it has several instance types ({', '.join(types)}); make a group for each")
    if capacity_type is None and told.get("MixedInstancesPolicy"):
        found.append("it mixes spot and on-demand; make a group for each")
    elif capacity_type is None:
        found.append(
            "whether it buys spot cannot be read; allow ec2:DescribeLaunchTemplateVersions or tag it"
            f" {NODE_TEMPLATE_CAPACITY_TYPES[0]} with {CapacityType.SPOT} or {CapacityType.ON_DEMAND}"
        )
    if told.get("CapacityRebalance"):
        found.append("CapacityRebalance is on, so that AWS and we would both replace an instance; turn it off")
    if most is not None and told["MinSize"] > most:
        found.append(
            f"its MinSize of {told['MinSize']} is above its maximum of aws.group_max_sizes, {most}; lower MinSize"
        )
    if told["MaxSize"] == 0 and most is None:
        found.append("its MaxSize is 0, so that it makes nothing; raise it")
    if any(process["ProcessName"] == "Launch" for process in told.get("SuspendedProcesses", ())):
        found.append("its Launch process is suspended; resume it")
    return found


def _of_launched(told: Mapping[str, Any]) -> list[str]:
    """What stops purchases from a group by LaunchInstances."""
    if not told.get("LaunchConfigurationName"):
        return []
    step = "give it a launch template, or name it in aws.desired_capacity_groups"
    return [f"it uses a launch configuration, from which AWS launches nothing by order; {step}"]


def _of_counted(told: Mapping[str, Any], propagated: set[str]) -> list[str]:
    """What stops purchases from a group that is told a number: AWS could answer with something else, or take others."""
    found = []
    if len(told["AvailabilityZones"]) != 1:
        found.append("it is told a number and has several zones, of which AWS would choose; make a group for each")
    if not told.get("NewInstancesProtectedFromScaleIn"):
        found.append(
            "it is told a number and does not protect new instances from scale-in, so that AWS could end a busy one;"
            " turn the protection on"
        )
    if INSTALLATION not in propagated:
        found.append(f"it is told a number and lacks the tag {INSTALLATION} with our id, propagated at launch; add it")
    return found


def _advice(told: Mapping[str, Any], propagated: set[str]) -> list[str]:
    found = []
    if INSTALLATION not in propagated:
        found.append(f"give it the tag {INSTALLATION} with our installation's id, propagated at launch")
    if any(tag["Key"] == CLUSTER_AUTOSCALER_TAG for tag in told.get("Tags", ())):
        found.append("see that cluster-autoscaler, whose tag it carries, does not run: two would set its size")
    suspended = {process["ProcessName"] for process in told.get("SuspendedProcesses", ())}
    if "AZRebalance" not in suspended and len(told["AvailabilityZones"]) > 1:
        found.append("suspend AZRebalance, or AWS may end a busy node to even out its zones")
    if told["MinSize"] > 0:
        found.append(f"its MinSize is {told['MinSize']}: below that no node is removed; set it to 0")
    return found
