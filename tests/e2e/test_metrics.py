"""What running processes export: each family by its owners, the fleet by the active scaler alone."""

import asyncio
import math
import os
import signal
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.e2e.test_standby import OTHER, is_active, two_scalers
from tests.e2e.test_story import has, request
from tests.support.cluster import until
from tests.support.running import Running, running

from gpu_autoscaler.bus.streams import LEASES, STREAMS
from gpu_autoscaler.events.job import JobRejected, JobStarted
from gpu_autoscaler.runtime.metric_families import FAMILIES, families_of
from gpu_autoscaler_services.local.child import Child
from gpu_autoscaler_services.local.system import PROCESSES

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(300)]

FLEET = {family.full_name for family in FAMILIES if family.exported != "always"}
Page = dict[str, dict[tuple[str, ...], float]]  # family -> values of its labels, by their names -> value


async def page_of(child: Child) -> Page:
    """Return what the process exports."""
    url = child.ready_url.replace("/readyz", "/metrics")
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        text = await answer.text()
    return {
        family.name: {
            tuple(value for _, value in sorted(sample.labels.items())): sample.value for sample in family.samples
        }
        for family in text_string_to_metric_families(text)
        if not family.name.endswith("_created")
    }


async def shows(child: Child, family: str) -> bool:
    """Return whether the process exports the family."""
    return family in await page_of(child)


async def pages_of(cluster: Running) -> dict[str, Page]:
    """Return what each process exports."""
    return {name: await page_of(cluster.system.children[name]) for name in cluster.system.children if name in PROCESSES}


async def counts_refused_request(child: Child) -> bool:
    """Return whether the process has counted one refused request."""
    letters = (await page_of(child)).get("gpu_autoscaler_dead_letters", {})
    return letters.get(("job", "refused_request"), 0) == 1


async def counts_jobs(child: Child) -> bool:
    """Return whether the process has looked at the streams since a job was stored."""
    fills = (await page_of(child)).get("gpu_autoscaler_stream_fill_ratio", {})
    return fills.get(("JOB",), 0) > 0


async def test_processes_export_the_families_of_their_service(tmp_path: Path) -> None:
    """After a job has run: no family in a process that does not own it, none that nobody exports.

    Streams have a fill and an age, launches a count, and a request that its author got wrong is no other dead letter.
    """
    async with running(tmp_path) as cluster:
        await cluster.player.submit(request("job-0"), "nats")
        await cluster.player.submit(request("job-1", gpus=0), "nats")
        await cluster.until(lambda record: has(record, JobStarted, job_id="job-0"), "the job runs")
        await cluster.until(lambda record: has(record, JobRejected), "the other one is rejected")
        await until(partial(counts_refused_request, cluster.system.children["scheduler"]))
        await until(partial(counts_jobs, cluster.system.children["scaler"]))
        pages = await pages_of(cluster)
    for name, page in pages.items():
        service, process = PROCESSES[name]
        owned = {family.full_name for family in families_of(service, process.role)}
        assert set(page) == owned, name
    scaler = pages["scaler"]
    assert {stream for (stream,) in scaler["gpu_autoscaler_stream_fill_ratio"]} == {spec.name for spec in STREAMS}
    assert 0 < scaler["gpu_autoscaler_stream_fill_ratio"]["JOB",] < 0.1
    assert 0 < scaler["gpu_autoscaler_stream_oldest_age_seconds"]["JOB",] < 300
    assert scaler["gpu_autoscaler_stream_age_limit_seconds"]["JOB",] == 30 * 86_400
    assert math.isnan(scaler["gpu_autoscaler_stream_oldest_age_seconds"]["POLICY",])
    assert {lane for (lane,) in scaler["gpu_autoscaler_effects_waiting"]} == {"plans", "drains", "orders", "ends"}
    assert scaler["gpu_autoscaler_launches"]["", "launched"] >= 1
    letters = [pages[name].get("gpu_autoscaler_dead_letters", {}) for name in pages]
    others = {key: count for page in letters for key, count in page.items() if key[1] != "refused_request" and count}
    assert others == {}


async def test_a_former_leader_exports_no_fleet(tmp_path: Path) -> None:
    """One of two scalers is paused past its lease: the other one exports the fleet, and the first never again."""
    async with two_scalers(tmp_path) as cluster:
        first, second = cluster.system.children["scaler"], cluster.system.children[OTHER]
        await until(partial(is_active, cluster, "scaler"))
        await until(partial(shows, first, "gpu_autoscaler_nodes"))
        assert set(await page_of(first)) >= FLEET
        standby = await page_of(second)
        assert standby["gpu_autoscaler_leader"] == {(): 0.0}
        assert not FLEET & set(standby)
        paused = cluster.freeze("scaler")
        try:
            await until(partial(is_active, cluster, OTHER))
            await until(partial(shows, second, "gpu_autoscaler_nodes"))
            await asyncio.sleep(LEASES.ttl_seconds)
        finally:
            os.kill(paused, signal.SIGCONT)
        for _ in range(20):  # from the first scrape on
            page = await page_of(first)
            assert page["gpu_autoscaler_leader"] == {(): 0.0}
            assert not FLEET & set(page)
            await asyncio.sleep(0.05)
        assert set(await page_of(second)) >= FLEET
