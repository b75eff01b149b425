"""Capacity that running work is certain to give back soon. Work that can wait for it is not bought for.

The end is certain for a pod in its grace period, and for a job by its time limit. Waits are upper bounds, counted from
when the work began to wait (docs/decisions.md#waiting-before-scale-up).
"""

from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import cached_property

import msgspec

from gpu_autoscaler.core.demand.items import DemandItem, DemandSource
from gpu_autoscaler.core.demand.sources import job_spec
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.placement.bins import node_bin
from gpu_autoscaler.core.placement.engine import FreeCapacity
from gpu_autoscaler.core.placement.shapes import Bin, BinReadiness, Shape
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.queries import pod_index
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.jobs import PRIORITY_NAMES
from gpu_autoscaler.model.reasons.defer_waits import CapacityExpected
from gpu_autoscaler.model.resources import NO_RESOURCES


class ExpectedCapacity:
    """Capacity to come, each part of it for one waiting lot only. A scratch pad of one planning run."""

    def __init__(self, draft: Draft, state: ClusterState, policy: ScalingPolicy) -> None:
        self._policy = policy
        self._as_of = draft.as_of
        longest = max(policy.pending_pod_timeout_seconds, policy.queued_timeout_seconds)
        self._bins = tuple(_ending(draft, state, timedelta(seconds=longest)))

    @cached_property
    def _free_capacity(self) -> FreeCapacity:
        return FreeCapacity(self._bins)

    def takes(self, item: DemandItem, shape: Shape, count: int) -> CapacityExpected | None:
        """Reserve capacity for these members and return when they have it; None: not within their allowed wait."""
        wait = self._wait(item)
        if not self._bins or wait is None:
            return None
        until = item.since + wait
        mark = self._free_capacity.mark()
        keys = self._free_capacity.place_most(shape, count)
        bins = [self._free_capacity[key] for key in keys]
        last = max(bins, key=lambda entry: (entry.expected_at or until, entry.key), default=None)
        if last is None or len(keys) < count or last.expected_at is None or last.expected_at > until:
            self._free_capacity.rollback(mark)
            return None
        return CapacityExpected(node=last.name, expected_at=last.expected_at)

    def _wait(self, item: DemandItem) -> timedelta | None:
        """Return how long the item may wait; None: not at all."""
        if item.priority >= PRIORITY_NAMES["high"]:
            return None
        if item.source is DemandSource.PENDING_POD:
            return timedelta(seconds=self._policy.pending_pod_timeout_seconds)
        if item.source is DemandSource.QUEUED_JOB:
            return timedelta(seconds=self._policy.queued_timeout_seconds)
        return None


def ends_at(pod: PodObserved, state: ClusterState) -> datetime | None:
    """Return the latest instant at which the pod gives its capacity back; None: unknown."""
    if pod.deleting_since is not None:
        return pod.deleting_since + timedelta(seconds=pod.grace_seconds)
    spec = job_spec(state, pod.job_id)
    if spec is None or pod.started_at is None:
        return None
    return pod.started_at + timedelta(seconds=spec.duration_seconds_max)


def _ending(draft: Draft, state: ClusterState, within: timedelta) -> Iterator[Bin]:
    """Yield for each usable node that stays what it gets back in this time, as a bin available from the last end."""
    may_end = pod_index(state).may_end
    leaving = draft.leaving_nodes() if may_end else frozenset()
    for view in draft.views if may_end else ():
        if view.name not in may_end or not view.is_usable or view.notice is not None or view.drain is not None:
            continue
        if view.name in leaving:
            continue
        ends = ((pod, ends_at(pod, state)) for pod in may_end[view.name])
        ending = [(pod, at) for pod, at in ends if at is not None and at - within <= draft.as_of < at]
        if ending:
            yield msgspec.structs.replace(
                node_bin(view, draft.pods, BinReadiness.READY),
                free=sum((pod.requests for pod, _ in ending), start=NO_RESOURCES),
                readiness=BinReadiness.COMING,
                expected_at=max(at for _, at in ending),
            )
