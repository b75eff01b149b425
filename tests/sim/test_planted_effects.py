"""Bugs that the simulator cannot see are found by the test that names them; without the bug the test passes."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sim.hunting import ROOT, plant
from tests.sim.planted_effects import SHOWN_BY_TESTS, ShownByTest

pytestmark = [pytest.mark.slow, pytest.mark.sweep, pytest.mark.timeout(600)]


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Path]:
    """A copy of code and tests."""
    for part in ("libs", "services", "tests/support", "tests/services", "tests/unit"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "tests/conftest.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    yield tmp_path
    shutil.rmtree(tmp_path)


def run(test: str, copy: Path) -> subprocess.CompletedProcess[str]:
    """Run one test on the copy."""
    paths = os.pathsep.join(str(copy / part) for part in ("libs", "services", "."))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("shown", SHOWN_BY_TESTS, ids=lambda shown: shown.bug.name)
def test_a_planted_bug_fails_its_test(shown: ShownByTest, copy: Path) -> None:
    """By a failed claim, or by a node that is never cordoned; not by an error of the code."""
    plant(shown.bug, copy)
    completed = run(shown.test, copy)
    assert completed.returncode == 1, completed.stdout + completed.stderr
    raised = [line for line in completed.stdout.splitlines() if line.startswith("E ")]
    assert any("assert" in line or "TimeoutError" in line for line in raised), completed.stdout


def test_the_tests_pass_without_a_bug(copy: Path) -> None:
    """In the same copy of the code."""
    for test in dict.fromkeys(shown.test for shown in SHOWN_BY_TESTS):
        completed = run(test, copy)
        assert completed.returncode == 0, completed.stdout + completed.stderr
