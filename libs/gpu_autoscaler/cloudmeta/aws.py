"""EC2's instance metadata, version 2 only: a token first, then the values.

A fallback to version 1, as in some handlers, would defeat the protection of version 2. Source: EC2 User Guide,
"Use the Instance Metadata Service to access instance metadata", "Spot Instance interruption notices", "EC2 instance
rebalance recommendations" and "Scheduled events for your instances"; EC2 Auto Scaling User Guide, "Retrieve the target
lifecycle state through instance metadata" (read 2026-11-22).
"""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal, TypeVar

import aiohttp
import msgspec

from gpu_autoscaler.cloudmeta.protocol import ReclaimNotice, exchange
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.observed import Instant

LINK_LOCAL_URL = "http://169.254.169.254"
CALL_SECONDS_MAX = 2.0  # wall time; the address is on the same host
TOKEN_SECONDS = 21_600  # the longest that EC2 allows
TOKEN_RENEWED_SECONDS_BEFORE = 15.0
ANSWER_BYTES_MAX = 64 * 1024
# Rare changes are polled less often: maintenance is announced days ahead, a group's termination with its hook's time.
SLOW_SECONDS = 10.0
_MAINTENANCE_DATE = "%d %b %Y %H:%M:%S %Z"  # 21 Jan 2019 09:00:43 GMT

T = TypeVar("T")


class _InstanceAction(msgspec.Struct, frozen=True):
    action: Literal["terminate", "stop", "hibernate"]
    time: Instant


class _Rebalance(msgspec.Struct, frozen=True, rename="camel"):
    notice_time: Instant


class _Maintenance(msgspec.Struct, frozen=True, rename="pascal"):
    not_before: str
    event_id: str
    state: str  # active, completed, canceled


class AwsMetadata:
    """The metadata of one EC2 instance. The caller owns the session, which instances may share."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_url: str = LINK_LOCAL_URL,
        *,
        call_seconds_max: float = CALL_SECONDS_MAX,
    ) -> None:
        self._session = session
        self._base_url = base_url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=call_seconds_max)
        self._token: str | None = None
        self._token_renewed_at_seconds = 0.0  # by the loop's clock
        self._slow: tuple[ReclaimNotice, ...] = ()
        self._slow_read_at_seconds: float | None = None  # by the loop's clock

    async def reclaim_notices(self) -> Sequence[ReclaimNotice]:
        """Return interruption, scheduled maintenance and termination by the group; 404 means that none is active. The
        interruption is read each time, the others every SLOW_SECONDS. Raises TransientError."""
        action = await self._read("spot/instance-action", _InstanceAction)
        if action is not None:  # at once: the other reads may fail or be slow
            return (ReclaimNotice(action.action, action.time.isoformat(), action.time), *self._slow)
        now_seconds = asyncio.get_running_loop().time()
        if self._slow_read_at_seconds is None or now_seconds - self._slow_read_at_seconds >= SLOW_SECONDS:
            self._slow = (*await self._maintenance(), *await self._group_termination())
            self._slow_read_at_seconds = now_seconds
        return self._slow

    async def _maintenance(self) -> list[ReclaimNotice]:
        events = await self._read("events/maintenance/scheduled", list[_Maintenance]) or []
        return [
            ReclaimNotice("maintenance", event.event_id, _maintenance_at(event.not_before))
            for event in events
            if event.state == "active"
        ]

    async def _group_termination(self) -> list[ReclaimNotice]:
        """Return the termination by the Auto Scaling group, whose time the metadata does not give."""
        target = await self._get("autoscaling/target-lifecycle-state")
        return [ReclaimNotice("terminate", "autoscaling", None)] if target == "Terminated" else []

    async def rebalance_recommended_at(self) -> datetime | None:
        """Return the time of the rebalance recommendation, None without one. Raises TransientError."""
        recommendation = await self._read("events/recommendations/rebalance", _Rebalance)
        return None if recommendation is None else recommendation.notice_time

    async def provider_id(self) -> ProviderId:
        """Return `aws:///<zone>/<instance id>`, as the AWS cloud provider names nodes. Raises TransientError."""
        zone = await self._get("placement/availability-zone")
        instance_id = await self._get("instance-id")
        if not zone or not instance_id:
            raise TransientError(
                f"{self._base_url} reports no zone or instance; check that it is EC2's metadata address"
            )
        return ProviderId(f"aws:///{zone}/{instance_id}")

    async def _read(self, path: str, schema: type[T]) -> T | None:
        text = await self._get(path)
        if text is None:
            return None
        try:
            return msgspec.json.decode(text, type=schema)
        except msgspec.DecodeError as exc:
            raise TransientError(f"{self._base_url} {path}: undecodable answer {text[:200]!r}: {exc}") from exc

    async def _get(self, path: str) -> str | None:
        """Return the text at a path, None for 404. A rejected token is dropped and fetched once more."""
        for _ in range(2):
            headers = {"X-aws-ec2-metadata-token": await self._current_token()}
            status, text = await self._call("GET", f"/latest/meta-data/{path}", headers)
            if status == 200:
                return text
            if status == 404:
                return None
            if status != 401:
                raise TransientError(f"{self._base_url} {path}: HTTP {status}; retried with the next tick")
            self._token = None
        raise TransientError(
            f"{self._base_url} {path}: a fresh token is rejected; check for a proxy in front of the address"
        )

    async def _current_token(self) -> str:
        now_seconds = asyncio.get_running_loop().time()
        if self._token is None or now_seconds >= self._token_renewed_at_seconds:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
            status, text = await self._call("PUT", "/latest/api/token", headers)
            if status != 200:
                raise TransientError(f"{self._base_url}: HTTP {status} instead of a metadata token")
            self._token = text
            self._token_renewed_at_seconds = now_seconds + TOKEN_SECONDS - TOKEN_RENEWED_SECONDS_BEFORE
        return self._token

    async def _call(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        url, timeout = self._base_url + path, self._timeout
        status, content = await exchange(
            self._session, method, url, headers=headers, timeout=timeout, bytes_max=ANSWER_BYTES_MAX
        )
        return status, content.decode("utf-8", errors="replace")


def _maintenance_at(text: str) -> datetime:
    try:
        return datetime.strptime(text, _MAINTENANCE_DATE).replace(tzinfo=UTC)
    except ValueError as exc:
        raise TransientError(f"events/maintenance/scheduled: NotBefore {text!r} is not an EC2 date") from exc
