"""Launch of one instance of a managed group, by name: created once, observed until decided, deleted if refused.

The name is the token: a group in a zone takes each name once, so a retry finds the first instance, at any time. A
completed operation only means that the group accepted the request; the group keeps trying to create the instance. The
outcome is in listManagedInstances under that name. A refusal is reported only after the request is deleted and the
name is gone from there, so that a refused instance is not created later.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.providers.gcp.client import GcpClient
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
POLL_SECONDS, POLL_SECONDS_MAX = 0.25, 3.0  # wall time between polls: the first, and the longest
Managed = Mapping[str, Mapping[str, Any]]  # a group's managed instances, by name


async def poll(is_done: Callable[[], Awaitable[bool]]) -> None:
    """Wait until it is done, with growing pauses."""
    wait_seconds = POLL_SECONDS
    while not await is_done():
        await asyncio.sleep(wait_seconds)
        wait_seconds = min(wait_seconds * 2, POLL_SECONDS_MAX)


async def request_launch(
    client: GcpClient, call: str, group: Group, body: object, query: Mapping[str, str] | None = None
) -> str:
    """Return the name of the operation that launches. Raises TransientError if another process was first."""
    try:
        answer = await client.call(call, query=query, body=body, zone=group.zone, instanceGroupManager=group.name)
    except LaunchRefused as refused:
        if refused.code in ("alreadyExists", "conflict"):
            raise TransientError(f"{refused}; a retry finds it") from refused
        raise
    return last_of(str(answer["name"]))


async def check_launch(client: GcpClient, call: str, zone: str, operation: str) -> None:
    """Raise the error of an operation that `request_launch` began, if it failed."""
    error = first_error((await client.call("zoneOperations.get", zone=zone, operation=operation)).get("error"))
    if error is not None and "ALREADY_EXISTS" in error[0]:
        raise TransientError(f"{call}: {error[0]}: {error[1]}; a retry finds it")
    if error is not None:
        raise refusal(call, error[0], f"{error[0]}: {error[1]}")


class _Request(msgspec.Struct):
    """An undecided request."""

    order: Order
    group: Group
    name: str
    failed_count: int
    operation: str | None = None  # its creation, if it was ours


class GcpLauncher:
    """Launches instances of groups. Stateless: requests are read from the groups."""

    def __init__(self, client: GcpClient, *, decided_seconds_max: float) -> None:
        """`decided_seconds_max`: wall time that a launch is observed; later a retry continues the same request."""
        self._client = client
        self._decided_seconds_max = decided_seconds_max
        self._managed: dict[tuple[str, str], SharedRead[Managed]] = {}

    async def managed(self, zone: str, group: str) -> Managed:
        """Return the group's managed instances by name. Raises TransientError."""
        key = (zone, group)
        if key not in self._managed:
            self._managed[key] = SharedRead(lambda: self._read_managed(zone, group))
        return await self._managed[key].fresh()

    async def make(self, order: Order, group: Group, failed_count: int) -> str:
        """Return the name of the order's instance once it exists. Raises LaunchRefused, PermanentError, TransientError.
        `failed_count`: failed attempts under this name; each attempt is a request of its own."""
        name = instance_name(order, group.zone, group.name)
        request = _Request(order=order, group=group, name=name, failed_count=failed_count)
        try:
            async with asyncio.timeout(self._decided_seconds_max):
                await poll(lambda: self._is_created(request))
        except TimeoutError as exc:
            raise TransientError(
                f"{CREATE}: {group.name} has not decided on {name} within {self._decided_seconds_max:g} s;"
                " a retry continues the same request"
            ) from exc
        return name

    async def delete(self, zone: str, group: str, name: str) -> None:
        """Have the group delete this instance, created or not. Raises LaunchRefused, PermanentError, TransientError."""
        await self._client.call(
            "instanceGroupManagers.deleteInstances",
            zone=zone,
            instanceGroupManager=group,
            body={
                "instances": [f"zones/{zone}/instances/{name}"],
                "skipInstancesOnValidationError": True,  # another process may have deleted it already
            },
        )

    async def _is_created(self, request: _Request) -> bool:
        """Return whether the instance exists; request it if nobody has."""
        group, name = request.group, request.name
        managed = (await self.managed(group.zone, group.name)).get(name)
        if managed is None:
            if request.operation is None:
                request.operation = await self._create(request)
            else:
                await check_launch(self._client, CREATE, group.zone, request.operation)
            return False
        if is_made(managed):
            return True
        error = first_error(managed.get("lastAttempt", {}).get("errors"))
        if error is not None and not is_passing(error[0]) and managed.get("currentAction") != "DELETING":
            await self._cancel(request, error)
        return False

    async def _create(self, request: _Request) -> str:
        order = request.order
        # A request id is executed once within an hour; a repeated attempt needs another.
        query = {"requestId": idempotency_uuid(order.installation, order.action_id, attempt=request.failed_count)}
        body = {"instances": [{"name": request.name, "preservedState": {"metadata": metadata_for(order)}}]}
        return await request_launch(self._client, CREATE, request.group, body, query)

    async def _cancel(self, request: _Request, error: tuple[str, str]) -> None:
        """Delete the refused instance, verify that it is gone, and raise the refusal or TransientError."""
        group, name = request.group, request.name
        try:
            await self.delete(group.zone, group.name, name)
        except PermanentError as exc:
            raise TransientError(f"{CREATE}: {error[0]}: {name} cannot be deleted: {exc}") from exc
        wait_seconds = POLL_SECONDS
        while (managed := (await self.managed(group.zone, group.name)).get(name)) is not None:
            if is_made(managed):
                return  # it was created before the group received the deletion; the next poll finds it
            await asyncio.sleep(wait_seconds)
            wait_seconds = min(wait_seconds * 2, POLL_SECONDS_MAX)
        raise refusal(CREATE, error[0], f"{error[0]}: {error[1]}")

    async def _read_managed(self, zone: str, group: str) -> Managed:
        managed: dict[str, Mapping[str, Any]] = {}
        pages = self._client.pages(
            "instanceGroupManagers.listManagedInstances",
            query={"maxResults": "500"},
            zone=zone,
            instanceGroupManager=group,
        )
        async for page in pages:
            for managed_instance in page.get("managedInstances", ()):
                managed[managed_instance.get("name") or last_of(managed_instance.get("instance", ""))] = (
                    managed_instance
                )
        return managed
