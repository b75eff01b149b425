"""Facts as they arrive: Server-Sent Events of any subject filter, resumable without a gap.

The id of an event is its own position followed by the positions read in the other streams of the filter:
`SCALING:12,JOB:40`. Sent back as Last-Event-ID, it resumes all of them from the streams.
Source: HTML Living Standard, "Server-sent events" (read 2026-11-21).
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from http import HTTPStatus
from typing import Annotated

import msgspec
from aiohttp import web

from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.model.jobs import Violation
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.api_rights import READ_FACTS
from gpu_autoscaler_services.gateway.access import ACCESS
from gpu_autoscaler_services.gateway.env_values import encoded_event, require_env_values
from gpu_autoscaler_services.gateway.problems import Problem, rule_violated
from gpu_autoscaler_services.gateway.read_model import READ_MODEL, ReadModel
from gpu_autoscaler_services.gateway.recent_facts import Entry, Listener, Tail
from gpu_autoscaler_services.gateway.routes import EVENT_STREAM, INVALID, Route, read_query
from gpu_autoscaler_services.gateway.subjects import SubjectFilter

HEARTBEAT_SECONDS = 15.0  # proxies close connections that are silent for a minute; wall time
RECONNECT_MILLISECONDS = 2000
WRITE_SECONDS_MAX = 30.0  # without progress for this long the client is considered gone
LISTENERS_COUNT_MAX = 200
LISTENERS_PER_CALLER_COUNT_MAX = 40  # a fifth: several browsers and programs of one user or shared token
BUFFER_COUNT_MAX = 1000
STREAM_SECONDS_MAX = 3600.0  # then the client resumes, and its token and rights are checked again; wall time

Positions = dict[str, int]


class EventsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Query of events."""

    subject: Annotated[
        tuple[str, ...],
        msgspec.Meta(description="Subject filter with NATS wildcards, e.g. scaling.>; repeatable. Default: all."),
    ] = ()
    last_event_id: Annotated[
        str, msgspec.Meta(description="Resume position, for clients that cannot send the header.")
    ] = ""
    env: Annotated[
        bool,
        msgspec.Meta(
            description="Show the values of environment variables: with the right, where the settings allow it."
        ),
    ] = False


async def stream_events_handler(request: web.Request) -> web.StreamResponse:
    """Stream facts as Server-Sent Events with CloudEvents in structured JSON."""
    query = read_query(request, EventsQuery)
    tail = request.app[READ_MODEL].tail
    subjects = SubjectFilter(query.subject)
    streams = subjects.streams(tail.streams)
    if not streams:
        violation = Violation("subject", f"matches no stream; streams are: {', '.join(tail.streams)}")
        raise rule_violated("the subject filter matches no stream", violation)
    if query.env:
        await require_env_values(request[ACCESS], is_setting_on=request.app[READ_MODEL].are_env_values_shown)
    requested = read_last_event_id(request.headers.get("Last-Event-ID", "") or query.last_event_id)
    if tail.listeners_count >= LISTENERS_COUNT_MAX:
        detail = f"the gateway serves at most {LISTENERS_COUNT_MAX} event streams; use one stream with several subjects"
        raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, detail, retry_after_seconds=HEARTBEAT_SECONDS)
    known = request[ACCESS].caller
    caller = "" if known is None else known.key
    if caller and tail.listeners_count_of(caller) >= LISTENERS_PER_CALLER_COUNT_MAX:
        detail = (
            f"{caller} has {LISTENERS_PER_CALLER_COUNT_MAX} open event streams, the most for one user or token; "
            "close some, or use one stream with several subjects"
        )
        raise Problem(HTTPStatus.TOO_MANY_REQUESTS, detail, retry_after_seconds=HEARTBEAT_SECONDS)
    listener = tail.listen(subjects, BUFFER_COUNT_MAX, caller)
    try:
        positions = await _start_positions(request.app[READ_MODEL], streams, requested)
        return await _send(request, listener, positions, is_env_shown=query.env)
    finally:
        tail.forget(listener)


async def _start_positions(model: ReadModel, streams: Sequence[str], requested: Positions) -> Positions:
    """Return the start in each stream. A position beyond the end belongs to a deleted stream and is ignored."""
    positions = {}
    for stream in streams:
        current = model.tail.position(stream)
        after = requested.get(stream, current)
        is_ahead = after > current and after > await model.bus.last_sequence(stream)
        positions[stream] = current if is_ahead else after
    return positions


