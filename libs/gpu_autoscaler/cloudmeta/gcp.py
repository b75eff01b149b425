"""Google Cloud's instance metadata: whether this machine is taken back, or its host is about to be serviced.

Two keys tell it, each a value that changes and may change back. A read waits a little for a change, and one that came
between two reads is seen by its ETag. Source: Compute Engine, "View and query VM metadata" (wait_for_change),
"Preemptible VM instances", "Handle GPU host maintenance events"; GKE, "Spot VMs" (of the 30 s, pods of users have 15);
read 2026-11-21.
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
WAITED_SECONDS = 1  # of a read, for a change: whole seconds are what the server takes; 0: not at all
ANSWER_BYTES_MAX = 64 * 1024
FLAVOR = {"Metadata-Flavor": "Google"}
PREEMPTED, MAINTENANCE = "instance/preempted", "instance/maintenance-event"
# The machine has 30 s, of which the kubelet keeps the last 15 for what the system needs to the end.
USABLE = timedelta(seconds=15)
MAINTENANCE_AHEAD = timedelta(minutes=60)  # of machines with GPUs that are no spot


class _Value(msgspec.Struct, frozen=True):
    text: str
    etag: str
    seen_at: datetime  # when it was first read so


class GcpMetadata:
    """The metadata of one Compute Engine instance. The session is the caller's: many instances may share it."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_url: str = LINK_LOCAL_URL,
        *,
        now: Callable[[], datetime],
        call_seconds_max: float = CALL_SECONDS_MAX,
        waited_seconds: int = WAITED_SECONDS,
        clock_factor: float = 1.0,
    ) -> None:
        """`now` is cluster time, and passes so many times faster than the time that a notice leaves: Google tells no
        deadline, so that it counts from the first sight.
        """
        self._session = session
        self._base_url = base_url.rstrip("/")
        self._now = now
        self._timeout = aiohttp.ClientTimeout(total=call_seconds_max)
        self._waited_seconds = waited_seconds
        self._clock_factor = clock_factor
        self._values: dict[str, _Value] = {}
        self._is_spot: bool | None = None

    async def reclaim_notices(self) -> Sequence[ReclaimNotice]:
        """Return what stands, both keys read at once; none where both say so. Raises TransientError."""
        if self._is_spot is None:
            self._is_spot = (await self._get("instance/scheduling/preemptible", {})).text == "TRUE"
        preempted, maintenance = await asyncio.gather(self._read(PREEMPTED), self._read(MAINTENANCE))
        found = []
        if preempted.text == "TRUE":
            found.append(self._notice("terminate", PREEMPTED, preempted, USABLE))
        if maintenance.text == "TERMINATE_ON_HOST_MAINTENANCE":
            ahead = USABLE if self._is_spot else MAINTENANCE_AHEAD
            found.append(self._notice("maintenance", MAINTENANCE, maintenance, ahead))
        return found

    async def rebalance_recommended_at(self) -> datetime | None:
        """Return None: Google hints at nothing."""
        return None

    async def provider_id(self) -> ProviderId:
        """Return `gce://<project>/<zone>/<name>`, as the GCE cloud provider names nodes. Raises TransientError."""
        parts = ("project/project-id", "instance/zone", "instance/name")
        project, zone, name = [(await self._get(path, {})).text for path in parts]
        return ProviderId(f"gce://{project}/{zone.rpartition('/')[2]}/{name}")

    async def _read(self, path: str) -> _Value:
        """Return the value, which has changed since the last read, or has been waited for a little, if at all."""
        known, query = self._values.get(path), {}
        if known is not None and self._waited_seconds > 0:
            query = {"wait_for_change": "true", "last_etag": known.etag, "timeout_sec": str(self._waited_seconds)}
        read = await self._get(path, query)
        if known is None or (read.text, read.etag) != (known.text, known.etag):
            self._values[path] = read
        return self._values[path]

    async def _get(self, path: str, query: dict[str, str]) -> _Value:
        url = f"{self._base_url}/computeMetadata/v1/{path}"
        try:
            async with self._session.get(
                url, params=query, headers=FLAVOR, timeout=self._timeout, allow_redirects=False
            ) as answer:
                content = await answer.content.read(ANSWER_BYTES_MAX)
                if answer.status != 200 or answer.headers.get("Metadata-Flavor") != "Google":
                    raise TransientError(f"{url}: HTTP {answer.status}; is it Google's metadata address?")
                text = content.decode("utf-8", errors="replace").strip()
                return _Value(text, answer.headers.get("ETag", text), self._now())
        except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
            raise TransientError(f"{url}: {str(exc) or type(exc).__name__}; no answer is not 'no notice'") from exc

    def _notice(self, kind: NoticeKind, key: str, value: _Value, ahead: timedelta) -> ReclaimNotice:
        return ReclaimNotice(kind, f"{key}/{value.etag}", value.seen_at + ahead * self._clock_factor)
