"""The policies in `deploy/policies` keep what their comments promise, shown by plans."""

from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import HOUR, MINUTE, T0, Story, given, node, offer, on_sale, pod, policy
from tests.support.telemetry import minutes

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY, NodePool
from gpu_autoscaler.core.policy.validation import policy_violations
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.defer import UtilizationUnconfirmed
from gpu_autoscaler.runtime.policies import load_policy

POLICIES = Path(__file__).resolve().parents[4] / "deploy/policies"
CONSERVATIVE = load_policy(POLICIES / "conservative.toml")
NOW = T0 + 12 * HOUR
SPOT, ON_DEMAND = offer(), offer(capacity_type=CapacityType.ON_DEMAND, usd_per_hour=30.0)


def made_of(state: ClusterState, as_of: datetime = NOW) -> Plan:
    """The plan by the conservative policy, which the plan check finds nothing against."""
    return accepted_plan(state, CONSERVATIVE, as_of)


def drains(made: Plan) -> list[str]:
    """Names of the nodes that leave."""
    return [decision.node_name for decision in made.drains]


def full_nodes(count: int, pool: str = "spot") -> list[Story]:
    """Nodes full of work."""
    of = SPOT if pool == "spot" else ON_DEMAND
    names = [f"{pool}-{number}" for number in range(count)]
    return [story for name in names for story in (node(name, of, pool=pool), pod(f"on-{name}", on=name, gpus=8))]


def test_every_shipped_policy_has_tests_of_its_promises() -> None:
    """`default.toml` promises the defaults, compared in tests/tidy/test_deploy.py."""
    assert sorted(path.name for path in POLICIES.iterdir()) == ["conservative.toml", "default.toml", "pools.toml"]


def test_nodes_are_bought_when_work_waits() -> None:
    """Spot first, and nothing before there is work: neither for a forecast nor for a minimum."""
    (decision,) = made_of(given(pod("waits", gpus=8, at=NOW), on_sale(SPOT, ON_DEMAND), as_of=NOW)).purchases
    assert isinstance(decision.reason, UnmetDemand)
    assert decision.pool == "spot"
    assert made_of(given(on_sale(SPOT, ON_DEMAND), as_of=NOW)).decisions == ()
    assert not CONSERVATIVE.forecast.is_on
    assert (CONSERVATIVE.nodes_count_min, CONSERVATIVE.headrooms, CONSERVATIVE.scheduled_limits) == (0, (), ())


@pytest.mark.parametrize("usd_per_hour", [0.5, 30.0, 500.0])
def test_empty_nodes_stay_for_half_an_hour(usd_per_hour: float) -> None:
    """At any price; by the default policy an expensive node leaves sooner."""
    state = given(node("n1", offer(usd_per_hour=usd_per_hour), pool="spot"), on_sale(SPOT), as_of=T0 + HOUR)
    assert drains(made_of(state, T0 + timedelta(minutes=29, seconds=59))) == []
    assert drains(made_of(state, T0 + 30 * MINUTE)) == ["n1"]


def test_few_nodes_leave_at_a_time() -> None:
    """One of 20; by the default policy two."""
    state = given(*(node(f"n{number}", pool="spot") for number in range(20)), on_sale(SPOT), as_of=NOW)
    assert len(drains(made_of(state))) == 1
    assert len(drains(plan(state, policy(), NOW))) == 2


def test_no_pod_is_moved_to_save_money() -> None:
    """Neither to free capacity nor to a cheaper node; by the default policy both."""
    beside = [node("n1", pool="spot"), node("n2", pool="spot"), pod("a", on="n1", gpus=1), pod("b", on="n2", gpus=1)]
    small = offer("small", gpus=1, cpu=8, memory_gib=60, usd_per_hour=1.0)
    for state in (
        given(*beside, on_sale(SPOT), as_of=NOW),
        given(node("n1", pool="spot"), pod("a", on="n1", gpus=1), on_sale(SPOT, small), as_of=NOW),
    ):
        assert plan(state, policy(pools=CONSERVATIVE.pools), NOW).decisions != ()
        assert made_of(state).decisions == ()


@pytest.mark.parametrize(("spot", "on_demand", "pool"), [(19, 0, "spot"), (20, 0, "on-demand"), (20, 29, "on-demand")])
def test_at_most_20_nodes_are_spot(spot: int, on_demand: int, pool: str) -> None:
    """The rest is on-demand."""
    nodes = [*full_nodes(spot), *full_nodes(on_demand, "on-demand")]
    waits = pod("waits", gpus=8, at=NOW)
    (decision,) = made_of(given(*nodes, waits, on_sale(SPOT, ON_DEMAND), as_of=NOW)).purchases
    assert decision.pool == pool