async def _send(
    request: web.Request, listener: Listener, positions: Positions, *, is_env_shown: bool
) -> web.StreamResponse:
    read_model = request.app[READ_MODEL]
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-store",
            "X-Accel-Buffering": "no",  # else nginx buffers events
        }
    )
    await response.prepare(request)
    try:
        # An id without data: a client that is cut off before the first event resumes where it started.
        await _write(response, f"retry: {RECONNECT_MILLISECONDS}\nid: {_id(positions)}\n\n")
        async for entry in _missed(read_model.bus, read_model.tail, listener.subjects, positions):
            await _write(response, _event(entry, positions, is_env_shown=is_env_shown))
        ends_at = Clock.monotonic_seconds() + STREAM_SECONDS_MAX
        while True:
            if Clock.monotonic_seconds() >= ends_at:
                listener.close(f"open for {STREAM_SECONDS_MAX:g} s; resume with Last-Event-ID")
            try:
                live = await listener.next(min(HEARTBEAT_SECONDS, STREAM_SECONDS_MAX))
            except TimeoutError:
                await _write(response, ": heartbeat\n\n")
                continue
            if live is None:
                reason = msgspec.json.encode({"reason": listener.closed_because}).decode()
                await _write(response, f"event: closed\ndata: {reason}\n\n")
                break
            if live.recorded.sequence > positions.get(live.recorded.stream, 0):
                await _write(response, _event(live, positions, is_env_shown=is_env_shown))
    except (ConnectionError, TimeoutError):
        pass  # the client disconnected or stalled; it resumes with Last-Event-ID
    return response


async def _missed(bus: Bus, tail: Tail, subjects: SubjectFilter, positions: Positions) -> AsyncIterator[Entry]:
    """Yield entries recorded since the client's positions, up to where the listener started."""
    for stream, after in sorted(positions.items()):
        until = tail.position(stream)
        if after >= until:
            continue
        projection = await bus.projection(stream, after_sequence=after)
        try:
            if await projection.lag_count() == 0:
                continue  # the rest has expired; nothing will arrive
            async for batch in projection:
                for message in batch:
                    entry = tail.entry(message) if subjects.matches(message.subject) else None
                    if entry is not None and message.sequence <= until:
                        yield entry
                if batch and batch[-1].sequence >= until:
                    break
        finally:
            await projection.close()


def _event(entry: Entry, positions: Positions, *, is_env_shown: bool) -> str:
    stream = entry.recorded.stream
    positions[stream] = entry.recorded.sequence
    payload = encoded_event(entry.recorded.envelope, is_env_shown=is_env_shown).decode()
    return f"id: {_id(positions, first=stream)}\ndata: {payload}\n\n"


def _id(positions: Positions, first: str = "") -> str:
    """Return the positions, that of the event's own stream first."""
    ordered = sorted(positions, key=lambda stream: (stream != first, stream))
    return ",".join(f"{stream}:{positions[stream]}" for stream in ordered)


async def _write(response: web.StreamResponse, text: str) -> None:
    async with asyncio.timeout(WRITE_SECONDS_MAX):
        await response.write(text.encode())


def read_last_event_id(text: str) -> Positions:
    """Parse an event id such as `SCALING:12,JOB:40`. Raises a 422 for anything else."""
    positions = {}
    for part in filter(None, text.split(",")):
        stream, _, sequence = part.strip().partition(":")
        if not stream or not sequence.isascii() or not sequence.isdigit():
            raise rule_violated("invalid Last-Event-ID", Violation("Last-Event-ID", f"{part!r} is not STREAM:SEQUENCE"))
        positions[stream] = int(sequence)
    return positions


ROUTES = (
    Route(
        "GET",
        "/api/v1/events",
        stream_events_handler,
        "facts",
        str,
        (READ_FACTS,),
        (*INVALID, HTTPStatus.TOO_MANY_REQUESTS),
        query=EventsQuery,
        headers={"Last-Event-ID": "Resume after this event: the id of the last event received"},
        media_type=EVENT_STREAM,
    ),
)
