"""Several instances of a group all at once or not at all, by a resize request of the group.

The request's name is the transaction's token, and it names the instances by the tokens of their orders, so that a
second try finds what the first one made. A request that is accepted waits for room for as long as nobody cancels it;
ours is cancelled as soon as an attempt has failed for want of room, or after its limit, and is refused only when it is
read back as over and none of its names is in the group. Names come with metadata, as those of createInstances do.

Sources: Compute Engine API v1, `InstanceGroupManagerResizeRequest`, `PerInstanceConfig`; Compute Engine, "About resize
requests in a MIG" (a run duration of ten minutes to seven days, at whose end instances are deleted); read 2026-11-22.
"""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
import structlog

from gpu_autoscaler.model.errors import AutoscalerError, PermanentError, TransientError
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.providers.gcp.calls import GcpClient
from gpu_autoscaler.providers.gcp.groups import Group
from gpu_autoscaler.providers.gcp.launches import LOOKED_SECONDS, LOOKED_SECONDS_MAX, GcpLaunches
from gpu_autoscaler.providers.gcp.permissions import REQUESTS
from gpu_autoscaler.providers.gcp.translate import (
    first_error,
    instance_name,
    instant,
    is_passing,
    last_of,
    metadata_for,
    owner_prefix,
    refusal,
)
from gpu_autoscaler.providers.protocol import LaunchRefused, Order

INSERT = f"{REQUESTS}.insert"
KEPT = timedelta(days=1)  # of a request that is over: long after anybody asks for its orders again
SWEPT_MAX = 20  # of them at a time
TIMED_OUT = "RESIZE_REQUEST_TIMED_OUT"  # our word: Google's own requests have no limit of time

log = structlog.get_logger()


class _Asked(msgspec.Struct):
    """A request that is not over yet."""

    name: str
    orders: Sequence[Order]
    group: Group
    operation: str | None = None  # of its creation, where it was ours just now

    @property
    def path(self) -> dict[str, str]:
        """Where it stands."""
        return {"zone": self.group.zone, "instanceGroupManager": self.group.name, "resizeRequest": self.name}


