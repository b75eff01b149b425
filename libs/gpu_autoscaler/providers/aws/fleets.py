"""EC2 Fleets of type `instant`: several instances of one offer in one call, all of them or none (MinTargetCapacity).

A fleet tags all its instances alike, so each carries the names of all orders, and learns its own by CreateTags: the
sorted instances are the sorted orders'. Lost in between, whoever looks next reckons the same. A fleet that came back
empty has used its token up and says the same again; the next plan's orders are another transaction.

An instant fleet asks only once: what it made is ended by name, and the fleet is not deleted, as that would end it all.
Sources: EC2 API Reference, "CreateFleet", "SpotOptionsRequest"; EC2 User Guide, "Configure an EC2 Fleet of type
instant" and "Tag restrictions"; karpenter-provider-aws, pkg/providers/instance (read 2026-11-22).
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from gpu_autoscaler.model.errors import AutoscalerError, PermanentError, TransientError
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.labels import ACTION_ID, INSTALLATION, POOL
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.providers.aws.calls import AwsClient
from gpu_autoscaler.providers.aws.translate import (
    ORDERS,
    PRICE,
    TRANSACTION,
    failure,
    instance_of,
    provider_id_of,
    read_tags,
)
from gpu_autoscaler.providers.protocol import Instance, LaunchRefused, Order, instance_from_order, verify_order
from gpu_autoscaler.providers.tokens import idempotency_token

CREATE = "CreateFleet"
TAG_LENGTH_MAX = 256
ORDER_TAGS_MAX = 40  # of the fifty that an instance may have
FILTER_COUNT_MAX = 200  # values of a filter (EC2 API Reference, "DescribeInstances", `Filters`)
ASKED_AGAIN_SECONDS = 2.0
# A member that shows so long after its launch shows late no more: what is not there then has ended, and is forgotten.
SHOWN_LATE = timedelta(minutes=10)

Told = Mapping[str, Any]  # an instance, as EC2 describes it


class AwsFleets:
    """Fleets of one installation."""

    def __init__(self, calls: AwsClient, installation: str) -> None:
        self._calls = calls
        self._installation = installation

    async def launch(
        self, transaction: ActionId, orders: Sequence[Order], request: Mapping[str, object], now: datetime
    ) -> list[Instance]:
        """Return an instance for each order, tagged. `request` is what the settings make of the orders' offer. Raises
        LaunchRefused, PermanentError, TransientError."""
        token = idempotency_token(self._installation, ActionId(f"together/{transaction}"))
        names = sorted(order.action_id for order in orders)
        ids = await self._made(token, orders, {**request, **_tags(token, orders, names)})
        if ids is None:  # maybe it has made more or less than this: what it made knows its orders
            members = await self._members(token, now)
        else:
            found = await self._described("instance-id", ids)
            members = {
                instance_id: (found.get(instance_id), name) for instance_id, name in zip(ids, names, strict=True)
            }
        await asyncio.gather(
            *(
                self._calls.call("CreateTags", Resources=[instance_id], Tags=[{"Key": ACTION_ID, "Value": name}])
                for instance_id, (told, name) in members.items()
                if told is None or ACTION_ID not in read_tags(told)
            )
        )
        by_name = {name: (instance_id, told) for instance_id, (told, name) in members.items()}
        if missing := sorted({order.action_id for order in orders} - by_name.keys()):
            raise PermanentError(f"{CREATE}: transaction {transaction} made {', '.join(by_name)}, not {missing[0]}")
        return [_seen(order, *by_name[order.action_id], now) for order in orders]

    async def attributed(self, found: Iterable[Told], now: datetime) -> list[Told]:
        """Return what was found with the order of each instance, also where its tag was never written.

        Members of a fleet that shows in part only are left out while it is young: which of them is whose is not known.
        """
        listed = list(found)
        nameless = {tags[TRANSACTION] for tags in map(read_tags, listed) if _is_nameless(tags)}
        known = {token: _named(await self._of(token), now) for token in sorted(nameless)}
        seen: list[Told] = []
        for told in listed:
            tags = read_tags(told)
            name = known[tags[TRANSACTION]].get(told["InstanceId"]) if _is_nameless(tags) else None
            if not _is_nameless(tags):
                seen.append(told)
            elif name is not None:
                seen.append({**told, "Tags": [*told["Tags"], {"Key": ACTION_ID, "Value": name}]})
        return seen

    async def _made(self, token: str, orders: Sequence[Order], request: Mapping[str, object]) -> list[str] | None:
        """Return the sorted ids of what the call made; None where that is not told, as the token was used before."""
        try:
            answer = await self._calls.call(CREATE, ClientToken=token, **request)
        except PermanentError as exc:
            if _code_of(exc).startswith("IdempotentParameterMismatch"):
                return None
            raise
        ids = sorted(
            instance_id for instance in answer.get("Instances", ()) for instance_id in instance.get("InstanceIds", ())
        )
        if len(ids) == len(orders):
            return ids
        if not ids and not answer.get("Errors"):
            return None
        if ids:  # against MinTargetCapacity: none of it is kept, as part of a gang is of no use
            await self._calls.call("TerminateInstances", InstanceIds=ids)
        raise _refusal(answer.get("Errors", ()), len(ids), orders)

    async def _members(self, token: str, now: datetime) -> dict[str, tuple[Told | None, str]]:
        found = await self._of(token)
        named = _named(found, now)
        if not found or _is_in_part(found, now):
            raise TransientError(
                f"{CREATE}: the fleet of {token} does not show whole yet; asked again",
                retry_after_seconds=ASKED_AGAIN_SECONDS,
            )
        return {told["InstanceId"]: (told, named[told["InstanceId"]]) for told in found}

    async def _of(self, token: str) -> list[Told]:
        return list((await self._described(f"tag:{TRANSACTION}", [token])).values())

    async def _described(self, by: str, values: Sequence[str]) -> dict[str, Told]:
        ours = {"Name": f"tag:{INSTALLATION}", "Values": [self._installation]}
        return {
            instance["InstanceId"]: instance
            for start in range(0, len(values), FILTER_COUNT_MAX)
            async for page in self._calls.pages(
                "DescribeInstances", Filters=[{"Name": by, "Values": values[start : start + FILTER_COUNT_MAX]}, ours]
            )
            for reservation in page["Reservations"]
            for instance in reservation["Instances"]
        }


def fleet_request(
    template: Mapping[str, str], offer: Offer, count: int, *, subnet: str, ceiling: str | None, placed_in: str | None
) -> dict[str, object]:
    """Return what makes so many instances of the offer or none; tags and token are the transaction's.

    `ceiling` is US dollars an hour, of spot; without one EC2's own holds, the on-demand price.
    """
    override: dict[str, object] = {"InstanceType": offer.instance_type, "SubnetId": subnet}
    if placed_in is not None:
        override["Placement"] = {"GroupName": placed_in}
    whole: dict[str, object] = {"SingleInstanceType": True, "SingleAvailabilityZone": True, "MinTargetCapacity": count}
    is_spot = offer.capacity_type is CapacityType.SPOT
    if is_spot:
        whole["InstanceInterruptionBehavior"] = "terminate"
        if ceiling is not None:
            override["MaxPrice"] = ceiling
    made_from = {**template, "Version": "$Default"}
    return {
        "Type": "instant",
        "LaunchTemplateConfigs": [{"LaunchTemplateSpecification": made_from, "Overrides": [override]}],
        "TargetCapacitySpecification": {
            "TotalTargetCapacity": count,
            "DefaultTargetCapacityType": "spot" if is_spot else "on-demand",
        },
        "SpotOptions" if is_spot else "OnDemandOptions": whole,
    }


def _tags(token: str, orders: Sequence[Order], names: Sequence[str]) -> dict[str, object]:
    """Return what all instances of a fleet carry: whose they are, and the names of all orders."""
    first, per_tag = orders[0], TAG_LENGTH_MAX // (max(map(len, names)) + 1)
    if len(names) > per_tag * ORDER_TAGS_MAX:
        raise LaunchRefused(
            f"{CREATE}: tags hold the names of {per_tag * ORDER_TAGS_MAX} orders, and {len(names)} are made at once; "
            "leave out aws.fleets for gangs of so many nodes",
            code="TooManyTogether",
            kind="configuration",
            scope="offer",
        )
    tags = {
        INSTALLATION: first.installation,
        POOL: first.pool,
        TRANSACTION: token,
        "Name": f"gpu-autoscaler {first.pool}",
        **{
            f"{ORDERS}{start // per_tag}": ",".join(names[start : start + per_tag])
            for start in range(0, len(names), per_tag)
        },
    }
    if first.offer.price_micro_usd_per_hour is not None:
        tags[PRICE] = str(first.offer.price_micro_usd_per_hour)
    listed = [{"Key": key, "Value": value} for key, value in sorted(tags.items())]
    return {"TagSpecifications": [{"ResourceType": kind, "Tags": listed} for kind in ("instance", "volume")]}


def _named(members: Sequence[Told], now: datetime) -> dict[str, str]:
    """Return the order of each instance of one fleet, by id. Of a young fleet that shows in part: only what is told."""
    tags = {told["InstanceId"]: read_tags(told) for told in members}
    named = {instance_id: each[ACTION_ID] for instance_id, each in tags.items() if ACTION_ID in each}
    orders = sorted({name for tag in tags.values() for name in _orders_in(tag)})
    if _is_in_part(members, now):
        return named
    nameless = sorted(instance_id for instance_id in tags if instance_id not in named)
    free = [name for name in orders if name not in named.values()]
    return named | dict(zip(nameless, free, strict=False))


def _is_in_part(members: Sequence[Told], now: datetime) -> bool:
    """True for a young fleet of which some do not show yet."""
    names = {name for told in members for name in _orders_in(read_tags(told))}
    is_young = any(now - told["LaunchTime"].astimezone(UTC) < SHOWN_LATE for told in members)
    return len(members) < len(names) and is_young


def _orders_in(tags: Mapping[str, str]) -> list[str]:
    return [name for key, text in tags.items() if key.startswith(ORDERS) for name in text.split(",")]


def _is_nameless(tags: Mapping[str, str]) -> bool:
    return TRANSACTION in tags and ACTION_ID not in tags


def _seen(order: Order, instance_id: str, told: Told | None, now: datetime) -> Instance:
    if told is None:  # made, and not shown yet
        return instance_from_order(order, provider_id_of(order.offer.zone, instance_id), launched_at=now)
    tags = {**read_tags(told), ACTION_ID: order.action_id}
    whole = {**told, "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}
    return verify_order(instance_of(whole, now=now), order)


def _refusal(errors: Sequence[Mapping[str, Any]], made_count: int, orders: Sequence[Order]) -> AutoscalerError:
    """Return why the fleet is empty. Its token is used up, so that no word of it passes by asking again."""
    told = errors[0] if errors else {}  # none: a fleet that kept its word in part
    code = str(told.get("ErrorCode", "UnfulfillableCapacity"))
    offer = f"{len(orders)} of {orders[0].offer.key}" + (f" ({made_count} were made, and ended)" if made_count else "")
    message = f"{offer}: {told.get('ErrorMessage', 'none was made, and no reason told')}"
    error = failure(CREATE, code, message, of_launch=True)
    if isinstance(error, LaunchRefused):
        return error
    wait_seconds = error.retry_after_seconds if isinstance(error, TransientError) else None
    return LaunchRefused(str(error), code=code, scope="offer", retry_after_seconds=wait_seconds)


def _code_of(exc: PermanentError) -> str:
    return str(getattr(exc.__cause__, "response", {}).get("Error", {}).get("Code", ""))
