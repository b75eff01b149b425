"""Preferences of work: satisfied where it costs nothing, else dropped in the documented order, and reported."""

from typing import Any

import msgspec
import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from tests.support.accepted import accepted_plan
from tests.support.stories import T0, Story, given, node, offer, on_sale, pod, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.demand.sources import demand
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.nodes.views import node_views
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.limit_settings import LimitsPolicy, PartLimit
from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.reasons.buy import DroppedPreference, ReplacesAtRiskNode, UnmetDemand
from gpu_autoscaler.model.scheduling import (
    AffinityPreference,
    AffinitySelector,
    LabelRequirement,
    NodePreference,
    NodeSelectorTerm,
    PodGroup,
    Preferences,
    Spread,
    Taint,
)

WEB = PodGroup(namespaces=("default",), requirements=(LabelRequirement("app", "In", ("web",)),))
A, B, C = (offer(zone=f"zone-{zone}", capacity_type=CapacityType.ON_DEMAND, usd_per_hour=8.0) for zone in "abc")


LIMITED = policy(limits=LimitsPolicy(zones=(PartLimit(name="zone-b", gpu_count_max=9),)))


def likes_zone(zone: str, weight: int = 50) -> NodePreference:
    """A preference of one zone."""
    return NodePreference(weight=weight, term=NodeSelectorTerm((LabelRequirement(labels.ZONE, "In", (zone,)),)))


def preferring(name: str, *, nodes: tuple[NodePreference, ...] = (), **changes: Any) -> Story:  # noqa: ANN401
    """A pod of the web that needs a whole node."""
    near = {key: changes.pop(key) for key in ("spreads", "apart", "together") if key in changes}
    settings: dict[str, Any] = {"gpus": 8, "labels": {"app": "web"}, **changes}
    return pod(name, preferences=Preferences(nodes=nodes, **near), **settings)


def near(key: str, weight: int = 10) -> tuple[AffinityPreference, ...]:
    """Pods of the web, near by this label."""
    return (AffinityPreference(weight=weight, selector=AffinitySelector(topology_key=key, group=WEB)),)


def spread(key: str = labels.ZONE) -> tuple[Spread, ...]:
    """As many pods of the web here as there."""
    return (Spread(topology_key=key, group=WEB),)


def bought(*stories: Story, under: ScalingPolicy | None = None) -> list[BuyNode]:
    """The purchases of the current plan, accepted by the plan check."""
    state = given(*stories)
    made = accepted_plan(state, under, T0)
    return made.purchases


def dropped(buy: BuyNode) -> tuple[DroppedPreference, ...]:
    """Preferences that the purchase does not satisfy."""
    assert isinstance(buy.reason, UnmetDemand | ReplacesAtRiskNode)
    return buy.reason.dropped


def place_of(*stories: Story) -> str:
    """The node on which the one waiting pod is placed."""
    state = given(*stories)
    draft = Draft.start(state, T0)
    (item,) = demand(state, node_views(state, T0), T0)
    (key,) = draft.free_capacity.place_most(item.shape, 1)
    return draft.free_capacity[key].name


def test_of_equal_cost_the_preferred_zone_is_bought() -> None:
    """Without a preference the smallest name; with one the preferred zone, and nothing is dropped."""
    plain = bought(pod("a", gpus=8), on_sale(A, B, C))
    (liked,) = bought(preferring("a", nodes=(likes_zone("zone-b"),)), on_sale(A, B, C))

    assert [each.offer.zone for each in plain] == ["zone-a"]
    assert liked.offer.zone == "zone-b"
    assert dropped(liked) == ()


def test_a_preference_never_costs_a_cent() -> None:
    """Zone b for a cent more is not bought; the purchase reports what was dropped and what would satisfy it."""
    dearer = offer(zone="zone-b", capacity_type=CapacityType.ON_DEMAND, usd_per_hour=8.01)
    (buy,) = bought(preferring("a", nodes=(likes_zone("zone-b"),)), on_sale(A, dearer))

    assert buy.offer == A
    (told,) = dropped(buy)
    assert told == DroppedPreference(
        preference="topology.kubernetes.io/zone zone-b", kept_by=dearer.key, price_micro_usd_per_hour=8_010_000
    )
    assert "Preference not satisfied: topology.kubernetes.io/zone zone-b" in buy.reason.sentence()