class GcpTogether:
    """Requests of groups. What is asked for stands in the group, so nothing of it is kept but why one is cancelled."""

    def __init__(
        self,
        calls: GcpClient,
        launches: GcpLaunches,
        *,
        decided_seconds_max: float,
        waited_seconds_max: float,
        run_seconds: int,
    ) -> None:
        """`decided_seconds_max`: wall time of one try. `waited_seconds_max`: cluster time until it is cancelled."""
        self._calls = calls
        self._launches = launches
        self._decided_seconds_max = decided_seconds_max
        self._waited_seconds_max = waited_seconds_max
        self._run_seconds = run_seconds
        self._why: dict[str, tuple[str, str]] = {}  # by request: what it is cancelled for
        self._standing: dict[str, tuple[datetime, _Asked]] = {}  # not known to be over, and since when

    async def make(self, transaction: ActionId, orders: Sequence[Order], group: Group, now: datetime) -> None:
        """See that all exist. Raises LaunchRefused: none of them does; PermanentError for orders that are not of this
        transaction, TransientError.
        """
        model = msgspec.structs.replace(orders[0], action_id=transaction)
        asked = _Asked(name=instance_name(model, group.zone, group.name), orders=orders, group=group)
        self._standing.setdefault(asked.name, (now, asked))
        try:
            async with asyncio.timeout(self._decided_seconds_max):
                wait_seconds = LOOKED_SECONDS
                while not await self._look(asked, now):
                    await asyncio.sleep(wait_seconds)
                    wait_seconds = min(wait_seconds * 2, LOOKED_SECONDS_MAX)
        except TimeoutError as exc:
            raise TransientError(
                f"{INSERT}: {group.name} has not met {asked.name} within {self._decided_seconds_max:g} s;"
                " asked again it is the same request"
            ) from exc
        except (LaunchRefused, PermanentError):
            self._standing.pop(asked.name, None)
            raise
        self._standing.pop(asked.name, None)
        await self._sweep(orders[0], group, now)

    async def cancel_old(self, now: datetime) -> None:
        """Cancel what nobody asks for any more: what waits longer than it may. Raises TransientError."""
        for name, (since, asked) in list(self._standing.items()):
            if (now - since).total_seconds() < 2 * self._waited_seconds_max:
                continue
            told = await self._calls.find(f"{REQUESTS}.get", **asked.path)
            if told is not None and told.get("state") in ("CREATING", "ACCEPTED"):
                await self._calls.find(f"{REQUESTS}.cancel", **asked.path)
                continue  # seen to be over with the next look
            self._standing.pop(name, None)

    async def _sweep(self, order: Order, group: Group, now: datetime) -> None:
        """Delete requests of ours that were over long ago, which a group keeps. What fails is done next time."""
        try:
            pages = self._calls.pages(f"{REQUESTS}.list", zone=group.zone, instanceGroupManager=group.name)
            told = [one async for page in pages for one in page.get("items", ())]
            old = [
                one["name"]
                for one in told
                if one["name"].startswith(owner_prefix(order.installation))
                and one.get("state") in ("SUCCEEDED", "FAILED", "CANCELLED")
                and now - instant(one["creationTimestamp"]) > KEPT
            ]
            for name in old[:SWEPT_MAX]:
                path = {"zone": group.zone, "instanceGroupManager": group.name, "resizeRequest": name}
                await self._calls.find(f"{REQUESTS}.delete", **path)
        except AutoscalerError as exc:
            log.warning("old resize requests not deleted, tried again with the next one", error=str(exc))

    async def _look(self, asked: _Asked, now: datetime) -> bool:
        """Return whether the request is met; ask for it where nobody has, and cancel it where it cannot be met."""
        told = await self._calls.find(f"{REQUESTS}.get", **asked.path)
        if told is None:
            await self._insert_or_ask(asked)
            return False
        named = {str(instance.get("name")) for instance in told.get("instances", ())}
        strange = [order.action_id for order in asked.orders if _name(order, asked.group) not in named]
        if strange:
            raise PermanentError(f"{asked.name} was asked for without {', '.join(strange)}: a transaction is one set")
        state, status = told.get("state"), told.get("status", {})
        if state == "SUCCEEDED":
            return True
        if state in ("FAILED", "CANCELLED"):
            failed = first_error(status.get("error"))
            usual = (TIMED_OUT, f"{asked.name} was cancelled before there was room for all of it")
            code, said = failed or self._why.pop(asked.name, usual)
            await self._clear(asked, named)
            raise refusal(INSERT, code, f"{code}: {said}")
        error = first_error(status.get("lastAttempt", {}).get("error"))
        waited_seconds = (now - instant(told["creationTimestamp"])).total_seconds()
        if error is not None and not is_passing(error[0]):
            self._why[asked.name] = error
        elif waited_seconds >= self._waited_seconds_max:
            said = f"{asked.name} found no room for all of it within {waited_seconds:.0f} s"
            self._why[asked.name] = (TIMED_OUT, said)
        if asked.name in self._why and state == "ACCEPTED":
            await self._calls.find(f"{REQUESTS}.cancel", **asked.path)
        return False

    async def _insert_or_ask(self, asked: _Asked) -> None:
        if asked.operation is None:
            asked.operation = await self._insert(asked)
            return
        told = await self._calls.call("zoneOperations.get", zone=asked.group.zone, operation=asked.operation)
        error = first_error(told.get("error"))
        if error is not None and "ALREADY_EXISTS" in error[0]:
            raise TransientError(f"{INSERT}: {error[0]}: {error[1]}; asked again it is found")
        if error is not None:
            raise refusal(INSERT, error[0], f"{error[0]}: {error[1]}")

    async def _insert(self, asked: _Asked) -> str:
        body: dict[str, Any] = {
            "name": asked.name,
            "instances": [
                {"name": _name(order, asked.group), "preservedState": {"metadata": metadata_for(order)}}
                for order in asked.orders
            ],
            "requestedRunDuration": {"seconds": str(self._run_seconds)},
        }
        group = asked.group
        try:
            answer = await self._calls.call(INSERT, body=body, zone=group.zone, instanceGroupManager=group.name)
        except LaunchRefused as refused:
            if refused.code in ("alreadyExists", "conflict"):  # another of ours was here first: it is the same one
                raise TransientError(f"{refused}; asked again it is found") from refused
            raise
        return last_of(str(answer["name"]))

    async def _clear(self, asked: _Asked, names: set[str]) -> None:
        """See that nothing of the request is in the group, then forget it, so that a later one is another."""
        wait_seconds, group = LOOKED_SECONDS, asked.group
        is_withdrawn = False
        while left := names & (await self._launches.managed(group.zone, group.name)).keys():
            for name in () if is_withdrawn else sorted(left):
                await self._launches.withdraw(group.zone, group.name, name)
            is_withdrawn = True
            await asyncio.sleep(wait_seconds)
            wait_seconds = min(wait_seconds * 2, LOOKED_SECONDS_MAX)
        await self._calls.find(f"{REQUESTS}.delete", **asked.path)


def _name(order: Order, group: Group) -> str:
    return instance_name(order, group.zone, group.name)
