"""Policy documents: merging with the policy file, and rejection."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given as generated
from hypothesis import settings
from hypothesis import strategies as st
from tests.support.accepted import accepted_plan
from tests.support.stories import T0, TimedFact, given, on_sale, pod, policy

from gpu_autoscaler.core.policy.documents import (
    document_violations,
    effective_policy,
    merge_documents,
    resolve_documents,
)
from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY, NodePool, ScalingPolicy
from gpu_autoscaler.core.policy.validation import policy_violations
from gpu_autoscaler.events.policy import PolicyDocumentsAccepted
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.policy_documents import DocumentPool, PolicyDocument

FILE = policy()


def pool(name: str, **fields: Any) -> DocumentPool:  # noqa: ANN401 - any field
    """A pool of a document."""
    return DocumentPool(name=name, **fields)


def document(name: str, *pools: DocumentPool, age: int = 0, generation: int = 1, **fields: Any) -> PolicyDocument:  # noqa: ANN401
    """A document; by default with one pool of its name. `age` in minutes."""
    return PolicyDocument(
        name=name,
        uid=f"uid-{name}",
        generation=generation,
        created_at=T0 - timedelta(minutes=age),
        pools=pools or (pool(name),),
        **fields,
    )


def violations_of(checked: PolicyDocument, *others: PolicyDocument, under: ScalingPolicy = FILE) -> str:
    """Why the document is rejected."""
    return "; ".join(document_violations(checked, others, under, "sim"))


# ---- merging


def test_without_documents_the_policy_file_is_unchanged() -> None:
    """The same object: nothing is computed, and digests stay."""
    none = PolicyDocumentsAccepted(documents=(), accepted_at=T0)
    assert effective_policy(FILE, None) is effective_policy(FILE, none) is FILE


def test_pools_of_a_document_replace_the_default_pool() -> None:
    """The default pool allows every offer; with a document only its pools are bought for."""
    vision = document("vision", pool("a100", gpu_models=("A100",), nodes_count_max=3, priority=7, labels={"team": "v"}))
    (merged,) = merge_documents(FILE, [vision]).pools
    assert merged == NodePool(name="a100", gpu_models=("A100",), nodes_count_max=3, priority=7, labels={"team": "v"})


def test_pools_of_the_file_are_kept() -> None:
    """Pools of the file come first."""
    under = policy(pools=(NodePool(name="batch"),))
    assert [each.name for each in merge_documents(under, [document("vision")]).pools] == ["batch", "vision"]


def test_thresholds_of_a_document_override_the_file() -> None:
    """Thresholds that it does not set are kept."""
    vision = document(
        "vision", high_ratio=0.7, low_ratio=0.1, scale_up_cooldown_seconds=60.0, scale_down_cooldown_seconds=30.0,
        pending_pod_timeout_seconds=5.0, is_forecast_on=True,
    )  # fmt: skip
    result = merge_documents(FILE, [vision])
    assert (result.utilization.high_ratio, result.utilization.low_ratio) == (0.7, 0.1)
    assert result.limits.scale_up_cooldown_seconds == result.utilization.cooldown_seconds == 60.0
    assert (result.scale_down_cooldown_seconds, result.pending_pod_timeout_seconds) == (30.0, 5.0)
    assert result.forecast.is_on
    assert result.queued_timeout_seconds == FILE.queued_timeout_seconds


def test_the_idle_time_of_a_document_is_that_of_its_pools() -> None:
    """Unless a pool sets its own; pools of the file keep that of the file."""
    under = policy(pools=(NodePool(name="file"),))
    vision = document("vision", pool("x", idle_seconds=60.0), pool("y"), idle_seconds=300.0)
    merged = merge_documents(under, [vision]).pools
    assert [(each.name, each.idle_seconds) for each in merged] == [("file", None), ("x", 60.0), ("y", 300.0)]


def test_the_stricter_limit_applies() -> None:
    """Of a pool: its own, its document's, the file's; of the cluster: the sum of the documents, and the file's."""
    under = policy(nodes_count_max=10)
    two = [document("a", nodes_count_max=4), document("b", pool("b", nodes_count_max=99), nodes_count_max=50)]
    result = merge_documents(under, two)
    assert [merged.nodes_count_max for merged in result.pools] == [4, 10]
    assert result.nodes_count_max == 10
    assert merge_documents(under, two[:1]).nodes_count_max == 4


