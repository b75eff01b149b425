"""Both clients against a real gateway over sockets: every method, errors, names, retries, resumed events."""

import asyncio
import contextlib
import inspect
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from tests.services.gateway.test_dry_runs import cluster_for_sale
from tests.services.gateway.test_jobs import BODY
from tests.support.front import Front, front
from tests.support.sdk_clients import BreakingProxy, ClientKind, Sdk, breaking_proxy, sdk
from tests.support.stories import TimedFact, job, node, on_sale

from gpu_autoscaler.events.job import JobFinished
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.gateway.auth import SharedTokens
from gpu_manager_sdk import AsyncGPUJobClient, GPUJobClient, GPUManagerError, Retries, calls, models
from gpu_manager_sdk.errors import (
    AmbiguousName,
    Conflict,
    ConnectionFailed,
    InvalidRequest,
    NotAuthenticated,
    NotFound,
    ProblemError,
    Unavailable,
    WaitTimedOut,
)

TOKEN = "a-token-of-the-tests"
QUICK = Retries(delay_seconds_min=0.01, delay_seconds_max=0.05)
REQUEST = models.JobRequested(
    job_name="train",
    project_id="research",
    gpu_requirements=models.GpuRequirements(gpu_count=2, gpu_type=["H100", "A100"]),
    container=models.ContainerRequest(image="registry.example/train:1", command=["python", "train.py"]),
)


@pytest.fixture
async def gate(tmp_path: Path) -> AsyncIterator[Front]:
    """A gateway of an empty cluster."""
    async with front(tmp_path) as opened:
        yield opened


@pytest.fixture(params=["blocking", "asynchronous"])
def kind(request: pytest.FixtureRequest) -> ClientKind:
    """Either client."""
    chosen: ClientKind = request.param
    return chosen


@pytest.fixture
async def client(gate: Front, kind: ClientKind) -> AsyncIterator[Sdk]:
    """A client of the gateway."""
    async with sdk(kind, gate.url, retries=QUICK) as opened:
        yield opened


@pytest.fixture
async def proxy(gate: Front) -> AsyncIterator[BreakingProxy]:
    """A proxy to the gateway."""
    async with breaking_proxy(lambda: urlsplit(gate.url).port or 0) as opened:
        yield opened


async def _end(gate: Front, job_id: str, outcome: str = "completed") -> None:
    fact = JobFinished(job_id=JobId(job_id), outcome=outcome, finished_at=Clock().now())  # type: ignore[arg-type]  # from a table
    await gate.tell((TimedFact(fact, fact.finished_at),))


def test_both_clients_have_the_same_methods() -> None:
    """With equal parameters, so that a program changes from one to the other by adding await."""

    def methods(client: type) -> dict[str, list[str]]:
        return {
            name: [str(parameter) for parameter in inspect.signature(method).parameters.values()]
            for name, method in inspect.getmembers(client, inspect.isfunction)
            if not name.startswith("_") and name != "close"
        }

    assert methods(GPUJobClient) == methods(AsyncGPUJobClient)


async def test_a_job_is_submitted_read_listed_and_cancelled(gate: Front, client: Sdk) -> None:
    """From the typed request and from plain data; the answers are typed."""
    first = await client.do("submit", REQUEST)
    second = await client.do("submit", BODY)

    assert isinstance(first, models.Job)
    assert (first.status, first.gpu_type, first.gpu_count) == (models.JobState.PENDING, "H100,A100", 2)
    row = await gate.model.store.job(JobId(first.job_id))
    assert row is not None
    assert row.spec.command == ("python", "train.py")
    assert await client.do("get", first.job_id) == first
    assert [shown.job_id for shown in await client.take(None, "list")] == [second.job_id, first.job_id]
    assert (await client.do("cancel", first.job_id)).job_id == first.job_id


async def test_history_is_filtered_and_paged(gate: Front, client: Sdk, monkeypatch: pytest.MonkeyPatch) -> None:
    """More jobs than a page has, ended ones included; by name, project, state and time."""
    monkeypatch.setattr("gpu_manager_sdk.calls.PAGE_COUNT", 2)
    jobs = [await client.do("submit", {**BODY, "job_name": f"job-{number % 2}"}) for number in range(5)]
    ids = [shown.job_id for shown in jobs]
    await gate.model.store.finish_job(JobId(ids[3]), outcome="failed", finished_at=Clock().now())

    async def listed(**filters: object) -> list[int]:
        return [ids.index(shown.job_id) for shown in await client.take(None, "list", **filters)]

    assert await listed() == [4, 3, 2, 1, 0]
    assert await listed(limit=3) == [4, 3, 2]
    assert await listed(job_name="job-1") == [3, 1]
    assert await listed(state=("failed", "completed")) == [3]
    assert await listed(created_after=jobs[1].created_at, created_before=jobs[3].created_at) == [2, 1]
    assert await listed(project_id="nobody") == []


