"""Azure's instance metadata: Scheduled Events, and the identity of this instance.

Events name all affected machines and are shown to other machines too: only those that name this machine count. An
event that left the list has ended or was canceled. Source: Azure documentation, "Azure Metadata Service:
Scheduled Events for Linux VMs" and "Azure Instance Metadata Service" (read 2026-11-22).
"""

import asyncio
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

import aiohttp
import msgspec

from gpu_autoscaler.cloudmeta.protocol import ReclaimNotice, exchange
from gpu_autoscaler.events.spot import NoticeKind
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import ProviderId

LINK_LOCAL_URL = "http://169.254.169.254"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
COMPUTE = "/metadata/instance/compute?api-version=2021-02-01"
CALL_SECONDS_MAX = 2.0  # wall time; the address is on the same host
# The first call enables the events service, which may take two minutes; after a day without calls it is disabled.
FIRST_CALL_SECONDS_MAX = 150.0
ANSWER_BYTES_MAX = 256 * 1024
PROVIDER_ID_PREFIX = "azure://"
# A shorter freeze misses no heartbeat, so that work continues.
FREEZE_SECONDS_IGNORED = 10
_KINDS: dict[str, NoticeKind] = {
    "Preempt": "terminate",
    "Terminate": "terminate",
    "Freeze": "maintenance",
    "Reboot": "maintenance",
    "Redeploy": "maintenance",
}

T = TypeVar("T")


class _Event(msgspec.Struct, frozen=True, rename="pascal"):
    event_id: str
    event_type: str
    event_status: str  # Scheduled, Started
    resources: tuple[str, ...] = ()  # names of machines; of uniform scale sets `set_number`
    not_before: str = ""  # Fri, 21 Nov 2026 12:00:00 GMT; blank once started
    duration_in_seconds: int = -1  # -1: unknown


class _Document(msgspec.Struct, frozen=True, rename="pascal"):
    document_incarnation: int
    events: tuple[_Event, ...]


class _Compute(msgspec.Struct, frozen=True, rename="camel"):
    resource_id: str


class AzureMetadata:
    """The metadata of one virtual machine. The caller owns the session, which machines may share."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_url: str = LINK_LOCAL_URL,
        *,
        call_seconds_max: float = CALL_SECONDS_MAX,
        first_call_seconds_max: float = FIRST_CALL_SECONDS_MAX,
    ) -> None:
        self._session = session
        self._base_url = base_url.rstrip("/")
        self._call_seconds_max = call_seconds_max
        self._events_seconds_max = first_call_seconds_max  # until the first answer
        self._reading: asyncio.Task[_Document] | None = None
        self._provider_id: ProviderId | None = None
        self._events: tuple[_Event, ...] = ()  # the last read events that name this machine
        self._reclaimed_at: dict[str, datetime] = {}  # by event: the deadline reported before its start
        self._released: set[str] = set()  # approved events

    async def reclaim_notices(self) -> Sequence[ReclaimNotice]:
        """Return the events that name this machine. Raises TransientError. A canceled call does not cancel the first,
        slow request: the next call waits for the same request."""
        own_name = resource_name_of(await self.provider_id())
        if self._reading is None:
            self._reading = asyncio.create_task(self._read("GET", EVENTS, _Document, self._events_seconds_max))
        reading = self._reading
        try:
            document = await asyncio.shield(reading)
        finally:
            if reading.done():
                self._reading = None
        self._events_seconds_max = self._call_seconds_max
        self._events = tuple(event for event in document.events if own_name in event.resources)
        active = {event.event_id for event in self._events}
        self._reclaimed_at = {key: at for key, at in self._reclaimed_at.items() if key in active}
        self._released &= active
        return [notice for event in self._events if (notice := self._notice_of(event)) is not None]

    async def rebalance_recommended_at(self) -> datetime | None:
        """Return None: Azure sends no recommendations."""
        return None

    async def provider_id(self) -> ProviderId:
        """Return `azure:///subscriptions/...`, as cloud-provider-azure names nodes. Raises TransientError."""
        if self._provider_id is None:
            compute = await self._read("GET", COMPUTE, _Compute, self._call_seconds_max)
            if not compute.resource_id.startswith("/subscriptions/"):
                raise TransientError(f"{self._base_url} reports no resource; check that it is Azure's metadata address")
            self._provider_id = provider_id_of(compute.resource_id)
        return self._provider_id

    async def release(self, drained: Collection[ProviderId]) -> None:
        """Approve, once, the events whose machines are all drained. Raises TransientError. An approved event affects
        all machines that it names, so one machine that is not drained delays it."""
        names = {resource_name_of(provider_id) for provider_id in drained}
        ready = [
            event.event_id
            for event in self._events
            if event.event_status == "Scheduled" and names.issuperset(event.resources)
            if event.event_id not in self._released
        ]
        if ready:
            body = {"StartRequests": [{"EventId": event_id} for event_id in ready]}
            await self._call("POST", EVENTS, self._call_seconds_max, msgspec.json.encode(body))
            self._released.update(ready)

    def _notice_of(self, event: _Event) -> ReclaimNotice | None:
        kind = _KINDS.get(event.event_type)
        if kind is None or (event.event_type == "Freeze" and 0 <= event.duration_in_seconds <= FREEZE_SECONDS_IGNORED):
            return None
        if event.not_before:
            at = _instant_of(event.not_before)
            self._reclaimed_at[event.event_id] = min(at, self._reclaimed_at.get(event.event_id, at))
        return ReclaimNotice(kind, event.event_id, self._reclaimed_at.get(event.event_id))

    async def _read(self, method: str, path: str, schema: type[T], seconds_max: float) -> T:
        text = await self._call(method, path, seconds_max)
        try:
            return msgspec.json.decode(text, type=schema)
        except msgspec.DecodeError as exc:
            raise TransientError(f"{self._base_url}{path}: undecodable answer {text[:200]!r}: {exc}") from exc

    async def _call(self, method: str, path: str, seconds_max: float, body: bytes | None = None) -> bytes:
        status, content = await exchange(
            self._session,
            method,
            self._base_url + path,
            headers={"Metadata": "true"},
            timeout=aiohttp.ClientTimeout(total=seconds_max),
            bytes_max=ANSWER_BYTES_MAX,
            body=body,
        )
        if status != 200:
            raise TransientError(f"{method} {self._base_url}{path}: HTTP {status}; retried with the next tick")
        return content


def provider_id_of(resource_id: str) -> ProviderId:
    """Return the provider id of a resource: cloud-provider-azure writes the resource group in lower case."""
    parts = resource_id.split("/")
    for number, part in enumerate(parts[:-1]):
        if part.lower() == "resourcegroups":
            parts[number], parts[number + 1] = "resourceGroups", parts[number + 1].lower()
    return ProviderId(PROVIDER_ID_PREFIX + "/".join(parts))


def resource_name_of(provider_id: ProviderId) -> str:
    """Return a machine's name in events: `name`, or `set_number` in a uniform scale set."""
    parts = provider_id.split("/")
    lower = [part.lower() for part in parts]
    if "virtualmachinescalesets" in lower:
        return f"{parts[lower.index('virtualmachinescalesets') + 1]}_{parts[-1]}"
    return parts[-1]


def _instant_of(text: str) -> datetime:
    try:
        return parsedate_to_datetime(text).astimezone(UTC)
    except ValueError as exc:
        raise TransientError(f"scheduledevents: NotBefore {text!r} is not an Azure date") from exc
