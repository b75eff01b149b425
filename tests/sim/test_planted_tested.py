"""Each bug that a test is to find makes that test fail."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sim.hunting import ROOT, plant
from tests.sim.planted_tested import TESTED

pytestmark = pytest.mark.sweep


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of code and tests."""
    copy = tmp_path_factory.mktemp("planted")
    for part in ("libs", "services", "tests"):
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    yield copy
    shutil.rmtree(copy)


@pytest.mark.parametrize("test", TESTED, ids=lambda test: TESTED[test].name)
def test_a_test_finds_the_planted_bug(test: str, copy: Path) -> None:
    """It fails with the bug; that it passes without is the test's own business."""
    bug = TESTED[test]
    before = {name: (copy / name).read_bytes() for name, _, _ in bug.changes()}
    plant(bug, copy)
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", test]
        paths = os.pathsep.join(str(copy / part) for part in ("libs", "services", "."))
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        completed = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    finally:
        for name, text in before.items():
            (copy / name).write_bytes(text)
    assert completed.returncode == 1, completed.stdout[-3000:] + completed.stderr[-2000:]
    assert "1 failed" in completed.stdout
