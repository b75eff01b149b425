"""Jobs over REST: submit, list, show, cancel.

A job is accepted (202) when the stream has acknowledged the request and the row is committed, in this order. A crash in
between leaves a request on the stream, which the scheduler turns into the same row. The client, without an answer,
retries and finds the job (docs/decisions.md#job-acceptance).
"""

import uuid
from collections.abc import Sequence
from http import HTTPStatus
from math import isfinite
from typing import TypeVar

import msgspec
from aiohttp import web

from gpu_autoscaler.core.demand.quotas import queue_violations
from gpu_autoscaler.core.demand.resource_quotas import quota_violation
from gpu_autoscaler.core.intake.admission import job_id_of, supply
from gpu_autoscaler.core.queueing.deadlines import deadline_violations
from gpu_autoscaler.core.queueing.job_budgets import budget_violation
from gpu_autoscaler.core.state.queries import job_state, queue
from gpu_autoscaler.events.job import JobCancelRequested, JobRequested
from gpu_autoscaler.kube.pod_templates.admission import Admitted, admit
from gpu_autoscaler.kube.pod_templates.security import dangerous_fields
from gpu_autoscaler.model.document_errors import ERRORS_COUNT_MAX, first_errors
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import FINAL_STATES, JobSpec, JobState, Violation
from gpu_autoscaler.runtime.decode import decode_message
from gpu_autoscaler.runtime.digests import request_digest
from gpu_autoscaler.runtime.metrics import package_version
from gpu_autoscaler.store.protocol import JobRow
from gpu_autoscaler_services.api_rights import CANCEL_JOBS, CANCEL_OWN_JOBS, DANGEROUS_FIELDS, READ_JOBS, SUBMIT_JOBS
from gpu_autoscaler_services.gateway import estimates, schema
from gpu_autoscaler_services.gateway.access import ACCESS, Access
from gpu_autoscaler_services.gateway.api.job_pages import JobsQuery, job_page
from gpu_autoscaler_services.gateway.audit import ACT, Act
from gpu_autoscaler_services.gateway.problems import QUOTA_TYPE, Problem, invalid, rule_violated
from gpu_autoscaler_services.gateway.read_model import READ_MODEL, ReadModel
from gpu_autoscaler_services.gateway.routes import INVALID, JSON, MISSING, Route, answer, is_text, read_query

QUEUE_RETRY_SECONDS = 30.0  # a queue of 1,000 jobs changes slowly
KEY_LENGTH_MAX = 255
_EXACT_INTEGERS_MAX = 2**53  # of a float
OTHER_BODY = "was used for a different request; choose a new one, or repeat the original request"

F = TypeVar("F", bound=msgspec.Struct)

EXAMPLE = {
    "job_name": "train",
    "project_id": "research",
    "gpu_requirements": {"gpu_count": 8, "gpu_type": ["H100", "A100"]},
    "container": {"image": "registry.example/train:1", "command": ["python", "train.py"]},
    "priority": "high",
    "resources": {"cpu": "8", "memory": "64Gi", "ephemeral_storage": "100Gi"},
    "max_duration_hours": 24,
    "preemptible": True,
}

_INVALID_JOB = "invalid job request: correct the fields listed in violations"
_KEY = "Idempotency-Key"
_JOBS = "/api/v1/gpu/jobs"
_ONE = f"{_JOBS}/{{job_id}}"


