"""Preflight of an Azure setup: read-only calls.

Azure has no dry run of a purchase, but reports the caller's permissions; `--policy` prints the required ones.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from gpu_autoscaler.model.errors import AutoscalerError
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.providers.azure.client import AzureClient
from gpu_autoscaler.providers.azure.market import QUOTA_OF, AzureMarket, Quota
from gpu_autoscaler.providers.azure.options import AzureOptions
from gpu_autoscaler.providers.azure.permissions import CALLS, Way, is_allowed, role_of
from gpu_autoscaler.providers.azure.scale_sets import ScaleSet, ScaleSets
from gpu_autoscaler.providers.azure.translate import INSTALLATION_TAG, Denied, read_tags
from gpu_autoscaler.providers.preflight import (
    Finding,
    clock_findings,
    error,
    ok,
    stale_price_findings,
    unpriced_findings,
    warning,
)
from gpu_autoscaler.providers.spot_ceilings import ceiling_findings

ELSEWHERE = ("Microsoft.Network/", "Microsoft.ManagedIdentity/")  # resources that may be in another resource group


def needed_role(options: AzureOptions) -> str:
    """Return the custom role that the settings need, as JSON."""
    return role_of(ways_of(options), f"the resource group {options.resource_group}", str(options.subscription))


def ways_of(options: AzureOptions) -> list[Way]:
    """Return the purchase methods that the settings use."""
    ways: list[Way] = ["prices"]
    if options.scale_set:
        ways.append("machines")
    if options.scale_sets:
        ways.append("groups")
    return ways


class Preflight:
    """Checks everything that the settings name. Read-only."""

    def __init__(
        self,
        options: AzureOptions,
        client: AzureClient,
        market: AzureMarket,
        sets: ScaleSets,
        *,
        installation: str,
        machine: Mapping[str, Any] | None,
    ) -> None:
        """`installation`: `*` if the cluster was not asked for it. `machine`: content of the file."""
        self._machine = machine
        self._options = options
        self._client = client
        self._market = market
        self._sets = sets
        self._installation = installation

    async def findings(self, now: datetime) -> Sequence[Finding]:
        """Return all findings in the order of the checks. Does not raise for errors of the cloud."""
        findings = [await self._machine_listing()]
        findings += clock_findings(self._client.cloud_ahead, "Azure's")
        if findings[0].level == "error":
            return findings  # without credentials or resource group the other checks would repeat it
        findings += [finding async for finding in self._permissions()]
        findings += [finding async for finding in self._image()]
        try:
            sets = await self._sets.read(now)
        except AutoscalerError as exc:
            return [*findings, self._failed("VirtualMachineScaleSets_Get", exc)]
        for scale_set in sets:
            findings += self._scale_set_findings(scale_set)
        zones = sorted({zone for scale_set in sets if not scale_set.problems for zone in scale_set.zones})
        patterns = [*self._options.instance_types] if self._options.scale_set else []
        patterns += [scale_set.instance_type for scale_set in sets if scale_set.instance_type]
        if zones and patterns:
            findings += await self._offers(patterns, zones, now)
        return findings

    async def _machine_listing(self) -> Finding:
        count = 0
        try:
            async for machine_data in self._client.pages("VirtualMachines_List"):
                owner = read_tags(machine_data).get(INSTALLATION_TAG)
                count += owner is not None and self._installation in ("*", owner)
        except AutoscalerError as exc:
            return self._failed("VirtualMachines_List", exc)
        whose = "with our tag" if self._installation == "*" else "of this installation"
        return ok("credentials", f"accepted for {self._client.group_id}; {count} machines {whose}")

    async def _permissions(self) -> AsyncIterator[Finding]:
        """Report missing permissions to buy and remove; Azure reports the caller's own."""
        try:
            granted = [permission async for permission in self._client.pages("Permissions_ListForResourceGroup")]
        except AutoscalerError as exc:
            step = f"allow {', '.join(CALLS['Permissions_ListForResourceGroup'].actions)}"
            yield warning("permissions", f"lookup failed: {exc}", step)
            return
        ways = {*ways_of(self._options), "always"}
        changing_calls = [call for call in CALLS.values() if call.rate_limit != "reads" and call.way in ways]
        missing_count = 0
        for call in changing_calls:
            missing = [action for action in call.actions if not is_allowed(action, granted)]
            missing_count += len(missing)
            missing_on_group = [action for action in missing if not action.startswith(ELSEWHERE)]
            if missing_on_group:
                step = f"allow {', '.join(missing_on_group)}; `gpu-autoscaler doctor --policy` prints the whole role"
                yield error(call.operation, f"will be refused: {call.without}", step)
            elif missing:
                message = (
                    "is not fully allowed on the resource group, which is fine if subnet and identity are elsewhere"
                )
                yield warning(call.operation, message, f"allow {', '.join(missing)} on the subnet and on the identity")
        if missing_count == 0:
            yield ok("permissions", f"complete for {', '.join(call.operation for call in changing_calls)}")

    async def _image(self) -> AsyncIterator[Finding]:
        """Report whether the file's image is offered in the region; custom images are not checked."""
        image = ((self._machine or {}).get("storageProfile") or {}).get("imageReference") or {}
        parts = [image.get(name) for name in ("publisher", "offer", "sku")]
        if not all(parts):
            return
        publisher, offer, sku = parts
        subject, version = f"image {publisher}/{offer}/{sku}", image.get("version", "latest")
        try:
            path = f"{publisher}/artifacttypes/vmimage/offers/{offer}/skus/{sku}"
            listed: Any = await self._client.find("VirtualMachineImages_List", name=path)
        except AutoscalerError as exc:
            step = f"allow {', '.join(CALLS['VirtualMachineImages_List'].actions)}"
            yield warning(subject, f"lookup failed: {exc}", step)
            return
        versions = [listed_version["name"] for listed_version in listed or ()]
        if not versions or version not in ("latest", *versions):
            message = f"version {version} is not offered in {self._client.region}: launches from it will fail"
            yield error(subject, message, "correct storageProfile.imageReference in the file of azure.machine_path")
        else:
            yield ok(subject, f"offered in {self._client.region} in {len(versions)} versions")

    @staticmethod
    def _scale_set_findings(scale_set: ScaleSet) -> list[Finding]:
        subject = f"azure scale set {scale_set.name}"
        if scale_set.problems:
            step = "change the scale set, or name another"
            return [error(subject, problem, step) for problem in scale_set.problems]
        size = "" if scale_set.instance_type is None else f"{scale_set.instance_type} as {scale_set.capacity_type} "
        return [
            ok(subject, f"offers {size}in {', '.join(scale_set.zones)}"),
            *(warning(subject, "usable", step) for step in scale_set.advice),
        ]

    async def _offers(self, patterns: Sequence[str], zones: Sequence[str], now: datetime) -> list[Finding]:
        try:
            kinds = await self._market.kinds(patterns, now)
            quotas = await self._market.quotas()
            offers = await self._market.offers(patterns, zones, now)
        except AutoscalerError as exc:
            return [self._failed("ResourceSkus_List", exc)]
        findings = [
            warning(
                f"azure.instance_types {pattern}",
                f"matches no GPU size offered in {self._client.region}",
                "correct or remove it",
            )
            for pattern in patterns
            if not any(fnmatchcase(name, pattern) for name in kinds)
        ]
        families = sorted({kind.family for kind in kinds.values()})
        findings += [_quota_finding(name, quotas.get(name.lower())) for name in (*QUOTA_OF.values(), *families)]
        findings += ceiling_findings(self._options.spot_ceilings, "azure.spot_ceilings", offers)
        findings += unpriced_findings(offers, "allow access to prices.azure.com, or set azure.prices_path")
        return [*findings, *stale_price_findings(offers, "azure.prices_path"), _offers_finding(offers)]

    def _failed(self, operation: str, exc: AutoscalerError) -> Finding:
        if isinstance(exc, Denied):
            permission = CALLS[operation]
            step = f"allow {', '.join(permission.actions)}; `gpu-autoscaler doctor --policy` prints the whole role"
            return error(operation, f"not allowed: {permission.without}", step)
        return error(operation, str(exc), "check azure.subscription, azure.resource_group and the credentials")


def _quota_finding(name: str, quota: Quota | None) -> Finding:
    subject = f"quota {name}"
    if quota is None:
        step = f"allow {', '.join(CALLS['Usage_List'].actions)}"
        return warning(subject, "lookup failed; exhausted quotas will surface as launch refusals", step)
    if quota.limit == 0:
        return warning(
            subject, "is 0: sizes that count against it cannot be launched", "request an increase in the portal"
        )
    return ok(subject, f"{quota.used} of {quota.limit} vCPUs in use")


def _offers_finding(offers: Sequence[Offer]) -> Finding:
    spot_count = sum(1 for offer in offers if offer.capacity_type is CapacityType.SPOT)
    types = {offer.instance_type for offer in offers}
    return ok("offers", f"{len(offers)} of {len(types)} types, {spot_count} spot")
