"""Published names are frozen."""

from tests.tidy.published import RECORDED, names


def test_published_names_are_those_recorded() -> None:
    """A removed name breaks users; an added one is recorded with `python -m tests.tidy.published`."""
    recorded = RECORDED.read_text(encoding="utf-8").splitlines()
    current = names()
    assert sorted(set(recorded) - set(current)) == [], "removed or renamed: this breaks users (docs/upgrading.md)"
    assert sorted(set(current) - set(recorded)) == [], "added: run `python -m tests.tidy.published`"


def test_each_kind_of_name_is_recorded() -> None:
    """No source of names fell silent."""
    kinds = {name.split(" ", 1)[0] for name in names()}
    assert {"fact", "reason", "policy", "setting", "metric", "rest", "command", "chart", "crd", "streams"} <= kinds