def test_the_preference_of_more_weight_wins() -> None:
    """Of alternatives the best is satisfied and the second is no loss; an unavailable one is reported as such."""
    wishes = (likes_zone("zone-b", 20), likes_zone("zone-c", 60))
    (buy,) = bought(preferring("a", nodes=wishes), on_sale(A, B, C))
    (other,) = bought(preferring("a", nodes=(likes_zone("zone-q", 60),)), on_sale(A, B, C))

    assert (buy.offer.zone, dropped(buy)) == ("zone-c", ())
    assert [each.kept_by for each in dropped(other)] == [None]


def violations_of(*stories: Story, instead: Offer, under: ScalingPolicy | None = None) -> tuple[str, ...]:
    """Violations that the plan check finds if one purchase is replaced."""
    state, under = given(*stories), under or policy()
    made = plan(state, under, T0)
    (buy,) = made.purchases
    return check(msgspec.structs.replace(made, decisions=(msgspec.structs.replace(buy, offer=instead),)), state, under)


def test_the_plan_check_finds_a_rejected_preferred_zone() -> None:
    """Zone a, though b costs the same and is preferred; pod affinity never outweighs that."""
    for beside in ({}, {"together": near(labels.ZONE, 100)}, {"apart": near(labels.ZONE, 100)}):
        waits = preferring("a", nodes=(likes_zone("zone-b"),), **beside)
        (told,) = violations_of(waits, on_sale(A, B, C), instead=A)
        assert told == f"{A.key} is bought for pod default/a, and {B.key} is preferred"


@pytest.mark.parametrize(
    ("wishes", "on_offer", "rules"),
    [
        ((likes_zone("zone-b", 20), likes_zone("zone-a", 20)), (A, B), policy()),
        ((likes_zone("zone-b"),), (A, msgspec.structs.replace(B, price_micro_usd_per_hour=8_000_001)), policy()),
        ((likes_zone("zone-b"),), (A, msgspec.structs.replace(B, boot_seconds=121.0)), policy()),
        ((likes_zone("zone-b"),), (A, B), LIMITED),
    ],
    ids=["liked alike", "a cent dearer", "slower", "its zone has a limit"],
)  # fmt: skip
def test_the_plan_check_reports_only_certain_preferences(
    wishes: tuple[NodePreference, ...], on_offer: tuple[Offer, ...], rules: ScalingPolicy
) -> None:
    """Something else may have favored the purchase."""
    assert violations_of(preferring("a", nodes=wishes), on_sale(*on_offer), instead=A, under=rules) == ()


def test_preferences_of_a_gang() -> None:
    """A pod group is bought whole in the zone that its members prefer."""
    members = (
        preferring(f"m{number}", nodes=(likes_zone("zone-c"),), annotations={labels.POD_GROUP_ANNOTATION: "g"})
        for number in range(2)
    )
    buys = bought(*members, on_sale(A, B, C))

    assert [each.offer.zone for each in buys] == ["zone-c", "zone-c"]


def test_a_preferred_spread_is_satisfied_at_equal_cost() -> None:
    """Three pods, three zones; if only one is cheap, all run there, and that is reported."""
    pods = [preferring(f"p{number}", spreads=spread()) for number in range(3)]
    dear = [offer(zone=f"zone-{zone}", capacity_type=CapacityType.ON_DEMAND, usd_per_hour=9.0) for zone in "bc"]
    even, packed = bought(*pods, on_sale(A, B, C)), bought(*pods, on_sale(A, *dear))

    assert sorted(each.offer.zone for each in even) == ["zone-a", "zone-b", "zone-c"]
    assert all(dropped(each) == () for each in even)
    assert {each.offer.zone for each in packed} == {"zone-a"}
    (unsatisfied,) = dropped(packed[-1])
    assert unsatisfied.preference == "spread over topology.kubernetes.io/zone with skew of at most 1"


@pytest.mark.parametrize(("kind", "zone"), [("apart", "zone-b"), ("together", "zone-a")])
def test_preferred_affinity_and_anti_affinity_of_purchases(kind: str, zone: str) -> None:
    """A pod of the web runs in zone a: others join it or avoid it, as they prefer."""
    there = (node("n1", of=offer(zone="zone-a")), pod("w", on="n1", gpus=8, labels={"app": "web"}))
    (buy,) = bought(
        *there,
        preferring(
            "a",
            together=near(labels.ZONE) if kind == "together" else (),
            apart=near(labels.ZONE) if kind == "apart" else (),
        ),
        on_sale(A, B),
    )

    assert buy.offer.zone == zone


