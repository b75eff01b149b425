"""Identity caches: results for the same records only."""

from gpu_autoscaler.core.identity_cache import IdentityCache, cached_by_identity


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
    kept: IdentityCache[str] = IdentityCache(2)
    for number in range(100):
        kept.put((number,), str(number))
        kept.put((-1,), "in use")
        assert kept.get((-1,)) == "in use"
    assert kept.get((0,)) is None
