"""Jobs over REST: accepted once, refused with every violation, listed, shown, cancelled."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.support.front import Front, front
from tests.support.pod_templates import lacking, template
from tests.support.stories import TimedFact, job, node, offer, on_sale, policy, quota, synced

from gpu_autoscaler.events.job import JobCancelRequested, JobFinished, JobQueued, JobRequested, JobResynced
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.decode import decode_message

JOBS = "/api/v1/gpu/jobs"
BODY: dict[str, Any] = {
    "job_name": "train-llm",
    "project_id": "research",
    "priority": "high",
    "gpu_requirements": {"gpu_type": "A100", "gpu_count": 4, "gpu_memory_gb": 40},
    "container": {"image": "registry.example/train:1", "command": ["python", "train.py"], "env": {"A": "b"}},
    "resources": {"cpu": "8", "memory": "64Gi", "ephemeral_storage": "100Gi"},
    "budget_limit_usd": 500.0,
    "max_duration_hours": 24,
    "preemptible": True,
}


@pytest.fixture
async def gate(tmp_path: Path) -> AsyncIterator[Front]:
    """A gateway of an empty cluster."""
    async with front(tmp_path) as opened:
        yield opened


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client."""
    async with aiohttp.ClientSession() as session:
        yield session


async def _post(
    http: aiohttp.ClientSession, gate: Front, body: dict[str, Any], path: str = JOBS, **headers: str
) -> tuple[int, dict[str, Any], dict[str, str]]:
    async with http.post(gate.url + path, json=body, headers=headers) as response:
        return response.status, await response.json(content_type=None), dict(response.headers)


async def _requests_on_stream(gate: Front) -> list[JobRequested]:
    bus, requests = gate.model.bus, []
    for sequence in range(1, await bus.last_sequence("JOB") + 1):
        message = await bus.message_at("JOB", sequence)
        assert message is not None
        fact = decode_message(message, gate.model.clock).fact
        if isinstance(fact, JobRequested):
            requests.append(fact)
    return requests


async def test_an_accepted_job_is_on_the_stream_and_in_the_store(gate: Front, http: aiohttp.ClientSession) -> None:
    """202 guarantees both; the answer has the contractual fields."""
    status, job_, headers = await _post(http, gate, BODY)

    assert status == 202
    assert job_["status"] == "pending"
    for field in ("job_id", "queue_position", "estimated_start_time", "estimated_cost_usd", "created_at"):
        assert field in job_
    assert job_["queue_position"] == 1
    assert headers["Location"] == f"{JOBS}/{job_['job_id']}"
    assert [request.job_id for request in await _requests_on_stream(gate)] == [job_["job_id"]]
    assert await gate.model.store.job(JobId(job_["job_id"])) is not None


async def test_a_job_can_be_read_immediately(gate: Front, http: aiohttp.ClientSession) -> None:
    """An accepted job is visible before any other service has received it."""
    _, accepted, _ = await _post(http, gate, BODY, path="/jobs")

    async with http.get(f"{gate.url}/jobs/{accepted['job_id']}") as response:
        shown = await response.json()

    assert response.status == 200
    assert shown["status"] == "pending"
    assert shown["job_name"] == "train-llm"


async def test_a_gpu_that_no_offer_has_is_refused(gate: Front, http: aiohttp.ClientSession) -> None:
    """Once offers are known, a request that fits no offer is refused."""
    await gate.tell(on_sale(offer(gpus=4, model="T4", gpu_memory_gib=16)))

    status, problem, _ = await _post(http, gate, {**BODY, "gpu_requirements": {"gpu_count": 8, "gpu_type": "H100"}})

    assert status == 422
    assert {"gpu_requirements.gpu_type", "gpu_requirements.gpu_count"} == {
        violation["field"] for violation in problem["violations"]
    }


