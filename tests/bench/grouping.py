"""GROUPS: one plan for 10,000 waiting pods, half of them in groups that are spread over zones or kept apart.

The members of a group differ in size, zone, GPU model and capacity type. Beside it the same pods without rules.
"""

import gc
import time

from tests.bench.line import Line
from tests.support.mixed_groups import mixed_pods
from tests.support.stories import MINUTE, T0, given, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.decisions import Plan

PODS_COUNT = 10_000
RUNS_COUNT = 3
RATIO_MAX = 2.5
_POLICY = policy(nodes_count_max=PODS_COUNT)
_AS_OF = T0 + 2 * MINUTE


def measure() -> list[Line]:
    """The pods that the plan serves, as the plan check accepts it, and its time."""
    alone_ms = min(_plan_ms(given(mixed_pods(PODS_COUNT, seed, is_grouped=False)))[0] for seed in range(RUNS_COUNT))
    states = [given(mixed_pods(PODS_COUNT, seed)) for seed in range(RUNS_COUNT)]
    runs = [(*_plan_ms(state), state) for state in states]
    ms = min(plan_ms for plan_ms, _, _ in runs)
    served_count = min(_served_count(made, state) for _, made, state in runs)
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


def _plan_ms(state: ClusterState) -> tuple[float, Plan]:
    gc.collect()
    began = time.process_time()
    made = plan(state, _POLICY, _AS_OF)
    return (time.process_time() - began) * 1e3, made


def _served_count(made: Plan, state: ClusterState) -> int:
    """The pods that the plan places; none where the plan check refuses it."""
    return 0 if check(made, state, _POLICY) else PODS_COUNT - len({deferral.subject for deferral in made.deferred})
