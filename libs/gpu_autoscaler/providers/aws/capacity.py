"""Buys from EC2, one instance an order: from the group of its pool, else by RunInstances from a launch template.

One order is RunInstances and not CreateFleet: it names one offer, so there is nothing to choose; a refusal is an error
that leaves the token free, where an instant fleet of zero instances has used it up; and the answer is the instance
itself. Orders of one transaction are a fleet where the settings say so (`fleets.py`): all of them or none.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from gpu_autoscaler.model.errors import AutoscalerError, PermanentError, TransientError
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.labels import INSTALLATION
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.providers.aws.advisor import bands_of
from gpu_autoscaler.providers.aws.calls import AwsClient
from gpu_autoscaler.providers.aws.examine import Preflight
from gpu_autoscaler.providers.aws.fleets import AwsFleets, fleet_request
from gpu_autoscaler.providers.aws.groups import AwsGroups
from gpu_autoscaler.providers.aws.market import AwsMarket
from gpu_autoscaler.providers.aws.options import OWNER, AwsOptions, names_by_pool, validate_options
from gpu_autoscaler.providers.aws.reservations import AwsReservations, target_request
from gpu_autoscaler.providers.aws.scores import PlacementScores
from gpu_autoscaler.providers.aws.translate import (
    GROUP_TAG,
    instance_id_of,
    instance_of,
    provider_id_of,
    read_tags,
    tags_of,
    zone_of,
)
from gpu_autoscaler.providers.ceilings import SpotCeilings, usd_text
from gpu_autoscaler.providers.files import fill_template, modified_at, read_prices, read_text
from gpu_autoscaler.providers.findings import Finding
from gpu_autoscaler.providers.protocol import Instance, LaunchRefused, Order, instance_from_order, verify_order
from gpu_autoscaler.providers.tokens import idempotency_token

SUBNETS_KEPT = timedelta(hours=1)
LIST_PAGE_COUNT = 500  # half of the largest that EC2 gives: a page comes well within the limit of a call


def _wall_clock() -> datetime:
    return datetime.now(UTC)


class AwsCapacity:
    """One region, on behalf of one installation."""

    name = "aws"

    def __init__(
        self,
        options: AwsOptions,
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
        self._user_data = None if options.user_data_path is None else read_text(OWNER, options.user_data_path)
        self._calls = AwsClient(str(options.region), url=url, call_seconds_max=call_seconds_max)
        bands = bands_of(options.spot_advisor_path, str(options.region))
        self._scores = PlacementScores(self._calls, options.placement_score_count)
        self._ceilings = SpotCeilings(options.spot_ceilings)
        self._market = AwsMarket(
            self._calls,
            read_prices(OWNER, options.prices_path),
            modified_at(options.prices_path),
            bands,
            self._ceilings,
        )
        self._groups = AwsGroups(self._calls, options, installation)
        self._fleets = AwsFleets(self._calls, installation)
        self._reservations = AwsReservations(self._calls, options.capacity_reservations)
        self._subnets: Mapping[str, str] = {}  # by zone
        self._zone_ids: Mapping[str, str] = {}  # by zone, whose names differ from account to account
        self._subnets_read_at: datetime | None = None

    async def offers(self) -> Sequence[Offer]:
        """Return what each group sells, and every type in every zone that has a subnet. Raises TransientError."""
        now = self._now()
        groups = await self._groups.read(now)
        patterns = self._options.instance_types if self._options.launch_template else ()
        zones = await self._zones() if patterns else {}
        group_types = sorted({group.instance_type for group in groups if group.instance_type is not None})
        if not patterns and not group_types:
            return ()  # of groups of which none can be bought from; `doctor` says why
        everywhere = sorted({*zones, *(zone for group in groups for zone in group.zones)})
        reserved = [one for one in await self._reservations.standing(now) if one.zone in zones]
        return [
            self._groups.dressed(offer)
            for offer in await self._market.offers((*patterns, *group_types), everywhere, now, reserved)
            if offer.capacity_type is CapacityType.RESERVED
            or any(group.sells(offer.instance_type, offer.zone, offer.capacity_type) for group in groups)
            or (offer.zone in zones and any(fnmatchcase(offer.instance_type, pattern) for pattern in patterns))
        ]

    async def launch(self, order: Order) -> Instance:
        """Make the instance, or return the one of this token. Raises LaunchRefused, PermanentError, TransientError."""
        now = self._now()
        if self._groups.stands_for(order.pool):
            instance_id = await self._groups.launch(order, now)
            told = await self._described(instance_id)
            if told is None:  # launched, and not shown yet
                made = instance_from_order(order, provider_id_of(order.offer.zone, instance_id), launched_at=now)
            else:
                made = instance_of(told, now=now)
        else:
            request = await self._request(order)
            try:
                answer = await self._calls.call("RunInstances", **request)
            except LaunchRefused as refused:
                await self._weigh(order, refused)
                raise
            made = instance_of(answer["Instances"][0], now=now)
        return verify_order(made, order)

    def can_launch_group(self, pool: str, offer: Offer) -> bool:
        """True for what comes from the launch template, by choice. A fleet cannot be led into one reservation."""
        is_reserved = offer.capacity_type is CapacityType.RESERVED
        return self._options.fleets and not is_reserved and not self._groups.stands_for(pool)

    async def launch_group(self, transaction: ActionId, orders: Sequence[Order]) -> Sequence[Instance]:
        """Make all, or return what was made. Raises LaunchRefused, PermanentError, TransientError."""
        first = orders[0]
        template, subnet = await self._place(first, "CreateFleet")
        ceiling = self._ceilings.of(first.offer.instance_type)
        request = fleet_request(
            template,
            first.offer,
            len(orders),
            subnet=subnet,
            ceiling=None if ceiling is None else usd_text(ceiling),
            placed_in=names_by_pool(self._options.placement_groups).get(first.pool),
        )
        try:
            return await self._fleets.launch(transaction, orders, request, self._now())
        except LaunchRefused as refused:
            await self._weigh(first, refused)
            raise

    async def _weigh(self, order: Order, refused: LaunchRefused) -> None:
        """Let the refusal stand longer where AWS itself finds it likely that the zone goes on refusing."""
        if order.offer.capacity_type is not CapacityType.SPOT or self._options.placement_score_count is None:
            return
        now = self._now()
        try:
            types = await self._market.spot_types(self._options.instance_types, now)
        except AutoscalerError:
            return  # the refusal is what there is to say
        await self._scores.weigh(refused, self._zone_ids.get(order.offer.zone), types, now)

    async def terminate(self, provider_id: ProviderId, *, now: datetime) -> Instance | None:
        """Begin the instance's end; None if it never was. Raises PermanentError if it is not ours, TransientError."""
        instance_id = instance_id_of(provider_id)
        told = await self._ours(provider_id)
        if told is None:
            return None
        instance = instance_of(told, now=now)
        if instance.state in ("terminating", "terminated"):
            return instance
        is_grouped = GROUP_TAG in read_tags(told)
        if not is_grouped or not await self._groups.terminate(instance_id):
            await self._calls.call("TerminateInstances", InstanceIds=[instance_id])
        return msgspec.structs.replace(instance, state="terminating")

    async def instance(self, provider_id: ProviderId) -> Instance | None:
        """Return this instance; EC2 knows it for about an hour after its end. Raises PermanentError, TransientError."""
        region = self._options.region or ""
        if not zone_of(provider_id).startswith(region):  # where this endpoint knows nothing of it
            raise PermanentError(f"{provider_id} is of another region than {region}: it is left alone")
        told = await self._ours(provider_id)
        return None if told is None else instance_of(told, now=self._now())

    async def detach(self, provider_id: ProviderId) -> None:
        """See that a group does not replace this instance when it goes: we do. Raises TransientError."""
        told = await self._described(instance_id_of(provider_id))
        tags = {} if told is None else read_tags(told)
        if tags.get(INSTALLATION) == self._installation and GROUP_TAG in tags:
            await self._groups.detach(instance_id_of(provider_id), tags[GROUP_TAG])

    async def instances(self, installation: str) -> Sequence[Instance]:
        """Return the instances of an installation, for as long as EC2 shows those that ended: about an hour."""
        mine = [{"Name": f"tag:{INSTALLATION}", "Values": [installation]}]
        now = self._now()
        listed = [
            told
            async for page in self._calls.pages("DescribeInstances", Filters=mine, MaxResults=LIST_PAGE_COUNT)
            for reservation in page["Reservations"]
            for told in reservation["Instances"]
        ]
        return [instance_of(told, now=now) for told in await self._fleets.attributed(listed, now)]

    async def preflight(self) -> Sequence[Finding]:
        """Return what is right and wrong with account, region and settings. Buys nothing, changes nothing."""
        return await Preflight(self._options, self._calls, self._installation, self._now()).findings()

    async def close(self) -> None:
        """Give back threads and connections."""
        self._calls.close()

    async def _request(self, order: Order) -> dict[str, object]:
        """Everything of it follows from the order and the settings, so that a second try is the same request."""
        template, subnet = await self._place(order, "RunInstances")
        request: dict[str, object] = {
            "LaunchTemplate": {**template, "Version": "$Default"},
            "InstanceType": order.offer.instance_type,
            "SubnetId": subnet,
            "MinCount": 1,
            "MaxCount": 1,
            "ClientToken": idempotency_token(order.installation, order.action_id),
            "TagSpecifications": [{"ResourceType": kind, "Tags": tags_of(order)} for kind in ("instance", "volume")],
        }
        if order.offer.capacity_type is CapacityType.SPOT:
            # No maximum price: EC2's ceiling is then the on-demand price (EC2 User Guide, "Spot Instance pricing").
            spot = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
            ceiling = self._ceilings.of(order.offer.instance_type)
            if ceiling is not None:
                spot["MaxPrice"] = usd_text(ceiling)
            request["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": spot}
        placed_in = names_by_pool(self._options.placement_groups).get(order.pool)
        if placed_in is not None:
            request["Placement"] = {"GroupName": placed_in}
        if order.offer.capacity_type is CapacityType.RESERVED:
            request |= target_request(await self._reservations.target(order, self._now()))
        if self._user_data is not None:
            request["UserData"] = fill_template(self._user_data, order)  # botocore encodes it
        return request

    async def _place(self, order: Order, operation: str) -> tuple[Mapping[str, str], str]:
        """Return the launch template, as requests name it, and the subnet. Raises LaunchRefused, TransientError."""
        zones = await self._zones()
        if not self._options.launch_template:
            raise LaunchRefused(
                f"pool {order.pool} has no group; add it to aws.groups, or set aws.launch_template",
                code="NoGroup",
                kind="configuration",
                scope="offer",
            )
        if order.offer.zone not in zones:
            raise LaunchRefused(
                f"{operation}: no subnet in {order.offer.zone}; add one to aws.subnets",
                code="NoSubnet",
                kind="configuration",
                scope="zone",
            )
        template = self._options.launch_template
        by = "LaunchTemplateId" if template.startswith("lt-") else "LaunchTemplateName"
        return {by: template}, zones[order.offer.zone]

    async def _ours(self, provider_id: ProviderId) -> Mapping[str, Any] | None:
        """Return what EC2 shows of it, None where there is none. Raises PermanentError if it is not ours."""
        told = await self._described(instance_id_of(provider_id))
        owner = None if told is None else read_tags(told).get(INSTALLATION)
        if told is not None and owner != self._installation:
            raise PermanentError(f"{provider_id} carries the tag of {owner!r}, not ours: it is left alone")
        whole = [] if told is None else await self._fleets.attributed([told], self._now())
        return whole[0] if whole else told

    async def _described(self, instance_id: str) -> Mapping[str, Any] | None:
        # By filter, and not by id: an id that never was is then no error. No page size goes with it.
        wanted = [{"Name": "instance-id", "Values": [instance_id]}]
        async for page in self._calls.pages("DescribeInstances", Filters=wanted):
            for reservation in page["Reservations"]:
                for told in reservation["Instances"]:
                    found: Mapping[str, Any] = told
                    return found
        return None

    async def _zones(self) -> Mapping[str, str]:
        """Zone -> subnet, as the settings order them."""
        now = self._now()
        if self._subnets_read_at is None or now - self._subnets_read_at >= SUBNETS_KEPT:
            zones: dict[str, str] = {}
            wanted = [{"Name": "subnet-id", "Values": list(self._options.subnets)}]
            told = [
                subnet
                async for page in self._calls.pages("DescribeSubnets", Filters=wanted)
                for subnet in page["Subnets"]
            ]
            found = {subnet["SubnetId"]: subnet["AvailabilityZone"] for subnet in told}
            self._zone_ids = {subnet["AvailabilityZone"]: subnet.get("AvailabilityZoneId", "") for subnet in told}
            missing = [subnet for subnet in self._options.subnets if subnet not in found]
            if missing:
                raise TransientError(
                    f"DescribeSubnets: {', '.join(missing)} not found in {self._calls.region};"
                    " see aws.subnets, aws.region"
                )
            for subnet in self._options.subnets:
                zones.setdefault(found[subnet], subnet)
            self._subnets, self._subnets_read_at = zones, now
        return self._subnets
