"""A policy that cannot be meant is refused whole, with every mistake named and the next step."""

import msgspec
import pytest
from tests.support.stories import offer, policy

from gpu_autoscaler.core.policy import DEFAULT_POLICY, NodePool, ScalingPolicy
from gpu_autoscaler.core.policy_check import mistakes
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
    ("wrong", "told"),
    [
        (policy(nodes_count_min=5, nodes_count_max=2), "nodes_count_min: 5 is above nodes_count_max 2"),
        (policy(job_duration_hours_default=50.0), "job_duration_hours_default: 50 is above job_duration_hours_max 48"),
        (policy(boot_seconds_max=0.0), "boot_seconds_max: with 0 every node would be given back"),
        (policy(drain_seconds_max=0.0), "drain_seconds_max: with 0 every drain would be given up"),
        (policy(watch_age_seconds_max=0.0), "watch_age_seconds_max: with 0 every picture of the world"),
        (policy(nodes_count_min=1, gpu_count_max=0), "gpu_count_max: 0 contradicts nodes_count_min 1"),
        (policy(nodes_count_min=1, price_micro_usd_per_hour_max=0), "price_micro_usd_per_hour_max: 0 contradicts"),
        (policy(nodes_count_min=9, pools=SMALL), "above what all pools may hold together (7)"),
        (policy(pools=(NodePool(name="a"), NodePool(name="a"))), "pools: the name 'a' is used 2 times"),
        (pools(gpu_models=["H10"]), "pools[0].gpu_models: unknown GPU model 'H10'; did you mean 'H100'?"),
        (pools(nodes_count_max=101), "pools[0].nodes_count_max: 101 is above the cluster's nodes_count_max 100"),
        (pools(nodes_count_max=0), "nodes_count_max: 0 lets nothing into pool 'a'"),
        (pools(gpu_count_max=0, gpu_models=["T4"]), "gpu_count_max: 0 contradicts gpu_models"),
        (pools(labels={labels.POOL: "b"}), f"{labels.POOL} is written by the autoscaler itself"),
        (pools(labels={labels.ZONE: "z1"}, zones=["z2"]), f"{labels.ZONE}=z1 contradicts zones"),
        (policy(pools=(NodePool(name="a", taints=TWICE),)), "k:NoSchedule stands there 2 times"),
    ],
)  # fmt: skip
def test_each_contradiction_is_named(wrong: ScalingPolicy, told: str) -> None:
    """One mistake, one sentence; nothing else is said."""
    (said,) = mistakes(wrong)
    assert told in said


def test_all_mistakes_are_named_at_once() -> None:
    """Nobody starts five times to find five."""
    wrong = policy(
        nodes_count_min=5, nodes_count_max=2, boot_seconds_max=0.0, pools=(NodePool(name="a"), NodePool(name="a"))
    )
    assert len(mistakes(wrong)) == 3


def test_a_limit_in_a_table_below_is_held_against_its_pair() -> None:
    """A new table with a minimum and a maximum needs no line here."""

    class Headroom(msgspec.Struct, frozen=True, kw_only=True):
        gpu_count_min: int = 0
        gpu_count_max: int | None = None

    class Wider(ScalingPolicy, frozen=True, kw_only=True):
        headroom: Headroom = Headroom()

    assert mistakes(Wider()) == mistakes(Wider(headroom=Headroom(gpu_count_min=3))) == ()
    assert mistakes(Wider(headroom=Headroom(gpu_count_min=3, gpu_count_max=2))) == (
        "headroom.gpu_count_min: 3 is above headroom.gpu_count_max 2; lower the one or raise the other",
    )


def test_a_pool_that_nothing_for_sale_can_reach_is_a_mistake() -> None:
    """A zone that is not sold with the nearest that is; filters that are each fine, but never together."""
    zone = SALE[0].zone
    assert mistakes(pools(zones=[zone]), SALE) == ()
    (said,) = mistakes(pools(zones=[f"{zone}x"]), SALE)
    assert f"pools[0].zones: '{zone}x' is not for sale; did you mean '{zone}'?" in said

    other = msgspec.structs.replace(SALE[1], instance_type="other", zone="elsewhere")
    (said,) = mistakes(pools(zones=[zone], instance_types=["other"]), (SALE[0], other))
    assert "pools[0]: instance_types and zones exclude each other: no offer can reach pool 'a'" in said


def test_what_is_not_known_to_be_for_sale_is_no_mistake() -> None:
    """No list of offers is not an empty list."""
    assert mistakes(pools(zones=["nowhere"])) == ()
    assert mistakes(DEFAULT_POLICY) == ()
