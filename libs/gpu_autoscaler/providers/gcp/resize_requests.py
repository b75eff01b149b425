"""Launch of several instances of a group, all or none, by a resize request.

Its name is the transaction's token, and it names the instances by the tokens of their orders, so that a retry finds
them. A request waits for capacity until it is cancelled: ours is at its time limit, or when an attempt failed for lack
of capacity; it is refused only when read back as over, with none of its names in the group. Sources: Compute Engine API
v1, `InstanceGroupManagerResizeRequest`, `PerInstanceConfig`; Compute Engine, "About resize requests in a MIG" (run
duration of ten minutes to seven days, after which instances are deleted); read 2026-11-22.
"""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
import structlog

from gpu_autoscaler.model.errors import AutoscalerError, PermanentError, TransientError
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.providers.gcp.client import GcpClient
from gpu_autoscaler.providers.gcp.groups import Group
from gpu_autoscaler.providers.gcp.launch import GcpLauncher, check_launch, poll, request_launch
from gpu_autoscaler.providers.gcp.permissions import REQUESTS
from gpu_autoscaler.providers.gcp.translate import (
    first_error,
    instance_name,
    instant,
    is_passing,
    metadata_for,
    owner_prefix,
    refusal,
)
from gpu_autoscaler.providers.protocol import LaunchRefused, Order

INSERT = f"{REQUESTS}.insert"
KEPT = timedelta(days=1)  # finished requests: long after the last retry of their orders
DELETED_MAX = 20  # per pass
TIMED_OUT = "RESIZE_REQUEST_TIMED_OUT"  # our own code: Google's requests have no time limit

log = structlog.get_logger()


class _Request(msgspec.Struct):
    """An open request."""

    name: str
    orders: Sequence[Order]
    group: Group
    operation: str | None = None  # its creation, if it was ours

    @property
    def path(self) -> dict[str, str]:
        return {"zone": self.group.zone, "instanceGroupManager": self.group.name, "resizeRequest": self.name}


