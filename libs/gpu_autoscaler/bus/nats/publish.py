"""Publishes messages, retried with the same id until the stream confirms, within a limit. None is dropped silently."""

import asyncio
from collections import deque
from collections.abc import Sequence

import msgspec
import structlog

from gpu_autoscaler.bus.nats.link import NO_RESPONDERS, NatsLink, NoResponders
from gpu_autoscaler.bus.nats.read import MESSAGE_ID, stored_message
from gpu_autoscaler.bus.nats.wire import Command, Frame, header_block, is_header, is_subject
from gpu_autoscaler.bus.protocol import Ack, Publication
from gpu_autoscaler.bus.streams import MESSAGE_BYTES_MAX, SERVER_PAYLOAD_BYTES_MAX, BusDeclaration
from gpu_autoscaler.model.errors import (
    MIGRATE_COMMAND,
    ConfigError,
    MessageTooLarge,
    PermanentError,
    StalePlan,
    TransientError,
)

WINDOW_COUNT = 2048  # in flight per call; the server refuses more than 10,000 per stream
WRITE_COUNT_MAX = 512  # written at once, while earlier answers are in flight
WINDOW_BYTES_MAX = SERVER_PAYLOAD_BYTES_MAX
PAUSE_SECONDS_MIN = 0.05
PAUSE_SECONDS_MAX = 1.0
CHECKS_COUNT = 3  # a second apart, before a stream counts as deleted
STORING = "storing messages"

WRONG_LAST_SEQUENCE = (10071, 10164)
# Temporary errors despite a 400 code: the first copy of this message is still being replicated in the cluster
# (JSStreamDuplicateMessageConflict), the account's disk quota is exhausted, or the stream has too many requests
# (JSStreamTooManyRequests). Source: nats-server 2.15, server/errors.json (read 2026-11-21).
TEMPORARY_ERRORS = (10158, 10002, 10167)

TOO_LARGE = 10054  # JSStreamMessageExceedsMaximumErr, of the same list
NO_MESSAGE_TTL = 10166  # JSMessageTTLDisabledErr


