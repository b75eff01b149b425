"""Uniform scale sets, sized by desired capacity (`providers/desired_capacity.py`).

Tags of their machines cannot be changed (Azure/azure-sdk-for-go, issue 18278), so the set's tags record the order of
each machine, written in the same call as the capacity, under the set's ETag. Machines are deleted by id only: if the
capacity is lowered, Azure chooses the victim.
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
from gpu_autoscaler.providers.azure.client import AzureClient
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
from gpu_autoscaler.providers.desired_capacity import Ledger, decode_ledger
from gpu_autoscaler.providers.protocol import Instance, LaunchRefused, Order, instance_from_order, misconfigured
from gpu_autoscaler.providers.rest import Answer
from gpu_autoscaler.providers.tokens import idempotency_token

TAG_LENGTH_MAX = 256  # of a value (Azure documentation, "Use tags to organize your Azure resources", limits)
LEDGER_TAGS_MAX = 40  # of the 50 tags of a resource; the rest is for other users
MACHINES_MAX = 1000  # per set (Azure documentation, "Considerations for using large scale sets", read 2026-11-22)
MACHINES_MAX_OF_ONE_PLACEMENT_GROUP = 100
FULL = frozenset({"LedgerFull", "ScaleSetFull"})
UPDATE = "VirtualMachineScaleSets_Update"
RETRY_SECONDS = 2.0
LISTED_WITHIN = timedelta(minutes=10)  # our own limit, many times what Azure takes to list a new machine
_SINCE = "@"  # in the note of a pending order: price, then the time of the order


class _SetState(msgspec.Struct, frozen=True, kw_only=True):
    """A scale set and its machines at one moment."""

    set_data: Mapping[str, Any]
    members: Mapping[str, Mapping[str, Any]]  # by instance id, oldest first
    ledger: Ledger

    @property
    def capacity(self) -> int:
        return int(self.set_data["sku"]["capacity"])

    @property
    def capacity_max(self) -> int:
        """The largest capacity that Azure accepts for it."""
        is_single = self.set_data["properties"].get("singlePlacementGroup") is True
        return MACHINES_MAX_OF_ONE_PLACEMENT_GROUP if is_single else MACHINES_MAX

    @property
    def owner(self) -> str | None:
        """The installation that owns the set."""
        return read_tags(self.set_data).get(INSTALLATION_TAG)


class UniformScaleSets:
    """Launches and deletions of machines of uniform scale sets."""

    def __init__(self, client: AzureClient) -> None:
        self._client = client
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # one writer per set

    async def launch(self, order: Order, sets: Sequence[ScaleSet], now: datetime) -> Instance:
        """Return the order's machine, from the set that knows it, else from the pool's first set with free capacity.
        Raises LaunchRefused, PermanentError, TransientError."""
        candidates = await self._candidates(order, sets)
        for scale_set in candidates[:-1]:
            try:
                return await self._launch_from(order, scale_set, now)
            except LaunchRefused as refused:
                if refused.code not in FULL:
                    raise
        return await self._launch_from(order, candidates[-1], now)

    async def _candidates(self, order: Order, sets: Sequence[ScaleSet]) -> list[ScaleSet]:
        """Return the set that knows the order, else all sets that offer it, in an order that depends on the action id.
        Retries use the same order of sets, and the orders of a pool spread over all of its sets."""
        if len(sets) == 1:
            return [*sets]
        described = await asyncio.gather(*(self._find(scale_set.name) for scale_set in sets))
        for scale_set, set_data in zip(sets, described, strict=True):
            if decode_ledger(_ledger_texts(set_data or {})).knows(order.action_id):
                return [scale_set]
        offer = order.offer
        offering = [
            scale_set for scale_set in sets if scale_set.sells(offer.instance_type, offer.zone, offer.capacity_type)
        ]
        return sorted(offering, key=lambda scale_set: idempotency_token(scale_set.name, order.action_id))

    async def _launch_from(self, order: Order, scale_set: ScaleSet, now: datetime) -> Instance:
        async with self._locks[scale_set.name]:
            state = await self._read_state(scale_set.name, now)
            if not state.ledger.knows(order.action_id):
                state = await self._raise_capacity(order, scale_set, state, now)
            return await self._machine_of(order, scale_set, state, now)

    async def end(self, name: str, instance_id: str) -> Answer:
        """Delete this machine and lower the capacity. Raises PermanentError, TransientError."""
        body = {"instanceIds": [instance_id]}
        return await self._client.call("VirtualMachineScaleSets_DeleteInstances", body=body, scale_set=name)

    async def instances(self, scale_set: ScaleSet, installation: str, now: datetime) -> list[Instance]:
        """Return the machines that this installation ordered, if it owns the set."""
        state = await self._read_state(scale_set.name, now)
        if state.owner != installation:
            return []
        return [_instance(state, scale_set, member, now) for member in state.members if member in state.ledger.assigned]

    async def owned(self, scale_set: ScaleSet, instance_id: str, now: datetime) -> tuple[str | None, Instance] | None:
        """Return owner and machine: the owner is None if nobody ordered it; None if it does not exist."""
        state = await self._read_state(scale_set.name, now)
        if instance_id not in state.members:
            return None
        owner = state.owner if instance_id in state.ledger.assigned else None
        return owner, _instance(state, scale_set, instance_id, now)

    async def _raise_capacity(self, order: Order, scale_set: ScaleSet, state: _SetState, now: datetime) -> _SetState:
        """Raise the capacity by one, with the order recorded in the same call. Raises as `launch`."""
        if state.owner != order.installation:
            raise misconfigured(
                f"{UPDATE}: scale set {scale_set.name} is tagged for installation {state.owner!r}, not ours; tag it"
                f" {INSTALLATION_TAG}, or name another in azure.scale_sets",
                "ScaleSetNotOwned",
            )
        if state.capacity >= state.capacity_max:
            raise LaunchRefused(
                f"{UPDATE}: scale set {scale_set.name} is at Azure's maximum of {state.capacity} machines; give pool"
                f" {order.pool} another scale set in azure.scale_sets",
                code="ScaleSetFull",
                kind="capacity",
                scope="offer",
            )
        price = order.offer.price_micro_usd_per_hour
        note = f"{'' if price is None else price}{_SINCE}{int(now.timestamp())}"
        answer = await self._write(
            scale_set.name, state, state.ledger.with_order(order.action_id, note), state.capacity + 1
        )
        if answer.status == 412:  # changed since it was read: read it again and retry once
            state = await self._read_state(scale_set.name, now)
            answer = await self._write(
                scale_set.name, state, state.ledger.with_order(order.action_id, note), state.capacity + 1
            )
        self._client.checked(UPDATE, answer)
        failed_with = await self._client.failure_of(answer)
        if failed_with is not None:
            await self._cancel_order(order.action_id, scale_set.name, failed_with, now)
        return await self._read_state(scale_set.name, now)

    async def _machine_of(self, order: Order, scale_set: ScaleSet, state: _SetState, now: datetime) -> Instance:
        """Return the order's machine and record the assignment. Raises as `launch`."""
        member = state.ledger.member_of(order.action_id)
        if member is None:
            if state.set_data["properties"].get("provisioningState") == "Failed":
                message = f"{scale_set.name} could not be enlarged: its last operation failed"
                await self._cancel_order(order.action_id, scale_set.name, ("AllocationFailed", message), now)
            raise TransientError(
                f"{UPDATE}: machine of order {order.action_id} not listed yet in {scale_set.name}; retried",
                retry_after_seconds=RETRY_SECONDS,
            )
        if state.ledger != decode_ledger(_ledger_texts(state.set_data)):
            self._client.checked(UPDATE, await self._write(scale_set.name, state, state.ledger, None))
        if member not in state.members:
            resource_id = self._client.id_of("virtualMachineScaleSets", f"{scale_set.name}/virtualMachines/{member}")
            return instance_from_order(order, provider_id_of(resource_id), launched_at=now, state="terminated")
        return _instance(state, scale_set, member, now)

    async def _cancel_order(self, action_id: ActionId, name: str, failed_with: tuple[str, str], now: datetime) -> None:
        """Cancel the order, verify it, and raise the refusal. A machine that was created meanwhile is kept."""
        refusal = failure(UPDATE, *failed_with, of_launch=True)
        state = await self._read_state(name, now)
        if not isinstance(refusal, LaunchRefused) or state.ledger.member_of(action_id) is not None:
            raise TransientError(f"{UPDATE}: {name}: {failed_with[0]}: {failed_with[1]}; retried")
        other_count = len(state.ledger.pending) - 1
        capacity = min(state.capacity, len(state.members) + other_count)  # no existing machine may be deleted for it
        answer = await self._write(name, state, state.ledger.without_order(action_id), capacity)
        if answer.status == 412:
            raise TransientError(f"{UPDATE}: {name} was changed while an order was cancelled; retried")
        self._client.checked(UPDATE, answer)
        after = await self._read_state(name, now)
        if after.capacity > capacity or after.ledger.is_pending(action_id):
            raise TransientError(f"{UPDATE}: {name} still has capacity {after.capacity}; retried")
        raise refusal

    async def _write(self, name: str, state: _SetState, ledger: Ledger, capacity: int | None) -> Answer:
        texts = ledger.encode(TAG_LENGTH_MAX, LEDGER_TAGS_MAX, state.members)
        if texts is None:
            raise LaunchRefused(
                f"{UPDATE}: tags of {name} cannot hold another order; add a set for its pool to azure.scale_sets, or"
                " use a flexible one",
                code="LedgerFull",
                kind="capacity",
                scope="offer",
            )
        other_tags = {
            key: value for key, value in (state.set_data.get("tags") or {}).items() if not key.startswith(LEDGER_TAG)
        }
        body: dict[str, object] = {
            "tags": other_tags | {f"{LEDGER_TAG}{number}": text for number, text in enumerate(texts)}
        }
        if capacity is not None:
            body["sku"] = {**state.set_data["sku"], "capacity": capacity}
        return await self._client.ask(UPDATE, body=body, headers={"If-Match": state.set_data["etag"]}, scale_set=name)

    async def _find(self, name: str) -> Mapping[str, Any] | None:
        return await self._client.find("VirtualMachineScaleSets_Get", scale_set=name)

    async def _read_state(self, name: str, now: datetime) -> _SetState:
        set_data = await self._find(name)
        if set_data is None:
            raise PermanentError(f"scale set {name} not found in {self._client.group_id}; check azure.scale_sets")
        listed = [machine async for machine in self._client.pages("VirtualMachineScaleSetVMs_List", scale_set=name)]
        members = {
            str(machine["instanceId"]): machine
            for machine in sorted(listed, key=lambda machine: int(machine["instanceId"]))
        }
        ledger = decode_ledger(_ledger_texts(set_data))
        if set_data["properties"].get("provisioningState") == "Succeeded":
            ledger = _with_lost_members(ledger, now)
        ledger = ledger.with_members([*members])
        # The time of an order does not matter once it has its machine.
        assigned = {
            member: (action_id, note.partition(_SINCE)[0]) for member, (action_id, note) in ledger.assigned.items()
        }
        return _SetState(set_data=set_data, members=members, ledger=msgspec.structs.replace(ledger, assigned=assigned))


def _with_lost_members(ledger: Ledger, now: datetime) -> Ledger:
    """Return the ledger without orders pending for so long that their machines must have come and gone unseen. New
    members are not theirs. They are assigned a fictitious member, so that their tokens launch nothing again."""
    for action_id, note in ledger.pending:
        since = note.partition(_SINCE)[2]
        if since.isdigit() and now - datetime.fromtimestamp(int(since), tz=UTC) > LISTED_WITHIN:
            ledger = ledger.with_lost_member(action_id, f"unseen-{idempotency_token('', action_id)[:8]}")
    return ledger


def _ledger_texts(set_data: Mapping[str, Any]) -> Sequence[str]:
    tags: Mapping[str, str] = set_data.get("tags") or {}
    return [tags[key] for key in sorted(tags, key=len) if key.startswith(LEDGER_TAG)]


def _instance(state: _SetState, scale_set: ScaleSet, member: str, now: datetime) -> Instance:
    machine_data = state.members[member]
    action_id, price = state.ledger.assigned.get(member, (None, ""))
    tags = {} if action_id is None else {ACTION_TAG: action_id, PRICE_TAG: price}
    return instance_of({**machine_data, "tags": tags}, now=now, is_spot=scale_set.capacity_type == "spot")
