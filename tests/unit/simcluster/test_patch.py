"""Patch types and selectors, as documented by Kubernetes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_autoscaler.simcluster.answers import ApiRefusal
from gpu_autoscaler.simcluster.kinds import PODS
from gpu_autoscaler.simcluster.objects import Json, clone
from gpu_autoscaler.simcluster.patch import json_patch, merge, strategic_merge
from gpu_autoscaler.simcluster.selectors import query_test, selector_matches

TEXT = st.text(max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


# The examples of RFC 7386, appendix A.
@pytest.mark.parametrize(
    ("original", "patch", "result"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_merge_patches_follow_the_rfc(original: object, patch: object, result: object) -> None:
    """Each row is one of the RFC's examples."""
    assert merge(original, patch) == result


@given(JSON, JSON)
def test_patches_do_not_change_the_original(original: object, patch: object) -> None:
    """Stored objects are shared."""
    before = clone(original)
    merge(original, patch)

    assert original == before


def test_strategic_lists_merge_delete_and_replace() -> None:
    """Containers by name; $patch deletes one or replaces all."""
    old: Json = {"containers": [{"name": "a", "image": "1"}, {"name": "b", "image": "1"}]}
    changed = strategic_merge(old, {"containers": [{"name": "b", "image": "2"}, {"name": "c", "image": "3"}]})
    deleted = strategic_merge(old, {"containers": [{"name": "a", "$patch": "delete"}]})
    replaced = strategic_merge(old, {"containers": [{"$patch": "replace"}, {"name": "z"}]})

    assert [(entry["name"], entry["image"]) for entry in changed["containers"]] == [("a", "1"), ("b", "2"), ("c", "3")]
    assert [entry["name"] for entry in deleted["containers"]] == ["b"]
    assert replaced["containers"] == [{"name": "z"}]


def test_finalizers_are_added_not_replaced() -> None:
    """Strategic patches merge two controllers' finalizers and delete them separately."""
    old = {"metadata": {"finalizers": ["a"]}}
    both = strategic_merge(old, {"metadata": {"finalizers": ["b"]}})
    one = strategic_merge(both, {"metadata": {"$deleteFromPrimitiveList/finalizers": ["a"]}})

    assert both["metadata"]["finalizers"] == ["a", "b"]
    assert one["metadata"]["finalizers"] == ["b"]


def test_json_patches_follow_paths() -> None:
    """Append to a list, replace, remove, and escaped keys."""
    old: Json = {"labels": {"a/b": "1"}, "list": [1]}
    operations = [
        {"op": "test", "path": "/labels/a~1b", "value": "1"},
        {"op": "replace", "path": "/labels/a~1b", "value": "2"},
        {"op": "add", "path": "/list/-", "value": 2},
        {"op": "remove", "path": "/list/0"},
    ]

    assert json_patch(old, operations) == {"labels": {"a/b": "2"}, "list": [2]}


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "replace", "path": "/no/such", "value": 1},
        {"op": "test", "path": "/a", "value": 2},
        {"op": "fly", "path": "/a"},
        {"path": "/a"},
    ],
)
def test_an_inapplicable_json_patch_is_refused(operation: Json) -> None:
    """422, and none of it is applied."""
    with pytest.raises(ApiRefusal) as refusal:
        json_patch({"a": 1}, [operation])

    assert refusal.value.code == 422


def test_an_empty_selector_selects_all_and_none_selects_nothing() -> None:
    """policy/v1: {} selects every pod, no selector selects none."""
    assert selector_matches({}, {"a": "b"})
    assert not selector_matches(None, {"a": "b"})


def test_all_selectors_of_a_query_must_match() -> None:
    """Labels and fields together."""
    test = query_test(PODS, "app in (a,b),!gone", "status.phase!=Failed")
    assert test is not None
    pod = {"metadata": {"name": "p", "labels": {"app": "b"}}, "spec": {}, "status": {"phase": "Running"}}

    assert test(pod)
    assert not test(pod | {"status": {"phase": "Failed"}})
    assert not test(pod | {"metadata": {"name": "p", "labels": {"app": "b", "gone": ""}}})
