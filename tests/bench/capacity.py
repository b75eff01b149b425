"""V5: the decision for 10,000 pods that wait, beside Karpenter's own scheduler on the same case.

Ours are whole plans, as many as the decisions fill, from facts to decisions, with and without the plan check; and the
choice of the fleet alone. A separate check (`peers/kept.py`) verifies each fleet. Karpenter's time runs from its
topology to its claims. It takes minutes, so its answer is kept for the next run (`peers/scheduler.py`). Then one more
pod is added to the ten thousand running ones. Prices on both sides include 0.10 USD/h of overhead per node.
"""

import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from tests.bench.line import Line
from tests.bench.peers import scheduler
from tests.bench.peers.case import (
    OVERHEAD_USD_PER_HOUR,
    PODS_COUNT,
    classes,
    fleet_problem,
    made,
    missing,
    pod_story,
    state_of,
)
from tests.bench.peers.case import with_nodes as among_nodes
from tests.bench.peers.kept import Node, mistakes
from tests.support.stories import T0, given, node, on_sale, planned, pod, policy, record

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.fleet.solver import cheapest_fleet
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.decisions import BuyNode, Plan
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.defer_waits import PlanFull

TIMES_FASTER_MIN = 40.0
COST_RATIO_MAX = {"plain": 0.84, "diverse": 0.145}
ONE_MORE_DIVISOR_MIN = {"plain": 8_000.0, "diverse": 5_000.0}
NODES_COUNT = 1_000
ONE_MORE_RUNS_COUNT = 9
_POLICY = policy(nodes_count_max=10 * PODS_COUNT)

Case = dict[str, Any]
T = TypeVar("T")


def measure() -> list[Line]:
    """Both cases on an empty cluster, the plain one among 1,000 nodes, and one pod more."""
    if reason := missing():
        sys.stderr.write(f"V5 is skipped: {reason}\n")
        return []
    if without := scheduler.missing():
        sys.stderr.write(f"V5 is measured without its peer: {without}\n")
    plain, diverse = made(is_diverse=False), made(is_diverse=True)
    lines: list[Line] = []
    for name, kind, case in (
        ("V5 plain", "plain", plain),
        ("V5 nodes", "plain", among_nodes(plain, NODES_COUNT)),
        ("V5 diverse", "diverse", diverse),
    ):
        peer = None if without else scheduler.decide(case)
        assert peer is None or not peer.unplaced_count, f"the peer leaves {peer.unplaced_count} pods without a place"
        lines += _of_fleet(name, kind, case, peer)
        lines += _of_plan(name, kind, case, peer)
    return lines


def _of_fleet(name: str, kind: str, case: Case, peer: scheduler.Answer | None) -> list[Line]:
    """The choice of the fleet alone, which knows nothing of nodes that are there."""
    problem = fleet_problem(case)
    fleet, seconds, cpu_seconds = _timed(lambda: cheapest_fleet(problem))
    offers = [(of, offer) for of in case["types"] for offer in of["offers"]]
    waiting = [list(pods) for _, pods in classes(case)]
    nodes: list[Node] = [(*offers[each.offer], [waiting[number].pop() for number in each.pods]) for each in fleet.nodes]
    assert not mistakes(case, nodes), mistakes(case, nodes)[:5]
    lines = [
        Line(case=f"{name} floor", value=_usd_per_hour(nodes) / fleet.floor, unit="x", against="a floor by duality")
    ]
    if peer is not None and not case["nodes"]:
        lines += _beside(f"{name} fleet", kind, peer, _usd_per_hour(nodes), seconds, cpu_seconds)
    return lines


def _of_plan(name: str, kind: str, case: Case, peer: scheduler.Answer | None) -> list[Line]:
    """All plans, from state to decisions."""
    state = state_of(case)
    plans, seconds, cpu_seconds = _timed(lambda: plans_of(state, _POLICY, T0))
    nodes = [entry for made_plan, _ in plans for entry in _bought(case, made_plan)]
    placed = {told["name"] for _, _, pods in nodes for told in pods}
    named = {held.subject.removeprefix("pod/uid-") for held in plans[-1][0].deferred}
    assert placed | named == {told["name"] for told in case["pods"]}, "each pod is bought for, or its room is named"
    remaining = {**case, "pods": [told for told in case["pods"] if told["name"] in placed]}
    assert not mistakes(remaining, nodes), mistakes(remaining, nodes)[:5]
    violations, _, opinion_seconds = _timed(lambda: [found for entry in plans for found in check(*entry, _POLICY)])
    assert not violations, violations[:5]
    checked_seconds = cpu_seconds + opinion_seconds
    if peer is None:
        return [
            Line(case=f"{name} time", value=cpu_seconds, unit="s CPU", against=f"{checked_seconds:.3g} s with check"),
            Line(case=f"{name} cost", value=_usd_per_hour(nodes), unit="USD/h", against=f"{len(nodes)} nodes"),
            *([] if case["nodes"] else _of_one_more(name, kind, case, nodes, peer)),
        ]
    lines = _beside(name, kind, peer, _usd_per_hour(nodes), seconds, cpu_seconds)
    faster = peer.cpu_seconds / checked_seconds
    lines.append(
        Line(
            case=f"{name} checked", value=faster, unit="x faster",
            against=f"with the plan check, {opinion_seconds:.3g} s CPU more",
            target=f">= {TIMES_FASTER_MIN:g}", met=faster >= TIMES_FASTER_MIN,
        )
    )  # fmt: skip
    return lines if case["nodes"] else [*lines, *_of_one_more(name, kind, case, nodes, peer)]


