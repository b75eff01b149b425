"""A gang that needs one NVLink domain, rack or zone gets all its members inside one, or none."""

from typing import Any

import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import T0, Story, given, job, node, offer, on_sale, pod, policy

from gpu_autoscaler.core.policy.policy import NodePool
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.reasons.defer import NoDomainFits
from gpu_autoscaler_services.scheduler.manifest import release_patch

CLIQUE = "nvidia.com/gpu.clique"


def planned(*stories: Story, **rules: Any) -> Plan:  # noqa: ANN401 - fields of the policy
    """The plan, accepted by the plan check."""
    state, under = given(*stories), policy(**rules)
    return accepted_plan(state, under, T0)


def in_clique(name: str, clique: str) -> Story:
    """A node of eight GPUs in an NVLink domain."""
    return node(name, labels={CLIQUE: clique})


def test_a_job_starts_in_the_clique_with_capacity_for_all() -> None:
    """Three nodes fit; two of them share a clique."""
    there = (*in_clique("n1", "a"), *in_clique("n2", "b"), *in_clique("n3", "b"))
    state = given(there, job("train", members=2, within=CLIQUE))
    (placement,) = schedule(state, policy(), T0).placements
    assert sorted(placement.node_names) == ["n2", "n3"]
    queued = state.jobs[placement.job_id].queued
    assert queued is not None
    patch = release_patch(queued.spec, placement.node_names, state)
    affinity = patch["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert {"key": CLIQUE, "operator": "In", "values": ["b"]} in term["matchExpressions"]


def test_without_a_clique_for_all_nothing_starts_or_is_bought() -> None:
    """The clique of a new node is unknown."""
    made = planned(in_clique("n1", "a"), in_clique("n2", "b"), job("train", members=2, within=CLIQUE), on_sale())
    assert made.purchases == []
    held = {each.subject: each.reason for each in made.deferred}
    assert held["job/train"] == NoDomainFits(topology_key=CLIQUE, domains_count=2, members_count=2)


def in_zones(*limits: tuple[str, int]) -> dict[str, Any]:
    """A policy with limits of zones."""
    return {"limits": {"zones": [{"name": name, "nodes_count_max": most} for name, most in limits]}}


@pytest.mark.parametrize(("rules", "zone"), [({}, "zone-b"), (in_zones(("zone-b", 1)), "zone-a")])
def test_a_gang_is_bought_in_the_cheapest_zone_within_limits(rules: dict[str, Any], zone: str) -> None:
    """All of it in one zone."""
    sale = on_sale(offer(zone="zone-a"), offer(zone="zone-b", usd_per_hour=9.0))
    made = planned(job("train", members=3, within=labels.ZONE), sale, **rules)
    assert [each.offer.zone for each in made.purchases] == [zone] * 3


def test_without_a_domain_a_limit_spreads_the_gang_over_zones() -> None:
    """The same job without the requirement."""
    sale = on_sale(offer(zone="zone-a"), offer(zone="zone-b", usd_per_hour=9.0))
    made = planned(job("train", members=3), sale, **in_zones(("zone-b", 1)))
    assert {each.offer.zone for each in made.purchases} == {"zone-a", "zone-b"}


@pytest.mark.parametrize("changes", [{}, {"members": 3, "member_count_min": 1}])
def test_a_single_member_is_bought_for_beside_a_node_without_a_domain(changes: dict[str, Any]) -> None:
    """Members that join later could not be placed beside it, so the queue does not start the job there."""
    stories = (node("own", is_ours=False), job("train", within="rack", **changes), on_sale())
    rules = {"pools": [{"name": "r1", "labels": {"rack": "r1"}}]}
    assert schedule(given(*stories), policy(**rules), T0).placements == ()

    made = planned(*stories, **rules)

    assert [each.pool for each in made.purchases] == ["r1"]


@pytest.mark.parametrize("key", labels.GANG_WITHIN)
def test_pod_groups_request_a_domain_by_annotation(key: str) -> None:
    """Ours, or Kueue's; existing nodes in the domain count."""
    named, near = {labels.POD_GROUP_LABELS[0]: "train"}, {key: "rack"}
    members = tuple(told for number in range(2) for told in pod(f"m{number}", gpus=8, labels=named, annotations=near))
    racks = (NodePool(name="r1", labels={"rack": "r1"}, nodes_count_max=1), NodePool(name="r2", labels={"rack": "r2"}))
    made = planned(members, on_sale(), pools=racks)
    assert [dict(each.labels)["rack"] for each in made.purchases] == ["r2", "r2"]
    alone = planned(members, on_sale(), pools=racks[:1])
    assert alone.purchases == []
    assert {type(each.reason) for each in alone.deferred} == {NoDomainFits}
