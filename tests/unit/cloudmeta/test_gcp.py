"""Google's metadata: both keys, read at the start and waited for; what goes back is over; silence is no answer."""

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import aiohttp
import pytest
from aiohttp import web
from tests.support.small_servers import serving

from gpu_autoscaler.cloudmeta.gcp import MAINTENANCE_NOTICE, USABLE_NOTICE, GcpMetadata
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.spot_watcher.spec import metadata_opener

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
HEAD = "/computeMetadata/v1/"


class Machine:
    """A metadata address whose values the test changes."""

    def __init__(self) -> None:
        self.values = {
            "instance/preempted": "FALSE",
            "instance/maintenance-event": "NONE",
            "instance/scheduling/preemptible": "TRUE",
            "instance/zone": "projects/123/zones/europe-west4-a",
            "instance/name": "gpu-1",
            "project/project-id": "p1",
        }
        self.flavor = "Google"
        self.versions: dict[str, int] = {}
        self.waits_count = 0
        self.slept_count = 0  # how often a wait found no change

    def set(self, key: str, value: str) -> None:
        """Another value, under another ETag."""
        self.values[key] = value
        self.versions[key] = self.versions.get(key, 0) + 1

    async def answer(self, request: web.Request) -> web.Response:
        """As Google does."""
        if request.headers.get("Metadata-Flavor") != "Google":
            return web.Response(status=403)
        key = request.path.removeprefix(HEAD)
        if key not in self.values:
            return web.Response(status=404, headers={"Metadata-Flavor": self.flavor})
        if request.query.get("wait_for_change") == "true":
            self.waits_count += 1
            until = time.monotonic() + float(request.query["timeout_sec"])
            while self._etag(key) == request.query["last_etag"] and time.monotonic() < until:
                self.slept_count += 1
                await asyncio.sleep(0.01)
        headers = {"Metadata-Flavor": self.flavor, "ETag": self._etag(key)}
        return web.Response(text=self.values[key], headers=headers)

    def _etag(self, key: str) -> str:
        return f"v{self.versions.get(key, 0)}"


@pytest.fixture
async def machine() -> Machine:
    """A quiet spot machine."""
    return Machine()


@pytest.fixture
async def metadata(machine: Machine) -> AsyncIterator[GcpMetadata]:
    """A client of it."""
    async with serving(machine.answer) as url, aiohttp.ClientSession() as session:
        yield GcpMetadata(session, url, now=lambda: NOW)


async def test_it_is_named_as_the_cloud_provider_names_it(metadata: GcpMetadata) -> None:
    """Project, zone and name."""
    assert await metadata.provider_id() == "gce://p1/europe-west4-a/gpu-1"
    assert await metadata.rebalance_recommended_at() is None


@pytest.mark.cloud("gcp", notices=("preemption, metadata",))
async def test_a_notice_present_at_the_start_is_read_at_once(machine: Machine, metadata: GcpMetadata) -> None:
    """A restart misses no edge: nothing is waited for, and a deadline counts what is left to the pods of users."""
    machine.set("instance/preempted", "TRUE")
    (notice,) = await metadata.reclaim_notices()
    assert (notice.kind, notice.reclaim_at) == ("terminate", NOW + USABLE_NOTICE)
    assert timedelta(seconds=15) == USABLE_NOTICE
    assert machine.waits_count == 0


async def test_a_fast_clock_leaves_pods_their_time(machine: Machine) -> None:
    """What a notice leaves is the cloud's time: more of the cluster's, where its clock is faster."""
    machine.set("instance/preempted", "TRUE")
    async with serving(machine.answer) as url, aiohttp.ClientSession() as session:
        (notice,) = await GcpMetadata(session, url, now=lambda: NOW, clock_factor=15.0).reclaim_notices()
    assert notice.reclaim_at == NOW + USABLE_NOTICE * 15


async def test_a_change_ends_the_wait_and_is_the_same_when_read_again(machine: Machine, metadata: GcpMetadata) -> None:
    """Reported within the wait, as one notice."""
    assert await metadata.reclaim_notices() == []
    asyncio.get_running_loop().call_later(0.05, machine.set, "instance/preempted", "TRUE")
    first = await metadata.reclaim_notices()
    assert machine.waits_count == 2
    assert len(first) == 1
    assert await metadata.reclaim_notices() == first


@pytest.mark.cloud("gcp", notices=("host maintenance, metadata",))
async def test_maintenance_that_goes_back_is_over_and_comes_back_as_another(
    machine: Machine, metadata: GcpMetadata
) -> None:
    """The value falls back to NONE: no notice stands. The next one has a name of its own."""
    machine.set("instance/scheduling/preemptible", "FALSE")
    machine.set("instance/maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
    (first,) = await metadata.reclaim_notices()
    machine.set("instance/maintenance-event", "NONE")
    assert await metadata.reclaim_notices() == []
    machine.set("instance/maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
    (second,) = await metadata.reclaim_notices()
    assert (first.kind, first.reclaim_at) == ("maintenance", NOW + MAINTENANCE_NOTICE)
    assert second.provider_event != first.provider_event


async def test_spot_has_no_hour_before_maintenance(machine: Machine, metadata: GcpMetadata) -> None:
    """It is taken within 30 s, as at a preemption."""
    machine.set("instance/maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
    (notice,) = await metadata.reclaim_notices()
    assert notice.reclaim_at == NOW + USABLE_NOTICE


async def test_an_edge_between_two_reads_is_seen(machine: Machine, metadata: GcpMetadata) -> None:
    """The value changed and changed back: the next read does not wait, as its ETag is another."""
    await metadata.reclaim_notices()
    machine.set("instance/preempted", "TRUE")
    machine.set("instance/preempted", "FALSE")
    machine.slept_count = 0
    read = await metadata._read("instance/preempted")
    assert (read.text, machine.slept_count) == ("FALSE", 0)


async def test_an_address_that_is_not_google_s_is_no_answer(machine: Machine, metadata: GcpMetadata) -> None:
    """A proxy, a captive portal, nobody at all: that is not "no notice"."""
    machine.flavor = "proxy"
    with pytest.raises(TransientError, match="Google's metadata address"):
        await metadata.reclaim_notices()
    async with aiohttp.ClientSession() as session:
        with pytest.raises(TransientError, match="notices are unknown"):
            await GcpMetadata(session, "http://127.0.0.1:1", now=lambda: NOW).reclaim_notices()


async def test_who_asks_many_in_turn_waits_for_none(machine: Machine) -> None:
    """A read that waits for a change would hold the turn of another instance, which has fifteen seconds. Changes that
    came between two reads are seen all the same.
    """
    async with serving(machine.answer) as url, aiohttp.ClientSession() as session:
        opened, _ = metadata_opener("gcp", session, Clock(), is_waiting=False)
        one = opened(url)
        assert await one.reclaim_notices() == []
        machine.set("instance/preempted", "TRUE")
        (first,) = await one.reclaim_notices()
        machine.set("instance/preempted", "FALSE")
        machine.set("instance/preempted", "TRUE")
        (second,) = await one.reclaim_notices()
    assert machine.waits_count == 0
    assert first.provider_event != second.provider_event
