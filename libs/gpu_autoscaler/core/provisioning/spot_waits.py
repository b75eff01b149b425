"""Work that is excluded from spot because it was interrupted too often, and work that waits for spot because it can."""

from datetime import datetime, timedelta

import msgspec
import numpy as np

from gpu_autoscaler.core.demand.items import DemandItem
from gpu_autoscaler.core.next_change import has_lasted
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.offers import OfferCatalog
from gpu_autoscaler.core.state.queries import is_in_flight
from gpu_autoscaler.core.state.state import ClusterState, JobRecord
from gpu_autoscaler.model.jobs import PRIORITY_NAMES
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.base import first_listed
from gpu_autoscaler.model.reasons.defer_waits import SpotAwaited

_PRECISION = 1_000_000


def exclude_interrupted_from_spot(
    demand: tuple[DemandItem, ...], state: ClusterState, policy: ScalingPolicy, as_of: datetime
) -> tuple[DemandItem, ...]:
    """Return the demand with spot excluded for jobs that were interrupted often, or have one retry left."""
    jobs = state.jobs
    return tuple(
        _without_spot(item)
        if item.job_id is not None and is_spot_excluded(jobs.get(item.job_id), policy, as_of)
        else item
        for item in demand
    )


def is_spot_excluded(job: JobRecord | None, policy: ScalingPolicy, as_of: datetime) -> bool:
    """True for a job that was interrupted as often as the policy allows on spot.

    Applies for a limited time after its last interruption, and only if some pool has another capacity type: spot is
    better than no capacity.
    """
    if job is None or job.preempted is None:
        return False
    if job.preempted.retries_used < min(policy.spot.interruptions_count_max, policy.job_retries_count_max):
        return False
    if all(pool.capacity_types == (CapacityType.SPOT,) for pool in policy.pools):
        return False
    return not has_lasted(job.preempted.preempted_at, policy.spot.on_demand_wait_seconds, as_of)


def must_leave_spot(job: JobRecord | None, policy: ScalingPolicy, as_of: datetime) -> bool:
    """True for a job that must be suspended and released again off spot although its Job allows spot.

    Work that must not be interrupted at all declares so in its Job.
    """
    if job is None or job.queued is None:
        return False
    return job.queued.spec.is_preemptible and is_spot_excluded(job, policy, as_of)


def _without_spot(item: DemandItem) -> DemandItem:
    return msgspec.structs.replace(item, shape=msgspec.structs.replace(item.shape, is_spot_allowed=False))


def spot_wait(
    item: DemandItem, catalog: OfferCatalog, state: ClusterState, policy: ScalingPolicy, as_of: datetime
) -> SpotAwaited | None:
    """Return until when work below high priority waits for spot instead of much more expensive capacity; None: it does
    not.

    Only if much cheaper spot would fit and is unavailable, in a pool whose priority is at least that of the more
    expensive capacity, and no nodes are on their way that would wait with the rest of a gang.
    """
    rules, shape = policy.spot, item.shape
    until = item.since + timedelta(seconds=_wait_seconds(item, policy))
    if not shape.is_spot_allowed or item.priority >= PRIORITY_NAMES["high"] or as_of >= until:
        return None
    members, prices = catalog.members(shape), catalog.prices_micro_usd_per_hour * _PRECISION
    now = np.flatnonzero(members)
    if not now.size or catalog.is_reserved[now].any():
        return None
    each = prices[now] // members[now]
    cheapest = int(each.min())
    if not catalog.is_on_demand[now[each == cheapest]].all():  # available spot is as good
        return None
    members = catalog.members_if_available(shape)
    is_awaited = (members > 0) & catalog.is_spot & (prices > 0)
    is_awaited[now] = False
    spot = np.flatnonzero(is_awaited)
    if not spot.size:
        return None
    if item.gang is not None and any(
        order.decision is not None and order.decision.gang == item.gang and is_in_flight(state, order)
        for order in state.orders.values()
    ):
        return None
    if catalog.pool_priorities[now].max() > catalog.pool_priorities[spot].max():
        return None
    saving_ratio = 1.0 - int((prices[spot] // members[spot]).min()) / max(cheapest, 1)
    if saving_ratio < rules.wait_saving_ratio_min:
        return None
    offers = {catalog.offerings[place].offer for place in spot.tolist()}
    refused = sorted(offer.key for offer in offers if offer.capacity_type is CapacityType.SPOT)
    first, unlisted_count = first_listed(refused)
    return SpotAwaited(offers=first, offers_unlisted_count=unlisted_count, saving_ratio=saving_ratio, until=until)


def _wait_seconds(item: DemandItem, policy: ScalingPolicy) -> float:
    """Return how long the item waits for spot: above low priority at most as long as for running work to end."""
    if item.priority <= PRIORITY_NAMES["low"]:
        return policy.spot.low_priority_wait_seconds
    is_pod = item.job_id is None
    longest = policy.pending_pod_timeout_seconds if is_pod else policy.queued_timeout_seconds
    return min(policy.spot.medium_priority_wait_seconds, longest)
