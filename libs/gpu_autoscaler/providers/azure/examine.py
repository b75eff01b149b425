"""Looks at an Azure set-up as a doctor would, without buying: calls that read, and no other.

Azure tries no purchase, but tells callers what they may do; `--policy` prints what it takes.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from gpu_autoscaler.model.errors import AutoscalerError
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.providers.azure.calls import AzureClient
from gpu_autoscaler.providers.azure.market import QUOTA_OF, AzureMarket, Quota
from gpu_autoscaler.providers.azure.options import AzureOptions
from gpu_autoscaler.providers.azure.permissions import CALLS, Way, is_allowed, role_of
from gpu_autoscaler.providers.azure.scale_sets import ScaleSet, ScaleSets
from gpu_autoscaler.providers.azure.translate import INSTALLATION_TAG, Denied, read_tags
from gpu_autoscaler.providers.ceilings import ceiling_findings
from gpu_autoscaler.providers.findings import Finding, warning, clock_findings, error, ok, stale_price_findings

ELSEWHERE = ("Microsoft.Network/", "Microsoft.ManagedIdentity/")  # what may well be of another resource group


def needed_role(options: AzureOptions) -> str:
    """Return the custom role that these settings need, as JSON."""
    return role_of(ways_of(options), f"the resource group {options.resource_group}", str(options.subscription))


def ways_of(options: AzureOptions) -> list[Way]:
    """Return the ways of buying that these settings ask for."""
    ways: list[Way] = ["prices"]
    if options.scale_set:
        ways.append("machines")
    if options.scale_sets:
        ways.append("groups")
    return ways


class Preflight:
    """One look at everything that the settings name. Buys nothing, changes nothing."""

    def __init__(
        self,
        options: AzureOptions,
        calls: AzureClient,
        market: AzureMarket,
        sets: ScaleSets,
        *,
        installation: str,
        machine: Mapping[str, Any] | None,
    ) -> None:
        """`installation` is `*` where the cluster was not asked for it; `machine` is the file's."""
        self._machine = machine
        self._options = options
        self._calls = calls
        self._market = market
        self._sets = sets
        self._installation = installation

    async def findings(self, now: datetime) -> Sequence[Finding]:
        """Return all that was found, in the order of looking. Does not raise for what is wrong outside."""
        found = [await self._reading_machines()]
        found += clock_findings(self._calls.cloud_ahead, "Azure's")
        if found[0].level == "error":
            return found  # without credentials, or in no such group, the rest would say the same once more
        found += [finding async for finding in self._rights()]
        found += [finding async for finding in self._image()]
        try:
            sets = await self._sets.read(now)
        except AutoscalerError as exc:
            return [*found, self._failed("VirtualMachineScaleSets_Get", exc)]
        for one in sets:
            found += self._of_set(one)
        zones = sorted({zone for one in sets if not one.problems for zone in one.zones})
        patterns = [*self._options.instance_types] if self._options.scale_set else []
        patterns += [one.instance_type for one in sets if one.instance_type]
        if zones and patterns:
            found += await self._offers(patterns, zones, now)
        return found

    async def _reading_machines(self) -> Finding:
        count = 0
        try:
            async for told in self._calls.pages("VirtualMachines_List"):
                owner = read_tags(told).get(INSTALLATION_TAG)
                count += owner is not None and self._installation in ("*", owner)
        except AutoscalerError as exc:
            return self._failed("VirtualMachines_List", exc)
        whose = "with our tag" if self._installation == "*" else "of this installation"
        return ok("credentials", f"accepted for {self._calls.group_id}; machines {whose}: {count}")

    async def _rights(self) -> AsyncIterator[Finding]:
        """Say which rights to buy and remove are missing; Azure tells whoever asks of their own."""
        try:
            granted = [one async for one in self._calls.pages("Permissions_ListForResourceGroup")]
        except AutoscalerError as exc:
            step = f"allow {', '.join(CALLS['Permissions_ListForResourceGroup'].actions)}"
            yield warning("permissions", f"not told: {exc}", step)
            return
        ways = {*ways_of(self._options), "always"}
        changing = [call for call in CALLS.values() if call.budget != "reads" and call.way in ways]
        missing_count = 0
        for one in changing:
            lacking = [action for action in one.actions if not is_allowed(action, granted)]
            missing_count += len(lacking)
            own = [action for action in lacking if not action.startswith(ELSEWHERE)]
            if own:
                step = f"allow {', '.join(own)}; `gpu-autoscaler doctor --policy` prints the whole role"
                yield error(one.operation, f"will be refused: {one.without}", step)
            elif lacking:
                said = (
                    "is not wholly allowed on the resource group, which is right where subnet and identity are others'"
                )
                yield warning(one.operation, said, f"allow {', '.join(lacking)} on the subnet, and on the identity")
        if missing_count == 0:
            yield ok("permissions", f"all that {', '.join(one.operation for one in changing)} need")

    async def _image(self) -> AsyncIterator[Finding]:
        """Say whether the image of the file is sold in the region; one of one's own is not looked for."""
        image = ((self._machine or {}).get("storageProfile") or {}).get("imageReference") or {}
        parts = [image.get(name) for name in ("publisher", "offer", "sku")]
        if not all(parts):
            return
        publisher, offer, sku = parts
        subject, version = f"image {publisher}/{offer}/{sku}", image.get("version", "latest")
        try:
            path = f"{publisher}/artifacttypes/vmimage/offers/{offer}/skus/{sku}"
            told: Any = await self._calls.find("VirtualMachineImages_List", name=path)
        except AutoscalerError as exc:
            step = f"allow {', '.join(CALLS['VirtualMachineImages_List'].actions)}"
            yield warning(subject, f"not looked for: {exc}", step)
            return
        versions = [one["name"] for one in told or ()]
        if not versions or version not in ("latest", *versions):
            said = f"version {version} is not sold in {self._calls.region}: nothing is bought one by one"
            yield error(subject, said, "correct storageProfile.imageReference in the file of azure.machine_path")
        else:
            yield ok(subject, f"is sold in {self._calls.region}, {len(versions)} versions")

    @staticmethod
    def _of_set(one: ScaleSet) -> list[Finding]:
        subject = f"azure scale set {one.name}"
        if one.problems:
            return [error(subject, problem, "change the scale set, or name another") for problem in one.problems]
        sold = "" if one.instance_type is None else f"{one.instance_type} as {one.capacity_type} "
        return [
            ok(subject, f"sells {sold}in {', '.join(one.zones)}"),
            *(warning(subject, "", step) for step in one.advice),
        ]

    async def _offers(self, patterns: Sequence[str], zones: Sequence[str], now: datetime) -> list[Finding]:
        try:
            kinds = await self._market.kinds(patterns, now)
            quotas = await self._market.quotas()
            offers = await self._market.offers(patterns, zones, now)
        except AutoscalerError as exc:
            return [self._failed("ResourceSkus_List", exc)]
        found = [
            warning(
                f"azure.instance_types {pattern}",
                f"names no GPU size that is sold in {self._calls.region}",
                "correct it",
            )
            for pattern in patterns
            if not any(fnmatchcase(name, pattern) for name in kinds)
        ]
        families = sorted({kind.family for kind in kinds.values()})
        found += [_of_quota(name, quotas.get(name.lower())) for name in (*QUOTA_OF.values(), *families)]
        found += ceiling_findings(self._options.spot_ceilings, "azure.spot_ceilings", offers)
        unpriced = sorted(
            {
                f"{offer.instance_type} {offer.capacity_type}"
                for offer in offers
                if offer.price_micro_usd_per_hour is None
            }
        )
        if unpriced:
            said = f"unknown for {', '.join(unpriced[:5])}{' ...' if len(unpriced) > 5 else ''}: these are not bought"
            found.append(warning("prices", said, "let this machine reach prices.azure.com, or set azure.prices_path"))
        return [*found, *stale_price_findings(offers, "azure.prices_path"), _said_of(offers)]

    def _failed(self, operation: str, exc: AutoscalerError) -> Finding:
        if isinstance(exc, Denied):
            allowed = CALLS[operation]
            step = f"allow {', '.join(allowed.actions)}; `gpu-autoscaler doctor --policy` prints the whole role"
            return error(operation, f"is not allowed: {allowed.without}", step)
        return error(operation, str(exc), "see azure.subscription, azure.resource_group, and the credentials")


def _of_quota(name: str, quota: Quota | None) -> Finding:
    subject = f"quota {name}"
    if quota is None:
        return warning(subject, "is not told", f"allow {', '.join(CALLS['Usage_List'].actions)}")
    if quota.limit == 0:
        return warning(subject, "is 0: what counts towards it is not for sale", "request an increase in the portal")
    return ok(subject, f"{quota.limit} vCPUs at once, {quota.used} in use")


def _said_of(offers: Sequence[Offer]) -> Finding:
    spot_count = sum(1 for offer in offers if offer.capacity_type is CapacityType.SPOT)
    types = {offer.instance_type for offer in offers}
    return ok("offers", f"{len(offers)}, of {len(types)} types, {spot_count} of them spot")