async def test_a_name_is_as_good_as_an_id_where_it_is_clear(gate: Front, client: Sdk) -> None:
    """One active job, else one job at all; several are listed in the error, and none is none."""
    first = await client.do("submit", REQUEST)
    assert (await client.do("get", "train")).job_id == first.job_id
    await gate.model.store.finish_job(JobId(first.job_id), outcome="completed", finished_at=Clock().now())
    assert (await client.do("get", "train")).status == "completed"
    second = await client.do("submit", REQUEST)
    assert (await client.do("cancel", "train")).job_id == second.job_id

    third = await client.do("submit", REQUEST)
    with pytest.raises(AmbiguousName) as ambiguous:
        await client.do("cancel", "train")
    assert [candidate.job_id for candidate in ambiguous.value.candidates] == [third.job_id, second.job_id]
    assert all(candidate.job_id in str(ambiguous.value) for candidate in (second, third))
    with pytest.raises(NotFound, match="'nobody' not found"):
        await client.do("get", "nobody")


async def test_waiting_ends_with_the_job_or_in_time(gate: Front, client: Sdk) -> None:
    """Each change of the status is seen; the last known job is in the error of a wait that was too long."""
    await gate.tell(job("j1"), job("j2"))
    changes = asyncio.create_task(client.take(None, "changes", "j1", poll_seconds=0.01))
    await asyncio.sleep(0.1)
    await _end(gate, "j1", "failed")

    assert [change.status for change in await changes] == ["queued", "failed"]
    assert (await client.do("wait", "j1")).status == models.JobState.FAILED
    assert (await client.do("wait", "j2", until="queued")).status == "queued"
    with pytest.raises(WaitTimedOut, match=r"j2 is still queued after 0\.1 s") as late:
        await client.do("wait", "j2", timeout_seconds=0.1, poll_seconds=0.02)
    assert late.value.job.job_id == "j2"


