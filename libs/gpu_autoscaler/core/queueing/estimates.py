"""Estimates of queued jobs: start time and cost.

The queue is processed like the scheduler does it: free capacity, booting nodes, purchases within the limits, and then
running jobs that end. The scheduler publishes one estimate per job and scores it when the job starts.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta

import msgspec
import numpy as np

from gpu_autoscaler.core.demand.durations import Durations
from gpu_autoscaler.core.demand.items import BillingScope, DemandItem, DemandSource
from gpu_autoscaler.core.demand.sources import job_shape, job_spec
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.limits.limits import limit_usage_of
from gpu_autoscaler.core.limits.override_bounds import frozen_by
from gpu_autoscaler.core.next_change import plain
from gpu_autoscaler.core.nodes.views import NodeView, bin_key
from gpu_autoscaler.core.placement.resources import Ints
from gpu_autoscaler.core.placement.shapes import BinReadiness, Shape
from gpu_autoscaler.core.policy.gpu_slices import member_price
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.keep_or_buy import KeepOrBuy
from gpu_autoscaler.core.provisioning.offers import OfferCatalog, Offering
from gpu_autoscaler.core.queueing.backfill import START_SECONDS_MAX
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.core.state.freshness import stale_watch
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.directives import PERMANENT
from gpu_autoscaler.model.estimates import Estimate
from gpu_autoscaler.model.format import counted, instant
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.money import cost_micro_usd
from gpu_autoscaler.model.reasons.defer import DeferReason, OffersUnavailable
from gpu_autoscaler.model.reasons.defer_limits import Frozen, PoolPaused
from gpu_autoscaler.model.reasons.defer_waits import CapacityReserved, ReservationHeld
from gpu_autoscaler.model.resources import Resources

# From placement to running pods: a scheduler tick, binding, and pulling a cached image. Source: project default.
START_SECONDS = 10.0
_BOOTS_COUNT_MIN = 5  # number of observed boots that replaces the boot time of the offer
_EARLY, _LATE = 0.1, 0.9  # quantiles of the range


class Estimates:
    """Estimates of all queued jobs at one instant."""

    def __init__(self, state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> None:
        self._state, self._policy, self._as_of = state, policy, as_of
        self._draft = Draft.start(state, as_of, policy)
        self._catalog = OfferCatalog(self._draft.views, state, policy, self._draft.as_of)
        self._usage = limit_usage_of(self._draft, policy)
        self._stale, self._frozen = stale_watch(state, policy, as_of), frozen_by(self._draft.directives, policy)
        self._boot_ratios = _boot_ratios(self._draft.views)
        self._bins = {bin_key(view): view for view in self._draft.views}
        self._keep_or_buy = KeepOrBuy(state, policy, as_of, self._draft.views, self._catalog)
        self._durations = Durations(state)
        self._running = _RunningJobs(state, self._durations, as_of)
        self._held = _held(state, policy, as_of)
        self._members: dict[Shape, Ints] = {}  # many jobs share few shapes
        self._estimates: dict[JobId, Estimate] = {}
        self._queued = frozenset(item.job_id for item in self._draft.demand if item.source is DemandSource.QUEUED_JOB)
        for item in self._draft.demand:
            spec = job_spec(state, item.job_id)
            if item.source is DemandSource.QUEUED_JOB and item.job_id is not None and spec is not None:
                self._estimates[item.job_id] = (
                    self._estimate(item, spec) if item.blocked is None else self._unknown(item.blocked, spec)
                )
            else:
                self._draft.free_capacity.place_most(item.shape, item.member_count, item.prefers)

    def of(self, job_id: JobId) -> Estimate | None:
        """Return the estimate of a queued job; None for another job."""
        return self._estimates.get(job_id)

    def of_new(self, spec: JobSpec) -> Estimate:
        """Return the estimate of a job that would enter the queue now, as the last one. For one job only."""
        item = DemandItem(
            key=f"job/{spec.job_id}",
            source=DemandSource.QUEUED_JOB,
            shape=job_shape(spec),
            member_count=spec.gang_count,
            within=spec.within,
            start_by_at=spec.start_by_at,
            priority=spec.priority,
            since=plain(self._as_of),
        )
        return self._estimate(item, spec)

    def all(self) -> Mapping[JobId, Estimate]:
        return self._estimates

    def _estimate(self, item: DemandItem, spec: JobSpec) -> Estimate:
        shape, count = item.shape, item.member_count
        if self._stale is not None:
            return self._unknown(self._stale, spec)
        held = self._held.get(spec.job_id) or self._reserved(spec)
        if held is not None:
            return self._on_reservation(held, spec)
        scope = BillingScope(spec.project_id, spec.duration_seconds_max)
        offering, members, reason = self._offering(shape, scope, count)
        # Where nothing can be bought, the job uses whatever is free.
        is_buying = self._frozen is None and offering is not None
        avoided = self._keep_or_buy.avoided(item, self._draft.free_capacity, spec) if is_buying else ()
        if keys := self._draft.free_capacity.place_gang(shape, count, avoided=avoided):
            return self._on_nodes(keys, shape, spec)
        if self._frozen is not None:
            return self._unknown(self._frozen, spec)
        if offering is None:
            release = self._running.release_of(shape.resources.gpu_count * count, shape.gpu_models)
            return self._unknown(reason, spec) if release is None else self._on_completion(release, reason, spec)
        self._usage.add(offering.pool.name, offering.offer, scope, -(-count // members))
        return self._on_purchase(offering, shape, spec)

    # ---- by basis

    def _on_nodes(self, keys: tuple[str, ...], shape: Shape, spec: JobSpec) -> Estimate:
        """Return the estimate of a job that has places on these nodes."""
        bins = self._draft.free_capacity
        booting = [self._bins[key] for key in dict.fromkeys(keys) if bins[key].readiness is not BinReadiness.READY]
        price = self._price(keys, shape)
        return self._on_booting_nodes(booting, price, spec) if booting else self._on_free_capacity(price, spec)

    def _on_free_capacity(self, price: int | None, spec: JobSpec) -> Estimate:
        at = self._as_of + timedelta(seconds=START_SECONDS)
        return self._costed(
            Estimate(basis="free_capacity", why="Usable nodes have free capacity.", start_at=at,
                     start_at_earliest=self._as_of, start_at_latest=at + timedelta(seconds=START_SECONDS)),
            price, spec,
        )  # fmt: skip

    def _on_booting_nodes(self, booting: list[NodeView], price: int | None, spec: JobSpec) -> Estimate:
        """When the last of the nodes is usable, by boot times of offers and of recent nodes."""
        low, middle, high = (max(self._usable_at(view, ratio) for view in booting) for ratio in self._ratios())
        why = f"{counted(len(booting), 'booting node')} will run it ({self._boots()})."
        return self._costed(
            Estimate(basis="booting_nodes", why=why, start_at=_later(middle), start_at_earliest=_later(low),
                     start_at_latest=_later(high)),
            price, spec,
        )  # fmt: skip

    def _on_purchase(self, offering: Offering, shape: Shape, spec: JobSpec) -> Estimate:
        boot, offer = offering.offer.boot_seconds, offering.offer
        low, middle, high = (self._as_of + timedelta(seconds=boot * ratio) for ratio in self._ratios())
        why = f"Nodes of offer {offer.key} can be bought now ({self._boots()})."
        return self._costed(
            Estimate(basis="purchase", why=why, start_at=_later(middle), start_at_earliest=_later(low),
                     start_at_latest=_later(high)),
            _share_of_new(offering, shape), spec,
        )  # fmt: skip

    def _on_completion(self, release: "ExpectedRelease", reason: DeferReason, spec: JobSpec) -> Estimate:
        likely = None if release.likely_at is None else max(release.likely_at, self._as_of)
        latest = max(release.latest_at, self._as_of)
        why = f"{reason.sentence()} Running jobs release capacity by {instant(latest)} at the latest."
        return self._costed(
            Estimate(basis="job_completion", why=why, start_at=likely, start_at_earliest=self._as_of,
                     start_at_latest=_later(latest)),
            None, spec,
        )  # fmt: skip

    def _on_reservation(self, held: CapacityReserved | ReservationHeld, spec: JobSpec) -> Estimate:
        """When the reserved capacity is released; for jobs other than the one that reserves it, not before."""
        until = _later(max(held.until, self._as_of))
        known_at = self._running.likely_end(held.until)
        likely_at = until if known_at is None else min(until, _later(known_at))
        return self._costed(
            Estimate(basis="reservation", why=held.sentence(), start_at=likely_at, start_at_earliest=self._as_of,
                     start_at_latest=until if isinstance(held, ReservationHeld) else None),
            None, spec,
        )  # fmt: skip

    def _reserved(self, spec: JobSpec) -> CapacityReserved | None:
        """Return the reservation that a job that is not queued yet would delay; None: there is none."""
        heads = (reason for reason in self._held.values() if isinstance(reason, ReservationHeld))
        head = next(heads, None) if spec.job_id not in self._queued else None
        ends_at = self._as_of + timedelta(seconds=START_SECONDS_MAX + spec.duration_seconds_max)
        if head is None or ends_at <= head.until:
            return None
        return CapacityReserved(job_id=head.job_id, gpu_count=head.gpu_count, until=head.until)

    def _unknown(self, reason: DeferReason, spec: JobSpec) -> Estimate:
        """Unknown start; some reasons have an earliest time."""
        earliest: datetime | None = None
        if isinstance(reason, OffersUnavailable):
            earliest = reason.retry_at
        elif (
            isinstance(reason, Frozen | PoolPaused)
            and reason.attribution is not None
            and reason.attribution.until < PERMANENT
        ):
            earliest = reason.attribution.until
        known = Estimate(
            basis="unknown", why=f"The start time is unknown: {reason.sentence()}", start_at_earliest=earliest
        )
        return self._costed(known, None, spec)

    # ---- parts

    def _offering(self, shape: Shape, scope: BillingScope, count: int) -> tuple[Offering | None, int, DeferReason]:
        """The cheapest sale for each member within the limits, and how many it takes; else why there is none."""
        members = self._members.get(shape)
        if members is None:
            members = self._members[shape] = self._catalog.members(shape)
        places = np.flatnonzero(members)
        if not places.size:
            return None, 0, self._catalog.why_no_offering(shape)
        prices = self._catalog.prices_micro_usd_per_hour[places] / np.minimum(members[places], count)
        first: DeferReason | None = None
        for place in places[np.lexsort((places, prices, -self._catalog.pool_priorities[places]))]:
            offering = self._catalog.offerings[int(place)]
            reason = self._usage.excess(offering.pool.name, offering.offer, scope)
            if reason is None:
                return offering, int(members[place]), self._catalog.why_no_offering(shape)
            first = first or reason
        assert first is not None, "at least one offering was checked"  # noqa: S101 - invariant
        return None, 0, first

    def _usable_at(self, view: NodeView, ratio: float) -> datetime:
        order = view.order
        if order is None or order.decision is None or order.planned_at is None:
            return max(view.expected_at or self._as_of, self._as_of)
        return max(order.planned_at + timedelta(seconds=order.decision.offer.boot_seconds * ratio), self._as_of)

    def _ratios(self) -> tuple[float, float, float]:
        """Boot times as ratios of those promised: early, median and late."""
        ratios = self._boot_ratios
        if len(ratios) < _BOOTS_COUNT_MIN:
            return 1.0, 1.0, 2.0
        last = len(ratios) - 1
        return ratios[int(_EARLY * last)], ratios[last // 2], ratios[-1 - int((1 - _LATE) * last)]

    def _boots(self) -> str:
        if len(self._boot_ratios) < _BOOTS_COUNT_MIN:
            return "boot times of the offers"
        return f"boot times of {counted(len(self._boot_ratios), 'recent node')}"

    def _price(self, keys: tuple[str, ...], shape: Shape) -> int | None:
        """Mean price per hour of a member on these nodes; None if a price is unknown."""
        views = (self._bins[key] for key in keys)
        shares = [
            _share(view.price_micro_usd_per_hour, shape, view.allocatable, view.gpu_memory_bytes) for view in views
        ]
        known = [share for share in shares if share is not None]
        return round(sum(known) / len(known)) if len(known) == len(shares) else None

    def _costed(self, estimate: Estimate, price: int | None, spec: JobSpec) -> Estimate:
        run = self._durations.predicted(spec)
        likely = spec.duration_seconds_max if run is None else run.median_seconds
        estimate = msgspec.structs.replace(
            estimate,
            run_seconds=likely,
            run_seconds_low=None if run is None else run.low_seconds,
            run_seconds_high=None if run is None else run.high_seconds,
            run_source="time_limit" if run is None else run.source,
            run_samples_count=0 if run is None else run.samples_count,
        )
        if price is None:
            price = self._cheapest(spec)
        if price is None:
            return estimate
        hourly = price * spec.member_count
        return msgspec.structs.replace(
            estimate,
            cost_micro_usd=cost_micro_usd(hourly, timedelta(seconds=likely)),
            cost_micro_usd_max=cost_micro_usd(hourly, timedelta(seconds=spec.duration_seconds_max)),
        )

    def _cheapest(self, spec: JobSpec) -> int | None:
        """Lowest price per hour of a member of all offers, those without GPUs first; None: no offer fits, or no price
        is known."""
        shape = job_shape(spec)
        offerings = [self._catalog.offerings[place] for place in np.flatnonzero(self._catalog.members(shape))]
        shares = ((offering.offer.gpu_model is not None, _share_of_new(offering, shape)) for offering in offerings)
        known = ((has_gpus, share) for has_gpus, share in shares if share is not None)
        return min(known, default=(False, None))[1]


def likely_seconds(spec: JobSpec, state: ClusterState) -> float:
    """Return how long the job is likely to run: as predicted, else to its limit."""
    run = Durations(state).predicted(spec)
    return spec.duration_seconds_max if run is None else run.median_seconds


def _held(
    state: ClusterState, policy: ScalingPolicy, as_of: datetime
) -> Mapping[JobId, CapacityReserved | ReservationHeld]:
    """Return the queued jobs that reserve capacity, and those that wait for a reservation."""
    if all(queue.reserve_after_seconds is None for queue in policy.queues):
        return {}
    return {
        JobId(deferred.subject.removeprefix("job/")): deferred.reason
        for deferred in schedule(state, policy, as_of).deferred
        if isinstance(deferred.reason, CapacityReserved | ReservationHeld)
    }


class ExpectedRelease(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """When enough running jobs have ended."""

    likely_at: datetime | None  # None: unknown for some of the jobs
    latest_at: datetime  # by their time limits


class _RunningJobs:
    def __init__(self, state: ClusterState, durations: Durations, as_of: datetime) -> None:
        nodes = {node.name: node.gpu_model for node in state.nodes.values()}
        self._ends = sorted(_ends(state, nodes, durations, as_of), key=lambda end: end[0])
        self._taken: dict[tuple[str, ...], int] = {}

    def likely_end(self, until: datetime) -> datetime | None:
        """Return when all jobs have likely ended that end by then at the latest; None: unknown, or there is none."""
        likely = [likely_at for latest_at, likely_at, *_ in self._ends if latest_at <= until]
        known = [at for at in likely if at is not None]
        return max(known) if known and len(known) == len(likely) else None

    def release_of(self, gpu_count: int, gpu_models: tuple[str, ...]) -> ExpectedRelease | None:
        """Return when this many more GPUs are released, after earlier calls; None: unknown."""
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
    state: ClusterState, nodes: Mapping[str, str | None], durations: Durations, as_of: datetime
) -> Iterator[tuple[datetime, datetime | None, int, str | None]]:
    """Yield of each running job its latest and likely end, and the number and model of its GPUs."""
    for job in state.jobs.values():
        if job.queued is None or job.placed is None or job.started is None or job.finished is not None:
            continue
        spec, left = job.queued.spec, durations.of_job(job, as_of)
        yield (
            job.started.started_at + timedelta(seconds=spec.duration_seconds_max),
            None if left is None else as_of + timedelta(seconds=left.median_seconds),
            spec.member_count * spec.member_resources.gpu_count,
            spec.gpu_model or next((nodes.get(name) for name in job.placed.node_names), None),
        )


def _later(at: datetime) -> datetime:
    return at + timedelta(seconds=START_SECONDS)


def _share(price: int | None, shape: Shape, node: Resources, gpu_memory_bytes: int | None) -> int | None:
    return None if price is None else member_price(price, shape.resources, node, gpu_memory_bytes)


def _share_of_new(offering: Offering, shape: Shape) -> int | None:
    node = offering.node
    return _share(offering.offer.price_micro_usd_per_hour, shape, node.free, node.gpu_memory_bytes)


@cached_by_identity(2)
def _boot_ratios(views: tuple[NodeView, ...]) -> tuple[float, ...]:
    """Boot times of existing nodes as ratios of those of their offers, ascending."""
    ratios = []
    for view in views:
        order = view.order
        if order is None or order.decision is None or order.planned_at is None or view.usable_since is None:
            continue
        took = (view.usable_since - order.planned_at).total_seconds()
        ratios.append(took / max(1.0, order.decision.offer.boot_seconds))
    return tuple(sorted(ratio for ratio in ratios if ratio > 0))
