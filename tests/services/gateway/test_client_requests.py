"""Requests in the name of their subject: spelling, bounds, and what a gateway without Kubernetes allows."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.front import Front, front
from tests.support.outside import request_body
from tests.support.pod_templates import templated_body

from gpu_autoscaler.bus.client_subjects import CLIENT_LENGTH_MAX, client_subjects, client_token, read_client_subject
from gpu_autoscaler.bus.nats.requests import Request
from gpu_autoscaler.events.job import JobCancelRequested, JobRequested
from gpu_autoscaler.model.errors import InvalidFact
from gpu_autoscaler_services.background import background
from gpu_autoscaler_services.gateway import client_requests
from gpu_autoscaler_services.gateway.access import NO_ACCESS_RULES, AccessRules, client_projects_of
from gpu_autoscaler_services.gateway.client_requests import ClientRequests
from gpu_autoscaler_services.gateway.routes import BODY_BYTES_MAX

# The project of `request_body`.
RULES = AccessRules(client_projects=client_projects_of(("anna=outside", "bob=*")))


async def asked(
    requests: ClientRequests, subject: str, payload: bytes, message_id: str | None = None
) -> dict[str, Any]:
    """Return the answer to a request."""

    async def unused(_: bytes) -> None:
        """The answer is returned."""

    request = Request(subject=subject, payload=payload, answer=unused, message_id=message_id)
    answer: dict[str, Any] = json.loads(await requests.answer(request))
    return answer


def test_a_subject_names_one_client() -> None:
    """Any printable name, and no second spelling of it."""
    for name in ("anna", "system:serviceaccount:research:pipeline", "änna o'neil", "x" * CLIENT_LENGTH_MAX):
        requested, cancelled = client_subjects(name)
        assert read_client_subject(requested) == (JobRequested, name)
        assert read_client_subject(cancelled) == (JobCancelRequested, name)
        assert not {".", "*", ">", " "} & set(client_token(name))
    for token in (
        "",
        "YW5uYQ==",
        "YW5uYR",
        "_w",
        "!",
        client_token("a\nb"),
        client_token("x" * (CLIENT_LENGTH_MAX + 1)),
    ):
        with pytest.raises(InvalidFact):
            read_client_subject(f"client_request.job_requested.{token}")
    for subject in ("client_request.job_started.YW5uYQ", "other.job_requested.YW5uYQ", "client_request.job_requested"):
        with pytest.raises(InvalidFact):
            read_client_subject(subject)


async def test_every_wrong_request_has_its_error(tmp_path: Path) -> None:
    """Nothing is published for it."""
    async with front(tmp_path) as entry:
        requests = ClientRequests(entry.model, RULES)
        submit, cancel = client_subjects("anna")
        for subject, payload, code in (
            ("client_request.job_requested.!", b"{}", 400),
            (submit, b"no json", 400),
            (submit, b"{}", 422),
            (submit, b'"' + b"x" * BODY_BYTES_MAX + b'"', 400),
            (submit, json.dumps(request_body(members=-1)).encode(), 422),
            (cancel, json.dumps({"job_id": "j"}).encode(), 400),
            (cancel, cancel_event("nobody"), 404),
        ):
            assert (await asked(requests, subject, payload))["error"]["code"] == code, payload[:50]
        assert await entry.bus.last_sequence("JOB") == 0
        starting = ClientRequests(entry.model, RULES, is_ready=lambda: False)
        assert (await asked(starting, submit, json.dumps(request_body()).encode()))["error"]["code"] == 503
        entry.bus.is_away = True
        assert (await asked(requests, submit, json.dumps(request_body()).encode()))["error"]["code"] == 503


def cancel_event(job_id: str) -> bytes:
    """The cancellation of a job, as an event."""
    event = {"specversion": "1.0", "id": f"c-{job_id}", "source": "/t", "type": "job.cancel_requested.v1"}
    return json.dumps({**event, "data": {"job_id": job_id}}).encode()


async def test_without_kubernetes_a_client_submits_in_its_projects_alone(tmp_path: Path) -> None:
    """Those of the settings: `*` is all, and without an entry none. Nothing is published for a refused request."""
    async with front(tmp_path) as entry:
        cases = (
            (RULES, "anna", "outside", None),
            (RULES, "anna", "vision", 403),
            (RULES, "bob", "vision", None),
            (RULES, "carl", "outside", 403),
            (NO_ACCESS_RULES, "anna", "outside", 403),
        )
        for rules, name, project, code in cases:
            before = await entry.bus.last_sequence("JOB")
            body = json.dumps(request_body(project_id=project)).encode()
            answer = await asked(ClientRequests(entry.model, rules), client_subjects(name)[0], body)
            assert answer.get("error", {}).get("code") == code, (name, project)
            assert (await entry.bus.last_sequence("JOB") > before) == (code is None)
            if code is not None:
                assert f"{name}={project}" in answer["error"]["description"]
                assert answer["error"]["description"].endswith("(/problems/right-missing)")


async def test_without_kubernetes_no_client_has_dangerous_fields(tmp_path: Path) -> None:
    """Not even with the setting; the refusal is that of a missing right, not that of a field."""
    async with front(tmp_path) as entry:
        entry.model.are_dangerous_fields_allowed = True
        requests = ClientRequests(entry.model, RULES)
        for spec, code in (({}, None), ({"hostNetwork": True}, 403), ({"nodeName": "n1"}, 422)):
            body = json.dumps(templated_body(**spec)).encode()
            answer = await asked(requests, client_subjects("anna")[0], body)
            assert answer.get("error", {}).get("code") == code, answer


async def test_a_client_marks_no_dangerous_fields_as_allowed(tmp_path: Path) -> None:
    """The mark is the gateway's: with and without such fields, and with the setting, the request is refused for it."""
    async with front(tmp_path) as entry:
        specs: list[tuple[bool, dict[str, Any]]] = [(False, {}), (True, {}), (True, {"hostNetwork": True})]
        for is_allowed, spec in specs:
            entry.model.are_dangerous_fields_allowed = is_allowed
            body = json.dumps({**templated_body(**spec), "dangerous_fields_allowed": True}).encode()
            answer = await asked(ClientRequests(entry.model, RULES), client_subjects("anna")[0], body)
            if is_allowed and spec:  # then it needs the right
                assert answer["error"]["code"] == 403
                continue
            assert answer["error"]["code"] == 422
            assert "dangerous_fields_allowed: is set by the gateway" in answer["error"]["description"]
        assert await entry.bus.last_sequence("JOB") == 0