async def test_a_wait_outlasts_a_gateway_that_is_away(
    tmp_path: Path, kind: ClientKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the retries of a call, as long as an upgrade takes; an outage that is too long is raised."""
    async with contextlib.AsyncExitStack() as stack:
        async with front(tmp_path) as first:
            await first.tell(job("j1"), job("j2"))
            client = await stack.enter_async_context(sdk(kind, first.url, retries=Retries(attempts_count_max=1)))
            waiting = asyncio.create_task(client.do("wait", "j1", poll_seconds=0.02))
            await asyncio.sleep(0.2)
        await asyncio.sleep(0.2)
        assert not waiting.done()
        async with front(tmp_path, port=urlsplit(first.url).port or 0, before=first) as second:
            await _end(second, "j1")
            assert (await waiting).status == models.JobState.COMPLETED
            monkeypatch.setattr(calls, "OUTAGE_SECONDS_MAX", 0.0)
            late = asyncio.create_task(client.do("wait", "j2", poll_seconds=0.02))
            await asyncio.sleep(0.2)
        with pytest.raises(ConnectionFailed):
            await late


async def test_the_cluster_is_read(gate: Front, client: Sdk) -> None:
    """Every view, as typed answers."""
    await gate.tell(on_sale(), node("n1"), job("j1", placed_on=("n1",)))

    assert (await client.do("status")).jobs_by_status
    assert [shown.name for shown in await client.take(None, "nodes")] == ["n1"]
    assert (await client.do("why", "job", "j1")).sentences
    assert [plan.decisions[0].decision for plan in await client.take(None, "plans")] == ["buy_node"]
    assert (await client.do("cost", 60)).span_seconds == 60
    assert await client.take(None, "budgets") == []
    assert {offer.capacity_type for offer in await client.take(None, "offers")} <= set(models.CapacityType)
    with pytest.raises(NotFound):
        await client.do("why", "node", "nobody")


async def test_directives_and_demand_are_given(gate: Front, client: Sdk) -> None:
    """Set, listed and ended as their types say."""
    until = (await client.do("status")).as_of + timedelta(hours=1)
    freeze = await client.do("direct", models.Freeze(), reason="maintenance", until=until)
    override = models.Override(gpu_model="A100", gpu_count_min=8)
    await client.do("direct", override, reason="release", until=until, given_by="ada")
    shape = models.DemandShape(gpu_count=1)
    report = models.DemandReported(source="nightly", shape=shape, count=4, until=until)
    assert (await client.do("report_demand", report)).count == 4
    stream = [await gate.bus.message_at("POLICY", sequence) for sequence in (1, 2)]
    assert [message is not None for message in stream] == [True, True]

    assert freeze.directive == {"directive": "freeze"}
    assert await client.take(None, "directives") == []  # nobody folds in this test
    assert await client.take(None, "demand") == []
    with pytest.raises(NotFound, match="no active directive"):
        await client.do("lift", freeze.key)


async def test_a_refusal_is_typed_and_names_every_field(client: Sdk) -> None:
    """Status, title, fields and next step; nothing is repeated."""
    with pytest.raises(InvalidRequest) as refused:
        await client.do("submit", {**BODY, "gpu_requirements": {"gpu_count": -1}, "priority": "urgent"})

    error = refused.value
    assert isinstance(error, GPUManagerError)
    assert (error.status, error.title, error.is_temporary) == (422, HTTPStatus(422).phrase, False)
    assert {violation.field for violation in error.violations} >= {"gpu_requirements.gpu_count", "priority"}
    assert "gpu_requirements.gpu_count: " in str(error)
    await client.do("submit", REQUEST, idempotency_key="k")
    with pytest.raises(Conflict) as conflict:
        await client.do("submit", BODY, idempotency_key="k")
    assert conflict.value.remedy == "choose a new one, or repeat the original request"


async def test_a_rotated_token_is_read_again(tmp_path: Path, kind: ClientKind) -> None:
    """The file's token is sent as it is at the time of each request; without one the refusal is typed."""
    file = tmp_path / "token"
    file.write_text("an-old-token-of-the-tests\n")
    async with (
        front(tmp_path, authenticators=[SharedTokens([TOKEN])]) as gate,
        sdk(kind, gate.url, token_file=str(file)) as client,
    ):
        with pytest.raises(NotAuthenticated, match="unknown or expired token"):
            await client.do("status")
        file.write_text(f"{TOKEN}\n")
        assert (await client.do("status")).gpu_count == 0


@pytest.mark.parametrize("fault", ["before", "after", "unavailable"])
async def test_a_submission_survives_a_broken_connection(
    gate: Front, proxy: BreakingProxy, kind: ClientKind, fault: str
) -> None:
    """Repeated with its key: one job, whether or not the first request arrived."""
    proxy.faults.append(fault)  # type: ignore[arg-type]  # from a table
    async with sdk(kind, proxy.url, retries=QUICK) as client:
        accepted = await client.do("submit", REQUEST)

    assert len(proxy.requests) == 2
    assert [row.spec.job_id for row in (await gate.model.store.jobs()).rows] == [accepted.job_id]
    assert await gate.bus.last_sequence("JOB") == 1


async def test_what_is_not_repeatable_is_sent_once(proxy: BreakingProxy, kind: ClientKind) -> None:
    """A directive that may have been ended already is not ended again; a connection that was refused is tried again."""
    proxy.faults.append("after")
    async with sdk(kind, proxy.url, retries=QUICK) as client:
        with pytest.raises(ConnectionFailed) as failed:
            await client.do("lift", "freeze")
    assert failed.value.was_sent
    assert len(proxy.requests) == 1


async def test_retries_end(proxy: BreakingProxy, kind: ClientKind) -> None:
    """After the attempts that are allowed; and at once where the gateway asks for more time than there is."""
    proxy.faults.extend(["before"] * 5)
    async with sdk(kind, proxy.url, retries=Retries(attempts_count_max=3, delay_seconds_min=0.01)) as client:
        with pytest.raises(ConnectionFailed, match="cannot reach the gateway"):
            await client.do("status")
    assert len(proxy.requests) == 3
    proxy.faults.clear()
    proxy.faults.append("unavailable")
    async with sdk(kind, proxy.url, retries=Retries(seconds_max=0.5)) as client:
        started_at = time.monotonic()
        with pytest.raises(Unavailable) as away:
            await client.do("status")
    assert away.value.retry_after_seconds == 1
    assert time.monotonic() - started_at < 1


async def test_a_broker_that_is_away_is_waited_for(gate: Front, client: Sdk) -> None:
    """The gateway answers 503 with Retry-After, and the job is accepted once the broker is back."""
    gate.bus.is_away = True
    submitted = asyncio.create_task(client.do("submit", REQUEST))
    await asyncio.sleep(0.5)
    assert not submitted.done()
    gate.bus.is_away = False

    assert (await submitted).status == "pending"


async def test_what_is_no_gateway_is_named(kind: ClientKind, proxy: BreakingProxy) -> None:
    """Neither an address without a server nor a server of something else is mistaken for an empty cluster."""
    with pytest.raises(ValueError, match="not an address"):
        GPUJobClient("gpu-manager:8000")
    none = Retries(attempts_count_max=1)
    async with sdk(kind, "http://127.0.0.1:1", retries=none) as client:
        with pytest.raises(ConnectionFailed) as failed:
            await client.do("status")
    assert not failed.value.was_sent
    async with sdk(kind, f"{proxy.url}/elsewhere", retries=none) as client:
        with pytest.raises(ProblemError) as refused:
            await client.do("status")
    assert refused.value.status == 404


async def test_events_resume_through_a_restart_of_the_gateway(tmp_path: Path, kind: ClientKind) -> None:
    """No event is lost or seen twice, though facts are recorded before the client is back."""
    async with contextlib.AsyncExitStack() as stack:
        async with front(tmp_path) as gate:
            client = await stack.enter_async_context(sdk(kind, gate.url))
            events = asyncio.create_task(client.take(8, "events", "job.>"))
            await _listened(gate)
            await gate.tell(job("j1"))
        again = await stack.enter_async_context(front(tmp_path, before=gate, port=urlsplit(gate.url).port or 0))
        await again.tell(job("j2"), job("j3"))
        await _listened(again)
        await again.tell(job("j4"))
        async with asyncio.timeout(30):
            taken = await events

    assert [event.position for event in taken] == [f"JOB:{sequence}" for sequence in range(1, 9)]
    assert {event.type for event in taken} == {"job.requested.v1", "job.queued.v1"}


async def test_a_client_that_saw_no_event_yet_resumes_where_it_started(tmp_path: Path, kind: ClientKind) -> None:
    """The gateway says the position before the first event."""
    async with contextlib.AsyncExitStack() as stack:
        async with front(tmp_path) as gate:
            await gate.tell(job("seen-by-nobody"))
            client = await stack.enter_async_context(sdk(kind, gate.url))
            events = asyncio.create_task(client.take(2, "events", "job.>"))
            await _listened(gate)
        again = await stack.enter_async_context(front(tmp_path, before=gate, port=urlsplit(gate.url).port or 0))
        await again.tell(job("j1"))
        async with asyncio.timeout(30):
            taken = await events

    assert [event.position for event in taken] == ["JOB:3", "JOB:4"]
    assert taken[0].data["job_id"] == "j1"


async def _listened(gate: Front) -> None:
    async with asyncio.timeout(30):
        while not gate.model.tail.listeners_count:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # until the start position has been sent


async def test_a_job_is_tried_without_being_submitted(gate: Front, client: Sdk) -> None:
    """It is validated, and the next plan with it is shown."""
    await gate.tell(*cluster_for_sale())
    small = msgspec.structs.replace(
        REQUEST,
        gpu_requirements=models.GpuRequirements(gpu_count=2),
        resources=models.ResourceRequest(cpu="1", memory="1Gi"),
    )

    checked = await client.do("validate", small)
    plan = await client.do("simulate", small, small)

    assert checked.status == models.JobState.PENDING
    assert [shown.outcome for shown in plan.jobs] == ["purchase", "purchase"]
    assert await gate.model.bus.last_sequence("JOB") == 0


async def test_a_hundred_jobs_at_once_are_each_accepted_once(gate: Front, client: Sdk) -> None:
    """None is lost and none doubled, in the store and in the list."""
    jobs = await asyncio.gather(
        *(client.do("submit", {**BODY, "job_name": f"burst-{number}"}) for number in range(100))
    )
    listed = await client.take(None, "list")
    assert sorted(job.job_name for job in listed) == sorted(f"burst-{number}" for number in range(100))
    assert {job.job_id for job in listed} == {job.job_id for job in jobs}