@pytest.mark.parametrize(
    ("payload", "content_type", "status"),
    [
        (b"{not json", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b"[]", "application/json", 422),
        (b"null", "application/json", 422),
        (b"job_name=x", "application/x-www-form-urlencoded", 415),
        (b'{"job_name": "' + b"x" * (1 << 20) + b'"}', "application/json", 413),
    ],
    ids=["no-json", "deep", "no-text", "list", "null", "form", "large"],
)
async def test_an_invalid_body_gets_a_problem_document(
    gate: Front, http: aiohttp.ClientSession, payload: bytes, content_type: str, status: int
) -> None:
    """Whatever the body, the answer names the error and the gateway keeps serving."""
    async with http.post(gate.url + JOBS, data=io.BytesIO(payload), headers={"Content-Type": content_type}) as response:
        problem = await response.json(content_type="application/problem+json")

    assert response.status == status
    assert problem["status"] == status
    assert problem["detail"]
    assert (await _post(http, gate, BODY))[0] == 202


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", f"{JOBS}/nobody", 404), ("DELETE", "/jobs/nobody", 404), ("GET", "/nowhere", 404), ("PUT", JOBS, 405)],
)
async def test_wrong_addresses_and_methods_are_problems_too(
    gate: Front, http: aiohttp.ClientSession, method: str, path: str, status: int
) -> None:
    """404 and 405 are problem documents like every other error."""
    async with http.request(method, gate.url + path) as response:
        problem = await response.json(content_type="application/problem+json")

    assert (response.status, problem["status"]) == (status, status)
    if status == 405:
        assert "POST" in response.headers["Allow"]


async def test_the_same_key_and_body_get_the_same_answer(gate: Front, http: aiohttp.ClientSession) -> None:
    """A client that received no answer retries: one job, one answer."""
    first = await _post(http, gate, BODY, **{"Idempotency-Key": "k-1"})
    repeated = await _post(http, gate, BODY, **{"Idempotency-Key": "k-1"})

    assert first[0] == repeated[0] == 202
    assert first[1] == repeated[1]
    assert len(await _requests_on_stream(gate)) == 1


async def test_the_same_key_with_another_body_is_a_conflict(gate: Front, http: aiohttp.ClientSession) -> None:
    """A key identifies one request."""
    await _post(http, gate, BODY, **{"Idempotency-Key": "k-1"})

    status, problem, _ = await _post(http, gate, {**BODY, "job_name": "other"}, **{"Idempotency-Key": "k-1"})

    assert status == 409
    assert "k-1" in problem["detail"]