def test_at_most_50_nodes_are_bought() -> None:
    """Spot and on-demand together."""
    nodes = [*full_nodes(20), *full_nodes(30, "on-demand")]
    state = given(*nodes, pod("waits", gpus=8, at=NOW), on_sale(SPOT, ON_DEMAND), as_of=NOW)
    assert made_of(state).purchases == []


def test_high_utilization_is_reported_earlier_and_buys_nothing() -> None:
    """At 75 %, which the default policy does not call high."""
    used = [minutes(name, 60, busy=0.75) for name in ("spot-0", "spot-1")]
    state = given(*full_nodes(2), *used, on_sale(SPOT), as_of=T0 + HOUR)
    made = made_of(state, T0 + HOUR)
    reported = [each.reason for each in made.deferred if isinstance(each.reason, UtilizationUnconfirmed)]
    assert reported == [UtilizationUnconfirmed(utilization_ratio=0.75, utilization_ratio_max=0.7)]
    assert made.decisions == ()
    by_default = plan(state, policy(pools=CONSERVATIVE.pools), T0 + HOUR)
    assert not any(isinstance(each.reason, UtilizationUnconfirmed) for each in by_default.deferred)


def test_fields_that_are_not_set_have_the_defaults() -> None:
    """The profile changes only what it lists."""
    changed = {
        name for name in DEFAULT_POLICY.__struct_fields__
        if getattr(CONSERVATIVE, name) != getattr(DEFAULT_POLICY, name)
    }  # fmt: skip
    assert changed == {
        "nodes_count_max", "idle_seconds", "scale_down_cooldown_seconds", "disruption_ratio_max", "is_consolidation_on",
        "pools", "utilization",
    }  # fmt: skip


# ---- pools by kind of GPU

POOLS = load_policy(POLICIES / "pools.toml")
SOLD = [
    offer("a100-40", model="A100", gpu_memory_gib=40, usd_per_hour=8.0),
    offer("a100-80", model="A100", gpu_memory_gib=80, usd_per_hour=9.0),
    offer("a100-unknown", model="A100", gpu_memory_gib=None, usd_per_hour=7.0),
    offer("h100", model="H100", gpu_memory_gib=80, usd_per_hour=20.0),
    offer("l40s", model="L40S", gpu_memory_gib=45, usd_per_hour=6.0),
    offer("t4", model="T4", gpu_memory_gib=16, gpus=4, usd_per_hour=2.0),
]


@pytest.mark.parametrize(
    ("model", "gpus", "instance_type", "pool"),
    [
        ("A100", 8, "a100-80", "a100-80gb"),
        ("H100", 8, "h100", "h100-80gb"),
        ("L40S", 8, "l40s", "l40s"),
        ("T4", 4, "t4", "t4"),
        (None, 4, "t4", "t4"),
    ],
)
def test_work_gets_a_node_of_the_pool_of_its_gpu(model: str | None, gpus: int, instance_type: str, pool: str) -> None:
    """Never an A100 with 40 GB or with unknown memory; without a model the cheapest."""
    state = given(pod("waits", gpus=gpus, model=model, at=NOW), on_sale(*SOLD), as_of=NOW)
    made = accepted_plan(state, POOLS, NOW)
    (decision,) = made.purchases
    assert (decision.offer.instance_type, decision.pool) == (instance_type, pool)


def test_the_plan_check_knows_the_memory_that_a_pool_requires() -> None:
    """A purchase by a policy without the requirement violates that with it."""
    free = policy(pools=[{**msgspec.to_builtins(pool), "gpu_memory_gib_min": None} for pool in POOLS.pools])
    state = given(pod("waits", gpus=8, model="A100", at=NOW), on_sale(*SOLD[:2]), as_of=NOW)
    made = plan(state, free, NOW)
    assert made.purchases[0].offer.instance_type == "a100-40"
    assert "which requires 80 GiB a GPU" in str(check(made, state, POOLS))


def test_the_pools_have_their_sizes() -> None:
    """Eight GPUs, four of T4; every other field has its default."""
    assert [pool.gpu_count_max for pool in POOLS.pools] == [8, 8, 8, 4]
    assert msgspec.structs.replace(POOLS, pools=DEFAULT_POLICY.pools) == DEFAULT_POLICY


def test_a_memory_that_nobody_offers_is_reported() -> None:
    """With what is offered."""
    (violation,) = policy_violations(POOLS, tuple(each for each in SOLD if each.instance_type != "a100-80"))
    assert "gpu_memory_gib_min exclude each other: no offer matches pool 'a100-80gb'" in violation
    rules = policy(pools=(NodePool(name="large", gpu_memory_gib_min=141),))
    (violation,) = policy_violations(rules, tuple(SOLD))
    assert "no GPU with 141 GiB is offered; the largest has 80 GiB" in violation