async def submit_job_handler(request: web.Request) -> web.Response:
    """Submit a job."""
    model = request.app[READ_MODEL]
    job = await read_body(request, JobRequested)
    about = "" if job.job_id is None else f"job/{job.job_id}"
    request[ACT] = Act(verb="submit", object=about, project_id=job.project_id, claimed_who=job.submitted_by)
    await request[ACCESS].require(SUBMIT_JOBS, job.project_id)
    key = request.headers.get(_KEY)
    is_valid = key is None or (0 < len(key) <= KEY_LENGTH_MAX and is_text(key))
    others = () if is_valid else (Violation(_KEY, f"must be 1 to {KEY_LENGTH_MAX} characters of UTF-8"),)
    event_id = str(uuid.uuid4()) if key is None or not is_valid else f"idempotency-key/{key}"
    submitted_by = request[ACCESS].name or job.submitted_by
    job = msgspec.structs.replace(job, job_id=job_id_of(job.job_id, event_id), submitted_by=submitted_by)
    job, admitted = await admitted_job(job, event_id, model, request[ACCESS], *others)
    digest = request_digest(job)
    if key is None:
        return _accepted_response(await accept(model, job, admitted, digest, request[ACCESS]), admitted.spec.job_id)
    claim = await model.store.begin_request(key, request_digest=digest, started_at=model.clock.now())
    if claim is not None and claim.request_digest != digest:
        raise Problem(HTTPStatus.CONFLICT, f"{_KEY} {key!r} {OTHER_BODY}")
    if claim is not None and claim.status is not None and claim.answer is not None:
        return _accepted_response(claim.answer, admitted.spec.job_id)
    body = await accept(model, job, admitted, digest, request[ACCESS])
    await model.store.answer_request(key, status=HTTPStatus.ACCEPTED, answer=body)
    return _accepted_response(body, admitted.spec.job_id)


# Errors of requests with a body.
BODY_PROBLEMS = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    *INVALID,
)


def _number(text: str) -> float | int:
    """Return a number with a fraction or exponent: 8.0 is the integer 8, as in JSON Schema. Raises DecodeError."""
    number = float(text)
    if not isfinite(number):
        raise msgspec.DecodeError(f"number {text[:20]} is out of range")
    return int(number) if number.is_integer() and abs(number) < _EXACT_INTEGERS_MAX else number


_decoder = msgspec.json.Decoder(float_hook=_number)


async def read_body(request: web.Request, kind: type[F]) -> F:
    """Return the body as a struct. Raises a 422 that names every unknown, missing and mistyped field."""
    if request.content_type != JSON:
        detail = f"unsupported content type {request.content_type!r}; send JSON with `Content-Type: {JSON}`"
        raise Problem(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, detail)
    try:
        document = _decoder.decode(await request.read())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Problem(HTTPStatus.BAD_REQUEST, f"the body is not valid JSON: {error}") from error
    require_fields(first_errors(document, kind))
    return msgspec.convert(document, kind)


def require_fields(errors: Sequence[str]) -> None:
    """Raise a 422 that lists the errors, which begin with the path of their field, if there are any."""
    if errors:
        named = (text.partition(": ") for text in errors[:ERRORS_COUNT_MAX])
        left = " (more are not listed)" if len(errors) > ERRORS_COUNT_MAX else ""
        detail = f"invalid request body: correct the fields listed in violations{left}"
        raise invalid(detail, *(Violation(field, _of_version(reason)) for field, _, reason in named))


def _of_version(reason: str) -> str:
    """Add this gateway's version to the error of an unknown name, which may belong to a later version."""
    return f"{reason} (this gateway is {package_version()})" if reason.startswith("unknown ") else reason


async def admitted_job(
    job: JobRequested, event_id: str, model: ReadModel, access: Access, *others: Violation
) -> tuple[JobRequested, Admitted]:
    """Return the request, marked if its pod template has dangerous fields that the caller may use, and its job with
    every default filled in.

    Raises a 403 for such fields of a caller without the right, a 422 that names every violation and the `others`.
    Without the setting nobody may use such fields, and admission lists them.
    """
    violations, may_use_dangerous_fields = list(others), False
    if job.dangerous_fields_allowed:
        reason = "is set by the gateway, for callers with the right to dangerous fields; remove it"
        violations.append(Violation("dangerous_fields_allowed", reason))
    if job.pod_template is not None and not model.are_pod_templates_allowed:
        reason = (
            "is refused here: it could use the Secrets and service accounts of gpu-autoscaler; give the jobs a"
            " namespace of their own (jobs.namespace of the chart, gateway.are_pod_templates_allowed), or send"
            " container instead"
        )
        violations.append(Violation("pod_template", reason))
    elif job.pod_template is not None and model.are_dangerous_fields_allowed and dangerous_fields(job.pod_template):
        await access.require(DANGEROUS_FIELDS, job.project_id)
        may_use_dangerous_fields = True
    job = msgspec.structs.replace(job, dangerous_fields_allowed=may_use_dangerous_fields)
    now = model.clock.now()
    known = supply(model.view.state, model.policy)
    admitted = admit(job, event_id=event_id, at=now, now=now, policy=model.policy, supply=known)
    if violations or not isinstance(admitted, Admitted):
        raise refused([*violations, *(() if isinstance(admitted, Admitted) else admitted)])
    return job, admitted


