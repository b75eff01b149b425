"""Google Cloud's instance metadata: preemption, and host maintenance.

Two keys, each a value that may change and change back. A read waits briefly for a change; a change between two reads
is detected by its ETag. Source: Compute Engine, "View and query VM metadata" (wait_for_change), "Preemptible VM
instances", "Handle GPU host maintenance events"; GKE, "Spot VMs" (user pods have 15 of the 30 s); read 2026-11-21.
"""

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

import aiohttp
import msgspec

from gpu_autoscaler.cloudmeta.protocol import ReclaimNotice
from gpu_autoscaler.events.spot import NoticeKind
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import ProviderId

LINK_LOCAL_URL = "http://169.254.169.254"
CALL_SECONDS_MAX = 2.0  # wall time; the address is on the same host
WAIT_SECONDS = 1  # of a read, for a change; the server takes whole seconds; 0: no wait
ANSWER_BYTES_MAX = 64 * 1024
FLAVOR = {"Metadata-Flavor": "Google"}
PREEMPTED, MAINTENANCE = "instance/preempted", "instance/maintenance-event"
# The machine has 30 s, of which the kubelet reserves the last 15 for system pods.
USABLE_NOTICE = timedelta(seconds=15)
MAINTENANCE_NOTICE = timedelta(minutes=60)  # of GPU machines that are not spot


class _Value(msgspec.Struct, frozen=True):
    text: str
    etag: str
    seen_at: datetime  # first read of this value


class GcpMetadata:
    """The metadata of one Compute Engine instance. The caller owns the session, which instances may share."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_url: str = LINK_LOCAL_URL,
        *,
        now: Callable[[], datetime],
        call_seconds_max: float = CALL_SECONDS_MAX,
        wait_seconds: int = WAIT_SECONDS,
        clock_factor: float = 1.0,
    ) -> None:
        """`now` is cluster time, which passes `clock_factor` times faster than the notice period. Google reports no
        deadline: it is derived from the first read.
        """
        self._session = session
        self._base_url = base_url.rstrip("/")
        self._now = now
        self._timeout = aiohttp.ClientTimeout(total=call_seconds_max)
        self._wait_seconds = wait_seconds
        self._clock_factor = clock_factor
        self._values: dict[str, _Value] = {}
        self._is_spot: bool | None = None

    async def reclaim_notices(self) -> Sequence[ReclaimNotice]:
        """Return the active notices; both keys are read concurrently. Raises TransientError."""
        if self._is_spot is None:
            self._is_spot = (await self._get("instance/scheduling/preemptible", {})).text == "TRUE"
        preempted, maintenance = await asyncio.gather(self._read(PREEMPTED), self._read(MAINTENANCE))
        notices = []
        if preempted.text == "TRUE":
            notices.append(self._notice("terminate", PREEMPTED, preempted, USABLE_NOTICE))
        if maintenance.text == "TERMINATE_ON_HOST_MAINTENANCE":
            ahead = USABLE_NOTICE if self._is_spot else MAINTENANCE_NOTICE
            notices.append(self._notice("maintenance", MAINTENANCE, maintenance, ahead))
        return notices

    async def rebalance_recommended_at(self) -> datetime | None:
        """Return None: Google sends no recommendations."""
        return None

    async def provider_id(self) -> ProviderId:
        """Return `gce://<project>/<zone>/<name>`, as the GCE cloud provider names nodes. Raises TransientError."""
        parts = ("project/project-id", "instance/zone", "instance/name")
        project, zone, name = [(await self._get(path, {})).text for path in parts]
        return ProviderId(f"gce://{project}/{zone.rpartition('/')[2]}/{name}")

    async def _read(self, path: str) -> _Value:
        """Return the value; wait briefly for a change if the value was read before."""
        known, query = self._values.get(path), {}
        if known is not None and self._wait_seconds > 0:
            query = {"wait_for_change": "true", "last_etag": known.etag, "timeout_sec": str(self._wait_seconds)}
        value = await self._get(path, query)
        if known is None or (value.text, value.etag) != (known.text, known.etag):
            self._values[path] = value
        return self._values[path]

    async def _get(self, path: str, query: dict[str, str]) -> _Value:
        url = f"{self._base_url}/computeMetadata/v1/{path}"
        try:
            async with self._session.get(
                url, params=query, headers=FLAVOR, timeout=self._timeout, allow_redirects=False
            ) as response:
                content = await response.content.read(ANSWER_BYTES_MAX)
                if response.status != 200 or response.headers.get("Metadata-Flavor") != "Google":
                    raise TransientError(f"{url}: HTTP {response.status}; check that it is Google's metadata address")
                text = content.decode("utf-8", errors="replace").strip()
                return _Value(text, response.headers.get("ETag", text), self._now())
        except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
            raise TransientError(f"{url}: {str(exc) or type(exc).__name__}; notices are unknown") from exc

    def _notice(self, kind: NoticeKind, key: str, value: _Value, ahead: timedelta) -> ReclaimNotice:
        return ReclaimNotice(kind, f"{key}/{value.etag}", value.seen_at + ahead * self._clock_factor)
