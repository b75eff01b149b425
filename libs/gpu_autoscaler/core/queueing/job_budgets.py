"""What jobs with a budget of their own have spent, with the time that is not charged yet. Read by the scheduler.

A job's share of a node is the GPUs that its members hold there, as the ledger splits it (`core/limits/accrual.py`);
nodes without GPUs are counted whole, which is more than the ledger will say. Time on a node whose price is not known is
in no sum: it is told of, no job with a budget is placed there, and what the ledger charges for it later counts then.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.limits.spend import cost_rounded_up, counted_at
from gpu_autoscaler.core.nodes.views import NodeView, node_views
from gpu_autoscaler.core.state.state import Charge, ClusterState, JobRecord, JobSpent
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.format import money
from gpu_autoscaler.model.ids import JobId, PodUid, ProviderId
from gpu_autoscaler.model.jobs import JobSpec, Violation
from gpu_autoscaler.model.money import cost_micro_usd

# A job that is told to save has so long for it; then its budget is spent, and it ends.
CHECKPOINT_SECONDS = 120.0
_MINUTE_SECONDS = 60.0


class JobSpend(NamedTuple):
    """What one job has spent."""

    spec: JobSpec
    limit_micro_usd: int
    spent_micro_usd: int
    soon_micro_usd: int  # with the time that it takes to save
    node_names: tuple[str, ...]  # where it runs
    unpriced: tuple[str, ...] = ()  # offers of those whose price nobody knows: what was spent there is not counted

    @property
    def is_spent(self) -> bool:
        """True where nothing is left."""
        return self.spent_micro_usd >= self.limit_micro_usd

    @property
    def is_nearly_spent(self) -> bool:
        """True where what is left is just enough to save."""
        return self.soon_micro_usd >= self.limit_micro_usd


def job_spends(state: ClusterState, as_of: datetime) -> tuple[JobSpend, ...]:
    """Return one for each job that has a budget and has not ended, in order of id."""
    limited = _limited(state.jobs)
    if not limited:
        return ()
    members = _members(limited, state.pods)
    views = node_views(state, as_of) if members else ()  # where none of them runs, nodes have nothing to say
    return _outlays(limited, members, views, state.spent_by_job, state.charges, counted_at(as_of))


@cached_by_identity(4)
def _outlays(
    limited: Mapping[JobId, JobSpec],
    members: Mapping[JobId, Sequence[PodObserved]],
    views: tuple[NodeView, ...],
    spent_by_job: Mapping[JobId, JobSpent],
    charges: Mapping[ProviderId, Charge],
    now: datetime,
) -> tuple[JobSpend, ...]:
    by_name = {view.name: view for view in views}
    return tuple(
        _outlay(spec, members.get(spec.job_id, ()), by_name, spent_by_job.get(spec.job_id), charges, now)
        for spec in limited.values()
    )


@cached_by_identity(4)
def _members(
    limited: Mapping[JobId, JobSpec], pods: Mapping[PodUid, PodObserved]
) -> Mapping[JobId, Sequence[PodObserved]]:
    """Their pods that have a node."""
    members: dict[JobId, list[PodObserved]] = {}
    for pod in pods.values():
        if pod.job_id is not None and pod.node_name is not None and pod.job_id in limited:
            members.setdefault(pod.job_id, []).append(pod)
    return members


@cached_by_identity(4)
def _limited(jobs: Mapping[JobId, JobRecord]) -> Mapping[JobId, JobSpec]:
    found = (job.queued.spec for _, job in sorted(jobs.items()) if job.queued is not None and job.finished is None)
    return {spec.job_id: spec for spec in found if spec.budget_limit_micro_usd is not None}


def _outlay(
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
            unpriced += [view] if view.is_ours else []  # what is not ours is in no bill of ours
            continue
        price = _share_micro_usd_per_hour(pod, view.price_micro_usd_per_hour, view.allocatable.gpu_count)
        spent += cost_rounded_up(price, since, now)
        soon += cost_rounded_up(price, since, now + timedelta(seconds=CHECKPOINT_SECONDS))
    return JobSpend(
        spec=spec,
        limit_micro_usd=spec.budget_limit_micro_usd or 0,
        spent_micro_usd=spent,
        soon_micro_usd=soon,
        node_names=tuple(sorted({pod.node_name for pod in members if pod.node_name is not None})),
        unpriced=offers_of(unpriced),
    )


def offers_of(views: Iterable[NodeView]) -> tuple[str, ...]:
    """Return what these nodes were sold as, each once: the offer, else as much of it as is known."""
    return tuple(sorted({_offer_of(view) for view in views}))


def _offer_of(view: NodeView) -> str:
    if view.order is not None and view.order.decision is not None:
        return view.order.decision.offer.key
    parts = (view.instance_type, view.zone, view.capacity_type)
    return "/".join(str(part) for part in parts if part is not None) or view.name


def _share_micro_usd_per_hour(pod: PodObserved, price: int, whole: int) -> int:
    if not whole or not pod.requests.gpu_count:
        return price
    return -(-price * min(pod.requests.gpu_count, whole) // whole)


def budget_violation(spec: JobSpec, state: ClusterState) -> Violation | None:
    """Return what is wrong with a budget that pays for no minute of the job, or not for its known length, on the
    cheapest of what is for sale; None: it may be enough, or prices are not known."""
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
    seconds = min(spec.duration_seconds_max, _MINUTE_SECONDS if spec.run_seconds is None else spec.run_seconds)
    least = spec.gang_count * cost_micro_usd(min(shares), timedelta(seconds=seconds))
    if spec.budget_limit_micro_usd >= least:
        return None
    length = "one minute" if spec.run_seconds is None else f"its {seconds:g} s"
    return Violation(
        "budget_limit_usd",
        f"is {money(spec.budget_limit_micro_usd)}, and {length} of it cost at least {money(least)} at today's prices; "
        "raise it, or ask for less",
    )
