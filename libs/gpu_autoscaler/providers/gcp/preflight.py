"""Preflight of a Google Cloud setup: read-only calls, as Compute Engine has no dry run of a launch."""

from collections.abc import AsyncIterator, Sequence
from datetime import datetime

from gpu_autoscaler.model.errors import AutoscalerError
from gpu_autoscaler.providers.gcp.client import GcpClient
from gpu_autoscaler.providers.gcp.groups import GcpGroups, Group
from gpu_autoscaler.providers.gcp.market import GcpMarket
from gpu_autoscaler.providers.gcp.options import GcpOptions
from gpu_autoscaler.providers.gcp.permissions import CALLS, REQUESTS
from gpu_autoscaler.providers.gcp.reservations import GcpReservations
from gpu_autoscaler.providers.gcp.translate import GPUS_ALL_REGIONS, denied_kind, owner_prefix, quota_metric
from gpu_autoscaler.providers.preflight import (
    Finding,
    clock_findings,
    error,
    ok,
    stale_price_findings,
    unpriced_findings,
    warning,
)


class Preflight:
    """Checks everything that the settings name. Read-only."""

    def __init__(self, options: GcpOptions, client: GcpClient, installation: str, now: datetime) -> None:
        self._client = client
        self._options = options
        self._installation = installation
        self._now = now
        self._groups = GcpGroups(client, options)
        self._reservations = GcpReservations(client)
        self._market = GcpMarket(client, options)

    async def findings(self) -> Sequence[Finding]:
        """Return all findings in the order of the checks. Does not raise for errors of the cloud."""
        findings = [await self._instance_listing()]
        findings += clock_findings(self._client.cloud_ahead, "Google's")
        if findings[0].level == "error":
            return findings  # without credentials or project the other checks would repeat it
        findings += [finding async for finding in self._permissions()]
        try:
            groups = await self._groups.read(self._now)
        except AutoscalerError as exc:
            return [*findings, self._failed("instanceGroupManagers.list", exc)]
        for group in groups:
            findings += _group_findings(group)
        for operation in ("instanceGroupManagers.listManagedInstances", "zoneOperations.list"):
            findings += [finding async for finding in self._launch_reads(operation, groups)]
        findings += [finding async for finding in self._group_reservations(groups)]
        findings += [finding async for finding in self._quotas(groups)]
        return [*findings, *await self._offers(groups)]

    async def _instance_listing(self) -> Finding:
        prefix = "gpu-" if self._installation == "*" else owner_prefix(self._installation)
        query = {"filter": f'name eq "{prefix}.*"', "maxResults": "5"}
        try:
            answer = await self._client.call("instances.aggregatedList", query=query)
        except AutoscalerError as exc:
            return self._failed("instances.aggregatedList", exc)
        count = sum(len(shown.get("instances", ())) for shown in answer.get("items", {}).values())
        return ok(
            "credentials", f"accepted in project {self._client.project}; {count} of our instances on the first page"
        )

    async def _permissions(self) -> AsyncIterator[Finding]:
        """Report missing permissions; Google reports the caller's own."""
        checked_calls = [
            call
            for call in CALLS.values()
            if self._options.resize_request_groups or not call.operation.startswith(REQUESTS)
        ]
        required = sorted({permission for call in checked_calls for permission in call.permissions})
        try:
            answer = await self._client.call("projects.testIamPermissions", body={"permissions": required})
        except AutoscalerError as exc:
            step = "enable the Cloud Resource Manager API; until then a missing permission shows with the first order"
            yield warning("permissions", f"lookup failed: {exc}", step)
            return
        missing = set(required).difference(answer.get("permissions", ()))
        for call in checked_calls:
            missing_here = sorted(missing.intersection(call.permissions))
            message = f"will be refused: {call.without}"
            step = f"allow {', '.join(missing_here)}; `gpu-autoscaler doctor --policy` prints the whole role"
            if missing_here:
                yield (warning if call.is_optional else error)(call.operation, message, step)
        if not missing:
            yield ok("permissions", f"all {len(required)} granted")

    async def _launch_reads(self, operation: str, groups: Sequence[Group]) -> AsyncIterator[Finding]:
        group = next((group for group in groups if group.offer_key is not None), None)
        if group is None:
            return
        path = {"zone": group.zone}
        if operation.startswith("instanceGroupManagers"):
            path["instanceGroupManager"] = group.name
        try:
            await self._client.call(operation, query={"maxResults": "1"}, **path)
        except AutoscalerError as exc:
            yield self._failed(operation, exc)

    async def _group_reservations(self, groups: Sequence[Group]) -> AsyncIterator[Finding]:
        for group in groups:
            if group.reservation is None:
                continue
            subject = f"reservation {group.reservation}"
            try:
                reservation = await self._reservations.read(group.zone, group.reservation, self._now)
            except AutoscalerError as exc:
                step = f"allow {', '.join(CALLS['reservations.get'].permissions)}"
                yield warning(subject, f"lookup failed: {exc}", step)
                continue
            if reservation is None:
                step = f"create it in {group.zone}, or correct reservationAffinity in the template of {group.name}"
                yield error(subject, f"not found in {group.zone}: group {group.name} cannot launch", step)
            elif reservation.availability.because is not None:
                yield warning(
                    subject, reservation.availability.because, "other offers are used until some of it is free"
                )
            else:
                yield ok(subject, f"{reservation.free_count} of {reservation.total_count} free, used first")

    async def _quotas(self, groups: Sequence[Group]) -> AsyncIterator[Finding]:
        """Report zero quotas, which are common for GPUs in new projects."""
        groups_by_metric: dict[tuple[str, str], set[str]] = {}
        without_metric: set[str] = set()
        for group in groups:
            metric = None if group.kind is None else quota_metric(group.kind, group.capacity_type)
            if metric is not None:
                groups_by_metric.setdefault((group.zone.rpartition("-")[0], metric), set()).add(group.name)
            elif group.reservation is None and group.kind is not None and group.kind.accelerator is not None:
                without_metric.add(group.kind.accelerator)
        for (region, metric), names in sorted(groups_by_metric.items()):
            try:
                limit = (await self._market.quotas(region, self._now)).get(metric)
            except AutoscalerError as exc:
                yield self._quota_lookup_failed("regions.get", exc)
                return
            subject = f"quota {metric} in {region}"
            if limit == 0:
                message = f"is 0: nothing can be launched from groups {', '.join(sorted(names))}"
                yield warning(subject, message, f"request an increase of {metric} in {region} (IAM & Admin, Quotas)")
            elif limit is not None:
                yield ok(subject, f"{limit:g} GPUs")
        for name in sorted(without_metric):
            message = "is by GPU family, not reported by Compute Engine; exhaustion will surface as launch refusals"
            yield warning(f"quota of {name}", message, "check GPUs per GPU family per region (IAM & Admin, Quotas)")
        async for finding in self._project_quota():
            yield finding

    async def _project_quota(self) -> AsyncIterator[Finding]:
        try:
            limit = await self._market.project_quota(self._now)
        except AutoscalerError as exc:
            yield self._quota_lookup_failed("projects.get", exc)
            return
        subject = f"quota {GPUS_ALL_REGIONS} of the project"
        if limit == 0:
            message = "is 0, the default of new projects: no GPU can be launched on demand, whatever the region's quota"
            yield warning(subject, message, f"request an increase of {GPUS_ALL_REGIONS} (IAM & Admin, Quotas)")
        elif limit is not None:
            yield ok(subject, f"{limit:g} GPUs")

    def _quota_lookup_failed(self, operation: str, exc: AutoscalerError) -> Finding:
        step = f"allow {', '.join(CALLS[operation].permissions)}"
        where = f"lookup failed for project {self._client.project}"
        return warning("quotas", f"{where}: {exc}; exhausted quotas will surface as launch refusals", step)

    async def _offers(self, groups: Sequence[Group]) -> list[Finding]:
        try:
            offers = await self._market.offers(groups, self._now)
        except AutoscalerError as exc:
            return [self._failed("services.skus.list", exc)]
        findings: list[Finding] = []
        step = "enable the Cloud Billing API and allow compute.advice.capacityHistory, or set gcp.prices_path"
        findings += unpriced_findings(offers, step)
        findings += stale_price_findings(offers, "gcp.prices_path")
        if not offers:
            return [*findings, error("offers", "there are none", "check groups, quotas and gcp.groups")]
        return [*findings, ok("offers", f"{len(offers)} of {len({offer.instance_type for offer in offers})} types")]

    def _failed(self, operation: str, exc: AutoscalerError) -> Finding:
        permission = CALLS[operation]
        if denied_kind(exc) == "permission" and permission.permissions:
            step = f"allow {', '.join(permission.permissions)}; `gpu-autoscaler doctor --policy` prints the whole role"
            return error(operation, f"not allowed: {permission.without}", step)
        return error(operation, str(exc), "check gcp.project, gcp.groups, the cloud's address and the credentials")


def _group_findings(group: Group) -> list[Finding]:
    subject = f"gcp.groups {group.zone}/{group.name}" if group.zone else f"gcp.groups {group.name}"
    findings = [error(subject, problem, "change the group, or remove it from gcp.groups") for problem in group.problems]
    findings += [warning(subject, "usable", step) for step in group.advice]
    if group.offer_key is not None:
        message = f"offers {group.offer_key} to pool {group.pool}"
        if group.reservation is not None:
            message += f", from reservation {group.reservation} only"
        findings.append(ok(subject, message))
    return findings
