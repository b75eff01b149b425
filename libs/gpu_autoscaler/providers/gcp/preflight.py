"""Looks at a Google Cloud set-up as a doctor would, by reading alone: no launch can be tried without making it."""

from collections.abc import AsyncIterator, Sequence
from datetime import datetime

from gpu_autoscaler.model.errors import AutoscalerError
from gpu_autoscaler.providers.files import modified_at, read_prices
from gpu_autoscaler.providers.gcp.client import GcpClient
from gpu_autoscaler.providers.gcp.groups import GcpGroups, Group
from gpu_autoscaler.providers.gcp.market import GcpMarket
from gpu_autoscaler.providers.gcp.options import GcpOptions, group_names
from gpu_autoscaler.providers.gcp.permissions import CALLS, REQUESTS
from gpu_autoscaler.providers.gcp.quotas import GPUS_ALL_REGIONS, quota_metric
from gpu_autoscaler.providers.gcp.reservations import GcpReservations
from gpu_autoscaler.providers.gcp.translate import denied_kind, owner_prefix
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
    """One look at everything that the settings name. Buys nothing, changes nothing."""

    def __init__(self, options: GcpOptions, calls: GcpClient, installation: str, now: datetime) -> None:
        self._calls = calls
        self._options = options
        self._installation = installation
        self._now = now
        self._groups = GcpGroups(calls, group_names(options))
        self._reservations = GcpReservations(calls)
        self._market = GcpMarket(
            calls, read_prices("provider gcp", options.prices_path), modified_at(options.prices_path)
        )

    async def findings(self) -> Sequence[Finding]:
        """Return all that was found, in the order of looking. Does not raise for what is wrong outside."""
        found = [await self._reading_instances()]
        found += clock_findings(self._calls.cloud_ahead, "Google's")
        if found[0].level == "error":
            return found  # without credentials, or in no project, the rest would say the same once more
        found += [finding async for finding in self._rights()]
        try:
            groups = await self._groups.read(self._now)
        except AutoscalerError as exc:
            return [*found, self._failed("instanceGroupManagers.list", exc)]
        for group in groups:
            found += _of_group(group)
        for operation in ("instanceGroupManagers.listManagedInstances", "zoneOperations.list"):
            found += [finding async for finding in self._reads_of_launches(operation, groups)]
        found += [finding async for finding in self._reservations_of(groups)]
        found += [finding async for finding in self._quotas(groups)]
        return [*found, *await self._offers(groups)]

    async def _reading_instances(self) -> Finding:
        prefix = "gpu-" if self._installation == "*" else owner_prefix(self._installation)
        query = {"filter": f'name eq "{prefix}.*"', "maxResults": "5"}
        try:
            answer = await self._calls.call("instances.aggregatedList", query=query)
        except AutoscalerError as exc:
            return self._failed("instances.aggregatedList", exc)
        count = sum(len(shown.get("instances", ())) for shown in answer.get("items", {}).values())
        return ok(
            "credentials", f"accepted in project {self._calls.project}; instances of ours on the first page: {count}"
        )

    async def _rights(self) -> AsyncIterator[Finding]:
        """Say what of the role is missing; Google tells whoever asks of their own rights."""
        calls = [
            call
            for call in CALLS.values()
            if self._options.resize_request_groups or not call.operation.startswith(REQUESTS)
        ]
        wanted = sorted({permission for call in calls for permission in call.permissions})
        try:
            told = await self._calls.call("projects.testIamPermissions", body={"permissions": wanted})
        except AutoscalerError as exc:
            step = "enable the Cloud Resource Manager API; until then a missing right to buy shows with the first order"
            yield warning("permissions", f"not tried: {exc}", step)
            return
        missing = set(wanted).difference(told.get("permissions", ()))
        for one in calls:
            lacking = sorted(missing.intersection(one.permissions))
            message = f"will be refused: {one.without}"
            step = f"allow {', '.join(lacking)}; `gpu-autoscaler doctor --policy` prints the whole role"
            if lacking:
                yield (warning if one.is_optional else error)(one.operation, message, step)
        if not missing:
            yield ok("permissions", f"all {len(wanted)} that are needed")

    async def _reads_of_launches(self, operation: str, groups: Sequence[Group]) -> AsyncIterator[Finding]:
        group = next((group for group in groups if group.offer_key is not None), None)
        if group is None:
            return
        path = {"zone": group.zone}
        if operation.startswith("instanceGroupManagers"):
            path["instanceGroupManager"] = group.name
        try:
            await self._calls.call(operation, query={"maxResults": "1"}, **path)
        except AutoscalerError as exc:
            yield self._failed(operation, exc)

    async def _reservations_of(self, groups: Sequence[Group]) -> AsyncIterator[Finding]:
        """Say what is left of each reservation that a group takes its machines from."""
        for group in groups:
            if group.reservation is None:
                continue
            subject = f"reservation {group.reservation}"
            try:
                one = await self._reservations.read(group.zone, group.reservation, self._now)
            except AutoscalerError as exc:
                yield warning(subject, f"not read: {exc}", f"allow {', '.join(CALLS['reservations.get'].permissions)}")
                continue
            if one is None:
                step = f"make it in {group.zone}, or correct reservationAffinity in the template of {group.name}"
                yield error(subject, f"is not in {group.zone}: nothing is made by group {group.name}", step)
            elif one.barred.because is not None:
                yield warning(subject, one.barred.because, "others are bought until some of it is free again")
            else:
                yield ok(subject, f"{one.free_count} of {one.total_count} are free, and are used first")

    async def _quotas(self, groups: Sequence[Group]) -> AsyncIterator[Finding]:
        """Say which quotas are zero, which for GPUs they often are at first."""
        wanted: dict[tuple[str, str], set[str]] = {}
        untold: set[str] = set()
        for group in groups:
            metric = None if group.kind is None else quota_metric(group.kind, group.capacity_type)
            if metric is not None:
                wanted.setdefault((group.zone.rpartition("-")[0], metric), set()).add(group.name)
            elif group.reservation is None and group.kind is not None and group.kind.accelerator is not None:
                untold.add(group.kind.accelerator)
        for (region, metric), names in sorted(wanted.items()):
            try:
                limit = (await self._market.quotas(region, self._now)).get(metric)
            except AutoscalerError as exc:
                yield warning("quotas", f"not read: {exc}", f"allow {', '.join(CALLS['regions.get'].permissions)}")
                return
            subject = f"quota {metric} of {region}"
            if limit == 0:
                message = f"is 0: groups {', '.join(sorted(names))} are not bought from"
                yield warning(subject, message, f"request an increase of {metric} in {region} (IAM & Admin, Quotas)")
            elif limit is not None:
                yield ok(subject, f"{limit:g} GPUs at once")
        for name in sorted(untold):
            message = "is by family of GPUs, which Compute Engine does not tell: one of zero shows as a refusal"
            yield warning(f"quota of {name}", message, "see GPUs per GPU family (IAM & Admin, Quotas), per region")
        async for finding in self._quota_of_project():
            yield finding

    async def _quota_of_project(self) -> AsyncIterator[Finding]:
        try:
            limit = await self._market.project_quota(self._now)
        except AutoscalerError as exc:
            yield warning("quotas", f"not read: {exc}", f"allow {', '.join(CALLS['projects.get'].permissions)}")
            return
        subject = f"quota {GPUS_ALL_REGIONS} of the project"
        if limit == 0:
            message = "is 0, as it is in new projects: no GPU is bought on demand, whatever a region's quota says"
            yield warning(subject, message, f"request an increase of {GPUS_ALL_REGIONS} (IAM & Admin, Quotas)")
        elif limit is not None:
            yield ok(subject, f"{limit:g} GPUs at once")

    async def _offers(self, groups: Sequence[Group]) -> list[Finding]:
        try:
            offers = await self._market.offers(groups, self._now)
        except AutoscalerError as exc:
            return [self._failed("services.skus.list", exc)]
        found: list[Finding] = []
        step = "enable the Cloud Billing API and allow compute.advice.capacityHistory, or set gcp.prices_path"
        found += unpriced_findings(offers, step)
        found += stale_price_findings(offers, "gcp.prices_path")
        if not offers:
            return [*found, error("offers", "there are none", "see the groups and quotas above, and gcp.groups")]
        return [*found, ok("offers", f"{len(offers)}, of {len({offer.instance_type for offer in offers})} types")]

    def _failed(self, operation: str, exc: AutoscalerError) -> Finding:
        allowed = CALLS[operation]
        if denied_kind(exc) == "permission" and allowed.permissions:
            step = f"allow {', '.join(allowed.permissions)}; `gpu-autoscaler doctor --policy` prints the whole role"
            return error(operation, f"is not allowed: {allowed.without}", step)
        return error(operation, str(exc), "see gcp.project, gcp.groups, the address of the cloud, and the credentials")


def _of_group(group: Group) -> list[Finding]:
    subject = f"gcp.groups {group.zone}/{group.name}"
    found = [error(subject, problem, "change the group, or take it out of gcp.groups") for problem in group.problems]
    found += [warning(subject, "works", step) for step in group.advice]
    if group.offer_key is not None:
        message = f"sells {group.offer_key} to pool {group.pool}"
        if group.reservation is not None:
            message += f", out of reservation {group.reservation} and nowhere else"
        found.append(ok(subject, message))
    return found
