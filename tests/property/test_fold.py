"""Properties of `fold` for generated histories."""

from datetime import timedelta

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.histories import histories, retellings
from tests.support.node_transitions import TRANSITIONS

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.nodes.lifecycle import NodePhase
from gpu_autoscaler.core.nodes.views import node_views
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.model.ids import ActionId

History = tuple[Recorded, ...]

_SETTINGS = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@_SETTINGS
@given(data=st.data())
def test_interleaving_redelivery_and_batches_do_not_change_the_state(data: st.DataObject) -> None:
    """Redelivery within the retention of tombstones."""
    history = data.draw(histories())
    state = EMPTY_STATE
    for batch in data.draw(retellings(history)):
        state = fold(state, batch)

    assert _differences(state, fold(EMPTY_STATE, history)) == {}


@_SETTINGS
@given(history=histories())
def test_folding_is_idempotent(history: History) -> None:
    """Redelivery of the last six hours."""
    state = fold(EMPTY_STATE, history)
    recent = [each for each in history if _is_recent(each, state)]

    assert _differences(fold(state, recent), state) == {}


@_SETTINGS
@given(history=histories())
def test_a_state_is_never_changed_in_place(history: History) -> None:
    """Folding does not change states of readers."""
    half = fold(EMPTY_STATE, history[: len(history) // 2])
    again = fold(EMPTY_STATE, history[: len(history) // 2])
    fold(half, history[len(history) // 2 :])

    assert half == again
    assert EMPTY_STATE.pods == {}


@_SETTINGS
@given(history=histories())
def test_phases_follow_the_transitions(history: History) -> None:
    """In order of events; a late stream may skip phases, never reverse."""
    state, phases = EMPTY_STATE, dict[ActionId, NodePhase]()
    for each in history:
        state = fold(state, [each])
        now = {view.action_id: view.phase for view in node_views(state, each.envelope.time) if view.action_id}
        for action_id in phases.keys() | now.keys():
            before = phases.get(action_id, NodePhase.PLANNED)
            phase = now.get(action_id, NodePhase.GONE)
            assert phase is before or phase in _REACHABLE[before], f"{action_id} went from {before} to {phase}"
            phases[action_id] = phase


def _differences(one: ClusterState, other: ClusterState) -> dict[str, tuple[object, object]]:
    """The fields that differ, for short messages."""
    return {
        name: (getattr(one, name), getattr(other, name))
        for name in one.__struct_fields__
        if getattr(one, name) != getattr(other, name)
    }


def _is_recent(recorded: Recorded, state: ClusterState) -> bool:
    newest = state.newest.get(recorded.stream.lower())
    return newest is not None and newest - recorded.envelope.time < timedelta(hours=6)


def _reachable(phase: NodePhase) -> frozenset[NodePhase]:
    result: set[NodePhase] = set()
    ahead = [phase]
    while ahead:
        news = TRANSITIONS[ahead.pop()] - result
        result |= news
        ahead += news
    return frozenset(result)


_REACHABLE = {phase: _reachable(phase) for phase in NodePhase}


def test_every_phase_is_reachable_and_leads_to_gone() -> None:
    """From any phase."""
    assert _REACHABLE[NodePhase.PLANNED] == set(NodePhase) - {NodePhase.PLANNED}
    assert all(NodePhase.GONE in _REACHABLE[phase] for phase in NodePhase if phase is not NodePhase.GONE)
    assert TRANSITIONS.keys() == set(NodePhase)
    assert not TRANSITIONS[NodePhase.GONE]
