"""Policies kept as documents: what they amount to under the policy file, and which of them cannot be in force."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given as generated
from hypothesis import settings
from hypothesis import strategies as st
from tests.support.stories import T0, Told, given, on_sale, pod, policy

from gpu_autoscaler.core.check import check
from gpu_autoscaler.core.documents import resolve_documents, merge_documents, document_violations, effective_policy
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy import DEFAULT_POLICY, NodePool, ScalingPolicy
from gpu_autoscaler.core.policy_check import mistakes
from gpu_autoscaler.events.policy import PolicyDocumentsAccepted
from gpu_autoscaler.model.decisions import BuyNode
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.policy_documents import DocumentPool, PolicyDocument

FILE = policy()


def pool(name: str, **said: Any) -> DocumentPool:  # noqa: ANN401 - any field
    """A pool of a document."""
    return DocumentPool(name=name, **said)


def document(name: str, *pools: DocumentPool, age: int = 0, generation: int = 1, **said: Any) -> PolicyDocument:  # noqa: ANN401
    """A document; one pool of its own name where none is said. `age` counts backwards."""
    return PolicyDocument(
        name=name,
        uid=f"uid-{name}",
        generation=generation,
        created_at=T0 - timedelta(minutes=age),
        pools=pools or (pool(name),),
        **said,
    )


def refused(one: PolicyDocument, *others: PolicyDocument, under: ScalingPolicy = FILE) -> str:
    """Why it cannot be in force."""
    return "; ".join(document_violations(one, others, under, "sim"))


# ---- what they amount to


def test_without_documents_the_file_is_in_force_as_it_is() -> None:
    """The very same object: nothing is computed, and digests stay."""
    nobody = PolicyDocumentsAccepted(documents=(), accepted_at=T0)
    assert effective_policy(FILE, None) is effective_policy(FILE, nobody) is FILE


def test_a_documents_pools_take_the_place_of_the_pool_for_all() -> None:
    """A file that names no pools has one that buys anything; with a document nothing is bought but by its pools."""
    said = document("vision", pool("a100", gpu_models=("A100",), nodes_count_max=3, priority=7, labels={"team": "v"}))
    (one,) = merge_documents(FILE, [said]).pools
    assert one == NodePool(name="a100", gpu_models=("A100",), nodes_count_max=3, priority=7, labels={"team": "v"})


def test_pools_of_the_file_stay_beside_those_of_documents() -> None:
    """The file's own pools are somebody's word as well."""
    under = policy(pools=(NodePool(name="batch"),))
    assert [each.name for each in merge_documents(under, [document("vision")]).pools] == ["batch", "vision"]


def test_thresholds_that_a_document_says_go_before_the_files() -> None:
    """Each to its field; what it leaves out stays."""
    said = document(
        "vision", high_ratio=0.7, low_ratio=0.1, scale_up_cooldown_seconds=60.0, scale_down_cooldown_seconds=30.0,
        pending_pod_timeout_seconds=5.0, is_forecast_on=True,
    )  # fmt: skip
    found = merge_documents(FILE, [said])
    assert (found.utilization.high_ratio, found.utilization.low_ratio) == (0.7, 0.1)
    assert found.limits.scale_up_cooldown_seconds == found.utilization.cooldown_seconds == 60.0
    assert (found.scale_down_cooldown_seconds, found.pending_pod_timeout_seconds) == (30.0, 5.0)
    assert found.forecast.is_on
    assert found.queued_timeout_seconds == FILE.queued_timeout_seconds


def test_the_narrower_limit_holds() -> None:
    """Of a pool: its own, its policy's, the file's; of the cluster: all policies together, and the file's."""
    under = policy(nodes_count_max=10)
    two = [document("a", nodes_count_max=4), document("b", pool("b", nodes_count_max=99), nodes_count_max=50)]
    found = merge_documents(under, two)
    assert [each.nodes_count_max for each in found.pools] == [4, 10]
    assert found.nodes_count_max == 10
    assert merge_documents(under, two[:1]).nodes_count_max == 4


