"""Stores messages on the broker: the same id until the stream has it, within a limit. Nothing is dropped silently."""

import asyncio
from collections import deque
from collections.abc import Sequence

import msgspec

from gpu_autoscaler.bus.nats_link import NO_RESPONDERS, NatsLink, NoResponders
from gpu_autoscaler.bus.nats_read import MESSAGE_ID, stored_message
from gpu_autoscaler.bus.nats_wire import Frame, command, header_block, is_header, is_subject
from gpu_autoscaler.bus.protocol import Ack, Publication
from gpu_autoscaler.bus.streams import MESSAGE_BYTES_MAX, SERVER_PAYLOAD_BYTES_MAX, Declared
from gpu_autoscaler.model.errors import ConfigError, PermanentError, StalePlan, TransientError

WINDOW_COUNT = 2048  # messages of one call in flight; a stream of the server refuses more than 10,000 of all
SENT_AT_ONCE_COUNT = 512  # written in one piece, while the answers to those before are on their way
WINDOW_BYTES_MAX = SERVER_PAYLOAD_BYTES_MAX
PAUSE_SECONDS_MIN = 0.05
PAUSE_SECONDS_MAX = 1.0
LOOKS_COUNT = 3  # a second apart, before a stream is taken for gone
STORING = "storing messages"

WRONG_LAST_SEQUENCE = (10071, 10164)
# Refused with a code of 400s, but it passes: the first copy of this message is still on its way to the other servers
# of a cluster (JSStreamDuplicateMessageConflict), the account's share of the disk is used up, or the stream has more in
# hand than it takes (JSStreamTooManyRequests).
# Source: nats-server 2.15, server/errors.json (read 2026-11-21).
PASSING = (10158, 10002, 10167)


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


class _Flight:
    """The messages of one call: which of them are on their way, and what was answered."""

    def __init__(self, publications: Sequence[Publication]) -> None:
        self.publications = publications
        self.acks: dict[int, Ack] = {}
        self.waiting: dict[int, bytes] = {}  # number of the publication to the token of its answer
        self.waiting_bytes = 0
        self.answers: list[tuple[int, Frame]] = []  # not read yet
        self.moved = asyncio.Event()

    @property
    def has_room(self) -> bool:
        """True while more may be sent: bounded in number and in bytes, at least one."""
        return not self.waiting or (len(self.waiting) < WINDOW_COUNT and self.waiting_bytes < WINDOW_BYTES_MAX)

    def sent(self, number: int, token: bytes) -> None:
        """This one is on its way."""
        self.waiting[number] = token
        self.waiting_bytes += len(self.publications[number].payload)

    def answered(self) -> list[tuple[int, Frame]]:
        """Return what came since the last look; it is waited for no longer."""
        answers, self.answers = self.answers, []
        for number, _ in answers:
            del self.waiting[number]
            self.waiting_bytes -= len(self.publications[number].payload)
        return answers


