"""Auto Scaling groups without LaunchInstances, sized by desired capacity (`providers/desired_capacity.py`).

SetDesiredCapacity takes no token: the number follows from live members and from the pending orders in the group's tags,
so a retry sets the same one. It is lowered only for instances that could not be launched; others end by id, and new
ones must be protected from scale-in. Sources: EC2 Auto Scaling API Reference, "SetDesiredCapacity",
"DescribeScalingActivities"; EC2 Auto Scaling User Guide, "Use instance scale-in protection" (read 2026-11-22).
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn
from urllib.parse import quote, unquote

import msgspec

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.labels import ACTION_ID, PREFIX
from gpu_autoscaler.providers.aws.client import AwsClient
from gpu_autoscaler.providers.aws.translate import code_in_message, failure, read_tags, tags_for
from gpu_autoscaler.providers.desired_capacity import Ledger, decode_ledger
from gpu_autoscaler.providers.protocol import LaunchRefused, Order, misconfigured

LEDGER_TAG = f"{PREFIX}/orders-"  # followed by a number
TAG_LENGTH_MAX = 256  # of a value; 50 tags per group (EC2 Auto Scaling User Guide, "Tag groups and instances")
LEDGER_TAGS_MAX = 40
SET = "SetDesiredCapacity"
RETRY_SECONDS = 2.0
# An order is retried every few seconds until its boot deadline, and abandoned then. Source: our own.
ABANDONED_SECONDS = 3600.0
ACTIVITIES_COUNT = 100  # newest activities; the largest page
_LEAVING = ("Terminating", "Terminated", "Detach")


class _GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a group at one moment."""

    group: Mapping[str, Any]
    alive: frozenset[str]  # members not on their way out
    unseen_count: int  # of them not listed by EC2 yet; they will be assigned to pending orders
    ledger: Ledger  # with new members assigned
    instance_of: Mapping[ActionId, str]  # of orders that were pending, and of the requested one

    @property
    def desired_capacity(self) -> int:
        return int(self.group["DesiredCapacity"])

    def required_capacity(self, ledger: Ledger) -> int:
        return len(self.alive) + max(0, len(ledger.pending) - self.unseen_count)


