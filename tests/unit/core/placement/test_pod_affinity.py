"""Pod affinity, anti-affinity and topology spread over hosts and zones."""

from collections import Counter
from typing import Any

import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import HOUR, MINUTE, T0, given, node, offer, on_sale, pod, policy, provider_id
from tests.support.timed_facts import Story, TimedFact

from gpu_autoscaler.events.spot import SpotRebalanceRecommended
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.reasons.defer import PodConstraintsViolated
from gpu_autoscaler.model.scheduling import (
    AffinitySelector,
    LabelRequirement,
    NodeDemands,
    NodeSelectorTerm,
    PodAffinitySpec,
    PodGroup,
    Spread,
    Taint,
)

WEB = PodGroup(namespaces=("default",), requirements=(LabelRequirement("app", "In", ("web",)),))
CACHE = PodGroup(namespaces=("default",), requirements=(LabelRequirement("app", "In", ("cache",)),))
EVEN = PodAffinitySpec(spreads=(Spread(topology_key=labels.ZONE, group=WEB),))
NOON = T0 + HOUR


def web(name: str, pod_affinity: PodAffinitySpec, *, app: str = "web", **changes: Any) -> Story:  # noqa: ANN401 - of `pod`
    """A pod with a label to select it by."""
    return pod(name, labels={"app": app}, pod_affinity=pod_affinity, **changes)


def apart(key: str, group: PodGroup = WEB) -> PodAffinitySpec:
    """Anti-affinity to the group."""
    return PodAffinitySpec(apart=(AffinitySelector(topology_key=key, group=group),))


def together(key: str, group: PodGroup) -> PodAffinitySpec:
    """Affinity to the group."""
    return PodAffinitySpec(together=(AffinitySelector(topology_key=key, group=group),))


def in_zones(*zones: str, **changes: Any) -> Story:  # noqa: ANN401 - of `offer`
    """Offers of 8 GPUs in these zones."""
    return on_sale(*(offer(zone=zone, **changes) for zone in zones), at=NOON)


def planned(*stories: Story) -> Plan:
    """The plan at noon."""
    state = given(*stories, as_of=NOON)
    return accepted_plan(state, policy(), NOON)


def zones_bought(made: Plan) -> Counter[str]:
    """Nodes bought, by zone."""
    return Counter(each.offer.zone for each in made.purchases)


def test_spread_pods_are_bought_for_in_every_zone() -> None:
    """Three pods that would share one node get a node in each of three zones."""
    made = planned(in_zones("z-a", "z-b", "z-c"), *(web(f"w{n}", EVEN) for n in range(3)))

    assert zones_bought(made) == {"z-a": 1, "z-b": 1, "z-c": 1}


def test_running_pods_count_in_a_spread() -> None:
    """With two of them in one zone the next two go to the other, although the first has capacity."""
    here = node("n1", offer(zone="z-a"))
    made = planned(
        in_zones("z-a", "z-b"), here, *(web(f"r{n}", EVEN, on="n1") for n in range(2)), web("w0", EVEN), web("w1", EVEN)
    )

    assert zones_bought(made) == {"z-b": 1}


def test_pods_on_a_node_that_takes_no_more_work_count_in_a_spread() -> None:
    """The cloud recommends to leave the node, but its pods stay: the cheaper zone has two already."""
    here = node("n1", offer(zone="z-a"))
    advice = SpotRebalanceRecommended(provider_id=provider_id("buy-n1"), noticed_at=NOON)
    made = planned(
        on_sale(offer(zone="z-a"), offer(zone="z-b", usd_per_hour=30.0), at=NOON),
        here,
        (TimedFact(advice, NOON),),
        *(web(f"r{n}", EVEN, on="n1") for n in range(2)),
        web("w0", EVEN),
    )

    assert zones_bought(made) == {"z-b": 1}


@pytest.mark.parametrize("changes", [{"is_cordoned": True}, {"is_ready": False}], ids=["cordoned", "not ready"])
def test_pods_on_a_node_that_takes_none_now_count_in_a_spread(changes: dict[str, Any]) -> None:
    """Nothing is bought in the only offered zone: it has two pods already, and the zone of the closed node has one."""
    made = planned(
        in_zones("z-a"),
        node("n1", offer(zone="z-a")),
        node("n2", offer(zone="z-b"), is_ours=False, **changes),
        *(web(f"r{n}", EVEN, on="n1") for n in range(2)),
        web("r2", EVEN, on="n2"),
        web("w0", EVEN),
    )

    assert not made.purchases
    assert [deferral.reason.tag() for deferral in made.deferred] == [PodConstraintsViolated.tag()]


