"""Inputs for other programs on real processes: valid messages are accepted once, invalid ones become dead letters."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import nats.errors
import nats.js.errors
import pytest
import pytest_asyncio
from nats.aio.client import Client
from prometheus_client.parser import text_string_to_metric_families
from tests.support.outside import ask, cli, event, example, publish, request_body
from tests.support.running import Running, running
from tests.support.submissions import entry_points, frozen, submitted_at_once

from gpu_autoscaler.bus.client_subjects import client_token
from gpu_autoscaler.bus.streams import MESSAGE_BYTES_MAX, SERVER_PAYLOAD_BYTES_MAX
from gpu_autoscaler.core.intake.admission import job_id_of
from gpu_autoscaler.events.job import JobFinished, JobQueued, JobRejected, JobRequested
from gpu_autoscaler.events.scaling import ScalingNodeLaunched, ScalingNodeOrdered, ScalingPlanMade
from gpu_autoscaler.events.spot import SpotOffersSampled
from gpu_autoscaler_services.demo.record import Record
from gpu_manager_sdk import AsyncGPUJobClient

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

JOBS = "/api/v1/gpu/jobs"
BODY = request_body()
NO_CONTAINER = {name: value for name, value in BODY.items() if name != "container"}
SCHEMAS = Path(__file__).parents[2] / "schemas" / "facts"
MEBIBYTE = 2**20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """One system for this module; no process restarts until the end."""
    async with running(tmp_path_factory.mktemp("door")) as started:
        # Until offers are known, a request cannot be rejected for its GPU count.
        await started.until(lambda record: record.count(SpotOffersSampled) > 0, "offers")
        yield started
        assert {name: child.starts_count for name, child in started.system.children.items()} == dict.fromkeys(
            started.system.children, 1
        )


def queued(record: Record, event_id: str) -> int:
    """Return how often the request of this event was accepted."""
    return sum(fact.job_id == job_id_of(None, event_id) for fact, _ in record.of(JobQueued))


async def test_a_program_without_our_package_submits_once(cluster: Running, tmp_path: Path) -> None:
    """As an event and as a bare body; a repeated id, over any connection, is the same job."""
    path = tmp_path / "request.json"
    path.write_text(json.dumps(BODY), encoding="utf-8")
    said = [
        await example(cluster, "publish_job.py", "--id", name, *flags, str(path))
        for name in ("as-event", "as-body")
        for flags in ([] if name == "as-event" else ["--bare"],) * 2
    ]

    assert [one.json["is_repeat"] for one in said] == [False, True, False, True]
    await cluster.until(lambda record: queued(record, "as-event") + queued(record, "as-body") >= 2, "both accepted")
    client = Client()
    await client.connect(cluster.system.nats_url)
    for message_id in ("repeat-1", "repeat-2"):  # two messages for the broker, but one event id
        await client.jetstream().publish(
            JobRequested.subject_root(), event("as-event", BODY), headers={"Nats-Msg-Id": message_id}
        )
    await client.close()
    await until_answered(cluster, "after-repeats")
    assert (queued(cluster.record, "as-event"), queued(cluster.record, "as-body")) == (1, 1)


async def until_answered(cluster: Running, event_id: str) -> None:
    """Submit another job and wait for its acceptance, so that earlier messages are processed."""
    await publish(cluster, "job.requested", event(event_id, BODY), event_id)
    await cluster.until(lambda record: queued(record, event_id) == 1, f"{event_id} accepted")


async def test_a_client_with_a_name_submits_and_cancels_in_it(cluster: Running) -> None:
    """The subject names the submitter, whatever the request says; nothing is stored on it, and repeats are one job."""
    subject = f"{JobRequested.subject_root()}.{client_token('anna')}"
    client = Client()
    await client.connect(cluster.system.nats_url)
    body = json.dumps({**BODY, "submitted_by": "somebody"}).encode()
    acks = 0
    async with asyncio.timeout(60):
        while acks < 2:
            try:
                ack = await client.jetstream().publish(subject, body, headers={"Nats-Msg-Id": "of-anna"}, timeout=30)
            except nats.js.errors.ServiceUnavailableError:  # the gateway is still reading the streams
                await asyncio.sleep(0.2)
                continue
            acks += 1
            assert ack.stream == "JOB"
    job_id = job_id_of(None, "client/anna/of-anna")

    def accepted(record: Record) -> list[str]:
        return [fact.spec.submitted_by for fact, _ in record.of(JobQueued) if fact.job_id == job_id]

    await cluster.until(lambda record: bool(accepted(record)), "accepted")
    with pytest.raises(nats.js.errors.APIError, match="members"):
        await client.jetstream().publish(subject, json.dumps({**BODY, "members": 0}).encode(), timeout=30)
    data = {"job_id": job_id, "requested_by": "somebody"}
    cancel = event("cancel-of-anna", data, type="job.cancel_requested.v1")
    for name, is_allowed in (("bob", False), ("anna", True)):
        canceling = client.jetstream().publish(f"job.cancel_requested.{client_token(name)}", cancel, timeout=30)
        if is_allowed:
            await canceling
        else:
            with pytest.raises(nats.js.errors.APIError, match="bob may not cancel"):
                await canceling
    await client.close()
    await cluster.until(
        lambda record: any("by anna" in fact.message for fact, _ in record.of(JobFinished) if fact.job_id == job_id),
        "cancelled",
    )
    assert accepted(cluster.record) == ["anna"]


async def test_a_subscriber_without_our_package_reads_decisions_by_schema(cluster: Running) -> None:
    """Each event of `scaling.>` matches its schema, validated by an independent program."""
    await cluster.until(lambda record: record.count(ScalingNodeLaunched) > 0, "a node")
    count = sum(cluster.record.count(kind) for kind in (ScalingPlanMade, ScalingNodeOrdered, ScalingNodeLaunched))

    heard = await example(cluster, "watch_scaling.py", "--schemas", str(SCHEMAS), "--count", str(count))

    assert (heard.code, heard.err) == (0, "")
    types = {json.loads(line)["type"] for line in heard.lines}
    assert {"scaling.plan_made.v1", "scaling.node_ordered.v1", "scaling.node_launched.v1"} <= types


def gpus(**changes: object) -> dict[str, Any]:
    """A request with other GPU requirements."""
    return request_body(gpu_requirements={"gpu_count": 1, **changes})


def bare(document: object) -> bytes:
    """Return the document as JSON, with NaN allowed."""
    return json.dumps(document).encode()


# name -> subject, payload, text of the dead letter
WRONG: dict[str, tuple[str, bytes, str]] = {
    "no-json": ("job.requested", b"please run my job", "JSON is malformed"),
    "no-object": ("job.requested", b"[1, 2]", "Expected `object`, got `array`"),
    "no-utf8": ("job.requested", bare(BODY).replace(b"train", b"\xff\xfe"), "can't decode byte 0xff"),
    "deep-body": ("job.requested", b'{"job_name":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion depth"),
    "deep-event": (
        "job.requested",
        event("d", "X").replace(b'"X"', b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
        "recurs",
    ),
    "unknown-type": ("job.requested", event("u", BODY, type="job.dreamed.v1"), "'job.dreamed.v1', which is unknown"),
    "unknown-subject": ("job.request", bare(BODY), "'job.request'; did you mean 'job.requested'?"),
    "other-subject": (
        "job.requested",
        event("o", {"job_id": "x"}, type="job.cancel_requested.v1"),
        "its subject is 'job.cancel_requested'",
    ),
    "specversion": ("job.requested", event("s", BODY, specversion="0.3"), "specversion '0.3'"),
    "no-id": ("job.requested", event("", BODY), "set `id`"),
    "endless-id": ("job.requested", event("x" * 10_000, BODY), "`id` of a CloudEvent has 10000 characters"),
    "bad-time": ("job.requested", event("t", BODY, time="yesterday"), "Invalid RFC3339 encoded datetime - at `$.time`"),
    "far-time": ("job.requested", event("f", BODY, time="9999-12-31T00:00:00Z"), "time: is 9999-12-31"),
    "missing": ("job.requested", bare({"job_name": "a", "project_id": "p"}), "gpu_requirements: missing; add it"),
    "contradiction": ("job.requested", bare(gpus(gpu_count=0, gpu_type="T4")), "gpu_requirements.gpu_count: is 0, but"),
    "not-a-number": ("job.requested", bare(request_body(budget_limit_usd=float("nan"))), "JSON is malformed"),
    "absurd-money": ("job.requested", bare(request_body(budget_limit_usd=1e308)), "budget_limit_usd: is 1e+308"),
    "absurd-memory": ("job.requested", bare(gpus(gpu_memory_gb=1e308)), "gpu_requirements.gpu_memory_gb: is 1e+308"),
    "absurd-time": ("job.requested", bare(request_body(run_seconds=1e308)), "run_seconds: is 1e+308"),
    "absurd-count": ("job.requested", bare(request_body(members=10**30)), "gpu_requirements.gpu_count: times 10000"),
    "negative": ("job.requested", bare(request_body(members=-1)), "members: is -1"),
    "fraction": ("job.requested", bare(gpus(gpu_count=1.5)), "gpu_requirements.gpu_count: Expected `int`, got `float`"),
    "unknown-field": (
        "job.requested",
        event("unknown-field", {**BODY, "novel": "x" * 2 * MEBIBYTE}),
        "novel: unknown key 'novel'",
    ),
    "unknown-gpu": (
        "job.requested",
        bare(gpus(gpu_type="T1000")),
        "gpu_requirements.gpu_type: 'T1000' is not an available GPU model",
    ),
    "too-many-gpus": ("job.requested", bare(gpus(gpu_count=64)), "is 64, but no node has more than"),
    "large-env": (
        "job.requested",
        bare(request_body(container={"image": "i", "env": {"A": "x" * 2 * MEBIBYTE}})),
        "container: has command and env of 2048 KiB",
    ),
    "no-such-job": (
        "job.cancel_requested",
        event("c", {"job_id": "never"}, type="job.cancel_requested.v1"),
        "cancellation of 'never' failed: no such job was accepted",
    ),
}


async def test_invalid_messages_become_dead_letters_and_the_next_job_is_accepted(cluster: Running) -> None:
    """Each dead letter has field and reason; an invalid job request is also rejected on the bus."""
    refused_before = await set_aside_count(cluster)
    for name, (subject, payload, _) in WRONG.items():
        await publish(cluster, subject, payload, name)
    await until_answered(cluster, "after-bad-input")

    letters = await letters_by_message(cluster, set(WRONG))

    for name, (subject, _, reason) in WRONG.items():
        assert letters[name]["subject"] == subject
        assert reason in letters[name]["reason"], name
    assert await set_aside_count(cluster) - refused_before >= len(WRONG)
    await cluster.until(lambda record: "negative" in rejected(record), "it is rejected on the bus")
    assert rejected(cluster.record)["negative"] == ["members"]


def rejected(record: Record) -> dict[str | None, list[str]]:
    """Return invalid fields by rejected request."""
    return {fact.request_id: [one.field for one in fact.violations] for fact, _ in record.of(JobRejected)}


async def letters_by_message(cluster: Running, names: set[str], seconds_max: float = 60) -> dict[str, dict[str, Any]]:
    """Return dead letters by message id, as the command line lists them, once all are there."""
    async with asyncio.timeout(seconds_max):
        while True:
            listed = await cli(cluster, "dead-letters", "list", "-o", "json", "--limit", "1000")
            assert (listed.code, listed.err) == (0, "")
            letters = {letter["message_id"]: letter for letter in listed.json}
            if names <= letters.keys():
                return letters


async def set_aside_count(cluster: Running) -> float:
    """Return the scheduler's count of dead letters."""
    url = cluster.system.children["scheduler"].ready_url.replace("/readyz", "/metrics")
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        text = await answer.text()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "gpu_autoscaler_dead_letters_total"
    )


