"""Stores messages on the broker: the same id until the stream has it, within a limit. Nothing is dropped silently."""

import asyncio
from collections.abc import Collection, Sequence

import msgspec
import nats.errors

from gpu_autoscaler.bus.nats_link import NO_RESPONDERS, NatsLink, NoAnswerer
from gpu_autoscaler.bus.nats_read import MESSAGE_ID, stored_message
from gpu_autoscaler.bus.nats_wire import Frame
from gpu_autoscaler.bus.protocol import Ack, Publication
from gpu_autoscaler.bus.streams import MESSAGE_BYTES_MAX, SERVER_PAYLOAD_BYTES_MAX, Declared
from gpu_autoscaler.model.errors import ConfigError, PermanentError, StalePlan, TransientError

WINDOW_COUNT = 1024  # messages in flight
WINDOW_BYTES_MAX = SERVER_PAYLOAD_BYTES_MAX
PAUSE_SECONDS_MIN = 0.05
PAUSE_SECONDS_MAX = 1.0
STORING = "storing messages"

WRONG_LAST_SEQUENCE = (10071, 10164)
# Refused with a code of 400s, but it passes: the first copy of this message is still on its way to the other servers
# of a cluster (JSStreamDuplicateMessageConflict), or the account's share of the disk is used up.
# Source: nats-server 2.15, server/errors.json (read 2026-11-21).
PASSING = (10158, 10002)


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


class NatsPublisher:
    """Publishes over one link."""

    def __init__(self, link: NatsLink, declared: Declared) -> None:
        self._link = link
        self._declared = declared
        self._with_ttl = [spec for spec in declared.streams if spec.message_ttls]

    async def store(self, publications: Sequence[Publication]) -> list[Ack]:
        """Return the acks in the order given. Raises as `Bus.publish_many` says."""
        for publication in publications:
            self._refuse_too_large(publication)
        acks: dict[int, Ack] = {}
        todo = list(enumerate(publications))
        loop = asyncio.get_running_loop()
        started = loop.time()
        pause = PAUSE_SECONDS_MIN
        while todo:
            size = _window(todo)
            missed, cause = await self._store_window(todo[:size], acks)
            todo = missed + todo[size:]
            if cause is None:
                self._link.went_well(STORING)
                started, pause = loop.time(), PAUSE_SECONDS_MIN
                continue
            self._link.failed(STORING, str(cause))
            waited = loop.time() - started
            if isinstance(cause, NoAnswerer) and waited >= self._link.waits.no_stream_seconds_max:
                await self._refuse_without_stream(missed[0][1].subject)
            if waited + pause > self._link.waits.publish_seconds_max:
                first = missed[0][1]
                raise TransientError(
                    f"message {first.message_id!r} on {first.subject} and {len(todo) - 1} after it were not confirmed "
                    f"within {self._link.waits.publish_seconds_max:g} s: {cause}; repeat with the same id"
                ) from cause
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSE_SECONDS_MAX)
        return [acks[number] for number in range(len(publications))]

    async def _store_window(
        self, window: Sequence[tuple[int, Publication]], acks: dict[int, Ack]
    ) -> tuple[list[tuple[int, Publication]], TransientError | None]:
        """Send all, then wait for all. Return those without an answer, in order, and why."""
        try:
            await self._link.wait_until_up()
        except TransientError as exc:
            return list(window), exc
        answers: list[asyncio.Future[Frame]] = []
        try:
            for _, publication in window:
                answers.append(await self._send(publication))
            await self._wait(answers)
        finally:
            for answer in answers:
                answer.cancel()
                if answer.done() and not answer.cancelled():
                    answer.exception()  # looked at below, or not wanted any more
        missed: list[tuple[int, Publication]] = []
        cause: TransientError | None = None
        refusal: Exception | None = None
        for (number, publication), answer in zip(window, answers, strict=True):
            try:
                acks[number] = await self._read(publication, answer)
            except TransientError as exc:
                missed.append((number, publication))
                cause = cause or exc
            except (StalePlan, PermanentError) as exc:
                refusal = refusal or exc
        if refusal is not None:
            raise refusal
        return missed, cause

    async def _wait(self, answers: Sequence[asyncio.Future[Frame]]) -> None:
        """Return when all are there, when none came for a while, or at the limit."""
        waits = self._link.waits
        deadline = asyncio.get_running_loop().time() + waits.request_seconds_max
        waiting: Collection[asyncio.Future[Frame]] = answers
        while waiting and (remaining := deadline - asyncio.get_running_loop().time()) > 0:
            _, still = await asyncio.wait(waiting, timeout=min(waits.silence_seconds_max, remaining))
            if len(still) == len(waiting):
                break
            waiting = still
        if waiting:
            self._link.doubt()

    async def _send(self, publication: Publication) -> asyncio.Future[Frame]:
        try:
            return await self._link.ask(publication.subject, publication.payload, self._headers(publication))
        except (nats.errors.BadSubjectError, nats.errors.BadHeaderError, nats.errors.MaxPayloadError) as exc:
            raise PermanentError(f"message {publication.message_id!r} on {publication.subject!r}: {exc}") from exc

    async def _read(self, publication: Publication, answer: asyncio.Future[Frame]) -> Ack:
        if answer.cancelled():
            raise TransientError("the stream does not confirm")
        message = answer.result()
        if message.status[0] == NO_RESPONDERS:
            raise NoAnswerer(f"no stream takes {publication.subject} now")
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
        try:
            stream = await self._stream_of(subject)
        except TransientError:
            return  # JetStream itself is away; that passes
        if stream is not None:
            return
        declared = self._declared.stream_of(subject)
        if declared is not None:
            mistake = f"stream {declared.name} was deleted while it was in use; find out by whom, then start again"
            raise ConfigError("broker", [mistake])
        raise PermanentError(f"no stream takes messages on {subject}; declare one, or correct the subject")

    def _headers(self, publication: Publication) -> dict[str, str]:
        headers = dict(publication.headers)
        headers[MESSAGE_ID] = publication.message_id
        if publication.expected_last_subject_sequence is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(publication.expected_last_subject_sequence)
        for spec in self._with_ttl:
            ttl_seconds = spec.ttl_seconds(publication.subject)
            if ttl_seconds is not None:
                headers["Nats-TTL"] = str(ttl_seconds)
        return headers

    def _refuse_too_large(self, publication: Publication) -> None:
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


def _window(todo: Sequence[tuple[int, Publication]]) -> int:
    """How many of the next messages are sent at once: bounded in number and in bytes, at least one."""
    size = 0
    for count, (_, publication) in enumerate(todo[:WINDOW_COUNT]):
        size += len(publication.payload)
        if count and size > WINDOW_BYTES_MAX:
            return count
    return min(len(todo), WINDOW_COUNT)
