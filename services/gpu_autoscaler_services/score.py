"""`make score`: our system and the baselines, each in the same worlds; tables, `out/score.json`, docs/scores.md."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import structlog
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gpu_autoscaler.core.state import EMPTY_STATE
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.sim import scenes, trace_worlds
from gpu_autoscaler.sim.baselines.cluster_autoscaler import ClusterAutoscaler
from gpu_autoscaler.sim.baselines.fixed import FixedFleet, sized_for
from gpu_autoscaler.sim.baselines.karpenter import Karpenter
from gpu_autoscaler.sim.baselines.omniscient import score_omniscient
from gpu_autoscaler.sim.baselines.protocol import Baseline
from gpu_autoscaler.sim.baselines.utilisation import UtilisationOnly, groups_for
from gpu_autoscaler.sim.scene import Scene
from gpu_autoscaler.sim.scores import OURS, UNTOLD, score_baseline, score_ours, score_untold
from gpu_autoscaler.sim.tally import Score
from gpu_autoscaler_services.scheduler.manifest import job_manifest
from gpu_autoscaler_services.score_page import COLUMNS, Board, Round, cells, page
from gpu_autoscaler_services.simulation import ROLES

OUT = Path("out/score.json")
PAGE = Path("docs/scores.md")
TRACES = Path(os.environ.get("GPU_AUTOSCALER_TRACES", "../shared/traces"))
HOURS = 12.0
CONSOLE_WIDTH = 150
CRITICAL = 50  # services tell of every refusal that they meet; what matters is in the score

CHECKPOINTS = "bamboo-checkpoints"
Make = Callable[[int, float], Scene]
WORLDS: dict[str, Make] = {
    "steady": scenes.steady,
    "bursts": scenes.bursts,
    "openb": partial(trace_worlds.openb, TRACES),
    "philly": partial(trace_worlds.philly, TRACES),
    "bamboo": partial(trace_worlds.bamboo, TRACES),
    CHECKPOINTS: partial(trace_worlds.bamboo_checkpoints, TRACES),
}
BASELINES: dict[str, Callable[[Scene], Baseline]] = {
    "fixed": lambda scene: FixedFleet(sized_for(scene)),
    "utilisation": lambda scene: UtilisationOnly(groups_for(scene)),
    "cluster-autoscaler": lambda _: ClusterAutoscaler(),
    "karpenter": lambda _: Karpenter(),
}
OMNISCIENT = "omniscient"
SYSTEMS = (OURS, *BASELINES, OMNISCIENT)


class Case(msgspec.Struct, frozen=True):
    """One system in one world."""

    world: str
    system: str
    seed: int
    hours: float


def systems_of(world: str) -> tuple[str, ...]:
    """Return who is scored in this world: where all work saves itself, ours without its requests as well."""
    return (OURS, UNTOLD, *SYSTEMS[1:]) if world == CHECKPOINTS else SYSTEMS


def score(case: Case) -> Score:
    """Return what came of one case. Equal cases and code, equal scores."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(CRITICAL))
    scene = WORLDS[case.world](case.seed, case.hours)
    if case.system == OURS:
        return score_ours(scene, ROLES)
    if case.system == UNTOLD:
        return score_untold(scene, ROLES)
    if case.system == OMNISCIENT:
        return score_omniscient(scene)
    return score_baseline(scene, BASELINES[case.system](scene), _manifest)


def _manifest(spec: JobSpec) -> dict[str, object]:
    return job_manifest(spec, EMPTY_STATE)


def main() -> int:
    """Score what is asked for. Ends with 1 where our system broke a promise."""
    options = _options()
    worlds = [options.world] if options.world else list(WORLDS)
    cases = [Case(world, system, options.seed, options.hours) for world in worlds for system in systems_of(world)]
    console = Console(width=CONSOLE_WIDTH)
    try:
        told = {world: WORLDS[world](options.seed, options.hours).told for world in worlds}
    except ConfigError as exc:
        console.print(f"[red]{exc}[/red]", highlight=False)
        console.print("set GPU_AUTOSCALER_TRACES to the folder of traces, or score one made up: --world steady")
        return 2
    scores = list(_run(cases, console, options.processes))
    board = Board(
        seed=options.seed,
        hours=options.hours,
        rounds=tuple(
            Round(world=world, told=told[world], scores=tuple(one for one in scores if one.world == world))
            for world in worlds
        ),
    )
    for each in board.rounds:
        console.print(table(each))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_bytes(msgspec.json.format(msgspec.json.encode(board), indent=2) + b"\n")
    if options.write:
        PAGE.write_text(page(board), encoding="utf-8")
    broken = [f"{one.world}: {promise}" for one in scores for promise in one.broken]
    for line in broken:
        console.print(f"[bold red]broken[/bold red] {line}", highlight=False)
    return 1 if broken else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make score", description=__doc__)
    parser.add_argument("--world", choices=list(WORLDS), help="this one only")
    parser.add_argument("--seed", type=int, default=1, help="of made-up work; the window of a trace")
    parser.add_argument("--hours", type=float, default=HOURS, help="in which work arrives")
    parser.add_argument("--processes", type=int, help="all cores if not given")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE} as well")
    return parser.parse_args()


def _run(cases: Sequence[Case], console: Console, processes_count: int | None) -> Iterator[Score]:
    """Yield the scores in order of their cases."""
    count = min(processes_count or os.cpu_count() or 1, len(cases))
    columns = (TextColumn("scoring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, ProcessPoolExecutor(count) as pool:
        task = progress.add_task("cases", total=len(cases))
        for result in pool.map(score, cases):
            progress.advance(task)
            yield result


def table(each: Round) -> Table:
    """Return one world's scores for the terminal."""
    drawn = Table(title=f"{each.world}: {each.told}", title_justify="left", box=None, title_style="bold")
    for name in COLUMNS:
        drawn.add_column(name, justify="left" if name == COLUMNS[0] else "right")
    for one in each.scores:
        drawn.add_row(*cells(one))
    return drawn


if __name__ == "__main__":
    sys.exit(main())
