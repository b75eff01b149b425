"""Facts as they arrive: Server-Sent Events of any subject filter, resumable without a gap.

The id of an event names its own place in the record and, after it, how far the other streams of the filter were
read: `SCALING:12,JOB:40`. Sent back as Last-Event-ID it resumes all of them from the streams themselves.
Source: HTML Living Standard, "Server-sent events" (read 2026-11-21).
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from http import HTTPStatus
from typing import Annotated

import msgspec
from aiohttp import web

from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.events import envelope as envelopes
from gpu_autoscaler.model.jobs import Mistake
from gpu_autoscaler_services.gateway.problems import Problem
from gpu_autoscaler_services.gateway.reading import READ_MODEL, ReadModel
from gpu_autoscaler_services.gateway.routes import Route, read_query
from gpu_autoscaler_services.gateway.subjects import SubjectFilter
from gpu_autoscaler_services.gateway.tail import Entry, Listener, Tail

HEARTBEAT_SECONDS = 15.0  # proxies close what stays silent for a minute; wall time
RECONNECT_MILLISECONDS = 2000
WRITE_SECONDS_MAX = 30.0  # a client that takes nothing for so long is gone
LISTENERS_COUNT_MAX = 200
BUFFER_COUNT_MAX = 1000

Positions = dict[str, int]


class EventsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which facts to send."""

    subject: Annotated[
        tuple[str, ...],
        msgspec.Meta(description="Subject filter with NATS wildcards, e.g. scaling.>; may be repeated. Default: all."),
    ] = ()
    last_event_id: Annotated[
        str, msgspec.Meta(description="Where to go on, for clients that cannot send the header.")
    ] = ""


async def events_handler(request: web.Request) -> web.StreamResponse:
    """Send matching facts until the client leaves, falls behind, or the gateway stops."""
    query = read_query(request, EventsQuery)
    tail = request.app[READ_MODEL].tail
    subjects = SubjectFilter(query.subject)
    streams = subjects.streams(tail.streams)
    if not streams:
        mistake = Mistake("subject", f"no stream holds such a subject; there are: {', '.join(tail.streams)}")
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "nothing would ever be sent", mistakes=(mistake,))
    wanted = read_last_event_id(request.headers.get("Last-Event-ID", "") or query.last_event_id)
    if tail.listeners_count >= LISTENERS_COUNT_MAX:
        detail = f"{LISTENERS_COUNT_MAX} listen already; one reader can follow several filters"
        raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, detail, retry_after_seconds=HEARTBEAT_SECONDS)
    listener = tail.listen(subjects, BUFFER_COUNT_MAX)
    try:
        return await _send(request, listener, await _begin(request.app[READ_MODEL], streams, wanted))
    finally:
        tail.forget(listener)


async def _begin(model: ReadModel, streams: Sequence[str], wanted: Positions) -> Positions:
    """Where to go on in each stream. A place that its stream has not reached is one of a record that is gone."""
    positions = {}
    for stream in streams:
        here = model.tail.position(stream)
        after = wanted.get(stream, here)
        is_ahead = after > here and after > await model.bus.last_sequence(stream)
        positions[stream] = here if is_ahead else after
    return positions


async def _send(request: web.Request, listener: Listener, positions: Positions) -> web.StreamResponse:
    read_model = request.app[READ_MODEL]
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-store",
            "X-Accel-Buffering": "no",  # nginx would hold events back
        }
    )
    await response.prepare(request)
    try:
        await _write(response, f"retry: {RECONNECT_MILLISECONDS}\n\n")
        async for entry in _missed(read_model.bus, read_model.tail, listener.subjects, positions):
            await _write(response, _event(entry, positions))
        while True:
            try:
                live = await listener.next(HEARTBEAT_SECONDS)
            except TimeoutError:
                await _write(response, ": heartbeat\n\n")
                continue
            if live is None:
                reason = msgspec.json.encode({"reason": listener.closed_because}).decode()
                await _write(response, f"event: closed\ndata: {reason}\n\n")
                break
            if live.recorded.sequence > positions.get(live.recorded.stream, 0):
                await _write(response, _event(live, positions))
    except (ConnectionError, TimeoutError):
        pass  # the client left or takes nothing; Last-Event-ID brings it back
    return response


async def _missed(bus: Bus, tail: Tail, subjects: SubjectFilter, positions: Positions) -> AsyncIterator[Entry]:
    """What was recorded since the client left, up to where the listener took over."""
    for stream, after in sorted(positions.items()):
        until = tail.position(stream)
        if after >= until:
            continue
        projection = await bus.projection(stream, after_sequence=after)
        try:
            if await projection.lag_count() == 0:
                continue  # what came after has aged out since; there is nothing to wait for
            async for batch in projection:
                for message in batch:
                    entry = tail.entry(message) if subjects.matches(message.subject) else None
                    if entry is not None and message.sequence <= until:
                        yield entry
                if batch and batch[-1].sequence >= until:
                    break
        finally:
            await projection.close()


def _event(entry: Entry, positions: Positions) -> str:
    stream = entry.recorded.stream
    positions[stream] = entry.recorded.sequence
    others = (f"{name}:{sequence}" for name, sequence in sorted(positions.items()) if name != stream)
    payload = envelopes.encode(entry.recorded.envelope).decode()
    return f"id: {','.join((entry.place, *others))}\ndata: {payload}\n\n"


async def _write(response: web.StreamResponse, text: str) -> None:
    async with asyncio.timeout(WRITE_SECONDS_MAX):
        await response.write(text.encode())


def read_last_event_id(text: str) -> Positions:
    """Positions from an id that was sent here: `SCALING:12,JOB:40`. Raises a 422 for anything else."""
    positions = {}
    for part in filter(None, text.split(",")):
        stream, _, sequence = part.strip().partition(":")
        if not stream or not sequence.isascii() or not sequence.isdigit():
            mistake = Mistake("Last-Event-ID", f"{part!r} is not STREAM:SEQUENCE")
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "cannot resume from there", mistakes=(mistake,))
        positions[stream] = int(sequence)
    return positions


ROUTES = (
    Route(
        method="GET",
        path="/api/v1/events",
        handler=events_handler,
        summary="Facts as they arrive, as Server-Sent Events with CloudEvents in structured JSON",
        tag="facts",
        answers={HTTPStatus.OK: str},
        problems=(HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.SERVICE_UNAVAILABLE),
        query=EventsQuery,
        headers={"Last-Event-ID": "Where to go on: the id of the last event that was read"},
        media_type="text/event-stream",
    ),
)
