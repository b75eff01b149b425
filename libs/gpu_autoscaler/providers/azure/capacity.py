"""Buys from Azure, one machine an order: from the uniform scale set of its pool, else into the flexible one by name."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.providers.azure.calls import AzureClient
from gpu_autoscaler.providers.azure.counted import CountedSets
from gpu_autoscaler.providers.azure.examine import Preflight
from gpu_autoscaler.providers.azure.machines import AzureMachines
from gpu_autoscaler.providers.azure.market import AzureMarket
from gpu_autoscaler.providers.azure.options import OWNER, AzureOptions, machine_of, names_by_pool, validate_options
from gpu_autoscaler.providers.azure.scale_sets import Mode, ScaleSet, ScaleSets
from gpu_autoscaler.providers.azure.translate import (
    INSTALLATION_TAG,
    Denied,
    instance_of,
    read_tags,
    resource_id_of,
)
from gpu_autoscaler.providers.ceilings import SpotCeilings
from gpu_autoscaler.providers.ended import SHOWN, EndedInstances
from gpu_autoscaler.providers.files import modified_at, read_prices, read_text
from gpu_autoscaler.providers.findings import Finding
from gpu_autoscaler.providers.protocol import Instance, LaunchRefused, Order, verify_order

_ENDS = ("/delete", "/delete/action", "/evictspotvm/action")  # how operations that end a machine are called
_OF_SETS = "virtualMachineScaleSets"


def _wall_clock() -> datetime:
    return datetime.now(UTC)


class AzureCapacity:
    """One resource group, on behalf of one installation."""

    name = "azure"

    def __init__(
        self,
        options: AzureOptions,
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
        user_data = None if options.user_data_path is None else read_text(OWNER, options.user_data_path)
        self._machine = machine = None if options.machine_path is None else machine_of(options.machine_path)
        self._calls = AzureClient(options, url=url, call_seconds_max=call_seconds_max)
        ceilings = SpotCeilings(options.spot_ceilings)
        self._market = AzureMarket(
            self._calls, read_prices(OWNER, options.prices_path), modified_at(options.prices_path), ceilings
        )
        self._ended = EndedInstances()
        self._counted = CountedSets(self._calls)
        self._names_by_pool = names_by_pool(options.scale_sets)
        modes: dict[str, Mode] = {name: "Uniform" for names in self._names_by_pool.values() for name in names}
        self._machines: AzureMachines | None = None
        if options.scale_set is not None and machine is not None:
            modes[options.scale_set] = "Flexible"
            self._machines = AzureMachines(
                self._calls, scale_set=options.scale_set, machine=machine, user_data=user_data, ceilings=ceilings
            )
        self._sets = ScaleSets(self._calls, installation, modes)

    async def offers(self) -> Sequence[Offer]:
        """Return what uniform sets sell, and every size in every zone of the flexible one. Raises TransientError."""
        now = self._now()
        sets = [one for one in await self._sets.read(now) if not one.problems]
        is_flexible = any(one.mode == "Flexible" for one in sets)
        patterns = [*(self._options.instance_types if is_flexible else ())]
        patterns += [one.instance_type for one in sets if one.instance_type is not None]
        zones = sorted({zone for one in sets for zone in one.zones})
        if not patterns or not zones:
            return ()  # of sets of which none can be bought from; `doctor` says why
        return [
            offer
            for offer in await self._market.offers(patterns, zones, now)
            if any(self._sells(one, offer) for one in sets)
        ]

    async def launch(self, order: Order) -> Instance:
        """Make the machine, or return the one of this token. Raises LaunchRefused, PermanentError, TransientError."""
        now = self._now()
        earlier = self._ended.of(order.action_id)
        ended = None if earlier is None else await self._gone(earlier.provider_id, now)
        if ended is not None:
            return verify_order(ended, order)
        if order.pool in self._names_by_pool:
            made = await self._counted.launch(order, await self._sets_of(order, now), now)
        elif self._machines is not None:
            made = await self._machines.launch(order, now)
        else:
            raise LaunchRefused(
                f"pool {order.pool} has no scale set; add it to azure.scale_sets, or set azure.scale_set",
                code="NoScaleSet",
                kind="configuration",
                scope="offer",
            )
        self._ended.saw(made)
        if made.state == "terminated":  # it was made and ended before this process began
            made = await self._gone(made.provider_id, now) or made
        return verify_order(made, order)

    async def terminate(self, provider_id: ProviderId, *, now: datetime) -> Instance | None:
        """Begin the machine's end; None if it never was. Raises PermanentError if it is not ours, TransientError."""
        told = await self._read(provider_id, now)
        if told is None:
            return await self._gone(provider_id, now)
        instance = self._ours(provider_id, told)
        self._ended.saw(instance)
        if instance.state != "terminating":
            set_name, name = self._place_of(provider_id)
            if set_name is not None:
                began = await self._counted.end(set_name, name)
            else:
                began = await self._calls.call("VirtualMachines_Delete", name=name)
            standing: Any = await self._calls.operation(began) or {}
            self._ended.ending(provider_id, _instant(standing.get("startTime"), now))
        return msgspec.structs.replace(instance, state="terminating")

    async def instance(self, provider_id: ProviderId) -> Instance | None:
        """Return this machine; None once it is deleted. Raises PermanentError if it is not ours, TransientError."""
        told = await self._read(provider_id, self._now())
        return None if told is None else self._ours(provider_id, told)

    def _ours(self, provider_id: ProviderId, told: tuple[str | None, Instance]) -> Instance:
        owner, instance = told
        if owner != self._installation:
            raise PermanentError(f"{provider_id} carries the tag of {owner!r}, not ours: it is left alone")
        return instance

    async def instances(self, installation: str) -> Sequence[Instance]:
        """Return the machines of an installation, and for an hour those that were seen and are gone."""
        now = self._now()
        listed: list[Instance] = []
        if self._machines is not None:
            listed += [
                instance_of(told, now=now)
                async for told in self._calls.pages("VirtualMachines_List")
                if read_tags(told).get(INSTALLATION_TAG) == installation
            ]
        for one in await self._sets.read(now):
            if one.mode == "Uniform" and one.instance_type is not None:
                listed += await self._counted.instances(one, installation, now)
        if installation != self._installation:
            return listed
        for instance in listed:
            self._ended.saw(instance)
        for provider_id in self._ended.missing(one.provider_id for one in listed):
            await self._gone(provider_id, now)
        shown = {one.provider_id for one in listed}
        return [*listed, *(one for one in self._ended.recent(now) if one.provider_id not in shown)]

    async def preflight(self) -> Sequence[Finding]:
        """Return what is right and wrong with group, region and settings. Buys nothing, changes nothing."""
        examination = Preflight(
            self._options,
            self._calls,
            self._market,
            self._sets,
            installation=self._installation,
            machine=self._machine,
        )
        return await examination.findings(self._now())

    async def close(self) -> None:
        """Give back threads and connections."""
        await self._calls.close()

    def _sells(self, one: ScaleSet, offer: Offer) -> bool:
        is_wanted = one.mode == "Uniform" or any(
            fnmatchcase(offer.instance_type, pattern) for pattern in self._options.instance_types
        )
        return is_wanted and one.sells(offer.instance_type, offer.zone, offer.capacity_type)

    async def _sets_of(self, order: Order, now: datetime) -> Sequence[ScaleSet]:
        """Return the uniform sets of the order's pool. Raises LaunchRefused if none of them sells the offer."""
        names, offer = self._names_by_pool[order.pool], order.offer
        sets = [one for one in await self._sets.read(now) if one.name in names]
        if not any(one.sells(offer.instance_type, offer.zone, offer.capacity_type) for one in sets):
            why = ", ".join(
                f"{one.name}: "
                + ("; ".join(one.problems) or f"sells {one.instance_type} as {one.capacity_type} in ")
                + ("" if one.problems else ", ".join(one.zones))
                for one in sets
            )
            raise LaunchRefused(
                f"no scale set of pool {order.pool} sells {offer.key}: {why}; see azure.scale_sets and the policy",
                code="ScaleSetSellsOther",
                kind="configuration",
                scope="offer",
            )
        return sets

    async def _read(self, provider_id: ProviderId, now: datetime) -> tuple[str | None, Instance] | None:
        """Return whose a machine is, and the machine; None where it is not."""
        set_name, name = self._place_of(provider_id)
        if set_name is None:
            told = await self._calls.find("VirtualMachines_Get", name=name)
            return None if told is None else (read_tags(told).get(INSTALLATION_TAG), instance_of(told, now=now))
        sets = [one for one in await self._sets.read(now) if one.name.lower() == set_name.lower()]
        if not sets:
            raise PermanentError(f"{provider_id} is of a scale set that azure.scale_sets does not name: left alone")
        return await self._counted.owned(sets[0], name, now)

    async def _gone(self, provider_id: ProviderId, now: datetime) -> Instance | None:
        """Look for a machine that was seen; return it as ended where it is not there any more."""
        if await self._read(provider_id, now) is not None:
            return None
        at = now if self._ended.is_dated(provider_id) else await self._logged_end(provider_id, now)
        return self._ended.gone(provider_id, at)

    async def _logged_end(self, provider_id: ProviderId, now: datetime) -> datetime:
        """Return when a machine was evicted or deleted, as the activity log has it; `now` where it does not say yet.

        Source: Azure REST API, "Activity Logs - List": an event shows up there within minutes (read 2026-11-22).
        """
        since = (now - SHOWN - timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
        query = {"$filter": f"eventTimestamp ge '{since}' and resourceUri eq '{resource_id_of(provider_id)}'"}
        try:
            found = [
                _instant(one.get("eventTimestamp"), now)
                async for one in self._calls.pages("ActivityLogs_List", query=query)
                if str((one.get("operationName") or {}).get("value", "")).lower().endswith(_ENDS)
            ]
        except (Denied, TransientError):
            return now  # a date that is late by one list, and not a list that fails for it
        return min(found, default=now)

    def _place_of(self, provider_id: ProviderId) -> tuple[str | None, str]:
        """Return a machine's uniform scale set and number, or its name. Raises PermanentError for another group's."""
        resource_id = resource_id_of(provider_id)
        head, _, name = resource_id.rpartition("/")
        own = self._calls.id_of("", "").rstrip("/").lower()
        parts = head.removeprefix(head[: len(own)]).strip("/").split("/")
        if head[: len(own)].lower() == own:
            if [part.lower() for part in parts] == ["virtualmachines"]:
                return None, name
            if len(parts) == 3 and (parts[0].lower(), parts[2].lower()) == (_OF_SETS.lower(), "virtualmachines"):
                return parts[1], name
        raise PermanentError(f"{provider_id} is no machine of {self._calls.group_id}: left alone")


def _instant(text: object, otherwise: datetime) -> datetime:
    try:
        return msgspec.convert(text, datetime).astimezone(UTC)
    except msgspec.ValidationError:
        return otherwise
