"""Google Cloud driver: one instance per order, from the managed instance group that offers it.

Owner, order and price are in metadata that the group sets at creation. Names carry them too, including those of deleted
instances, of which the cloud shows only the operations that created and deleted them.
"""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.providers.gcp.client import GcpClient
from gpu_autoscaler.providers.gcp.groups import GcpGroups
from gpu_autoscaler.providers.gcp.launch import GcpLauncher
from gpu_autoscaler.providers.gcp.market import GcpMarket
from gpu_autoscaler.providers.gcp.options import ANY_POOL, GcpOptions, group_names, validate_options
from gpu_autoscaler.providers.gcp.preflight import Preflight
from gpu_autoscaler.providers.gcp.resize_requests import GcpResizeRequests
from gpu_autoscaler.providers.gcp.translate import (
    CREATED_BY,
    INSTALLATION,
    Past,
    instance_name,
    instance_of,
    instant,
    last_of,
    owner_prefix,
    parse_provider_id,
    past_of,
    provider_id_of,
    read_metadata,
    token_prefix,
)
from gpu_autoscaler.providers.preflight import Finding
from gpu_autoscaler.providers.protocol import CloudCapacity, Instance, Order, instance_from_order, verify_order
from gpu_autoscaler.providers.shared_reads import SharedRead

SHOWN = timedelta(hours=1)  # how long ended instances are listed
LIST_PAGE_COUNT = 500  # Compute Engine's maximum


