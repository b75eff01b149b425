"""Start of a process from a snapshot, by the runtime's own code on the simulated bus and store; corrupt snapshots."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import msgspec

from gpu_autoscaler.bus.protocol import Message, StreamSpan
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.runtime.service import MemoryInput
from gpu_autoscaler.runtime.snapshot_codec import FORMAT_VERSION
from gpu_autoscaler.runtime.snapshots import Snapshots
from gpu_autoscaler.sim.adapters.bus import SimBus
from gpu_autoscaler.sim.adapters.call_boundary import CallBoundary
from gpu_autoscaler.sim.faults.injection import Faults

RETRY_SECONDS = 1.0  # between attempts while store or broker is unavailable
SNAPSHOT_SECONDS = 180.0  # default of `store.snapshot_seconds`
_OLDER = timedelta(hours=1)


class SnapshotDiffers(AssertionError):
    """A snapshot and the later facts fold to another state than all facts."""


@dataclass(frozen=True, slots=True)
class SimStreams:
    """The stream lookups that `Snapshots` needs."""

    _boundary: CallBoundary
    _bus: SimBus

    async def span(self, stream: str) -> StreamSpan:
        await self._reached()
        return self._bus.span(stream)

    async def message_at(self, stream: str, sequence: int) -> Message | None:
        await self._reached()
        return self._bus.message_at(stream, sequence)

    async def facts(self, stream: str, facts: Sequence[type[Fact]], last: int) -> list[Recorded]:
        await self._reached()
        first = self._bus.span(stream).first_sequence
        kept = self._bus.facts[stream][first - 1 : last]
        return [recorded for recorded in kept if type(recorded.fact) in facts]

    async def _reached(self) -> None:
        await self._boundary.before_call()
        if self._bus.is_away:
            raise TransientError("the broker is unavailable")


@dataclass(frozen=True, slots=True)
class Start:
    """How a process starts from snapshots."""

    snapshots: Callable[[MemoryInput | None], Snapshots]  # with the memory that they have besides the state
    keeps: bool  # it saves some itself
    waits: bool  # for store and broker; False: it starts without a snapshot while one of them is unavailable
    has_memory: bool = False  # the service itself is that memory


async def resume(snapshots: Snapshots, boundary: CallBoundary, *, waits: bool) -> None:
    """Resume from the newest usable snapshot."""
    while True:
        try:
            await snapshots.resume()
        except TransientError:
            if waits:
                await boundary.sleep(RETRY_SECONDS)
                continue
        await boundary.continue_if_alive()
        return


async def keep(snapshots: Snapshots, boundary: CallBoundary) -> None:
    """Keep a snapshot every few minutes, forever."""
    while True:
        await boundary.sleep(SNAPSHOT_SECONDS)
        await snapshots.save()
        await boundary.continue_if_alive()


def corrupted(faults: Faults, label: bytes, body: bytes) -> tuple[bytes, bytes]:
    """Return label and body as the store will return them."""
    if faults.strikes("snapshot_corrupt"):
        place = int(faults.seconds("snapshot_corrupt", 0, len(body)))
        return label, body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]
    if faults.strikes("snapshot_of_old_version"):
        return _changed(label, lambda content: content.update(format_version=FORMAT_VERSION - 1)), body
    if faults.strikes("snapshot_of_other_stream"):
        return _changed(label, _backdate), body
    return label, body


def _changed(label: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    content: dict[str, Any] = msgspec.json.decode(label)
    change(content)
    return msgspec.json.encode(content)


def _backdate(content: dict[str, Any]) -> None:
    """Date its streams as if they were the former ones."""
    for mark in content["marks"]:
        mark["created_at"] = (msgspec.convert(mark["created_at"], datetime) - _OLDER).isoformat()