async def test_a_key_that_is_not_utf_8_is_refused(gate: Front) -> None:
    """Any UTF-8 text is a valid key."""
    host, port = gate.url.removeprefix("http://").split(":")
    body = json.dumps(BODY).encode()
    answers = []
    for key in (b"\xff", "schlüssel".encode()):
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {JOBS} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + b"Idempotency-Key: " + key + b"\r\n")
        writer.write(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answers.append(int((await reader.read()).split()[1]))
        writer.close()

    assert answers == [422, 202]


async def test_without_a_key_two_equal_requests_are_two_jobs(gate: Front, http: aiohttp.ClientSession) -> None:
    """Equal requests without a key are independent."""
    first, second = await _post(http, gate, BODY), await _post(http, gate, BODY)

    assert first[1]["job_id"] != second[1]["job_id"]


async def test_a_job_id_is_taken_once(gate: Front, http: aiohttp.ClientSession) -> None:
    """The same id and body is the same job; another body under it is refused."""
    first = await _post(http, gate, {**BODY, "job_id": "mine"})
    repeated = await _post(http, gate, {**BODY, "job_id": "mine"})
    other = await _post(http, gate, {**BODY, "job_id": "mine", "job_name": "other"})

    assert (first[0], repeated[0], other[0]) == (202, 202, 409)
    assert len(await _requests_on_stream(gate)) == 1


async def test_of_two_requests_that_race_for_an_id_one_is_refused(gate: Front, http: aiohttp.ClientSession) -> None:
    """The stream keeps the first request; the second gets a conflict."""
    bodies = [{**BODY, "job_id": "mine", "job_name": name} for name in ("one", "two")]

    answers = await asyncio.gather(*(_post(http, gate, body) for body in bodies))

    assert sorted(status for status, _, _ in answers) == [202, 409]
    accepted = next(body["job_name"] for status, body, _ in answers if status == 202)
    assert [request.job_name for request in await _requests_on_stream(gate)] == [accepted]
    row = await gate.model.store.job(JobId("mine"))
    assert row is not None
    assert row.spec.job_name == accepted


async def test_a_full_queue_answers_retry_later(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """429 with Retry-After, and nothing is published."""
    async with front(tmp_path, policy=policy(queue_count_max=1)) as gate:
        await gate.tell(job("first"))
        before = await gate.model.bus.last_sequence("JOB")

        status, _, headers = await _post(http, gate, BODY)

        assert status == 429
        assert int(headers["Retry-After"]) >= 1
        assert await gate.model.bus.last_sequence("JOB") == before


async def test_a_job_over_a_quota_has_a_problem_type_of_its_own(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """422 with the type of quotas where only quotas are exceeded; beside an invalid field each violation has a kind."""
    rules = policy(quotas={"project_default": {"gpu_count_max": 2, "job_duration_hours_max": 1}})
    async with front(tmp_path, policy=rules) as gate:
        status, problem, _ = await _post(http, gate, BODY)
        assert (status, problem["type"]) == (422, "/problems/quota-exceeded")
        assert [(violation["field"], violation["kind"]) for violation in problem["violations"]] == [
            ("gpu_requirements.gpu_count", "quota"),
            ("max_duration_hours", "quota"),
        ]
        status, problem, _ = await _post(http, gate, {**BODY, "priority": "urgent"})
        assert (status, problem.get("type")) == (422, "/problems/rule-violated")
        kinds = {violation["field"]: violation.get("kind") for violation in problem["violations"]}
        assert kinds == {"gpu_requirements.gpu_count": "quota", "max_duration_hours": "quota", "priority": None}


async def test_a_job_larger_than_its_resource_quota_is_refused_as_over_quota(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    """By the type of the problem; nothing is published."""
    rules = policy(tenancy={"projects": [{"name": BODY["project_id"], "namespace": "research"}]})
    async with front(tmp_path, policy=rules) as gate:
        await gate.tell(quota("gpus", {"requests.nvidia.com/gpu": 1}))
        status, problem, _ = await _post(http, gate, BODY)
        assert (status, problem["type"]) == (422, "/problems/quota-exceeded")
        assert "ResourceQuota research/gpus" in problem["violations"][0]["reason"]
        assert await gate.model.bus.last_sequence("JOB") == 0


async def test_a_full_queue_of_a_user_answers_retry_later(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """429 with Retry-After and the type of quotas; nothing is published."""
    async with front(tmp_path, policy=policy(quotas={"user_default": {"queue_count_max": 1}})) as gate:
        await gate.tell(job("first"))
        before = await gate.model.bus.last_sequence("JOB")

        status, problem, headers = await _post(http, gate, BODY)

        assert (status, problem["type"]) == (429, "/problems/quota-exceeded")
        assert int(headers["Retry-After"]) >= 1
        assert "is full for jobs without a known user: 1 waits" in problem["violations"][0]["reason"]
        assert await gate.model.bus.last_sequence("JOB") == before


async def test_without_the_broker_a_request_has_no_effect(gate: Front, http: aiohttp.ClientSession) -> None:
    """503 with Retry-After and no row; the same request is accepted later."""
    gate.bus.is_away = True
    status, problem, headers = await _post(http, gate, {**BODY, "job_id": "mine"}, **{"Idempotency-Key": "k"})
    assert (status, headers["Retry-After"]) == (503, "3")
    assert "broker" in problem["detail"]
    assert await gate.model.store.job(JobId("mine")) is None

    gate.bus.is_away = False
    status, _, _ = await _post(http, gate, {**BODY, "job_id": "mine"}, **{"Idempotency-Key": "k"})

    assert status == 202


async def test_cancelling_is_a_fact_and_an_ended_job_stays_ended(gate: Front, http: aiohttp.ClientSession) -> None:
    """DELETE requests cancellation; for a completed job it is a conflict."""
    await gate.tell(job("runs", placed_on=("n1",), is_running=True), job("done"))
    finished = JobFinished(job_id=JobId("done"), outcome="completed", finished_at=Clock().now())
    await gate.tell((TimedFact(finished, finished.finished_at),))

    async with http.delete(f"{gate.url}{JOBS}/runs") as response:
        assert response.status == 202
        assert (await response.json())["status"] == "running"
    message = await gate.model.bus.message_at("JOB", await gate.model.bus.last_sequence("JOB"))
    assert message is not None
    assert message.subject == JobCancelRequested.subject_root()
    assert json.loads(message.payload)["data"]["job_id"] == "runs"

    async with http.delete(f"{gate.url}{JOBS}/done") as response:
        assert response.status == 409


async def test_pages_follow_each_other_without_gap_or_repeat(gate: Front, http: aiohttp.ClientSession) -> None:
    """Newest first, page by page, from the store and from memory."""
    ids = [(await _post(http, gate, {**BODY, "job_id": f"j{n}"}))[1]["job_id"] for n in range(5)]
    await gate.tell(*(job(job_id) for job_id in ids))

    for query in (
        "limit=2",
        "limit=2&state=queued&state=pending",
        "limit=2&state=queued&state=failed",
        "limit=2&project_id=research",
    ):
        seen: list[str] = []
        cursor = ""
        for _ in range(5):
            async with http.get(f"{gate.url}{JOBS}?{query}{cursor}") as response:
                page = await response.json()
            seen += [item["job_id"] for item in page["items"]]
            if page["next_cursor"] is None:
                break
            cursor = f"&cursor={page['next_cursor']}"
        assert seen == sorted(ids, reverse=True), query


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=x", "state=sleeping", "cursor=%00", "cursor=zzzz", "cursor=%C3%A9", "color=red"]
)
async def test_an_invalid_query_names_the_parameter(gate: Front, http: aiohttp.ClientSession, query: str) -> None:
    """422 with the parameter's name."""
    async with http.get(f"{gate.url}{JOBS}?{query}") as response:
        problem = await response.json(content_type="application/problem+json")

    assert response.status == 422
    assert problem["violations"][0]["field"] == query.partition("=")[0]


async def test_cost_and_start_are_estimated_only_when_known(gate: Front, http: aiohttp.ClientSession) -> None:
    """Without offers both are null; an offer determines both."""
    _, unknown, _ = await _post(http, gate, BODY)
    assert (unknown["estimated_cost_usd"], unknown["estimated_start_time"]) == (None, None)
    sold = offer(gpus=8, model="A100", gpu_memory_gib=40, usd_per_hour=10.0)
    resources = msgspec.structs.replace(sold.resources, ephemeral_storage_bytes=2**40)
    now = gate.model.clock.now()
    await gate.tell(on_sale(msgspec.structs.replace(sold, resources=resources)), synced((), as_of=now))

    _, estimated, _ = await _post(http, gate, BODY)

    assert estimated["estimated_cost_usd"] == pytest.approx(10.0 * 24 * 4 / 8)
    assert estimated["estimated_start_time"] > estimated["created_at"]


async def test_a_running_job_shows_where_it_runs(gate: Front, http: aiohttp.ClientSession) -> None:
    """State and nodes come from the stream."""
    await gate.tell(node("n1"), job("runs", placed_on=("n1",), is_running=True))

    async with http.get(f"{gate.url}/jobs/runs") as response:
        shown = await response.json()
        etag = response.headers["ETag"]

    assert (shown["status"], shown["node_names"], shown["queue_position"]) == ("running", ["n1"], None)
    async with http.get(f"{gate.url}/jobs/runs", headers={"If-None-Match": etag}) as response:
        assert response.status == 304


def _templated(**spec: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    own = template()
    own["spec"] |= spec
    return {
        **{name: value for name, value in BODY.items() if name not in ("container", "resources")},
        "pod_template": own,
    }


async def test_a_pod_template_is_on_the_stream_and_in_the_store(gate: Front, http: aiohttp.ClientSession) -> None:
    """The scheduler finds the template at either place."""
    status, job_, _ = await _post(http, gate, _templated())

    assert status == 202, job_
    (request,) = await _requests_on_stream(gate)
    assert request.pod_template == template()
    stored = await gate.model.store.job_template(JobId(job_["job_id"]))
    assert stored is not None
    assert lacking(msgspec.json.decode(stored), template()) == []
    assert (await _post(http, gate, {**_templated(), "job_id": job_["job_id"]}))[1]["job_id"] == job_["job_id"]


async def test_dangerous_fields_need_the_setting_and_no_caller_sets_the_mark(
    gate: Front, http: aiohttp.ClientSession
) -> None:
    """Refused by default, all at once; with the setting the gateway marks the request for the scheduler."""
    body = _templated(hostNetwork=True, hostPID=True)
    status, problem, _ = await _post(http, gate, body)
    assert status == 422
    fields = [violation["field"] for violation in problem["violations"]]
    assert fields == ["pod_template.spec.hostNetwork", "pod_template.spec.hostPID"]
    status, problem, _ = await _post(http, gate, {**body, "dangerous_fields_allowed": True})
    assert status == 422
    assert [violation["field"] for violation in problem["violations"]] == ["dangerous_fields_allowed", *fields]
    assert await gate.model.bus.last_sequence("JOB") == 0

    gate.model.are_dangerous_fields_allowed = True
    assert (await _post(http, gate, body))[0] == 202
    assert (await _post(http, gate, _templated()))[0] == 202
    marks = [request.dangerous_fields_allowed for request in await _requests_on_stream(gate)]
    assert marks == [True, False], "only where the template has such fields"


async def test_templates_are_refused_where_jobs_share_our_namespace(gate: Front, http: aiohttp.ClientSession) -> None:
    """They could read our Secrets; the short form names none."""
    gate.model.are_pod_templates_allowed = False
    status, problem, _ = await _post(http, gate, _templated())
    assert status == 422
    (violation,) = problem["violations"]
    assert (violation["field"], "jobs.namespace" in violation["reason"]) == ("pod_template", True)
    assert (await _post(http, gate, BODY))[0] == 202


async def test_values_of_environment_variables_are_not_shown(gate: Front, http: aiohttp.ClientSession) -> None:
    """In facts of short jobs and of templates; names stay. With the setting they are shown to those who ask."""
    _, job_, _ = await _post(http, gate, _templated())
    await _post(http, gate, {**BODY, "container": {"image": "x", "env": {"A": "secret-value"}}})
    requested = [request for request in await _requests_on_stream(gate) if request.job_id != job_["job_id"]]
    story = job("other", env={"A": "secret-value"})
    (queued,) = (told.fact for told in story if isinstance(told.fact, JobQueued))
    resynced = JobResynced(job_id=JobId("other"), requested=requested[0], queued=queued)
    await gate.tell(story, (TimedFact(resynced, Clock().now()),))

    async def shown(more: str = "") -> str:
        async with http.get(f"{gate.url}/api/v1/facts?subject=job.%3E{more}") as response:
            return await response.text()

    hidden = await shown()
    assert "secret-value" not in hidden
    assert hidden.count("(hidden)") == 5
    assert '"TOKEN"' in hidden
    refused = await shown("&env=true")
    assert "gateway.are_env_values_shown" in refused
    assert "secret-value" not in refused
    gate.model.are_env_values_shown = True
    assert (await shown("&env=true")).count("secret-value") == 5
    assert "secret-value" not in await shown()


async def test_jobs_are_filtered_by_their_queue(tmp_path: Path) -> None:
    """Of the projects that the policy has in it, also of ended jobs; an unknown queue is named."""
    rules = policy(queues=[{"name": "vision", "projects": ["cv"]}, {"name": "rest"}])
    async with front(tmp_path, policy=rules) as gate, aiohttp.ClientSession() as http:
        await gate.tell(job("a", project_id="cv"), job("b", project_id="nlp"), job("c", project_id="cv"))

        async def listed(queue: str) -> Any:  # noqa: ANN401 - JSON
            async with http.get(f"{gate.url}/api/v1/gpu/jobs", params={"queue": queue, "state": "queued"}) as response:
                return await response.json(content_type=None)

        assert sorted(item["job_id"] for item in (await listed("vision"))["items"]) == ["a", "c"]
        assert [item["job_id"] for item in (await listed("rest"))["items"]] == ["b"]
        (violation,) = (await listed("visoin"))["violations"]
        assert violation == {"field": "queue", "reason": "'visoin' is no queue of the policy; known: rest, vision"}
