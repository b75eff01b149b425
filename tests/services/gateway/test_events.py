"""Event streams: filtered, resumed without a gap, with a bounded buffer per listener."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.support.front import Front, front
from tests.support.stories import job, node, on_sale

from gpu_autoscaler_services.gateway.api import events as sse
from gpu_autoscaler_services.gateway.auth import SharedTokens
from gpu_autoscaler_services.gateway.problems import Problem
from gpu_autoscaler_services.gateway.subjects import SubjectFilter

EVENTS = "/api/v1/events"
WAIT_SECONDS_MAX = 60.0

Event = dict[str, str]


@pytest.fixture
async def gate(tmp_path: Path) -> AsyncIterator[Front]:
    """A gateway that keeps few facts in memory, so that resuming has to read the streams."""
    async with front(tmp_path, ring_count_max=2) as opened:
        yield opened


@contextlib.asynccontextmanager
async def _listen(gate: Front, query: str = "", last_id: str = "") -> AsyncIterator[AsyncIterator[Event]]:
    headers = {"Last-Event-ID": last_id} if last_id else {}
    async with aiohttp.ClientSession() as http, http.get(f"{gate.url}{EVENTS}{query}", headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        yield _events(response)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Event]:
    fields: Event = {}
    async for raw in response.content:
        line = raw.decode().rstrip("\n")
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            yield fields
            fields = {}


async def _take(events: AsyncIterator[Event], count: int) -> list[Event]:
    """The next events with data."""
    taken: list[Event] = []
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        while len(taken) < count:
            event = await anext(events)
            if "data" in event:
                taken.append(event)
    return taken


async def _count(gate: Front, stream: str) -> int:
    return await gate.model.bus.last_sequence(stream)


def _types(events: list[Event]) -> list[str]:
    return [json.loads(event["data"])["type"] for event in events]


async def test_only_matching_facts_are_sent(gate: Front) -> None:
    """The filter uses the broker's wildcards: only `job.queued`, whatever else is published."""
    async with _listen(gate, "?subject=job.queued") as events:
        await gate.tell(on_sale(), job("j1"), job("j2"))

        taken = await _take(events, 2)

    assert _types(taken) == ["job.queued.v1"] * 2
    assert taken[1]["id"] == "JOB:4"


async def test_a_listener_resumes_where_it_stopped(gate: Front) -> None:
    """Facts recorded meanwhile come from the streams, in order, then new ones."""
    async with _listen(gate, "?subject=job.>&subject=node.>") as events:
        await gate.tell(job("j1"))
        last_id = (await _take(events, 2))[-1]["id"]
    await gate.tell(node("n1"), *(job(f"away-{number}") for number in range(10)))

    async with _listen(gate, "?subject=job.>&subject=node.>", last_id) as events:
        await gate.tell(job("back"))
        taken = await _take(events, await _count(gate, "JOB") - 2 + await _count(gate, "NODE"))

    positions = [event["id"].partition(",")[0] for event in taken]
    for stream, first in (("JOB", 3), ("NODE", 1)):
        seen = [position for position in positions if position.startswith(stream)]
        assert seen == [f"{stream}:{sequence}" for sequence in range(first, await _count(gate, stream) + 1)]


async def test_an_id_of_one_stream_is_enough_to_resume_it(gate: Front) -> None:
    """A Last-Event-ID of one position, STREAM:SEQUENCE, is valid."""
    await gate.tell(job("j1"), job("j2"))

    async with _listen(gate, "?subject=job.>", "JOB:3") as events:
        assert [event["id"] for event in await _take(events, 1)] == ["JOB:4"]


async def test_an_id_of_a_deleted_stream_starts_with_new_facts(gate: Front) -> None:
    """A page that outlives its broker must not wait until the new stream is as long as the old one."""
    async with _listen(gate, "?subject=job.>", "JOB:1000") as events:
        await gate.tell(job("j1"))

        assert [event["id"] for event in await _take(events, 2)] == ["JOB:1", "JOB:2"]


@pytest.mark.parametrize(
    ("query", "last_id"),
    [
        ("?subject=job.>.x", ""),
        ("?subject=jo*b.x", ""),
        ("?subject=", ""),
        ("?subject=weather.>", ""),
        ("", "twelve"),
        ("", "JOB:-1"),
        ("?color=red", ""),
    ],
)
async def test_an_invalid_filter_or_position_is_refused(gate: Front, query: str, last_id: str) -> None:
    """422 before any event is sent."""
    headers = {"Last-Event-ID": last_id} if last_id else {}
    async with aiohttp.ClientSession() as http, http.get(f"{gate.url}{EVENTS}{query}", headers=headers) as response:
        assert response.status == 422
        assert (await response.json(content_type="application/problem+json"))["violations"]


