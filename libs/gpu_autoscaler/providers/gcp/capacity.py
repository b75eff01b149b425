"""Buys from Compute Engine, one instance an order, from the managed group that sells its offer.

Whose an instance is, and what was agreed for it, is metadata that the group gives it at once; names tell it too, also
of instances that are gone, of which the cloud shows no more than the operations that made and ended them.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.providers.files import modified_at, read_prices
from gpu_autoscaler.providers.findings import Finding
from gpu_autoscaler.providers.gcp.calls import GcpClient
from gpu_autoscaler.providers.gcp.examine import Preflight
from gpu_autoscaler.providers.gcp.groups import GcpGroups
from gpu_autoscaler.providers.gcp.launches import GcpLaunches
from gpu_autoscaler.providers.gcp.market import GcpMarket
from gpu_autoscaler.providers.gcp.options import ANY_POOL, GcpOptions, group_names, validate_options
from gpu_autoscaler.providers.gcp.together import GcpTogether
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
from gpu_autoscaler.providers.protocol import Instance, Order, instance_from_order, verify_order
from gpu_autoscaler.providers.shared_reads import SharedRead

SHOWN = timedelta(hours=1)  # for how long an end is told
LIST_PAGE_COUNT = 500  # the largest that Compute Engine gives


def _wall_clock() -> datetime:
    return datetime.now(UTC)


class GcpCapacity:
    """One project, on behalf of one installation."""

    name = "gcp"

    def __init__(
        self,
        options: GcpOptions,
        *,
        installation: str,
        url: str | None = None,
        call_seconds_max: float = 30.0,
        now: Callable[[], datetime] = _wall_clock,
    ) -> None:
        """Raises ConfigError with everything that is missing."""
        validate_options(options)
        self._options = options
        self._installation = installation
        self._now = now
        self._project = str(options.project)
        self._calls = GcpClient(self._project, url=url, call_seconds_max=call_seconds_max)
        self._groups = GcpGroups(self._calls, group_names(options))
        self._market = GcpMarket(
            self._calls, read_prices("provider gcp", options.prices_path), modified_at(options.prices_path)
        )
        self._launches = GcpLaunches(self._calls, decided_seconds_max=call_seconds_max)
        self._together = GcpTogether(
            self._calls,
            self._launches,
            decided_seconds_max=call_seconds_max,
            waited_seconds_max=options.together_wait_seconds_max,
            run_seconds=options.together_run_seconds,
        )
        self._living = SharedRead(lambda: self._read_living(owner_prefix(installation)))
        # What was last seen of each instance: when it is gone, nothing else tells what it cost, and for whom it was.
        self._seen: dict[str, Instance] = {}

    async def offers(self) -> Sequence[Offer]:
        """Return what each group sells. Raises TransientError."""
        now = self._now()
        return await self._market.offers(await self._groups.read(now), now)

    async def launch(self, order: Order) -> Instance:
        """Make the instance, or return the one of this token. Raises LaunchRefused, PermanentError, TransientError."""
        now = self._now()
        found = await self._found(order, now)
        if found is not None:
            self._seen[last_of(found.provider_id)] = found
            return msgspec.structs.replace(verify_order(found, order), action_id=order.action_id)
        group = await self._groups.of(order, now)
        failed_count = sum(one.failed_count for one in (await self._past_of_token(order)).values())
        name = await self._launches.make(order, group, failed_count)
        told = await self._calls.find("instances.get", zone=group.zone, instance=name)
        if told is None:  # the group has it, lists do not yet
            made = instance_from_order(order, provider_id_of(self._project, group.zone, name), launched_at=self._now())
        else:
            made = instance_of(told, project=self._project, now=self._now())
        self._seen[name] = made
        return made

    def can_launch_group(self, pool: str, offer: Offer) -> bool:
        """True where a group of the settings is one for resize requests, of this pool, type and zone."""
        return offer.capacity_type is CapacityType.ON_DEMAND and any(
            named.together_type == offer.instance_type and named.zone == offer.zone and named.pool in (pool, ANY_POOL)
            for named in group_names(self._options)
        )

    async def launch_group(self, transaction: ActionId, orders: Sequence[Order]) -> Sequence[Instance]:
        """Make all, or return what was made. Raises LaunchRefused, PermanentError, TransientError."""
        now = self._now()
        found = await asyncio.gather(*(self._found(order, now) for order in orders))
        if None in found:
            group = await self._groups.of(orders[0], now, is_together=True)
            await self._together.make(transaction, orders, group, now)
            found = await asyncio.gather(*(self._found(order, now) for order in orders))
            names = [instance_name(order, group.zone, group.name) for order in orders]
        else:
            names = ["" if one is None else last_of(one.provider_id) for one in found]
        return [self._as_made(*each, now) for each in zip(orders, names, found, strict=True)]

    def _as_made(self, order: Order, name: str, found: Instance | None, now: datetime) -> Instance:
        if found is None:  # the group has it, lists do not yet
            found = instance_from_order(order, provider_id_of(self._project, order.offer.zone, name), launched_at=now)
        made = msgspec.structs.replace(verify_order(found, order), action_id=order.action_id)
        self._seen[last_of(made.provider_id)] = made
        return made

    async def terminate(self, provider_id: ProviderId, *, now: datetime) -> Instance | None:
        """Begin the instance's end; None if it never was. Raises PermanentError if it is not ours, TransientError."""
        zone, name = parse_provider_id(provider_id, self._project)
        told = await self._calls.find("instances.get", zone=zone, instance=name)
        if told is None:
            return await self._end_unshown(zone, name)
        metadata = self._ours(provider_id, told)
        instance = instance_of(told, project=self._project, now=now)
        if instance.state == "terminating":
            return instance
        if CREATED_BY in metadata:
            await self._launches.withdraw(zone, last_of(metadata[CREATED_BY]), name)
        else:  # somebody took it out of its group
            await self._calls.call("instances.delete", zone=zone, instance=name)
        self._seen[name] = instance
        return instance if instance.state == "terminated" else msgspec.structs.replace(instance, state="terminating")

    async def instance(self, provider_id: ProviderId) -> Instance | None:
        """Return this instance; None once it is deleted. Raises PermanentError if it is not ours, TransientError."""
        zone, name = parse_provider_id(provider_id, self._project)
        told = await self._calls.find("instances.get", zone=zone, instance=name)
        if told is None:
            return None
        self._ours(provider_id, told)
        return instance_of(told, project=self._project, now=self._now())

    def _ours(self, provider_id: ProviderId, told: Mapping[str, Any]) -> Mapping[str, str]:
        """Return the instance's metadata. Raises PermanentError if it is not ours."""
        metadata = read_metadata(told)
        owner = metadata.get(INSTALLATION)
        if owner != self._installation:
            raise PermanentError(f"{provider_id} carries the mark of {owner!r}, not ours: it is left alone")
        return metadata

    async def instances(self, installation: str) -> Sequence[Instance]:
        """Return the instances of an installation, for an hour also those that ended. Raises TransientError."""
        now = self._now()
        is_ours = installation == self._installation
        if is_ours:
            await self._together.cancel_old(now)
        told = await (self._living.fresh() if is_ours else self._read_living(owner_prefix(installation)))
        living = {name: instance_of(one, project=self._project, now=now) for name, one in told.items()}
        ended: dict[str, Instance] = {}
        for zone in sorted({named.zone for named in group_names(self._options)}):
            for name, past in (await self._ends(zone, owner_prefix(installation), now - SHOWN)).items():
                if past.is_ending and name not in living:
                    ended[name] = self._ended(zone, past)
        if is_ours:
            young = {name: one for name, one in self._seen.items() if now - one.launched_at < SHOWN}
            self._seen = young | living | ended
        return [
            one
            for one in (*living.values(), *ended.values())
            if one.terminated_at is None or one.terminated_at >= now - SHOWN
        ]

    async def preflight(self) -> Sequence[Finding]:
        """Return what is right and wrong with project, groups and settings. Buys nothing, changes nothing."""
        return await Preflight(self._options, self._calls, self._installation, self._now()).findings()

    async def close(self) -> None:
        """Give back connections."""
        await self._calls.close()

    # ---- what there is

    async def _found(self, order: Order, now: datetime) -> Instance | None:
        """Return the instance of this token, living or ended, whatever it was bought from."""
        prefix = token_prefix(order.installation, order.action_id)
        for name, told in (await self._living.fresh()).items():
            if name.startswith(prefix):
                return instance_of(told, project=self._project, now=now)
        known = next((one for name, one in self._seen.items() if name.startswith(prefix)), None)
        if known is not None:  # not shown yet, or no more
            zone, name = parse_provider_id(known.provider_id, self._project)
            past = (await self._ends(zone, name, None)).get(name)
            return self._ended(zone, past) if past is not None and past.is_ending else known
        for past in (await self._past_of_token(order)).values():
            if past.is_ending:
                return self._ended(order.offer.zone, past)
        return None

    async def _past_of_token(self, order: Order) -> Mapping[str, Past]:
        return await self._ends(order.offer.zone, token_prefix(order.installation, order.action_id), None)

    async def _ends(self, zone: str, prefix: str, since: datetime | None) -> Mapping[str, Past]:
        """Return what operations tell of instances whose names begin so, back to `since`, or as far as they go.

        By one regular expression: Compute Engine combines none with another constraint.
        """
        query = {
            "filter": f'targetLink eq ".*/instances/{prefix}.*"',
            "orderBy": "creationTimestamp desc",
            "maxResults": str(LIST_PAGE_COUNT),
        }
        found: list[Mapping[str, Any]] = []
        async for page in self._calls.pages("zoneOperations.list", query=query, zone=zone):
            items = page.get("items", ())
            found += items
            if since is not None and items and instant(items[-1]["insertTime"]) < since:
                break
        return past_of(found)

    def _ended(self, zone: str, past: Past) -> Instance:
        """Return an instance that the cloud shows no more: as it was last seen, else as its name and group tell it."""
        known = self._seen.get(past.name)
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

    async def _end_unshown(self, zone: str, name: str) -> Instance | None:
        past = (await self._ends(zone, name, None)).get(name)
        if past is not None and past.is_ending:
            return self._ended(zone, past)
        known = self._seen.get(name)
        group = self._groups.by_suffix(name.rpartition("-")[2])
        if known is None or group is None:
            return None
        await self._launches.withdraw(zone, group.name, name)
        return msgspec.structs.replace(known, state="terminating")

    async def _read_living(self, prefix: str) -> dict[str, Mapping[str, Any]]:
        """Return what every zone shows. A zone that cannot be seen makes no shorter list, but none."""
        found: dict[str, Mapping[str, Any]] = {}
        query = {"filter": f'name eq "{prefix}.*"', "maxResults": str(LIST_PAGE_COUNT)}
        async for page in self._calls.pages("instances.aggregatedList", query=query):
            unseen = [*page.get("unreachables", ())]
            for scope, shown in page.get("items", {}).items():
                if shown.get("warning", {}).get("code") == "UNREACHABLE":
                    unseen.append(scope)
                found |= {instance["name"]: instance for instance in shown.get("instances", ())}
            if unseen:
                raise TransientError(f"instances.aggregatedList: {', '.join(unseen)} cannot be seen; asked again later")
        return found
