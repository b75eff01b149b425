"""Trimming: whole transactions go, with those that count on them, lowest priority first."""

import itertools

import msgspec
import pytest
from tests.support.stories import T0, given, node, offer, policy, purchase

from gpu_autoscaler.core.demand.items import BillingScope
from gpu_autoscaler.core.draft import Draft, Purchase
from gpu_autoscaler.core.limits.limits import LimitUsage, trim
from gpu_autoscaler.core.policy.limit_settings import LimitsPolicy, PartLimit
from gpu_autoscaler.core.policy.policy import NodePool
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.defer import PriceUnknown
from gpu_autoscaler.model.reasons.defer_limits import GpusLimit, HourlyPriceLimit, NodesLimit


def bought(name: str, *, transaction: str | None = None, needs: tuple[str, ...] = ()) -> Purchase:
    """A node of eight GPUs for 10 USD an hour, for the pod of this name."""
    reason = UnmetDemand(demand=(f"pod/{name}",), offers_considered=1, price_micro_usd_per_hour=10_000_000)
    return Purchase(decision=purchase(name, reason=reason), transaction=transaction or name, needs=frozenset(needs))


def kept(*purchases: Purchase, nodes_count_max: int) -> list[str]:
    """What is left of these purchases, which come by priority."""
    draft = Draft.start(given(), T0).adding(purchases=purchases)
    trimmed = trim(draft, policy(nodes_count_max=nodes_count_max))
    dropped = {subject.subject for subject in trimmed.deferred}
    left = [each.decision.action_id for each in trimmed.purchases]
    assert dropped == {f"pod/{each.decision.action_id}" for each in purchases if each.decision.action_id not in left}
    return list(left)


def test_the_lowest_priority_goes_first() -> None:
    """Two of three fit under the limit."""
    assert kept(bought("a"), bought("b"), bought("c"), nodes_count_max=2) == ["a", "b"]


def test_half_a_gang_is_never_left() -> None:
    """The gang of two would pass the limit, so both go; what is smaller and comes later stays."""
    gang = [bought("b1", transaction="b"), bought("b2", transaction="b")]

    assert kept(bought("a"), *gang, bought("c"), nodes_count_max=2) == ["a", "c"]


def test_what_counts_on_a_trimmed_purchase_goes_with_it() -> None:
    """A gang that has members on another gang's nodes would be left with half of its room."""
    gang = [bought("a1", transaction="a"), bought("a2", transaction="a")]

    assert kept(*gang, bought("b", needs=("a",)), bought("c", needs=("b",)), bought("d"), nodes_count_max=1) == ["d"]


def test_foreign_nodes_do_not_count() -> None:
    """The limits are about what we buy."""
    views = Draft.start(given(node("ours"), node("foreign", is_ours=False)), T0).views

    assert LimitUsage(views, policy()).nodes_count == 1


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"nodes_count_max": 1}, NodesLimit(nodes_count=1, nodes_count_max=1)),
        ({"gpu_count_max": 15}, GpusLimit(gpu_count=8, gpu_count_max=15)),
        (
            {"price_micro_usd_per_hour_max": 19_999_999},
            HourlyPriceLimit(price_micro_usd_per_hour=10_000_000, price_micro_usd_per_hour_max=19_999_999),
        ),
        (
            {"pools": (NodePool(name="default", nodes_count_max=1),)},
            NodesLimit(nodes_count=1, nodes_count_max=1, owner="pool/default"),
        ),
        (
            {"pools": (NodePool(name="default", gpu_count_max=8),)},
            GpusLimit(gpu_count=8, gpu_count_max=8, owner="pool/default"),
        ),
        (
            {"limits": LimitsPolicy(zones=(PartLimit(name="zone-a", nodes_count_max=1),))},
            NodesLimit(nodes_count=1, nodes_count_max=1, owner="zone/zone-a"),
        ),
        (
            {"limits": LimitsPolicy(projects=(PartLimit(name="research", gpu_count_max=7),))},
            GpusLimit(gpu_count=0, gpu_count_max=7, owner="project/research"),
        ),
    ],
)
def test_each_limit_is_named_with_its_figures(limits: dict[str, object], reason: object) -> None:
    """One node of eight GPUs runs; one more passes the limit."""
    account = LimitUsage(Draft.start(given(node("n1")), T0).views, policy(**limits))

    assert account.excess("default", offer(), BillingScope("research")) == reason


def test_a_limit_of_gpus_is_no_limit_for_nodes_without() -> None:
    """Even where it is passed already."""
    account = LimitUsage(Draft.start(given(node("n1")), T0).views, policy(gpu_count_max=4))

    assert account.excess("default", offer("m5.large", model=None), BillingScope()) is None


def test_a_node_of_unknown_price_is_not_free() -> None:
    """Under a limit of money nothing more is bought while a price is unknown."""
    views = Draft.start(given(node("n1")), T0).views
    unpriced = tuple(msgspec.structs.replace(view, price_micro_usd_per_hour=None) for view in views)
    account = LimitUsage(unpriced, policy(price_micro_usd_per_hour_max=100_000_000))

    assert account.excess("default", offer(), BillingScope()) == PriceUnknown(offers=("n1",))


def test_what_is_taken_back_is_not_counted() -> None:
    """Adding and taking back in any order leaves nothing behind."""
    for order in itertools.permutations((1, 2, -3)):
        account = LimitUsage((), policy(nodes_count_max=1))
        for count in order:
            account.add("default", offer(), BillingScope(), count)
        assert account.excess("default", offer(), BillingScope()) is None
