"""`make score`: scores our system and the baselines in equal scenarios; prints tables, writes `out/score.json` and
docs/scores.md.
"""

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

from gpu_autoscaler.core.state.state import EMPTY_STATE
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.sim.scoring import traces
from gpu_autoscaler.sim.scoring.baselines.cluster_autoscaler import ClusterAutoscaler
from gpu_autoscaler.sim.scoring.baselines.karpenter import Karpenter
from gpu_autoscaler.sim.scoring.baselines.known_demand import FixedFleet, score_omniscient, sized_for
from gpu_autoscaler.sim.scoring.baselines.observation import Baseline
from gpu_autoscaler.sim.scoring.baselines.utilization import UtilizationOnly, groups_for
from gpu_autoscaler.sim.scoring.metrics import Score
from gpu_autoscaler.sim.scoring.runner import (
    OURS,
    WITHOUT_SAVE_REQUESTS,
    score_baseline,
    score_ours,
    score_without_save_requests,
)
from gpu_autoscaler.sim.scoring.scenario import Scenario, bursts, steady
from gpu_autoscaler_services.scheduler.manifest import job_manifest
from gpu_autoscaler_services.score_page import COLUMNS, ScenarioScores, ScoreReport, cells, page
from gpu_autoscaler_services.simulation import ROLES

OUT = Path("out/score.json")
PAGE = Path("docs/scores.md")
TRACES = Path(os.environ.get("GPU_AUTOSCALER_TRACES", "../shared/traces"))
HOURS = 12.0
CONSOLE_WIDTH = 150
CRITICAL = 50  # services log every refusal; the score holds what matters

CHECKPOINTS = "bamboo-checkpoints"
MakeScenario = Callable[[int, float], Scenario]
WORLDS: dict[str, MakeScenario] = {
    "steady": steady,
    "bursts": bursts,
    "openb": partial(traces.openb, TRACES),
    "philly": partial(traces.philly, TRACES),
    "bamboo": partial(traces.bamboo, TRACES),
    CHECKPOINTS: partial(traces.bamboo_checkpoints, TRACES),
}
BASELINES: dict[str, Callable[[Scenario], Baseline]] = {
    "fixed": lambda scenario: FixedFleet(sized_for(scenario)),
    "utilization": lambda scenario: UtilizationOnly(groups_for(scenario)),
    "cluster-autoscaler": lambda _: ClusterAutoscaler(),
    "karpenter": lambda _: Karpenter(),
}
OMNISCIENT = "omniscient"
SYSTEMS = (OURS, *BASELINES, OMNISCIENT)


class Case(msgspec.Struct, frozen=True):
    """One system in one scenario."""

    world: str
    system: str
    seed: int
    hours: float


def systems_of(world: str) -> tuple[str, ...]:
    """Return the systems scored in this scenario; where all work checkpoints, also ours without checkpoint requests."""
    return (OURS, WITHOUT_SAVE_REQUESTS, *SYSTEMS[1:]) if world == CHECKPOINTS else SYSTEMS


def score(case: Case) -> Score:
    """Return the score of one case. Equal cases and code give equal scores."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(CRITICAL))
    scenario = WORLDS[case.world](case.seed, case.hours)
    if case.system == OURS:
        return score_ours(scenario, ROLES)
    if case.system == WITHOUT_SAVE_REQUESTS:
        return score_without_save_requests(scenario, ROLES)
    if case.system == OMNISCIENT:
        return score_omniscient(scenario)
    return score_baseline(scenario, BASELINES[case.system](scenario), _manifest)


def _manifest(spec: JobSpec) -> dict[str, object]:
    return job_manifest(spec, EMPTY_STATE)


def main() -> int:
    """Score the selected cases. Exits with 1 if our system violated an invariant."""
    options = _options()
    worlds = [options.world] if options.world else list(WORLDS)
    cases = [Case(world, system, options.seed, options.hours) for world in worlds for system in systems_of(world)]
    console = Console(width=CONSOLE_WIDTH)
    try:
        descriptions = {world: WORLDS[world](options.seed, options.hours).description for world in worlds}
    except ConfigError as exc:
        console.print(f"[red]{exc}[/red]", highlight=False)
        console.print(
            "set GPU_AUTOSCALER_TRACES to the folder of traces, or score a synthetic scenario: --world steady"
        )
        return 2
    scores = list(_run(cases, console, options.processes))
    report = ScoreReport(
        seed=options.seed,
        hours=options.hours,
        rounds=tuple(
            ScenarioScores(
                world=world,
                description=descriptions[world],
                scores=tuple(result for result in scores if result.world == world),
            )
            for world in worlds
        ),
    )
    for scenario in report.rounds:
        console.print(table(scenario))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    if options.write:
        PAGE.write_text(page(report, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    broken = [f"{result.world}: {violation}" for result in scores for violation in result.broken]
    for line in broken:
        console.print(f"[bold red]violated[/bold red] {line}", highlight=False)
    return 1 if broken else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make score", description=__doc__)
    parser.add_argument("--world", choices=list(WORLDS), help="only this scenario")
    parser.add_argument("--seed", type=int, default=1, help="seed of synthetic jobs, or window of a trace")
    parser.add_argument("--hours", type=float, default=HOURS, help="hours in which jobs arrive")
    parser.add_argument("--processes", type=int, help="number of processes (default: all cores)")
    parser.add_argument("--write", action="store_true", help=f"also write {PAGE}")
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


def table(scenario: ScenarioScores) -> Table:
    """Return the table of one scenario for the terminal."""
    drawn = Table(title=f"{scenario.world}: {scenario.description}", title_justify="left", box=None, title_style="bold")
    for name in COLUMNS:
        drawn.add_column(name, justify="left" if name == COLUMNS[0] else "right")
    for result in scenario.scores:
        drawn.add_row(*cells(result))
    return drawn


if __name__ == "__main__":
    sys.exit(main())
