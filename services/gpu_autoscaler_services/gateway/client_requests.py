"""Requests of clients that the broker identifies: jobs submitted and cancelled in the name of the subject.

The answer has the form of a JetStream acknowledgment, so that a client publishes as on any stream; an error of the
gateway is an error of the publish. Source: NATS ADR-1, "JetStream JSON API Design", errors (read 2026-11-23).
"""

import asyncio
import contextlib
from collections.abc import Callable
from http import HTTPStatus

import msgspec
import structlog

from gpu_autoscaler.bus.client_subjects import read_client_subject
from gpu_autoscaler.bus.nats.requests import Request
from gpu_autoscaler.core.intake.admission import job_id_of
from gpu_autoscaler.events.ingress import field_errors, read
from gpu_autoscaler.events.job import JobCancelRequested, JobRequested
from gpu_autoscaler.model.errors import InvalidFact, PermanentError, TransientError
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.runtime.digests import request_digest
from gpu_autoscaler_services.api_rights import CANCEL_OWN_JOBS, SUBMIT_JOBS
from gpu_autoscaler_services.gateway.access import Access, AccessRules, Caller
from gpu_autoscaler_services.gateway.api.jobs import (
    accept,
    admitted_job,
    find_job,
    request_cancel,
    require_cancel,
    require_fields,
)
from gpu_autoscaler_services.gateway.audit import Act, act_of
from gpu_autoscaler_services.gateway.problems import FORBIDDEN_TYPE, Problem, problem_document, rule_violated
from gpu_autoscaler_services.gateway.read_model import ReadModel
from gpu_autoscaler_services.gateway.routes import BODY_BYTES_MAX

REQUESTS_WAITING_COUNT_MAX = 1000
REQUESTS_AT_ONCE_MAX = 8

log = structlog.get_logger()


