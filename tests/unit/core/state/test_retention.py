"""Ends that come long after they were: forgotten at once, and cheaply, however much else is remembered."""

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


class NotLookedThrough(dict[str, datetime]):
    """Fails where somebody looks at every entry."""

    def items(self) -> NoReturn:
        """Not here."""
        raise AssertionError("one end looks at every node there is")


def gone(number: int, at: datetime) -> Recorded:
    """A pod's end on a node."""
    fact = PodGone(
        pod_uid=PodUid(f"p{number}"), namespace="n", name=f"p{number}", node_name="node-a", epoch=1, version=number
    )
    return Recorded(
        envelope=Envelope(id=FactId(str(number)), source="/tests", time=at, fact=fact), stream="POD", sequence=number
    )


def test_an_old_end_is_forgotten_without_a_look_at_all_others() -> None:
    """After an outage such ends come by the thousand: each costs the same, on a cluster of any size."""
    now = fold(EMPTY_STATE, [gone(1, NOON)])
    known = replace(now, busy_until=NotLookedThrough(now.busy_until))

    after = fold(known, [gone(2, NOON - timedelta(hours=8)), gone(3, NOON - timedelta(hours=200))])

    assert {*chain.from_iterable(after.pods_gone.values())} == {PodUid("p1")}
    assert dict(after.busy_until) == {"node-a": NOON}
