"""Identity caches: results for the same records only."""

from datetime import UTC, datetime, timedelta

from gpu_autoscaler.core.identity_cache import RecentValues, cached_by_identity, cached_until_change
from gpu_autoscaler.core.next_change import TrackedInstant, has_lasted

AT = datetime(2026, 11, 21, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)


def test_results_are_cached_by_identity() -> None:
    """Equal records that are other objects are computed again."""
    requested: list[str] = []

    @cached_by_identity(2)
    def longest(words: list[str]) -> str:
        requested.append(words[0])
        return max(words, key=len)

    words = ["a", "bcd"]
    assert [longest(words), longest(words), longest(["a", "bcd"])] == ["bcd", "bcd", "bcd"]
    assert requested == ["a", "a"]


def test_cached_arguments_keep_their_id() -> None:
    """A thousand short-lived records at reused addresses get their own results."""

    @cached_by_identity(4)
    def only(numbers: list[int]) -> int:
        return numbers[0]

    assert [only([number]) for number in range(1000)] == list(range(1000))


def test_used_entries_outlive_unused_ones() -> None:
    """Memory is bounded by what is used."""
    kept: RecentValues[tuple[int, ...], str] = RecentValues(2)
    for number in range(100):
        kept.put((number,), str(number))
        kept.put((-1,), "in use")
        assert kept.get((-1,)) == "in use"
    assert kept.get((0,)) is None


def test_a_result_is_cached_until_the_change_that_it_notes() -> None:
    """Each instant notes that change, also one for which nothing is computed; an earlier instant is computed again."""
    computed: list[datetime] = []

    @cached_until_change(2)
    def lasted(starts: list[datetime], as_of: datetime) -> list[bool]:
        computed.append(as_of)
        return [has_lasted(at, 10.0, as_of) for at in starts]

    starts = [AT, AT + 5 * SECOND]
    for seconds, expected, change in ((0, [False, False], 10), (9, [False, False], 10), (10, [True, False], 15)):
        as_of = TrackedInstant.of(AT + seconds * SECOND)
        assert lasted(starts, as_of) == expected
        assert as_of.next_change_at == AT + change * SECOND
    assert lasted(starts, AT + 15 * SECOND) == lasted(starts, AT + 99 * SECOND) == [True, True]
    assert lasted(starts, AT + 1 * SECOND) == [False, False]
    assert computed == [AT + seconds * SECOND for seconds in (0, 10, 15, 1)]
