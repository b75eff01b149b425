"""The core digest covers the code that decides and nothing that explains; requests keep theirs across versions."""

import sys
from pathlib import Path

import pytest
from tests.support.stories import request

from gpu_autoscaler.runtime.digests import code_digest, core_digest, kept_digest, request_digest

SOURCE = '''"""Decides."""

class Shape(Struct):
    """A shape."""

    gpus: Annotated[int, Meta(ge=0, description="Number of GPUs.")] = 1

def fits(shape, free, *, margin=1):
    """Return whether it fits."""
    return shape.gpus + margin <= free  # with a margin
'''
REASON = '''"""Reasons."""

_CLAUSES = {"day": "daily"}

class NoOffer(Reason, tag="no_offer"):
    """No offer."""

    count: int = 0

    def sentence(self):
        return f"No offer for {self.count}."

    def remedy(self):
        return "Add a pool."
'''


def digest(source: str, path: str = "core/placement/shapes.py") -> str:
    """Return the digest of one module."""
    return code_digest([(path, source)])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""Decides."""\n', ""),
        ('    """A shape."""\n', ""),
        ('"""Return whether it fits."""', '"""Tell whether\n\n    the shape fits."""'),
        ("  # with a margin", ""),
        (', description="Number of GPUs."', ""),
        ("Number of GPUs.", "GPUs of the shape."),
        ("shape.gpus + margin <= free", "(shape.gpus\n            + margin) <= free"),
    ],
)
def test_explanations_leave_the_digest(old: str, new: str) -> None:
    """A corrected comment, docstring or description must not refuse every snapshot."""
    assert old in SOURCE
    assert digest(SOURCE.replace(old, new)) == digest(SOURCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("margin=1", "margin=2"),
        ("] = 1", "] = 2"),
        ("ge=0", "ge=1"),
        ("+ margin", "- margin"),
        ("<= free", "< free"),
        ("gpus:", "count:"),
        ("def fits", "def fit"),
        ("class Shape", "class Form"),
        ("return shape", "yield shape"),
    ],
)
def test_code_changes_the_digest(old: str, new: str) -> None:
    """A changed constant, default, bound, operator or name may change a decision."""
    assert old in SOURCE
    assert digest(SOURCE.replace(old, new)) != digest(SOURCE)


def test_texts_of_reasons_leave_the_digest_and_their_fields_change_it() -> None:
    """A sentence or a remedy explains; tag, fields and defaults are recorded in plans."""
    path = "model/reasons/defer.py"
    for old, new in (
        ("No offer for", "Nothing for"),
        ("Add a pool", "Extend a pool"),
        ("daily", "a day's"),
        ("A s", ""),
    ):
        assert digest(REASON.replace(old, new), path) == digest(REASON, path)
    for old, new in (('"no_offer"', '"none"'), ("count: int", "number: int"), ("= 0", "= 1"), ("NoOffer", "None_")):
        assert digest(REASON.replace(old, new), path) != digest(REASON, path)
    assert digest(REASON.replace("Add a pool", "Extend a pool")) != digest(REASON), "only in the modules of reasons"


def test_modules_that_only_explain_leave_the_digest() -> None:
    """Stories and formatting are no decision; a moved module is another one."""
    assert (
        code_digest([("core/explain/story.py", SOURCE)])
        == code_digest([("model/format.py", SOURCE)])
        == code_digest([])
    )
    assert digest(SOURCE, "core/plan.py") != digest(SOURCE)


def test_the_core_has_one_digest() -> None:
    """Cached, as it takes a third of a second."""
    assert core_digest() == core_digest()
    assert len(core_digest()) == 32


def test_a_kept_digest_is_of_exactly_these_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read while no byte of the core differs, and computed anew after any change and over a damaged file."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    module = tmp_path / "core" / "shapes.py"
    module.parent.mkdir()
    module.write_text(SOURCE)
    first = kept_digest(tmp_path, tmp_path)
    (kept,) = tmp_path.glob("*.digest")
    key, digest = kept.read_text().split()
    kept.write_text(f"{key} {'0' * 32}")
    assert (digest, kept_digest(tmp_path, tmp_path)) == (first, "0" * 32)

    module.write_text(SOURCE.replace("margin=1", "margin=2"))
    changed = kept_digest(tmp_path, tmp_path)
    assert changed not in (first, "0" * 32)
    assert kept.read_text().split()[1] == changed

    for damaged in ("", "0" * 32, "a b c"):
        kept.write_text(damaged)
        assert kept_digest(tmp_path, tmp_path) == changed


def test_without_a_writable_folder_the_digest_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images have read-only code, and some machines forbid compiled files."""
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "shapes.py").write_text(SOURCE)
    computed = kept_digest(tmp_path, tmp_path / "absent")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert kept_digest(tmp_path, tmp_path) == computed
    assert list(tmp_path.glob("core.*")) == []


def test_a_request_keeps_the_digest_of_earlier_versions() -> None:
    """Repeating a request after an upgrade gets the same answer; the value is that of the version in tests/upgrade."""
    train = request("train", priority="high", members=2)
    assert request_digest(train) == "a9255b67f3ea572daf9ec6acd151510e"
    assert request_digest(request("other", priority="high", members=2)) == request_digest(train), "ids apart"


def test_later_fields_are_part_of_the_request() -> None:
    """Another annotation is another request, and so is every later field with a value."""
    changes: tuple[dict[str, object], ...] = ({}, {"pod_annotations": {"a": "b"}}, {"min_members": 1}, {"runtime": "x"})
    assert len({request_digest(request("train", **fields)) for fields in changes}) == len(changes)
