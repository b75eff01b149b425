"""EC2 Fleets of type `instant`: several instances of one offer in one call, all or none (MinTargetCapacity).

A fleet tags all instances with the action ids of all orders; sorted instances correspond to sorted orders, so any
reader computes the same assignment. An empty fleet has used up its token. Instances end by id: deleting the fleet would
end all. Sources: EC2 API Reference, "CreateFleet", "SpotOptionsRequest"; EC2 User Guide, "Configure an EC2 Fleet of
type instant" and "Tag restrictions"; karpenter-provider-aws, pkg/providers/instance (read 2026-11-22).
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from gpu_autoscaler.model.errors import AutoscalerError, PermanentError, TransientError
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.labels import ACTION_ID, INSTALLATION, POOL
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.providers.aws.client import AwsClient
from gpu_autoscaler.providers.aws.translate import (
    ORDERS,
    PRICE,
    TRANSACTION,
    code_of,
    failure,
    instance_of,
    provider_id_of,
    read_tags,
)
from gpu_autoscaler.providers.protocol import (
    Instance,
    LaunchRefused,
    Order,
    instance_from_order,
    misconfigured,
    verify_order,
)
from gpu_autoscaler.providers.tokens import idempotency_token

CREATE = "CreateFleet"
TAG_LENGTH_MAX = 256
ORDER_TAGS_MAX = 40  # of the 50 tags of an instance
RETRY_SECONDS = 2.0
# A member not listed by then has ended and been forgotten.
LISTED_WITHIN = timedelta(minutes=10)

InstanceData = Mapping[str, Any]  # an instance as EC2 describes it


class AwsFleets:
    """Fleets of one installation."""

    def __init__(self, client: AwsClient, installation: str) -> None:
        self._client = client
        self._installation = installation

    async def launch(
        self, transaction: ActionId, orders: Sequence[Order], request: Mapping[str, object], now: datetime
    ) -> list[Instance]:
        """Return an instance for each order, tagged. `request` follows from the settings and the orders' offer. Raises
        LaunchRefused, PermanentError, TransientError."""
        token = idempotency_token(self._installation, ActionId(f"together/{transaction}"))
        action_ids = sorted(order.action_id for order in orders)
        ids = await self._create(token, orders, {**request, **_tags(token, orders, action_ids)})
        if ids is None:  # it may have launched more or fewer: its instances carry their orders
            members = await self._members(token, now)
        else:
            described = await self._client.instances_of(self._installation, "instance-id", ids)
            members = {
                instance_id: (described.get(instance_id), action_id)
                for instance_id, action_id in zip(ids, action_ids, strict=True)
            }
        written = await asyncio.gather(
            *(
                self._client.call("CreateTags", Resources=[instance_id], Tags=[{"Key": ACTION_ID, "Value": action_id}])
                for instance_id, (instance_data, action_id) in members.items()
                if instance_data is None or ACTION_ID not in read_tags(instance_data)
            ),
            return_exceptions=True,  # no write may still run when the orders are retried
        )
        for answer in written:
            if isinstance(answer, BaseException):
                raise answer
        by_action_id = {
            action_id: (instance_id, instance_data) for instance_id, (instance_data, action_id) in members.items()
        }
        if missing := sorted({order.action_id for order in orders} - by_action_id.keys()):
            raise PermanentError(
                f"{CREATE}: transaction {transaction} launched {', '.join(by_action_id)}, not {missing[0]}"
            )
        return [_instance_for(order, *by_action_id[order.action_id], now) for order in orders]

    async def with_action_ids(self, instances: Iterable[InstanceData], now: datetime) -> list[InstanceData]:
        """Return the instances with their action ids, even where the tag was never written. Members of a young,
        partially listed fleet are left out: their orders are unknown."""
        listed = list(instances)
        transactions = {tags[TRANSACTION] for tags in map(read_tags, listed) if _lacks_action_id(tags)}
        known = {token: _action_ids(await self._by_transaction(token), now) for token in sorted(transactions)}
        attributed: list[InstanceData] = []
        for instance_data in listed:
            tags = read_tags(instance_data)
            action_id = known[tags[TRANSACTION]].get(instance_data["InstanceId"]) if _lacks_action_id(tags) else None
            if not _lacks_action_id(tags):
                attributed.append(instance_data)
            elif action_id is not None:
                attributed.append(
                    {**instance_data, "Tags": [*instance_data["Tags"], {"Key": ACTION_ID, "Value": action_id}]}
                )
        return attributed

    async def _create(self, token: str, orders: Sequence[Order], request: Mapping[str, object]) -> list[str] | None:
        """Return the sorted ids of what the call launched; None if unknown, as the token was used before."""
        try:
            answer = await self._client.call(CREATE, ClientToken=token, **request)
        except PermanentError as exc:
            if code_of(exc).startswith("IdempotentParameterMismatch"):
                return None
            raise
        ids = sorted(
            instance_id for instance in answer.get("Instances", ()) for instance_id in instance.get("InstanceIds", ())
        )
        if len(ids) == len(orders):
            return ids
        if not ids and not answer.get("Errors"):
            return None
        if ids:  # despite MinTargetCapacity: terminate them, as part of a gang is of no use
            await self._client.call("TerminateInstances", InstanceIds=ids)
        raise _refusal(answer.get("Errors", ()), len(ids), orders)

    async def _members(self, token: str, now: datetime) -> dict[str, tuple[InstanceData | None, str]]:
        members = await self._by_transaction(token)
        action_ids = _action_ids(members, now)
        if not members or _is_partial(members, now):
            raise TransientError(
                f"{CREATE}: fleet {token} is not fully listed yet; retried", retry_after_seconds=RETRY_SECONDS
            )
        return {
            instance_data["InstanceId"]: (instance_data, action_ids[instance_data["InstanceId"]])
            for instance_data in members
        }

    async def _by_transaction(self, token: str) -> list[InstanceData]:
        return list((await self._client.instances_of(self._installation, f"tag:{TRANSACTION}", [token])).values())


def template_reference(template: str) -> dict[str, str]:
    """Return a launch template of the settings, an id or a name, in the form of requests."""
    return {"LaunchTemplateId" if template.startswith("lt-") else "LaunchTemplateName": template}


def fleet_request(
    template: Mapping[str, str], offer: Offer, count: int, *, subnet: str, ceiling: str | None, placed_in: str | None
) -> dict[str, object]:
    """Return a request for `count` instances of the offer or none, without tags and token. `ceiling`: US dollars per
    hour, for spot; None: EC2's own ceiling, the on-demand price."""
    override: dict[str, object] = {"InstanceType": offer.instance_type, "SubnetId": subnet}
    if placed_in is not None:
        override["Placement"] = {"GroupName": placed_in}
    market_options: dict[str, object] = {
        "SingleInstanceType": True,
        "SingleAvailabilityZone": True,
        "MinTargetCapacity": count,
    }
    is_spot = offer.capacity_type is CapacityType.SPOT
    if is_spot:
        market_options["InstanceInterruptionBehavior"] = "terminate"
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
        "SpotOptions" if is_spot else "OnDemandOptions": market_options,
    }


