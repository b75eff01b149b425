"""Answers are kept for the very same records, and never for others that look alike or have taken their place."""

from gpu_autoscaler.core.identity_cache import IdentityCache, cached_by_identity, changed_keys


def test_the_same_records_are_asked_once() -> None:
    """Equal ones that are other objects are asked anew: nothing is compared by value."""
    asked: list[str] = []

    @cached_by_identity(2)
    def longest(words: list[str]) -> str:
        asked.append(words[0])
        return max(words, key=len)

    words = ["a", "bcd"]
    assert [longest(words), longest(words), longest(["a", "bcd"])] == ["bcd", "bcd", "bcd"]
    assert asked == ["a", "a"]


def test_a_record_that_is_remembered_shares_its_id_with_no_other() -> None:
    """A thousand short-lived records, each at a memory address that others had before, get their own answers."""

    @cached_by_identity(4)
    def only(numbers: list[int]) -> int:
        return numbers[0]

    assert [only([number]) for number in range(1000)] == list(range(1000))


def test_what_is_in_use_outlives_what_is_not() -> None:
    """So memory stays as large as what is looked at."""
    kept: IdentityCache[str] = IdentityCache(2)
    for number in range(100):
        kept.put((number,), str(number))
        kept.put((-1,), "in use")
        assert kept.get((-1,)) == "in use"
    assert kept.get((0,)) is None


def test_what_came_went_or_was_replaced_has_changed() -> None:
    """An equal object in the place of another is a change; nothing else is."""
    one, other = [1], [1]
    assert changed_keys({"a": one, "b": one, "c": one}, {"a": one, "b": other, "d": one}) == {"b", "c", "d"}
    assert changed_keys({"a": one}, {"a": one}) == set()
