"""EC2 driver: launches one instance per order, from the pool's Auto Scaling group or by RunInstances from a template.

An order uses RunInstances rather than CreateFleet: it names one offer, so there is nothing to choose; a refusal leaves
the token free, whereas an instant fleet of zero instances consumes it; and the answer is the instance itself. Orders
of one transaction become a fleet if the settings say so (`fleets.py`): all or none.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from gpu_autoscaler.model.errors import AutoscalerError, PermanentError, TransientError
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.labels import INSTALLATION
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.providers.aws.advisor import bands_of
from gpu_autoscaler.providers.aws.client import AwsClient
from gpu_autoscaler.providers.aws.fleets import AwsFleets, fleet_request, template_reference
from gpu_autoscaler.providers.aws.groups import AwsGroups
from gpu_autoscaler.providers.aws.market import AwsMarket
from gpu_autoscaler.providers.aws.options import OWNER, AwsOptions, names_by_pool, validate_options
from gpu_autoscaler.providers.aws.preflight import Preflight
from gpu_autoscaler.providers.aws.reservations import AwsReservations, target_request
from gpu_autoscaler.providers.aws.spot_scores import PlacementScores
from gpu_autoscaler.providers.aws.translate import (
    GROUP_TAG,
    instance_id_of,
    instance_of,
    provider_id_of,
    read_tags,
    tags_of,
    zone_of,
)
from gpu_autoscaler.providers.files import fill_template, read_text
from gpu_autoscaler.providers.preflight import Finding
from gpu_autoscaler.providers.protocol import (
    CloudCapacity,
    Instance,
    LaunchRefused,
    Order,
    instance_from_order,
    misconfigured,
    verify_order,
)
from gpu_autoscaler.providers.spot_ceilings import SpotCeilings, usd_text
from gpu_autoscaler.providers.tokens import idempotency_token

SUBNETS_KEPT = timedelta(hours=1)
LIST_PAGE_COUNT = 500  # half of EC2's maximum: a page arrives well within a call's time limit


class AwsCapacity(CloudCapacity[AwsOptions]):
    """Capacity of one region for one installation."""

    name = "aws"

    def _open(self, url: str | None, call_seconds_max: float) -> None:
        options, installation = self._options, self._installation
        validate_options(options)
        self._user_data = None if options.user_data_path is None else read_text(OWNER, options.user_data_path)
        self._client = AwsClient(str(options.region), url=url, call_seconds_max=call_seconds_max)
        self._scores = PlacementScores(self._client, options.placement_score_count)
        self._ceilings = SpotCeilings(options.spot_ceilings)
        self._market = AwsMarket(self._client, options, bands_of(options.spot_advisor_path, str(options.region)))
        self._groups = AwsGroups(self._client, options, installation)
        self._fleets = AwsFleets(self._client, installation)
        self._reservations = AwsReservations(self._client, options.capacity_reservations)
        self._subnets: Mapping[str, str] = {}  # by zone
        self._zone_ids: Mapping[str, str] = {}  # by zone; zone names differ between accounts
        self._subnets_read_at: datetime | None = None

    async def offers(self) -> Sequence[Offer]:
        """Return the offers of all groups, and of all types in each zone with a subnet. Raises TransientError."""
        now = self._now()
        groups = await self._groups.read(now)
        patterns = self._options.instance_types if self._options.launch_template else ()
        zones = await self._zones() if patterns else {}
        group_types = sorted({group.instance_type for group in groups if group.instance_type is not None})
        if not patterns and not group_types:
            return ()  # no usable group; `doctor` reports why
        all_zones = sorted({*zones, *(zone for group in groups for zone in group.zones)})
        reserved = [reservation for reservation in await self._reservations.usable(now) if reservation.zone in zones]
        return [
            self._groups.with_node_template(offer)
            for offer in await self._market.offers((*patterns, *group_types), all_zones, now, reserved)
            if offer.capacity_type is CapacityType.RESERVED
            or any(group.sells(offer.instance_type, offer.zone, offer.capacity_type) for group in groups)
            or (offer.zone in zones and any(fnmatchcase(offer.instance_type, pattern) for pattern in patterns))
        ]

    async def launch(self, order: Order) -> Instance:
        now = self._now()
        if self._groups.has_pool(order.pool):
            instance_id = await self._groups.launch(order, now)
            instance_data = await self._describe(instance_id)
            if instance_data is None:  # launched, and not listed yet
                instance = instance_from_order(order, provider_id_of(order.offer.zone, instance_id), launched_at=now)
            else:
                instance = instance_of(instance_data, now=now)
        else:
            request = await self._request(order)
            try:
                answer = await self._client.call("RunInstances", **request)
            except LaunchRefused as refused:
                await self._extend_backoff(order, refused)
                raise
            instance = instance_of(answer["Instances"][0], now=now)
        return verify_order(instance, order)

    def can_launch_group(self, pool: str, offer: Offer) -> bool:
        """Return whether fleets apply: launch template only, and no reservation, which a fleet cannot target."""
        is_reserved = offer.capacity_type is CapacityType.RESERVED
        return self._options.fleets and not is_reserved and not self._groups.has_pool(pool)

    async def launch_group(self, transaction: ActionId, orders: Sequence[Order]) -> Sequence[Instance]:
        first = orders[0]
        template, subnet = await self._placement(first, "CreateFleet")
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
            await self._extend_backoff(first, refused)
            raise

    async def _extend_backoff(self, order: Order, refused: LaunchRefused) -> None:
        """Extend the back-off of a zone that AWS itself rates as unlikely to have capacity."""
        if order.offer.capacity_type is not CapacityType.SPOT or self._options.placement_score_count is None:
            return
        now = self._now()
        try:
            types = await self._market.spot_types(self._options.instance_types, now)
        except AutoscalerError:
            return  # the refusal itself matters more
        await self._scores.extend_backoff(refused, self._zone_ids.get(order.offer.zone), types, now)

    async def terminate(self, provider_id: ProviderId, *, now: datetime) -> Instance | None:
        instance_id = instance_id_of(provider_id)
        instance_data = await self._describe_ours(provider_id)
        if instance_data is None:
            return None
        instance = instance_of(instance_data, now=now)
        if instance.state in ("terminating", "terminated"):
            return instance
        is_grouped = GROUP_TAG in read_tags(instance_data)
        if not is_grouped or not await self._groups.terminate(instance_id):
            await self._client.call("TerminateInstances", InstanceIds=[instance_id])
        return msgspec.structs.replace(instance, state="terminating")

    async def instance(self, provider_id: ProviderId) -> Instance | None:
        """Return the instance; EC2 knows it for about an hour after its end. Raises PermanentError, TransientError."""
        region = self._options.region or ""
        if not zone_of(provider_id).startswith(region):  # this endpoint does not know it
            raise PermanentError(f"{provider_id} is not in region {region}: left untouched")
        instance_data = await self._describe_ours(provider_id)
        return None if instance_data is None else instance_of(instance_data, now=self._now())

    async def detach(self, provider_id: ProviderId) -> None:
        """Keep a group from replacing this instance when it ends: we do. Raises TransientError."""
        instance_data = await self._describe(instance_id_of(provider_id))
        tags = {} if instance_data is None else read_tags(instance_data)
        if tags.get(INSTALLATION) == self._installation and GROUP_TAG in tags:
            await self._groups.detach(instance_id_of(provider_id), tags[GROUP_TAG])

    async def instances(self, installation: str) -> Sequence[Instance]:
        """Return an installation's instances, including ended ones while EC2 lists them: about an hour."""
        now = self._now()
        listed = await self._client.instances(f"tag:{INSTALLATION}", [installation], MaxResults=LIST_PAGE_COUNT)
        return [
            instance_of(instance_data, now=now) for instance_data in await self._fleets.with_action_ids(listed, now)
        ]

    async def preflight(self) -> Sequence[Finding]:
        return await Preflight(self._options, self._client, self._installation, self._now()).findings()

    async def close(self) -> None:
        self._client.close()

    async def _request(self, order: Order) -> dict[str, object]:
        """Return a request that follows from order and settings alone, so that a retry is the same request."""
        template, subnet = await self._placement(order, "RunInstances")
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
            # Without a maximum price EC2's ceiling is the on-demand price (EC2 User Guide, "Spot Instance pricing").
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

    async def _placement(self, order: Order, operation: str) -> tuple[Mapping[str, str], str]:
        """Return launch template and subnet in the form of requests. Raises LaunchRefused, TransientError."""
        zones = await self._zones()
        if not self._options.launch_template:
            raise misconfigured(
                f"launch for pool {order.pool} failed: it has no Auto Scaling group; add it to aws.groups, or set"
                " aws.launch_template",
                "NoGroup",
            )
        if order.offer.zone not in zones:
            raise misconfigured(
                f"{operation} failed: no subnet in {order.offer.zone}; add one to aws.subnets", "NoSubnet", scope="zone"
            )
        return template_reference(self._options.launch_template), zones[order.offer.zone]

    async def _describe_ours(self, provider_id: ProviderId) -> Mapping[str, Any] | None:
        """Return the instance's description; None if there is none. Raises PermanentError if it is not ours."""
        instance_data = await self._describe(instance_id_of(provider_id))
        if instance_data is None:
            return None
        if (owner := read_tags(instance_data).get(INSTALLATION)) != self._installation:
            raise PermanentError(f"{provider_id} carries the tag of {owner!r}, not ours: left untouched")
        attributed = await self._fleets.with_action_ids([instance_data], self._now())
        return attributed[0] if attributed else instance_data

    async def _describe(self, instance_id: str) -> Mapping[str, Any] | None:
        # By filter rather than by id, so that an unknown id is no error. A filter by id takes no page size.
        return next(iter(await self._client.instances("instance-id", [instance_id])), None)

    async def _zones(self) -> Mapping[str, str]:
        """Return the first subnet of each zone, in the order of the settings."""
        now = self._now()
        if self._subnets_read_at is None or now - self._subnets_read_at >= SUBNETS_KEPT:
            zones: dict[str, str] = {}
            filters = [{"Name": "subnet-id", "Values": list(self._options.subnets)}]
            subnets = await self._client.items("DescribeSubnets", "Subnets", Filters=filters)
            zone_of_subnet = {subnet["SubnetId"]: subnet["AvailabilityZone"] for subnet in subnets}
            self._zone_ids = {subnet["AvailabilityZone"]: subnet.get("AvailabilityZoneId", "") for subnet in subnets}
            missing = [subnet for subnet in self._options.subnets if subnet not in zone_of_subnet]
            if missing:
                raise TransientError(
                    f"DescribeSubnets: {', '.join(missing)} not found in {self._client.region}; check aws.subnets and"
                    " aws.region"
                )
            for subnet in self._options.subnets:
                zones.setdefault(zone_of_subnet[subnet], subnet)
            self._subnets, self._subnets_read_at = zones, now
        return self._subnets