@pytest.mark.parametrize("is_over_tainted_nodes", [True, False])
def test_a_zone_of_tainted_nodes_alone_counts_in_a_spread_by_its_policy(*, is_over_tainted_nodes: bool) -> None:
    """As kube-scheduler does with nodeTaintsPolicy Ignore, its default, and does not with Honor."""
    rule = Spread(topology_key=labels.ZONE, group=WEB, is_over_tainted_nodes=is_over_tainted_nodes)
    made = planned(
        in_zones("z-a"),
        node("n1", offer(zone="z-a")),
        node("n2", offer(zone="z-b"), is_ours=False, taints=(Taint(key="team", effect="NoSchedule"),)),
        web("r0", PodAffinitySpec(spreads=(rule,)), on="n1"),
        web("w0", PodAffinitySpec(spreads=(rule,)), gpus=8),
    )

    assert bool(made.purchases) is not is_over_tainted_nodes


def test_a_wider_skew_needs_fewer_zones() -> None:
    """With a skew of two both run on one node in the cheaper zone; at equal prices they spread."""
    wide = PodAffinitySpec(spreads=(Spread(topology_key=labels.ZONE, group=WEB, skew_count_max=2),))
    cheaper_b = on_sale(offer(zone="z-a"), offer(zone="z-b", usd_per_hour=9.0), at=NOON)

    assert zones_bought(planned(cheaper_b, web("w0", wide), web("w1", wide))) == {"z-b": 1}
    assert zones_bought(planned(in_zones("z-a", "z-b"), web("w0", wide), web("w1", wide))) == {"z-a": 1, "z-b": 1}


@pytest.mark.parametrize(("zones", "bought_count"), [(("z-a", "z-b"), 2), (("z-a", "z-b", "z-c"), 4)])
def test_too_few_zones_hold_a_pod_each(zones: tuple[str, ...], bought_count: int) -> None:
    """A spread over at least three zones: in two of them the skew counts from none."""
    spread = Spread(topology_key=labels.ZONE, group=WEB, domains_count_min=3)
    pods = (web(f"w{n}", PodAffinitySpec(spreads=(spread,)), gpus=8, at=T0 + n * MINUTE) for n in range(4))
    made = planned(in_zones(*zones), *pods)

    assert zones_bought(made).total() == bought_count
    assert len(made.deferred) == 4 - bought_count


def test_members_pinned_to_a_zone_move_the_others_of_their_group() -> None:
    """The oldest pod would take the cheapest zone; four later ones may run in no other. All are even for each pod."""
    sale = on_sale(offer(zone="z-a", usd_per_hour=8.0), offer(zone="z-b"), offer(zone="z-c"), at=NOON)
    there = NodeDemands(node_selector=((labels.ZONE, "z-a"),))
    pinned = (web(f"p{n}", EVEN, gpus=8, demands=there, at=T0 + 5 * MINUTE) for n in range(4))
    made = planned(sale, *(web(f"w{n}", EVEN, gpus=8) for n in range(6)), *pinned)

    assert zones_bought(made) == {"z-a": 4, "z-b": 3, "z-c": 3}


def test_later_members_of_lower_priority_count_in_a_spread() -> None:
    """They are served later, and have no other zone."""
    there = NodeDemands(node_selector=((labels.ZONE, "z-a"),))
    pinned = (web(f"p{n}", EVEN, gpus=8, demands=there) for n in range(3))
    made = planned(in_zones("z-a", "z-b"), *(web(f"w{n}", EVEN, gpus=8, priority=100) for n in range(3)), *pinned)

    assert zones_bought(made) == {"z-a": 3, "z-b": 3}


def test_pods_without_the_rule_count_in_a_spread() -> None:
    """They go where they are cheapest, and the others keep even with them."""
    sale = on_sale(offer(zone="z-a", usd_per_hour=8.0), offer(zone="z-b"), at=NOON)
    made = planned(
        sale,
        *(web(f"w{n}", EVEN, gpus=8) for n in range(3)),
        *(web(f"f{n}", PodAffinitySpec(), gpus=8, at=T0 + MINUTE) for n in range(3)),
    )

    assert zones_bought(made) == {"z-a": 3, "z-b": 3}


def test_pods_with_anti_affinity_get_a_host_each() -> None:
    """Four that would fit on half a node get four nodes."""
    made = planned(in_zones("z-a"), *(web(f"w{n}", apart(labels.HOSTNAME)) for n in range(4)))

    assert zones_bought(made) == {"z-a": 4}


def test_anti_affinity_of_running_pods_applies_to_new_ones() -> None:
    """The new pod has no constraint of its own: the host with capacity is closed to it."""
    here = (*node("n1", offer(zone="z-a")), *web("r0", apart(labels.HOSTNAME, CACHE), on="n1"))

    assert zones_bought(planned(in_zones("z-a"), here, web("c0", PodAffinitySpec(), app="cache"))).total() == 1
    assert zones_bought(planned(in_zones("z-a"), here, web("w0", PodAffinitySpec()))).total() == 0