def refused(violations: Sequence[Violation]) -> Problem:
    """Return the problem of a job that could never start; it has a type of its own if quotas alone refuse the job."""
    if any(violation.kind != "quota" for violation in violations):
        return rule_violated(_INVALID_JOB, *violations)
    over = "the job exceeds a quota and could never start: correct the fields listed in violations"
    return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, over, violations=tuple(violations), kind=QUOTA_TYPE)


def check_now(spec: JobSpec, model: ReadModel) -> None:
    """Raise a 422 for a job that budget or ResourceQuota would never let start, or that cannot meet its deadlines, a
    429 for a full queue."""
    state = model.view.state
    both = budget_violation(spec, state), quota_violation(spec, state, model.policy)
    never = [violation for violation in both if violation is not None]
    if violations := [*never, *deadline_violations(spec, state, model.policy, model.clock.now())]:
        raise refused(violations)
    waiting_count = len(queue(state))
    if waiting_count >= model.policy.queue_count_max:
        raise Problem(
            HTTPStatus.TOO_MANY_REQUESTS,
            f"queue full: {waiting_count} jobs wait, the maximum of the policy; retry later",
            retry_after_seconds=QUEUE_RETRY_SECONDS,
        )
    if over_quota := queue_violations(spec, state, model.policy):
        raise Problem(
            HTTPStatus.TOO_MANY_REQUESTS,
            "queue full for this project or user: see violations; retry later",
            violations=over_quota,
            retry_after_seconds=QUEUE_RETRY_SECONDS,
            kind=QUOTA_TYPE,
        )


async def accept(model: ReadModel, job: JobRequested, admitted: Admitted, digest: str, access: Access) -> bytes:
    """Publish, commit, and return the answer. A repeated request gets the answer of the first one."""
    spec = admitted.spec
    row = await model.store.job(spec.job_id)
    if row is None:
        check_now(spec, model)
        await _publish_once(job, digest, model, access)
        acceptance = await model.store.accept_job(
            spec, request_digest=digest, accepted_at=model.clock.now(), template=admitted.template_bytes
        )
        is_conflict = acceptance == "conflict"
    else:
        spec, is_conflict = row.spec, row.request_digest != digest
    if is_conflict:
        raise Problem(HTTPStatus.CONFLICT, f"job_id {spec.job_id!r} {OTHER_BODY}")
    scene = model.scene_of_new_jobs()
    return msgspec.json.encode(estimates.job(spec, JobState.PENDING, scene))


async def _publish_once(job: JobRequested, digest: str, model: ReadModel, access: Access) -> None:
    """Publish the request. If two requests race for one id, the stream keeps the first and the other is refused."""
    ack = await model.publish(job, access)
    if not ack.is_duplicate:
        return
    first = await model.bus.message_at(ack.stream, ack.sequence)
    if first is None:
        return
    recorded = decode_message(first, model.clock)
    if not isinstance(recorded.fact, JobRequested) or request_digest(recorded.fact) != digest:
        raise Problem(HTTPStatus.CONFLICT, f"job_id {job.job_id!r} {OTHER_BODY}")


def _accepted_response(body: bytes, job_id: JobId) -> web.Response:
    return web.Response(
        status=HTTPStatus.ACCEPTED, body=body, content_type=JSON, headers={"Location": f"{_JOBS}/{job_id}"}
    )


async def list_jobs_handler(request: web.Request) -> web.Response:
    """List jobs, newest first: those of one project, or of all that the caller may read."""
    page = await job_page(read_query(request, JobsQuery), request.app[READ_MODEL], request[ACCESS])
    return answer(request, page)