class DesiredCapacityGroups:
    """Launches from an installation's groups by desired capacity. One process at a time writes to a group."""

    def __init__(self, client: AwsClient, installation: str) -> None:
        self._client = client
        self._installation = installation
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def launch(self, order: Order, name: str, now: datetime) -> str:
        """Return the id of the order's instance, tagged. Raises LaunchRefused, PermanentError, TransientError."""
        async with self._locks[name]:
            state = await self._read_state(name, order.action_id, now)
            instance_id = state.instance_of.get(order.action_id)
            if instance_id is not None:
                return instance_id
            if not state.ledger.is_pending(order.action_id):
                state = await self._write_order(order, name, state, now)
            if state.desired_capacity < state.required_capacity(state.ledger):
                await self._raise_number(order, name, state.required_capacity(state.ledger), now)
            state = await self._read_state(name, order.action_id, now)
            instance_id = state.instance_of.get(order.action_id)
            if instance_id is None:
                await self._check_failures(order, name, state, now)
                raise TransientError(
                    f"{SET}: instance of order {order.action_id} not listed yet in group {name}; retried",
                    retry_after_seconds=RETRY_SECONDS,
                )
            return instance_id

    async def _write_order(self, order: Order, name: str, state: _GroupState, now: datetime) -> _GroupState:
        """Record the order in the group before capacity is requested."""
        max_size = int(state.group["MaxSize"])
        if state.required_capacity(state.ledger) + 1 > max_size:
            raise misconfigured(
                f"launch refused: group {name} is at its MaxSize of {max_size}; raise MaxSize, or lower the policy's"
                " limits",
                "MaxSize",
            )
        price = order.offer.price_micro_usd_per_hour
        note = f"{'' if price is None else price}@{int(now.timestamp())}@{quote(order.pool, safe='')}"
        ledger = state.ledger.with_order(order.action_id, note)
        await self._write(name, state, ledger)
        return msgspec.structs.replace(state, ledger=ledger)

    async def _raise_number(self, order: Order, name: str, count: int, now: datetime) -> None:
        try:
            await self._client.call(SET, AutoScalingGroupName=name, DesiredCapacity=count, HonorCooldown=False)
        except LaunchRefused as refusal:
            await self._cancel_order(order, name, refusal, now)

    async def _check_failures(self, order: Order, name: str, state: _GroupState, now: datetime) -> None:
        """Cancel the order if the group failed to launch an instance since. Raises as `_cancel_order`."""
        since = next(_parse_note(note)[1] for action_id, note in state.ledger.pending if action_id == order.action_id)
        answer = await self._client.call(
            "DescribeScalingActivities", AutoScalingGroupName=name, MaxRecords=ACTIVITIES_COUNT
        )
        for activity in answer["Activities"]:
            if activity["StatusCode"] == "Failed" and activity["StartTime"].timestamp() >= since:
                status_message = activity.get("StatusMessage", "")
                code = code_in_message(status_message)
                error = failure("DescribeScalingActivities", code, f"{name}: {status_message}", of_launch=True)
                if not isinstance(error, LaunchRefused):
                    raise error
                await self._cancel_order(order, name, error, now)

    async def _cancel_order(self, order: Order, name: str, refusal: LaunchRefused, now: datetime) -> NoReturn:
        """Cancel the order, verify it, and raise the refusal. An instance that was launched meanwhile is kept."""
        state = await self._read_state(name, order.action_id, now)
        if order.action_id in state.instance_of:
            raise TransientError(f"{SET}: group {name} launched the instance anyway: {refusal}; retried")
        # Lower the capacity by this order only: no live instance may be terminated for it.
        ledger = state.ledger.without_order(order.action_id)
        count = max(state.desired_capacity - 1, state.required_capacity(ledger))
        if count < state.desired_capacity:
            await self._client.call(SET, AutoScalingGroupName=name, DesiredCapacity=count, HonorCooldown=False)
        await self._write(name, state, ledger)
        after = await self._read_state(name, order.action_id, now)
        if after.desired_capacity > count or after.ledger.is_pending(order.action_id):
            raise TransientError(f"{SET}: group {name} still has desired capacity {after.desired_capacity}; retried")
        raise refusal

    async def _read_state(self, name: str, action_id: ActionId, now: datetime) -> _GroupState:
        """Return the group's state; new members get the tags of their orders, and the ledger is written."""
        groups = await self._client.items(
            "DescribeAutoScalingGroups", "AutoScalingGroups", AutoScalingGroupNames=[name]
        )
        if not groups:
            raise PermanentError(f"group {name} not found in {self._client.region}; check aws.desired_capacity_groups")
        group = groups[0]
        alive = {
            instance["InstanceId"]
            for instance in group.get("Instances", ())
            if not instance["LifecycleState"].startswith(_LEAVING)
        }
        stored = _without_abandoned(decode_ledger(_texts(group)), action_id, now)
        orders = sorted({action_id, *(pending_id for pending_id, _ in stored.pending)})
        instances = await self._client.instances_of(self._installation, f"tag:{ACTION_ID}", orders)
        instance_of = {ActionId(read_tags(data)[ACTION_ID]): instance_id for instance_id, data in instances.items()}
        members = await self._client.instances_of(None, "instance-id", sorted(alive))
        known = {member: (ActionId(read_tags(members[member]).get(ACTION_ID, "")), "") for member in members}
        assigned = {member: order for member, order in known.items() if order[0]}
        for ordered_id in instance_of:  # launched, and not removed from the ledger yet
            stored = stored.without_order(ordered_id)
        shown = sorted(members, key=lambda member: (members[member]["LaunchTime"], member))
        ledger = msgspec.structs.replace(stored, assigned=assigned).with_members(shown)
        foreign_members = ledger.foreign_members | (stored.foreign_members & alive)
        ledger = msgspec.structs.replace(ledger, foreign_members=foreign_members)
        newly_assigned = {member: order for member, order in ledger.assigned.items() if member not in assigned}
        unseen_count = len(alive - members.keys())
        state = _GroupState(
            group=group, alive=frozenset(alive), unseen_count=unseen_count, ledger=ledger, instance_of=instance_of
        )
        for instance_id, (ordered_id, note) in newly_assigned.items():
            price, _, pool = _parse_note(note)
            tags = tags_for(self._installation, ordered_id, pool, price)
            await self._client.call("CreateTags", Resources=[instance_id], Tags=tags)
            instance_of[ordered_id] = instance_id
        if newly_assigned:
            await self._write(name, state, ledger)
        return state

    async def _write(self, name: str, state: _GroupState, ledger: Ledger) -> None:
        """Write the ledger to the group's tags. Assigned instances carry their orders themselves."""
        bare = msgspec.structs.replace(ledger, assigned={}, foreign_members=ledger.foreign_members & state.alive)
        texts = bare.encode(TAG_LENGTH_MAX, LEDGER_TAGS_MAX, ())
        if texts is None:
            raise misconfigured(
                f"CreateOrUpdateTags: tags of group {name} cannot hold another order; buy by aws.groups", "LedgerFull"
            )
        before = {tag["Key"] for tag in state.group.get("Tags", ()) if tag["Key"].startswith(LEDGER_TAG)}
        tags = [_tag(name, f"{LEDGER_TAG}{number}", text) for number, text in enumerate(texts)]
        if tags:
            await self._client.call("CreateOrUpdateTags", Tags=tags)
        left = sorted(before - {str(tag["Key"]) for tag in tags})
        if left:
            await self._client.call("DeleteTags", Tags=[_tag(name, key) for key in left])


def _without_abandoned(ledger: Ledger, requested_id: ActionId, now: datetime) -> Ledger:
    """Return the ledger without abandoned orders: their capacity serves the next order."""
    for action_id, note in ledger.pending:
        if action_id != requested_id and now.timestamp() - _parse_note(note)[1] > ABANDONED_SECONDS:
            ledger = ledger.without_order(action_id)
    return ledger


def _tag(name: str, key: str, value: str | None = None) -> dict[str, object]:
    tag: dict[str, object] = {"ResourceId": name, "ResourceType": "auto-scaling-group", "Key": key}
    return tag if value is None else tag | {"Value": value, "PropagateAtLaunch": False}


def _texts(group: Mapping[str, Any]) -> list[str]:
    tags = {tag["Key"]: tag["Value"] for tag in group.get("Tags", ()) if tag["Key"].startswith(LEDGER_TAG)}
    return [tags[key] for key in sorted(tags)]


def _parse_note(note: str) -> tuple[int | None, int, str]:
    """Return an order's price, time in epoch seconds, and pool."""
    price, _, rest = note.partition("@")
    second, _, pool = rest.partition("@")
    return int(price) if price else None, int(second), unquote(pool)
