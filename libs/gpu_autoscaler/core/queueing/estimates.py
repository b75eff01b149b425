"""When each queued job is expected to start and what it is to cost (S33), from what is known now.

The queue is gone through as the scheduler does: room that is there, room that is on its way, what can be bought within
the limits, and then the work whose end makes room. Read by the scheduler, which says it once for each job and scores it
when the job starts, and by the gateway.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from statistics import median

import msgspec
import numpy as np

from gpu_autoscaler.core.demand.items import BillingScope, DemandSource
from gpu_autoscaler.core.demand.sources import job_shape
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.limits.limits import limit_usage_of
from gpu_autoscaler.core.limits.override_bounds import frozen_by
from gpu_autoscaler.core.nodes.views import NodeView
from gpu_autoscaler.core.placement.bins import bin_key
from gpu_autoscaler.core.placement.resources import Ints
from gpu_autoscaler.core.placement.shapes import BinReadiness, Shape
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.offers import OfferCatalog, Offering
from gpu_autoscaler.core.state.freshness import stale_watch
from gpu_autoscaler.core.state.state import ClusterState, JobRecord
from gpu_autoscaler.model.directives import PERMANENT
from gpu_autoscaler.model.estimates import Estimate
from gpu_autoscaler.model.format import counted, instant
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.money import cost_micro_usd
from gpu_autoscaler.model.reasons.defer import DeferReason, OffersUnavailable
from gpu_autoscaler.model.reasons.defer_limits import Frozen, PoolPaused

# From a place to running pods: one tick of the scheduler, binding and pulling an image that is there. Source: our own.
START_SECONDS = 10.0
_BOOTS_COUNT_MIN = 5  # nodes seen to boot before their times are believed instead of the offer's own
_EARLY, _LATE = 0.1, 0.9  # quantiles of the range


class Estimates:
    """Every queued job's estimate at one instant; asked for by job."""

    def __init__(self, state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> None:
        self._state, self._policy, self._as_of = state, policy, as_of
        self._draft = Draft.start(state, as_of, policy)
        self._catalog = OfferCatalog(self._draft, state, policy)
        self._usage = limit_usage_of(self._draft, policy)
        self._stale, self._frozen = stale_watch(state, policy, as_of), frozen_by(self._draft.directives, policy)
        self._boot_ratios = _boot_ratios(self._draft.views)
        self._bins = {bin_key(view): view for view in self._draft.views}
        self._run_seconds = _run_seconds(state.jobs)
        self._ending = _RunningJobs(state, self._run_seconds)
        self._members: dict[Shape, Ints] = {}  # jobs are many, shapes few
        self._found: dict[JobId, Estimate] = {}
        for item in self._draft.demand:
            spec = None if item.job_id is None else _spec(state, item.job_id)
            if item.source is DemandSource.QUEUED_JOB and item.job_id is not None and spec is not None:
                self._found[item.job_id] = self._estimate(item.shape, item.member_count, spec)
            else:
                self._draft.free_capacity.place_most(item.shape, item.member_count, item.prefers)

    def of(self, job_id: JobId) -> Estimate | None:
        """The estimate of a job in the queue; None for one that is not there."""
        return self._found.get(job_id)

    def of_new(self, spec: JobSpec) -> Estimate:
        """The estimate of a job that would enter the queue as the last one now. Asked for one job only."""
        return self._estimate(job_shape(spec), spec.gang_count, spec)

    def all(self) -> Mapping[JobId, Estimate]:
        """Of every job in the queue."""
        return self._found

    def _estimate(self, shape: Shape, count: int, spec: JobSpec) -> Estimate:
        if self._stale is not None:
            return self._unknown(self._stale, spec)
        keys = self._draft.free_capacity.place_gang(shape, count)
        if keys:
            coming = [self._bins[key] for key in dict.fromkeys(keys) if not self._is_ready(key)]
            price = self._price(keys, shape)
            return self._on_nodes_coming(coming, price, spec) if coming else self._on_room(price, spec)
        if self._frozen is not None:
            return self._unknown(self._frozen, spec)
        customer = BillingScope(spec.project_id, spec.duration_seconds_max)
        offering, members, reason = self._offering(shape, customer, count)
        if offering is None:
            waits = self._ending.room_at(shape.resources.gpu_count * count, shape.gpu_models)
            return self._unknown(reason, spec) if waits is None else self._on_ending(waits, reason, spec)
        self._usage.add(offering.pool.name, offering.offer, customer, -(-count // members))
        return self._on_bought(offering, shape, spec)

    def _is_ready(self, key: str) -> bool:
        return self._draft.free_capacity[key].readiness is BinReadiness.READY

    # ---- by what it is known

    def _on_room(self, price: int | None, spec: JobSpec) -> Estimate:
        at = self._as_of + timedelta(seconds=START_SECONDS)
        return self._costed(
            Estimate(basis="room", why="There is room for it on nodes that are usable.", start_at=at,
                     start_at_earliest=self._as_of, start_at_latest=at + timedelta(seconds=START_SECONDS)),
            price, spec,
        )  # fmt: skip

    def _on_nodes_coming(self, coming: list[NodeView], price: int | None, spec: JobSpec) -> Estimate:
        """When the last of them is usable: each from its order on, by its promise and how such promises were kept."""
        low, middle, high = (max(self._usable_at(view, ratio) for view in coming) for ratio in self._ratios())
        why = f"{counted(len(coming), 'node')} on the way will take it ({self._boots()})."
        return self._costed(
            Estimate(basis="nodes_coming", why=why, start_at=_later(middle), start_at_earliest=_later(low),
                     start_at_latest=_later(high)),
            price, spec,
        )  # fmt: skip

    def _on_bought(self, offering: Offering, shape: Shape, spec: JobSpec) -> Estimate:
        boot, offer = offering.offer.boot_seconds, offering.offer
        low, middle, high = (self._as_of + timedelta(seconds=boot * ratio) for ratio in self._ratios())
        why = f"Nodes like {offer.key} can be bought for it now ({self._boots()})."
        return self._costed(
            Estimate(basis="to_be_bought", why=why, start_at=_later(middle), start_at_earliest=_later(low),
                     start_at_latest=_later(high)),
            _share(offer.price_micro_usd_per_hour, shape, offer.resources.gpu_count), spec,
        )  # fmt: skip

    def _on_ending(self, waits: "ExpectedRelease", reason: DeferReason, spec: JobSpec) -> Estimate:
        likely = None if waits.likely_at is None else max(waits.likely_at, self._as_of)
        latest = max(waits.latest_at, self._as_of)
        why = f"{reason.sentence()} Running jobs that end by {instant(latest)} at the latest make room."
        return self._costed(
            Estimate(basis="work_ending", why=why, start_at=likely, start_at_earliest=self._as_of,
                     start_at_latest=_later(latest)),
            None, spec,
        )  # fmt: skip

    def _unknown(self, reason: DeferReason, spec: JobSpec) -> Estimate:
        """Nothing says when; some reasons say when at the earliest."""
        earliest: datetime | None = None
        if isinstance(reason, OffersUnavailable):
            earliest = reason.retry_at
        elif (
            isinstance(reason, Frozen | PoolPaused)
            and reason.attribution is not None
            and reason.attribution.until < PERMANENT
        ):
            earliest = reason.attribution.until
        known = Estimate(basis="unknown", why=f"Nobody knows when: {reason.sentence()}", start_at_earliest=earliest)
        return self._costed(known, None, spec)

    # ---- what it is made of

    def _offering(self, shape: Shape, customer: BillingScope, count: int) -> tuple[Offering | None, int, DeferReason]:
        """The cheapest sale for each member within the limits, and how many it takes; else why there is none."""
        members = self._members.get(shape)
        if members is None:
            members = self._members[shape] = self._catalog.members(shape)
        places = np.flatnonzero(members)
        if not places.size:
            return None, 0, self._catalog.why_no_offering(shape)
        each = self._catalog.prices_micro_usd_per_hour[places] / np.minimum(members[places], count)
        first: DeferReason | None = None
        for place in places[np.lexsort((places, each, -self._catalog.pool_priorities[places]))]:
            offering = self._catalog.offerings[int(place)]
            reason = self._usage.excess(offering.pool.name, offering.offer, customer)
            if reason is None:
                return offering, int(members[place]), self._catalog.why_no_offering(shape)
            first = first or reason
        assert first is not None, "there was at least one place"  # noqa: S101 - as it says
        return None, 0, first

    def _usable_at(self, view: NodeView, ratio: float) -> datetime:
        order = view.order
        if order is None or order.decision is None or order.planned_at is None:
            return max(view.expected_at or self._as_of, self._as_of)
        boot = timedelta(seconds=order.decision.offer.boot_seconds * ratio)
        return max(order.planned_at + boot, self._as_of)

    def _ratios(self) -> tuple[float, float, float]:
        """How long boots take of what is promised: early, middle and late."""
        ratios = self._boot_ratios
        if len(ratios) < _BOOTS_COUNT_MIN:
            return 1.0, 1.0, 2.0
        last = len(ratios) - 1
        return ratios[int(_EARLY * last)], ratios[last // 2], ratios[-1 - int((1 - _LATE) * last)]

    def _boots(self) -> str:
        if len(self._boot_ratios) < _BOOTS_COUNT_MIN:
            return "boot times as the cloud's offers promise them"
        return f"boot times as {counted(len(self._boot_ratios), 'node')} of late took"

    def _price(self, keys: tuple[str, ...], shape: Shape) -> int | None:
        """What an hour of a member costs on these nodes, on the mean; None where a price is unknown."""
        shares = [self._share_on(self._bins[key], shape) for key in keys]
        known = [share for share in shares if share is not None]
        return round(sum(known) / len(known)) if len(known) == len(shares) else None

    @staticmethod
    def _share_on(view: NodeView, shape: Shape) -> int | None:
        return _share(view.price_micro_usd_per_hour, shape, view.allocatable.gpu_count)

    def _costed(self, estimate: Estimate, price: int | None, spec: JobSpec) -> Estimate:
        if price is None:
            price = self._cheapest(spec)
        if price is None:
            return estimate
        seconds = spec.run_seconds or self._run_seconds.get((spec.project_id, spec.job_name))
        likely = min(seconds or spec.duration_seconds_max, spec.duration_seconds_max)
        hourly = price * spec.member_count
        return msgspec.structs.replace(
            estimate,
            cost_micro_usd=cost_micro_usd(hourly, timedelta(seconds=likely)),
            cost_micro_usd_max=cost_micro_usd(hourly, timedelta(seconds=spec.duration_seconds_max)),
            run_seconds=likely,
        )

    def _cheapest(self, spec: JobSpec) -> int | None:
        """The least that an hour of a member costs of what is for sale; None: nothing fits, or no price is known."""
        shape = job_shape(spec)
        members = self._catalog.members(shape)
        shares = (
            _share(self._catalog.offerings[place].offer.price_micro_usd_per_hour, shape,
                   self._catalog.offerings[place].offer.resources.gpu_count)
            for place in np.flatnonzero(members)
        )  # fmt: skip
        return min((share for share in shares if share is not None), default=None)


class ExpectedRelease(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """When enough running work has ended."""

    likely_at: datetime | None  # None: of some of it nobody knows how long it takes
    latest_at: datetime  # no job runs longer than it may


class _RunningJobs:
    """GPUs that running jobs give back, each counted for one waiting job only."""

    def __init__(self, state: ClusterState, run_seconds: Mapping[tuple[str, str], float]) -> None:
        nodes = {node.name: node.gpu_model for node in state.nodes.values()}
        self._ends = sorted(_ends(state, nodes, run_seconds), key=lambda end: end[0])
        self._taken: dict[tuple[str, ...], int] = {}

    def room_at(self, gpu_count: int, gpu_models: tuple[str, ...]) -> ExpectedRelease | None:
        """Return when so many GPUs more are free, behind those who asked before; None: nothing known frees them."""
        if not gpu_count:
            return None
        wanted = self._taken.get(gpu_models, 0) + gpu_count
        self._taken[gpu_models] = wanted
        freed, likely = 0, list[datetime | None]()
        for latest_at, likely_at, count, model in self._ends:
            if gpu_models and model not in gpu_models:
                continue
            freed += count
            likely.append(likely_at)
            if freed >= wanted:
                known = [at for at in likely if at is not None]
                return ExpectedRelease(likely_at=max(known) if len(known) == len(likely) else None, latest_at=latest_at)
        return None


def _ends(
    state: ClusterState, nodes: Mapping[str, str | None], run_seconds: Mapping[tuple[str, str], float]
) -> Iterator[tuple[datetime, datetime | None, int, str | None]]:
    """Of each running job: when it ends at the latest and likely, how many GPUs of which model it gives back."""
    for job in state.jobs.values():
        if job.queued is None or job.placed is None or job.started is None or job.finished is not None:
            continue
        spec = job.queued.spec
        seconds = spec.run_seconds or run_seconds.get((spec.project_id, spec.job_name))
        since = job.started.started_at
        model = spec.gpu_model or next((nodes.get(name) for name in job.placed.node_names), None)
        yield (
            since + timedelta(seconds=spec.duration_seconds_max),
            None if seconds is None else since + timedelta(seconds=seconds),
            spec.member_count * spec.member_resources.gpu_count,
            model,
        )


def _spec(state: ClusterState, job_id: JobId) -> JobSpec | None:
    job = state.jobs.get(job_id)
    return None if job is None or job.queued is None else job.queued.spec


def _later(at: datetime) -> datetime:
    return at + timedelta(seconds=START_SECONDS)


def _share(price: int | None, shape: Shape, node_gpu_count: int) -> int | None:
    """What an hour of a member costs on a node of this price: its share of the GPUs, the whole node without GPUs."""
    wanted = shape.resources.gpu_count
    if price is None:
        return None
    return -(-price * wanted // node_gpu_count) if wanted and node_gpu_count else price


@cached_by_identity(2)
def _boot_ratios(views: tuple[NodeView, ...]) -> tuple[float, ...]:
    """How long the nodes that are here took to boot, as parts of what their offers promise, ascending."""
    ratios = []
    for view in views:
        order = view.order
        if order is None or order.decision is None or order.planned_at is None or view.usable_since is None:
            continue
        took = (view.usable_since - order.planned_at).total_seconds()
        ratios.append(took / max(1.0, order.decision.offer.boot_seconds))
    return tuple(sorted(ratio for ratio in ratios if ratio > 0))


@cached_by_identity(2)
def _run_seconds(jobs: Mapping[JobId, JobRecord]) -> Mapping[tuple[str, str], float]:
    """How long jobs of one project and name took that ended well lately: the one in the middle."""
    took: dict[tuple[str, str], list[float]] = {}
    for job in jobs.values():
        if job.queued is None or job.started is None or job.finished is None or job.finished.outcome != "completed":
            continue
        spec = job.queued.spec
        seconds = (job.finished.finished_at - job.started.started_at).total_seconds()
        took.setdefault((spec.project_id, spec.job_name), []).append(seconds)
    return {name: median(each) for name, each in took.items()}
