"""From a published job to the decision that buys for it, as a third process sees it, beside NATS request and reply.

The whole demo system runs: scheduler, scaler and all others as processes, file-backed streams, the usual settings.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

from nats.aio.client import Client
from nats.aio.msg import Msg
from tests.bench.line import Line
from tests.support.running import Running, running

from gpu_autoscaler.events.catalog import FACT_CATALOG
from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.events.spot import SpotOffersSampled
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements, ResourceRequest
from gpu_autoscaler.model.reasons.buy import UnmetDemand

JOBS_COUNT = 40
PACE_SECONDS = 0.1
ANSWER_SECONDS_MAX = 10.0
ECHO = """
import asyncio, sys, nats
async def main():
    connection = await nats.connect(sys.argv[1])
    async def answer(message):
        await message.respond(message.data)
    await connection.subscribe("bench.echo", cb=answer)
    await connection.flush()  # else the first question may come before the server knows who answers
    print("ready", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def measure() -> list[Line]:
    """Medians of both, and the slowest decision, paced alike, in one run."""
    with tempfile.TemporaryDirectory() as folder:
        decisions, echoes = asyncio.run(_measure(Path(folder)))
    ratio = statistics.median(decisions) / statistics.median(echoes)
    against = f"{JOBS_COUNT} jobs, each needing a node of its own, {1 / PACE_SECONDS:g}/s"
    return [
        Line(case="DECISION p50", value=statistics.median(decisions) * 1000, unit="ms", against=against),
        Line(case="DECISION max", value=max(decisions) * 1000, unit="ms", against=against),
        Line(case="DECISION", value=ratio, unit="x", against="NATS request and reply between two processes, p50"),
    ]


async def _measure(folder: Path) -> tuple[list[float], list[float]]:
    async with running(folder) as cluster:
        connection = Client()
        await connection.connect(cluster.system.nats_url)
        decided: dict[str, float] = {}

        async def hear(message: Msg) -> None:
            now = time.perf_counter()
            for key in bought_for(message.data):
                decided.setdefault(key, now)

        await connection.subscribe(ScalingPlanMade.subject_root(), cb=hear)
        await cluster.until(lambda record: record.count(SpotOffersSampled) > 0, "offers to buy from")
        asked = await _ask(cluster)
        async with asyncio.timeout(ANSWER_SECONDS_MAX):
            while len(decided.keys() & asked.keys()) < JOBS_COUNT:
                await asyncio.sleep(0.01)
        echoes = await _echo(connection, cluster.system.nats_url)
        await connection.close()
    return [decided[key] - asked[key] for key in asked], echoes


async def _ask(cluster: Running) -> dict[str, float]:
    asked: dict[str, float] = {}
    for number in range(JOBS_COUNT):
        request = _request(number)
        asked[f"job/{request.job_id}"] = time.perf_counter()
        await cluster.player.submit(request, "nats")
        await asyncio.sleep(PACE_SECONDS)
    return asked


async def _echo(connection: Client, url: str) -> list[float]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", ECHO, url, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        await process.stdout.readline()
        seconds = []
        for _ in range(JOBS_COUNT):
            began = time.perf_counter()
            await connection.request("bench.echo", b"x" * 300, timeout=5)
            seconds.append(time.perf_counter() - began)
            await asyncio.sleep(PACE_SECONDS)
        return seconds
    finally:
        process.terminate()
        await process.wait()


def bought_for(event: bytes) -> list[str]:
    """Keys of the demand that a plan buys for."""
    fact = FACT_CATALOG.decode(event).fact
    assert isinstance(fact, ScalingPlanMade)
    return [
        key
        for decision in fact.plan.purchases
        if isinstance(decision.reason, UnmetDemand)
        for key in decision.reason.demand
    ]


def _request(number: int) -> JobRequested:
    return JobRequested(
        job_id=JobId(f"bench-{number}"),
        job_name=f"bench-{number}",
        project_id="bench",
        gpu_requirements=GpuRequirements(gpu_type="T4", gpu_count=4),
        container=ContainerRequest(image="registry.example/bench:1"),
        resources=ResourceRequest(cpu="2", memory="8Gi", ephemeral_storage="1Gi"),
        run_seconds=600.0,
    )
