"""Machines of uniform scale sets, which are told a number: a count driver (`providers/counting.py`).

Tags of their machines cannot be changed (Azure/azure-sdk-for-go, report 18278), so whose a machine is stands on the
set: in tags that are written in the same call as the number, under the set's ETag. A machine goes by its own name
alone: where Azure is told a smaller number, it chooses who goes.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from gpu_autoscaler.cloudmeta.azure import provider_id_of
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.providers.azure.calls import AzureClient
from gpu_autoscaler.providers.azure.scale_sets import ScaleSet
from gpu_autoscaler.providers.azure.translate import (
    ACTION_TAG,
    INSTALLATION_TAG,
    LEDGER_TAG,
    PRICE_TAG,
    failure,
    instance_of,
    read_tags,
)
from gpu_autoscaler.providers.counting import Ledger, decode_ledger
from gpu_autoscaler.providers.protocol import Instance, LaunchRefused, Order, instance_from_order
from gpu_autoscaler.providers.rest import Answer
from gpu_autoscaler.providers.tokens import idempotency_token

TAG_LENGTH_MAX = 256  # of a value (Azure documentation, "Use tags to organize your Azure resources", limits)
LEDGER_TAGS_MAX = 40  # of the fifty that a resource has; some are other people's
MACHINES_MAX = 1000  # of one set (Azure documentation, "Considerations for using large scale sets", read 2026-11-22)
MACHINES_MAX_OF_ONE_PLACEMENT_GROUP = 100
FULL = frozenset({"LedgerFull", "ScaleSetFull"})
UPDATE = "VirtualMachineScaleSets_Update"
ASKED_AGAIN_SECONDS = 2.0
SHOWN_WITHIN = timedelta(minutes=10)  # our own limit, many times what Azure takes to list a machine that it has made
_SINCE = "@"  # in the note of an order that stands: price, and since when


class _Look(msgspec.Struct, frozen=True, kw_only=True):
    """A scale set and its machines at one moment."""

    told: Mapping[str, Any]
    members: Mapping[str, Mapping[str, Any]]  # by instance id, oldest first
    ledger: Ledger

    @property
    def capacity(self) -> int:
        """The number that the set was told last."""
        return int(self.told["sku"]["capacity"])

    @property
    def capacity_max(self) -> int:
        """The largest number that Azure takes for it."""
        is_single = self.told["properties"].get("singlePlacementGroup") is True
        return MACHINES_MAX_OF_ONE_PLACEMENT_GROUP if is_single else MACHINES_MAX

    @property
    def owner(self) -> str | None:
        """The installation that the set belongs to."""
        return read_tags(self.told).get(INSTALLATION_TAG)


class CountedSets:
    """Orders and ends of the machines of uniform scale sets."""

    def __init__(self, calls: AzureClient) -> None:
        self._calls = calls
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # one writer a set

    async def launch(self, order: Order, sets: Sequence[ScaleSet], now: datetime) -> Instance:
        """Return the order's machine, from that of its pool's sets that knows it, or the next one with room.

        Raises LaunchRefused, PermanentError, TransientError.
        """
        wanted = await self._places(order, sets)
        for one in wanted[:-1]:
            try:
                return await self._launch_from(order, one, now)
            except LaunchRefused as refused:
                if refused.code not in FULL:
                    raise
        return await self._launch_from(order, wanted[-1], now)

    async def _places(self, order: Order, sets: Sequence[ScaleSet]) -> list[ScaleSet]:
        """Return where the order may be met: the set that knows it alone, or all that sell it, in an order of its own.

        Whoever asks again asks the sets in the same order, and the orders of a pool spread over all of its sets.
        """
        if len(sets) == 1:
            return [*sets]
        for one, told in zip(sets, await asyncio.gather(*(self._told(one.name) for one in sets)), strict=True):
            ledger = decode_ledger(_ledger_texts(told or {}))
            if ledger.stands(order.action_id) or ledger.member_of(order.action_id) is not None:
                return [one]
        offer = order.offer
        selling = [one for one in sets if one.sells(offer.instance_type, offer.zone, offer.capacity_type)]
        return sorted(selling, key=lambda one: idempotency_token(one.name, order.action_id))

    async def _launch_from(self, order: Order, sold: ScaleSet, now: datetime) -> Instance:
        async with self._turns[sold.name]:
            look = await self._look(sold.name, now)
            if not self._is_known(look, order.action_id):
                look = await self._raised(order, sold, look, now)
            return await self._found(order, sold, look, now)

    async def end(self, name: str, instance_id: str) -> Answer:
        """Begin the end of this machine, and want one less. Raises PermanentError, TransientError."""
        body = {"instanceIds": [instance_id]}
        return await self._calls.call("VirtualMachineScaleSets_DeleteInstances", body=body, scale_set=name)

    async def instances(self, sold: ScaleSet, installation: str, now: datetime) -> list[Instance]:
        """Return the machines that this installation ordered, as far as the set belongs to it."""
        look = await self._look(sold.name, now)
        if look.owner != installation:
            return []
        return [_instance(look, sold, member, now) for member in look.members if member in look.ledger.named]

    async def owned(self, sold: ScaleSet, instance_id: str, now: datetime) -> tuple[str | None, Instance] | None:
        """Return whose the machine is, and the machine; no installation where nobody ordered it, None if it is not."""
        look = await self._look(sold.name, now)
        if instance_id not in look.members:
            return None
        owner = look.owner if instance_id in look.ledger.named else None
        return owner, _instance(look, sold, instance_id, now)

    @staticmethod
    def _is_known(look: _Look, action_id: ActionId) -> bool:
        return look.ledger.stands(action_id) or look.ledger.member_of(action_id) is not None

    async def _raised(self, order: Order, sold: ScaleSet, look: _Look, now: datetime) -> _Look:
        """Ask for one machine more, with the order written beside the number. Raises as `launch` does."""
        if look.owner != order.installation:
            raise LaunchRefused(
                f"{UPDATE}: scale set {sold.name} carries the tag of installation {look.owner!r}, not ours;"
                f" tag it {INSTALLATION_TAG}, or name another in azure.scale_sets",
                code="ScaleSetOfOthers",
                kind="configuration",
                scope="offer",
            )
        if look.capacity >= look.capacity_max:
            raise LaunchRefused(
                f"{UPDATE}: scale set {sold.name} has {look.capacity} machines, and Azure lets it have no more;"
                f" give pool {order.pool} another in azure.scale_sets",
                code="ScaleSetFull",
                kind="capacity",
                scope="offer",
            )
        price = order.offer.price_micro_usd_per_hour
        note = f"{'' if price is None else price}{_SINCE}{int(now.timestamp())}"
        began = await self._written(sold.name, look, look.ledger.ordered(order.action_id, note), look.capacity + 1)
        if began.status == 412:  # changed by somebody since it was read: read again, and tried once more
            look = await self._look(sold.name, now)
            began = await self._written(sold.name, look, look.ledger.ordered(order.action_id, note), look.capacity + 1)
        self._calls.seen(UPDATE, began)
        failed = await self._calls.failure_of(began)
        if failed is not None:
            await self._withdraw(order.action_id, sold.name, failed, now)
        return await self._look(sold.name, now)

    async def _found(self, order: Order, sold: ScaleSet, look: _Look, now: datetime) -> Instance:
        """Return the machine that the order has by now, written down as its own. Raises as `launch` does."""
        member = look.ledger.member_of(order.action_id)
        if member is None:
            if look.told["properties"].get("provisioningState") == "Failed":
                message = f"{sold.name} could not be enlarged; its last operation failed"
                await self._withdraw(order.action_id, sold.name, ("AllocationFailed", message), now)
            raise TransientError(
                f"{UPDATE}: the machine of {order.action_id} does not show yet in {sold.name}; asked again",
                retry_after_seconds=ASKED_AGAIN_SECONDS,
            )
        if look.ledger != decode_ledger(_ledger_texts(look.told)):
            self._calls.seen(UPDATE, await self._written(sold.name, look, look.ledger, None))
        if member not in look.members:
            resource_id = self._calls.id_of("virtualMachineScaleSets", f"{sold.name}/virtualMachines/{member}")
            return instance_from_order(order, provider_id_of(resource_id), launched_at=now, state="terminated")
        return _instance(look, sold, member, now)

    async def _withdraw(self, action_id: ActionId, name: str, failed: tuple[str, str], now: datetime) -> None:
        """Take the order back, see that it is, and raise the refusal. A machine that has come meanwhile is kept."""
        refusal = failure(UPDATE, *failed, of_launch=True)
        look = await self._look(name, now)
        if not isinstance(refusal, LaunchRefused) or look.ledger.member_of(action_id) is not None:
            raise TransientError(f"{UPDATE}: {name}: {failed[0]}: {failed[1]}; looked at again")
        others = len(look.ledger.standing) - 1
        wanted = min(look.capacity, len(look.members) + others)  # nobody who is there has to go for it
        began = await self._written(name, look, look.ledger.withdrawn(action_id), wanted)
        if began.status == 412:
            raise TransientError(f"{UPDATE}: {name} was changed while an order was taken back; asked again")
        self._calls.seen(UPDATE, began)
        after = await self._look(name, now)
        if after.capacity > wanted or after.ledger.stands(action_id):
            raise TransientError(f"{UPDATE}: {name} still wants {after.capacity} machines; asked again")
        raise refusal

    async def _written(self, name: str, look: _Look, ledger: Ledger, capacity: int | None) -> Answer:
        texts = ledger.texts(TAG_LENGTH_MAX, LEDGER_TAGS_MAX, look.members)
        if texts is None:
            raise LaunchRefused(
                f"{UPDATE}: the tags of {name} hold no more orders; give its pool another set in azure.scale_sets, or"
                " use a flexible one",
                code="LedgerFull",
                kind="capacity",
                scope="offer",
            )
        others = {key: value for key, value in (look.told.get("tags") or {}).items() if not key.startswith(LEDGER_TAG)}
        body: dict[str, object] = {
            "tags": others | {f"{LEDGER_TAG}{number}": text for number, text in enumerate(texts)}
        }
        if capacity is not None:
            body["sku"] = {**look.told["sku"], "capacity": capacity}
        return await self._calls.ask(UPDATE, body=body, headers={"If-Match": look.told["etag"]}, scale_set=name)

    async def _told(self, name: str) -> Mapping[str, Any] | None:
        return await self._calls.find("VirtualMachineScaleSets_Get", scale_set=name)

    async def _look(self, name: str, now: datetime) -> _Look:
        told = await self._told(name)
        if told is None:
            raise PermanentError(f"there is no scale set {name} in {self._calls.group_id}; see azure.scale_sets")
        listed = [one async for one in self._calls.pages("VirtualMachineScaleSetVMs_List", scale_set=name)]
        members = {str(one["instanceId"]): one for one in sorted(listed, key=lambda one: int(one["instanceId"]))}
        ledger = decode_ledger(_ledger_texts(told))
        if told["properties"].get("provisioningState") == "Succeeded":
            ledger = _without_missed(ledger, now)
        ledger = ledger.seen([*members])
        # Since when an order stood is of no interest once it has its machine.
        named = {member: (action_id, note.partition(_SINCE)[0]) for member, (action_id, note) in ledger.named.items()}
        return _Look(told=told, members=members, ledger=msgspec.structs.replace(ledger, named=named))


def _without_missed(ledger: Ledger, now: datetime) -> Ledger:
    """Return it without orders that stand for so long that their machines must have come and gone, seen by nobody.

    The next newcomer is not theirs. They keep a member that never is, so that their tokens buy nothing again.
    """
    for action_id, note in ledger.standing:
        since = note.partition(_SINCE)[2]
        if since.isdigit() and now - datetime.fromtimestamp(int(since), tz=UTC) > SHOWN_WITHIN:
            ledger = ledger.missed(action_id, f"unseen-{idempotency_token('', action_id)[:8]}")
    return ledger


def _ledger_texts(told: Mapping[str, Any]) -> Sequence[str]:
    tags: Mapping[str, str] = told.get("tags") or {}
    return [tags[key] for key in sorted(tags, key=len) if key.startswith(LEDGER_TAG)]


def _instance(look: _Look, sold: ScaleSet, member: str, now: datetime) -> Instance:
    """Return the machine with what the set knows of its order."""
    told = look.members[member]
    action_id, price = look.ledger.named.get(member, (None, ""))
    tags = {} if action_id is None else {ACTION_TAG: action_id, PRICE_TAG: price}
    return instance_of({**told, "tags": tags}, now=now, is_spot=sold.capacity_type == "spot")
