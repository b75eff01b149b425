"""Auto Scaling groups that allow no LaunchInstances, and are told a number: a count driver (`providers/counting.py`).

The number takes no token and is held against nothing that was read before, so it is never chosen: it follows from what
the group remembers. Its tags keep the orders that have no instance yet, and the instances that nobody ordered; an order
is written there first, and the number is then as many as live and stand. Told again, it is the same number. Whose an
instance is stands on itself, in the tags that all our instances have, written before its order is struck off.

The number is lowered for what the group could not make, and for nothing else: an instance goes by its own name. As AWS
chooses who goes where more live than are wanted, the group has to protect new instances from scale-in.
Sources: EC2 Auto Scaling API Reference, "SetDesiredCapacity", "DescribeScalingActivities"; EC2 Auto Scaling User Guide,
"Use instance scale-in protection" (read 2026-11-22).
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn
from urllib.parse import quote, unquote

import msgspec

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.labels import ACTION_ID, INSTALLATION, PREFIX
from gpu_autoscaler.providers.aws.calls import AwsClient
from gpu_autoscaler.providers.aws.translate import code_said, failure, read_tags, tags_for
from gpu_autoscaler.providers.counting import Ledger, decode_ledger
from gpu_autoscaler.providers.protocol import LaunchRefused, Order

LEDGER_TAG = f"{PREFIX}/orders-"  # with a number
TAG_LENGTH_MAX = 256  # of a value, and fifty tags a group (EC2 Auto Scaling User Guide, "Tag groups and instances")
LEDGER_TAGS_MAX = 40
SET = "SetDesiredCapacity"
ASKED_AGAIN_SECONDS = 2.0
# An order is asked for again every few seconds until its boot deadline, and given back then. Source: our own.
GIVEN_UP_SECONDS = 3600.0
ACTIVITIES_COUNT = 100  # the newest; the largest page
FILTER_COUNT_MAX = 200  # values of a filter (EC2 API Reference, "DescribeInstances", `Filters`)
_LEAVING = ("Terminating", "Terminated", "Detach")


class _Look(msgspec.Struct, frozen=True, kw_only=True):
    """A group at one moment."""

    told: Mapping[str, Any]
    alive: frozenset[str]  # members that do not leave
    unseen_count: int  # of them, that EC2 does not show yet: the orders that stand have these to come
    ledger: Ledger  # with newcomers given to their orders
    instance_of: Mapping[ActionId, str]  # of orders that stood, and of the one that is asked for

    @property
    def wanted(self) -> int:
        """The number that the group was told last."""
        return int(self.told["DesiredCapacity"])

    def due(self, ledger: Ledger) -> int:
        """Return the number that follows from what the group remembers."""
        return len(self.alive) + max(0, len(ledger.standing) - self.unseen_count)


class DesiredCapacityGroups:
    """Orders of one installation from groups that are told a number. One process at a time writes to a group."""

    def __init__(self, calls: AwsClient, installation: str) -> None:
        self._calls = calls
        self._installation = installation
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def launch(self, order: Order, name: str, now: datetime) -> str:
        """Return the id of the order's instance, tagged. Raises LaunchRefused, PermanentError, TransientError."""
        async with self._turns[name]:
            look = await self._look(name, order.action_id, now)
            made = look.instance_of.get(order.action_id)
            if made is not None:
                return made
            if not look.ledger.stands(order.action_id):
                look = await self._ordered(order, name, look, now)
            if look.wanted < look.due(look.ledger):
                await self._raise_number(order, name, look.due(look.ledger), now)
            look = await self._look(name, order.action_id, now)
            made = look.instance_of.get(order.action_id)
            if made is None:
                await self._see_failures(order, name, look, now)
                raise TransientError(
                    f"{SET}: the instance of {order.action_id} does not show yet in {name}; asked again",
                    retry_after_seconds=ASKED_AGAIN_SECONDS,
                )
            return made

    async def _ordered(self, order: Order, name: str, look: _Look, now: datetime) -> _Look:
        """Write the order down, before anything is asked for."""
        most = int(look.told["MaxSize"])
        if look.due(look.ledger) + 1 > most:
            raise LaunchRefused(
                f"{SET}: group {name} is at its MaxSize of {most}; raise it, or lower the limits of the policy",
                code="MaxSize",
                kind="configuration",
                scope="offer",
            )
        price = order.offer.price_micro_usd_per_hour
        note = f"{'' if price is None else price}@{int(now.timestamp())}@{quote(order.pool, safe='')}"
        ledger = look.ledger.ordered(order.action_id, note)
        await self._write(name, look, ledger)
        return msgspec.structs.replace(look, ledger=ledger)

    async def _raise_number(self, order: Order, name: str, count: int, now: datetime) -> None:
        try:
            await self._calls.call(SET, AutoScalingGroupName=name, DesiredCapacity=count, HonorCooldown=False)
        except LaunchRefused as refusal:
            await self._withdraw(order, name, refusal, now)

    async def _see_failures(self, order: Order, name: str, look: _Look, now: datetime) -> None:
        """Take the order back where the group has failed to make an instance since. Raises as `_withdraw`."""
        since = next(_noted(note)[1] for action_id, note in look.ledger.standing if action_id == order.action_id)
        answer = await self._calls.call(
            "DescribeScalingActivities", AutoScalingGroupName=name, MaxRecords=ACTIVITIES_COUNT
        )
        for activity in answer["Activities"]:
            if activity["StatusCode"] == "Failed" and activity["StartTime"].timestamp() >= since:
                said = activity.get("StatusMessage", "")
                error = failure("DescribeScalingActivities", code_said(said), f"{name}: {said}", of_launch=True)
                if not isinstance(error, LaunchRefused):
                    raise error
                await self._withdraw(order, name, error, now)

    async def _withdraw(self, order: Order, name: str, refusal: LaunchRefused, now: datetime) -> NoReturn:
        """Take the order back, see that it is, and raise the refusal. An instance that came meanwhile is kept."""
        look = await self._look(name, order.action_id, now)
        if order.action_id in look.instance_of:
            raise TransientError(f"{SET}: {name} made it all the same: {refusal}; looked at again")
        # Ours alone is taken back, and nobody who lives has to go for it.
        ledger = look.ledger.withdrawn(order.action_id)
        count = max(look.wanted - 1, look.due(ledger))
        if count < look.wanted:
            await self._calls.call(SET, AutoScalingGroupName=name, DesiredCapacity=count, HonorCooldown=False)
        await self._write(name, look, ledger)
        after = await self._look(name, order.action_id, now)
        if after.wanted > count or after.ledger.stands(order.action_id):
            raise TransientError(f"{SET}: {name} still wants {after.wanted} instances; asked again")
        raise refusal

    async def _look(self, name: str, action_id: ActionId, now: datetime) -> _Look:
        """Return the group; newcomers carry the tags of the orders that they are given to, and it is written down."""
        groups = [
            group
            async for page in self._calls.pages("DescribeAutoScalingGroups", AutoScalingGroupNames=[name])
            for group in page["AutoScalingGroups"]
        ]
        if not groups:
            raise PermanentError(f"there is no group {name} in {self._calls.region}; see aws.desired_capacity_groups")
        told = groups[0]
        alive = {
            instance["InstanceId"]
            for instance in told.get("Instances", ())
            if not instance["LifecycleState"].startswith(_LEAVING)
        }
        stored = _of_use(decode_ledger(_texts(told)), action_id, now)
        orders = sorted({action_id, *(one for one, _ in stored.standing)})
        found = await self._instances(f"tag:{ACTION_ID}", orders, {INSTALLATION: self._installation})
        instance_of = {ActionId(read_tags(one)[ACTION_ID]): instance_id for instance_id, one in found.items()}
        members = await self._instances("instance-id", sorted(alive))
        known = {member: (ActionId(read_tags(members[member]).get(ACTION_ID, "")), "") for member in members}
        named = {one: order for one, order in known.items() if order[0]}
        for one in instance_of:  # made, and not struck off yet
            stored = stored.withdrawn(one)
        shown = sorted(members, key=lambda member: (members[member]["LaunchTime"], member))
        ledger = msgspec.structs.replace(stored, named=named).seen(shown)
        ledger = msgspec.structs.replace(ledger, strangers=ledger.strangers | (stored.strangers & alive))
        given = {one: order for one, order in ledger.named.items() if one not in named}
        unseen_count = len(alive - members.keys())
        look = _Look(
            told=told,
            alive=frozenset(alive),
            unseen_count=unseen_count,
            ledger=ledger,
            instance_of=instance_of,
        )
        for instance_id, (ordered_id, note) in given.items():
            price, _, pool = _noted(note)
            tags = tags_for(self._installation, ordered_id, pool, price)
            await self._calls.call("CreateTags", Resources=[instance_id], Tags=tags)
            instance_of[ordered_id] = instance_id
        if given:
            await self._write(name, look, ledger)
        return look

    async def _instances(
        self, by: str, values: Sequence[str], tags: Mapping[str, str] | None = None
    ) -> dict[str, Mapping[str, Any]]:
        tagged = [{"Name": f"tag:{key}", "Values": [value]} for key, value in (tags or {}).items()]
        return {
            instance["InstanceId"]: instance
            for start in range(0, len(values), FILTER_COUNT_MAX)
            async for page in self._calls.pages(
                "DescribeInstances", Filters=[{"Name": by, "Values": values[start : start + FILTER_COUNT_MAX]}, *tagged]
            )
            for reservation in page["Reservations"]
            for instance in reservation["Instances"]
        }

    async def _write(self, name: str, look: _Look, ledger: Ledger) -> None:
        """Have the group remember it. The instances that were ordered remember themselves."""
        bare = msgspec.structs.replace(ledger, named={}, strangers=ledger.strangers & look.alive)
        texts = bare.texts(TAG_LENGTH_MAX, LEDGER_TAGS_MAX, ())
        if texts is None:
            raise LaunchRefused(
                f"CreateOrUpdateTags: the tags of {name} hold no more orders and strangers; buy by aws.groups",
                code="LedgerFull",
                kind="configuration",
                scope="offer",
            )
        before = {tag["Key"] for tag in look.told.get("Tags", ()) if tag["Key"].startswith(LEDGER_TAG)}
        tags = [_tag(name, f"{LEDGER_TAG}{number}", text) for number, text in enumerate(texts)]
        if tags:
            await self._calls.call("CreateOrUpdateTags", Tags=tags)
        left = sorted(before - {str(tag["Key"]) for tag in tags})
        if left:
            await self._calls.call("DeleteTags", Tags=[_tag(name, key) for key in left])


def _of_use(ledger: Ledger, asked: ActionId, now: datetime) -> Ledger:
    """Return it without orders that nobody asks for any more: what was told for them serves the next one."""
    for action_id, note in ledger.standing:
        if action_id != asked and now.timestamp() - _noted(note)[1] > GIVEN_UP_SECONDS:
            ledger = ledger.withdrawn(action_id)
    return ledger


def _tag(name: str, key: str, value: str | None = None) -> dict[str, object]:
    tag: dict[str, object] = {"ResourceId": name, "ResourceType": "auto-scaling-group", "Key": key}
    return tag if value is None else tag | {"Value": value, "PropagateAtLaunch": False}


def _texts(told: Mapping[str, Any]) -> list[str]:
    tags = {tag["Key"]: tag["Value"] for tag in told.get("Tags", ()) if tag["Key"].startswith(LEDGER_TAG)}
    return [tags[key] for key in sorted(tags)]


def _noted(note: str) -> tuple[int | None, int, str]:
    """Return an order's price, second and pool."""
    price, _, rest = note.partition("@")
    second, _, pool = rest.partition("@")
    return int(price) if price else None, int(second), unquote(pool)
