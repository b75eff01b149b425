"""Late deletions: pruned at once, in constant time."""

from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import NoReturn

from msgspec.structs import replace

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.state import EMPTY_STATE
from gpu_autoscaler.events.envelope import Envelope, Recorded
from gpu_autoscaler.events.pod import PodGone
from gpu_autoscaler.model.ids import FactId, PodUid

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


class NotIterable(dict[str, datetime]):
    """A mapping that fails when it is iterated."""

    def items(self) -> NoReturn:
        """Not allowed."""
        raise AssertionError("one end looks at every node there is")


def deleted(number: int, at: datetime) -> Recorded:
    """The deletion of a pod on a node."""
    fact = PodGone(
        pod_uid=PodUid(f"p{number}"), namespace="n", name=f"p{number}", node_name="node-a", epoch=1, version=number
    )
    return Recorded(
        envelope=Envelope(id=FactId(str(number)), source="/tests", time=at, fact=fact), stream="POD", sequence=number
    )


def test_a_late_deletion_is_pruned_without_iteration() -> None:
    """After an outage thousands arrive: each costs the same on any cluster."""
    now = fold(EMPTY_STATE, [deleted(1, NOON)])
    known = replace(now, busy_until=NotIterable(now.busy_until))

    after = fold(known, [deleted(2, NOON - timedelta(hours=8)), deleted(3, NOON - timedelta(hours=200))])

    assert {*chain.from_iterable(after.pods_gone.values())} == {PodUid("p1")}
    assert dict(after.busy_until) == {"node-a": NOON}
