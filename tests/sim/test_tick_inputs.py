"""What the simulator compares before it leaves out a tick."""

import pytest
from msgspec.structs import replace
from tests.support.stories import T0, policy

from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.sim.tick_inputs import APART, plan_inputs

COMPARED = [name for name in ClusterState.__struct_fields__ if name not in APART]


def test_what_is_compared_apart_are_fields_of_the_state() -> None:
    """A renamed field would be compared by identity, and no tick be left out."""
    assert set(ClusterState.__struct_fields__) >= APART


@pytest.mark.parametrize("name", COMPARED)
def test_a_field_counts_unless_it_is_named(name: str) -> None:
    """So does a new one: nobody has to list it."""
    rules = policy()
    before = plan_inputs(StateView(EMPTY_STATE), rules, T0)
    assert plan_inputs(StateView(EMPTY_STATE), rules, T0) == before
    changed = replace(EMPTY_STATE, **{name: object()})
    assert plan_inputs(StateView(changed), rules, T0) != before
