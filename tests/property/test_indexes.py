"""What is updated from changed keys equals what is built from nothing, after any facts in any batches."""

from datetime import datetime, timedelta

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.histories import histories, retellings

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.nodes.correlation import RecordIndex, index_of
from gpu_autoscaler.core.nodes.views import node_views
from gpu_autoscaler.core.placement.pod_affinity import rules_of
from gpu_autoscaler.core.state.queries import pod_index
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.envelope import Recorded

_SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@_SETTINGS
@given(data=st.data())
def test_updated_indexes_equal_those_built_from_nothing(data: st.DataObject) -> None:
    """Whichever states were read before, and at whichever instants."""
    batches = data.draw(retellings(data.draw(histories())))
    _compare(EMPTY_STATE, batches, data.draw(st.lists(st.booleans(), min_size=len(batches), max_size=len(batches))))


def _compare(state: ClusterState, batches: list[list[Recorded]], is_read: list[bool]) -> None:
    for batch, is_read_now in zip(batches, is_read, strict=True):
        state = fold(state, batch)
        if is_read_now and batch:
            at = _last_at(batch)
            for as_of in (at, at + timedelta(hours=1), at):
                assert _derived(state, as_of) == _derived(_without_lineage(state), as_of)


def _derived(state: ClusterState, as_of: datetime) -> dict[str, object]:
    pods, views, index = pod_index(state), node_views(state, as_of), index_of(state)
    assert views.pods == pods.by_node
    return {"pods": pods._asdict(), "rules": rules_of(state), "views": tuple(views), "records": _contents(index)}


def _contents(index: RecordIndex) -> dict[str, object]:
    contents = {
        name: {key: frozenset(entry) if name in ("entries", "_notices") else entry for key, entry in table.items()}
        for name, table in (vars(index) | {"entries": index.entries}).items()
        if isinstance(table, dict)
    }
    return contents | {"lost": index.providers_without_node}


def _without_lineage(state: ClusterState) -> ClusterState:
    """Return an equal state of which nothing is derived yet."""
    return msgspec.structs.replace(state)


def _last_at(batch: list[Recorded]) -> datetime:
    return max(recorded.envelope.time for recorded in batch)