class _Refusal(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = "no reason given"


class _Answer(msgspec.Struct):
    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: _Refusal | None = None


_decoder = msgspec.json.Decoder(_Answer)
_log = structlog.get_logger(__name__)


class _Batch:
    """The messages of one call: those in flight, and their answers."""

    def __init__(self, publications: Sequence[Publication]) -> None:
        self.publications = publications
        self.acks: dict[int, Ack] = {}
        self.waiting: dict[int, bytes] = {}  # token of the answer by number of the publication
        self.waiting_bytes = 0
        self.answers: list[tuple[int, Frame]] = []  # not yet read
        self.changed = asyncio.Event()

    @property
    def has_capacity(self) -> bool:
        """True while more may be sent: limited in number and bytes, but always at least one."""
        return not self.waiting or (len(self.waiting) < WINDOW_COUNT and self.waiting_bytes < WINDOW_BYTES_MAX)

    def add(self, number: int, token: bytes) -> None:
        """Record that this publication was sent."""
        self.waiting[number] = token
        self.waiting_bytes += len(self.publications[number].payload)

    def take_answers(self) -> list[tuple[int, Frame]]:
        """Return and clear the answers received since the last call."""
        answers, self.answers = self.answers, []
        for number, _ in answers:
            del self.waiting[number]
            self.waiting_bytes -= len(self.publications[number].payload)
        return answers


class NatsPublisher:
    """Publishes over one link. The answers to all messages in flight arrive at one inbox."""

    def __init__(self, link: NatsLink, declared: BusDeclaration) -> None:
        self._link = link
        self._declared = declared
        self._ttl_streams = [spec for spec in declared.streams if spec.message_ttls]
        self._inbox = ""
        self._opening = asyncio.Lock()
        self._number = 0
        self._waiting: dict[bytes, tuple[_Batch, int]] = {}  # by the last token of the answer's subject
        self._batches: set[_Batch] = set()

    async def store(self, publications: Sequence[Publication]) -> list[Ack]:
        """Return the acks in the given order. Raises as `Bus.publish_many`."""
        for publication in publications:
            self._validate(publication)
        batch = _Batch(publications)
        pending = deque(range(len(publications)))
        loop = asyncio.get_running_loop()
        started = loop.time()
        pause = PAUSE_SECONDS_MIN
        while pending:
            count = len(batch.acks)
            cause = await self._send_all(batch, pending)
            if cause is None:
                break
            self._link.report_failure(STORING, str(cause))
            if len(batch.acks) > count:
                started, pause = loop.time(), PAUSE_SECONDS_MIN
            waited = loop.time() - started
            if isinstance(cause, NoResponders) and waited >= self._link.timeouts.no_stream_seconds_max:
                await self._refuse_without_stream(publications[pending[0]].subject)
            if waited + pause > self._link.timeouts.publish_seconds_max:
                first = publications[pending[0]]
                raise TransientError(
                    f"message {first.message_id!r} on {first.subject} and {len(pending) - 1} others were not confirmed "
                    f"within {self._link.timeouts.publish_seconds_max:g} s: {cause}; repeat with the same id"
                ) from cause
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSE_SECONDS_MAX)
        self._link.report_success(STORING)
        return [batch.acks[number] for number in range(len(publications))]

    async def _send_all(self, batch: _Batch, pending: deque[int]) -> TransientError | None:
        """Send until all of `pending` is confirmed; otherwise return the error, with the rest in `pending`, in order.

        Raises StalePlan and PermanentError once a message is refused; others in flight may still be stored.
        """
        missed: list[int] = []
        cause: TransientError | None = None
        self._batches.add(batch)
        try:
            await self._link.wait_until_up()
            await self._listen()
            connection = self._link.connections_count
            while batch.waiting or (pending and cause is None):
                if cause is None and pending and batch.has_capacity:
                    await self._send(batch, pending)
                await self._wait_for_answers(batch, connection)
                for number, answer in batch.take_answers():
                    try:
                        batch.acks[number] = await self._read(batch.publications[number], answer)
                    except TransientError as exc:
                        missed.append(number)
                        cause = cause or exc
        except TransientError as exc:
            cause = exc
        finally:
            self._batches.discard(batch)
            for token in batch.waiting.values():
                self._waiting.pop(token, None)
            pending.extendleft(sorted((*missed, *batch.waiting), reverse=True))
            batch.waiting, batch.waiting_bytes, batch.answers = {}, 0, []
        return cause

    async def _listen(self) -> None:
        async with self._opening:
            if not self._inbox:
                self._inbox = await self._link.subscribe(self)
                self._link.listeners.add(self._wake_all)

    async def _send(self, batch: _Batch, pending: deque[int]) -> None:
        """Write the next messages at once. Raises TransientError when the broker is away."""
        commands: list[Command] = []
        while pending and len(commands) < WRITE_COUNT_MAX and batch.has_capacity:
            number = pending.popleft()
            publication = batch.publications[number]
            self._number += 1
            token = b"%d" % self._number
            self._waiting[token] = (batch, number)
            batch.add(number, token)
            reply = f"{self._inbox}.{self._number}"
            commands.append(Command(publication.subject, reply, self._headers(publication), publication.payload))
        await self._link.send_all(commands)

    async def _wait_for_answers(self, batch: _Batch, connection: int) -> None:
        """Wait for answers. Raises TransientError when the connection broke or the broker is silent for too long."""
        while not batch.answers:
            if not self._link.is_up or self._link.connections_count != connection:
                raise TransientError("connection to the broker broke before the answer")
            batch.changed.clear()
            try:
                async with asyncio.timeout(self._link.timeouts.silence_seconds_max):
                    await batch.changed.wait()
            except TimeoutError as exc:
                if await self._link.is_unresponsive(batch.changed.is_set):
                    self._link.verify()
                    raise TransientError("stream does not confirm") from exc

    def receive(self, frames: Sequence[Frame]) -> None:
        """Assign answers to their batches, and wake batches with new answers."""
        for frame in frames:
            waiting = self._waiting.pop(frame.subject.rpartition(b".")[2], None)
            if waiting is not None:
                batch, number = waiting
                batch.answers.append((number, frame))
        for batch in self._batches:
            if batch.answers:
                batch.changed.set()

    def _wake_all(self) -> None:
        for batch in self._batches:
            batch.changed.set()

    async def _read(self, publication: Publication, message: Frame) -> Ack:
        if message.headers and message.status[0] == NO_RESPONDERS:
            raise NoResponders(f"no stream stores {publication.subject} now")
        stored = _decoder.decode(message.payload)
        if stored.error is None:
            return Ack(stream=stored.stream, sequence=stored.seq, is_duplicate=stored.duplicate)
        if stored.error.err_code in WRONG_LAST_SEQUENCE:
            return await self._duplicate_or_stale(publication, stored.error.description)
        if stored.error.code >= 500 or stored.error.err_code in TEMPORARY_ERRORS:
            raise TransientError(f"stream did not store the message: {stored.error.description}")
        if stored.error.err_code == NO_MESSAGE_TTL:
            self._drop_ttl(publication.subject)
            raise TransientError(f"stream did not store the message: {stored.error.description}")
        refused = MessageTooLarge if stored.error.err_code == TOO_LARGE else PermanentError
        code = f" (JetStream error {stored.error.err_code})" if stored.error.err_code else ""  # the gateway has none
        what = f"message {publication.message_id!r} on {publication.subject} refused"
        raise refused(f"{what}: {stored.error.description}{code}")

    async def _duplicate_or_stale(self, publication: Publication, description: str) -> Ack:
        """The server checks the fence before the id, so it refuses a duplicate as stale."""
        stream = await self._stream_of(publication.subject)
        last = None if stream is None else await stored_message(self._link, stream, last_on=publication.subject)
        if last is not None and last.message_id == publication.message_id:
            return Ack(stream=last.stream, sequence=last.sequence, is_duplicate=True)
        raise StalePlan(
            f"{publication.subject}: sequence {publication.expected_last_subject_sequence} is no longer the last one "
            f"({description}); fold the newer facts and decide again",
            last_sequence=None if stream is None else 0 if last is None else last.sequence,
        )

    async def _stream_of(self, subject: str) -> str | None:
        names = (await self._link.call("STREAM.NAMES", {"subject": subject})).get("streams") or ()
        return next(iter(names), None)

    async def _refuse_without_stream(self, subject: str) -> None:
        """Raise when no stream stores the subject; a newly elected leader may not know its streams at once."""
        for _ in range(CHECKS_COUNT):
            try:
                if await self._stream_of(subject) is not None:
                    return
            except TransientError:
                return  # JetStream is away; temporary
            await asyncio.sleep(PAUSE_SECONDS_MAX)
        declared = self._declared.stream_of(subject)
        if declared is not None:
            error = f"stream {declared.name} was deleted while in use; find out by whom, then restart"
            raise ConfigError("broker", [error])
        raise PermanentError(f"no stream stores messages on {subject}; declare one, or correct the subject")

    def _drop_ttl(self, subject: str) -> None:
        """Publish without a time to live from now on: the stream, of an earlier release, does not allow it yet."""
        spec = self._declared.stream_of(subject)
        if spec in self._ttl_streams:
            self._ttl_streams.remove(spec)
            step = f"{MIGRATE_COMMAND}, then restart"
            _log.warning("time to live of messages left out", stream=spec.name, ttls=spec.message_ttls, step=step)

    def _headers(self, publication: Publication) -> bytes:
        headers = dict(publication.headers)
        headers[MESSAGE_ID] = publication.message_id
        if publication.expected_last_subject_sequence is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(publication.expected_last_subject_sequence)
        for spec in self._ttl_streams:
            ttl_seconds = spec.ttl_seconds(publication.subject)
            if ttl_seconds is not None:
                headers["Nats-TTL"] = str(ttl_seconds)
        return header_block(headers)

    def _validate(self, publication: Publication) -> None:
        if not is_subject(publication.subject):
            raise PermanentError(f"message {publication.message_id!r}: {publication.subject!r} is not a valid subject")
        if invalid := [key for key in publication.headers if not is_header(key)]:
            raise PermanentError(f"message {publication.message_id!r}: {invalid[0]!r} is not a valid header name")
        size = publication_bytes(publication)
        if size <= MESSAGE_BYTES_MAX:
            return
        spec = self._declared.stream_of(publication.subject)
        is_limited = spec is None or spec.message_bytes_max >= 0
        limit = MESSAGE_BYTES_MAX if is_limited else self._link.client.max_payload
        if size > limit:
            raise MessageTooLarge(
                f"message {publication.message_id!r} on {publication.subject} has {size} bytes with its headers; at "
                f"most {limit} are allowed; split it"
            )


def publication_bytes(publication: Publication) -> int:
    """Return the size with headers as a stream counts it, or slightly more."""
    headers = sum(len(key) + len(value.encode()) + 4 for key, value in publication.headers.items())
    return len(publication.payload) + headers + len(publication.message_id.encode()) + 128
