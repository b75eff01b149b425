"""Which losses of a job use up a retry: interruptions by the cloud, faults and unknown causes do; a loss by our own
choice never does.

How often a job is lost by our own choice is limited elsewhere: `core/disruption/eligibility.py` doubles the protected
time of its pods with each such loss, and disruption budgets and cooldowns apply.
"""

from collections.abc import Iterator
from datetime import datetime

from gpu_autoscaler.core.state.state import ClusterState, JobRecord
from gpu_autoscaler.events.job import JobPlaced
from gpu_autoscaler.events.pod import PodGone
from gpu_autoscaler.model.decisions import DrainNode
from gpu_autoscaler.model.ids import PodUid
from gpu_autoscaler.model.reasons.drain import BootTimedOut, DrainReason, NodeDeleted, NodeUnhealthy, SpotReclaim

# Removals that the cloud, a fault or a user forces upon us. Every other removal is our own choice.
_FORCED_ON_US = (SpotReclaim, NodeDeleted, NodeUnhealthy, BootTimedOut)


def is_own_choice(reason: DrainReason) -> bool:
    """True if nobody but the policy asks for the removal."""
    return not isinstance(reason, _FORCED_ON_US)


def was_own_choice(state: ClusterState, gone: PodGone, gone_at: datetime, placed: JobPlaced) -> bool | None:
    """Return whether the pod was lost by our own choice; None: no drain and no notice explains the loss.

    The first drain that evicted the pod decides. If none did, as far as is known, all drains of its node since the
    placement have to be our own choice: streams are not ordered, so the pod's end may be read before its eviction.
    """
    own = _evicted_by_choice(state, gone.pod_uid)
    if own is not None:
        return own
    if any(record.notice.node_name == gone.node_name and record.is_active for record in state.notices.values()):
        return False
    reasons = list(_reasons_in_force(state, gone.node_name, placed.placed_at, gone_at))
    return all(map(is_own_choice, reasons)) if reasons else None


def retries_used(state: ClusterState, job: JobRecord) -> int:
    """Return how many retries the losses of the job have used up. A drain that became known after the loss gives its
    retry back."""
    lost = job.preempted
    if lost is None:
        return 0 if job.placed is None else job.placed.retries_used
    is_late = not lost.is_own_choice and lost.pod_uid is not None and _evicted_by_choice(state, lost.pod_uid) is True
    return lost.retries_used - is_late


def moves(placed: JobPlaced) -> int:
    """Return how many earlier attempts of the job were lost by our own choice."""
    return placed.attempt - 1 - placed.retries_used


def _evicted_by_choice(state: ClusterState, pod_uid: PodUid) -> bool | None:
    """Return whether the first drain that evicted the pod is our own choice; None: no known drain evicted it."""
    evictions = [
        (record.evicted[pod_uid].evicted_at, record.action_id, record.decision.reason)
        for record in state.drains.values()
        if pod_uid in record.evicted and isinstance(record.decision, DrainNode)
    ]
    return is_own_choice(min(evictions, key=lambda eviction: eviction[:2])[2]) if evictions else None


def _reasons_in_force(
    state: ClusterState, node_name: str | None, placed_at: datetime, gone_at: datetime
) -> Iterator[DrainReason]:
    for record in state.drains.values():
        if not isinstance(record.decision, DrainNode) or record.decision.node_name != node_name:
            continue
        is_since_placement = record.planned_at is not None and placed_at <= record.planned_at <= gone_at
        if is_since_placement and (record.cancelled is None or record.cancelled.cancelled_at > gone_at):
            yield record.decision.reason
