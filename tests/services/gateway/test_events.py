"""Facts as they arrive: filtered, resumed without a gap, bounded for each listener."""

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
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{gate.url}{EVENTS}{query}", headers=headers) as response,
    ):
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
    """The filter is the broker's own: `job.queued` alone, whatever else happens."""
    async with _listen(gate, "?subject=job.queued") as events:
        await gate.tell(on_sale(), job("j1"), job("j2"))

        taken = await _take(events, 2)

    assert _types(taken) == ["job.queued.v1"] * 2
    assert taken[1]["id"] == "JOB:4"


async def test_a_listener_goes_on_where_it_stopped(gate: Front) -> None:
    """Everything that was recorded meanwhile, from the streams, in order, then what is new."""
    async with _listen(gate, "?subject=job.>&subject=node.>") as events:
        await gate.tell(job("j1"))
        last_id = (await _take(events, 2))[-1]["id"]
    await gate.tell(node("n1"), *(job(f"away-{number}") for number in range(10)))

    async with _listen(gate, "?subject=job.>&subject=node.>", last_id) as events:
        await gate.tell(job("back"))
        taken = await _take(events, await _count(gate, "JOB") - 2 + await _count(gate, "NODE"))

    places = [event["id"].partition(",")[0] for event in taken]
    for stream, first in (("JOB", 3), ("NODE", 1)):
        seen = [place for place in places if place.startswith(stream)]
        assert seen == [f"{stream}:{sequence}" for sequence in range(first, await _count(gate, stream) + 1)]


async def test_an_id_of_one_stream_is_enough_to_resume_it(gate: Front) -> None:
    """What other tools write as Last-Event-ID, STREAM:SEQUENCE, is understood."""
    await gate.tell(job("j1"), job("j2"))

    async with _listen(gate, "?subject=job.>", "JOB:3") as events:
        assert [event["id"] for event in await _take(events, 1)] == ["JOB:4"]


async def test_an_id_of_a_record_that_is_gone_begins_with_what_comes(gate: Front) -> None:
    """A page that outlived its broker must not stay silent until the new stream is as long as the old one was."""
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
        ("?colour=red", ""),
    ],
)
async def test_what_cannot_be_followed_is_refused(gate: Front, query: str, last_id: str) -> None:
    """422 before anything is sent."""
    headers = {"Last-Event-ID": last_id} if last_id else {}
    async with aiohttp.ClientSession() as http, http.get(f"{gate.url}{EVENTS}{query}", headers=headers) as response:
        assert response.status == 422
        assert (await response.json(content_type="application/problem+json"))["mistakes"]


async def test_a_slow_listener_is_told_and_dropped(gate: Front) -> None:
    """Its buffer is bounded; what it had is sent, then the reason, and others go on."""
    tail = gate.model.tail
    slow = tail.listen(SubjectFilter(["job.>"]), 2)
    quick = tail.listen(SubjectFilter(["job.>"]), 100)

    await gate.tell(job("j1"), job("j2"))

    assert slow.closed_because is not None
    assert "Last-Event-ID" in slow.closed_because
    assert [await _place(slow) for _ in range(3)] == ["JOB:1", "JOB:2", None]
    assert quick.closed_because is None
    assert [await _place(quick) for _ in range(4)] == ["JOB:1", "JOB:2", "JOB:3", "JOB:4"]


async def _place(listener: Any) -> str | None:  # noqa: ANN401 - a listener of the tail
    entry = await listener.next(WAIT_SECONDS_MAX)
    return None if entry is None else str(entry.place)


async def test_listeners_are_counted_and_forgotten(gate: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """One too many is asked to come back; one that left makes room."""
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


async def test_silence_is_told_from_a_dead_connection(gate: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comment now and then says that the gateway lives."""
    monkeypatch.setattr(sse, "HEARTBEAT_SECONDS", 0.01)
    async with _listen(gate) as events, asyncio.timeout(WAIT_SECONDS_MAX):
        assert [(await anext(events)) for _ in range(2)] == [{"retry": "2000"}, {"": "heartbeat"}]


async def test_a_stopping_gateway_says_goodbye(tmp_path: Path) -> None:
    """Listeners hear why, and do not hold the shutdown up."""
    async with contextlib.AsyncExitStack() as stack:
        async with front(tmp_path) as gate:
            events = await stack.enter_async_context(_listen(gate))
            assert await anext(events) == {"retry": "2000"}
            last = asyncio.create_task(_take(events, 1))
            await asyncio.sleep(0.05)
        (goodbye,) = await last
    assert goodbye["event"] == "closed"
    assert "stopping" in goodbye["data"]


@pytest.mark.parametrize(
    ("pattern", "subject", "is_meant"),
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
def test_wildcards_are_those_of_nats(pattern: str, subject: str, is_meant: bool) -> None:  # noqa: FBT001 - a table
    """`*` is one token, `>` at least one."""
    assert SubjectFilter([pattern]).matches(subject) is is_meant


def test_many_patterns_are_too_many() -> None:
    """A filter has a limit, as everything has."""
    with pytest.raises(Problem):
        SubjectFilter(["job.>"] * 100)
