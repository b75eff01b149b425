"""What is derived from a state is handed on to the next one, and updated by the keys that changed."""

import sys
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace
from tests.support.stories import T0, Story, given, node, pod, record

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.nodes.views import node_views
from gpu_autoscaler.core.state import lineage
from gpu_autoscaler.core.state.lineage import Changes, Derivation
from gpu_autoscaler.core.state.state import ClusterState

NODES_COUNT = 100


class Steps:
    """Counts how a value is derived."""

    def __init__(self) -> None:
        self.built_count = 0
        self.updates: list[Changes] = []
        self.pod_count = Derivation(("pods",), self._build, self._update)

    def _build(self, state: ClusterState) -> int:
        self.built_count += 1
        return len(state.pods)

    def _update(self, _: int, state: ClusterState, changes: Changes) -> int:
        self.updates.append(changes)
        return len(state.pods)


def test_an_update_has_the_keys_of_all_batches_since() -> None:
    """Also of states that nobody read; fields that do not determine the value are left out."""
    steps, state = Steps(), given(pod("a"))
    assert steps.pod_count.of(state) == 1
    state = fold(fold(fold(state, record(pod("b"))), record(node("n1"))), record(pod("c")))
    assert [steps.pod_count.of(state), steps.pod_count.of(state)] == [3, 3]
    assert steps.updates == [{"pods": {"uid-b", "uid-c"}}]
    assert steps.pod_count.of(fold(state, record(node("n2")))) == 3
    assert (steps.built_count, len(steps.updates)) == (1, 1)


def test_a_value_that_is_derived_after_its_state_was_folded_on_is_handed_on() -> None:
    """As of a plan, during which facts arrive: the next plan updates what this one has derived."""
    steps, first = Steps(), given(pod("a"))
    steps.pod_count.of(first)
    second = fold(first, record(pod("b")))
    third = fold(second, record(pod("c")))
    assert steps.pod_count.of(second) == 2
    fourth = fold(third, record(pod("d")))
    assert [steps.pod_count.of(fourth), steps.pod_count.of(third)] == [4, 3]
    assert steps.updates == [{"pods": {"uid-b"}}, {"pods": {"uid-c", "uid-d"}}, {"pods": {"uid-c"}}]
    assert steps.built_count == 1


def test_plans_without_a_pause_build_a_value_once() -> None:
    """However many facts arrive, each before the plan derives anything."""
    steps, state = Steps(), given(pod("a"))
    for number in range(lineage.BATCHES_COUNT_MAX + 2):
        planned, state = state, fold(state, record(pod(f"p{number}")))
        assert steps.pod_count.of(planned) == number + 1
    assert steps.built_count == 1
    assert max(len(changes["pods"]) for changes in steps.updates) <= 2


def test_after_too_many_batches_a_value_is_built_from_nothing() -> None:
    """Old values are not held for ever."""
    steps, state = Steps(), given(pod("a"))
    steps.pod_count.of(state)
    for number in range(lineage.BATCHES_COUNT_MAX):
        state = fold(state, record(pod(f"p{number}")))
    assert steps.pod_count.of(state) == lineage.BATCHES_COUNT_MAX + 1
    assert (steps.built_count, len(steps.updates)) == (1, 1)

    for number in range(lineage.BATCHES_COUNT_MAX + 1):
        state = fold(state, record(pod(f"q{number}")))
    assert steps.pod_count.of(state) == 2 * (lineage.BATCHES_COUNT_MAX + 1)
    assert (steps.built_count, len(steps.updates)) == (2, 1)


def test_after_too_many_keys_a_value_is_built_from_nothing() -> None:
    """One batch of all pods, as after a restart."""
    steps, state = Steps(), given(pod("a"))
    steps.pod_count.of(state)
    many = fold(state, record(_pods(lineage.CHANGED_KEYS_COUNT_MAX)))
    assert steps.pod_count.of(many) == lineage.CHANGED_KEYS_COUNT_MAX + 1
    assert (steps.built_count, len(steps.updates)) == (1, 1)
    most = fold(
        state, record(each for number in range(lineage.CHANGED_KEYS_COUNT_MAX + 1) for each in pod(f"p{number}"))
    )
    assert steps.pod_count.of(most) == lineage.CHANGED_KEYS_COUNT_MAX + 2
    assert (steps.built_count, len(steps.updates)) == (2, 1)


def _pods(count: int) -> Story:
    return tuple(part for number in range(count) for part in pod(f"p{number}"))


def test_a_pod_changes_the_view_of_its_node_alone() -> None:
    """The others are the same objects, whatever their number."""
    state = given(*(node(f"n{number}") for number in range(NODES_COUNT)), pod("a", on="n7"))
    before = node_views(state, T0)
    after = node_views(fold(state, record(pod("a", on="n7", phase="succeeded", version=2))), T0)
    changed = [now.name for was, now in zip(before, after, strict=True) if was is not now]
    assert changed == ["n7"]


def test_threads_derive_from_one_state_while_it_is_folded_on() -> None:
    """As the event loop folds while a plan is computed."""
    base = given(*(node(f"n{number}") for number in range(10)))

    def names(number: int) -> list[str]:
        state = base
        for step in range(20):
            state = fold(state, record(node(f"m{number}-{step}")))
            assert node_views(state, T0) == node_views(replace(state), T0)
        return sorted(view.name for view in node_views(state, T0))

    switch_seconds = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(names, range(4)))
    finally:
        sys.setswitchinterval(switch_seconds)
    assert [len(of_thread) for of_thread in found] == [30] * 4