def _tags(token: str, orders: Sequence[Order], action_ids: Sequence[str]) -> dict[str, object]:
    """Return the tags of all instances of a fleet: owner, transaction and the action ids of all orders."""
    first, per_tag = orders[0], TAG_LENGTH_MAX // (max(map(len, action_ids)) + 1)
    if len(action_ids) > per_tag * ORDER_TAGS_MAX:
        raise misconfigured(
            f"{CREATE}: tags hold {per_tag * ORDER_TAGS_MAX} action ids, and the gang has {len(action_ids)} nodes;"
            " unset aws.fleets for gangs of this size",
            "GangTooLarge",
        )
    tags = {
        INSTALLATION: first.installation,
        POOL: first.pool,
        TRANSACTION: token,
        "Name": f"gpu-autoscaler {first.pool}",
        **{
            f"{ORDERS}{start // per_tag}": ",".join(action_ids[start : start + per_tag])
            for start in range(0, len(action_ids), per_tag)
        },
    }
    if first.offer.price_micro_usd_per_hour is not None:
        tags[PRICE] = str(first.offer.price_micro_usd_per_hour)
    listed = [{"Key": key, "Value": value} for key, value in sorted(tags.items())]
    return {"TagSpecifications": [{"ResourceType": kind, "Tags": listed} for kind in ("instance", "volume")]}


def _action_ids(members: Sequence[InstanceData], now: datetime) -> dict[str, str]:
    """Return the action id of each instance of a fleet; of a young, partially listed fleet only the tagged ones."""
    tags = {instance_data["InstanceId"]: read_tags(instance_data) for instance_data in members}
    tagged = {
        instance_id: instance_tags[ACTION_ID]
        for instance_id, instance_tags in tags.items()
        if ACTION_ID in instance_tags
    }
    orders = sorted({action_id for tag in tags.values() for action_id in _order_ids(tag)})
    if _is_partial(members, now):
        return tagged
    untagged = sorted(instance_id for instance_id in tags if instance_id not in tagged)
    free = [action_id for action_id in orders if action_id not in tagged.values()]
    return tagged | dict(zip(untagged, free, strict=False))


def _is_partial(members: Sequence[InstanceData], now: datetime) -> bool:
    """Return whether the fleet is young and some of its members are not listed yet."""
    action_ids = {action_id for instance_data in members for action_id in _order_ids(read_tags(instance_data))}
    is_young = any(now - instance_data["LaunchTime"].astimezone(UTC) < LISTED_WITHIN for instance_data in members)
    return len(members) < len(action_ids) and is_young


def _order_ids(tags: Mapping[str, str]) -> list[str]:
    return [action_id for key, text in tags.items() if key.startswith(ORDERS) for action_id in text.split(",")]


def _lacks_action_id(tags: Mapping[str, str]) -> bool:
    return TRANSACTION in tags and ACTION_ID not in tags


def _instance_for(order: Order, instance_id: str, instance_data: InstanceData | None, now: datetime) -> Instance:
    if instance_data is None:  # launched, and not listed yet
        return instance_from_order(order, provider_id_of(order.offer.zone, instance_id), launched_at=now)
    tags = {**read_tags(instance_data), ACTION_ID: order.action_id}
    tagged = {**instance_data, "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}
    return verify_order(instance_of(tagged, now=now), order)


def _refusal(errors: Sequence[Mapping[str, Any]], made_count: int, orders: Sequence[Order]) -> AutoscalerError:
    """Return why the fleet is empty. Its token is used up, so every error is final for the transaction."""
    error_data = errors[0] if errors else {}  # none: a fleet that launched fewer than requested
    code = str(error_data.get("ErrorCode", "UnfulfillableCapacity"))
    offer = f"{len(orders)} of {orders[0].offer.key}" + (
        f" ({made_count} launched and terminated)" if made_count else ""
    )
    message = f"{offer}: {error_data.get('ErrorMessage', 'none launched, no reason given')}"
    error = failure(CREATE, code, message, of_launch=True)
    if isinstance(error, LaunchRefused):
        return error
    wait_seconds = error.retry_after_seconds if isinstance(error, TransientError) else None
    return LaunchRefused(str(error), code=code, scope="offer", retry_after_seconds=wait_seconds)
