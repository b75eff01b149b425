"""`make sim`: simulates the whole system, seed after seed. Exits with 1 if an invariant was violated."""

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

from gpu_autoscaler.sim import simulation
from gpu_autoscaler.sim.actors.teams import draws_teams
from gpu_autoscaler.sim.adapters.assembly import Roles
from gpu_autoscaler.sim.simulation import HOURS, Result, Setting, run_differential
from gpu_autoscaler.sim.sweep import (
    SweepLimits,
    fresh_seeds,
    parse_faults,
    print_summary,
    summarize,
    sweep,
    with_only_faults,
    write,
)
from gpu_autoscaler_services.simulation import ROLES

OUT = Path("out/sim.json")
CRITICAL = 50  # services log every fault; the result holds what matters


def run_one(setting: Setting) -> Result:
    """Return the result of one run of the real services."""
    return _timed(simulation.run, setting)


def run_one_differential(setting: Setting) -> Result:
    """Return the result of one run, which must publish the same facts with every tick."""
    return _timed(run_differential, setting)


def _timed(run: Callable[[Setting, Roles], Result], setting: Setting) -> Result:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(CRITICAL))
    began_at = time.process_time()
    result = run(setting, ROLES)
    return replace(result, cpu_seconds=time.process_time() - began_at)


def main() -> int:
    """Run the selected seeds; violations set the exit status."""
    parser = argparse.ArgumentParser(prog="make sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="number of seeds, starting at --first")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seed", type=int, help="run only this seed")
    parser.add_argument("--fresh", type=int, default=0, help="number of seeds besides, which --fresh-from determines")
    parser.add_argument("--fresh-from", metavar="TEXT", help="where fresh seeds come from (default: the commit)")
    parser.add_argument("--hours", type=float, default=HOURS, help="hours with faults of each run, before quiescence")
    parser.add_argument("--jobs-per-hour", type=float, help="job arrival rate (default: chosen by each seed)")
    parser.add_argument("--quiet-days", type=int, default=0, help="days to skip at rest, before more work comes")
    parser.add_argument(
        "--teams",
        action=argparse.BooleanOptionalAction,
        help="teams with queues, quotas and namespaces of their own (default: drawn by each seed; none in large ones)",
    )
    parser.add_argument("--notebooks", action="store_true", help="idle workloads outside of the queue, which end")
    parser.add_argument("--kueue", action="store_true", help="workloads that ask for capacity before their pods exist")
    parser.add_argument("--large", action="store_true", help="large clusters, whose hours count")
    parser.add_argument("--cluster-hours", type=float, help="run seeds until this many hours count")
    parser.add_argument("--minutes", type=float, help="start no run after this time")
    parser.add_argument("--processes", type=int, help="number of processes (default: all cores)")
    parser.add_argument("--only", type=parse_faults, help="only these faults, as a failure lists them")
    parser.add_argument(
        "--both-ways",
        action="store_true",
        help="differential run: repeat each run with every tick and compare the facts",
    )
    parser.add_argument("--record", help="write all facts of each run to this file, with {seed} for its seed")
    arguments = parser.parse_args()
    if arguments.record and arguments.seed is None and "{seed}" not in arguments.record:
        parser.error("--record of several seeds needs {seed} in the file name")
    for option in ("hours", "jobs-per-hour", "cluster-hours", "minutes", "processes"):
        value = getattr(arguments, option.replace("-", "_"))
        if value is not None and value <= 0:
            parser.error(f"--{option} is {value:g}; it must be above 0")
    settings = _settings(arguments)
    if settings == []:
        parser.error("no seed is selected; give --seeds, --fresh or --seed")
    run, options = (run_one_differential, "--both-ways") if arguments.both_ways else (run_one, "")
    options = f"{options} --large" if arguments.large else options
    if arguments.teams is not None:
        options += " --teams" if arguments.teams else " --no-teams"
    options = f"{options} --notebooks" if arguments.notebooks else options
    options = f"{options} --kueue" if arguments.kueue else options
    console = Console()
    limits = SweepLimits(
        cluster_hours=arguments.cluster_hours, seconds=None if arguments.minutes is None else arguments.minutes * 60.0
    )
    if fresh := _fresh(arguments):
        console.print(f"fresh seeds: {', '.join(map(str, fresh))}", highlight=False, soft_wrap=True)
    runs = sweep(settings, run, console=console, processes_count=arguments.processes, limits=limits)
    summary = summarize(runs, run, commit=_commit(), options=options)
    write(summary, OUT)
    print_summary(summary, console)
    if arguments.cluster_hours is not None:
        console.print(
            f"{summary.cluster_hours:.0f} of {arguments.cluster_hours:.0f} cluster-hours reached", highlight=False
        )
    return 1 if summary.broken else 0


def _settings(arguments: argparse.Namespace) -> Iterable[Setting]:
    """Yield the selected runs; endless where `--cluster-hours` decides."""

    def setting(seed: int) -> Setting:
        run_setting = Setting(
            seed=seed,
            hours=arguments.hours,
            jobs_per_hour=arguments.jobs_per_hour,
            is_large=arguments.large,
            has_teams=not arguments.large and draws_teams(seed) if arguments.teams is None else arguments.teams,
            has_notebooks=arguments.notebooks,
            has_kueue=arguments.kueue,
            quiet_days=arguments.quiet_days,
            record_path=arguments.record and arguments.record.replace("{seed}", str(seed)),
        )
        return run_setting if arguments.only is None else with_only_faults(run_setting, arguments.only)

    if arguments.seed is not None:
        return [setting(arguments.seed)]
    if arguments.cluster_hours is not None:
        return map(setting, itertools.count(arguments.first))
    fixed = range(arguments.first, arguments.first + arguments.seeds)
    # In turn, so that a time limit leaves out some of both.
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(fixed, _fresh(arguments)))
    return [setting(seed) for seed in in_turn if seed is not None]


def _fresh(arguments: argparse.Namespace) -> tuple[int, ...]:
    """Return the fresh seeds; none where the command selects one seed, or as many as are needed."""
    if arguments.seed is not None or arguments.cluster_hours is not None:
        return ()
    return fresh_seeds(arguments.fresh_from or _commit("rev-parse", "HEAD"), arguments.fresh)


def _commit(*options: str) -> str:
    """Return the commit as git prints it with these options, if git is available."""
    command = ["git", *(options or ("describe", "--always", "--dirty"))]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603 - constants
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
