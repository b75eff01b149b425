"""What is updated from changed keys equals what is built from nothing, after any facts in any batches."""

import heapq
import sys
from datetime import datetime, timedelta

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.histories import histories, retellings
from tests.support.stories import EPOCH, T0, Story, TimedFact, pod, policy, record

from gpu_autoscaler.core.disruption.spare_nodes import arrivals_of
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.nodes.correlation import RecordIndex, index_of
from gpu_autoscaler.core.nodes.views import Table, node_views
from gpu_autoscaler.core.placement.bin_columns import Bins
from gpu_autoscaler.core.placement.bins import CURRENT_BINS, low_requests
from gpu_autoscaler.core.placement.pod_affinity import rules_of
from gpu_autoscaler.core.placement.resources import FIRST_SLICE
from gpu_autoscaler.core.placement.shapes import Shape
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.state.lineage import Derivation, Newest, newest_of, part_of
from gpu_autoscaler.core.state.queries import pod_index
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.pod import PodGone, PodObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import PodUid
from gpu_autoscaler.model.resources import Resources

_SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


_POLICY = policy()
_WHOLE = Resources(gpu_count=1, pod_count=1)
_SHAPES = (
    Shape(resources=Resources(pod_count=1)),
    Shape(resources=_WHOLE, is_spot_allowed=False),
    Shape(resources=_WHOLE, gpu_models=("A100",), gpu_memory_bytes_min=2**30),
)
_VALUES = {
    id(value): value
    for name, module in sorted(sys.modules.items())
    if name.startswith("gpu_autoscaler.core.")
    for value in vars(module).values()
}.values()
_TABLES = (*(value for value in _VALUES if Table in type(value).__mro__), low_requests(0.5))
_NEWEST: Derivation[Newest[PodUid, PodObserved]] = newest_of("pods", lambda pod: pod.created_at, 2)
_PARTS = tuple(value for value in _VALUES if isinstance(value, Derivation) and part_of.__name__ in repr(value.build))


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


def test_the_newest_entries_are_exact_beyond_the_number_that_is_kept() -> None:
    """Two are asked for and at most eight kept; after each removal of the newest, the next ones follow."""
    names = [f"p{number:02}" for number in range(30)]
    state = fold(EMPTY_STATE, record([told for number, name in enumerate(names) for told in _created(name, number)]))
    for count in range(30, 0, -1):
        newest = _NEWEST.of(state).entries
        assert len(newest) <= 8
        assert [known.name for _, known in sorted(newest.values(), key=lambda entry: entry[0])[-2:]] == names[:count][
            -2:
        ]
        gone = PodGone(
            epoch=EPOCH, version=2, pod_uid=PodUid(f"uid-{names[count - 1]}"), namespace="default",
            name=names[count - 1], node_name=None, job_id=None, phase="succeeded",
        )  # fmt: skip
        state = fold(state, record([TimedFact(gone, T0 + timedelta(hours=1))]))


def _created(name: str, number: int) -> Story:
    return pod(name, at=T0 + timedelta(minutes=number))


def test_all_tables_are_compared() -> None:
    """Those of modules; a table under a policy is compared by the plans that it leads to."""
    assert CURRENT_BINS in _TABLES
    assert len(_TABLES) >= 15
    assert len(_PARTS) >= 4


def _derived(state: ClusterState, as_of: datetime) -> dict[str, object]:
    pods, views, index = pod_index(state), node_views(state, as_of), index_of(state)
    assert views.pods == pods.by_node
    return {
        "pods": pods._asdict(),
        "rules": rules_of(state),
        "views": tuple(views),
        "records": _contents(index),
        "tables": [_comparable(views.table(table)) for table in _TABLES],
        "parts": [part.of(state) for part in _PARTS],
        "newest": heapq.nlargest(2, _NEWEST.of(state).entries.items(), key=lambda item: (item[1][0], item[0])),
        "arrivals": arrivals_of(state),
        "plan": plan(state, _POLICY, as_of),
    }


def _comparable(table: object) -> object:
    """Return what a table says. The order of bins decides nothing, and neither do slices that no node has any more."""
    if not isinstance(table, Bins):
        return table
    kinds = sorted({name for entry in table for name, _ in entry.free.slices})
    columns = table.columns
    rows: dict[str, object] = {}
    for entry in table:
        place = table.places[entry.key]
        free = columns.free[place].tolist()
        slices = [free[FIRST_SLICE + columns.kinds.index(kind)] for kind in kinds]
        flags = [int(column[place]) for column in (columns.readiness, columns.has_gpus, columns.is_on_demand)]
        accepts = [bool(columns.matcher.by(shape)[place]) for shape in _SHAPES]
        in_zone = int(columns.matcher.count_by_label(labels.ZONE, {"zone-a": 1})[place])
        rows[entry.key] = (entry, free[:FIRST_SLICE], slices, flags, accepts, in_zone)
    return rows, dict(table.pod_shapes)


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