class Acknowledgment(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request that was accepted."""

    stream: str = JobRequested.stream()
    seq: int  # the last one of the stream at the time: the request is stored at or before it
    job_id: JobId


class ClientRequests:
    """Answers requests, a few at a time. Beyond REQUESTS_WAITING_COUNT_MAX they are dropped; clients repeat them."""

    def __init__(self, model: ReadModel, rules: AccessRules, *, is_ready: Callable[[], bool] = lambda: True) -> None:
        """`is_ready`: the state is complete."""
        self._model = model
        self._rules = rules
        self._is_ready = is_ready
        self._waiting: asyncio.Queue[Request] = asyncio.Queue(REQUESTS_WAITING_COUNT_MAX)

    def receive(self, request: Request) -> None:
        """Store a request; drop it if too many wait."""
        try:
            self._waiting.put_nowait(request)
        except asyncio.QueueFull:
            log.warning("client request dropped, too many wait", waiting_count=REQUESTS_WAITING_COUNT_MAX)

    async def run(self) -> None:
        """Answer until canceled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(REQUESTS_AT_ONCE_MAX):
                group.create_task(self._answer_all())

    async def _answer_all(self) -> None:
        while True:
            request = await self._waiting.get()
            await request.answer(await self.answer(request))

    async def answer(self, request: Request) -> bytes:
        """Return the acknowledgment of a request, or its error."""
        try:
            job_id = await self._handle(request)
            sequence = await self._model.bus.last_sequence(JobRequested.stream())
            return msgspec.json.encode(Acknowledgment(seq=sequence, job_id=job_id))
        except (Problem, InvalidFact, TransientError, PermanentError) as error:
            problem = _problem(error)
            await self._record(request, problem.status, problem.sentence)
            return _error(problem)
        except Exception as error:  # the next request may be answered
            log.exception("client request failed", subject=request.subject)
            return _error(_problem(error))

    async def _handle(self, request: Request) -> JobId:
        if not self._is_ready():
            raise TransientError("the gateway is still reading the recorded facts")
        fact_type, client = read_client_subject(request.subject)
        if len(request.payload) > BODY_BYTES_MAX:
            raise InvalidFact(f"the request has {len(request.payload)} bytes; at most {BODY_BYTES_MAX} are allowed")
        now = self._model.clock.now
        require_fields(field_errors(fact_type, request.payload))
        # As on the subject without a name: an event, or a bare body.
        subject = fact_type.subject_root()
        envelope = read(subject, request.payload, message_id=request.message_id, arrived_at=now)
        access = self._access(client)
        match envelope.fact:
            case JobRequested() as job:
                return await self._submit(access, job, _event_id(client, envelope.id))
            case JobCancelRequested() as cancel:
                return await self._cancel(access, cancel)
            case other:
                raise InvalidFact(f"{other.type_name()} is not a request of clients")

    def _access(self, client: str) -> Access:
        caller = Caller(name=client, groups=("system:authenticated",), authentication="broker")
        return Access(caller, self._rules, entry_point="nats")

    async def _record(self, request: Request, status: HTTPStatus, reason: str) -> None:
        """Record a refused request; one that names no client is none that the broker lets pass."""
        with contextlib.suppress(InvalidFact):
            fact_type, client = read_client_subject(request.subject)
            act: Act | None = Act(verb="submit" if fact_type is JobRequested else "cancel")
            with contextlib.suppress(InvalidFact):  # which is what is wrong with it
                if len(request.payload) <= BODY_BYTES_MAX:
                    now, subject = self._model.clock.now, fact_type.subject_root()
                    envelope = read(subject, request.payload, message_id=request.message_id, arrived_at=now)
                    act = act_of(envelope.fact, _event_id(client, envelope.id)) or act
            assert act is not None, "an act of a client"  # noqa: S101 - a bug of ours
            await self._model.audit.refused(self._access(client), act, status, reason)

    async def _submit(self, access: Access, job: JobRequested, event_id: str) -> JobId:
        if self._rules.authorizer is not None:
            await access.require(SUBMIT_JOBS, job.project_id)
        elif not self._rules.is_client_of(access.name, job.project_id):
            raise Problem(
                HTTPStatus.FORBIDDEN,
                f"{access.name} may not submit jobs of project {job.project_id!r}: gateway.client_projects has no"
                f" {access.name}={job.project_id}; add it",
                kind=FORBIDDEN_TYPE,
            )
        job_id = job_id_of(job.job_id, event_id)
        named = msgspec.structs.replace(job, job_id=job_id, submitted_by=access.name)
        job, admitted = await admitted_job(named, event_id, self._model, access)
        await accept(self._model, job, admitted, request_digest(job), access)
        return job_id

    async def _cancel(self, access: Access, cancel: JobCancelRequested) -> JobId:
        row, status = await find_job(self._model, cancel.job_id)
        if self._rules.authorizer is not None:
            await require_cancel(access, row.spec)
        elif row.spec.submitted_by != access.name:
            raise access.refusal(CANCEL_OWN_JOBS, row.spec.project_id)
        named = msgspec.structs.replace(cancel, requested_by=access.name)
        await request_cancel(self._model, row, status, named, access)
        return cancel.job_id


def _event_id(client: str, message_id: str) -> str:
    """Return the id of a client's event: those of different clients may be equal."""
    return f"client/{client}/{message_id}"


def _problem(error: Exception) -> Problem:
    """Return the problem that REST answers with."""
    match error:
        case Problem():
            return error
        case InvalidFact():
            return Problem(HTTPStatus.BAD_REQUEST, str(error))
        case TransientError():
            return Problem(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}; retry")
        case PermanentError():
            return rule_violated(str(error))
        case _:
            detail = "internal error; the gateway's log has the traceback"
            return Problem(HTTPStatus.INTERNAL_SERVER_ERROR, detail)


def _error(problem: Problem) -> bytes:
    """Return the answer: the error as clients of JetStream read it, which know no other fields, and the problem."""
    error = {"code": problem.status.value, "description": f"{problem.sentence} ({problem.kind})"}
    return msgspec.json.encode({"error": error, "problem": problem_document(problem)})