def test_a_taint_is_avoided_at_equal_cost() -> None:
    """PreferNoSchedule on a pool: the other pool of equal price is used; tolerating it makes no difference."""
    marked = Taint(key="team", value="x", effect="PreferNoSchedule")
    pools = policy(pools=(NodePool(name="a-marked", taints=(marked,)), NodePool(name="b-plain")))
    only = policy(pools=(NodePool(name="a-marked", taints=(marked,)),))

    (buy,) = bought(pod("a", gpus=8), on_sale(A), under=pools)
    (had_to,) = bought(pod("a", gpus=8), on_sale(A), under=only)

    assert buy.pool == "b-plain"
    assert had_to.pool == "a-marked"
    assert [each.preference for each in dropped(had_to)] == ["no PreferNoSchedule taint (team)"]


def test_a_preferred_existing_node_is_filled_first() -> None:
    """Both fit; without a preference the fuller one is filled."""
    nodes = (
        node("n1", of=offer(zone="zone-a")),
        node("n2", of=offer(zone="zone-b")),
        pod("w", on="n1", gpus=4, labels={"app": "x"}),
    )

    assert place_of(*nodes, pod("a", gpus=4)) == "n1"
    assert place_of(*nodes, preferring("a", gpus=4, nodes=(likes_zone("zone-b"),))) == "n2"
    assert place_of(*nodes, preferring("a", gpus=4, nodes=(likes_zone("zone-q"),))) == "n1"


def test_preferences_are_dropped_in_the_documented_order() -> None:
    """Affinity first, then anti-affinity, node affinity, spread, taints to avoid."""
    marked = Taint(key="team", effect="PreferNoSchedule")
    nodes = (
        node("n1", of=offer(zone="zone-a")),
        node("n2", of=offer(zone="zone-b")),
        pod("w", on="n1", labels={"app": "web"}),
        pod("o", on="n2", gpus=1),
    )
    far, close, in_a = near(labels.ZONE), near(labels.ZONE, 90), (likes_zone("zone-a"),)

    assert place_of(*nodes, preferring("a", gpus=1, together=close)) == "n1"
    assert place_of(*nodes, preferring("a", gpus=1, together=close, apart=far)) == "n2"
    assert place_of(*nodes, preferring("a", gpus=1, apart=far, nodes=in_a)) == "n1"
    assert place_of(*nodes, preferring("a", gpus=1, nodes=in_a, spreads=spread())) == "n2"
    tainted = (*nodes[:1], node("n2", of=offer(zone="zone-b"), taints=(marked,)), *nodes[2:])
    assert place_of(*tainted, preferring("a", gpus=1, spreads=spread())) == "n1"


def test_zone_limits_precede_preferences() -> None:
    """With zone limits, no node is exchanged for one of another zone."""
    limited = policy(limits=LimitsPolicy(zones=(PartLimit(name="zone-b", nodes_count_max=1),)))
    pods = [preferring(f"p{number}", nodes=(likes_zone("zone-b"),)) for number in range(3)]

    assert len(bought(*pods, on_sale(A, B), under=limited)) == 3


_WISHES = st.sampled_from([{}, {"spreads": spread()}, {"apart": near(labels.ZONE)}, {"together": near(labels.ZONE)}])
_PODS = st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from("abcq"), _WISHES), min_size=1, max_size=8)


@settings(max_examples=25, deadline=None)
@for_all(pods=_PODS, usd_per_hour=st.lists(st.sampled_from([8.0, 8.0, 9.0]), min_size=3, max_size=3))
def test_preferences_never_add_cost(pods: list[Any], usd_per_hour: list[float]) -> None:
    """The fleet for pods with preferences costs the same as without, to the micro-dollar."""
    sold = on_sale(
        *(
            offer(zone=f"zone-{zone}", capacity_type=CapacityType.ON_DEMAND, usd_per_hour=each)
            for zone, each in zip("abc", usd_per_hour, strict=True)
        )
    )
    web = {"app": "web"}
    plain = bought(*(pod(f"p{number}", gpus=gpus, labels=web) for number, (gpus, _, _) in enumerate(pods)), sold)
    wishing = bought(
        *(
            preferring(f"p{number}", gpus=gpus, nodes=(likes_zone(f"zone-{zone}"),), **wishes)
            for number, (gpus, zone, wishes) in enumerate(pods)
        ),
        sold,
    )

    prices = [[each.offer.price_micro_usd_per_hour or 0 for each in fleet] for fleet in (plain, wishing)]
    assert sum(prices[0]) == sum(prices[1])