class NatsPublisher:
    """Publishes over one link. Answers to all that is in flight come to one inbox and are counted."""

    def __init__(self, link: NatsLink, declared: Declared) -> None:
        self._link = link
        self._declared = declared
        self._with_ttl = [spec for spec in declared.streams if spec.message_ttls]
        self._inbox = ""
        self._opening = asyncio.Lock()
        self._number = 0
        self._waiting: dict[bytes, tuple[_Flight, int]] = {}  # by the last token of the answer's subject
        self._flights: set[_Flight] = set()

    async def store(self, publications: Sequence[Publication]) -> list[Ack]:
        """Return the acks in the order given. Raises as `Bus.publish_many` says."""
        for publication in publications:
            self._refuse_unsendable(publication)
        flight = _Flight(publications)
        todo = deque(range(len(publications)))
        loop = asyncio.get_running_loop()
        started = loop.time()
        pause = PAUSE_SECONDS_MIN
        while todo:
            count = len(flight.acks)
            cause = await self._fly(flight, todo)
            if cause is None:
                break
            self._link.failed(STORING, str(cause))
            if len(flight.acks) > count:
                started, pause = loop.time(), PAUSE_SECONDS_MIN
            waited = loop.time() - started
            if isinstance(cause, NoResponders) and waited >= self._link.waits.no_stream_seconds_max:
                await self._refuse_without_stream(publications[todo[0]].subject)
            if waited + pause > self._link.waits.publish_seconds_max:
                first = publications[todo[0]]
                raise TransientError(
                    f"message {first.message_id!r} on {first.subject} and {len(todo) - 1} after it were not confirmed "
                    f"within {self._link.waits.publish_seconds_max:g} s: {cause}; repeat with the same id"
                ) from cause
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSE_SECONDS_MAX)
        self._link.went_well(STORING)
        return [flight.acks[number] for number in range(len(publications))]

    async def _fly(self, flight: _Flight, todo: deque[int]) -> TransientError | None:
        """Send and count until all of `todo` is confirmed; else why not, and `todo` has what is left, in order.

        Raises StalePlan and PermanentError as soon as one message is refused: what else is in flight may be stored.
        """
        missed: list[int] = []
        cause: TransientError | None = None
        self._flights.add(flight)
        try:
            await self._link.wait_until_up()
            await self._listen()
            connection = self._link.connections_count
            while flight.waiting or (todo and cause is None):
                if cause is None and todo and flight.has_room:
                    await self._send(flight, todo)
                await self._landing(flight, connection)
                for number, answer in flight.answered():
                    try:
                        flight.acks[number] = await self._read(flight.publications[number], answer)
                    except TransientError as exc:
                        missed.append(number)
                        cause = cause or exc
        except TransientError as exc:
            cause = exc
        finally:
            self._flights.discard(flight)
            for token in flight.waiting.values():
                self._waiting.pop(token, None)
            todo.extendleft(sorted((*missed, *flight.waiting), reverse=True))
            flight.waiting, flight.waiting_bytes, flight.answers = {}, 0, []
        return cause

    async def _listen(self) -> None:
        async with self._opening:
            if not self._inbox:
                self._inbox = await self._link.listen(self)
                self._link.listeners.add(self._broken)

    async def _send(self, flight: _Flight, todo: deque[int]) -> None:
        """Write the next messages in one piece. Raises TransientError when the broker is away."""
        commands: list[bytes] = []
        while todo and len(commands) < SENT_AT_ONCE_COUNT and flight.has_room:
            number = todo.popleft()
            publication = flight.publications[number]
            self._number += 1
            token = b"%d" % self._number
            self._waiting[token] = (flight, number)
            flight.sent(number, token)
            reply = f"{self._inbox}.{self._number}"
            commands.append(command(publication.subject, reply, self._headers(publication), publication.payload))
        await self._link.write(commands)

    async def _landing(self, flight: _Flight, connection: int) -> None:
        """Wait for answers. Raises TransientError when none can come, or none comes at all for too long."""
        while not flight.answers:
            if not self._link.is_up or self._link.connections_count != connection:
                raise TransientError("the connection to the broker broke before it answered")
            flight.moved.clear()
            try:
                async with asyncio.timeout(self._link.waits.silence_seconds_max):
                    await flight.moved.wait()
            except TimeoutError as exc:
                if await self._link.is_silent(flight.moved.is_set):
                    self._link.doubt()
                    raise TransientError("the stream does not confirm") from exc

    def take(self, frames: Sequence[Frame]) -> None:
        """Answers: put each to those of its flight, and tell the flights that have any."""
        for frame in frames:
            waiting = self._waiting.pop(frame.subject.rpartition(b".")[2], None)
            if waiting is not None:
                flight, number = waiting
                flight.answers.append((number, frame))
        for flight in self._flights:
            if flight.answers:
                flight.moved.set()

    def _broken(self) -> None:
        for flight in self._flights:
            flight.moved.set()

    async def _read(self, publication: Publication, message: Frame) -> Ack:
        if message.headers and message.status[0] == NO_RESPONDERS:
            raise NoResponders(f"no stream takes {publication.subject} now")
        stored = _decoder.decode(message.payload)
        if stored.error is None:
            return Ack(stream=stored.stream, sequence=stored.seq, is_duplicate=stored.duplicate)
        if stored.error.err_code in WRONG_LAST_SEQUENCE:
            return await self._own_or_stale(publication, stored.error.description)
        if stored.error.code >= 500 or stored.error.err_code in PASSING:
            raise TransientError(f"the stream did not take it: {stored.error.description}")
        raise PermanentError(
            f"the broker refuses message {publication.message_id!r} on {publication.subject}: "
            f"{stored.error.description} (JetStream error {stored.error.err_code})"
        )

    async def _own_or_stale(self, publication: Publication, description: str) -> Ack:
        """The server looks at the fence before the id, so a repeat of what was stored is refused as stale."""
        stream = await self._stream_of(publication.subject)
        last = None if stream is None else await stored_message(self._link, stream, last_on=publication.subject)
        if last is not None and last.message_id == publication.message_id:
            return Ack(stream=last.stream, sequence=last.sequence, is_duplicate=True)
        raise StalePlan(
            f"{publication.subject}: sequence {publication.expected_last_subject_sequence} is no longer the last one "
            f"({description}); fold what came since and decide again"
        )

    async def _stream_of(self, subject: str) -> str | None:
        names = (await self._link.call("STREAM.NAMES", {"subject": subject})).get("streams") or ()
        return next(iter(names), None)

    async def _refuse_without_stream(self, subject: str) -> None:
        """Return where there is a stream, or nobody can say: a server that just took the lead may not know at once."""
        for _ in range(LOOKS_COUNT):
            try:
                if await self._stream_of(subject) is not None:
                    return
            except TransientError:
                return  # JetStream itself is away; that passes
            await asyncio.sleep(PAUSE_SECONDS_MAX)
        declared = self._declared.stream_of(subject)
        if declared is not None:
            mistake = f"stream {declared.name} was deleted while it was in use; find out by whom, then start again"
            raise ConfigError("broker", [mistake])
        raise PermanentError(f"no stream takes messages on {subject}; declare one, or correct the subject")

    def _headers(self, publication: Publication) -> bytes:
        headers = dict(publication.headers)
        headers[MESSAGE_ID] = publication.message_id
        if publication.expected_last_subject_sequence is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(publication.expected_last_subject_sequence)
        for spec in self._with_ttl:
            ttl_seconds = spec.ttl_seconds(publication.subject)
            if ttl_seconds is not None:
                headers["Nats-TTL"] = str(ttl_seconds)
        return header_block(headers)

    def _refuse_unsendable(self, publication: Publication) -> None:
        if not is_subject(publication.subject):
            raise PermanentError(f"message {publication.message_id!r}: {publication.subject!r} is no subject")
        if mistaken := [key for key in publication.headers if not is_header(key)]:
            raise PermanentError(f"message {publication.message_id!r}: {mistaken[0]!r} is no name of a header")
        size = publication_bytes(publication)
        if size <= MESSAGE_BYTES_MAX:
            return
        spec = self._declared.stream_of(publication.subject)
        is_limited = spec is None or spec.message_bytes_max >= 0
        limit = MESSAGE_BYTES_MAX if is_limited else self._link.client.max_payload
        if size > limit:
            raise PermanentError(
                f"message {publication.message_id!r} on {publication.subject} has {size} bytes with its headers, at "
                f"most {limit} are taken; split it"
            )


def publication_bytes(publication: Publication) -> int:
    """Size with headers, as a stream counts it; a little more where the broker's own headers are short."""
    headers = sum(len(key) + len(value.encode()) + 4 for key, value in publication.headers.items())
    return len(publication.payload) + headers + len(publication.message_id.encode()) + 128
