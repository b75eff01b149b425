"""How a process begins that starts from a snapshot: the runtime's own code, on the run's broker and store.

What a fault makes of a snapshot stands here as well: kept damaged, by an older version, or of other streams.
"""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import msgspec

from gpu_autoscaler.bus.protocol import Message, StreamSpan
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.runtime.snapshot_codec import FORMAT_VERSION
from gpu_autoscaler.runtime.snapshots import Snapshots
from gpu_autoscaler.sim.faults import Faults
from gpu_autoscaler.sim.gate import Gate
from gpu_autoscaler.sim.record import Record

AGAIN_SECONDS = 1.0  # until a start tries again that found store or broker away
KEPT_SECONDS = 180.0  # `store.snapshot_seconds` of the settings
_OLDER = timedelta(hours=1)


class SnapshotDiffers(AssertionError):
    """A snapshot and what came since are another state than all facts."""


class SimStreams:
    """What `Snapshots` asks of a bus."""

    def __init__(self, gate: Gate, record: Record) -> None:
        self._gate = gate
        self._record = record

    async def span(self, stream: str) -> StreamSpan:
        """See Bus."""
        await self._reached()
        return self._record.span(stream)

    async def message_at(self, stream: str, sequence: int) -> Message | None:
        """See Bus."""
        await self._reached()
        return self._record.message_at(stream, sequence)

    async def _reached(self) -> None:
        await self._gate.leave()
        if self._record.is_away:
            raise TransientError("the broker is away")


async def resume(snapshots: Snapshots, gate: Gate) -> None:
    """Begin where the last usable snapshot ends, however long store and broker are away."""
    while True:
        try:
            await snapshots.resume()
        except TransientError:
            await gate.wait(AGAIN_SECONDS)
        else:
            await gate.live()
            return


async def keep(snapshots: Snapshots, gate: Gate) -> None:
    """Keep one every few minutes, for ever."""
    while True:
        await gate.wait(KEPT_SECONDS)
        await snapshots.keep()
        await gate.live()


def spoilt(faults: Faults, label: bytes, body: bytes) -> tuple[bytes, bytes]:
    """Return label and body as the store will have them."""
    if faults.strikes("snapshot_corrupt"):
        place = int(faults.seconds("snapshot_corrupt", 0, len(body)))
        return label, body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]
    if faults.strikes("snapshot_of_old_version"):
        return _changed(label, lambda told: told.update(format_version=FORMAT_VERSION - 1)), body
    if faults.strikes("snapshot_of_other_stream"):
        return _changed(label, _age), body
    return label, body


def _changed(label: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    told: dict[str, Any] = msgspec.json.decode(label)
    change(told)
    return msgspec.json.encode(told)


def _age(told: dict[str, Any]) -> None:
    """Its streams are those that were there before."""
    for mark in told["marks"]:
        mark["created_at"] = (msgspec.convert(mark["created_at"], datetime) - _OLDER).isoformat()
