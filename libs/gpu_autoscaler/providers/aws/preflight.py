"""Preflight of an AWS setup: read-only calls and dry-run launches.

EC2 supports dry runs (EC2 API Reference, "RunInstances", `DryRun`); Auto Scaling does not, so missing permissions for
groups show with the first order.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from datetime import datetime
from difflib import get_close_matches
from fnmatch import fnmatchcase

from gpu_autoscaler.model.errors import AutoscalerError
from gpu_autoscaler.model.labels import INSTALLATION
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.providers.aws.advisor import bands_of
from gpu_autoscaler.providers.aws.client import AwsClient
from gpu_autoscaler.providers.aws.fleets import fleet_request, template_reference
from gpu_autoscaler.providers.aws.groups import CLUSTER_AUTOSCALER_TAG, GROUPS_CALL, AwsGroups, Group
from gpu_autoscaler.providers.aws.market import AwsMarket
from gpu_autoscaler.providers.aws.options import AwsOptions, names_by_pool
from gpu_autoscaler.providers.aws.permissions import CALLS, Way, policy_of
from gpu_autoscaler.providers.aws.quotas import quota_of, read_quotas
from gpu_autoscaler.providers.aws.reservations import AwsReservations
from gpu_autoscaler.providers.aws.translate import code_of, is_denied
from gpu_autoscaler.providers.preflight import Finding, error, ok, stale_price_findings, unpriced_findings, warning
from gpu_autoscaler.providers.spot_ceilings import ceiling_findings

FLEET_TYPES = (CapacityType.ON_DEMAND, CapacityType.SPOT)
QUEUE_LONG_COUNT = 1000  # waiting events; a watcher reads ten at a time


def ways_of(options: AwsOptions) -> list[Way]:
    """Return the purchase methods that the settings use."""
    settings: Mapping[Way, object] = {
        "template": options.launch_template,
        "fleets": options.fleets,
        "groups": options.groups or options.desired_capacity_groups,
        "launches": options.groups,
        "desired_capacity": options.desired_capacity_groups,
        "group_max_sizes": options.group_max_sizes,
        "reservations": options.capacity_reservations,
        "placement": options.placement_groups,
        "scores": options.placement_score_count,
        "queue": options.queue_url,
    }
    return ["prices", *(way for way, setting in settings.items() if setting)]


def needed_policy(options: AwsOptions) -> str:
    """Return the IAM policy that the settings need, as JSON."""
    return policy_of(ways_of(options))


class Preflight:
    """Checks everything that the settings name. Read-only."""

    def __init__(self, options: AwsOptions, client: AwsClient, installation: str | None, now: datetime) -> None:
        """`installation`: None if the cluster was not asked for it."""
        self._options = options
        self._client = client
        self._installation = installation
        self._now = now
        self._groups = AwsGroups(client, options, installation or "")
        self._template = str(options.launch_template)

    async def findings(self) -> Sequence[Finding]:
        """Return all findings in the order of the checks. Does not raise for errors of the cloud."""
        findings = [*self._region(), await self._reading_instances()]
        if findings[-1].level == "error":
            return findings  # without credentials or region the other checks would repeat it
        zones: dict[str, str] = {}
        if self._options.launch_template:
            findings += [finding async for finding in self._subnets(zones)]
        findings += [finding async for finding in self._reservations(zones)]
        groups = await self._read_groups(findings)
        offers = await self._offers(
            findings, sorted({*zones, *(zone for group in groups for zone in group.zones)}), groups
        )
        if self._options.launch_template and zones and offers:
            findings.append(await self._dry_run_launch(offers, zones))
            findings.append(await self._dry_run_fleet(offers, zones))
        findings += [finding async for finding in self._quotas(offers)]
        findings += self._advisor()
        findings += [finding async for finding in self._placement_groups()]
        if self._options.queue_url:
            findings.append(await self._queue(self._options.queue_url))
        return findings

    def _region(self) -> Iterator[Finding]:
        known = self._client.known_regions()
        if self._client.region not in known:
            near = get_close_matches(self._client.region, known, n=3)
            step = f"correct aws.region; similar: {', '.join(near)}" if near else "correct aws.region"
            yield warning("aws.region", f"{self._client.region!r} is unknown to the installed boto3", step)

    async def _reading_instances(self) -> Finding:
        filters = [{"Name": f"tag:{INSTALLATION}", "Values": [self._installation or "*"]}]
        try:
            answer = await self._client.call("DescribeInstances", Filters=filters, MaxResults=5)
        except AutoscalerError as exc:
            return self._failed("DescribeInstances", exc)
        count = sum(len(reservation["Instances"]) for reservation in answer["Reservations"])
        whose = "of this installation" if self._installation else "with our tag"
        return ok("credentials", f"accepted in {self._client.region}; {count} instances {whose} on the first page")

    async def _subnets(self, zones: dict[str, str]) -> AsyncIterator[Finding]:
        """Fill `zones` with a subnet each, and report missing subnets."""
        filters = [{"Name": "subnet-id", "Values": list(self._options.subnets)}]
        try:
            listed = await self._client.items("DescribeSubnets", "Subnets", Filters=filters)
        except AutoscalerError as exc:
            yield self._failed("DescribeSubnets", exc)
            return
        subnets = {subnet["SubnetId"]: subnet for subnet in listed}
        for name in self._options.subnets:
            if name not in subnets:
                step = "name subnets of this region, or correct aws.region"
                yield error(f"aws.subnets {name}", f"not found in {self._client.region}", step)
            else:
                zones.setdefault(subnets[name]["AvailabilityZone"], name)
                free_count = subnets[name].get("AvailableIpAddressCount", 0)
                if free_count < 16:
                    step = "use a larger subnet in this zone"
                    yield warning(f"aws.subnets {name}", f"has {free_count} free addresses", step)
        if zones:
            yield ok("zones", ", ".join(sorted(zones)))

    async def _reservations(self, zones: Mapping[str, str]) -> AsyncIterator[Finding]:
        configured_ids = self._options.capacity_reservations
        try:
            known = await AwsReservations(self._client, configured_ids).read(self._now)
        except AutoscalerError as exc:
            yield self._failed("DescribeCapacityReservations", exc)
            return
        reservations = {reservation.reservation_id: reservation for reservation in known}
        for name in configured_ids:
            subject, reservation = f"aws.capacity_reservations {name}", reservations.get(name)
            if reservation is None:
                yield error(subject, f"not found in {self._client.region}", "correct or remove it")
            elif not reservation.is_usable:
                yield warning(subject, f"is {reservation.state}: no launches into it", "remove it")
            elif reservation.zone not in zones:
                step = "add a subnet of that zone to aws.subnets"
                yield error(subject, f"is in {reservation.zone}, which has no subnet", step)
            else:
                message = (
                    f"{reservation.available_count} of {reservation.total_count} {reservation.instance_type} free in"
                    f" {reservation.zone}"
                )
                yield ok(subject, message)

    async def _read_groups(self, findings: list[Finding]) -> Sequence[Group]:
        try:
            groups = await self._groups.read(self._now)
        except AutoscalerError as exc:
            findings.append(self._failed("DescribeAutoScalingGroups", exc))
            return ()
        for group in groups:
            subject = f"aws.groups {group.name}"
            findings += [
                error(subject, problem, "change the group, or use aws.launch_template") for problem in group.problems
            ]
            findings += [warning(subject, "usable", step) for step in group.advice]
            if not group.problems:
                message = f"offers {group.instance_type} as {group.capacity_type} in {', '.join(group.zones)}"
                findings.append(ok(subject, message))
                findings.append(self._groups.max_size_finding(group))
        findings += [finding async for finding in self._adoptable({group.name for group in groups})]
        return groups

    async def _adoptable(self, known: set[str]) -> AsyncIterator[Finding]:
        """Report groups tagged for cluster-autoscaler that could be adopted."""
        filters = [{"Name": "tag-key", "Values": [CLUSTER_AUTOSCALER_TAG]}]
        try:
            groups = await self._client.items(*GROUPS_CALL, Filters=filters)
        except AutoscalerError:
            return  # already reported for the configured groups
        for name in sorted({group["AutoScalingGroupName"] for group in groups} - known):
            step = f"to adopt it, stop cluster-autoscaler and add a pool to aws.groups: <pool>={name}"
            yield warning(f"group {name}", "is tagged for cluster-autoscaler and not in aws.groups", step)

    async def _offers(self, findings: list[Finding], zones: Sequence[str], groups: Sequence[Group]) -> Sequence[Offer]:
        patterns = self._options.instance_types if self._options.launch_template else ()
        types = sorted({group.instance_type for group in groups if group.instance_type})
        if not zones or not (patterns or types):
            return ()
        try:
            offers = await AwsMarket(self._client, self._options).offers((*patterns, *types), zones, self._now)
        except AutoscalerError as exc:
            findings.append(self._failed("DescribeInstanceTypes", exc))
            return ()
        for pattern in patterns:
            if not any(fnmatchcase(offer.instance_type, pattern) for offer in offers):
                message = f"matches no type offered in {', '.join(zones)}"
                findings.append(warning(f"aws.instance_types {pattern}", message, "correct or remove it"))
        findings += ceiling_findings(self._options.spot_ceilings, "aws.spot_ceilings", offers)
        step = f"allow {', '.join(_price_actions())}, or set aws.prices_path"
        findings += unpriced_findings(offers, step)
        findings += stale_price_findings(offers, "aws.prices_path")
        findings.append(ok("offers", f"{len(offers)} of {len({offer.instance_type for offer in offers})} types"))
        return offers

    async def _dry_run_launch(self, offers: Sequence[Offer], zones: Mapping[str, str]) -> Finding:
        offer = next((offer for offer in offers if offer.zone in zones), None)
        if offer is None:
            return warning("RunInstances", "dry run skipped: no offer in a zone with a subnet", "check aws.subnets")
        request = {
            "LaunchTemplate": {**template_reference(self._template), "Version": "$Default"},
            "InstanceType": offer.instance_type,
            "SubnetId": zones[offer.zone],
            "MinCount": 1,
            "MaxCount": 1,
        }
        return await self._dry_run("RunInstances", request, f"{offer.instance_type} in {offer.zone}")

    async def _dry_run_fleet(self, offers: Sequence[Offer], zones: Mapping[str, str]) -> Finding:
        """Dry-run a fleet of two; if fleets are off, report what they would do."""
        if not self._options.fleets:
            step = "true launches them all or none, and needs " + ", ".join(CALLS["CreateFleet"].actions)
            return ok("aws.fleets", f"off: the nodes of a gang are launched one by one; {step}")
        offer = next((offer for offer in offers if offer.zone in zones and offer.capacity_type in FLEET_TYPES), None)
        if offer is None:
            return warning("CreateFleet", "dry run skipped: no offer in a zone with a subnet", "check aws.subnets")
        template = template_reference(self._template)
        request = fleet_request(template, offer, 2, subnet=zones[offer.zone], ceiling=None, placed_in=None)
        return await self._dry_run("CreateFleet", request, f"2 x {offer.instance_type} in {offer.zone}")

    async def _dry_run(self, operation: str, request: Mapping[str, object], what: str) -> Finding:
        tags = [{"Key": INSTALLATION, "Value": self._installation or "doctor"}]
        specification = [{"ResourceType": "instance", "Tags": tags}]
        try:
            await self._client.call(operation, DryRun=True, TagSpecifications=specification, **request)
        except AutoscalerError as exc:
            if code_of(exc) != "DryRunOperation":
                return self._failed(operation, exc)
        return ok(operation, f"dry run succeeded: {what} from {self._template}")

    async def _quotas(self, offers: Sequence[Offer]) -> AsyncIterator[Finding]:
        """Report zero quotas, which are common for GPUs in new accounts."""
        try:
            quotas = await read_quotas(self._client)
        except AutoscalerError as exc:
            step = f"allow {', '.join(CALLS['ListServiceQuotas'].actions)}"
            yield warning("quotas", f"lookup failed: {exc}; exhausted quotas will surface as launch refusals", step)
            return
        for code, quota in quotas.items():
            wanted = {
                offer.instance_type for offer in offers if quota_of(offer.instance_type, offer.capacity_type) == code
            }
            if wanted and quota.vcpus_max == 0:
                step = f"request an increase of {code} in Service Quotas, {self._client.region}"
                yield warning(
                    f"quota {quota.name}", f"is 0: launches of {', '.join(sorted(wanted)[:4])} will be refused", step
                )
            elif wanted:
                yield ok(f"quota {quota.name}", f"{quota.vcpus_max} vCPUs")

    async def _placement_groups(self) -> AsyncIterator[Finding]:
        """Report for each placement group whether it exists, and its effect on a pool."""
        group_by_pool = names_by_pool(self._options.placement_groups)
        if not group_by_pool:
            return
        names = sorted(set(group_by_pool.values()))
        filters = [{"Name": "group-name", "Values": names}]
        try:
            answer = await self._client.call("DescribePlacementGroups", Filters=filters)
        except AutoscalerError as exc:
            yield self._failed("DescribePlacementGroups", exc)
            return
        known = {described["GroupName"]: described for described in answer["PlacementGroups"]}
        for name in names:
            subject, strategy = f"aws.placement_groups {name}", known.get(name, {}).get("Strategy")
            pools = ", ".join(sorted(pool for pool, group in group_by_pool.items() if group == name))
            if strategy is None:
                yield error(subject, f"not found in {self._client.region}", "create it, or remove it from the settings")
            elif strategy == "cluster":
                step = f"restrict pool {pools} to one zone in the policy: a cluster placement group is in one zone"
                yield warning(subject, "has strategy cluster", step)
            else:
                yield ok(subject, f"has strategy {strategy}, for pool {pools}")

    def _advisor(self) -> Iterator[Finding]:
        bands = bands_of(self._options.spot_advisor_path, self._client.region)
        if bands.dated_at is not None:
            message = f"dated {bands.dated_at:%Y-%m-%d}, with {len(bands.ratios)} types"
            step = "download it again: data of this age is ignored"
            is_current = bands.is_current(self._now)
            yield (
                ok("aws.spot_advisor_path", message) if is_current else warning("aws.spot_advisor_path", message, step)
            )

    async def _queue(self, queue_url: str) -> Finding:
        try:
            answer = await self._client.call("GetQueueAttributes", QueueUrl=queue_url, AttributeNames=["All"])
        except AutoscalerError as exc:
            if code_of(exc).endswith(("NonExistentQueue", "QueueDoesNotExist")):
                step = "correct it, or create the queue in this region as a target of EventBridge rules"
                return error("aws.queue_url", f"queue {queue_url} not found", step)
            return self._failed("GetQueueAttributes", exc)
        waiting_count = int(answer["Attributes"].get("ApproximateNumberOfMessages", 0))
        if waiting_count >= QUEUE_LONG_COUNT:
            return warning(
                "aws.queue_url", f"{waiting_count} events waiting", "check that spot-watcher runs and may read it"
            )
        return ok("aws.queue_url", f"readable; {waiting_count} events waiting")

    def _failed(self, operation: str, exc: AutoscalerError) -> Finding:
        permission = CALLS[operation]
        if is_denied(exc):
            step = f"allow {', '.join(permission.actions)}; `gpu-autoscaler doctor --policy` prints the whole policy"
            return error(operation, f"not allowed: {permission.without}", step)
        return error(operation, str(exc), "check aws.region, the cloud's address and the credentials")


def _price_actions() -> list[str]:
    return [
        action for call in CALLS.values() if call.way == "prices" for action in call.actions if "List" not in action
    ]
