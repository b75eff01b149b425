"""Many jobs submitted at once to a whole system, through each entry point: how long each took, and which are lost."""

import asyncio
import io
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from typing import Any

import aiohttp
import msgspec
from nats.aio.client import Client
from tests.support.outside import request_body
from tests.support.running import Running

from gpu_autoscaler.bus.client_subjects import client_token
from gpu_autoscaler.core.intake.admission import job_id_of
from gpu_autoscaler.events.job import JobQueued, JobRequested
from gpu_autoscaler.events.policy import PolicyDirectiveGiven
from gpu_manager_sdk import AsyncGPUJobClient, GPUJobClient
from gpu_manager_sdk.models import Freeze

COUNT = 100  # of each entry point
ANSWER_SECONDS_MAX, QUEUED_SECONDS_MAX = 120.0, 120.0  # of a busy machine

Submit = Callable[[dict[str, Any], str], Awaitable[str]]  # the request and its key; returns the job id


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """One job, from its request to its answer and to its place in the queue. Seconds of wall time."""

    job_id: str
    answer_seconds: float
    queued_seconds: float


async def frozen(system: Running) -> None:
    """Freeze the system: nothing is bought for the jobs, so that the machine is free for their requests."""
    async with AsyncGPUJobClient(system.system.gateway_url) as client:
        until = system.clock.now() + timedelta(days=1)
        await client.direct(Freeze(), reason="many jobs at once", until=until)
    await system.until(lambda record: record.count(PolicyDirectiveGiven) > 0, "frozen")


async def entry_points(system: Running, stack: AsyncExitStack) -> Mapping[str, Submit]:
    """Return a way to submit through each entry point; connections end with the stack."""
    url, client = system.system.gateway_url, Client()
    await client.connect(system.system.nats_url)
    stack.push_async_callback(client.close)
    http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
    sdk, blocking = await stack.enter_async_context(AsyncGPUJobClient(url)), GPUJobClient(url)
    subject = f"{JobRequested.subject_root()}.{client_token('anna')}"

    async def publish(to: str, body: dict[str, Any], key: str) -> None:
        headers, payload = {"Nats-Msg-Id": key}, json.dumps(body).encode()
        await client.jetstream().publish(to, payload, headers=headers, timeout=ANSWER_SECONDS_MAX)

    async def trusted(body: dict[str, Any], key: str) -> str:
        await publish("job.requested", body, key)
        return job_id_of(None, key)

    async def named(body: dict[str, Any], key: str) -> str:
        await publish(subject, body, key)
        return job_id_of(None, f"client/anna/{key}")

    async def rest(body: dict[str, Any], key: str) -> str:
        headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
        async with http.post(f"{url}/jobs", data=io.BytesIO(json.dumps(body).encode()), headers=headers) as answer:
            assert answer.status == 202, await answer.text()
            return str((await answer.json())["job_id"])

    async def by_sdk(body: dict[str, Any], key: str) -> str:
        return (await sdk.submit(body, idempotency_key=key)).job_id

    async def by_blocking_sdk(body: dict[str, Any], key: str) -> str:
        return (await asyncio.to_thread(blocking.submit, body, idempotency_key=key)).job_id

    return {
        "NATS": trusted,
        "NATS of a named client": named,
        "REST": rest,
        "SDK": by_sdk,
        "SDK, blocking": by_blocking_sdk,
    }


async def submitted_at_once(system: Running, name: str, submit: Submit, count: int = COUNT) -> list[Submission]:
    """Submit `count` jobs at once; return them when each is in the queue, exactly once. Raises AssertionError else."""
    clock, answers = system.clock, dict[str, tuple[datetime, datetime]]()

    async def submit_job(number: int) -> None:
        key = f"{name.replace(' ', '-').replace(',', '')}-{number}".lower()
        sent_at = clock.now()
        job_id = await submit(request_body(key), key)
        answers[job_id] = sent_at, clock.now()

    async with asyncio.timeout(ANSWER_SECONDS_MAX):
        await asyncio.gather(*(submit_job(number) for number in range(count)))
    assert len(answers) == count, f"{name}: two requests became one job"

    def queued() -> dict[str, list[datetime]]:
        found: dict[str, list[datetime]] = {}
        for fact, _ in system.record.of(JobQueued):
            if fact.job_id in answers:
                found.setdefault(fact.job_id, []).append(fact.queued_at)
        return found

    what = f"{name}: all {count} jobs in the queue"
    await system.until(lambda _: len(queued()) == count, what, QUEUED_SECONDS_MAX)
    places = queued()
    assert all(len(instants) == 1 for instants in places.values()), f"{name}: a job was queued twice"
    return [
        Submission(
            job_id=job_id,
            answer_seconds=(answered_at - sent_at).total_seconds() / clock.factor,
            queued_seconds=(places[job_id][0] - sent_at).total_seconds() / clock.factor,
        )
        for job_id, (sent_at, answered_at) in answers.items()
    ]