class GcpResizeRequests:
    """Resize requests of groups. Stateless except for reasons of cancellation: requests are read from the groups."""

    def __init__(
        self,
        client: GcpClient,
        launches: GcpLauncher,
        *,
        decided_seconds_max: float,
        waited_seconds_max: float,
        run_seconds: int,
    ) -> None:
        """`decided_seconds_max`: wall time of one try. `waited_seconds_max`: cluster time until it is cancelled."""
        self._client = client
        self._launches = launches
        self._decided_seconds_max = decided_seconds_max
        self._waited_seconds_max = waited_seconds_max
        self._run_seconds = run_seconds
        self._cancel_reasons: dict[str, tuple[str, str]] = {}  # code and message, by request
        self._open_requests: dict[str, tuple[datetime, _Request]] = {}  # with the time of their first try

    async def make(self, transaction: ActionId, orders: Sequence[Order], group: Group, now: datetime) -> None:
        """Launch all, or raise LaunchRefused: none exists, PermanentError: the transaction has other orders, or
        TransientError."""
        model = msgspec.structs.replace(orders[0], action_id=transaction)
        request = _Request(name=instance_name(model, group.zone, group.name), orders=orders, group=group)
        self._open_requests.setdefault(request.name, (now, request))
        try:
            async with asyncio.timeout(self._decided_seconds_max):
                await poll(lambda: self._is_met(request, now))
        except TimeoutError as exc:
            raise TransientError(
                f"{INSERT}: {group.name} has not completed {request.name} within {self._decided_seconds_max:g} s;"
                " a retry continues the same request"
            ) from exc
        except (LaunchRefused, PermanentError):
            self._open_requests.pop(request.name, None)
            raise
        self._open_requests.pop(request.name, None)
        await self._delete_old(orders[0], group, now)

    async def cancel_abandoned(self, now: datetime) -> None:
        """Cancel requests that nobody retries and that waited too long. Raises TransientError."""
        for name, (since, request) in list(self._open_requests.items()):
            if (now - since).total_seconds() < 2 * self._waited_seconds_max:
                continue
            data = await self._client.find(f"{REQUESTS}.get", **request.path)
            if data is not None and data.get("state") in ("CREATING", "ACCEPTED"):
                await self._client.find(f"{REQUESTS}.cancel", **request.path)
                continue  # verified to be over at the next call
            self._open_requests.pop(name, None)

    async def _delete_old(self, order: Order, group: Group, now: datetime) -> None:
        """Delete our finished requests, which groups keep. Failures are retried next time."""
        try:
            pages = self._client.pages(f"{REQUESTS}.list", zone=group.zone, instanceGroupManager=group.name)
            requests = [request async for page in pages for request in page.get("items", ())]
            finished = [
                data["name"]
                for data in requests
                if data["name"].startswith(owner_prefix(order.installation))
                and data.get("state") in ("SUCCEEDED", "FAILED", "CANCELLED")
                and now - instant(data["creationTimestamp"]) > KEPT
            ]
            for name in finished[:DELETED_MAX]:
                path = {"zone": group.zone, "instanceGroupManager": group.name, "resizeRequest": name}
                await self._client.find(f"{REQUESTS}.delete", **path)
        except AutoscalerError as exc:
            log.warning("resize request deletion failed", error=str(exc), effect="retried with the next one")

    async def _is_met(self, request: _Request, now: datetime) -> bool:
        """Return whether the request is met; create it if nobody has, cancel it if it cannot be met."""
        data = await self._client.find(f"{REQUESTS}.get", **request.path)
        if data is None:
            if request.operation is None:
                request.operation = await self._insert(request)
            else:
                await check_launch(self._client, INSERT, request.group.zone, request.operation)
            return False
        names = {str(instance.get("name")) for instance in data.get("instances", ())}
        unknown = [order.action_id for order in request.orders if _name(order, request.group) not in names]
        if unknown:
            raise PermanentError(
                f"{request.name} exists without {', '.join(unknown)}: orders of a transaction are fixed"
            )
        state, status = data.get("state"), data.get("status", {})
        if state == "SUCCEEDED":
            return True
        if state in ("FAILED", "CANCELLED"):
            failed = first_error(status.get("error"))
            default = (TIMED_OUT, f"{request.name} was cancelled before there was capacity for all of it")
            code, message = failed or self._cancel_reasons.pop(request.name, default)
            await self._clear(request, names)
            raise refusal(INSERT, code, f"{code}: {message}")
        error = first_error(status.get("lastAttempt", {}).get("error"))
        waited_seconds = (now - instant(data["creationTimestamp"])).total_seconds()
        if error is not None and not is_passing(error[0]):
            self._cancel_reasons[request.name] = error
        elif waited_seconds >= self._waited_seconds_max:
            message = f"{request.name} found no capacity for all of it within {waited_seconds:.0f} s"
            self._cancel_reasons[request.name] = (TIMED_OUT, message)
        if request.name in self._cancel_reasons and state == "ACCEPTED":
            await self._client.find(f"{REQUESTS}.cancel", **request.path)
        return False

    async def _insert(self, request: _Request) -> str:
        body: dict[str, Any] = {
            "name": request.name,
            "instances": [
                {"name": _name(order, request.group), "preservedState": {"metadata": metadata_for(order)}}
                for order in request.orders
            ],
            "requestedRunDuration": {"seconds": str(self._run_seconds)},
        }
        return await request_launch(self._client, INSERT, request.group, body)

    async def _clear(self, request: _Request, names: set[str]) -> None:
        """Delete all instances of the request from the group, then the request, so that a later one is independent."""
        group = request.group
        withdrawn: set[str] = set()

        async def is_empty() -> bool:
            left = names & (await self._launches.managed(group.zone, group.name)).keys()
            for name in () if withdrawn else sorted(left):
                await self._launches.delete(group.zone, group.name, name)
            withdrawn.update(left)
            return not left

        await poll(is_empty)
        await self._client.find(f"{REQUESTS}.delete", **request.path)


def _name(order: Order, group: Group) -> str:
    return instance_name(order, group.zone, group.name)
