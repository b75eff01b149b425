"""Job budgets: what jobs with a budget have spent, including time that is not charged yet. Used by the scheduler.

The share of a job is that of the GPUs of its members, as in `core/limits/accrual.py`; nodes without GPUs count whole.
Time on a node of unknown price is not counted but reported; no job with a budget is placed there.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.limits.spend import cost_rounded_up, counted_at
from gpu_autoscaler.core.nodes.views import NodeView, node_views
from gpu_autoscaler.core.policy.gpu_slices import member_price
from gpu_autoscaler.core.state.state import Charge, ClusterState, JobRecord, JobSpent
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.format import money
from gpu_autoscaler.model.ids import JobId, PodUid, ProviderId
from gpu_autoscaler.model.jobs import JobSpec, Violation
from gpu_autoscaler.model.money import cost_micro_usd

# Time that a job has to save a checkpoint before its budget is exhausted and it ends.
CHECKPOINT_SECONDS = 120.0
_MINUTE_SECONDS = 60.0


class JobSpend(NamedTuple):
    """What one job has spent."""

    spec: JobSpec
    limit_micro_usd: int
    spent_micro_usd: int
    soon_micro_usd: int  # including the time to save a checkpoint
    node_names: tuple[str, ...]  # nodes of its members
    unpriced: tuple[str, ...] = ()  # offers of nodes with unknown price, whose cost is not counted

    @property
    def is_spent(self) -> bool:
        return self.spent_micro_usd >= self.limit_micro_usd

    @property
    def is_nearly_spent(self) -> bool:
        """True if the rest is just enough to save a checkpoint."""
        return self.soon_micro_usd >= self.limit_micro_usd


def job_spends(state: ClusterState, as_of: datetime) -> tuple[JobSpend, ...]:
    """Return the spend of each unfinished job with a budget, ordered by id."""
    limited = _limited(state.jobs)
    if not limited:
        return ()
    members = _members(limited, state.pods)
    views = node_views(state, as_of) if members else ()  # without running members nodes are not needed
    return _job_spends(limited, members, views, state.spent_by_job, state.charges, counted_at(as_of))


@cached_by_identity(4)
def _job_spends(
    limited: Mapping[JobId, JobSpec],
    members: Mapping[JobId, Sequence[PodObserved]],
    views: tuple[NodeView, ...],
    spent_by_job: Mapping[JobId, JobSpent],
    charges: Mapping[ProviderId, Charge],
    now: datetime,
) -> tuple[JobSpend, ...]:
    by_name = {view.name: view for view in views}
    return tuple(
        _job_spend(spec, members.get(spec.job_id, ()), by_name, spent_by_job.get(spec.job_id), charges, now)
        for spec in limited.values()
    )


@cached_by_identity(4)
def _members(
    limited: Mapping[JobId, JobSpec], pods: Mapping[PodUid, PodObserved]
) -> Mapping[JobId, Sequence[PodObserved]]:
    """Pods of these jobs that have a node."""
    members: dict[JobId, list[PodObserved]] = {}
    for pod in pods.values():
        if pod.job_id is not None and pod.node_name is not None and pod.job_id in limited:
            members.setdefault(pod.job_id, []).append(pod)
    return members


@cached_by_identity(4)
def _limited(jobs: Mapping[JobId, JobRecord]) -> Mapping[JobId, JobSpec]:
    specs = (job.queued.spec for _, job in sorted(jobs.items()) if job.queued is not None and job.finished is None)
    return {spec.job_id: spec for spec in specs if spec.budget_limit_micro_usd is not None}


def _job_spend(
    spec: JobSpec,
    members: Sequence[PodObserved],
    views: Mapping[str, NodeView],
    known: JobSpent | None,
    charges: Mapping[ProviderId, Charge],
    now: datetime,
) -> JobSpend:
    spent = soon = 0 if known is None else known.micro_usd
    unpriced: list[NodeView] = []
    for pod in members:
        view = views.get(pod.node_name or "")
        if view is None or pod.phase in ("succeeded", "failed"):
            continue
        charge = None if view.provider_id is None else charges.get(view.provider_id)
        since = pod.started_at or pod.created_at
        since = since if charge is None else max(since, charge.until_at)
        if view.price_micro_usd_per_hour is None:
            unpriced += [view] if view.is_ours else []  # nodes of others are not billed
            continue
        price = member_price(view.price_micro_usd_per_hour, pod.requests, view.allocatable, view.gpu_memory_bytes)
        spent += cost_rounded_up(price, since, now)
        soon += cost_rounded_up(price, since, now + timedelta(seconds=CHECKPOINT_SECONDS))
    return JobSpend(
        spec=spec,
        limit_micro_usd=spec.budget_limit_micro_usd or 0,
        spent_micro_usd=spent,
        soon_micro_usd=soon,
        node_names=tuple(sorted({pod.node_name for pod in members if pod.node_name is not None})),
        unpriced=offer_keys_of(unpriced),
    )


def offer_keys_of(views: Iterable[NodeView]) -> tuple[str, ...]:
    """Return the offer keys of these nodes, each once; of unknown offers the known parts."""
    return tuple(sorted({_offer_key_of(view) for view in views}))


def _offer_key_of(view: NodeView) -> str:
    if view.order is not None and view.order.decision is not None:
        return view.order.decision.offer.key
    parts = (view.instance_type, view.zone, view.capacity_type)
    return "/".join(str(part) for part in parts if part is not None) or view.name


def budget_violation(spec: JobSpec, state: ClusterState) -> Violation | None:
    """Return the violation of a budget that does not pay for one minute of the job at the
    lowest price of all offers; None: it may be sufficient, or prices are unknown."""
    offers = () if state.offers is None else state.offers.offers
    shares = [
        -(-offer.price_micro_usd_per_hour * max(spec.member_resources.gpu_count, 1) // offer.resources.gpu_count)
        for offer in offers
        if offer.price_micro_usd_per_hour is not None
        and offer.resources.gpu_count >= max(spec.member_resources.gpu_count, 1)
        and spec.gpu_model in (None, offer.gpu_model)
    ]
    if spec.budget_limit_micro_usd is None or not shares or not spec.member_resources.gpu_count:
        return None
    seconds = min(spec.duration_seconds_max, _MINUTE_SECONDS)
    least = spec.gang_count * cost_micro_usd(min(shares), timedelta(seconds=seconds))
    if spec.budget_limit_micro_usd >= least:
        return None
    return Violation(
        "budget_limit_usd",
        f"is {money(spec.budget_limit_micro_usd)}, but one minute costs at least {money(least)} at current prices; "
        "raise it, or request less",
    )
