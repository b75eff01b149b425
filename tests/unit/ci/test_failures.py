"""A log that is shown from its end names the failed tests there, in a bounded number of lines."""

import subprocess
import sys
from pathlib import Path

from tests.support.failures import LINE_CHARACTERS_MAX, LINES_COUNT_MAX, TESTS_COUNT_MAX

COUNT = TESTS_COUNT_MAX + 3
TESTS = f"""
import pytest

@pytest.mark.parametrize("number", range({COUNT}))
def test_wrong(number):
    print("captured " * 10_000)
    assert number == "{"x" * 1000}"

def test_right():
    pass

@pytest.fixture
def broken():
    raise RuntimeError("no server")

def test_without_server(broken):
    pass
"""


def test_the_failed_tests_are_named_with_their_reason(tmp_path: Path) -> None:
    """Failures and errors of a real report; passed tests and captured output are left out, and so is a missing file."""
    (tmp_path / "test_it.py").write_text(TESTS)
    report = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", f"--junitxml={report}", "."]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 1

    command = [sys.executable, "-m", "tests.support.failures", str(report), str(tmp_path / "none.xml")]
    lines = subprocess.run(command, capture_output=True, check=True, text=True).stdout.splitlines()
    named = [line for line in lines if line.startswith("failed: ")]
    assert named[:2] == ["failed: test_it::test_wrong[0]", "failed: test_it::test_wrong[1]"]
    assert named[-1] == "failed: test_it::test_without_server"
    assert len(named) == COUNT + 1
    assert any("AssertionError" in line for line in lines)
    assert len(lines) <= len(named) + TESTS_COUNT_MAX * LINES_COUNT_MAX
    assert max(map(len, lines)) <= LINE_CHARACTERS_MAX + 4
    assert "captured captured" not in "".join(lines)
