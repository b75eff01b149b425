"""Tables over the views of nodes: updated where a view was replaced, equal to those built from nothing."""

import random
from typing import Any

import msgspec
import pytest
from tests.support.stories import T0, given, node

from gpu_autoscaler.core.nodes.views import Counted, Grouped, NodeIndex, NodeView, Selected, Table, node_views

ZONES = ("zone-a", "zone-b", None)
IN_ZONE_A = Selected(lambda view: view.zone == "zone-a")
BY_POOL_AND_ZONE = Grouped(lambda view: [name for name in (view.pool, view.zone) if name is not None])
COUNTS = Counted(lambda view: view.zone)
TABLES: tuple[Table[Any], ...] = (IN_ZONE_A, BY_POOL_AND_ZONE, COUNTS)


def _views(count: int) -> tuple[NodeView, ...]:
    return tuple(node_views(given(*(node(f"n{number:02}") for number in range(count))), T0))


@pytest.mark.parametrize("seed", range(20))
def test_updated_tables_equal_those_built_from_nothing(seed: int) -> None:
    """After nodes came, went and changed, whichever of the steps between were read."""
    chance, views = random.Random(seed), _views(24)  # noqa: S311 - a seed
    nodes = NodeIndex.of(views[:12])
    for _ in range(60):
        removed = chance.sample(list(nodes), chance.randrange(min(4, len(nodes) + 1)))
        names = {view.name for view in nodes} - {view.name for view in removed}
        others = [view for view in views if view.name not in names]
        added = [
            msgspec.structs.replace(view, zone=chance.choice(ZONES), pool=chance.choice(("p", "q")))
            for view in chance.sample(others, chance.randrange(min(4, len(others) + 1)))
        ]
        nodes = nodes.replaced(removed, added, {})
        assert nodes == NodeIndex.of(nodes), "sorted by name"
        if chance.random() < 0.5:
            fresh = NodeIndex.of(nodes)
            for table in TABLES:
                assert nodes.table(table) == fresh.table(table)


def test_a_table_that_no_change_concerns_stays_the_same_object() -> None:
    """So that what depends on it is not derived again."""
    views = _views(3)
    nodes = NodeIndex.of(views)
    selected, groups = nodes.table(IN_ZONE_A), nodes.table(BY_POOL_AND_ZONE)
    elsewhere = msgspec.structs.replace(views[0], zone="zone-c", pool=None)
    far = NodeIndex.of((elsewhere, *views[1:]))
    near, groups, counts = far.table(IN_ZONE_A), far.table(BY_POOL_AND_ZONE), far.table(COUNTS)
    assert [view.name for view in selected] == ["n00", "n01", "n02"]
    assert [view.name for view in groups["zone-c"]] == ["n00"]
    moved = far.replaced([elsewhere], [msgspec.structs.replace(elsewhere, zone="zone-d")], {})
    assert moved.table(IN_ZONE_A) is near
    again = far.replaced([elsewhere], [msgspec.structs.replace(elsewhere, pool="other")], {})
    assert again.table(COUNTS) is counts
    assert far.replaced([], [], far.pods) is far


def test_a_table_that_is_not_read_holds_few_changes() -> None:
    """It is built again after as many as half of the views, so they are not kept for longer."""
    nodes = NodeIndex.of(_views(24))
    nodes.table(COUNTS)
    lengths = []
    for number in range(100):
        nodes = nodes.replaced(nodes[:1], [msgspec.structs.replace(nodes[0], zone=f"zone-{number}")], nodes.pods)
        lengths.append(len(vars(nodes)["_steps"]))
    assert max(lengths) == 12
    assert nodes.table(COUNTS) == {"zone-a": 23, "zone-99": 1}
