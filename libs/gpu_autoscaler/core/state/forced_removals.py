"""Removals by force within the last hour, and whether the brake holds further ones. Read from the records of removals.

Counted are the removals that a plan marked (`model/decisions.py: ForcedRemoval`), from the instant of that plan on.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.next_change import has_lasted
from gpu_autoscaler.core.state.state import ClusterState, DrainRecord
from gpu_autoscaler.events.policy import PolicyDirectiveLifted
from gpu_autoscaler.model.decisions import DrainNode, ForcedRemoval, ReleaseInstance
from gpu_autoscaler.model.ids import ActionId, NodeUid
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.reasons.defer_limits import BrakeTripped

WINDOW = timedelta(hours=1)


class PastRemoval(NamedTuple):
    """A removal by force, and the plan's instant."""

    planned_at: datetime
    forced: ForcedRemoval
    node: NodeUid | ActionId  # its node, or the order of its instance


def tripped_brake(state: ClusterState) -> BrakeTripped | None:
    """Return the trip of the brake that nobody has ended."""
    brake = state.brake
    return None if brake is None or brake.tripped_at.isoformat() in state.brake_releases else brake


def removed_by_force(state: ClusterState, as_of: datetime) -> tuple[PastRemoval, ...]:
    """Return the removals by force that count now: of the last hour, and after the last trip that a person ended.

    An instant ahead of `as_of` counts: it is of a clock that was ahead.
    """
    resumed_at = max(_trips_ended(state.brake_releases, as_of), default=None)
    return tuple(
        past
        for past in _marked(state.drains)
        if not has_lasted(past.planned_at, WINDOW.total_seconds(), as_of)
        and (resumed_at is None or past.planned_at > resumed_at)
    )


def _trips_ended(releases: Mapping[str, PolicyDirectiveLifted], as_of: datetime) -> Iterator[Instant]:
    for release in releases.values():
        if release.tripped_at is not None and release.tripped_at <= as_of:
            yield release.tripped_at


@cached_by_identity(4)
def _marked(drains: Mapping[ActionId, DrainRecord]) -> tuple[PastRemoval, ...]:
    """Return all marked removals, by plan."""
    marked = [
        PastRemoval(record.planned_at, decision.forced, _node(decision))
        for record in drains.values()
        if (decision := record.decision) is not None and decision.forced is not None and record.planned_at is not None
    ]
    return tuple(sorted(marked, key=lambda past: (past.planned_at, past.node)))


def _node(decision: DrainNode | ReleaseInstance) -> NodeUid | ActionId:
    return decision.node_uid if isinstance(decision, DrainNode) else decision.order_action_id


def is_recent(record: DrainRecord, newest: datetime) -> bool:
    """True if a removal, also one that has ended, still counts as forced at this instant."""
    is_marked = record.decision is not None and record.decision.forced is not None
    return is_marked and record.planned_at is not None and record.planned_at > newest - WINDOW
