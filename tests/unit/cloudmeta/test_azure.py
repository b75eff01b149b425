"""Azure's Scheduled Events: only events of this machine count, blank deadlines keep their value, events start once."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.support.small_servers import serving

from gpu_autoscaler.cloudmeta.azure import ANSWER_BYTES_MAX, AzureMetadata, provider_id_of, resource_name_of
from gpu_autoscaler.cloudmeta.protocol import ReclaimNotice
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import ProviderId

HEAD = "/subscriptions/s/resourceGroups/GPU/providers/Microsoft.Compute"
OWN = ProviderId("azure:///subscriptions/s/resourceGroups/gpu/providers/Microsoft.Compute/virtualMachines/own")
OTHER = ProviderId("azure:///subscriptions/s/resourceGroups/gpu/providers/Microsoft.Compute/virtualMachines/other")
AT = datetime(2026, 11, 21, 12, 0, 30, tzinfo=UTC)


class Machine:
    """A metadata address that shows the events that the test put there."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.incarnation = 1
        self.started: list[str] = []
        self.events_seconds = 0.0  # how long the answer takes
        self.events_reads_count = 0
        self.status: int | None = None
        self.text: str | None = None  # in place of the events

    def show(self, **fields: object) -> None:
        """Show one event more."""
        known = {
            "EventId": f"e{len(self.events)}",
            "EventType": "Preempt",
            "EventStatus": "Scheduled",
            "ResourceType": "VirtualMachine",
            "Resources": ["own"],
            "NotBefore": "Sat, 21 Nov 2026 12:00:30 GMT",
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }
        self.events.append(known | fields)

    async def answer(self, request: web.Request) -> web.Response:
        """As Azure does."""
        if request.headers.get("Metadata") != "true":
            return web.Response(status=400)
        if self.status is not None:
            return web.Response(status=self.status)
        if request.path == "/metadata/instance/compute":
            return web.json_response({"resourceId": f"{HEAD}/virtualMachines/own", "name": "own"})
        assert request.path == "/metadata/scheduledevents"
        assert request.query["api-version"] == "2020-07-01"
        if request.method == "POST":
            self.started += [one["EventId"] for one in (await request.json())["StartRequests"]]
            return web.Response()
        self.events_reads_count += 1
        await asyncio.sleep(self.events_seconds)
        if self.text is not None:
            return web.Response(text=self.text)
        return web.json_response({"DocumentIncarnation": self.incarnation, "Events": self.events})


@pytest.fixture
async def machine() -> Machine:
    """A quiet machine."""
    return Machine()


@pytest.fixture
async def metadata(machine: Machine) -> AsyncIterator[AzureMetadata]:
    """A client of it."""
    async with serving(machine.answer) as url, aiohttp.ClientSession() as session:
        yield AzureMetadata(session, url, call_seconds_max=1.0, first_call_seconds_max=10.0)


async def test_an_empty_list_is_no_notice(metadata: AzureMetadata) -> None:
    """Nor is a hint ever given."""
    assert await metadata.reclaim_notices() == []
    assert await metadata.rebalance_recommended_at() is None


@pytest.mark.cloud("azure", notices=("terminate",))
async def test_a_preemption_is_reported_with_its_deadline(machine: Machine, metadata: AzureMetadata) -> None:
    """By the event's id; read again it is equal."""
    machine.show()
    first = await metadata.reclaim_notices()
    assert first == [ReclaimNotice("terminate", "e0", AT)] == await metadata.reclaim_notices()


@pytest.mark.cloud("azure", notices=("maintenance",))
async def test_events_of_other_machines_are_not_ours(machine: Machine, metadata: AzureMetadata) -> None:
    """The list is shown to every machine of the group."""
    machine.show(Resources=["other"])
    machine.show(Resources=["other", "own"], EventType="Reboot")
    assert await metadata.reclaim_notices() == [ReclaimNotice("maintenance", "e1", AT)]


