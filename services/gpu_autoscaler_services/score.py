"""`make score`: scores our system and the baselines in equal scenarios; prints tables, writes `out/score.json` and
docs/scores.md. Scores are kept in `out/scores` until the scenario or the code changes: run it again to continue.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.sim.scoring.baselines.offline import OFFLINE
from gpu_autoscaler.sim.scoring.metrics import Score
from gpu_autoscaler.sim.scoring.ours import WITHOUT_LEVER
from gpu_autoscaler_services.score_cases import OMNISCIENT, WORLDS, Case, keep_score, kept_score, score, systems_of
from gpu_autoscaler_services.score_page import (
    BOUND_COLUMNS,
    CAUSE_COLUMNS,
    COLUMNS,
    LEVER_COLUMNS,
    RATIO_COLUMNS,
    ScenarioScores,
    ScoreReport,
    bound_rows,
    cause_rows,
    cells,
    lever_rows,
    page,
    ratio_rows,
)

OUT = Path("out/score.json")
PAGE = Path("docs/scores.md")
HOURS = 12.0
CONSOLE_WIDTH = 150


def main() -> int:
    """Score the selected cases. Exits with 1 if our system violated an invariant, and 3 if cases are left."""
    options = _options()
    worlds = options.world or list(WORLDS)
    seeds = range(1, options.seeds + 1) if options.seeds else [options.seed]
    cases = [
        Case(world, system, seed, options.hours)
        for world in worlds
        for seed in seeds
        for system in _systems(world, options)
    ]
    console = Console(width=CONSOLE_WIDTH)
    try:
        descriptions = {world: WORLDS[world](seeds[0], options.hours).description for world in worlds}
    except ConfigError as exc:
        console.print(f"[red]{exc}[/red]", highlight=False)
        console.print(
            "set GPU_AUTOSCALER_TRACES to the folder of traces, or score a synthetic scenario: --world steady"
        )
        return 2
    scores = _run(cases, console, options.processes, options.minutes)
    report = ScoreReport(
        seed=seeds[0],
        hours=options.hours,
        rounds=tuple(
            ScenarioScores(world=world, description=descriptions[world], scores=found, seed=seed)
            for world in worlds
            for seed in seeds
            if (
                found := tuple(
                    scores[case] for case in cases if (case.world, case.seed) == (world, seed) and case in scores
                )
            )
        ),
    )
    for table in tables(report):
        console.print(table)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    if len(scores) < len(cases):
        console.print(f"{len(cases) - len(scores)} of {len(cases)} cases are left: run the command again to continue")
        return 3
    if options.write:
        PAGE.write_text(page(report, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    broken = [f"{case.world}, seed {case.seed}: {line}" for case in cases for line in scores[case].broken]
    for line in broken:
        console.print(f"[bold red]violated[/bold red] {line}", highlight=False)
    return 1 if broken else 0


def _systems(world: str, options: argparse.Namespace) -> list[str]:
    """Return the systems to score in this scenario."""
    usual, more = systems_of(world), (OFFLINE, *WITHOUT_LEVER)
    named = [name for name in (*usual, *more) if name in options.system] if options.system else list(usual)
    if options.offline:
        named += [OMNISCIENT, OFFLINE]
    if options.ablations:
        named += WITHOUT_LEVER
    return list(dict.fromkeys(named))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make score", description=__doc__)
    parser.add_argument("--world", choices=list(WORLDS), action="append", help="only this scenario; repeatable")
    parser.add_argument("--system", action="append", help="only this system; repeatable")
    parser.add_argument("--offline", action="store_true", help="also the offline schedule; prints bounds of the cost")
    parser.add_argument(
        "--ablations", action="store_true", help="also ours with each rule that saves cost switched off"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of synthetic jobs, or window of a trace")
    parser.add_argument("--seeds", type=int, help="score seeds 1 to this number, and compare over them")
    parser.add_argument("--hours", type=float, default=HOURS, help="hours in which jobs arrive")
    parser.add_argument("--processes", type=int, help="number of processes (default: all cores)")
    parser.add_argument("--minutes", type=float, help="begin no case after this time; run again to continue")
    parser.add_argument("--write", action="store_true", help=f"also write {PAGE}")
    return parser.parse_args()


def _run(
    cases: Sequence[Case], console: Console, processes_count: int | None, minutes: float | None
) -> dict[Case, Score]:
    """Return kept and new scores; fewer than cases where the time is over."""
    kept = ((case, kept_score(case)) for case in cases)
    scores = {case: found for case, found in kept if found is not None}
    left = [case for case in cases if case not in scores]
    if not left:
        return scores
    count = min(processes_count or os.cpu_count() or 1, len(left))
    columns = (TextColumn("scoring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, ProcessPoolExecutor(count) as pool:
        task = progress.add_task("cases", total=len(cases), completed=len(scores))
        for case, result in _scored(left, pool, count, minutes):
            keep_score(case, result)
            scores[case] = result
            progress.advance(task)
    return scores


def _scored(
    cases: Iterable[Case], pool: ProcessPoolExecutor, count: int, minutes: float | None
) -> Iterator[tuple[Case, Score]]:
    """Yield scores as they come; begin no case once the time is over."""
    ends_at = None if minutes is None else time.monotonic() + 60.0 * minutes
    left, running = iter(cases), dict[Future[Score], Case]()
    while True:
        while len(running) < count and (ends_at is None or time.monotonic() < ends_at):
            case = next(left, None)
            if case is None:
                break
            running[pool.submit(score, case)] = case
        if not running:
            return
        for done in wait(running, return_when=FIRST_COMPLETED).done:
            yield running.pop(done), done.result()


def tables(report: ScoreReport) -> Iterator[Table]:
    """Yield the tables for the terminal: figures where one seed is scored, dollars by cause, and ratios over seeds."""
    worlds = dict.fromkeys(scenario.world for scenario in report.rounds)
    for world in worlds:
        rounds = [scenario for scenario in report.rounds if scenario.world == world]
        title = f"{world}: {rounds[0].description}"
        if len(rounds) == 1:
            yield _table(title, COLUMNS, map(cells, rounds[0].scores))
        yield _table(f"{title}; USD by cause, mean of {len(rounds)}", CAUSE_COLUMNS, cause_rows(rounds))
    yield _table("ours, relative to", RATIO_COLUMNS, ratio_rows(report.rounds))
    if bounds := list(bound_rows(report.rounds)):
        yield _table("USD, and relative to karpenter-like", BOUND_COLUMNS, bounds)
    if levers := list(lever_rows(report.rounds)):
        yield _table("ours without one rule, relative to ours", LEVER_COLUMNS, levers)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    drawn = Table(title=title, title_justify="left", box=None, title_style="bold")
    for name in columns:
        drawn.add_column(name, justify="left" if name == columns[0] else "right")
    for row in rows:
        drawn.add_row(*row)
    return drawn


if __name__ == "__main__":
    sys.exit(main())
