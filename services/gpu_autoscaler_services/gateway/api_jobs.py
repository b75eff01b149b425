"""Jobs over REST (CHECKLIST S29 to S34): submit, list, show, cancel.

A job is accepted (202) when the stream has acknowledged the request and the row is committed, in this order: a crash in
between leaves a request on the stream, which the scheduler turns into the same row; the client, who got no answer,
asks again and finds the job. Nothing is half done.
"""

import uuid
from http import HTTPStatus
from typing import TypeVar

import msgspec
from aiohttp import web

from gpu_autoscaler.core.admission import admit, job_id_of, supply
from gpu_autoscaler.core.queueing.job_budgets import budget_violation
from gpu_autoscaler.core.views import job_state, queue
from gpu_autoscaler.events.job import JobCancelRequested, JobRequested
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import FINAL_STATES, JobSpec, JobState, Mistake
from gpu_autoscaler.runtime.digests import request_digest
from gpu_autoscaler.runtime.documents import validation_errors
from gpu_autoscaler.runtime.metrics import package_version
from gpu_autoscaler.runtime.reading import decode_message
from gpu_autoscaler.store.protocol import JobRow
from gpu_autoscaler_services.gateway import outlook, wire
from gpu_autoscaler_services.gateway.auth import CALLER
from gpu_autoscaler_services.gateway.job_pages import JobsQuery, job_page
from gpu_autoscaler_services.gateway.problems import Problem
from gpu_autoscaler_services.gateway.reading import READ_MODEL, ReadModel
from gpu_autoscaler_services.gateway.routes import JSON, Route, answer, is_text, read_query

QUEUE_RETRY_SECONDS = 30.0  # a queue of a thousand jobs does not move within seconds
KEY_LENGTH_MAX = 255
OTHER_BODY = "was used for another request; take a new one, or repeat the request as it was"

F = TypeVar("F", bound=msgspec.Struct)

_KEY = "Idempotency-Key"
_JOBS = "/api/v1/gpu/jobs"
_ONE = f"{_JOBS}/{{job_id}}"


async def submit_handler(request: web.Request) -> web.Response:
    """Take a job in."""
    model = request.app[READ_MODEL]
    asked = await read_body(request, JobRequested)
    key = request.headers.get(_KEY)
    if key is not None and (not 0 < len(key) <= KEY_LENGTH_MAX or not is_text(key)):
        mistake = Mistake(_KEY, f"must be 1 to {KEY_LENGTH_MAX} characters of UTF-8")
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "the key cannot be used", mistakes=(mistake,))
    event_id = str(uuid.uuid4()) if key is None else f"idempotency-key/{key}"
    asked = msgspec.structs.replace(asked, job_id=job_id_of(asked.job_id, event_id))
    spec = _admitted(asked, event_id, model)
    digest = request_digest(asked)
    if key is None:
        return await _accept(request, asked, spec, digest)
    claim = await model.store.begin_request(key, request_digest=digest, begun_at=model.clock.now())
    if claim is not None and claim.request_digest != digest:
        raise Problem(HTTPStatus.CONFLICT, f"{_KEY} {key!r} {OTHER_BODY}")
    if claim is not None and claim.status is not None and claim.answer is not None:
        return _accepted_response(claim.answer, spec.job_id)
    response = await _accept(request, asked, spec, digest)
    await model.store.answer_request(key, status=response.status, answer=_body(response))
    return response


# What is wrong with a body.
BODY_PROBLEMS = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
)


async def read_body(request: web.Request, kind: type[F]) -> F:
    """The body as a struct of this kind. Every field that is unknown, missing or of a wrong type is named at once."""
    if request.content_type != JSON:
        detail = f"the body is {request.content_type!r}; send JSON with `Content-Type: {JSON}`"
        raise Problem(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, detail)
    try:
        document = msgspec.json.decode(await request.read())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Problem(HTTPStatus.BAD_REQUEST, f"the body is no JSON: {error}") from error
    if mistakes := validation_errors(document, kind):
        named = (mistake.partition(": ") for mistake in mistakes)
        raise _invalid(tuple(Mistake(field, _of_version(reason)) for field, _, reason in named))
    return msgspec.convert(document, kind)


def _of_version(reason: str) -> str:
    """A name that is not known may be of a later version: what is asked for is not dropped unseen, but said."""
    return f"{reason} (this gateway is {package_version()})" if reason.startswith("unknown ") else reason


def _invalid(mistakes: tuple[Mistake, ...]) -> Problem:
    return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "the request cannot be taken in", mistakes=mistakes)


def _admitted(asked: JobRequested, event_id: str, model: ReadModel) -> JobSpec:
    known = supply(model.view.state, model.policy)
    admitted = admit(
        asked,
        event_id=event_id,
        at=(now := model.clock.now()),
        now=now,
        policy=model.policy,
        gpu_models=known.gpu_models,
        gpus_per_node_max=known.gpus_per_node_max,
        shares=known.shares,
    )
    if isinstance(admitted, JobSpec):
        return admitted
    raise _invalid(admitted)