async def test_an_oversized_message_is_refused_by_the_broker(cluster: Running) -> None:
    """By the stream or by the server: the publisher gets an error, and nothing is stored."""
    with pytest.raises(nats.js.errors.APIError, match="message size exceeds maximum allowed"):
        await publish(cluster, "job.requested", b"x" * (MESSAGE_BYTES_MAX + 1))
    with pytest.raises(nats.errors.MaxPayloadError):
        await publish(cluster, "job.requested", b"x" * (SERVER_PAYLOAD_BYTES_MAX + 1))
    await until_answered(cluster, "after-too-large")


async def test_a_used_id_with_another_body_is_refused(cluster: Running) -> None:
    """The first request is the job; the second one is rejected and does not change it."""
    await until_answered(cluster, "taken")
    await publish(cluster, "job.requested", event("taken", request_body("another")), "taken-again")

    letters = await letters_by_message(cluster, {"taken-again"})

    job_id = job_id_of(None, "taken")
    assert f"job_id: '{job_id}' is taken by a request with another body" in letters["taken-again"]["reason"]
    shown = await cli(cluster, "jobs", "show", job_id, "-o", "json")
    assert shown.json["job_name"] == "train"
    await cluster.until(
        lambda record: any(fact.job_id == job_id for fact, _ in record.of(JobFinished)), "it runs to its end", 120
    )


