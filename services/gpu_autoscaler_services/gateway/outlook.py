"""When a job may start and what it may cost, from what is known now. None where nothing says: a guess is no answer."""

from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.core.headline import Sight, job_line
from gpu_autoscaler.core.life import NodeView, node_views
from gpu_autoscaler.core.state import ClusterState, JobRecord
from gpu_autoscaler.core.views import queue
from gpu_autoscaler.model.jobs import FINAL_STATES, JobSpec, JobState
from gpu_autoscaler.model.money import MICRO_USD_PER_USD, cost_micro_usd
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.reasons import UnmetDemand
from gpu_autoscaler_services.gateway import wire

_WAITING_STATES = frozenset({JobState.PENDING, JobState.QUEUED, JobState.PROVISIONING, JobState.PREEMPTED})


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """What every job of one answer is seen against, computed once."""

    state: ClusterState
    as_of: datetime
    nodes: tuple[NodeView, ...]
    waiting: tuple[JobRecord, ...]  # the queue, next one first

    @classmethod
    def of(cls, state: ClusterState, as_of: datetime) -> "Scene":
        """The scene as the state shows it."""
        return cls(state=state, as_of=as_of, nodes=node_views(state, as_of), waiting=queue(state))

    def position(self, spec: JobSpec, status: JobState) -> int | None:
        """The job's place in the queue; for one that is about to enter it, the place that it will get."""
        for position, record in enumerate(self.waiting, start=1):
            if record.queued is not None and record.queued.job_id == spec.job_id:
                return position
        if status is not JobState.PENDING:
            return None
        return 1 + sum(
            record.queued is not None and record.queued.spec.priority >= spec.priority for record in self.waiting
        )


def job(spec: JobSpec, status: JobState, scene: Scene, sight: Sight | None = None) -> wire.Job:
    """The job with its state and its outlook; with a sight also what it waits for."""
    record = scene.state.jobs.get(spec.job_id, JobRecord())
    placed, started, finished = record.placed, record.started, record.finished
    preempted = record.preempted
    message = "" if finished is None else finished.message
    if status is JobState.PREEMPTED and preempted is not None:
        message = preempted.cause
    if sight is not None and status in _WAITING_STATES:
        message = " ".join(filter(None, (f"{message}." if message else "", job_line(spec.job_id, sight))))
    return wire.Job(
        job_id=spec.job_id,
        status=status,
        queue_position=scene.position(spec, status),
        estimated_start_time=_start_at(spec, record, status, scene),
        estimated_cost_usd=_cost_usd(spec, scene.state),
        created_at=spec.requested_at,
        job_name=spec.job_name,
        project_id=spec.project_id,
        priority=spec.priority,
        gpu_type=spec.gpu_model,
        gpu_count=spec.member_resources.gpu_count,
        members=spec.member_count,
        preemptible=spec.is_preemptible,
        attempt=0 if placed is None else placed.attempt,
        node_names=() if placed is None else tuple(dict.fromkeys(placed.node_names)),
        started_at=None if started is None else started.started_at,
        finished_at=None if finished is None else finished.finished_at,
        message=message,
    )


def _start_at(spec: JobSpec, record: JobRecord, status: JobState, scene: Scene) -> datetime | None:
    if record.started is not None:
        return record.started.started_at
    if status in FINAL_STATES:
        return None
    key = f"job/{spec.job_id}"
    coming = [view.expected_at for view in scene.nodes if view.expected_at is not None and key in _demand(view)]
    if coming:
        return max(*coming, scene.as_of)
    offer = _cheapest(spec, scene.state)
    return None if offer is None else scene.as_of + timedelta(seconds=offer.boot_seconds)


def _demand(view: NodeView) -> tuple[str, ...]:
    decision = None if view.order is None else view.order.decision
    return decision.reason.demand if decision is not None and isinstance(decision.reason, UnmetDemand) else ()


def _cost_usd(spec: JobSpec, state: ClusterState) -> float | None:
    """For the longest it may run, by its share of the GPUs (of the node, for a job without GPUs)."""
    offer = _cheapest(spec, state)
    if offer is None or offer.price_micro_usd_per_hour is None:
        return None
    seconds = spec.duration_seconds_max if spec.run_seconds is None else spec.run_seconds
    whole = cost_micro_usd(offer.price_micro_usd_per_hour, timedelta(seconds=seconds))
    wanted, there = spec.member_resources.gpu_count, offer.resources.gpu_count
    share = wanted / there if wanted and there else 1.0
    return round(whole * share * spec.member_count / MICRO_USD_PER_USD, 6)


def _cheapest(spec: JobSpec, state: ClusterState) -> Offer | None:
    """The offer that a member fits on with the least price for its share; None: no priced offer fits."""
    offers = () if state.offers is None else state.offers.offers
    fitting = [offer for offer in offers if offer.price_micro_usd_per_hour is not None and _fits(spec, offer)]
    return min(fitting, key=lambda offer: (_price_per_gpu(offer), offer.key), default=None)


def _price_per_gpu(offer: Offer) -> float:
    return (offer.price_micro_usd_per_hour or 0) / max(1, offer.resources.gpu_count)


def _fits(spec: JobSpec, offer: Offer) -> bool:
    if not spec.is_preemptible and offer.capacity_type is CapacityType.SPOT:
        return False
    if spec.gpu_model is not None and offer.gpu_model != spec.gpu_model:
        return False
    memory = spec.gpu_memory_bytes_min
    if memory is not None and (offer.gpu_memory_bytes is None or offer.gpu_memory_bytes < memory):
        return False
    return spec.member_resources.fits_in(offer.resources)
