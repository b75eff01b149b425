"""Looks at an AWS set-up as a doctor would, without buying: calls that read, and a launch that is only tried.

EC2 tries a launch without making it (EC2 API Reference, "RunInstances", `DryRun`). Nothing of Auto Scaling can be
tried, so those rights show with the first order.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from gpu_autoscaler.model.errors import AutoscalerError
from gpu_autoscaler.model.labels import INSTALLATION
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.providers.aws.calls import AwsCalls
from gpu_autoscaler.providers.aws.groups import AwsGroups, Group
from gpu_autoscaler.providers.aws.market import AwsMarket
from gpu_autoscaler.providers.aws.options import AwsOptions, names_by_pool, prices_of
from gpu_autoscaler.providers.aws.permissions import CALLS, Way, policy_of
from gpu_autoscaler.providers.findings import Finding, advice, fault, fine

# Service Quotas of EC2, in vCPUs: code -> families and purchase option (Service Quotas console, "Amazon EC2"; EC2 User
# Guide, "Amazon EC2 service quotas"; read 2026-11-21).
GPU_QUOTAS: Mapping[str, tuple[tuple[str, ...], CapacityType]] = {
    "L-DB2E81BA": (("g*",), CapacityType.ON_DEMAND),
    "L-3819A6DF": (("g*",), CapacityType.SPOT),
    "L-417A185B": (("p*",), CapacityType.ON_DEMAND),
    "L-7212CCBC": (("p2.*", "p3.*", "p4*"), CapacityType.SPOT),
    "L-C4BD4855": (("p5*",), CapacityType.SPOT),
}
_DENIED = frozenset({"UnauthorizedOperation", "AccessDenied", "AccessDeniedException"})


def ways_of(options: AwsOptions) -> list[Way]:
    """Return the ways of buying that these settings ask for."""
    ways: list[Way] = ["prices"]
    if options.launch_template:
        ways.append("template")
    if options.groups:
        ways.append("groups")
    return ways


def needed_policy(options: AwsOptions) -> str:
    """Return the IAM policy that these settings need, as JSON."""
    return policy_of(ways_of(options))


class Examination:
    """One look at everything that the settings name. Buys nothing, changes nothing."""

    def __init__(self, options: AwsOptions, calls: AwsCalls, installation: str | None, now: datetime) -> None:
        """`installation` is None where the cluster was not asked for it."""
        self._options = options
        self._calls = calls
        self._installation = installation
        self._now = now
        self._groups = AwsGroups(calls, names_by_pool(options.groups))

    async def findings(self) -> Sequence[Finding]:
        """Return all that was found, in the order of looking. Does not raise for what is wrong outside."""
        found = [await self._reading_instances()]
        if found[0].level == "fault":
            return found  # without credentials, or in no region, the rest would say the same once more
        zones: dict[str, str] = {}
        if self._options.launch_template:
            found += [finding async for finding in self._subnets(zones)]
        groups = await self._read_groups(found)
        offers = await self._offers(
            found, sorted({*zones, *(zone for group in groups for zone in group.zones)}), groups
        )
        if self._options.launch_template and zones and offers:
            found.append(await self._trial(offers, zones))
        found += [finding async for finding in self._quotas(offers)]
        return found

    async def _reading_instances(self) -> Finding:
        filters = [{"Name": f"tag:{INSTALLATION}", "Values": [self._installation or "*"]}]
        try:
            answer = await self._calls.call("DescribeInstances", Filters=filters, MaxResults=5)
        except AutoscalerError as exc:
            return self._failed("DescribeInstances", exc)
        count = sum(len(one["Instances"]) for one in answer["Reservations"])
        whose = "of this installation" if self._installation else "with our tag"
        return fine("credentials", f"accepted in {self._calls.region}; instances {whose} on the first page: {count}")

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
                yield fault(f"aws.subnets {name}", f"is not in {self._calls.region}", step)
            else:
                zones.setdefault(told[name]["AvailabilityZone"], name)
                free_count = told[name].get("AvailableIpAddressCount", 0)
                if free_count < 16:
                    step = "give the zone a larger subnet"
                    yield advice(f"aws.subnets {name}", f"has {free_count} free addresses", step)
        if zones:
            yield fine("zones", ", ".join(sorted(zones)))

    async def _read_groups(self, found: list[Finding]) -> Sequence[Group]:
        try:
            groups = await self._groups.read(self._now)
        except AutoscalerError as exc:
            found.append(self._failed("DescribeAutoScalingGroups", exc))
            return ()
        for group in groups:
            subject = f"aws.groups {group.name}"
            found += [
                fault(subject, problem, "change the group, or buy by aws.launch_template") for problem in group.problems
            ]
            found += [advice(subject, "", step) for step in group.advice]
            if not group.problems:
                said = f"sells {group.instance_type} as {group.capacity_type} in {', '.join(group.zones)}"
                found.append(fine(subject, said))
        return groups

    async def _offers(self, found: list[Finding], zones: Sequence[str], groups: Sequence[Group]) -> Sequence[Offer]:
        patterns = self._options.instance_types if self._options.launch_template else ()
        types = sorted({group.instance_type for group in groups if group.instance_type})
        if not zones or not (patterns or types):
            return ()
        try:
            market = AwsMarket(self._calls, prices_of(self._options.prices_path))
            offers = await market.offers((*patterns, *types), zones, self._now)
        except AutoscalerError as exc:
            found.append(self._failed("DescribeInstanceTypes", exc))
            return ()
        for pattern in patterns:
            if not any(fnmatchcase(offer.instance_type, pattern) for offer in offers):
                said = f"names no type that is sold in {', '.join(zones)}"
                found.append(advice(f"aws.instance_types {pattern}", said, "correct it, or leave it out"))
        unpriced = sorted(
            {f"{one.instance_type} {one.capacity_type}" for one in offers if one.price_micro_usd_per_hour is None}
        )
        if unpriced:
            said = f"unknown for {', '.join(unpriced[:5])}{' ...' if len(unpriced) > 5 else ''}: these are not bought"
            found.append(advice("prices", said, f"allow {', '.join(_price_actions())}, or set aws.prices_path"))
        found.append(fine("offers", f"{len(offers)}, of {len({offer.instance_type for offer in offers})} types"))
        return offers

    async def _trial(self, offers: Sequence[Offer], zones: Mapping[str, str]) -> Finding:
        """Try a launch of the first offer without making it."""
        offer = next((one for one in offers if one.zone in zones), None)
        if offer is None:
            return advice("RunInstances", "not tried: no offer in a zone with a subnet", "see aws.subnets")
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
                return fine("RunInstances", f"would have made {offer.instance_type} in {offer.zone} from {template}")
            return self._failed("RunInstances", exc)
        return fine("RunInstances", f"would have made {offer.instance_type} in {offer.zone} from {template}")

    async def _quotas(self, offers: Sequence[Offer]) -> AsyncIterator[Finding]:
        """Say which quotas are zero, which for GPUs they often are at first."""
        try:
            pages = [page async for page in self._calls.pages("ListServiceQuotas", ServiceCode="ec2", MaxResults=100)]
        except AutoscalerError as exc:
            yield advice("quotas", f"not read: {exc}", f"allow {', '.join(CALLS['ListServiceQuotas'].actions)}")
            return
        told: dict[str, Mapping[str, Any]] = {one["QuotaCode"]: one for page in pages for one in page["Quotas"]}
        for code, (patterns, capacity_type) in GPU_QUOTAS.items():
            wanted = {
                offer.instance_type
                for offer in offers
                if offer.capacity_type is capacity_type
                and any(fnmatchcase(offer.instance_type, one) for one in patterns)
            }
            if not wanted or code not in told:
                continue
            vcpus_count, name = int(told[code]["Value"]), told[code]["QuotaName"]
            if vcpus_count == 0:
                step = f"request an increase of {code} in Service Quotas, {self._calls.region}"
                yield advice(f"quota {name}", f"is 0: {', '.join(sorted(wanted)[:4])} will be refused", step)
            else:
                yield fine(f"quota {name}", f"{vcpus_count} vCPUs at once")

    def _failed(self, operation: str, exc: AutoscalerError) -> Finding:
        allowed = CALLS[operation]
        if _code_of(exc) in _DENIED:
            step = f"allow {', '.join(allowed.actions)}; `gpu-autoscaler doctor --policy` prints the whole policy"
            return fault(operation, f"is not allowed: {allowed.without}", step)
        return fault(operation, str(exc), "see aws.region, the address of the cloud, and the credentials")


def _price_actions() -> list[str]:
    return [action for one in CALLS.values() if one.way == "prices" for action in one.actions if "List" not in action]


def _code_of(exc: AutoscalerError) -> str:
    return str(getattr(exc.__cause__, "response", {}).get("Error", {}).get("Code", ""))