def plans_of(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> list[tuple[Plan, ClusterState]]:
    """Return the plans for all that waits, each with its state: a plan holds a limited number of decisions."""
    plans: list[tuple[Plan, ClusterState]] = []
    while True:
        made_plan = plan(state, policy, as_of + timedelta(seconds=len(plans)))
        plans.append((made_plan, state))
        if not any(isinstance(held.reason, PlanFull) for held in made_plan.deferred):
            return plans
        state = fold(state, record(planned(*made_plan.decisions, plan_id=f"plan-{len(plans)}", at=made_plan.as_of)))


def _beside(
    name: str, kind: str, peer: scheduler.Answer, usd_per_hour: float, seconds: float, cpu_seconds: float
) -> list[Line]:
    """Faster by processor time, of which Karpenter's is that of all its threads; and the cost of the fleet."""
    faster, ratio = peer.cpu_seconds / cpu_seconds, usd_per_hour / peer.usd_per_hour
    wall = f"{seconds:.3g} s, {cpu_seconds:.3g} s CPU, beside {peer.seconds:.3g} s, {peer.cpu_seconds:.3g} s CPU"
    return [
        Line(
            case=f"{name} time", value=faster, unit="x faster", against=wall,
            target=f">= {TIMES_FASTER_MIN:g}", met=faster >= TIMES_FASTER_MIN,
        ),
        Line(
            case=f"{name} cost", value=ratio, unit="x",
            against=f"{usd_per_hour:,.1f} beside {peer.usd_per_hour:,.1f} USD/h of {peer.scheduler}",
            target=f"<= {COST_RATIO_MAX[kind]:g}", met=ratio <= COST_RATIO_MAX[kind],
        ),
    ]  # fmt: skip


def _of_one_more(name: str, kind: str, case: Case, nodes: list[Node], peer: scheduler.Answer | None) -> list[Line]:
    """The ten thousand run on what was bought for them; one pod more comes."""
    ground = _running(case, nodes)
    plan(ground, _POLICY, T0)
    times = []
    for number in range(ONE_MORE_RUNS_COUNT):
        state = fold(ground, record(pod(f"one-more-{number}", gpus=8, cpu=4)))
        made_plan, _, cpu_seconds = _timed(partial(plan, state, _POLICY, T0))
        assert len(made_plan.purchases) == 1, "one pod, one node"
        times.append(cpu_seconds)
    median = sorted(times)[len(times) // 2]
    if peer is None:
        return [Line(case=f"{name} one more", value=median * 1e3, unit="ms CPU", against="10,000 pods that run")]
    divisor, least = peer.cpu_seconds / median, ONE_MORE_DIVISOR_MIN[kind]
    return [
        Line(
            case=f"{name} one more", value=divisor, unit="x faster",
            against=f"{median * 1e3:.3g} ms CPU beside all of it",
            target=f">= {least:g}", met=divisor >= least,
        )
    ]  # fmt: skip


def _running(case: Case, nodes: list[Node]) -> ClusterState:
    sold = state_of({**case, "pods": [], "nodes": []}).offers
    assert sold is not None
    by_key = {offer.key: offer for offer in sold.offers}
    stories = []
    for number, (of, offer, pods) in enumerate(nodes):
        name = f"n{number:04d}"
        bought = by_key[f"{of['name']}/{offer['zone']}/{offer['capacity_type']}"]
        stories.append(node(name, bought, has_finalizer=True))
        stories += [pod_story(told, on=name) for told in pods]
    return given(*stories, on_sale(*sold.offers))


def _bought(case: Case, made_plan: Plan) -> list[Node]:
    """The plan's purchases with the pods that each names."""
    pods = {f"pod/uid-{told['name']}": told for told in case["pods"]}
    offers = {
        (of["name"], offer["zone"], offer["capacity_type"]): (of, offer)
        for of in case["types"]
        for offer in of["offers"]
    }
    nodes: list[Node] = []
    for decision in made_plan.decisions:
        assert isinstance(decision, BuyNode)
        assert isinstance(decision.reason, UnmetDemand)
        offer = decision.offer
        of, offered = offers[offer.instance_type, offer.zone, str(offer.capacity_type)]
        nodes.append((of, offered, [pods[key] for key in decision.reason.demand]))
    return nodes


def _usd_per_hour(nodes: list[Node]) -> float:
    return sum(float(offer["usd_per_hour"]) + OVERHEAD_USD_PER_HOUR for _, offer, _ in nodes)


def _timed(work: Callable[[], T]) -> tuple[T, float, float]:
    """What it returns, its seconds, and its processor's seconds."""
    began, began_cpu = time.perf_counter(), time.process_time()
    answer = work()
    return answer, time.perf_counter() - began, time.process_time() - began_cpu
