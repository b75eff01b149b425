"""What work would like: kept where it costs nothing, else dropped in the stated order, and told."""

from typing import Any

import msgspec
import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
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
    LabelRequirement,
    Nearness,
    NearPreference,
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


def liking(name: str, *, nodes: tuple[NodePreference, ...] = (), **changes: Any) -> Story:  # noqa: ANN401
    """A pod of the web that needs a whole node."""
    near = {key: changes.pop(key) for key in ("spreads", "apart", "together") if key in changes}
    settings: dict[str, Any] = {"gpus": 8, "labels": {"app": "web"}, **changes}
    return pod(name, preferences=Preferences(nodes=nodes, **near), **settings)


def near(key: str, weight: int = 10) -> tuple[NearPreference, ...]:
    """Pods of the web, near by this label."""
    return (NearPreference(weight=weight, nearness=Nearness(topology_key=key, group=WEB)),)


def spread(key: str = labels.ZONE) -> tuple[Spread, ...]:
    """As many pods of the web here as there."""
    return (Spread(topology_key=key, group=WEB),)


def bought(*stories: Story, under: ScalingPolicy | None = None) -> list[BuyNode]:
    """What the plan of now buys; the second opinion has nothing against it."""
    state = given(*stories)
    under = under or policy()
    made = plan(state, under, T0)
    assert check(made, state, under) == ()
    return [each for each in made.decisions if isinstance(each, BuyNode)]


def dropped(buy: BuyNode) -> tuple[DroppedPreference, ...]:
    """What the purchase does not keep."""
    assert isinstance(buy.reason, UnmetDemand | ReplacesAtRiskNode)
    return buy.reason.dropped


def place_of(*stories: Story) -> str:
    """The name of the node on which the one pod that waits is placed."""
    state = given(*stories)
    draft = Draft.start(state, T0)
    (item,) = demand(state, node_views(state, T0), T0)
    (key,) = draft.free_capacity.place_most(item.shape, 1)
    return draft.free_capacity[key].name


def test_of_equal_cost_the_preferred_zone_is_bought() -> None:
    """Without a wish the smallest name; with one the zone that is liked, and nothing is dropped."""
    plain = bought(pod("a", gpus=8), on_sale(A, B, C))
    (liked,) = bought(liking("a", nodes=(likes_zone("zone-b"),)), on_sale(A, B, C))

    assert [each.offer.zone for each in plain] == ["zone-a"]
    assert liked.offer.zone == "zone-b"
    assert dropped(liked) == ()


def test_a_preference_never_costs_a_cent() -> None:
    """Zone b for a cent more is not bought; the purchase says what was dropped and what would have kept it."""
    dearer = offer(zone="zone-b", capacity_type=CapacityType.ON_DEMAND, usd_per_hour=8.01)
    (buy,) = bought(liking("a", nodes=(likes_zone("zone-b"),)), on_sale(A, dearer))

    assert buy.offer == A
    (told,) = dropped(buy)
    assert told == DroppedPreference(
        preference="topology.kubernetes.io/zone zone-b", kept_by=dearer.key, price_micro_usd_per_hour=8_010_000
    )
    assert "Preferred but not kept: topology.kubernetes.io/zone zone-b" in buy.reason.sentence()


def test_the_weightier_preference_wins_and_its_rival_is_no_loss() -> None:
    """Of alternatives the best is kept, and the second best is not missed; one that nobody sells is told as such."""
    wishes = (likes_zone("zone-b", 20), likes_zone("zone-c", 60))
    (buy,) = bought(liking("a", nodes=wishes), on_sale(A, B, C))
    (other,) = bought(liking("a", nodes=(likes_zone("zone-q", 60),)), on_sale(A, B, C))

    assert (buy.offer.zone, dropped(buy)) == ("zone-c", ())
    assert [each.kept_by for each in dropped(other)] == [None]


def found(*stories: Story, instead: Offer, under: ScalingPolicy | None = None) -> tuple[str, ...]:
    """What the second opinion says of a plan whose one purchase is another one."""
    state, under = given(*stories), under or policy()
    made = plan(state, under, T0)
    (buy,) = (each for each in made.decisions if isinstance(each, BuyNode))
    return check(msgspec.structs.replace(made, decisions=(msgspec.structs.replace(buy, offer=instead),)), state, under)


def test_the_second_opinion_sees_a_liked_zone_that_was_passed_over() -> None:
    """Zone a, where b costs the same and is liked better; pods that are near or far never outweigh that."""
    for beside in ({}, {"together": near(labels.ZONE, 100)}, {"apart": near(labels.ZONE, 100)}):
        waits = liking("a", nodes=(likes_zone("zone-b"),), **beside)
        (told,) = found(waits, on_sale(A, B, C), instead=A)
        assert told == f"{A.key} is bought for pod default/a, and {B.key} is liked better"


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
def test_the_second_opinion_holds_its_tongue_where_it_is_not_sure(
    wishes: tuple[NodePreference, ...], on_offer: tuple[Offer, ...], rules: ScalingPolicy
) -> None:
    """Whatever else may have spoken for the one that was bought."""
    assert found(liking("a", nodes=wishes), on_sale(*on_offer), instead=A, under=rules) == ()


def test_a_gang_prefers_as_a_pod_does() -> None:
    """A group of pods is bought in the zone that its members like, whole."""
    members = (
        liking(f"m{number}", nodes=(likes_zone("zone-c"),), annotations={labels.POD_GROUP_ANNOTATION: "g"})
        for number in range(2)
    )
    buys = bought(*members, on_sale(A, B, C))

    assert [each.offer.zone for each in buys] == ["zone-c", "zone-c"]


