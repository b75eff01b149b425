"""Validation of policies: every violation with the next step."""

import msgspec
import pytest
from tests.support.stories import offer, policy

from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY, NodePool, ScalingPolicy
from gpu_autoscaler.core.policy.validation import policy_violations
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.scheduling import Taint

SALE = (offer(), offer(capacity_type=CapacityType.ON_DEMAND))

SMALL = (NodePool(name="a", nodes_count_max=3), NodePool(name="b", nodes_count_max=4))
TWICE = (Taint("k", "NoSchedule"),) * 2


def pools(**fields: object) -> ScalingPolicy:
    """A policy with one pool of these fields."""
    return policy(pools=(msgspec.convert({"name": "a", **fields}, NodePool),))


@pytest.mark.parametrize(
    ("invalid", "expected"),
    [
        (policy(nodes_count_min=5, nodes_count_max=2), "nodes_count_min: 5 is above nodes_count_max 2"),
        (policy(job_duration_hours_default=50.0), "job_duration_hours_default: 50 is above job_duration_hours_max 48"),
        (policy(boot_seconds_max=0.0), "boot_seconds_max: with 0 every node would be terminated"),
        (policy(drain_seconds_max=0.0), "drain_seconds_max: with 0 every drain would be canceled"),
        (policy(watch_age_seconds_max=0.0), "watch_age_seconds_max: with 0 every list would be too old"),
        (policy(nodes_count_min=1, gpu_count_max=0), "gpu_count_max: 0 contradicts nodes_count_min 1"),
        (policy(nodes_count_min=1, price_micro_usd_per_hour_max=0), "price_micro_usd_per_hour_max: 0 contradicts"),
        (policy(nodes_count_min=9, pools=SMALL), "above the sum of nodes_count_max of all pools (7)"),
        (policy(pools=(NodePool(name="a"), NodePool(name="a"))), "pools: name 'a' is used 2 times"),
        (pools(gpu_models=["H10"]), "pools[0].gpu_models: unknown GPU model 'H10'; did you mean 'H100'?"),
        (pools(nodes_count_max=101), "pools[0].nodes_count_max: 101 is above nodes_count_max 100 of the cluster"),
        (pools(nodes_count_max=0), "nodes_count_max: 0 allows no node in pool 'a'"),
        (pools(gpu_count_max=0, gpu_models=["T4"]), "gpu_count_max: 0 contradicts gpu_models"),
        (pools(labels={labels.POOL: "b"}), f"{labels.POOL} is written by the autoscaler"),
        (pools(labels={labels.ZONE: "z1"}, zones=["z2"]), f"{labels.ZONE}=z1 contradicts zones"),
        (policy(pools=(NodePool(name="a", taints=TWICE),)), "k:NoSchedule is set 2 times"),
    ],
)  # fmt: skip
def test_each_contradiction_is_one_violation(invalid: ScalingPolicy, expected: str) -> None:
    """One contradiction, one sentence."""
    (violation,) = policy_violations(invalid)
    assert expected in violation


def test_all_violations_are_returned_at_once() -> None:
    """Three violations need one run."""
    invalid = policy(
        nodes_count_min=5, nodes_count_max=2, boot_seconds_max=0.0, pools=(NodePool(name="a"), NodePool(name="a"))
    )
    assert len(policy_violations(invalid)) == 3


def test_limits_of_nested_tables_are_compared() -> None:
    """A new table with a minimum and a maximum needs no code."""

    class Headroom(msgspec.Struct, frozen=True, kw_only=True):
        gpu_count_min: int = 0
        gpu_count_max: int | None = None

    class Wider(ScalingPolicy, frozen=True, kw_only=True):
        headroom: Headroom = Headroom()

    assert policy_violations(Wider()) == policy_violations(Wider(headroom=Headroom(gpu_count_min=3))) == ()
    assert policy_violations(Wider(headroom=Headroom(gpu_count_min=3, gpu_count_max=2))) == (
        "headroom.gpu_count_min: 3 is above headroom.gpu_count_max 2; lower it or raise the other",
    )


def test_a_pool_without_matching_offers_is_a_violation() -> None:
    """An unavailable zone, and filters that exclude each other."""
    zone = SALE[0].zone
    assert policy_violations(pools(zones=[zone]), SALE) == ()
    (violation,) = policy_violations(pools(zones=[f"{zone}x"]), SALE)
    assert f"pools[0].zones: '{zone}x' is not offered; did you mean '{zone}'?" in violation

    other = msgspec.structs.replace(SALE[1], instance_type="other", zone="elsewhere")
    (violation,) = policy_violations(pools(zones=[zone], instance_types=["other"]), (SALE[0], other))
    assert "pools[0]: instance_types and zones exclude each other: no offer matches pool 'a'" in violation


def test_without_offers_filters_are_not_checked() -> None:
    """Unknown offers are not an empty list of offers."""
    assert policy_violations(pools(zones=["nowhere"])) == ()
    assert policy_violations(DEFAULT_POLICY) == ()
