"""`make sim-mutants`: plants each bug of `planted.py` in a copy of the code and lets the simulator look for it.

Ends with 1 where one was not found. The working tree is never touched.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tests.sim.planted import PLANTED, Planted

ROOT = Path(__file__).resolve().parents[2]
HOURS = 2.0
# Runs one seed after the other until a promise breaks; says which seed and which promise.
SEARCH = """
import sys
from gpu_autoscaler.sim.world import Setting
from gpu_autoscaler_services.simulate import run_one
for seed in range(1, int(sys.argv[1]) + 1):
    result = run_one(Setting(seed=seed, hours=float(sys.argv[2])))
    if result.broken:
        print(seed, result.broken[0], sep="\\t")
        break
"""


def plant(bug: Planted, root: Path) -> None:
    """Change the one place in this copy. Raises ValueError where the text is not there exactly once."""
    path = root / bug.path
    text = path.read_text(encoding="utf-8")
    if text.count(bug.right) != 1:
        raise ValueError(f"{bug.name!r}: {bug.path} has its text {text.count(bug.right)} times; plant it anew")
    path.write_text(text.replace(bug.right, bug.wrong), encoding="utf-8")


def search(bug: Planted, seeds_count: int) -> str:
    """Return where the bug was found: seed and broken promise; empty where it was not."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("libs", "services"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        plant(bug, copy)
        paths = os.pathsep.join(str(copy / part) for part in ("libs", "services"))
        done = subprocess.run(
            [sys.executable, "-c", SEARCH, str(seeds_count), str(HOURS)],
            env={**os.environ, "PYTHONPATH": paths},
            cwd=copy,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()


def main() -> int:
    """Look for every bug, or for those whose name has the words given."""
    parser = argparse.ArgumentParser(prog="make sim-mutants", description=__doc__)
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    table = Table("planted", "found by seed", "broken promise")
    missed = 0
    console = Console()
    for bug in PLANTED:
        if asked.only in bug.name:
            seed, _, promise = search(bug, asked.seeds).partition("\t")
            missed += not seed or promise.startswith("bug")
            table.add_row(bug.name, seed or "never", promise)
            console.print(f"{bug.name}: {seed or 'never'} {promise}", highlight=False)
    console.print(table)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
