"""BURST: what a fleet costs that is bought while 1,000 pods arrive, beside one that is bought when all are there.

The runtime's own rule says when to plan (`runtime/urgency.py`), on a clock of this file: so the figure is the same on
any machine. Each plan is folded before the next one, as it is where the system runs. Kubernetes is taken to speak of
each pod as soon as it is there.
"""

import sys
from datetime import timedelta

from tests.bench.line import Line
from tests.bench.peers.case import OVERHEAD_USD_PER_HOUR, Case, made, missing, pod_story, state_of
from tests.support.stories import T0, planned, policy, record

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.provisioning.batching import replan_seconds
from gpu_autoscaler.model.decisions import AnyDecision, BuyNode
from gpu_autoscaler.runtime.urgency import BatchWindow, Urgency

PODS_COUNT = 1_000
BURST_SECONDS = (0.5, 5.0)
PLAN_SECONDS = 0.05  # what one plan is taken to last
REGULAR_SECONDS = 5.0  # between plans that nobody asks for
COST_RATIO_MAX = 1.03
_POLICY = policy(nodes_count_max=10 * PODS_COUNT)


def measure() -> list[Line]:
    """A burst within half a second, and one over five."""
    if reason := missing():
        sys.stderr.write(f"BURST is skipped: {reason}\n")
        return []
    case = made(is_diverse=False)
    case = {**case, "pods": case["pods"][:PODS_COUNT]}
    after = _usd_per_hour(plan(state_of(case), _POLICY, T0).decisions)
    lines = []
    for seconds in BURST_SECONDS:
        usd_per_hour, plans_count = _bought_during(case, seconds)
        ratio = usd_per_hour / after
        lines.append(
            Line(
                case=f"BURST {seconds:g} s", value=ratio, unit="x",
                against=f"a fleet bought after it; {PODS_COUNT:,} pods, {plans_count} plans",
                target=f"<= {COST_RATIO_MAX:g}", met=ratio <= COST_RATIO_MAX,
            )
        )  # fmt: skip
    return lines


def _bought_during(case: Case, seconds: float) -> tuple[float, int]:
    """What is bought in the end, and by how many plans, where the pods come evenly over this time."""
    arrivals = [number * seconds / PODS_COUNT for number in range(PODS_COUNT)]
    state, urgency = state_of({**case, "pods": []}), Urgency(BatchWindow())
    again_at: float | None = None  # as the last plan wants it
    now, arrived, plans_count, usd_per_hour = 0.0, 0, 0, 0.0
    while arrived < PODS_COUNT or urgency.due_at is not None or again_at is not None:
        due_at = min((at for at in (urgency.due_at, again_at) if at is not None), default=None)
        if arrived < PODS_COUNT and (due_at is None or arrivals[arrived] <= due_at):
            at = T0 + timedelta(seconds=arrivals[arrived])
            state = fold(state, record(pod_story(case["pods"][arrived], at)))
            urgency.record(1, arrivals[arrived])
            arrived += 1
            continue
        assert due_at is not None
        now = max(now, due_at)
        urgency.start_tick(now)
        made = plan(state, _POLICY, T0 + timedelta(seconds=now))
        state = fold(state, record(planned(*made.decisions, plan_id=f"plan-{plans_count}", at=made.as_of)))
        again_seconds = replan_seconds(made, REGULAR_SECONDS)
        again_at = None if again_seconds is None else now + PLAN_SECONDS + again_seconds
        plans_count, usd_per_hour, now = (
            plans_count + 1,
            usd_per_hour + _usd_per_hour(made.decisions),
            now + PLAN_SECONDS,
        )
        urgency.end_tick(now)
    return usd_per_hour, plans_count


def _usd_per_hour(decisions: tuple[AnyDecision, ...]) -> float:
    prices = [decision.offer.price_micro_usd_per_hour for decision in decisions if isinstance(decision, BuyNode)]
    return sum((price or 0) / 1e6 + OVERHEAD_USD_PER_HOUR for price in prices)