def test_the_least_of_a_policy_is_kept_in_its_pool() -> None:
    """Of one pool by that; of several by the cluster."""
    alone = merge_documents(FILE, [document("a", nodes_count_min=2)])
    assert (alone.pools[0].nodes_count_min, alone.nodes_count_min) == (2, 0)
    several = merge_documents(FILE, [document("a", pool("x", nodes_count_min=1), pool("y"), nodes_count_min=3)])
    assert ([each.nodes_count_min for each in several.pools], several.nodes_count_min) == ([1, 0], 3)


@pytest.mark.parametrize(
    ("said", "types"),
    [
        (document("a"), ()),
        (document("a", is_spot_allowed=False), (CapacityType.ON_DEMAND, CapacityType.RESERVED)),
        (document("a", pool("a", spot_ratio=0.0)), (CapacityType.ON_DEMAND, CapacityType.RESERVED)),
        (document("a", pool("a", spot_ratio=1.0)), (CapacityType.SPOT,)),
        (document("a", pool("a", capacity_type=CapacityType.RESERVED)), (CapacityType.RESERVED,)),
    ],
)
def test_what_a_pool_may_buy(said: PolicyDocument, types: tuple[CapacityType, ...]) -> None:
    """All or nothing is held exactly; a share in between is the cluster's mix."""
    assert merge_documents(FILE, [said]).pools[0].capacity_types == types


def test_the_mix_is_that_of_its_pools_by_size() -> None:
    """A pool three times as large weighs three times as much; shares add up to one."""
    said = document("a", pool("x", nodes_count_max=30, spot_ratio=0.8), pool("y", nodes_count_max=10), spot_ratio=0.4)
    mix = merge_documents(FILE, [said]).spot.mix
    assert mix.spot_ratio == pytest.approx(0.7)
    assert mix.spot_ratio + mix.on_demand_ratio + mix.reserved_ratio == pytest.approx(1.0)
    flat = merge_documents(FILE, [document("a", spot_ratio=0.5, is_multi_tier=False)]).spot.mix
    assert (flat.spot_ratio, flat.on_demand_ratio, flat.reserved_ratio) == (0.5, 0.5, 0.0)


def test_a_plan_is_made_by_what_is_in_force() -> None:
    """The same facts, one of them a document: the node is bought in its pool, and no other."""
    said = PolicyDocumentsAccepted(documents=(document("vision", pool("a")),), accepted_at=T0)
    state = given(pod("p", gpus=1), on_sale(), (Told(said, T0),))
    rules = effective_policy(FILE, state.policy_documents)
    found = plan(state, rules, T0)
    assert check(found, state, rules) == ()
    assert [each.pool for each in found.decisions if isinstance(each, BuyNode)] == ["a"]


def test_of_what_was_accepted_the_last_word_counts() -> None:
    """A repeat of an older one changes nothing."""
    new = PolicyDocumentsAccepted(documents=(document("b"),), accepted_at=T0 + timedelta(seconds=1))
    old = PolicyDocumentsAccepted(documents=(document("a"),), accepted_at=T0)
    assert given((Told(old, T0),), (Told(new, T0),), (Told(old, T0),)).policy_documents == new


# ---- which cannot be in force


@pytest.mark.parametrize(
    ("one", "others", "said"),
    [
        (document("a", provider="aws"), [], "it is meant for aws, and this system buys from sim"),
        (document("b", pool("x")), [document("a", pool("x"))], "belongs to policy a, and policy b names it as well"),
        (document("a", pool("x", gpu_models=("A1000",))), [], "there is no GPU 'A1000'"),
        (document("b", high_ratio=0.7), [document("a", high_ratio=0.8)], "scaleUpThreshold: 0.7 here, 0.8 in a"),
        (document("a", pool("x"), pool("y"), nodes_count_max=3), [document("b")], "cannot be held beside b"),
        (document("a", pool("x", labels={"topology.kubernetes.io/zone": "z"})), [], "contradicts zones"),
    ],
)
def test_what_cannot_be_in_force_is_named(one: PolicyDocument, others: list[PolicyDocument], said: str) -> None:
    """One sentence each, with the names of both."""
    assert said in refused(one, *others)


