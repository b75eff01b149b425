"""Many runs on all cores: a progress bar, a summary for people, `out/sim.json` for programs."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gpu_autoscaler.model import reasons
from gpu_autoscaler.sim.faults import KINDS, Occurrence
from gpu_autoscaler.sim.shrinking import Run, shrink
from gpu_autoscaler.sim.world import Result, Setting

SHRUNK_COUNT_MAX = 3  # failing runs that are made small; each takes as long as many runs


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A run that broke a promise, as small as it was made."""

    seed: int
    promise: str
    what: str
    faults: tuple[Occurrence, ...]
    is_shrunk: bool
    last_facts: tuple[str, ...]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What came of all runs."""

    commit: str
    seeds: int
    cluster_hours: float
    facts: int
    plans: int
    nodes_mean: float
    pods_per_hour: float
    faults_per_hour: float
    faults: dict[str, int]  # every kind there is
    faults_never_struck: tuple[str, ...]
    reasons: dict[str, int]  # every reason there is
    reasons_never_given: tuple[str, ...]
    broken: tuple[Failure, ...]


def sweep(
    settings: Sequence[Setting], run: Run, *, console: Console, processes_count: int | None = None
) -> list[Result]:
    """Run them all, in order of their settings."""
    count = min(processes_count or os.cpu_count() or 1, len(settings))
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress, ProcessPoolExecutor(count) as pool:
        task = progress.add_task("runs", total=len(settings))
        results = []
        for result in pool.map(run, settings):
            results.append(result)
            progress.advance(task)
            if result.broken:
                progress.console.print(f"[red]seed {result.seed}[/red]: {result.broken[0]}", highlight=False)
        return results


def summarise(results: Sequence[Result], settings: Sequence[Setting], run: Run, *, commit: str) -> Summary:
    """Return the sums; the first failing runs are made small."""
    hours = sum(result.cluster_hours for result in results)
    faults = _counted(KINDS, (result.faults for result in results))
    reasons_given = _counted(reason_tags(), (result.reasons for result in results))
    failing = [(result, setting) for result, setting in zip(results, settings, strict=True) if result.broken]
    return Summary(
        commit=commit,
        seeds=len(results),
        cluster_hours=round(hours, 2),
        facts=sum(result.facts_count for result in results),
        plans=sum(result.plans_count for result in results),
        nodes_mean=round(sum(result.nodes_mean * result.cluster_hours for result in results) / hours, 2),
        pods_per_hour=round(sum(result.pods_count for result in results) / hours, 2),
        faults_per_hour=round(sum(sum(result.faults.values()) for result in results) / hours, 2),
        faults=faults,
        faults_never_struck=_never(faults),
        reasons=reasons_given,
        reasons_never_given=_never(reasons_given),
        broken=tuple(
            failure_of(result, setting, run, is_shrunk=number < SHRUNK_COUNT_MAX)
            for number, (result, setting) in enumerate(failing)
        ),
    )


def failure_of(result: Result, setting: Setting, run: Run, *, is_shrunk: bool) -> Failure:
    """Return the failing run for people to read."""
    small = shrink(setting, result, run)[1] if is_shrunk else result
    return Failure(
        seed=result.seed,
        promise=small.promise,
        what=small.broken[0],
        faults=small.happened,
        is_shrunk=is_shrunk,
        last_facts=small.last_facts,
    )


def write(summary: Summary, path: Path) -> None:
    """Write the summary as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2))


def tell(summary: Summary, console: Console) -> None:
    """Say what came of it: figures, what was never reached, and each failure with the way to see it again."""
    sums = (
        f"{summary.seeds} seeds, {summary.cluster_hours:g} cluster-hours, {summary.facts} facts, {summary.plans} plans"
    )
    means = (summary.nodes_mean, summary.pods_per_hour, summary.faults_per_hour)
    console.print(f"{sums}; {means[0]:g} nodes on average, {means[1]:g} pods and {means[2]:g} faults an hour")
    never = (
        ("faults that never struck", summary.faults_never_struck),
        ("reasons never given", summary.reasons_never_given),
    )
    for what, missing in never:
        if missing:
            console.print(f"{what}: {', '.join(missing)}", highlight=False)
    for failure in summary.broken:
        console.print(f"\n[bold red]seed {failure.seed}, commit {summary.commit}[/bold red]", highlight=False)
        console.print(f"broken: {failure.what}", highlight=False)
        size = "shortest list of faults found" if failure.is_shrunk else "faults"
        console.print(f"{size}: {', '.join(f'{kind} #{number}' for kind, number in failure.faults)}", highlight=False)
        for line in failure.last_facts:
            console.print(f"  {line}", highlight=False, soft_wrap=True)
        console.print(f"again: make sim SEED={failure.seed}", highlight=False)
    console.print(f"broken: {len(summary.broken)}", highlight=False)


def reason_tags() -> list[str]:
    """Return the tag of every reason that there is, for doing or for holding back."""
    found = (getattr(reasons, name) for name in dir(reasons))
    return sorted(
        one.tag()
        for one in found
        if isinstance(one, type) and issubclass(one, reasons.Reason) and one is not reasons.Reason
    )


def _never(counts: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(name for name, count in counts.items() if not count)


def _counted(names: Iterable[str], counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return {name: total[name] for name in sorted({*names, *total})}
