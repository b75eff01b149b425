"""A test that fails sometimes is found by repeating it."""

from pathlib import Path

from tests.support.repeating import repeat

SOMETIMES = """
import pathlib, pytest
def test_sometimes():
    runs = pathlib.Path(__file__).with_suffix(".runs")
    count = len(runs.read_text()) if runs.exists() else 0
    runs.write_text("x" * (count + 1))
    assert count != 1, "the second run fails"
"""


async def test_failed_runs_are_counted_and_their_output_is_kept(tmp_path: Path) -> None:
    """One of three fails, and its output says why."""
    test = tmp_path / "test_sometimes.py"
    test.write_text(SOMETIMES, encoding="utf-8")
    (tmp_path / "out").mkdir()
    failed = await repeat(str(test), times=3, at_once=1, folder=tmp_path / "out")
    assert failed == [tmp_path / "out" / "2.log"]
    assert "the second run fails" in failed[0].read_text(encoding="utf-8")
    assert sorted((tmp_path / "out").iterdir()) == failed