def test_pods_that_like_an_even_spread_get_it_where_zones_cost_the_same() -> None:
    """Three pods, three zones; where only one is cheap, all go there and it is told."""
    pods = [liking(f"p{number}", spreads=spread()) for number in range(3)]
    dear = [offer(zone=f"zone-{zone}", capacity_type=CapacityType.ON_DEMAND, usd_per_hour=9.0) for zone in "bc"]
    spread, packed = bought(*pods, on_sale(A, B, C)), bought(*pods, on_sale(A, *dear))

    assert sorted(each.offer.zone for each in spread) == ["zone-a", "zone-b", "zone-c"]
    assert all(dropped(each) == () for each in spread)
    assert {each.offer.zone for each in packed} == {"zone-a"}
    assert [each.preference for each in dropped(packed[-1])] == ["even over topology.kubernetes.io/zone within 1"]


@pytest.mark.parametrize(("kind", "zone"), [("apart", "zone-b"), ("together", "zone-a")])
def test_pods_that_like_to_be_near_or_far_are_bought_so(kind: str, zone: str) -> None:
    """A pod of the web runs in zone a: its like goes there, or just not there, as it says."""
    there = (node("n1", of=offer(zone="zone-a")), pod("w", on="n1", gpus=8, labels={"app": "web"}))
    (buy,) = bought(
        *there,
        liking(
            "a",
            together=near(labels.ZONE) if kind == "together" else (),
            apart=near(labels.ZONE) if kind == "apart" else (),
        ),
        on_sale(A, B),
    )

    assert buy.offer.zone == zone


def test_a_taint_to_be_avoided_is_avoided_where_that_is_free() -> None:
    """PreferNoSchedule on a pool: the other pool of equal price is taken, and tolerating it makes no difference."""
    marked = Taint(key="team", value="x", effect="PreferNoSchedule")
    pools = policy(pools=(NodePool(name="a-marked", taints=(marked,)), NodePool(name="b-plain")))
    only = policy(pools=(NodePool(name="a-marked", taints=(marked,)),))

    (buy,) = bought(pod("a", gpus=8), on_sale(A), under=pools)
    (had_to,) = bought(pod("a", gpus=8), on_sale(A), under=only)

    assert buy.pool == "b-plain"
    assert had_to.pool == "a-marked"
    assert [each.preference for each in dropped(had_to)] == ["no node that would rather have others (team)"]


def test_on_nodes_that_are_there_the_liked_one_comes_first() -> None:
    """Both would do; without a wish the fuller one is filled."""
    nodes = (
        node("n1", of=offer(zone="zone-a")),
        node("n2", of=offer(zone="zone-b")),
        pod("w", on="n1", gpus=4, labels={"app": "x"}),
    )

    assert place_of(*nodes, pod("a", gpus=4)) == "n1"
    assert place_of(*nodes, liking("a", gpus=4, nodes=(likes_zone("zone-b"),))) == "n2"
    assert place_of(*nodes, liking("a", gpus=4, nodes=(likes_zone("zone-q"),))) == "n1"


def test_preferences_are_dropped_in_the_stated_order() -> None:
    """Near pods go first, then far ones, then liked nodes, then even spread, then taints to be avoided."""
    marked = Taint(key="team", effect="PreferNoSchedule")
    nodes = (
        node("n1", of=offer(zone="zone-a")),
        node("n2", of=offer(zone="zone-b")),
        pod("w", on="n1", labels={"app": "web"}),
        pod("o", on="n2", gpus=1),
    )
    far, close, in_a = near(labels.ZONE), near(labels.ZONE, 90), (likes_zone("zone-a"),)

    assert place_of(*nodes, liking("a", gpus=1, together=close)) == "n1"
    assert place_of(*nodes, liking("a", gpus=1, together=close, apart=far)) == "n2"
    assert place_of(*nodes, liking("a", gpus=1, apart=far, nodes=in_a)) == "n1"
    assert place_of(*nodes, liking("a", gpus=1, nodes=in_a, spreads=spread())) == "n2"
    tainted = (*nodes[:1], node("n2", of=offer(zone="zone-b"), taints=(marked,)), *nodes[2:])
    assert place_of(*tainted, liking("a", gpus=1, spreads=spread())) == "n1"


def test_limits_of_zones_are_worth_more_than_wishes() -> None:
    """Where zones have limits, no node is exchanged for one of another zone."""
    limited = policy(limits=LimitsPolicy(zones=(PartLimit(name="zone-b", nodes_count_max=1),)))
    pods = [liking(f"p{number}", nodes=(likes_zone("zone-b"),)) for number in range(3)]

    assert len(bought(*pods, on_sale(A, B), under=limited)) == 3


_WISHES = st.sampled_from([{}, {"spreads": spread()}, {"apart": near(labels.ZONE)}, {"together": near(labels.ZONE)}])
_PODS = st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from("abcq"), _WISHES), min_size=1, max_size=8)


@settings(max_examples=25, deadline=None)
@for_all(pods=_PODS, usd_per_hour=st.lists(st.sampled_from([8.0, 8.0, 9.0]), min_size=3, max_size=3))
def test_no_wish_ever_costs_anything(pods: list[Any], usd_per_hour: list[float]) -> None:
    """The fleet for pods with wishes costs what the fleet for the same pods without any costs, to the micro-dollar."""
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
            liking(f"p{number}", gpus=gpus, nodes=(likes_zone(f"zone-{zone}"),), **wishes)
            for number, (gpus, zone, wishes) in enumerate(pods)
        ),
        sold,
    )

    prices = [[each.offer.price_micro_usd_per_hour or 0 for each in fleet] for fleet in (plain, wishing)]
    assert sum(prices[0]) == sum(prices[1])
