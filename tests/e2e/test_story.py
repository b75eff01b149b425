"""The demo's scenario on real processes, each of them killed during it; all but the scaler in `make sweep`."""

import asyncio
from functools import partial
from pathlib import Path

import aiohttp
import msgspec
import pytest
from tests.support.cluster import until
from tests.support.running import Running, running

from gpu_autoscaler.events.cost import CostAccrued
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.gpu import GpuNodeSampled
from gpu_autoscaler.events.job import JobFinished, JobPlaced, JobQueued, JobRequested, JobStarted
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.events.scaling import ScalingDrainStarted, ScalingNodeLaunched, ScalingNodeOrdered, ScalingPlanMade
from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import Connection
from gpu_autoscaler.kube.protocol import JOBS
from gpu_autoscaler.kube.translate.workload_progress import KINDS, progress
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements, ResourceRequest, Runtime
from gpu_autoscaler_services.demo.record import Record
from gpu_autoscaler_services.demo.report import Report

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(300)]
QUIET_SECONDS_MAX = 120.0
SLOW_SECONDS = 10.0  # delay of a response, so that a kill happens during the call on busy machines too


def request(name: str, *, gpus: int = 1, members: int = 1, run_seconds: float | None = 240.0) -> JobRequested:
    """A job for T4s; the run time is cluster time."""
    return JobRequested(
        job_id=JobId(name),
        job_name=name,
        project_id="e2e",
        gpu_requirements=GpuRequirements(gpu_type="T4", gpu_count=gpus),
        container=ContainerRequest(image="registry.example/e2e:1"),
        resources=ResourceRequest(cpu="2", memory="8Gi", ephemeral_storage="1Gi"),
        members=members,
        run_seconds=run_seconds,
    )


def has(record: Record, kind: type[Fact], **fields: object) -> bool:
    """Return whether a fact of this type with these fields was recorded."""
    return any(all(getattr(fact, name) == value for name, value in fields.items()) for fact, _ in record.of(kind))


async def told_no_more(cluster: Running, kind: type[Fact]) -> int:
    """Return the number of recorded facts of this type, once none has arrived for 3 s."""
    count = -1
    while count < (count := cluster.record.count(kind)):
        await asyncio.sleep(3.0)
    return count


def kept(report: Report, *jobs: str) -> None:
    """Assert that every promise was kept and these jobs completed."""
    assert report.broken_promises == ()
    assert report.jobs_completed == len(jobs)
    assert report.bill_micro_usd == report.allocated_micro_usd + report.idle_micro_usd > 0


@pytest.mark.sweep
async def test_the_scheduler_is_killed_with_unread_requests(tmp_path: Path) -> None:
    """The restarted scheduler answers each pending request once."""
    async with running(tmp_path) as cluster:
        cluster.freeze("scheduler")
        for number in range(3):
            await cluster.player.submit(request(f"job-{number}"), "nats")
        await cluster.until_unacknowledged("JOB", "scheduler-job-act")
        assert not has(cluster.record, JobQueued)
        await cluster.kill("scheduler")
        await cluster.until(lambda record: record.count(JobPlaced) >= 1, "a placement")
        await cluster.kill("scheduler")
        kept(await cluster.report_when_quiet(QUIET_SECONDS_MAX), "job-0", "job-1", "job-2")


@pytest.mark.sweep
async def test_the_scaler_is_killed_during_a_launch_and_a_drain(tmp_path: Path) -> None:
    """The launch is repeated with the same token without a second instance; the drain continues."""
    async with running(tmp_path) as cluster:
        await cluster.world.slow_down("/cloud/instances", seconds=SLOW_SECONDS)
        await cluster.player.submit(request("job-0"), "nats")
        await cluster.until(lambda record: has(record, ScalingNodeOrdered), "an order")
        await asyncio.sleep(0.5)  # the slow call to the cloud is in progress
        assert await cluster.unacknowledged_count("SCALING", "scaler-scaling-act") > 0
        assert not has(cluster.record, ScalingNodeLaunched)
        await cluster.kill("scaler")
        await cluster.world.slow_down("/cloud/instances", seconds=0.0)
        await cluster.until(lambda record: has(record, JobStarted), "the job runs")
        assert await cluster.world.send_notice(120.0) is not None
        await cluster.until(lambda record: has(record, ScalingDrainStarted), "a cordoned node")
        await cluster.kill("scaler")
        report = await cluster.report_when_quiet(QUIET_SECONDS_MAX)
        kept(report, "job-0")
        assert report.notices_answered == 1


@pytest.mark.sweep
async def test_the_pod_watcher_is_killed_during_changes(tmp_path: Path) -> None:
    """The initial list reports changes and deletions that happened while it was down."""
    async with running(tmp_path) as cluster:
        await cluster.player.submit(request("job-0", run_seconds=None), "nats")
        await cluster.until(lambda record: has(record, JobStarted), "the job runs")
        cluster.freeze("pod-watcher")
        await cluster.world.end_work()
        await until(partial(is_complete, cluster, "job-0"))  # unobserved
        assert not has(cluster.record, JobFinished)
        await cluster.kill("pod-watcher")
        kept(await cluster.report_when_quiet(QUIET_SECONDS_MAX), "job-0")


async def is_complete(cluster: Running, name: str) -> bool:
    """Return whether Kubernetes has completed the job."""
    kube = KubeClient(Connection(base_url=cluster.system.simcluster_url), now=cluster.clock.now)
    try:
        return progress(await kube.get(KINDS[Runtime.JOB], "default", name)).end is not None
    finally:
        await kube.close()


