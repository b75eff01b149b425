"""Looks at an AWS set-up as a doctor would, without buying: calls that read, and a launch that is only tried.

EC2 tries a launch without making it (EC2 API Reference, "RunInstances", `DryRun`). Nothing of Auto Scaling can be
tried, so those rights show with the first order.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from datetime import datetime
from difflib import get_close_matches
from fnmatch import fnmatchcase

from gpu_autoscaler.model.errors import AutoscalerError
from gpu_autoscaler.model.labels import INSTALLATION
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.providers.aws.advisor import bands_of
from gpu_autoscaler.providers.aws.calls import AwsClient
from gpu_autoscaler.providers.aws.fleets import fleet_request
from gpu_autoscaler.providers.aws.groups import CLUSTER_AUTOSCALER_TAG, AwsGroups, Group
from gpu_autoscaler.providers.aws.market import AwsMarket
from gpu_autoscaler.providers.aws.options import OWNER, AwsOptions, names_by_pool
from gpu_autoscaler.providers.aws.permissions import CALLS, Way, policy_of
from gpu_autoscaler.providers.aws.quotas import quota_of, read_quotas
from gpu_autoscaler.providers.aws.reservations import AwsReservations
from gpu_autoscaler.providers.ceilings import SpotCeilings, ceiling_findings
from gpu_autoscaler.providers.files import modified_at, read_prices
from gpu_autoscaler.providers.findings import Finding, warning, error, ok, stale_price_findings

FLEET_TYPES = (CapacityType.ON_DEMAND, CapacityType.SPOT)
QUEUE_LONG_COUNT = 1000  # events that wait, while a watcher reads ten at a time
_DENIED = frozenset({"UnauthorizedOperation", "AccessDenied", "AccessDeniedException"})


def ways_of(options: AwsOptions) -> list[Way]:
    """Return the ways of buying that these settings ask for."""
    ways: list[Way] = ["prices"]
    if options.launch_template:
        ways.append("template")
    if options.fleets:
        ways.append("fleets")
    if options.groups or options.desired_capacity_groups:
        ways.append("groups")
    if options.groups:
        ways.append("launches")
    if options.desired_capacity_groups:
        ways.append("counted")
    if options.group_max_sizes:
        ways.append("maxima")
    if options.capacity_reservations:
        ways.append("reservations")
    if options.placement_groups:
        ways.append("placement")
    if options.placement_score_count is not None:
        ways.append("scores")
    if options.queue_url:
        ways.append("queue")
    return ways


def needed_policy(options: AwsOptions) -> str:
    """Return the IAM policy that these settings need, as JSON."""
    return policy_of(ways_of(options))


class Preflight:
    """One look at everything that the settings name. Buys nothing, changes nothing."""

    def __init__(self, options: AwsOptions, calls: AwsClient, installation: str | None, now: datetime) -> None:
        """`installation` is None where the cluster was not asked for it."""
        self._options = options
        self._calls = calls
        self._installation = installation
        self._now = now
        self._groups = AwsGroups(calls, options, installation or "")

    async def findings(self) -> Sequence[Finding]:
        """Return all that was found, in the order of looking. Does not raise for what is wrong outside."""
        found = [*self._region(), await self._reading_instances()]
        if found[-1].level == "error":
            return found  # without credentials, or in no region, the rest would say the same once more
        zones: dict[str, str] = {}
        if self._options.launch_template:
            found += [finding async for finding in self._subnets(zones)]
        found += [finding async for finding in self._reservations(zones)]
        groups = await self._read_groups(found)
        offers = await self._offers(
            found, sorted({*zones, *(zone for group in groups for zone in group.zones)}), groups
        )
        if self._options.launch_template and zones and offers:
            found.append(await self._trial(offers, zones))
            found.append(await self._fleet_trial(offers, zones))
        found += [finding async for finding in self._quotas(offers)]
        found += self._advisor()
        found += [finding async for finding in self._placement_groups()]
        if self._options.queue_url:
            found.append(await self._queue(self._options.queue_url))
        return found

    def _region(self) -> Iterator[Finding]:
        known = self._calls.known_regions()
        if self._calls.region not in known:
            near = get_close_matches(self._calls.region, known, n=3)
            step = f"correct aws.region; near it are {', '.join(near)}" if near else "correct aws.region"
            yield warning("aws.region", f"{self._calls.region!r} is no region that the installed boto3 knows", step)

    async def _reading_instances(self) -> Finding:
        filters = [{"Name": f"tag:{INSTALLATION}", "Values": [self._installation or "*"]}]
        try:
            answer = await self._calls.call("DescribeInstances", Filters=filters, MaxResults=5)
        except AutoscalerError as exc:
            return self._failed("DescribeInstances", exc)
        count = sum(len(reservation["Instances"]) for reservation in answer["Reservations"])
        whose = "of this installation" if self._installation else "with our tag"
        return ok("credentials", f"accepted in {self._calls.region}; instances {whose} on the first page: {count}")

    async def _subnets(self, zones: dict[str, str]) -> AsyncIterator[Finding]:
        """Fill `zones` with a subnet each, and say what is missing."""
        wanted = [{"Name": "subnet-id", "Values": list(self._options.subnets)}]
        try:
            pages = [page async for page in self._calls.pages("DescribeSubnets", Filters=wanted)]
        except AutoscalerError as exc:
            yield self._failed("DescribeSubnets", exc)
            return
        told = {subnet["SubnetId"]: subnet for page in pages for subnet in page["Subnets"]}
        for name in self._options.subnets:
            if name not in told:
                step = "name subnets of this region, or set aws.region to theirs"
                yield error(f"aws.subnets {name}", f"is not in {self._calls.region}", step)
            else:
                zones.setdefault(told[name]["AvailabilityZone"], name)
                free_count = told[name].get("AvailableIpAddressCount", 0)
                if free_count < 16:
                    step = "give the zone a larger subnet"
                    yield warning(f"aws.subnets {name}", f"has {free_count} free addresses", step)
        if zones:
            yield ok("zones", ", ".join(sorted(zones)))

    async def _reservations(self, zones: Mapping[str, str]) -> AsyncIterator[Finding]:
        """Say of each reservation of the settings whether it can be used."""
        wanted = self._options.capacity_reservations
        try:
            told = {one.reservation_id: one for one in await AwsReservations(self._calls, wanted).read(self._now)}
        except AutoscalerError as exc:
            yield self._failed("DescribeCapacityReservations", exc)
            return
        for name in wanted:
            subject, one = f"aws.capacity_reservations {name}", told.get(name)
            if one is None:
                yield error(subject, f"is not in {self._calls.region}", "correct it, or leave it out")
            elif not one.is_standing:
                yield warning(subject, f"is {one.state}: nothing can be launched into it", "leave it out")
            elif one.zone not in zones:
                yield error(subject, f"is in {one.zone}, without a subnet", "add a subnet of that zone to aws.subnets")
            else:
                said = f"{one.available_count} of {one.total_count} {one.instance_type} in {one.zone} are free"
                yield ok(subject, said)

    async def _read_groups(self, found: list[Finding]) -> Sequence[Group]:
        try:
            groups = await self._groups.read(self._now)
        except AutoscalerError as exc:
            found.append(self._failed("DescribeAutoScalingGroups", exc))
            return ()
        for group in groups:
            subject = f"aws.groups {group.name}"
            found += [
                error(subject, problem, "change the group, or buy by aws.launch_template") for problem in group.problems
            ]
            found += [warning(subject, "", step) for step in group.advice]
            if not group.problems:
                said = f"sells {group.instance_type} as {group.capacity_type} in {', '.join(group.zones)}"
                found.append(ok(subject, said))
                found.append(self._groups.finding_of_maximum(group))
        found += [finding async for finding in self._adoptable({group.name for group in groups})]
        return groups

    async def _adoptable(self, known: set[str]) -> AsyncIterator[Finding]:
        """Say which groups cluster-autoscaler was given, and could be ours by choice."""
        wanted = [{"Name": "tag-key", "Values": [CLUSTER_AUTOSCALER_TAG]}]
        try:
            pages = [page async for page in self._calls.pages("DescribeAutoScalingGroups", Filters=wanted)]
        except AutoscalerError:
            return  # said above, of the groups of the settings
        for name in sorted(
            {group["AutoScalingGroupName"] for page in pages for group in page["AutoScalingGroups"]} - known
        ):
            step = f"to adopt it, stop cluster-autoscaler and add a pool to aws.groups: <pool>={name}"
            yield warning(f"group {name}", "carries cluster-autoscaler's tag, and is none of ours", step)

    async def _offers(self, found: list[Finding], zones: Sequence[str], groups: Sequence[Group]) -> Sequence[Offer]:
        patterns = self._options.instance_types if self._options.launch_template else ()
        types = sorted({group.instance_type for group in groups if group.instance_type})
        if not zones or not (patterns or types):
            return ()
        try:
            market = AwsMarket(
                self._calls,
                read_prices(OWNER, self._options.prices_path),
                modified_at(self._options.prices_path),
                ceilings=SpotCeilings(self._options.spot_ceilings),
            )
            offers = await market.offers((*patterns, *types), zones, self._now)
        except AutoscalerError as exc:
            found.append(self._failed("DescribeInstanceTypes", exc))
            return ()
        for pattern in patterns:
            if not any(fnmatchcase(offer.instance_type, pattern) for offer in offers):
                said = f"names no type that is sold in {', '.join(zones)}"
                found.append(warning(f"aws.instance_types {pattern}", said, "correct it, or leave it out"))
        found += ceiling_findings(self._options.spot_ceilings, "aws.spot_ceilings", offers)
        unpriced = sorted(
            {
                f"{offer.instance_type} {offer.capacity_type}"
                for offer in offers
                if offer.price_micro_usd_per_hour is None
            }
        )
        if unpriced:
            said = f"unknown for {', '.join(unpriced[:5])}{' ...' if len(unpriced) > 5 else ''}: these are not bought"
            found.append(warning("prices", said, f"allow {', '.join(_price_actions())}, or set aws.prices_path"))
        found += stale_price_findings(offers, "aws.prices_path")
        found.append(ok("offers", f"{len(offers)}, of {len({offer.instance_type for offer in offers})} types"))
        return offers

    async def _trial(self, offers: Sequence[Offer], zones: Mapping[str, str]) -> Finding:
        """Try a launch of the first offer without making it."""
        offer = next((offer for offer in offers if offer.zone in zones), None)
        if offer is None:
            return warning("RunInstances", "not tried: no offer in a zone with a subnet", "see aws.subnets")
        template = str(self._options.launch_template)
        by = "LaunchTemplateId" if template.startswith("lt-") else "LaunchTemplateName"
        tags = [{"Key": INSTALLATION, "Value": self._installation or "doctor"}]
        try:
            await self._calls.call(
                "RunInstances",
                DryRun=True,
                LaunchTemplate={by: template, "Version": "$Default"},
                InstanceType=offer.instance_type,
                SubnetId=zones[offer.zone],
                MinCount=1,
                MaxCount=1,
                TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
            )
        except AutoscalerError as exc:
            if _code_of(exc) == "DryRunOperation":
                return ok("RunInstances", f"would have made {offer.instance_type} in {offer.zone} from {template}")
            return self._failed("RunInstances", exc)
        return ok("RunInstances", f"would have made {offer.instance_type} in {offer.zone} from {template}")

    async def _fleet_trial(self, offers: Sequence[Offer], zones: Mapping[str, str]) -> Finding:
        """Try a fleet of two without making it; where fleets are off, say what they would bring."""
        if not self._options.fleets:
            brings = "true has them all or none, and needs " + ", ".join(CALLS["CreateFleet"].actions)
            return ok("aws.fleets", f"is off: a gang's nodes are launched one by one; {brings}")
        offer = next((offer for offer in offers if offer.zone in zones and offer.capacity_type in FLEET_TYPES), None)
        if offer is None:
            return warning("CreateFleet", "not tried: no offer in a zone with a subnet", "see aws.subnets")
        template = str(self._options.launch_template)
        by = "LaunchTemplateId" if template.startswith("lt-") else "LaunchTemplateName"
        request = fleet_request({by: template}, offer, 2, subnet=zones[offer.zone], ceiling=None, placed_in=None)
        tags = [{"Key": INSTALLATION, "Value": self._installation or "doctor"}]
        specification = [{"ResourceType": "instance", "Tags": tags}]
        try:
            await self._calls.call("CreateFleet", DryRun=True, TagSpecifications=specification, **request)
        except AutoscalerError as exc:
            if _code_of(exc) != "DryRunOperation":
                return self._failed("CreateFleet", exc)
        return ok("CreateFleet", f"would have made two {offer.instance_type} in {offer.zone} at once from {template}")

    async def _quotas(self, offers: Sequence[Offer]) -> AsyncIterator[Finding]:
        """Say which quotas are zero, which for GPUs they often are at first."""
        try:
            quotas = await read_quotas(self._calls)
        except AutoscalerError as exc:
            yield warning("quotas", f"not read: {exc}", f"allow {', '.join(CALLS['ListServiceQuotas'].actions)}")
            return
        for code, quota in quotas.items():
            wanted = {
                offer.instance_type for offer in offers if quota_of(offer.instance_type, offer.capacity_type) == code
            }
            if wanted and quota.vcpus_max == 0:
                step = f"request an increase of {code} in Service Quotas, {self._calls.region}"
                yield warning(f"quota {quota.name}", f"is 0: {', '.join(sorted(wanted)[:4])} will be refused", step)
            elif wanted:
                yield ok(f"quota {quota.name}", f"{quota.vcpus_max} vCPUs at once")

    async def _placement_groups(self) -> AsyncIterator[Finding]:
        """Say of each placement group whether it is there, and what it does to a pool."""
        wanted = names_by_pool(self._options.placement_groups)
        if not wanted:
            return
        names = sorted(set(wanted.values()))
        filters = [{"Name": "group-name", "Values": names}]
        try:
            answer = await self._calls.call("DescribePlacementGroups", Filters=filters)
        except AutoscalerError as exc:
            yield self._failed("DescribePlacementGroups", exc)
            return
        told = {placement_group["GroupName"]: placement_group for placement_group in answer["PlacementGroups"]}
        for name in names:
            subject, strategy = f"aws.placement_groups {name}", told.get(name, {}).get("Strategy")
            pools = ", ".join(sorted(pool for pool, group in wanted.items() if group == name))
            if strategy is None:
                yield error(subject, f"is not in {self._calls.region}", "make it, or leave it out")
            elif strategy == "cluster":
                step = f"give pool {pools} one zone in the policy: all of the group stand in one"
                yield warning(subject, "keeps its instances close together", step)
            else:
                yield ok(subject, f"is of strategy {strategy}, for pool {pools}")

    def _advisor(self) -> Iterator[Finding]:
        bands = bands_of(self._options.spot_advisor_path, self._calls.region)
        if bands.dated_at is not None:
            said = f"is of {bands.dated_at:%Y-%m-%d}, and tells of {len(bands.ratios)} types"
            step = "fetch it anew: bands this old are not used"
            is_of_use = bands.is_of_use(self._now)
            yield ok("aws.spot_advisor_path", said) if is_of_use else warning("aws.spot_advisor_path", said, step)

    async def _queue(self, queue_url: str) -> Finding:
        try:
            answer = await self._calls.call("GetQueueAttributes", QueueUrl=queue_url, AttributeNames=["All"])
        except AutoscalerError as exc:
            if _code_of(exc).endswith(("NonExistentQueue", "QueueDoesNotExist")):
                step = "correct it, or make the queue in this region and let EventBridge's rules write to it"
                return error("aws.queue_url", f"there is no queue {queue_url}", step)
            return self._failed("GetQueueAttributes", exc)
        waiting_count = int(answer["Attributes"].get("ApproximateNumberOfMessages", 0))
        if waiting_count >= QUEUE_LONG_COUNT:
            return warning("aws.queue_url", f"{waiting_count} events wait", "see that spot-watcher runs and may read it")
        return ok("aws.queue_url", f"can be read; {waiting_count} events wait")

    def _failed(self, operation: str, exc: AutoscalerError) -> Finding:
        allowed = CALLS[operation]
        if _code_of(exc) in _DENIED:
            step = f"allow {', '.join(allowed.actions)}; `gpu-autoscaler doctor --policy` prints the whole policy"
            return error(operation, f"is not allowed: {allowed.without}", step)
        return error(operation, str(exc), "see aws.region, the address of the cloud, and the credentials")


def _price_actions() -> list[str]:
    return [
        action for call in CALLS.values() if call.way == "prices" for action in call.actions if "List" not in action
    ]


def _code_of(exc: AutoscalerError) -> str:
    return str(getattr(exc.__cause__, "response", {}).get("Error", {}).get("Code", ""))
