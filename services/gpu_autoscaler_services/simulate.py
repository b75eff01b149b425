"""`make sim`: runs the whole system in the simulator, seed after seed. Ends with 1 where a promise broke."""

import argparse
import subprocess
import sys
from pathlib import Path

import structlog
from rich.console import Console

from gpu_autoscaler.sim.swarm import summarise, sweep, tell, write
from gpu_autoscaler.sim.world import HOURS, Result, Setting, run
from gpu_autoscaler_services.simulation import ROLES

OUT = Path("out/sim.json")
CRITICAL = 50  # services tell of every fault that they meet; what matters is in the result


def run_one(setting: Setting) -> Result:
    """Return what came of one run of the real services."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(CRITICAL))
    return run(setting, ROLES)


def main() -> int:
    """Run what is asked for; the number of broken promises decides the exit status."""
    parser = argparse.ArgumentParser(prog="make sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="run so many seeds, from --first on")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--hours", type=float, default=HOURS, help="cluster time of each run before it settles")
    parser.add_argument("--processes", type=int, help="all cores if not given")
    asked = parser.parse_args()
    seeds = [asked.seed] if asked.seed is not None else range(asked.first, asked.first + asked.seeds)
    settings = [Setting(seed=seed, hours=asked.hours) for seed in seeds]
    console = Console()
    results = sweep(settings, run_one, console=console, processes_count=asked.processes)
    summary = summarise(results, settings, run_one, commit=_commit())
    write(summary, OUT)
    tell(summary, console)
    return 1 if summary.broken else 0


def _commit() -> str:
    """The commit that runs, as far as git is there to say so."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603 - constant
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