def test_the_minimum_of_a_document_applies_to_its_pool() -> None:
    """With several pools it applies to the cluster."""
    alone = merge_documents(FILE, [document("a", nodes_count_min=2)])
    assert (alone.pools[0].nodes_count_min, alone.nodes_count_min) == (2, 0)
    several = merge_documents(FILE, [document("a", pool("x", nodes_count_min=1), pool("y"), nodes_count_min=3)])
    assert ([each.nodes_count_min for each in several.pools], several.nodes_count_min) == ([1, 0], 3)


@pytest.mark.parametrize(
    ("vision", "types"),
    [
        (document("a"), ()),
        (document("a", is_spot_allowed=False), (CapacityType.ON_DEMAND, CapacityType.RESERVED)),
        (document("a", pool("a", spot_ratio=0.0)), (CapacityType.ON_DEMAND, CapacityType.RESERVED)),
        (document("a", pool("a", spot_ratio=1.0)), (CapacityType.SPOT,)),
        (document("a", pool("a", capacity_type=CapacityType.RESERVED)), (CapacityType.RESERVED,)),
    ],
)
def test_capacity_types_of_a_pool(vision: PolicyDocument, types: tuple[CapacityType, ...]) -> None:
    """A share of 0 or 1 is exact; a share in between is part of the mix of the cluster."""
    assert merge_documents(FILE, [vision]).pools[0].capacity_types == types


def test_the_share_of_a_pool_is_its_own() -> None:
    """That of its document is the mix of the other pools."""
    vision = document("a", pool("x", nodes_count_max=30, spot_ratio=0.8), pool("y", nodes_count_max=10), spot_ratio=0.4)
    result = merge_documents(FILE, [vision])
    assert [merged.spot_ratio for merged in result.pools] == [0.8, None]
    assert result.spot.mix.spot_ratio == pytest.approx(0.4)


def test_the_mix_is_weighted_by_pool_size() -> None:
    """A document with three times as many nodes has three times the weight; shares add up to 1."""
    documents = [
        document("a", pool("x", nodes_count_max=30), spot_ratio=0.8),
        document("b", pool("y", nodes_count_max=10), spot_ratio=0.4),
    ]
    mix = merge_documents(FILE, documents).spot.mix
    assert mix.spot_ratio == pytest.approx(0.7)
    assert mix.spot_ratio + mix.on_demand_ratio + mix.reserved_ratio == pytest.approx(1.0)
    flat = merge_documents(FILE, [document("a", spot_ratio=0.5, is_multi_tier=False)]).spot.mix
    assert (flat.spot_ratio, flat.on_demand_ratio, flat.reserved_ratio) == (0.5, 0.5, 0.0)


def test_a_plan_uses_the_effective_policy() -> None:
    """The node is bought in the pool of the document."""
    accepted = PolicyDocumentsAccepted(documents=(document("vision", pool("a")),), accepted_at=T0)
    state = given(pod("p", gpus=1), on_sale(), (TimedFact(accepted, T0),))
    rules = effective_policy(FILE, state.policy_documents)
    result = accepted_plan(state, rules, T0)
    assert [each.pool for each in result.purchases] == ["a"]


def test_the_last_accepted_documents_win() -> None:
    """A repeat of an older fact changes nothing."""
    new = PolicyDocumentsAccepted(documents=(document("b"),), accepted_at=T0 + timedelta(seconds=1))
    old = PolicyDocumentsAccepted(documents=(document("a"),), accepted_at=T0)
    assert given((TimedFact(old, T0),), (TimedFact(new, T0),), (TimedFact(old, T0),)).policy_documents == new


