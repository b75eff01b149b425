"""What a plan depends on, so that a tick that would say nothing new need not be computed.

Time goes in as how many of the instants at which a comparison turns have passed. The list of those instants mirrors the
core's comparisons with `as_of`; a new one belongs here as well. That runs with and without skipping say the same facts
is tested: a forgotten instant shows there.
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterator
from datetime import datetime, timedelta

from gpu_autoscaler.core.freshness import stale_instances, stale_watch
from gpu_autoscaler.core.joins import INSTANCE_MISSING_SECONDS_MAX
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.runtime.projection import StateView

_REMEMBERED_COUNT = 8  # of the last states' turns; a few processes look at a few states at a time


class _Same:
    """Equal only to the very same things, by identity: `fold` keeps what did not change."""

    __slots__ = ("things",)

    def __init__(self, *things: object) -> None:
        self.things = things

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and all(a is b for a, b in zip(self.things, other.things, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(map(id, self.things)))


_turns: dict[_Same, list[datetime]] = {}


def plan_inputs(view: StateView, policy: ScalingPolicy, now: datetime) -> Hashable:
    """What a plan depends on: what is known, what is fresh, and which deadlines have passed."""
    state = view.state
    known = _Same(
        state.pods, state.budgets, state.busy_until, state.nodes, state.nodes_gone, state.instances, state.usable,
        state.notices, state.offers, state.jobs, state.orders, state.drains, policy,
    )  # fmt: skip
    stale, old = stale_watch(state, policy, now), stale_instances(state, policy, now)
    return (
        known,
        bisect_right(_turns_of(known, state, policy), now),
        None if stale is None else stale.source,
        old is None,
        state.instances_listed_at is None,
        _missing(state),
        state.last_plan_sequence,
    )


def _turns_of(known: _Same, state: ClusterState, policy: ScalingPolicy) -> list[datetime]:
    found = _turns.get(known)
    if found is None:
        if len(_turns) >= _REMEMBERED_COUNT:
            _turns.clear()
        found = _turns[known] = sorted(_instants(state, policy))
    return found


def _instants(state: ClusterState, policy: ScalingPolicy) -> Iterator[datetime]:
    idle, young = timedelta(seconds=policy.idle_seconds_max), timedelta(seconds=policy.scale_down_cooldown_seconds)
    boot = timedelta(seconds=policy.boot_seconds_max)
    for usable in state.usable.values():
        yield from (usable.since + idle, usable.since + young)
    for busy_until in state.busy_until.values():
        yield busy_until + idle
    for instance in state.instances.values():
        yield instance.launched_at + boot
    for order in state.orders.values():
        if order.decision is not None:
            yield order.decision.deadline_at
        if order.ordered is not None:
            yield order.ordered.deadline_at
        if order.refused is not None:
            yield order.refused.retry_at
    for drain in state.drains.values():
        if drain.started is not None:
            yield drain.started.deadline_at


def _missing(state: ClusterState) -> frozenset[str]:
    """Instances that the cloud's lists have left out for longer than they may lag."""
    listed_at = state.instances_listed_at
    if listed_at is None:
        return frozenset()
    limit = timedelta(seconds=INSTANCE_MISSING_SECONDS_MAX)
    launched = {
        order.launched.provider_id: order.launched.launched_at
        for order in state.orders.values()
        if order.launched is not None
    }
    seen = {**launched, **state.instances_seen_at}
    return frozenset(one for one, seen_at in seen.items() if listed_at - seen_at > limit)
