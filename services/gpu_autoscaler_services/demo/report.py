"""Report of a run: jobs, purchases, waits, costs, and broken promises."""

import math
from collections.abc import Sequence
from datetime import datetime

import msgspec

from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.events import job, scaling
from gpu_autoscaler.events.cost import CostAccrued
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.model.decisions import BuyNode
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler_services.demo.promises import answered_notices, broken_promises, notice_answer_seconds
from gpu_autoscaler_services.demo.record import Record
from gpu_autoscaler_services.demo.teams import TeamFigures, team_figures
from gpu_autoscaler_services.local.simulated_world import GroundTruth


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run. Waits are in cluster time, decisions and answers in wall time; None: did not occur."""

    jobs_requested: int
    jobs_finished: int
    jobs_completed: int
    nodes_bought: int
    nodes_removed: int
    notices_received: int
    notices_answered: int
    launches_refused: int
    plans_made: int
    bill_micro_usd: int  # bill of the provider
    allocated_micro_usd: int
    idle_micro_usd: int
    decision_seconds_p50: float | None  # record of a demand to record of the plan that buys for it
    decision_seconds_p99: float | None
    notice_answer_seconds_p99: float | None  # record of a notice to that of the cordon
    queue_wait_seconds_p95: float | None  # accepted to running
    time_to_gpu_seconds_p95: float | None  # requested to running, for jobs that nodes were bought for
    node_ready_seconds_p95: float | None  # planned to usable
    node_hours: float
    gpu_hours_bought: float
    gpu_hours_allocated: float
    wall_seconds: float
    clock_factor: float
    broken_promises: tuple[str, ...]
    teams: tuple[TeamFigures, ...] = ()  # with a nominal quota


def make_report(
    record: Record,
    truth: GroundTruth,
    policy: ScalingPolicy,
    *,
    clock_factor: float,
    wall_seconds: float,
    broken: tuple[str, ...] = (),
    refused: Sequence[tuple[str, str]] = (),
) -> Report:
    """Compare record and ground truth; `broken` are broken promises found by other checks, `refused` the project and
    problem type of each refused request."""
    decisions = _decision_seconds(record)
    node_hours, gpu_hours = _hours_bought(record)
    started = _first_started(record)
    return Report(
        jobs_requested=len({fact.job_id or seen.recorded.envelope.id for fact, seen in record.of(job.JobRequested)}),
        jobs_finished=len({fact.job_id for fact, _ in record.of(job.JobFinished)}),
        jobs_completed=sum(1 for fact, _ in record.of(job.JobFinished) if fact.outcome == "completed"),
        nodes_bought=record.count(scaling.ScalingNodeLaunched),
        nodes_removed=len(
            {fact.provider_id for fact, _ in record.of(scaling.ScalingNodeTerminated) if fact.provider_id}
        ),
        notices_received=len({fact.notice_id for fact, _ in record.of(SpotNoticeReceived)}),
        notices_answered=answered_notices(record),
        launches_refused=record.count(scaling.ScalingLaunchRefused),
        plans_made=record.count(scaling.ScalingPlanMade),
        bill_micro_usd=sum(truth.bill_micro_usd.values()),
        allocated_micro_usd=sum(
            share.allocated_micro_usd for fact, _ in record.of(CostAccrued) for share in fact.shares
        ),
        idle_micro_usd=sum(fact.idle_micro_usd for fact, _ in record.of(CostAccrued)),
        decision_seconds_p50=quantile(decisions, 0.5),
        decision_seconds_p99=quantile(decisions, 0.99),
        notice_answer_seconds_p99=quantile(notice_answer_seconds(record), 0.99),
        queue_wait_seconds_p95=quantile(_queue_waits(record, started), 0.95),
        time_to_gpu_seconds_p95=quantile(_times_to_gpu(record, started), 0.95),
        node_ready_seconds_p95=quantile(_node_ready_seconds(record), 0.95),
        node_hours=node_hours,
        gpu_hours_bought=gpu_hours,
        gpu_hours_allocated=_gpu_hours_allocated(record),
        wall_seconds=round(wall_seconds, 1),
        clock_factor=clock_factor,
        broken_promises=(*broken_promises(record, truth, policy, clock_factor=clock_factor), *broken),
        teams=team_figures(record, policy, refused),
    )


def quantile(values: Sequence[float], ratio: float) -> float | None:
    """Return the smallest value that at least `ratio` of the values do not exceed; None without values."""
    if not values:
        return None
    return round(sorted(values)[math.ceil(ratio * len(values)) - 1], 3)


def _buys(record: Record) -> list[tuple[BuyNode, scaling.ScalingPlanMade, datetime]]:
    return [
        (decision, fact, seen.stored_at)
        for fact, seen in record.of(scaling.ScalingPlanMade)
        for decision in fact.plan.purchases
    ]


def _decision_seconds(record: Record) -> list[float]:
    """Return wall seconds from `job.queued` to the first plan that buys for the job."""
    queued = {f"job/{fact.job_id}": seen.stored_at for fact, seen in record.of(job.JobQueued)}
    decided: dict[str, float] = {}
    for decision, _, stored_at in _buys(record):
        if isinstance(decision.reason, UnmetDemand):
            for key in decision.reason.demand:
                if key in queued:
                    decided.setdefault(key, (stored_at - queued[key]).total_seconds())
    return [max(0.0, seconds) for seconds in decided.values()]


def _first_started(record: Record) -> dict[str, datetime]:
    started: dict[str, datetime] = {}
    for fact, _ in record.of(job.JobStarted):
        started.setdefault(fact.job_id, fact.started_at)
    return started


def _queue_waits(record: Record, started: dict[str, datetime]) -> list[float]:
    return [
        max(0.0, (started[fact.job_id] - fact.queued_at).total_seconds())
        for fact, _ in record.of(job.JobQueued)
        if fact.job_id in started
    ]


def _times_to_gpu(record: Record, started: dict[str, datetime]) -> list[float]:
    bought_for = {
        key for decision, _, _ in _buys(record) if isinstance(decision.reason, UnmetDemand)
        for key in decision.reason.demand
    }  # fmt: skip
    return [
        max(0.0, (started[fact.job_id] - fact.spec.requested_at).total_seconds())
        for fact, _ in record.of(job.JobQueued)
        if fact.job_id in started and f"job/{fact.job_id}" in bought_for
    ]


def _node_ready_seconds(record: Record) -> list[float]:
    planned = {decision.action_id: (fact.plan.as_of, decision.offer) for decision, fact, _ in _buys(record)}
    usable: dict[ActionId, datetime] = {}
    for fact, seen in record.of(NodeObserved):
        if fact.action_id is None or fact.action_id not in planned or fact.action_id in usable:
            continue
        if fact.is_ready and fact.allocatable.gpu_count >= planned[fact.action_id][1].resources.gpu_count:
            usable[fact.action_id] = seen.recorded.envelope.time
    return [(at - planned[action_id][0]).total_seconds() for action_id, at in usable.items()]


def _hours_bought(record: Record) -> tuple[float, float]:
    gpus = {
        fact.provider_id: decision.offer.resources.gpu_count
        for decision, _, _ in _buys(record)
        for fact, _ in record.of(scaling.ScalingNodeLaunched)
        if fact.action_id == decision.action_id
    }
    node_hours = gpu_hours = 0.0
    for fact, _ in record.of(CostAccrued):
        hours = (fact.to_at - fact.from_at).total_seconds() / 3600
        node_hours += hours
        gpu_hours += hours * gpus.get(fact.provider_id, 0)
    return round(node_hours, 4), round(gpu_hours, 4)


def _gpu_hours_allocated(record: Record) -> float:
    gpus = {
        fact.job_id: fact.spec.member_count * fact.spec.member_resources.gpu_count
        for fact, _ in record.of(job.JobQueued)
    }
    started = _first_started(record)
    hours = 0.0
    for fact, _ in record.of(job.JobFinished):
        if fact.job_id in started and fact.job_id in gpus:
            hours += max(0.0, (fact.finished_at - started[fact.job_id]).total_seconds()) / 3600 * gpus[fact.job_id]
    return round(hours, 4)