async def test_a_dead_letter_is_resubmitted_after_its_cause_is_fixed(cluster: Running) -> None:
    """A cancellation that arrived before its job."""
    cancel = event("cancel-early", {"job_id": "early"}, type="job.cancel_requested.v1")
    await publish(cluster, "job.cancel_requested", cancel, "cancel-early")
    letter = (await letters_by_message(cluster, {"cancel-early"}))["cancel-early"]
    body = request_body(job_id="early", run_seconds=3600)
    await publish(cluster, "job.requested", event("request-late", body), "request-late")
    await cluster.until(
        lambda record: any(fact.job_id == "early" for fact, _ in record.of(JobQueued)), "it is accepted"
    )

    sent = await cli(cluster, "dead-letters", "resubmit", str(letter["sequence"]))

    assert (sent.code, sent.err) == (0, "")
    await cluster.until(
        lambda record: any((fact.job_id, fact.outcome) == ("early", "cancelled") for fact, _ in record.of(JobFinished)),
        "it is cancelled",
    )
    again = (await letters_by_message(cluster, {"cancel-early"}))["cancel-early"]
    assert again["resubmitted_count"] == 1


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "said"),
    [
        ("POST", JOBS, b"please", {}, 400, "not valid JSON"),
        ("POST", JOBS, DEEP, {}, 400, "recursion depth"),
        ("POST", JOBS, b"\xff", {}, 400, "not valid JSON"),
        ("POST", JOBS, b"[]", {}, 422, "must be a table"),
        ("POST", JOBS, b"x" * (MEBIBYTE + 1), {}, 413, "1 MiB"),
        ("POST", JOBS, bare(BODY), {"Content-Type": "text/plain"}, 415, "application/json"),
        ("POST", JOBS, bare({"job_name": "a"}), {}, 422, "'field': 'gpu_requirements', 'reason': 'missing; add it'"),
        ("POST", JOBS, bare(NO_CONTAINER), {}, 422, "'field': 'container.image', 'reason': 'is empty; set the image"),
        ("POST", JOBS, bare({**BODY, "job_nam": 1}), {}, 422, "did you mean 'job_name'"),
        ("POST", JOBS, bare(request_body(members=-1)), {}, 422, "'field': 'members'"),
        ("POST", JOBS, bare(gpus(gpu_memory_gb=1e308)), {}, 422, "'field': 'gpu_requirements.gpu_memory_gb'"),
        ("POST", JOBS, bare(gpus(gpu_count=64)), {}, 422, "no node has more than"),
        ("POST", JOBS, bare(gpus(gpu_type="T1000")), {}, 422, "'T1000' is not an available GPU model"),
        ("POST", JOBS, bare(BODY), {"Idempotency-Key": "x" * 300}, 422, "1 to 255 characters"),
        ("GET", f"{JOBS}/nobody", None, {}, 404, "job 'nobody' not found"),
        ("DELETE", f"{JOBS}/nobody", None, {}, 404, "job 'nobody' not found"),
        ("GET", f"{JOBS}?limit=-1", None, {}, 422, "'field': 'limit'"),
        ("GET", f"{JOBS}?cursor=x", None, {}, 422, "cursor"),
        ("GET", "/api/v1/nothing", None, {}, 404, "/openapi.json"),
        ("PUT", JOBS, b"{}", {}, 405, "Allow"),
    ],
)
async def test_the_gateway_names_field_and_reason(
    cluster: Running, method: str, path: str, body: bytes | None, headers: dict[str, str], status: int, said: str
) -> None:
    """Every error is a problem document."""
    answer = await ask(cluster, method, path, body, headers)

    assert (answer.status, answer.content_type) == (status, "application/problem+json")
    assert said in str(answer.body)
    assert answer.body["status"] == status


