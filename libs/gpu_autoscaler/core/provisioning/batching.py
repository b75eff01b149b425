"""Batching of work that arrives in a burst: its first members wait a bounded time for the rest.

A purchase for a part costs more, in smaller nodes. While more work arrives, a mixed lot waits. Of pods of equal shape
only those wait that would not fill the best node. A single pod is bought for at once.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta

import numpy as np

from gpu_autoscaler.core.demand.items import DemandItem, DemandSource
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.placement.resources import Bools, Ints
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.fleet.problem import FleetNode
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.jobs import PRIORITY_NAMES
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.reasons.defer_waits import BatchWindowOpen, PlanFull

_BATCHED_SOURCES = frozenset({DemandSource.PENDING_POD, DemandSource.QUEUED_JOB})
# Relative cost difference per pod below which a larger node is not waited for.
_COST_TOLERANCE = 1.01
# A plan is published at least this often, also an empty one: the parent of the next plan stays in its stream.
PLAN_INTERVAL_MAX = timedelta(days=1)
BRAKED_PLAN_INTERVAL_MAX = timedelta(minutes=10)  # each plan names the trip of the brake: no stream discards it
_AGAIN_SECONDS_MIN = 0.05  # least time between two plans without an urgent fact


class BatchWindow:
    """The batch window of one plan, while a burst arrives."""

    def __init__(self, draft: Draft, policy: ScalingPolicy) -> None:
        rules = policy.batching
        self._as_of = draft.as_of
        self._longest = timedelta(seconds=rules.wait_seconds_max)
        self._quiet = timedelta(seconds=rules.quiet_seconds)
        coming = [item for item in draft.demand if item.source in _BATCHED_SOURCES]
        # When the window closes; None: no burst is under way.
        self._until: Instant | None = None
        for item in coming:
            if item.is_inferred_unschedulable:
                self.note(item)
        young = [
            item for item in coming if item.first_seen_at - self._quiet < draft.as_of < item.first_seen_at + self._quiet
        ]
        if sum(item.member_count for item in young) >= max(2, rules.members_count_min):
            self._ends(max(item.first_seen_at for item in young) + self._quiet)

    def note(self, item: DemandItem) -> None:
        """Extend the window: more pods may follow one that Kubernetes has not judged yet."""
        if item.is_inferred_unschedulable or item.source is DemandSource.ARRIVING_POD:
            self._ends(item.first_seen_at + self._longest)

    def _ends(self, at: Instant) -> None:
        if at > self._as_of:
            self._until = at if self._until is None else max(self._until, at)

    def waiting(self, lots: Mapping[str, Sequence[DemandItem]]) -> dict[str, BatchWindowOpen]:
        """Return why these lots wait for the rest of their burst, by key; a lot that is left out is bought for now.

        `lots` are the members without capacity. They wait together, counted from the arrival of the first; after the
        longest wait all are bought for. Older members have other reasons not to have been bought for.
        """
        # A lot without items is a gang of one item that is partly placed.
        missing = {key: lot for key, lot in lots.items() if lot and all(map(self._may_wait, lot))}
        late_ats = [item.first_seen_at + self._longest for lot in missing.values() for item in lot]
        if self._until is None or any(at <= self._as_of < at + self._quiet for at in late_ats):
            return {}
        coming = {
            key: lot
            for key, lot in missing.items()
            if all(self._as_of < item.first_seen_at + self._longest for item in lot)
        }
        if not coming:
            return {}
        first_at = min(item.first_seen_at for lot in coming.values() for item in lot)
        count = sum(item.member_count for lot in coming.values() for item in lot)
        reason = BatchWindowOpen(members_count=count, until=min(first_at + self._longest, self._until))
        return dict.fromkeys(coming, reason)

    def _may_wait(self, item: DemandItem) -> bool:
        # A creation time in the future would make it wait for long.
        is_time_plausible = item.first_seen_at - self._quiet <= self._as_of
        is_single = item.gang is None and item.member_count == 1
        return (
            item.source in _BATCHED_SOURCES
            and is_single
            and item.priority < PRIORITY_NAMES["high"]
            and is_time_plausible
        )


def fully_packed_nodes(fleet: Sequence[FleetNode], accepts: Bools, members: Ints, costs: Ints) -> list[FleetNode]:
    """Return the nodes of a fleet for pods of equal shape that more of these pods would not improve.

    Such a node is full, and no larger node that takes such pods costs less per pod.
    """
    cost_of_pod = np.where(accepts & (members > 0), costs / np.maximum(members, 1), np.inf)
    return [
        node
        for node in fleet
        if len(node.pods) == members[node.offer]
        and not (cost_of_pod[members > members[node.offer]] * _COST_TOLERANCE < cost_of_pod[node.offer]).any()
    ]


def replan_seconds(made: Plan, regular_seconds: float) -> float | None:
    """Return after how many seconds a plan is outdated; None: with the next facts.

    That is when its batch window closes, and at once for a plan that holds only the first decisions.
    """
    reasons = [held.reason for held in made.deferred]
    if any(isinstance(reason, PlanFull) and not reason.is_too_large for reason in reasons):
        return _AGAIN_SECONDS_MIN
    until = min((reason.until for reason in reasons if isinstance(reason, BatchWindowOpen)), default=None)
    if until is None:
        return None
    return min(max((until - made.as_of).total_seconds(), _AGAIN_SECONDS_MIN), regular_seconds)