async def test_a_deadline_that_becomes_blank_keeps_its_earlier_value(machine: Machine, metadata: AzureMetadata) -> None:
    """A started event has no deadline in the list: the earliest reported one is kept."""
    machine.show()
    await metadata.reclaim_notices()
    machine.events[0] |= {"EventStatus": "Started", "NotBefore": ""}
    assert await metadata.reclaim_notices() == [ReclaimNotice("terminate", "e0", AT)]


async def test_an_event_may_begin_as_started(machine: Machine, metadata: AzureMetadata) -> None:
    """Without a deadline, which is not "later"."""
    machine.show(EventStatus="Started", NotBefore="")
    assert await metadata.reclaim_notices() == [ReclaimNotice("terminate", "e0", None)]


async def test_an_event_that_is_gone_is_no_longer_reported(machine: Machine, metadata: AzureMetadata) -> None:
    """Over, or called off."""
    machine.show()
    await metadata.reclaim_notices()
    machine.events.clear()
    assert await metadata.reclaim_notices() == []


async def test_a_short_pause_moves_no_work(machine: Machine, metadata: AzureMetadata) -> None:
    """A freeze of unknown length may be a long one; a kind that we do not know says nothing."""
    for kind, seconds in (("Freeze", 5), ("Freeze", -1), ("Redeploy", 5), ("Nap", 5)):
        machine.show(EventType=kind, DurationInSeconds=seconds)
    assert [notice.provider_event for notice in await metadata.reclaim_notices()] == ["e1", "e2"]


async def test_the_first_answer_is_waited_for_by_all_who_ask(machine: Machine, metadata: AzureMetadata) -> None:
    """It may take two minutes: who gives up after his own time does not end the call."""
    machine.events_seconds = 0.5
    machine.show()
    for _ in range(2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await metadata.reclaim_notices()
    assert len(await metadata.reclaim_notices()) == 1
    assert machine.events_reads_count == 1


async def test_an_event_starts_once_all_its_machines_are_drained(machine: Machine, metadata: AzureMetadata) -> None:
    """It takes every machine that it names, so the last one decides; asked once."""
    machine.show(EventType="Redeploy", Resources=["own", "other"])
    await metadata.reclaim_notices()
    await metadata.release({OWN})
    before = list(machine.started)
    for _ in range(3):
        await metadata.reclaim_notices()
        await metadata.release({OWN, OTHER})
    assert (before, machine.started) == ([], ["e0"])


async def test_an_event_that_names_a_stranger_is_never_hurried(machine: Machine, metadata: AzureMetadata) -> None:
    """Nor one that has started."""
    machine.show(Resources=["own", "stranger"])
    machine.show(EventStatus="Started", NotBefore="")
    await metadata.reclaim_notices()
    await metadata.release({OWN, OTHER})
    assert machine.started == []


async def test_no_answer_is_not_no_notice(machine: Machine, metadata: AzureMetadata) -> None:
    """An error, text that is none of Azure's, and a flood are all told."""
    machine.status = 500
    with pytest.raises(TransientError, match="HTTP 500"):
        await metadata.reclaim_notices()
    machine.status, machine.text = None, "<html>"
    with pytest.raises(TransientError, match="undecodable answer"):
        await metadata.reclaim_notices()
    machine.text = "x" * (ANSWER_BYTES_MAX + 1)
    with pytest.raises(TransientError, match="more than"):
        await metadata.reclaim_notices()
    machine.text = None
    machine.show(NotBefore="tomorrow")
    with pytest.raises(TransientError, match="not an Azure date"):
        await metadata.reclaim_notices()


async def test_a_machine_knows_its_node(metadata: AzureMetadata) -> None:
    """By the name that cloud-provider-azure gives nodes: the resource group in lower case."""
    assert await metadata.provider_id() == OWN


def test_machines_of_uniform_scale_sets_have_two_names() -> None:
    """Events call them by set and number."""
    made = provider_id_of(f"{HEAD}/virtualMachineScaleSets/t4/virtualMachines/7")
    assert made.endswith("/resourceGroups/gpu/providers/Microsoft.Compute/virtualMachineScaleSets/t4/virtualMachines/7")
    assert resource_name_of(made) == "t4_7"