async def _accept(request: web.Request, asked: JobRequested, spec: JobSpec, digest: str) -> web.Response:
    """Publish, commit, answer. A repeat of an accepted request is answered like the first."""
    model = request.app[READ_MODEL]
    known = await model.store.job(spec.job_id)
    if known is None:
        if (mistake := budget_violation(spec, model.view.state)) is not None:
            raise _invalid((mistake,))
        waiting_count = len(queue(model.view.state))
        if waiting_count >= model.policy.queue_count_max:
            raise Problem(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{waiting_count} jobs wait, as many as the policy allows; try again later",
                retry_after_seconds=QUEUE_RETRY_SECONDS,
            )
        await _publish_once(asked, digest, model)
        acceptance = await model.store.accept_job(spec, request_digest=digest, accepted_at=model.clock.now())
        is_other = acceptance == "conflict"
    else:
        spec, is_other = known.spec, known.request_digest != digest
    if is_other:
        raise Problem(HTTPStatus.CONFLICT, f"job_id {spec.job_id!r} {OTHER_BODY}")
    scene = outlook.Scene.of(model.view.state, model.policy, model.clock.now())
    return _accepted_response(msgspec.json.encode(outlook.job(spec, JobState.PENDING, scene)), spec.job_id)


async def _publish_once(asked: JobRequested, digest: str, model: ReadModel) -> None:
    """Store the request on the stream. Of two that race for one id the stream keeps the first: the other is refused."""
    ack = await model.publish(asked)
    if not ack.is_duplicate:
        return
    first = await model.bus.message_at(ack.stream, ack.sequence)
    if first is None:
        return
    recorded = decode_message(first, model.clock)
    if not isinstance(recorded.fact, JobRequested) or request_digest(recorded.fact) != digest:
        raise Problem(HTTPStatus.CONFLICT, f"job_id {asked.job_id!r} {OTHER_BODY}")


def _accepted_response(body: bytes, job_id: JobId) -> web.Response:
    return web.Response(
        status=HTTPStatus.ACCEPTED, body=body, content_type=JSON, headers={"Location": f"{_JOBS}/{job_id}"}
    )


def _body(response: web.Response) -> bytes:
    assert isinstance(response.body, bytes), "an accepted job is answered with bytes"  # noqa: S101 - a bug of ours
    return response.body


async def list_handler(request: web.Request) -> web.Response:
    """Jobs, newest first."""
    return answer(request, await job_page(read_query(request, JobsQuery), request.app[READ_MODEL]))


async def show_handler(request: web.Request) -> web.Response:
    """One job."""
    row, status = await _known(request)
    model = request.app[READ_MODEL]
    scene = outlook.Scene.of(model.view.state, model.policy, model.clock.now())
    return answer(request, outlook.job(row.spec, status, scene, model.sight()))


async def cancel_handler(request: web.Request) -> web.Response:
    """Ask for a job to end. Asking again changes nothing; one that has ended otherwise stays as it is."""
    model = request.app[READ_MODEL]
    row, status = await _known(request)
    if status in FINAL_STATES and status is not JobState.CANCELLED:
        raise Problem(HTTPStatus.CONFLICT, f"job {row.spec.job_id!r} is {status} already")
    if status is not JobState.CANCELLED:
        caller = request.get(CALLER, "")
        await model.publish(JobCancelRequested(job_id=row.spec.job_id, requested_by=caller))
    scene = outlook.Scene.of(model.view.state, model.policy, model.clock.now())
    return answer(request, outlook.job(row.spec, status, scene), status=HTTPStatus.ACCEPTED)


async def _known(request: web.Request) -> tuple[JobRow, JobState]:
    """The job that the path names, with its state: the stream's word first, then the store's."""
    model = request.app[READ_MODEL]
    job_id = JobId(request.match_info["job_id"])
    row = await model.store.job(job_id)
    state = job_state(model.view.state, job_id)
    if row is None:
        record = model.view.state.jobs.get(job_id)
        if record is None or record.queued is None:
            raise Problem(HTTPStatus.NOT_FOUND, f"no job {job_id!r}; `GET {_JOBS}` lists what there is")
        row = JobRow(spec=record.queued.spec, request_digest="", accepted_at=record.queued.queued_at)
    stored = JobState.PENDING if row.outcome is None else JobState(row.outcome)
    return row, stored if state is None else state


ROUTES = (
    Route(
        method="POST",
        path=_JOBS,
        aliases=("/jobs",),
        handler=submit_handler,
        summary="Ask for a job",
        tag="jobs",
        answers={HTTPStatus.ACCEPTED: wire.Job},
        problems=(
            *BODY_PROBLEMS,
            HTTPStatus.CONFLICT,
            HTTPStatus.TOO_MANY_REQUESTS,
            HTTPStatus.SERVICE_UNAVAILABLE,
        ),
        body=JobRequested,
        headers={_KEY: "The same key with the same body is one job, and is answered alike"},
    ),
    Route(
        method="GET",
        path=_JOBS,
        aliases=("/jobs",),
        handler=list_handler,
        summary="Jobs, newest first",
        tag="jobs",
        answers={HTTPStatus.OK: wire.JobPage},
        problems=(HTTPStatus.UNPROCESSABLE_ENTITY,),
        query=JobsQuery,
    ),
    Route(
        method="GET",
        path=_ONE,
        aliases=("/jobs/{job_id}",),
        handler=show_handler,
        summary="One job",
        tag="jobs",
        answers={HTTPStatus.OK: wire.Job},
        problems=(HTTPStatus.NOT_FOUND,),
    ),
    Route(
        method="DELETE",
        path=_ONE,
        aliases=("/jobs/{job_id}",),
        handler=cancel_handler,
        summary="Ask for a job to end",
        tag="jobs",
        answers={HTTPStatus.ACCEPTED: wire.Job},
        problems=(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.SERVICE_UNAVAILABLE),
    ),
)
