"""Plans for states that are near those of a run: facts were lost, quotas lowered, nodes and pods changed, prices moved,
or another policy holds. The plan check accepts each plan: planner and check read even odd states alike.
"""

import random
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import reduce
from typing import TypeVar

import pytest
from msgspec.structs import replace

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.checked_plan import CheckedPlan, checked_plan
from gpu_autoscaler.core.next_change import plain
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.job import JobPlaced, JobPreempted
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.sim.actors.policies import policy_of
from gpu_autoscaler.sim.actors.teams import with_teams
from gpu_autoscaler.sim.simulation import Setting
from gpu_autoscaler_services.scaler import service
from gpu_autoscaler_services.simulate import run_one

K = TypeVar("K", bound=str)
TRIES_COUNT = 4  # beside each plan of a run
CHANGES_COUNT_MAX = 4  # of one state
POLICIES_COUNT = 20


def _any_key(table: Mapping[K, object], rng: random.Random) -> K | None:
    return rng.choice(sorted(table)) if table else None


def _lower_quota(state: ClusterState, rng: random.Random) -> ClusterState:
    key, ratio = _any_key(state.quotas, rng), rng.choice((0.0, 0.5, 2.0))
    if key is None:
        return state
    hard = tuple((name, int(amount * ratio)) for name, amount in state.quotas[key].hard_milli)
    return replace(state, quotas={**state.quotas, key: replace(state.quotas[key], hard_milli=hard)})


def _change_node(state: ClusterState, rng: random.Random) -> ClusterState:
    key = _any_key(state.nodes, rng)
    if key is None:
        return state
    changed = rng.choice((replace(state.nodes[key], is_cordoned=True), replace(state.nodes[key], is_ready=False), None))
    others = {uid: known for uid, known in state.nodes.items() if uid != key}
    return replace(state, nodes=others if changed is None else {**others, key: changed})


def _change_pod(state: ClusterState, rng: random.Random) -> ClusterState:
    key = _any_key(state.pods, rng)
    if key is None:
        return state
    pod = state.pods[key]
    pending = replace(pod, phase="pending", node_name=None, unschedulable_since=pod.created_at)
    others = {uid: known for uid, known in state.pods.items() if uid != key}
    return replace(state, pods=rng.choice((others, {**others, key: pending})))


def _placed(state: ClusterState) -> dict[JobId, JobPlaced]:
    """The last placements of jobs that have not ended."""
    open_jobs = {job_id: job.placed for job_id, job in state.jobs.items() if job.finished is None}
    return {job_id: placed for job_id, placed in open_jobs.items() if placed is not None}


def _lose_placement(state: ClusterState, rng: random.Random) -> ClusterState:
    key = _any_key(_placed(state), rng)
    return state if key is None else replace(state, jobs={**state.jobs, key: replace(state.jobs[key], placed=None)})


def _lose_attempt(state: ClusterState, rng: random.Random) -> ClusterState:
    placed = _placed(state)
    key = _any_key(placed, rng)
    if key is None:
        return state
    lost = JobPreempted(job_id=key, attempt=placed[key].attempt, cause="gone", preempted_at=placed[key].placed_at)
    pods = {uid: pod for uid, pod in state.pods.items() if pod.job_id != key}
    return replace(state, jobs={**state.jobs, key: replace(state.jobs[key], preempted=lost)}, pods=pods)


def _lose_order(state: ClusterState, rng: random.Random) -> ClusterState:
    key = _any_key(state.orders, rng)
    return replace(state, orders={action_id: order for action_id, order in state.orders.items() if action_id != key})


def _move_prices(state: ClusterState, rng: random.Random) -> ClusterState:
    if state.offers is None:
        return state
    ratio = rng.choice((0.3, 3.0))
    offers = tuple(
        replace(offer, price_micro_usd_per_hour=int(offer.price_micro_usd_per_hour * ratio))
        if offer.price_micro_usd_per_hour is not None and rng.random() < 0.5
        else offer
        for offer in state.offers.offers
    )
    return replace(state, offers=replace(state.offers, offers=offers))


CHANGES: tuple[Callable[[ClusterState, random.Random], ClusterState], ...] = (
    _lower_quota, _change_node, _change_pod, _lose_placement, _lose_attempt, _lose_order, _move_prices
)  # fmt: skip


def _policies(rng: random.Random) -> list[ScalingPolicy]:
    """Policies of other runs; half of them have teams."""
    seeds = [rng.randrange(2**32) for _ in range(POLICIES_COUNT)]
    return [with_teams(policy_of(seed), seed) if number % 2 else policy_of(seed) for number, seed in enumerate(seeds)]


@pytest.mark.sweep
@pytest.mark.parametrize(("seed", "world"), [(2003, "teams"), (2009, "teams"), (2101, "plain")])
def test_plans_of_other_states_are_accepted(monkeypatch: pytest.MonkeyPatch, seed: int, world: str) -> None:
    """Beside each plan of a run, some of the state changed, most of them under another policy."""
    rng = random.Random(seed)  # noqa: S311 - a case, not a secret
    policies, refused, tried_count = _policies(rng), list[str](), 0

    def beside(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> CheckedPlan:
        """Plan as the run does, and for other states."""
        nonlocal tried_count
        for _ in range(TRIES_COUNT):
            tried_count += 1
            changes, rules = rng.choices(CHANGES, k=rng.randint(1, CHANGES_COUNT_MAX)), rng.choice((policy, *policies))
            other = reduce(lambda changed, change: change(changed, rng), changes, state)
            found = check(plan(other, rules, plain(as_of)), other, rules)
            names = " ".join(change.__name__ for change in changes)
            refused.extend(f"{plain(as_of)} {names}: {violation}" for violation in found)
        return checked_plan(state, policy, as_of)

    monkeypatch.setattr(service, "checked_plan", beside)
    result = run_one(Setting(seed=seed, hours=2.0, has_teams=world == "teams"))

    assert refused == []
    assert result.violations == ()
    assert tried_count > 200 * TRIES_COUNT
