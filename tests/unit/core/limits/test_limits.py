"""Trimming: whole transactions are dropped with those that depend on them, lowest priority first."""

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


def bought(name: str, *, transaction: str | None = None, depends_on: tuple[str, ...] = ()) -> Purchase:
    """A node of eight GPUs for 10 USD per hour, for the pod of this name."""
    reason = UnmetDemand(demand=(f"pod/{name}",), offers_considered=1, price_micro_usd_per_hour=10_000_000)
    return Purchase(
        decision=purchase(name, reason=reason), transaction=transaction or name, depends_on=frozenset(depends_on)
    )


def kept(*purchases: Purchase, nodes_count_max: int) -> list[str]:
    """The purchases that are kept, of purchases ordered by priority."""
    draft = Draft.start(given(), T0).adding(purchases=purchases)
    trimmed = trim(draft, policy(nodes_count_max=nodes_count_max))
    dropped = {subject.subject for subject in trimmed.deferred}
    left = [each.decision.action_id for each in trimmed.purchases]
    assert dropped == {f"pod/{each.decision.action_id}" for each in purchases if each.decision.action_id not in left}
    return list(left)


def test_the_lowest_priority_is_dropped_first() -> None:
    """Two of three fit the limit."""
    assert kept(bought("a"), bought("b"), bought("c"), nodes_count_max=2) == ["a", "b"]


def test_a_gang_is_dropped_whole() -> None:
    """A gang of two exceeds the limit; a smaller later purchase is kept."""
    gang = [bought("b1", transaction="b"), bought("b2", transaction="b")]

    assert kept(bought("a"), *gang, bought("c"), nodes_count_max=2) == ["a", "c"]


def test_dependent_purchases_are_dropped_too() -> None:
    """A gang with members on nodes of another gang would be incomplete."""
    gang = [bought("a1", transaction="a"), bought("a2", transaction="a")]

    assert kept(
        *gang, bought("b", depends_on=("a",)), bought("c", depends_on=("b",)), bought("d"), nodes_count_max=1
    ) == ["d"]


def test_nodes_of_others_do_not_count() -> None:
    """Limits apply to bought nodes."""
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
def test_each_limit_has_its_figures(limits: dict[str, object], reason: object) -> None:
    """One node of eight GPUs runs; one more exceeds the limit."""
    account = LimitUsage(Draft.start(given(node("n1")), T0).views, policy(**limits))

    assert account.excess("default", offer(), BillingScope("research")) == reason


def test_a_gpu_limit_does_not_apply_to_nodes_without_gpus() -> None:
    """Even if it is exceeded already."""
    account = LimitUsage(Draft.start(given(node("n1")), T0).views, policy(gpu_count_max=4))

    assert account.excess("default", offer("m5.large", model=None), BillingScope()) is None


def test_a_node_of_unknown_price_is_not_free() -> None:
    """Under a price limit nothing is bought while a price is unknown."""
    views = Draft.start(given(node("n1")), T0).views
    unpriced = tuple(msgspec.structs.replace(view, price_micro_usd_per_hour=None) for view in views)
    account = LimitUsage(unpriced, policy(price_micro_usd_per_hour_max=100_000_000))

    assert account.excess("default", offer(), BillingScope()) == PriceUnknown(offers=("n1",))


def test_purchases_can_be_taken_back() -> None:
    """In any order, without a rest."""
    for order in itertools.permutations((1, 2, -3)):
        account = LimitUsage((), policy(nodes_count_max=1))
        for count in order:
            account.add("default", offer(), BillingScope(), count)
        assert account.excess("default", offer(), BillingScope()) is None
