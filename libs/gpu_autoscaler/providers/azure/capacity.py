"""Azure driver: one machine per order, from the pool's uniform scale sets, else by name into the flexible one."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.providers.azure.client import AzureClient
from gpu_autoscaler.providers.azure.desired_capacity import UniformScaleSets
from gpu_autoscaler.providers.azure.launch import FlexibleScaleSet
from gpu_autoscaler.providers.azure.market import AzureMarket
from gpu_autoscaler.providers.azure.options import OWNER, AzureOptions, machine_of, names_by_pool, validate_options
from gpu_autoscaler.providers.azure.preflight import Preflight
from gpu_autoscaler.providers.azure.scale_sets import Mode, ScaleSet, ScaleSets
from gpu_autoscaler.providers.azure.translate import INSTALLATION_TAG, Denied, instance_of, read_tags, resource_id_of
from gpu_autoscaler.providers.ended_instances import SHOWN, EndedInstances
from gpu_autoscaler.providers.files import read_text
from gpu_autoscaler.providers.preflight import Finding
from gpu_autoscaler.providers.protocol import CloudCapacity, Instance, Order, misconfigured, verify_order
from gpu_autoscaler.providers.spot_ceilings import SpotCeilings

_ENDS = ("/delete", "/delete/action", "/evictspotvm/action")  # suffixes of operations that end a machine
_OF_SETS = "virtualMachineScaleSets"


class AzureCapacity(CloudCapacity[AzureOptions]):
    """Capacity of one resource group for one installation."""

    name = "azure"

    def _open(self, url: str | None, call_seconds_max: float) -> None:
        options = self._options
        validate_options(options)
        user_data = None if options.user_data_path is None else read_text(OWNER, options.user_data_path)
        self._machine = machine = None if options.machine_path is None else machine_of(options.machine_path)
        self._client = AzureClient(options, url=url, call_seconds_max=call_seconds_max)
        self._market = AzureMarket(self._client, options)
        self._ended = EndedInstances()
        self._uniform_sets = UniformScaleSets(self._client)
        self._names_by_pool = names_by_pool(options.scale_sets)
        modes: dict[str, Mode] = {name: "Uniform" for names in self._names_by_pool.values() for name in names}
        self._flexible_set: FlexibleScaleSet | None = None
        if options.scale_set is not None and machine is not None:
            modes[options.scale_set] = "Flexible"
            self._flexible_set = FlexibleScaleSet(
                self._client,
                scale_set=options.scale_set,
                machine=machine,
                user_data=user_data,
                ceilings=SpotCeilings(options.spot_ceilings),
            )
        self._sets = ScaleSets(self._client, self._installation, modes)

    async def offers(self) -> Sequence[Offer]:
        """Return the offers of uniform sets, and all sizes in each zone of the flexible set. Raises TransientError."""
        now = self._now()
        sets = [scale_set for scale_set in await self._sets.read(now) if not scale_set.problems]
        is_flexible = any(scale_set.mode == "Flexible" for scale_set in sets)
        patterns = [*(self._options.instance_types if is_flexible else ())]
        patterns += [scale_set.instance_type for scale_set in sets if scale_set.instance_type is not None]
        zones = sorted({zone for scale_set in sets for zone in scale_set.zones})
        if not patterns or not zones:
            return ()  # no usable scale set; `doctor` reports why
        return [
            offer
            for offer in await self._market.offers(patterns, zones, now)
            if any(self._sells(scale_set, offer) for scale_set in sets)
        ]

    async def launch(self, order: Order) -> Instance:
        now = self._now()
        known = self._ended.by_order(order.action_id)
        ended = None if known is None else await self._record_if_gone(known.provider_id, now)
        if ended is not None:
            return verify_order(ended, order)
        if order.pool in self._names_by_pool:
            instance = await self._uniform_sets.launch(order, await self._sets_of(order, now), now)
        elif self._flexible_set is not None:
            instance = await self._flexible_set.launch(order, now)
        else:
            raise misconfigured(
                f"pool {order.pool} has no scale set; add it to azure.scale_sets, or set azure.scale_set", "NoScaleSet"
            )
        self._ended.record_running(instance)
        if instance.state == "terminated":  # launched and ended before this process started
            instance = await self._record_if_gone(instance.provider_id, now) or instance
        return verify_order(instance, order)

    async def terminate(self, provider_id: ProviderId, *, now: datetime) -> Instance | None:
        owned = await self._read(provider_id, now)
        if owned is None:
            return await self._record_if_gone(provider_id, now)
        instance = self._ours(provider_id, owned)
        self._ended.record_running(instance)
        if instance.state != "terminating":
            set_name, name = self._place_of(provider_id)
            if set_name is not None:
                accepted = await self._uniform_sets.end(set_name, name)
            else:
                accepted = await self._client.call("VirtualMachines_Delete", name=name)
            progress: Any = await self._client.operation(accepted) or {}
            self._ended.record_terminating(provider_id, _instant(progress.get("startTime"), now))
        return msgspec.structs.replace(instance, state="terminating")

    async def instance(self, provider_id: ProviderId) -> Instance | None:
        """Return the machine; None once it is deleted. Raises PermanentError if it is not ours, TransientError."""
        owned = await self._read(provider_id, self._now())
        return None if owned is None else self._ours(provider_id, owned)

    def _ours(self, provider_id: ProviderId, owned: tuple[str | None, Instance]) -> Instance:
        owner, instance = owned
        if owner != self._installation:
            raise PermanentError(f"{provider_id} carries the tag of {owner!r}, not ours: left untouched")
        return instance

    async def instances(self, installation: str) -> Sequence[Instance]:
        """Return an installation's machines, and for an hour those that were seen and are gone."""
        now = self._now()
        listed: list[Instance] = []
        if self._flexible_set is not None:
            listed += [
                instance_of(machine_data, now=now)
                async for machine_data in self._client.pages("VirtualMachines_List")
                if read_tags(machine_data).get(INSTALLATION_TAG) == installation
            ]
        for scale_set in await self._sets.read(now):
            if scale_set.mode == "Uniform" and scale_set.instance_type is not None:
                listed += await self._uniform_sets.instances(scale_set, installation, now)
        if installation != self._installation:
            return listed
        for instance in listed:
            self._ended.record_running(instance)
        for provider_id in self._ended.missing(instance.provider_id for instance in listed):
            await self._record_if_gone(provider_id, now)
        listed_ids = {instance.provider_id for instance in listed}
        return [*listed, *(instance for instance in self._ended.recent(now) if instance.provider_id not in listed_ids)]

    async def preflight(self) -> Sequence[Finding]:
        preflight = Preflight(
            self._options,
            self._client,
            self._market,
            self._sets,
            installation=self._installation,
            machine=self._machine,
        )
        return await preflight.findings(self._now())

    async def close(self) -> None:
        await self._client.close()

    def _sells(self, scale_set: ScaleSet, offer: Offer) -> bool:
        is_wanted = scale_set.mode == "Uniform" or any(
            fnmatchcase(offer.instance_type, pattern) for pattern in self._options.instance_types
        )
        return is_wanted and scale_set.sells(offer.instance_type, offer.zone, offer.capacity_type)

    async def _sets_of(self, order: Order, now: datetime) -> Sequence[ScaleSet]:
        """Return the uniform sets of the order's pool. Raises LaunchRefused if none of them offers it."""
        names, offer = self._names_by_pool[order.pool], order.offer
        sets = [scale_set for scale_set in await self._sets.read(now) if scale_set.name in names]
        if not any(scale_set.sells(offer.instance_type, offer.zone, offer.capacity_type) for scale_set in sets):
            why = ", ".join(
                f"{scale_set.name}: "
                + (
                    "; ".join(scale_set.problems)
                    or f"offers {scale_set.instance_type} as {scale_set.capacity_type} in "
                )
                + ("" if scale_set.problems else ", ".join(scale_set.zones))
                for scale_set in sets
            )
            raise misconfigured(
                f"no scale set of pool {order.pool} offers {offer.key}: {why}; check azure.scale_sets and the policy",
                "OfferNotInScaleSet",
            )
        return sets

    async def _read(self, provider_id: ProviderId, now: datetime) -> tuple[str | None, Instance] | None:
        """Return owner and machine; None if it does not exist."""
        set_name, name = self._place_of(provider_id)
        if set_name is None:
            machine_data = await self._client.find("VirtualMachines_Get", name=name)
            return (
                None
                if machine_data is None
                else (read_tags(machine_data).get(INSTALLATION_TAG), instance_of(machine_data, now=now))
            )
        sets = [scale_set for scale_set in await self._sets.read(now) if scale_set.name.lower() == set_name.lower()]
        if not sets:
            raise PermanentError(
                f"{provider_id} belongs to a scale set that is not in azure.scale_sets: left untouched"
            )
        return await self._uniform_sets.owned(sets[0], name, now)

    async def _record_if_gone(self, provider_id: ProviderId, now: datetime) -> Instance | None:
        """Look up a machine that was seen; return it as ended if it no longer exists."""
        if await self._read(provider_id, now) is not None:
            return None
        at = now if self._ended.is_dated(provider_id) else await self._logged_end(provider_id, now)
        return self._ended.record_end(provider_id, at)

    async def _logged_end(self, provider_id: ProviderId, now: datetime) -> datetime:
        """Return when a machine was evicted or deleted, by the activity log; `now` if it is not logged yet. Source:
        Azure REST API, "Activity Logs - List": an event appears within minutes (read 2026-11-22)."""
        since = (now - SHOWN - timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
        query = {"$filter": f"eventTimestamp ge '{since}' and resourceUri eq '{resource_id_of(provider_id)}'"}
        try:
            ends = [
                _instant(entry.get("eventTimestamp"), now)
                async for entry in self._client.pages("ActivityLogs_List", query=query)
                if str((entry.get("operationName") or {}).get("value", "")).lower().endswith(_ENDS)
            ]
        except (Denied, TransientError):
            return now  # a date up to one list interval late is better than a failed list
        return min(ends, default=now)

    def _place_of(self, provider_id: ProviderId) -> tuple[str | None, str]:
        """Return uniform scale set (None: flexible) and machine. Raises PermanentError for another group's machine."""
        resource_id = resource_id_of(provider_id)
        head, _, name = resource_id.rpartition("/")
        own = self._client.id_of("", "").rstrip("/").lower()
        parts = head.removeprefix(head[: len(own)]).strip("/").split("/")
        if head[: len(own)].lower() == own:
            if [part.lower() for part in parts] == ["virtualmachines"]:
                return None, name
            if len(parts) == 3 and (parts[0].lower(), parts[2].lower()) == (_OF_SETS.lower(), "virtualmachines"):
                return parts[1], name
        raise PermanentError(f"{provider_id} is not a machine of {self._client.group_id}: left untouched")


def _instant(text: object, default: datetime) -> datetime:
    try:
        return msgspec.convert(text, datetime).astimezone(UTC)
    except msgspec.ValidationError:
        return default
