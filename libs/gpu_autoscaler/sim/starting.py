"""Start of a process from a snapshot: the runtime's own code on the simulated bus and store.

Also corrupts snapshots: damaged bytes, an older format version, or marks of other streams.
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

AGAIN_SECONDS = 1.0  # between attempts while store or broker is unavailable
KEPT_SECONDS = 180.0  # default of `store.snapshot_seconds`
_OLDER = timedelta(hours=1)


class SnapshotDiffers(AssertionError):
    """A snapshot and the later facts fold to another state than all facts."""


class SimStreams:
    """The stream lookups that `Snapshots` needs."""

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
    """Resume from the newest usable snapshot; retry while store or broker is unavailable."""
    while True:
        try:
            await snapshots.resume()
        except TransientError:
            await gate.wait(AGAIN_SECONDS)
        else:
            await gate.live()
            return


async def keep(snapshots: Snapshots, gate: Gate) -> None:
    """Keep a snapshot every few minutes, forever."""
    while True:
        await gate.wait(KEPT_SECONDS)
        await snapshots.keep()
        await gate.live()


def spoilt(faults: Faults, label: bytes, body: bytes) -> tuple[bytes, bytes]:
    """Return label and body as the store will return them."""
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
    """Date its streams as if they were the former ones."""
    for mark in told["marks"]:
        mark["created_at"] = (msgspec.convert(mark["created_at"], datetime) - _OLDER).isoformat()
