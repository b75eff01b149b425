"""`make sim`: runs the whole system in the simulator, seed after seed. Ends with 1 where a promise broke."""

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog
from msgspec.structs import replace
from rich.console import Console

from gpu_autoscaler.sim import world
from gpu_autoscaler.sim.both_ways import run_both_ways
from gpu_autoscaler.sim.seat import Roles
from gpu_autoscaler.sim.shrinking import only
from gpu_autoscaler.sim.swarm import Bounds, faults_of, summarise, sweep, tell, write
from gpu_autoscaler.sim.world import HOURS, Result, Setting
from gpu_autoscaler_services.simulation import ROLES

OUT = Path("out/sim.json")
CRITICAL = 50  # services tell of every fault that they meet; what matters is in the result


def run_one(setting: Setting) -> Result:
    """Return what came of one run of the real services."""
    return _timed(world.run, setting)


def run_one_both_ways(setting: Setting) -> Result:
    """Return what came of one run; with every tick its facts have to be the same."""
    return _timed(run_both_ways, setting)


def _timed(run: Callable[[Setting, Roles], Result], setting: Setting) -> Result:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(CRITICAL))
    began_at = time.process_time()
    result = run(setting, ROLES)
    return replace(result, cpu_seconds=time.process_time() - began_at)


def main() -> int:
    """Run what is asked for; the number of broken promises decides the exit status."""
    parser = argparse.ArgumentParser(prog="make sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="run so many seeds, from --first on")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--hours", type=float, default=HOURS, help="cluster time of each run before it settles")
    parser.add_argument(
        "--jobs-per-hour", type=float, help="how much work arrives; each seed's own choice if not given"
    )
    parser.add_argument("--large", action="store_true", help="in worlds whose hours count")
    parser.add_argument(
        "--cluster-hours", type=float, help="as many seeds as so many hours take; only those that count"
    )
    parser.add_argument("--minutes", type=float, help="begin no run after so long")
    parser.add_argument("--processes", type=int, help="all cores if not given")
    parser.add_argument("--only", type=faults_of, help="with these faults alone, as a failure lists them")
    parser.add_argument("--both-ways", action="store_true", help="each run again with every tick: equal facts")
    asked = parser.parse_args()
    run, options = (run_one_both_ways, "--both-ways") if asked.both_ways else (run_one, "")
    options = f"{options} --large" if asked.large else options
    console = Console()
    bounds = Bounds(cluster_hours=asked.cluster_hours, seconds=None if asked.minutes is None else asked.minutes * 60.0)
    lived = sweep(_settings(asked), run, console=console, processes_count=asked.processes, bounds=bounds)
    summary = summarise(lived, run, commit=_commit(), options=options)
    write(summary, OUT)
    tell(summary, console)
    if asked.cluster_hours is not None:
        console.print(
            f"{summary.cluster_hours:.0f} of {asked.cluster_hours:.0f} cluster-hours reached", highlight=False
        )
    return 1 if summary.broken else 0


def _settings(asked: argparse.Namespace) -> Iterable[Setting]:
    """The runs asked for; without an end where hours are what is asked for."""

    def setting(seed: int) -> Setting:
        made = Setting(seed=seed, hours=asked.hours, jobs_per_hour=asked.jobs_per_hour, is_large=asked.large)
        return made if asked.only is None else only(made, asked.only)

    if asked.seed is not None:
        return [setting(asked.seed)]
    if asked.cluster_hours is not None:
        return map(setting, itertools.count(asked.first))
    return [setting(seed) for seed in range(asked.first, asked.first + asked.seeds)]


def _commit() -> str:
    """The commit that runs, as far as git is there to say so."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603 - constant
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