async def show_job_handler(request: web.Request) -> web.Response:
    """Show a job."""
    row, status = await find_job(request.app[READ_MODEL], JobId(request.match_info["job_id"]))
    await request[ACCESS].require(READ_JOBS, row.spec.project_id)
    model = request.app[READ_MODEL]
    scene = estimates.Scene.of(model.view.state, model.policy, model.clock.now())
    return answer(request, estimates.job(row.spec, status, scene, model.status_view()))


async def cancel_job_handler(request: web.Request) -> web.Response:
    """Cancel a job.

    Repeating it changes nothing; a job that completed or failed is a conflict.
    """
    model = request.app[READ_MODEL]
    row, status = await find_job(model, JobId(request.match_info["job_id"]))
    access = request[ACCESS]
    request[ACT] = Act(verb="cancel", object=f"job/{row.spec.job_id}", project_id=row.spec.project_id)
    await require_cancel(access, row.spec)
    cancel = JobCancelRequested(job_id=row.spec.job_id, requested_by=access.name)
    await request_cancel(model, row, status, cancel, access)
    scene = estimates.Scene.of(model.view.state, model.policy, model.clock.now())
    return answer(request, estimates.job(row.spec, status, scene), status=HTTPStatus.ACCEPTED)


async def request_cancel(
    model: ReadModel, row: JobRow, status: JobState, cancel: JobCancelRequested, access: Access
) -> None:
    """Publish the cancellation, unless the job is cancelled already. Raises a 409 if it ended otherwise."""
    if status in FINAL_STATES and status is not JobState.CANCELLED:
        raise Problem(HTTPStatus.CONFLICT, f"job {row.spec.job_id!r} is already {status} and cannot be cancelled")
    if status is not JobState.CANCELLED:
        await model.publish(cancel, access, row.spec.project_id)


async def require_cancel(access: Access, spec: JobSpec) -> None:
    """Raise a 403 unless the caller may cancel any job of the project, or has submitted this one and may cancel it."""
    if await access.allows(CANCEL_JOBS, spec.project_id):
        return
    is_own = bool(access.name) and spec.submitted_by == access.name
    await access.require(CANCEL_OWN_JOBS if is_own else CANCEL_JOBS, spec.project_id)


async def find_job(model: ReadModel, job_id: JobId) -> tuple[JobRow, JobState]:
    """Return the job with its state from the stream, else from the store. Raises a 404."""
    row = await model.store.job(job_id)
    state = job_state(model.view.state, job_id)
    if row is None:
        record = model.view.state.jobs.get(job_id)
        if record is None or record.queued is None:
            raise Problem(
                HTTPStatus.NOT_FOUND,
                f"job {job_id!r} not found; list jobs with: gpu-autoscaler jobs list, or GET {_JOBS}",
            )
        row = JobRow(spec=record.queued.spec, request_digest="", accepted_at=record.queued.queued_at)
    stored = JobState.PENDING if row.outcome is None else JobState(row.outcome)
    return row, stored if state is None else state


ROUTES = (
    Route(
        "POST",
        _JOBS,
        submit_job_handler,
        "jobs",
        schema.Job,
        (SUBMIT_JOBS,),
        (*BODY_PROBLEMS, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS),
        aliases=("/jobs",),
        body=JobRequested,
        example=EXAMPLE,
        headers={_KEY: "Requests with the same key and body submit one job and get the same answer, for one day"},
        header_limits={"minLength": 1, "maxLength": KEY_LENGTH_MAX},
    ),
    Route(
        "GET",
        _JOBS,
        list_jobs_handler,
        "jobs",
        schema.JobPage,
        (READ_JOBS,),
        INVALID,
        aliases=("/jobs",),
        query=JobsQuery,
    ),
    Route("GET", _ONE, show_job_handler, "jobs", schema.Job, (READ_JOBS,), MISSING, aliases=("/jobs/{job_id}",)),
    Route(
        "DELETE",
        _ONE,
        cancel_job_handler,
        "jobs",
        schema.Job,
        (CANCEL_OWN_JOBS, CANCEL_JOBS),
        (*MISSING, HTTPStatus.CONFLICT),
        aliases=("/jobs/{job_id}",),
    ),
)