async def test_without_kubernetes_a_client_cancels_its_own_jobs_alone(tmp_path: Path) -> None:
    """Equal ids of two clients are two jobs."""
    async with front(tmp_path) as entry:
        requests = ClientRequests(entry.model, RULES)
        body = json.dumps(request_body()).encode()
        jobs = {name: await _submitted(requests, name, body) for name in ("anna", "bob")}
        assert jobs["anna"] != jobs["bob"]
        assert await _submitted(requests, "anna", body) == jobs["anna"]
        for name in ("anna", "bob"):
            answer = await asked(requests, client_subjects("anna")[1], cancel_event(jobs[name]))
            assert ("error" not in answer) == (name == "anna")
        assert await _last_requested_by(entry) == "anna"


async def _submitted(requests: ClientRequests, name: str, body: bytes) -> str:
    return str((await asked(requests, client_subjects(name)[0], body, "the-same"))["job_id"])


async def _last_requested_by(entry: Front) -> str:
    message = await entry.bus.last_message("JOB", "job.cancel_requested")
    assert message is not None
    return str(json.loads(message.payload)["data"]["requested_by"])


async def test_requests_that_wait_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beyond are not answered, all others are."""
    monkeypatch.setattr(client_requests, "REQUESTS_WAITING_COUNT_MAX", 3)
    answers: list[bytes] = []

    async def answer(payload: bytes) -> None:
        answers.append(payload)

    async with front(tmp_path) as entry:
        requests = ClientRequests(entry.model, NO_ACCESS_RULES)
        for _ in range(5):
            requests.receive(Request(subject=client_subjects("anna")[0], payload=b"{}", answer=answer))
        async with background(requests.run(), "client requests"), asyncio.timeout(30):
            while len(answers) < 3:
                await asyncio.sleep(0.01)
        assert len(answers) == 3


def test_an_entry_for_all_other_clients() -> None:
    """It holds for clients without an entry of their own."""
    rules = AccessRules(client_projects=client_projects_of(("anna=outside", "*=shared")))
    allowed = {
        (client, project)
        for client in ("anna", "bob")
        for project in ("outside", "shared")
        if rules.is_client_of(client, project)
    }
    assert allowed == {("anna", "outside"), ("bob", "shared")}
