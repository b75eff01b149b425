"""Tombstones by hour: equal to one mapping, copied and pruned by hour."""

from datetime import UTC, datetime, timedelta

from hypothesis import given as for_all
from hypothesis import strategies as st

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.hours import hour
from gpu_autoscaler.core.state.state import EMPTY_STATE, Tombstone
from gpu_autoscaler.core.state.tables import TombstoneBuckets, all_tombstones, tombstone_of
from gpu_autoscaler.events.envelope import Envelope, Recorded
from gpu_autoscaler.events.pod import PodGone, PodObserved
from gpu_autoscaler.model.ids import FactId, PodUid
from gpu_autoscaler.model.resources import Resources

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
_STEPS = st.tuples(st.sampled_from(["set", "remove", "forget"]), st.sampled_from("abc"), st.integers(0, 5))


def tombstone(hours: int) -> Tombstone:
    """A tombstone this many hours after noon."""
    return Tombstone((1, hours), NOON + hours * HOUR)


def recorded(fact: PodGone | PodObserved, sequence: int, at: datetime) -> Recorded:
    """The recorded fact of a pod."""
    envelope = Envelope(id=FactId(str(sequence)), source="/tests", time=at, fact=fact)
    return Recorded(envelope=envelope, stream="POD", sequence=sequence)


def deleted(name: str, version: int) -> PodGone:
    """The deletion of the pod."""
    return PodGone(pod_uid=PodUid(name), namespace="n", name=name, epoch=1, version=version)


def observed(name: str, version: int) -> PodObserved:
    """An observation of the pod."""
    return PodObserved(
        pod_uid=PodUid(name), namespace="n", name=name, phase="running", requests=Resources(), created_at=NOON,
        epoch=1, version=version,
    )  # fmt: skip


@for_all(st.lists(_STEPS), st.integers(0, 30))
def test_buckets_equal_one_mapping(steps: list[tuple[str, str, int]], cut: int) -> None:
    """Whatever is set, removed and pruned, in one batch or two."""
    graves: TombstoneBuckets[str] = TombstoneBuckets({})
    known: dict[str, Tombstone] = {}
    origin, before = graves.now, {}
    for number, (step, key, hours) in enumerate(steps):
        if number == cut:
            origin, before = graves.now, {at: dict(stones) for at, stones in graves.now.items()}
            graves = TombstoneBuckets(origin)
        if step == "set":
            graves.remove(key)
            graves.set(key, tombstone(hours))
            known[key] = tombstone(hours)
        elif step == "remove":
            graves.remove(key)
            known.pop(key, None)
        else:
            graves.forget(hour(NOON) + hours)
            known = {key: one for key, one in known.items() if one.gone_at >= NOON + hours * HOUR}
        assert {key: result for key in "abc" if (result := graves.get(key)) is not None} == known
    assert sorted(one.gone_at for one in all_tombstones(graves.now)) == sorted(one.gone_at for one in known.values())
    assert all(graves.now.values()), "an hour without stones would make equal states differ"
    assert origin == before, "what was given is not changed"


def test_a_batch_copies_only_changed_hours() -> None:
    """A deletion now does not copy earlier hours."""
    before = fold(EMPTY_STATE, [recorded(deleted("a", 1), 1, NOON), recorded(deleted("b", 2), 2, NOON + HOUR)])
    after = fold(before, [recorded(deleted("c", 3), 3, NOON + HOUR)])

    assert after.pods_gone[hour(NOON)] is before.pods_gone[hour(NOON)]
    assert before.pods_gone[hour(NOON) + 1].keys() == {"b"}
    assert after.pods_gone[hour(NOON) + 1].keys() == {"b", "c"}


def test_a_tombstone_is_found_in_every_hour() -> None:
    """A newer deletion replaces it."""
    ends = [recorded(deleted(f"p{each}", 10), each + 1, NOON + each * HOUR) for each in range(6)]
    state = fold(EMPTY_STATE, ends)
    late = fold(state, [recorded(observed(f"p{each}", 9), 10 + each, NOON + 5 * HOUR) for each in range(6)])
    assert late == state

    later = fold(state, [recorded(deleted("p0", 11), 20, NOON + 5 * HOUR)])
    result = tombstone_of(later.pods_gone, PodUid("p0"))
    assert result is not None
    assert (result.version, result.gone_at) == ((1, 11), NOON + 5 * HOUR)
    assert hour(NOON) not in later.pods_gone

    back = fold(later, [recorded(observed("p0", 12), 21, NOON + 5 * HOUR)])
    assert "p0" in back.pods
    assert tombstone_of(back.pods_gone, PodUid("p0")) is None
