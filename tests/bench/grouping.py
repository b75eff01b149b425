"""GROUPS: the first plan for 10,000 waiting pods, half of them in groups that are spread over zones or kept apart.

The members of a group differ in size, zone, GPU model and capacity type. Beside it the same pods without rules. The
plans that follow serve the pods that the first one has no place for among its decisions.
"""

import gc
import time

from tests.bench.capacity import plans_of
from tests.bench.line import Line
from tests.support.mixed_groups import mixed_pods
from tests.support.stories import MINUTE, T0, given, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.reasons.defer_waits import CapacityExpected

PODS_COUNT = 10_000
RUNS_COUNT = 3
RATIO_MAX = 2.5
_POLICY = policy(nodes_count_max=PODS_COUNT)
_AS_OF = T0 + MINUTE


def measure() -> list[Line]:
    """The pods that the plans serve, as the plan check accepts them, and the time of the first."""
    alone_ms = min(_plan_ms(given(mixed_pods(PODS_COUNT, seed, is_grouped=False))) for seed in range(RUNS_COUNT))
    states = [given(mixed_pods(PODS_COUNT, seed)) for seed in range(RUNS_COUNT)]
    ms, served_count = min(map(_plan_ms, states)), min(map(_served_count, states))
    told = f"{PODS_COUNT:,} pods, 5 zone spreads, 12 host anti-affinities"
    alone = f"the same pods without rules ({alone_ms:.3g} ms CPU)"
    return [
        Line(
            case="GROUPS served", value=served_count, unit="pods", against=told,
            target=f">= {PODS_COUNT:,}", met=served_count >= PODS_COUNT,
        ),
        Line(
            case="GROUPS", value=ms / alone_ms, unit="x", against=alone,
            target=f"<= {RATIO_MAX:g}", met=ms <= RATIO_MAX * alone_ms,
        ),
    ]  # fmt: skip


def _plan_ms(state: ClusterState) -> float:
    gc.collect()
    began = time.process_time()
    plan(state, _POLICY, _AS_OF)
    return (time.process_time() - began) * 1e3


def _served_count(state: ClusterState) -> int:
    """The pods that the plans place; none where the plan check refuses one."""
    plans = plans_of(state, _POLICY, _AS_OF)
    if any(check(made, before, _POLICY) for made, before in plans):
        return 0
    waiting = {held.subject for held in plans[-1][0].deferred if not isinstance(held.reason, CapacityExpected)}
    return PODS_COUNT - len(waiting)
