"""Requests that change nothing: is this job valid, and what would be bought for these jobs?"""

import asyncio
import uuid
from collections import Counter
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated

import msgspec
from aiohttp import web

from gpu_autoscaler.core.explain.plan_with_jobs import JobOutcome, PlanWithJobs, plan_with_jobs
from gpu_autoscaler.core.state.queries import queue
from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.model.decisions import BuyNode, Difference
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.jobs import JobSpec, JobState, Violation
from gpu_autoscaler_services.api_rights import READ_CLUSTER, SUBMIT_JOBS
from gpu_autoscaler_services.gateway import estimates, schema
from gpu_autoscaler_services.gateway.access import ACCESS, Access
from gpu_autoscaler_services.gateway.api.jobs import BODY_PROBLEMS, EXAMPLE, admitted_job, check_now, read_body, refused
from gpu_autoscaler_services.gateway.problems import Problem
from gpu_autoscaler_services.gateway.read_model import READ_MODEL, ReadModel
from gpu_autoscaler_services.gateway.routes import Route, answer

JOBS_COUNT_MAX = 100  # of one simulated plan


class PlanQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Jobs that would be queued together."""

    jobs: Annotated[tuple[JobRequested, ...], msgspec.Meta(min_length=1, max_length=JOBS_COUNT_MAX)]


async def validate_job_handler(request: web.Request) -> web.Response:
    """Check a job request without submitting it; the answer is the job as it would be queued."""
    model = request.app[READ_MODEL]
    job = await read_body(request, JobRequested)
    await request[ACCESS].require(SUBMIT_JOBS, job.project_id)
    spec = await _spec(job, model, request[ACCESS])
    scene = estimates.Scene.of(model.view.state, model.policy, model.clock.now())
    return answer(request, estimates.job(spec, JobState.PENDING, scene))


async def simulate_plan_handler(request: web.Request) -> web.Response:
    """Show what the next plan would decide if these jobs were queued now."""
    model, access = request.app[READ_MODEL], request[ACCESS]
    question = await read_body(request, PlanQuestion)
    for project in dict.fromkeys(job.project_id for job in question.jobs):
        await access.require(SUBMIT_JOBS, project)
    specs = await _specs(question.jobs, model, access)
    as_of = model.clock.now()
    async with model.explanation_turn:
        made = await asyncio.to_thread(plan_with_jobs, model.view.state, model.policy, as_of, specs)
    if made is None:
        raise TransientError("no plan can be made now: the plan check refuses it; see the scaler's log")
    others = made.others if await access.allows(READ_CLUSTER) else None
    return answer(
        request,
        schema.SimulatedPlan(
            as_of=as_of,
            jobs=tuple(_simulated_job(spec, made) for spec in specs),
            purchases=_purchases(made.purchases),
            price_micro_usd_per_hour=_price(made.purchases),
            others=None if others is None else tuple(_change(change) for change in others),
        ),
    )


async def _spec(job: JobRequested, model: ReadModel, access: Access) -> JobSpec:
    """Return the job as it would be queued. Raises a 422 with every violation, a 403, or a 429 for a full queue."""
    event_id = str(uuid.uuid4())
    _, admitted = await admitted_job(job, event_id, model, access)
    check_now(admitted.spec, model)
    return admitted.spec


async def _specs(jobs: Sequence[JobRequested], model: ReadModel, access: Access) -> tuple[JobSpec, ...]:
    """Return the jobs as they would be queued. Raises a 422 with the violations of all jobs."""
    specs: list[JobSpec] = []
    violations: list[Violation] = []
    for number, job in enumerate(jobs):
        try:
            specs.append(await _spec(job, model, access))
        except Problem as problem:
            if problem.status != HTTPStatus.UNPROCESSABLE_ENTITY:
                raise
            violations += [
                msgspec.structs.replace(violation, field=f"jobs[{number}].{violation.field}")
                for violation in problem.violations
            ]
    known = Counter(spec.job_id for spec in specs)
    violations += [
        Violation("jobs", f"job_id {job_id!r} is used {count} times; give each job its own")
        for job_id, count in known.items()
        if count > 1
    ]
    waiting = {record.queued.job_id for record in queue(model.view.state) if record.queued is not None}
    violations += [
        Violation("jobs", f"job {job_id!r} is queued already; leave it out: the plan has it")
        for job_id in known
        if job_id in waiting
    ]
    if violations:
        raise refused(violations)
    return tuple(specs)


def _simulated_job(spec: JobSpec, made: PlanWithJobs) -> schema.SimulatedJob:
    outcome = made.jobs[spec.job_id]
    return schema.SimulatedJob(
        job_id=spec.job_id,
        job_name=spec.job_name,
        project_id=spec.project_id,
        outcome=_word(outcome),
        message=" ".join(outcome.sentences) or "Free capacity takes it.",
        purchases=_purchases(outcome.purchases),
    )


def _word(outcome: JobOutcome) -> schema.SimulatedOutcome:
    if outcome.purchases:
        return "purchase"
    return "deferred" if outcome.has_to_wait else "existing_capacity"


def _purchases(decisions: Sequence[BuyNode]) -> tuple[schema.SimulatedPurchase, ...]:
    """Return the purchases by pool and offer."""
    counts = Counter((decision.pool, decision.offer.key) for decision in decisions)
    offers = {decision.offer.key: decision.offer for decision in decisions}
    return tuple(
        schema.SimulatedPurchase(
            pool=pool,
            instance_type=offers[key].instance_type,
            zone=offers[key].zone,
            capacity_type=offers[key].capacity_type,
            count=count,
            price_micro_usd_per_hour=offers[key].price_micro_usd_per_hour,
        )
        for (pool, key), count in counts.items()
    )


def _price(decisions: Sequence[BuyNode]) -> int | None:
    """Return the price of all nodes; None: one is unknown."""
    total = 0
    for decision in decisions:
        if decision.offer.price_micro_usd_per_hour is None:
            return None
        total += decision.offer.price_micro_usd_per_hour
    return total


def _change(difference: Difference) -> schema.PlanChange:
    without_jobs, with_jobs = (
        schema.PlanSide(outcome=side.what, reason=side.reason, sentence=side.sentence)
        for side in (difference.made, difference.other)
    )
    return schema.PlanChange(
        subject=difference.subject, name=difference.name, without_jobs=without_jobs, with_jobs=with_jobs
    )


ROUTES = (
    Route(
        "POST", "/api/v1/gpu/jobs:validate", validate_job_handler, "jobs", schema.Job, (SUBMIT_JOBS,), BODY_PROBLEMS,
        aliases=("/jobs:validate",), body=JobRequested, example=EXAMPLE, changes_nothing=True,
    ),
    Route(
        "POST", "/api/v1/plan:simulate", simulate_plan_handler, "decisions", schema.SimulatedPlan,
        (SUBMIT_JOBS, READ_CLUSTER), BODY_PROBLEMS, body=PlanQuestion,
        example={"jobs": [EXAMPLE]}, changes_nothing=True,
    ),
)  # fmt: skip
