"""The oracle of the soak: reads every stream from its first message, is never killed, and keeps every message.

What a service knows after kills and discarded messages is compared with the state folded from this archive.
"""

import asyncio
import contextlib
import struct
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec

from gpu_autoscaler.bus.protocol import Bus, Message
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.gpu import GpuNodeSampled
from gpu_autoscaler.model.errors import InvalidFact
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.decode import decode_message

STREAMS = tuple(sorted({fact.stream() for fact in FACTS}))
FOLDED_COUNT_MAX = 2_000  # at once
_LENGTH = struct.Struct("<I")
_RAW_SAMPLES = GpuNodeSampled.subject_root()  # part of no state, and most of the bytes
_decoder = msgspec.msgpack.Decoder(Message)


class Archive:
    """Writes every message of the streams to files, in order."""

    def __init__(self, bus: Bus, folder: Path) -> None:
        self.folder = folder
        self.last_sequences: dict[str, int] = dict.fromkeys(STREAMS, 0)
        self.missed: dict[str, int] = {}  # messages that were discarded before they were archived, by stream
        self._bus = bus
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._tasks = [asyncio.create_task(self._follow(stream), name=f"archive {stream}") for stream in STREAMS]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def failures(self) -> list[str]:
        """Return why streams are no longer archived."""
        ended = [task for task in self._tasks if task.done() and not task.cancelled()]
        return [f"{task.get_name()} ended: {task.exception()}" for task in ended]

    async def until(self, sequences: Mapping[str, int], seconds_max: float) -> None:
        """Wait until the archive has these messages. Raises TimeoutError, or AssertionError if it has ended."""
        async with asyncio.timeout(seconds_max):
            while any(self.last_sequences.get(stream, 0) < last for stream, last in sequences.items()):
                assert not self.failures(), "; ".join(self.failures())
                await asyncio.sleep(0.1)

    async def _follow(self, stream: str) -> None:
        projection = await self._bus.projection(stream)
        try:
            with (self.folder / stream).open("wb") as file:
                async for batch in projection:
                    for message in batch:
                        self._append(file, message)
                    file.flush()
        finally:
            await projection.close()

    def _append(self, file: BinaryIO, message: Message) -> None:
        stream, expected = message.stream, self.last_sequences[message.stream] + 1
        self.last_sequences[stream] = message.sequence
        if message.subject.startswith(_RAW_SAMPLES):
            return  # expires within seconds, and is part of no state
        if message.sequence > expected and stream != GpuNodeSampled.stream():
            self.missed[stream] = self.missed.get(stream, 0) + message.sequence - expected
        encoded = msgspec.msgpack.encode(msgspec.structs.replace(message, headers=dict(message.headers)))
        file.write(_LENGTH.pack(len(encoded)))
        file.write(encoded)


def messages(folder: Path, stream: str) -> Iterator[Message]:
    """Yield the archived messages of a stream."""
    for message, _ in _placed(folder, stream, 0):
        yield message


def _placed(folder: Path, stream: str, offset: int) -> Iterator[tuple[Message, int]]:
    """Yield each message and the place behind it."""
    path = folder / stream
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            if len(body := file.read(length)) < length:
                return  # the last one, which is being written
            offset += _LENGTH.size + length
            yield _decoder.decode(body), offset


def recorded_facts(folder: Path, stream: str, clock: Clock) -> Iterator[Recorded]:
    """Yield the archived facts of a stream; without messages that are no valid facts."""
    for message in messages(folder, stream):
        yield from decoded(message, clock)


def decoded(message: Message, clock: Clock) -> Iterator[Recorded]:
    """Yield the message's fact, if it is a valid one."""
    with contextlib.suppress(InvalidFact):
        yield decode_message(message, clock)


class ArchivedState:
    """The state of every archived fact, of these types; follows the archive forwards."""

    def __init__(self, folder: Path, clock: Clock, folds: Collection[type[Fact]] = FACTS) -> None:
        self.state = EMPTY_STATE
        self._folder = folder
        self._clock = clock
        self._types = frozenset(folds)
        self._offsets: dict[str, int] = {}

    def advance(self, last_sequences: Mapping[str, int]) -> ClusterState:
        """Return the state up to these sequences, of the streams that are named."""
        for stream, last in sorted(last_sequences.items()):
            batch: list[Recorded] = []
            for message, offset in _placed(self._folder, stream, self._offsets.get(stream, 0)):
                if message.sequence > last:
                    break
                self._offsets[stream] = offset
                batch += (item for item in decoded(message, self._clock) if type(item.fact) in self._types)
                if len(batch) >= FOLDED_COUNT_MAX:
                    self.state, batch = fold(self.state, batch), []
            self.state = fold(self.state, batch) if batch else self.state
        return self.state


def state_at(
    folder: Path, clock: Clock, last_sequences: Mapping[str, int], folds: Collection[type[Fact]] = FACTS
) -> ClusterState:
    """Return the state of every archived fact up to these sequences; of the streams that are named, and these types."""
    return ArchivedState(folder, clock, folds).advance(last_sequences)