def test_a_pool_of_the_file_belongs_to_the_file() -> None:
    """Unless it is the one that stands for a file without pools."""
    assert "belongs to the policy file" in refused(
        document("default"), under=policy(pools=(NodePool(name="default", priority=1),))
    )
    assert refused(document("default")) == ""


def test_of_two_new_ones_the_later_is_refused() -> None:
    """By age, and by name within a second; the older is in force."""
    first, later = document("z", pool("x"), age=1), document("a", pool("x"))
    found = resolve_documents([later, first], (), FILE, "sim")
    assert [each.name for each in found.accepted] == ["z"]
    assert list(found.refused) == ["uid-a"]


def test_what_is_in_force_stays_until_a_good_one_takes_its_place() -> None:
    """A bad generation leaves the last good one; a document that is gone takes its pools with it."""
    good, bad = document("a", nodes_count_max=4), document("a", generation=2, provider="gcp")
    found = resolve_documents([bad], [good], FILE, "sim")
    assert (found.accepted, list(found.refused)) == ((good,), ["uid-a"])
    better = document("a", generation=3, nodes_count_max=5)
    assert resolve_documents([better], [good], FILE, "sim").accepted == (better,)
    assert resolve_documents([], [good], FILE, "sim").accepted == ()


def test_an_older_policy_does_not_take_a_pool_that_is_in_force_elsewhere() -> None:
    """Who names it later is refused, whichever object was made first; once it is given up, it is free."""
    old, young = document("old", pool("x"), age=9), document("young", pool("y"))
    grabs = document("old", pool("x"), pool("y"), age=9, generation=2)
    assert resolve_documents([grabs, young], [old, young], FILE, "sim").accepted == (old, young)
    yields = document("young", pool("z"), generation=2)
    found = resolve_documents([grabs, yields], [old, young], FILE, "sim")
    assert (found.accepted, found.refused) == ((grabs, yields), {})


_pools = st.builds(
    DocumentPool,
    name=st.sampled_from("abcdef"),
    nodes_count_min=st.integers(0, 5),
    nodes_count_max=st.none() | st.integers(5, 200),
    capacity_type=st.none() | st.sampled_from(CapacityType),
    spot_ratio=st.none() | st.floats(0, 1),
)
_documents = st.builds(
    PolicyDocument,
    name=st.sampled_from(["p", "q", "r"]),
    uid=st.sampled_from(["1", "2", "3"]),
    generation=st.integers(1, 3),
    created_at=st.just(T0),
    is_enabled=st.booleans(),
    nodes_count_min=st.integers(0, 9),
    nodes_count_max=st.none() | st.integers(9, 300),
    spot_ratio=st.none() | st.floats(0, 1),
    is_spot_allowed=st.booleans(),
    is_multi_tier=st.none() | st.booleans(),
    pools=st.lists(_pools, min_size=1, max_size=4, unique_by=lambda each: each.name).map(tuple),
)


@settings(max_examples=40, deadline=None)
@generated(
    documents=st.lists(_documents, max_size=3, unique_by=lambda each: each.uid),
    nodes_count_max=st.integers(1, 120),
    pools=st.sampled_from([DEFAULT_POLICY.pools, (NodePool(name="a"), NodePool(name="g"))]),
)
def test_what_is_accepted_amounts_to_a_policy_that_can_be_followed(
    documents: list[PolicyDocument], nodes_count_max: int, pools: tuple[NodePool, ...]
) -> None:
    """Under the file that it was judged by, and under any other that the file becomes."""
    under = policy(nodes_count_max=nodes_count_max, pools=pools)
    accepted = resolve_documents(documents, (), under, "sim").accepted
    for file in (under, policy(nodes_count_max=20), policy(pools=(NodePool(name="b"),))):
        found = merge_documents(file, accepted)
        assert mistakes(found) == ()
        assert found.nodes_count_max <= file.nodes_count_max
        assert len({each.name for each in found.pools}) == len(found.pools)