async def test_a_slow_listener_is_closed_with_a_reason(gate: Front) -> None:
    """Buffered facts are sent, then the reason; other listeners continue."""
    tail = gate.model.tail
    slow = tail.listen(SubjectFilter(["job.>"]), 2)
    quick = tail.listen(SubjectFilter(["job.>"]), 100)

    await gate.tell(job("j1"), job("j2"))

    assert slow.closed_because is not None
    assert "Last-Event-ID" in slow.closed_because
    assert [await _position(slow) for _ in range(3)] == ["JOB:1", "JOB:2", None]
    assert quick.closed_because is None
    assert [await _position(quick) for _ in range(4)] == ["JOB:1", "JOB:2", "JOB:3", "JOB:4"]


async def _position(listener: Any) -> str | None:  # noqa: ANN401 - a listener of the tail
    entry = await listener.next(WAIT_SECONDS_MAX)
    return None if entry is None else str(entry.position)


async def test_the_number_of_listeners_is_limited(gate: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """One too many gets 503; a closed one frees its place."""
    monkeypatch.setattr(sse, "LISTENERS_COUNT_MAX", 1)
    async with _listen(gate) as events:
        await gate.tell(job("j1"))
        await _take(events, 1)
        async with aiohttp.ClientSession() as http, http.get(gate.url + EVENTS) as response:
            assert response.status == 503
            assert "Retry-After" in response.headers
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        while gate.model.tail.listeners_count:
            await gate.tell(job("more"), on_sale())
            await asyncio.sleep(0.05)


async def test_one_caller_cannot_take_all_event_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream too many of a token gets 429 with the next step; other tokens get theirs, and a closed one is free."""
    monkeypatch.setattr(sse, "LISTENERS_PER_CALLER_COUNT_MAX", 2)
    greedy, other = ({"Authorization": f"Bearer {name * 16}"} for name in ("a", "b"))
    async with (
        front(tmp_path, authenticators=[SharedTokens(["a" * 16, "b" * 16])]) as gate,
        aiohttp.ClientSession() as http,
    ):
        opened = [await http.get(gate.url + EVENTS, headers=greedy) for _ in range(2)]
        assert [response.status for response in opened] == [200, 200]
        async with http.get(gate.url + EVENTS, headers=greedy) as refused:
            assert refused.status == 429
            assert "Retry-After" in refused.headers
            assert "close some" in (await refused.json(content_type="application/problem+json"))["detail"]
        async with http.get(gate.url + EVENTS, headers=other) as response:
            assert response.status == 200
        for response in opened:
            response.close()
        async with asyncio.timeout(WAIT_SECONDS_MAX):
            while gate.model.tail.listeners_count:
                await gate.tell(job("more"), on_sale())
                await asyncio.sleep(0.05)
        async with http.get(gate.url + EVENTS, headers=greedy) as response:
            assert response.status == 200


async def test_silence_differs_from_a_dead_connection(gate: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway sends a comment regularly."""
    monkeypatch.setattr(sse, "HEARTBEAT_SECONDS", 0.01)
    async with _listen(gate) as events, asyncio.timeout(WAIT_SECONDS_MAX):
        assert [(await anext(events)).keys() for _ in range(2)] == [{"retry", "id"}, {""}]


async def test_a_stopping_gateway_closes_event_streams(tmp_path: Path) -> None:
    """Listeners get the reason and do not delay the shutdown."""
    async with contextlib.AsyncExitStack() as stack:
        async with front(tmp_path) as gate:
            events = await stack.enter_async_context(_listen(gate))
            assert (await anext(events))["retry"] == "2000"
            last = asyncio.create_task(_take(events, 1))
            await asyncio.sleep(0.05)
        (closed,) = await last
    assert closed["event"] == "closed"
    assert "stopping" in closed["data"]


@pytest.mark.parametrize(
    ("pattern", "subject", "is_match"),
    [
        (">", "job.queued", True),
        ("job.>", "job.queued", True),
        ("job.>", "job", False),
        ("job.*", "job.queued.x", False),
        ("*.queued", "job.queued", True),
        ("gpu.*.uid", "gpu.node_sampled.uid", True),
        ("job.queued", "job.queue", False),
    ],
)
def test_wildcards_are_those_of_nats(pattern: str, subject: str, is_match: bool) -> None:  # noqa: FBT001 - a table
    """`*` is one token, `>` at least one."""
    assert SubjectFilter([pattern]).matches(subject) is is_match


def test_the_number_of_patterns_is_limited() -> None:
    """A filter has at most 16 patterns."""
    with pytest.raises(Problem):
        SubjectFilter(["job.>"] * 100)
