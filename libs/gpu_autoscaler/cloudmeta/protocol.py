"""The interface of every cloud's instance metadata and event queue."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Protocol, runtime_checkable

import aiohttp
import msgspec

from gpu_autoscaler.events.spot import NoticeKind
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.observed import Instant


class ReclaimNotice(msgspec.Struct, frozen=True):
    """An interruption notice. A repeated read of the same notice is equal."""

    kind: NoticeKind
    provider_event: str  # the cloud's event id, otherwise its deadline as text
    reclaim_at: Instant | None


async def exchange(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str],
    timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's own
    bytes_max: int,
    body: bytes | None = None,
) -> tuple[int, bytes]:
    """Return status and content. Raises TransientError for no answer, or one of more than `bytes_max`."""
    try:
        async with session.request(
            method, url, headers=headers, data=body, timeout=timeout, allow_redirects=False
        ) as response:
            content = bytearray()
            async for chunk in response.content.iter_any():  # one read may return a part
                content += chunk
                if len(content) > bytes_max:
                    raise TransientError(f"{method} {url}: more than {bytes_max} bytes; check the address")
            return response.status, bytes(content)
    except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
        raise TransientError(f"{method} {url}: {str(exc) or type(exc).__name__}; notices are unknown") from exc


class InstanceMetadata(Protocol):
    """The instance metadata of one instance. Every call has its own time limit. All methods raise TransientError when
    the metadata cannot be read, which does not mean "no notice"."""

    async def reclaim_notices(self) -> Sequence[ReclaimNotice]:
        """Return every active notice; none if the cloud reports none."""

    async def rebalance_recommended_at(self) -> datetime | None:
        """Return the time of the active rebalance recommendation, None if the cloud reports none."""

    async def provider_id(self) -> ProviderId:
        """Return the identity of this instance, in the form of Kubernetes' spec.providerID."""


class QueuedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One received message of a queue."""

    receipt: str  # to delete or hide this delivery
    body: str
    sent_at: Instant
    received_at: Instant


class EventQueue(Protocol):
    """A cloud's queue of events about instances. Messages are redelivered until they are deleted. All methods raise
    TransientError when the queue is unreachable or refuses."""

    async def receive(self) -> Sequence[QueuedEvent]:
        """Return a few waiting messages; none after some seconds."""

    async def delete(self, event: QueuedEvent) -> None:
        """Delete a handled message."""

    async def hide(self, event: QueuedEvent, seconds: float) -> None:
        """Delay its redelivery by `seconds`, or by the queue's maximum."""

    async def complete_hook(self, group: str, hook: str, token: str) -> None:
        """Complete the lifecycle action: the instance may end. An expired hook is no error."""

    async def extend_hook(self, group: str, hook: str, token: str) -> None:
        """Extend the lifecycle action: the instance must not end yet. An expired hook is no error."""

    async def close(self) -> None:
        """Close connections."""


@runtime_checkable
class ReleasesEvents(Protocol):
    """Metadata of a cloud that delays an event until its deadline, or until it is approved."""

    async def release(self, drained: Collection[ProviderId]) -> None:
        """Approve, once, the events whose machines are all in `drained`. Raises TransientError."""
