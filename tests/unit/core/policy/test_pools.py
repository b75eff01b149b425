"""Filters of pools, also as users of other tools write them."""

import pytest
from tests.support.stories import T0, given, node, offer, on_sale, pod, policy

from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import NodePool
from gpu_autoscaler.core.policy.pools import with_filters_of_labels
from gpu_autoscaler.core.policy.validation import policy_violations
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode
from gpu_autoscaler.model.offers import CapacityType, Offer

SPOT = offer("p5.48xlarge", usd_per_hour=10.0)
ON_DEMAND = offer("p5.48xlarge", capacity_type=CapacityType.ON_DEMAND, usd_per_hour=11.0)


def filtered(**fields: object) -> NodePool:
    """The pool after its labels became filters."""
    return with_filters_of_labels(policy(pools=(NodePool(name="a", **fields),))).pools[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("capacity_types", [(), (CapacityType.SPOT,), (CapacityType.SPOT, CapacityType.ON_DEMAND)])
def test_a_label_of_a_capacity_type_is_a_filter(capacity_types: tuple[CapacityType, ...]) -> None:
    """The autoscaler writes the label itself, so it leaves the labels of the pool; other labels stay."""
    pool = filtered(capacity_types=capacity_types, labels={labels.CAPACITY_TYPE: "spot", "team": "v"})
    assert (pool.capacity_types, pool.labels) == ((CapacityType.SPOT,), {"team": "v"})
    assert policy_violations(policy(pools=(pool,))) == ()


@pytest.mark.parametrize("name", ["V100", "nvidia-tesla-v100", "Tesla-V100-SXM2-16GB"])
def test_gpus_may_be_named_by_product(name: str) -> None:
    """In the filter and in the label of the model."""
    assert filtered(gpu_models=(name,)).gpu_models == ("V100",)
    assert filtered(labels={labels.GPU_MODEL: name}).gpu_models == ("V100",)


def test_a_label_that_contradicts_its_filter_is_reported() -> None:
    """It stays a label, and validation names both."""
    pool = filtered(capacity_types=(CapacityType.ON_DEMAND,), labels={labels.CAPACITY_TYPE: "spot"})
    (violation,) = policy_violations(policy(pools=(pool,)))
    assert "capacity-type=spot contradicts capacity_types (on-demand)" in violation
    (unknown,) = policy_violations(policy(pools=(filtered(labels={labels.CAPACITY_TYPE: "cheap"}),)))
    assert "capacity-type=cheap contradicts capacity_types (spot, on-demand, reserved)" in unknown


def test_a_share_of_spot_needs_spot() -> None:
    """And only spot leaves nothing for a share below 1."""
    without = policy(pools=(NodePool(name="a", spot_ratio=0.5, capacity_types=(CapacityType.ON_DEMAND,)),))
    assert "capacity_types has no spot" in policy_violations(without)[0]
    alone = policy(pools=(NodePool(name="a", spot_ratio=0.5, capacity_types=(CapacityType.SPOT,)),))
    assert "allows only spot" in policy_violations(alone)[0]


# By the mix of the cluster everything may be on-demand, which costs less than spot and its repeated work.
ALL_ON_DEMAND = {
    "mix": {"spot_ratio": 0.0, "on_demand_ratio": 1.0, "reserved_ratio": 0.0}, "lost_work_seconds": 36_000.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("spot_ratio", "present", "bought"),
    [
        (None, ON_DEMAND, "on-demand"),
        (0.5, ON_DEMAND, "spot"),
        (0.5, SPOT, "on-demand"),
        (0.4, ON_DEMAND, "spot"),
        (1.0, SPOT, "spot"),
    ],
)
def test_a_pool_has_the_share_of_spot_that_it_sets(spot_ratio: float | None, present: Offer, bought: str) -> None:
    """A second node beside one of the pool; the share of the pool takes precedence over the mix of the cluster."""
    rules = policy(pools=(NodePool(name="a", spot_ratio=spot_ratio),), spot=ALL_ON_DEMAND)
    work = pod("w", on="n1", gpus=8)
    state = given(node("n1", present, pool="a"), work, pod("x", gpus=8), on_sale(SPOT, ON_DEMAND))
    (decision,) = plan(state, rules, T0).decisions
    assert isinstance(decision, BuyNode)
    assert decision.offer.capacity_type == bought


def test_the_mix_of_the_cluster_does_not_count_pools_with_their_own() -> None:
    """Of the other pools all is spot so far: on-demand is allowed there, however much of it the first pool has."""
    mix = {"spot_ratio": 0.5, "on_demand_ratio": 0.5, "reserved_ratio": 0.0}
    own = NodePool(name="own", spot_ratio=0.0, capacity_types=(CapacityType.ON_DEMAND,))
    rules = policy(pools=(own, NodePool(name="rest", priority=1)), spot={**ALL_ON_DEMAND, "mix": mix})
    nodes = [node(name, ON_DEMAND, pool="own") for name in ("n1", "n2", "n3")]
    busy = [pod(f"on-{name}", on=name, gpus=8) for name in ("n1", "n2", "n3", "n4")]
    state = given(*nodes, node("n4", SPOT, pool="rest"), *busy, pod("x", gpus=8), on_sale(SPOT, ON_DEMAND))
    (decision,) = plan(state, rules, T0).decisions
    assert isinstance(decision, BuyNode)
    assert (decision.pool, decision.offer.capacity_type) == ("rest", "on-demand")