@pytest.mark.sweep
async def test_a_job_is_deleted_while_the_pod_watcher_is_down(tmp_path: Path) -> None:
    """The deletion is unobserved; the initial list lacks the Kubernetes Job: cancelled once."""
    async with running(tmp_path) as cluster:
        await cluster.player.submit(request("job-0", run_seconds=4000.0), "nats")
        await cluster.until(lambda record: has(record, JobStarted), "the job runs")
        cluster.freeze("pod-watcher")
        kube = KubeClient(Connection(base_url=cluster.system.simcluster_url), now=cluster.clock.now)
        job = await kube.get(JOBS, "default", "job-0")
        assert await kube.remove(JOBS, job)
        await kube.close()
        await cluster.kill("pod-watcher")
        await cluster.until(lambda record: has(record, JobFinished, outcome="cancelled"), "the end of the job")
        report = await cluster.report_when_quiet(QUIET_SECONDS_MAX)
        assert report.broken_promises == ()
        assert (report.jobs_finished, report.jobs_completed) == (1, 0)


@pytest.mark.sweep
async def test_the_spot_watcher_is_killed_with_an_unread_notice(tmp_path: Path) -> None:
    """The notice is still active after the restart and is handled by its deadline."""
    async with running(tmp_path) as cluster:
        await cluster.player.submit(request("job-0", run_seconds=400.0), "nats")
        await cluster.until(lambda record: has(record, JobStarted), "the job runs")
        cluster.freeze("spot-watcher-notices")
        assert await cluster.world.send_notice(120.0) is not None
        assert not has(cluster.record, SpotNoticeReceived)
        await cluster.kill("spot-watcher-notices")
        report = await cluster.report_when_quiet(QUIET_SECONDS_MAX)
        kept(report, "job-0")
        assert (report.notices_received, report.notices_answered) == (1, 1)


@pytest.mark.sweep
async def test_sensors_and_cost_tracker_are_killed_with_open_charges(tmp_path: Path) -> None:
    """Nothing is charged twice or omitted; offers, telemetry and charges continue."""
    async with running(tmp_path) as cluster:
        await cluster.player.submit(request("job-0", run_seconds=400.0), "nats")
        await cluster.until(lambda record: has(record, CostAccrued) and has(record, GpuNodeSampled), "charges, samples")
        cluster.freeze("cost-tracker")
        await asyncio.sleep(120.0 / cluster.clock.factor)
        truth = await cluster.world.truth()
        charged = sum(fact.total_micro_usd for fact, _ in cluster.record.of(CostAccrued))
        assert charged < sum(truth.bill_micro_usd.values())
        cluster.freeze("dcgm-ingest")
        samples_count = await told_no_more(cluster, GpuNodeSampled)
        await asyncio.sleep(30.0 / cluster.clock.factor)
        assert cluster.record.count(GpuNodeSampled) == samples_count, "three scrapes are open"
        for process in ("cost-tracker", "dcgm-ingest", "spot-watcher-offers"):
            await cluster.kill(process)
        await cluster.until(lambda record: record.count(GpuNodeSampled) > samples_count, "a sample after the kill")
        kept(await cluster.report_when_quiet(QUIET_SECONDS_MAX), "job-0")


@pytest.mark.sweep
async def test_the_gateway_is_killed_during_a_request(tmp_path: Path) -> None:
    """The user gets no answer and retries: one job."""
    async with running(tmp_path) as cluster:
        cluster.freeze("gateway")
        body = msgspec.json.encode(request("job-0"))
        asked = asyncio.create_task(post(cluster, body, seconds_max=60))
        await asyncio.sleep(0.5)
        assert not asked.done()
        await cluster.kill("gateway")
        assert await asked is None, "the connection died with the process"
        assert await post(cluster, body, seconds_max=60) == 202
        assert await post(cluster, body, seconds_max=60) == 202
        report = await cluster.report_when_quiet(QUIET_SECONDS_MAX)
        kept(report, "job-0")
        assert report.jobs_requested == 1


async def post(cluster: Running, body: bytes, *, seconds_max: float) -> int | None:
    """Submit a job to the gateway; None without an answer."""
    timeout = aiohttp.ClientTimeout(total=seconds_max)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(
                f"{cluster.system.gateway_url}/api/v1/gpu/jobs",
                data=body,
                headers={"Content-Type": "application/json", "Idempotency-Key": "the-one"},
            ) as answer,
        ):
            return answer.status
    except (aiohttp.ClientError, TimeoutError):
        return None


@pytest.mark.sweep
async def test_the_nats_server_is_killed(tmp_path: Path) -> None:
    """Publishers wait, consumers resume, and nothing acknowledged is lost."""
    async with running(tmp_path) as cluster:
        await cluster.world.slow_down("/cloud/instances", seconds=SLOW_SECONDS)
        await cluster.player.submit(request("gang-0", gpus=4, members=2), "nats")
        await cluster.until(lambda record: has(record, ScalingPlanMade) and has(record, ScalingNodeOrdered), "an order")
        await asyncio.sleep(0.5)  # calls to the cloud are in progress, orders unacknowledged
        assert await cluster.unacknowledged_count("SCALING", "scaler-scaling-act") > 0
        await cluster.system.nats.kill()
        await cluster.world.slow_down("/cloud/instances", seconds=0.0)
        await asyncio.sleep(2.0)  # nodes boot and register meanwhile, unrecorded
        await cluster.system.nats.start()
        await cluster.until(lambda record: has(record, NodeObserved, is_ready=True), "a ready node")
        await cluster.player.submit(request("job-0"), "rest")
        kept(await cluster.report_when_quiet(QUIET_SECONDS_MAX), "gang-0", "job-0")