# ---- rejection


@pytest.mark.parametrize(
    ("checked", "others", "expected"),
    [
        (document("a", provider="aws"), [], "aws does not match provider sim"),
        (document("b", pool("x")), [document("a", pool("x"))], "pool already defined in policy a"),
        (document("a", pool("x", gpu_models=("A1000",))), [], "unknown GPU model 'A1000'"),
        (document("b", high_ratio=0.7), [document("a", high_ratio=0.8)], "scaleUpThreshold: 0.7 here, 0.8 in a"),
        (document("a", pool("x"), pool("y"), nodes_count_max=3), [document("b")], "not enforceable beside b"),
        (
            document("a", pool("x", labels={"topology.kubernetes.io/zone": "z"})),
            [],
            "nodePools x: labels: topology.kub",
        ),
    ],
)
def test_each_conflict_is_one_violation(checked: PolicyDocument, others: list[PolicyDocument], expected: str) -> None:
    """With the names of both documents."""
    assert expected in violations_of(checked, *others)


def test_a_pool_of_the_file_cannot_be_redefined() -> None:
    """Except the default pool."""
    assert "already defined in the policy file" in violations_of(
        document("default"), under=policy(pools=(NodePool(name="default", priority=1),))
    )
    assert violations_of(document("default")) == ""


def test_of_two_new_documents_the_younger_is_rejected() -> None:
    """By age, then by name."""
    first, later = document("z", pool("x"), age=1), document("a", pool("x"))
    result = resolve_documents([later, first], (), FILE, "sim")
    assert [each.name for each in result.accepted] == ["z"]
    assert list(result.rejected) == ["uid-a"]


def test_a_generation_stays_active_until_a_valid_one_replaces_it() -> None:
    """An invalid generation changes nothing; a deleted document is removed."""
    good, bad = document("a", nodes_count_max=4), document("a", generation=2, provider="gcp")
    result = resolve_documents([bad], [good], FILE, "sim")
    assert (result.accepted, list(result.rejected)) == ((good,), ["uid-a"])
    better = document("a", generation=3, nodes_count_max=5)
    assert resolve_documents([better], [good], FILE, "sim").accepted == (better,)
    assert resolve_documents([], [good], FILE, "sim").accepted == ()


def test_an_active_pool_cannot_be_taken_over() -> None:
    """Whoever defines it later is rejected, until the owner gives it up."""
    old, young = document("old", pool("x"), age=9), document("young", pool("y"))
    grabs = document("old", pool("x"), pool("y"), age=9, generation=2)
    assert resolve_documents([grabs, young], [old, young], FILE, "sim").accepted == (old, young)
    yields = document("young", pool("z"), generation=2)
    result = resolve_documents([grabs, yields], [old, young], FILE, "sim")
    assert (result.accepted, result.rejected) == ((grabs, yields), {})


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
    pools=st.lists(_pools, min_size=1, max_size=4, unique_by=lambda entry: entry.name).map(tuple),
)


@settings(max_examples=40, deadline=None)
@generated(
    documents=st.lists(_documents, max_size=3, unique_by=lambda entry: entry.uid),
    nodes_count_max=st.integers(1, 120),
    pools=st.sampled_from([DEFAULT_POLICY.pools, (NodePool(name="a"), NodePool(name="g"))]),
)
def test_accepted_documents_merge_into_a_valid_policy(
    documents: list[PolicyDocument], nodes_count_max: int, pools: tuple[NodePool, ...]
) -> None:
    """Under the policy file at acceptance, and under every later one."""
    under = policy(nodes_count_max=nodes_count_max, pools=pools)
    accepted = resolve_documents(documents, (), under, "sim").accepted
    for file in (under, policy(nodes_count_max=20), policy(pools=(NodePool(name="b"),))):
        result = merge_documents(file, accepted)
        assert policy_violations(result) == ()
        assert result.nodes_count_max <= file.nodes_count_max
        assert len({each.name for each in result.pools}) == len(result.pools)