class GcpCapacity(CloudCapacity[GcpOptions]):
    """Capacity of one project for one installation."""

    name = "gcp"

    def _open(self, url: str | None, call_seconds_max: float) -> None:
        options, installation = self._options, self._installation
        validate_options(options)
        self._project = str(options.project)
        self._client = GcpClient(self._project, url=url, call_seconds_max=call_seconds_max)
        self._groups = GcpGroups(self._client, options)
        self._market = GcpMarket(self._client, options)
        self._launches = GcpLauncher(self._client, decided_seconds_max=call_seconds_max)
        self._resize_requests = GcpResizeRequests(
            self._client,
            self._launches,
            decided_seconds_max=call_seconds_max,
            waited_seconds_max=options.resize_request_wait_seconds_max,
            run_seconds=options.resize_request_run_seconds,
        )
        self._running = SharedRead(lambda: self._read_running(owner_prefix(installation)))
        # Last observation of each instance: nothing else tells price and order of a deleted one.
        self._observed: dict[str, Instance] = {}

    async def offers(self) -> Sequence[Offer]:
        now = self._now()
        return await self._market.offers(await self._groups.read(now), now)

    async def launch(self, order: Order) -> Instance:
        now = self._now()
        existing = await self._found(order, now)
        if existing is not None:
            self._observed[last_of(existing.provider_id)] = existing
            return msgspec.structs.replace(verify_order(existing, order), action_id=order.action_id)
        group = await self._groups.of(order, now)
        failed_count = sum(past.failed_count for past in (await self._operations_of_token(order)).values())
        name = await self._launches.make(order, group, failed_count)
        instance_data = await self._client.find("instances.get", zone=group.zone, instance=name)
        if instance_data is None:  # the group has it, lists do not yet
            instance = instance_from_order(
                order, provider_id_of(self._project, group.zone, name), launched_at=self._now()
            )
        else:
            instance = instance_of(instance_data, project=self._project, now=self._now())
        self._observed[name] = instance
        return instance

    def can_launch_group(self, pool: str, offer: Offer) -> bool:
        """Return whether a group for resize requests is configured for this pool, type and zone."""
        return offer.capacity_type is CapacityType.ON_DEMAND and any(
            group.gang_type == offer.instance_type and group.zone == offer.zone and group.pool in (pool, ANY_POOL)
            for group in group_names(self._options)
        )

    async def launch_group(self, transaction: ActionId, orders: Sequence[Order]) -> Sequence[Instance]:
        now = self._now()
        existing = await asyncio.gather(*(self._found(order, now) for order in orders))
        if None in existing:
            group = await self._groups.of(orders[0], now, for_gang=True)
            await self._resize_requests.make(transaction, orders, group, now)
            existing = await asyncio.gather(*(self._found(order, now) for order in orders))
            names = [instance_name(order, group.zone, group.name) for order in orders]
        else:
            names = ["" if instance is None else last_of(instance.provider_id) for instance in existing]
        return [self._launched(*launch, now) for launch in zip(orders, names, existing, strict=True)]

    def _launched(self, order: Order, name: str, listed: Instance | None, now: datetime) -> Instance:
        if listed is None:  # the group has it, lists do not yet
            listed = instance_from_order(order, provider_id_of(self._project, order.offer.zone, name), launched_at=now)
        instance = msgspec.structs.replace(verify_order(listed, order), action_id=order.action_id)
        self._observed[last_of(instance.provider_id)] = instance
        return instance

    async def terminate(self, provider_id: ProviderId, *, now: datetime) -> Instance | None:
        zone, name = parse_provider_id(provider_id, self._project)
        instance_data = await self._client.find("instances.get", zone=zone, instance=name)
        if instance_data is None:
            return await self._terminate_unlisted(zone, name)
        metadata = self._ours(provider_id, instance_data)
        instance = instance_of(instance_data, project=self._project, now=now)
        if instance.state == "terminating":
            return instance
        if CREATED_BY in metadata:
            await self._launches.delete(zone, last_of(metadata[CREATED_BY]), name)
        else:  # somebody removed it from its group
            await self._client.call("instances.delete", zone=zone, instance=name)
        self._observed[name] = instance
        return instance if instance.state == "terminated" else msgspec.structs.replace(instance, state="terminating")

    async def instance(self, provider_id: ProviderId) -> Instance | None:
        """Return the instance; None once it is deleted. Raises PermanentError if it is not ours, TransientError."""
        zone, name = parse_provider_id(provider_id, self._project)
        instance_data = await self._client.find("instances.get", zone=zone, instance=name)
        if instance_data is None:
            return None
        self._ours(provider_id, instance_data)
        return instance_of(instance_data, project=self._project, now=self._now())

    def _ours(self, provider_id: ProviderId, instance_data: Mapping[str, Any]) -> Mapping[str, str]:
        """Return the instance's metadata. Raises PermanentError if it is not ours."""
        metadata = read_metadata(instance_data)
        owner = metadata.get(INSTALLATION)
        if owner != self._installation:
            raise PermanentError(f"{provider_id} carries the label of {owner!r}, not ours: left untouched")
        return metadata

    async def instances(self, installation: str) -> Sequence[Instance]:
        """Return an installation's instances, including those that ended within an hour. Raises TransientError."""
        now = self._now()
        is_ours = installation == self._installation
        if is_ours:
            await self._resize_requests.cancel_abandoned(now)
        running_data = await (self._running.fresh() if is_ours else self._read_running(owner_prefix(installation)))
        running = {name: instance_of(data, project=self._project, now=now) for name, data in running_data.items()}
        ended: dict[str, Instance] = {}
        for zone in await self._groups.zones():
            for name, past in (await self._operations(zone, owner_prefix(installation), now - SHOWN)).items():
                if past.is_ending and name not in running:
                    ended[name] = self._ended_instance(zone, past)
        if is_ours:
            young = {name: instance for name, instance in self._observed.items() if now - instance.launched_at < SHOWN}
            self._observed = young | running | ended
        return [
            instance
            for instance in (*running.values(), *ended.values())
            if instance.terminated_at is None or instance.terminated_at >= now - SHOWN
        ]

    async def preflight(self) -> Sequence[Finding]:
        return await Preflight(self._options, self._client, self._installation, self._now()).findings()

    async def close(self) -> None:
        await self._client.close()

    # ---- lookups

    async def _found(self, order: Order, now: datetime) -> Instance | None:
        """Return the token's instance, running or ended, from whichever group it was launched."""
        prefix = token_prefix(order.installation, order.action_id)
        for name, instance_data in (await self._running.fresh()).items():
            if name.startswith(prefix):
                return instance_of(instance_data, project=self._project, now=now)
        known = next((instance for name, instance in self._observed.items() if name.startswith(prefix)), None)
        if known is not None:  # not listed yet, or no longer
            zone, name = parse_provider_id(known.provider_id, self._project)
            past = (await self._operations(zone, name, None)).get(name)
            return self._ended_instance(zone, past) if past is not None and past.is_ending else known
        for past in (await self._operations_of_token(order)).values():
            if past.is_ending:
                return self._ended_instance(order.offer.zone, past)
        return None

    async def _operations_of_token(self, order: Order) -> Mapping[str, Past]:
        return await self._operations(order.offer.zone, token_prefix(order.installation, order.action_id), None)

    async def _operations(self, zone: str, prefix: str, since: datetime | None) -> Mapping[str, Past]:
        """Return what operations say of instances with this name prefix, back to `since` or as far as they go. By one
        regular expression, which Compute Engine does not combine with other constraints."""
        query = {
            "filter": f'targetLink eq ".*/instances/{prefix}.*"',
            "orderBy": "creationTimestamp desc",
            "maxResults": str(LIST_PAGE_COUNT),
        }
        operations: list[Mapping[str, Any]] = []
        async for page in self._client.pages("zoneOperations.list", query=query, zone=zone):
            items = page.get("items", ())
            operations += items
            if since is not None and items and instant(items[-1]["insertTime"]) < since:
                break
        return past_of(operations)

    def _ended_instance(self, zone: str, past: Past) -> Instance:
        """Return an instance that is no longer listed: as last observed, else from its name and group."""
        known = self._observed.get(past.name)
        if known is None:
            group = self._groups.by_suffix(past.name.rpartition("-")[2])
            known = Instance(
                provider_id=provider_id_of(self._project, zone, past.name),
                action_id=None,
                state="terminated",
                instance_type="unknown" if group is None or group.kind is None else group.kind.name,
                zone=zone,
                capacity_type=CapacityType.ON_DEMAND if group is None else group.capacity_type,
                price_micro_usd_per_hour=None,
                launched_at=past.launched_at or past.ended_at or self._now(),
            )
        if past.ended_at is None:
            return msgspec.structs.replace(known, state="terminating")
        return msgspec.structs.replace(known, state="terminated", terminated_at=known.terminated_at or past.ended_at)

    async def _terminate_unlisted(self, zone: str, name: str) -> Instance | None:
        past = (await self._operations(zone, name, None)).get(name)
        if past is not None and past.is_ending:
            return self._ended_instance(zone, past)
        known = self._observed.get(name)
        group = self._groups.by_suffix(name.rpartition("-")[2])
        if known is None or group is None:
            return None
        await self._launches.delete(zone, group.name, name)
        return msgspec.structs.replace(known, state="terminating")

    async def _read_running(self, prefix: str) -> dict[str, Mapping[str, Any]]:
        """Return the instances of all zones. An unreachable zone fails the whole list."""
        instances: dict[str, Mapping[str, Any]] = {}
        query = {"filter": f'name eq "{prefix}.*"', "maxResults": str(LIST_PAGE_COUNT)}
        async for page in self._client.pages("instances.aggregatedList", query=query):
            unreachable = [*page.get("unreachables", ())]
            for scope, listed in page.get("items", {}).items():
                if listed.get("warning", {}).get("code") == "UNREACHABLE":
                    unreachable.append(scope)
                instances |= {instance["name"]: instance for instance in listed.get("instances", ())}
            if unreachable:
                raise TransientError(f"instances.aggregatedList: {', '.join(unreachable)} unreachable; retried")
        return instances
