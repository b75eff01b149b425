"""Work that comes in a burst: the first of it waits a bounded moment for the rest.

Pods of a burst come one after the other, and Kubernetes takes seconds to say of each that it fits nowhere. What is
bought for a part of them is dearer, in smaller nodes. So while more is coming a mixed lot waits; of pods that are all
alike only those do that would not fill the best node. A lone pod is bought for at once.
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
from gpu_autoscaler.model.reasons.defer_waits import BatchWindowOpen

_COMES = frozenset({DemandSource.PENDING_POD, DemandSource.QUEUED_JOB})
# Of two sizes that cost about the same for each pod the larger one is not waited for.
_HAIR = 1.01
_AGAIN_SECONDS_MIN = 0.05  # between two plans that nothing urgent asks for


class BatchWindow:
    """What one plan knows of a burst that is under way."""

    def __init__(self, draft: Draft, policy: ScalingPolicy) -> None:
        rules = policy.batching
        self._as_of = draft.as_of
        self._longest = timedelta(seconds=rules.wait_seconds_max)
        self._quiet = timedelta(seconds=rules.quiet_seconds)
        coming = [item for item in draft.demand if item.source in _COMES]
        # When it will be over, as far as each sign of it says; nothing: no burst is under way.
        self._until: Instant | None = None
        for item in coming:
            if item.is_inferred_unschedulable:
                self.note(item)
        young = [item for item in coming if abs(draft.as_of - item.first_seen_at) < self._quiet]
        if sum(item.member_count for item in young) >= max(2, rules.members_count_min):
            self._ends(max(item.first_seen_at for item in young) + self._quiet)

    def note(self, item: DemandItem) -> None:
        """Where Kubernetes has not spoken of this one, more may be behind it: it is waited for while that may be."""
        if item.is_inferred_unschedulable or item.source is DemandSource.ARRIVING_POD:
            self._ends(item.first_seen_at + self._longest)

    def _ends(self, at: Instant) -> None:
        if at > self._as_of:
            self._until = at if self._until is None else max(self._until, at)

    def waiting(self, lots: Mapping[str, Sequence[DemandItem]]) -> dict[str, BatchWindowOpen]:
        """Return why these lots wait for the rest of their burst, by key; one that is left out is bought for now.

        `lots` are the members that have no room. They wait together, from when the first of them came: once that is
        long enough ago all are bought for. What was there long before has other reasons not to have been bought for.
        """
        # A lot without items is a gang of one item, a part of which has its place.
        missing = {key: lot for key, lot in lots.items() if lot and all(map(self._may_wait, lot))}
        ages = [self._as_of - item.first_seen_at for lot in missing.values() for item in lot]
        if self._until is None or any(self._longest <= age < self._longest + self._quiet for age in ages):
            return {}
        late_at = self._as_of - self._longest
        coming = {key: lot for key, lot in missing.items() if all(item.first_seen_at > late_at for item in lot)}
        if not coming:
            return {}
        first_at = min(item.first_seen_at for lot in coming.values() for item in lot)
        count = sum(item.member_count for lot in coming.values() for item in lot)
        reason = BatchWindowOpen(members_count=count, until=min(first_at + self._longest, self._until))
        return dict.fromkeys(coming, reason)

    def _may_wait(self, item: DemandItem) -> bool:
        # A clock that is far ahead would have it wait for long.
        is_told_in_time = item.first_seen_at <= self._as_of + self._quiet
        is_single = item.gang is None and item.member_count == 1
        return item.source in _COMES and is_single and item.priority < PRIORITY_NAMES["high"] and is_told_in_time


def fully_packed_nodes(fleet: Sequence[FleetNode], accepts: Bools, members: Ints, costs: Ints) -> list[FleetNode]:
    """Return the nodes of a fleet for pods that are all alike which more of them would make no better: full, and no
    larger one that takes such pods costs less for each."""
    takes = accepts & (members > 0)
    each = np.where(takes, costs / np.maximum(members, 1), np.inf)
    return [
        node
        for node in fleet
        if len(node.pods) == members[node.offer]
        and not (each[members > members[node.offer]] * _HAIR < each[node.offer]).any()
    ]


def replan_seconds(made: Plan, regular_seconds: float) -> float | None:
    """Return how soon a plan holds no more that has work wait for the rest of its burst; None: no work does."""
    reasons = (held.reason for held in made.deferred)
    until = min((each.until for each in reasons if isinstance(each, BatchWindowOpen)), default=None)
    if until is None:
        return None
    return min(max((until - made.as_of).total_seconds(), _AGAIN_SECONDS_MIN), regular_seconds)
