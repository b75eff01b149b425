"""Each cloud's driver in the whole system: the buyer is killed during a launch, with lost responses."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from tests.support.aws import moto_or_skip
from tests.support.gcp import discovery_or_skip
from tests.support.running import Running, followed, started

from gpu_autoscaler.events.job import JobRequested, JobStarted
from gpu_autoscaler.events.scaling import ScalingNodeLaunched
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements, ResourceRequest
from gpu_autoscaler_services.demo.report import Report
from gpu_autoscaler_services.local.system import CloudName, ExternalSystems

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(600)]
QUIET_SECONDS_MAX = 240.0

# Launch call by cloud.
LAUNCHES: dict[CloudName, str] = {
    "aws": "RunInstances",
    "azure": "VirtualMachines_CreateOrUpdate",
    "gcp": "instanceGroupManagers.createInstances",
}


@asynccontextmanager
async def bought_from(cloud: CloudName, folder: Path) -> AsyncIterator[Running]:
    """A whole system that buys nodes through this cloud's API."""
    if cloud == "aws":
        moto_or_skip()
    if cloud == "gcp":
        discovery_or_skip()
    async with started(folder, external=ExternalSystems(cloud=cloud)) as system, followed(system) as cluster:
        yield cluster


def request(number: int, *, gpus: int = 1, run_seconds: float = 300.0) -> JobRequested:
    """A job for T4s; the run time is cluster time."""
    return JobRequested(
        job_id=JobId(f"job-{number}"),
        job_name=f"job-{number}",
        project_id="e2e",
        gpu_requirements=GpuRequirements(gpu_type="T4", gpu_count=gpus),
        container=ContainerRequest(image="registry.example/e2e:1"),
        resources=ResourceRequest(cpu="2", memory="8Gi", ephemeral_storage="1Gi"),
        run_seconds=run_seconds,
    )


async def misbehave(cluster: Running, **fault: object) -> None:
    """Inject a fault into calls to the cloud."""
    url = f"{cluster.system.cloud_url}/admin/faults"
    async with aiohttp.ClientSession() as session, session.post(url, json=fault) as answer:
        assert answer.status == 200, await answer.text()


def kept(report: Report, jobs_count: int) -> None:
    """Assert that every promise was kept and every job completed."""
    assert report.broken_promises == ()
    assert report.jobs_completed == jobs_count
    assert report.nodes_bought == report.nodes_removed
    assert report.bill_micro_usd == report.allocated_micro_usd + report.idle_micro_usd > 0


@pytest.mark.sweep
@pytest.mark.parametrize("cloud", LAUNCHES)
async def test_a_buyer_killed_with_lost_responses_buys_nothing_twice(cloud: CloudName, tmp_path: Path) -> None:
    """Responses of launches are lost, the next launches are slow, and the buying process is killed during them."""
    call = LAUNCHES[cloud]
    async with bought_from(cloud, tmp_path) as cluster:
        await misbehave(cluster, kind="lost", call=call, left_count=2)
        await misbehave(cluster, kind="slow", call=call, wait_seconds=1.0, left_count=3, passed_count=2)
        for number in range(4):
            await cluster.player.submit(request(number), "nats")
        await cluster.until(lambda record: record.count(ScalingNodeLaunched) >= 1, "a launch", 120.0)
        await cluster.kill("scaler")
        await cluster.until(lambda record: record.count(JobStarted) >= 1, "a job that runs", 120.0)
        await cluster.kill("spot-watcher-notices")
        kept(await cluster.report_when_quiet(QUIET_SECONDS_MAX), 4)
