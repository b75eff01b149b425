"""One instance of a group, by name: created once, watched until it is decided, withdrawn where it was refused.

The name is the token: a group and a zone take each name once, so a second try finds what the first one made, at any
time. An operation that is done only says that the group has taken the request; the group then tries, and goes on
trying. How it went stands with the name in listManagedInstances, and a refusal is told only when the request is
withdrawn and the name is gone from there: what was refused is not made later behind our back.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.providers.gcp.calls import GcpClient
from gpu_autoscaler.providers.gcp.groups import Group
from gpu_autoscaler.providers.gcp.translate import (
    first_error,
    instance_name,
    is_made,
    is_passing,
    last_of,
    metadata_for,
    refusal,
)
from gpu_autoscaler.providers.protocol import LaunchRefused, Order
from gpu_autoscaler.providers.shared_reads import SharedRead
from gpu_autoscaler.providers.tokens import idempotency_uuid

CREATE = "instanceGroupManagers.createInstances"
LOOKED_SECONDS, LOOKED_SECONDS_MAX = 0.25, 3.0  # wall time between two looks: the first, and the longest
Managed = Mapping[str, Mapping[str, Any]]  # what a group says of its instances, by name


class _Standing(msgspec.Struct):
    """A request that is not decided yet."""

    order: Order
    group: Group
    name: str
    failed_count: int
    operation: str | None = None  # of the creation, where it was ours just now


class GcpLaunches:
    """Launches from groups. Keeps nothing: what stands in a group is read from it."""

    def __init__(self, calls: GcpClient, *, decided_seconds_max: float) -> None:
        """`decided_seconds_max`: wall time that a launch is watched; later it is asked again, and is the same one."""
        self._calls = calls
        self._decided_seconds_max = decided_seconds_max
        self._managed: dict[tuple[str, str], SharedRead[Managed]] = {}

    async def managed(self, zone: str, group: str) -> Managed:
        """Return what the group says of its instances now, by name. Raises TransientError."""
        key = (zone, group)
        if key not in self._managed:
            self._managed[key] = SharedRead(lambda: self._read_managed(zone, group))
        return await self._managed[key].fresh()

    async def make(self, order: Order, group: Group, failed_count: int) -> str:
        """Return the name of the order's instance once it exists. Raises LaunchRefused, PermanentError, TransientError.

        `failed_count`: attempts under this name that have failed before; each is a request of its own.
        """
        name = instance_name(order, group.zone, group.name)
        standing = _Standing(order=order, group=group, name=name, failed_count=failed_count)
        try:
            async with asyncio.timeout(self._decided_seconds_max):
                wait_seconds = LOOKED_SECONDS
                while not await self._look(standing):
                    await asyncio.sleep(wait_seconds)
                    wait_seconds = min(wait_seconds * 2, LOOKED_SECONDS_MAX)
        except TimeoutError as exc:
            raise TransientError(
                f"{CREATE}: {group.name} has not decided on {name} within {self._decided_seconds_max:g} s;"
                " asked again it is the same request"
            ) from exc
        return name

    async def withdraw(self, zone: str, group: str, name: str) -> None:
        """Have the group give up this instance, made or not. Raises LaunchRefused, PermanentError, TransientError."""
        await self._calls.call(
            "instanceGroupManagers.deleteInstances",
            zone=zone,
            instanceGroupManager=group,
            body={
                "instances": [f"zones/{zone}/instances/{name}"],
                "skipInstancesOnValidationError": True,  # another of ours may have done it already
            },
        )

    async def _look(self, standing: _Standing) -> bool:
        """Return whether the instance exists; order it where nobody has."""
        group, name = standing.group, standing.name
        told = (await self.managed(group.zone, group.name)).get(name)
        if told is None:
            await self._create_or_ask(standing)
            return False
        if is_made(told):
            return True
        error = first_error(told.get("lastAttempt", {}).get("errors"))
        if error is not None and not is_passing(error[0]) and told.get("currentAction") != "DELETING":
            await self._give_up(standing, error)
        return False

    async def _create_or_ask(self, standing: _Standing) -> None:
        if standing.operation is None:
            standing.operation = await self._create(standing)
            return
        told = await self._calls.call("zoneOperations.get", zone=standing.group.zone, operation=standing.operation)
        error = first_error(told.get("error"))
        if error is not None and "ALREADY_EXISTS" in error[0]:
            raise TransientError(f"{CREATE}: {error[0]}: {error[1]}; asked again it is found")
        if error is not None:
            raise refusal(CREATE, error[0], f"{error[0]}: {error[1]}")

    async def _create(self, standing: _Standing) -> str:
        order, group = standing.order, standing.group
        try:
            answer = await self._calls.call(
                CREATE,
                zone=group.zone,
                instanceGroupManager=group.name,
                # The same request is done once for an hour; one that was withdrawn is another.
                query={
                    "requestId": idempotency_uuid(order.installation, order.action_id, attempt=standing.failed_count)
                },
                body={"instances": [{"name": standing.name, "preservedState": {"metadata": metadata_for(order)}}]},
            )
        except LaunchRefused as refused:
            if refused.code in ("alreadyExists", "conflict"):  # another of ours was here first: it is the same one
                raise TransientError(f"{refused}; asked again it is found") from refused
            raise
        return last_of(str(answer["name"]))

    async def _give_up(self, standing: _Standing, error: tuple[str, str]) -> None:
        """Withdraw what was refused, see that it is gone, and say so. Raises LaunchRefused, or TransientError."""
        group, name = standing.group, standing.name
        try:
            await self.withdraw(group.zone, group.name, name)
        except PermanentError as exc:
            raise TransientError(f"{CREATE}: {error[0]}: {name} cannot be withdrawn: {exc}") from exc
        wait_seconds = LOOKED_SECONDS
        while (told := (await self.managed(group.zone, group.name)).get(name)) is not None:
            if is_made(told):
                return  # it was made after all, before the group heard us: the next look says so
            await asyncio.sleep(wait_seconds)
            wait_seconds = min(wait_seconds * 2, LOOKED_SECONDS_MAX)
        raise refusal(CREATE, error[0], f"{error[0]}: {error[1]}")

    async def _read_managed(self, zone: str, group: str) -> Managed:
        found: dict[str, Mapping[str, Any]] = {}
        pages = self._calls.pages(
            "instanceGroupManagers.listManagedInstances",
            query={"maxResults": "500"},
            zone=zone,
            instanceGroupManager=group,
        )
        async for page in pages:
            for managed_instance in page.get("managedInstances", ()):
                found[managed_instance.get("name") or last_of(managed_instance.get("instance", ""))] = managed_instance
        return found