def test_pods_outside_the_selector_do_not_matter() -> None:
    """Equal labels in another namespace."""
    there = (*node("n1", offer(zone="z-a")), *pod("r0", on="n1", labels={"app": "web"}, namespace="other"))

    assert not zones_bought(planned(in_zones("z-a"), there, web("w0", apart(labels.HOSTNAME))))


def test_a_pod_without_an_allowed_zone_is_deferred() -> None:
    """Three pods that need a zone each, and offers in two zones."""
    made = planned(in_zones("z-a", "z-b"), *(web(f"w{n}", apart(labels.ZONE), at=T0 + n * MINUTE) for n in range(3)))

    assert zones_bought(made) == {"z-a": 1, "z-b": 1}
    held = [each for each in made.deferred if isinstance(each.reason, PodConstraintsViolated)]
    assert [each.subject for each in held] == ["pod/uid-w2"]
    assert "apart by topology.kubernetes.io/zone" in held[0].sentence()


def test_a_pod_is_bought_for_in_the_domain_of_its_affinity() -> None:
    """In the more expensive zone, as the cheaper one has no such pod."""
    here = (*node("n1", offer(zone="z-b")), *web("r0", PodAffinitySpec(), on="n1", app="cache", gpus=8))
    on_offer = on_sale(offer(zone="z-a", usd_per_hour=1.0), offer(zone="z-b", usd_per_hour=9.0), at=NOON)

    assert zones_bought(planned(on_offer, here, web("w0", together(labels.ZONE, CACHE)))) == {"z-b": 1}


def test_the_first_pod_of_a_group_may_be_alone() -> None:
    """Pods with affinity to their own kind start somewhere, and the others follow."""
    made = planned(in_zones("z-a", "z-b"), *(web(f"w{n}", together(labels.ZONE, WEB), gpus=8) for n in range(3)))

    assert sorted(zones_bought(made).values()) == [3]


def test_a_pod_without_its_affinity_is_never_bought_for() -> None:
    """No node helps it before that other pod runs."""
    made = planned(in_zones("z-a"), web("w0", together(labels.ZONE, CACHE)))

    assert not zones_bought(made)
    assert [type(each.reason) for each in made.deferred] == [PodConstraintsViolated]


def test_one_of_several_models_is_enough() -> None:
    """Of the accepted models the cheapest is bought; others, however cheap, are not."""
    sale = on_sale(
        offer(instance_type="t", model="T4", usd_per_hour=1.0),
        offer(instance_type="a", model="A100", usd_per_hour=9.0),
        offer(instance_type="h", model="H100", usd_per_hour=5.0),
        at=NOON,
    )
    made = planned(sale, pod("w0", gpu_models=("A100", "H100")))

    assert [each.offer.gpu_model for each in made.purchases] == ["H100"]


def test_shapes_of_one_group_are_spread_together_in_one_fleet() -> None:
    """Nine pods of three shapes: three in each of three zones, and no zone has more nodes than it needs."""
    pods = [web(f"w{n}", EVEN, gpus=2 + n % 3, at=T0 + n * MINUTE) for n in range(9)]
    made = planned(in_zones("z-a", "z-b", "z-c"), *pods)

    assert not made.deferred
    assert sum(zones_bought(made).values()) <= 6
    assert set(zones_bought(made)) == {"z-a", "z-b", "z-c"}


def test_pods_with_anti_affinity_share_hosts_with_others() -> None:
    """Three with anti-affinity and three without fit on three nodes together."""
    apart_pods = [web(f"w{n}", apart(labels.HOSTNAME), gpus=4) for n in range(3)]
    others = [pod(f"p{n}", gpus=4) for n in range(3)]

    assert zones_bought(planned(in_zones("z-a"), *apart_pods, *others)) == {"z-a": 3}


def test_excluded_zones_do_not_count_for_the_spread() -> None:
    """A pod restricted to two zones is spread over these, whatever runs in a third."""
    bound = NodeDemands(node_affinity=(NodeSelectorTerm((LabelRequirement(labels.ZONE, "In", ("z-a", "z-b")),)),))
    third = node("n3", offer(zone="z-c"))
    pods = [web(f"w{n}", EVEN, demands=bound, gpus=8) for n in range(4)]
    made = planned(in_zones("z-a", "z-b", "z-c"), third, *pods)

    assert zones_bought(made) == {"z-a": 2, "z-b": 2}


def test_an_unavailable_zone_defers_the_rest_of_the_spread() -> None:
    """Nodes exist in two zones, only one of which is available: pods beyond the skew are deferred."""
    there = (*node("n1", offer(zone="z-a")), *node("n2", offer(zone="z-b")))
    full = tuple(each for name in ("n1", "n2") for each in pod(f"full-{name}", on=name, gpus=8))
    made = planned(in_zones("z-a"), there, full, *(web(f"w{n}", EVEN, gpus=8) for n in range(3)))

    assert zones_bought(made) == {"z-a": 1}
    assert {type(each.reason) for each in made.deferred if each.step == "cover_demand"} == {PodConstraintsViolated}