async def test_the_gateway_accepts_a_request_once(cluster: Running) -> None:
    """The same key with the same body is one job; with another body, or a used id, it is a conflict."""
    key = {"Idempotency-Key": "outside-1"}
    first, again = [await ask(cluster, "POST", JOBS, bare(BODY), key) for _ in range(2)]
    other = await ask(cluster, "POST", JOBS, bare(request_body("other")), key)
    taken = bare(request_body("other", job_id=first.body["job_id"]))
    conflict = await ask(cluster, "POST", JOBS, taken)

    assert (first.status, again.status) == (202, 202)
    assert first.body["job_id"] == again.body["job_id"]
    assert (other.status, conflict.status) == (409, 409)
    assert "was used for a different request" in other.body["detail"]
    assert first.body["job_id"] in conflict.body["detail"]
    assert (await ask(cluster, "GET", f"{JOBS}/{first.body['job_id']}")).status == 200


async def test_hundreds_of_jobs_at_once_are_each_accepted_once(cluster: Running) -> None:
    """Forty through each of five entry points, all at the same time: none is lost, none doubled, each can be read."""
    await frozen(cluster)
    async with AsyncExitStack() as stack:
        ways = await entry_points(cluster, stack)
        done = await asyncio.gather(*(submitted_at_once(cluster, name, submit, 40) for name, submit in ways.items()))
    submitted = {submission.job_id for submissions in done for submission in submissions}
    assert len(submitted) == 200
    async with AsyncGPUJobClient(cluster.system.gateway_url) as client:
        listed = {job.job_id async for job in client.list(limit=None)}
    assert submitted <= listed
