"""Many runs on all cores: progress bar, summary for people, `out/sim.json` for programs."""

import itertools
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Sized
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from gpu_autoscaler.model import reasons
from gpu_autoscaler.model.reason import Reason
from gpu_autoscaler.sim.coverage import SELDOM
from gpu_autoscaler.sim.faults import KINDS, Occurrence
from gpu_autoscaler.sim.shrinking import Run, shrink
from gpu_autoscaler.sim.world import Result, Setting

NO_FAULT = "none"  # instead of an empty list of faults
SHRUNK_COUNT_MAX = 3  # shrinking takes as long as many runs
# Only hours of runs with at least these means count.
NODES_MEAN_MIN, PODS_PER_HOUR_MIN, FAULTS_PER_HOUR_MIN = 10.0, 30.0, 1.0


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A run that violated an invariant, shrunk if possible."""

    seed: int
    promise: str
    what: str
    faults: tuple[Occurrence, ...]
    is_shrunk: bool
    last_facts: tuple[str, ...]
    arguments: str  # of `make sim`, besides the seed
    arguments_small: str  # ... with the listed faults only


class Lived(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one run."""

    seed: int
    cluster_hours: float
    is_counted: bool  # large and faulty enough, see `is_counted`
    nodes_mean: float
    pods_per_hour: float
    faults_per_hour: float
    cpu_seconds: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of all runs."""

    commit: str
    seeds: int
    cluster_hours: float  # of runs that count
    cluster_hours_run: float  # of all runs
    cpu_seconds: float
    cluster_hours_per_cpu_second: float  # of all runs
    facts: int
    plans: int
    nodes_mean: float
    pods_per_hour: float
    faults_per_hour: float
    faults: dict[str, int]  # every kind, also those that never struck
    faults_never_struck: tuple[str, ...]
    reasons: dict[str, int]  # every reason, also those never given
    reasons_never_given: tuple[str, ...]
    broken: tuple[Failure, ...]
    runs: tuple[Lived, ...]


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """When to start no more runs."""

    cluster_hours: float | None = None  # that count; None: until all settings have run
    seconds: float | None = None  # of wall time; None: unlimited


NO_BOUNDS = Bounds()


def sweep(
    settings: Iterable[Setting],
    run: Run,
    *,
    console: Console,
    processes_count: int | None = None,
    bounds: Bounds = NO_BOUNDS,
) -> list[tuple[Setting, Result]]:
    """Run the settings in parallel within the limits. Return the results in the order of the settings."""
    count = processes_count or os.cpu_count() or 1
    began_at = time.monotonic()
    lived: dict[int, tuple[Setting, Result]] = {}
    with _progress(console) as progress, ProcessPoolExecutor(count) as pool:
        of_runs = len(settings) if isinstance(settings, Sized) else None
        task = progress.add_task("runs", total=bounds.cluster_hours or of_runs, hours="")
        waiting, under_way = enumerate(settings), dict[Future[Result], tuple[int, Setting]]()
        while True:
            counted = sum(result.cluster_hours for _, result in lived.values() if is_counted(result))
            is_enough = (bounds.cluster_hours is not None and counted >= bounds.cluster_hours) or (
                bounds.seconds is not None and time.monotonic() - began_at >= bounds.seconds
            )
            progress.update(
                task,
                completed=len(lived) if bounds.cluster_hours is None else counted,
                hours=f"{len(lived)} runs, {counted:.0f} cluster-hours that count",
            )
            if not is_enough:
                for number, setting in itertools.islice(waiting, count - len(under_way)):
                    under_way[pool.submit(run, setting)] = (number, setting)
            if not under_way:
                return [each for _, each in sorted(lived.items())]
            for done in wait(under_way, return_when=FIRST_COMPLETED).done:
                number, setting = under_way.pop(done)
                lived[number] = (setting, result := done.result())
                if result.broken:
                    progress.console.print(f"[red]seed {result.seed}[/red]: {result.broken[0]}", highlight=False)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("simulating"), BarColumn(), TextColumn("{task.fields[hours]}"), TimeElapsedColumn(), console=console
    )


def is_counted(result: Result) -> bool:
    """True for a run large and faulty enough for its hours to count."""
    return (
        result.nodes_mean >= NODES_MEAN_MIN
        and result.pods_per_hour >= PODS_PER_HOUR_MIN
        and result.faults_per_hour >= FAULTS_PER_HOUR_MIN
    )


def summarise(lived: Sequence[tuple[Setting, Result]], run: Run, *, commit: str, options: str = "") -> Summary:
    """Return the totals; the first failing runs are shrunk. `options`: the command options that `run` stands for."""
    results = [result for _, result in lived]
    hours = sum(result.cluster_hours for result in results)
    cpu_seconds = sum(result.cpu_seconds for result in results)
    faults = _counted(KINDS, (result.faults for result in results))
    reasons_given = _counted(reason_tags(), (result.reasons for result in results))
    failing = [(result, setting) for setting, result in lived if result.broken]
    return Summary(
        commit=commit,
        seeds=len(results),
        cluster_hours=round(sum(result.cluster_hours for result in results if is_counted(result)), 2),
        cluster_hours_run=round(hours, 2),
        cpu_seconds=round(cpu_seconds, 1),
        cluster_hours_per_cpu_second=round(hours / cpu_seconds, 2) if cpu_seconds else 0.0,
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
            failure_of(result, setting, run, is_shrunk=number < SHRUNK_COUNT_MAX, options=options)
            for number, (result, setting) in enumerate(failing)
        ),
        runs=tuple(map(_lived, results)),
    )


def _lived(result: Result) -> Lived:
    return Lived(
        seed=result.seed,
        cluster_hours=round(result.cluster_hours, 2),
        is_counted=is_counted(result),
        nodes_mean=round(result.nodes_mean, 2),
        pods_per_hour=round(result.pods_per_hour, 2),
        faults_per_hour=round(result.faults_per_hour, 2),
        cpu_seconds=round(result.cpu_seconds, 2),
    )


def failure_of(result: Result, setting: Setting, run: Run, *, is_shrunk: bool, options: str = "") -> Failure:
    """Return the failing run for the report."""
    smallest, small = shrink(setting, result, run) if is_shrunk else (setting, result)
    return Failure(
        seed=result.seed,
        promise=result.promise,
        what=result.broken[0],
        faults=small.happened,
        is_shrunk=smallest != setting,
        last_facts=small.last_facts,
        arguments=_arguments(setting, setting.only, options),
        arguments_small=_arguments(setting, small.happened, options),
    )


def _arguments(setting: Setting, only: Sequence[Occurrence] | None, options: str) -> str:
    said = [*options.split(), f"--hours {setting.hours:g}"]
    if setting.jobs_per_hour is not None:
        said.append(f"--jobs-per-hour {setting.jobs_per_hour:g}")
    if only is not None:
        said.append(f"--only {told_faults(only)}")
    return f' ARGS="{" ".join(said)}"'


def faults_of(told: str) -> tuple[Occurrence, ...]:
    """Parse a list of faults as `format_faults` writes it. Raises ValueError."""
    if told == NO_FAULT:
        return ()
    found = [one.partition("#") for one in told.split(",")]
    if unknown := sorted({kind for kind, _, _ in found} - set(KINDS)):
        raise ValueError(f"no kind of fault: {', '.join(unknown)}; there are {', '.join(sorted(KINDS))}")
    return tuple((kind, int(number)) for kind, _, number in found)


def told_faults(faults: Sequence[Occurrence]) -> str:
    """Return the list in the form that `parse_faults` reads."""
    return ",".join(f"{kind}#{number}" for kind, number in faults) or NO_FAULT


def write(summary: Summary, path: Path) -> None:
    """Write the summary as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2))


def tell(summary: Summary, console: Console) -> None:
    """Print totals, faults and reasons that never occurred, and each failure with its command."""
    hours = f"{summary.cluster_hours_run:g} cluster-hours ({summary.cluster_hours:g} count)"
    sums = f"{summary.seeds} seeds, {hours}, {summary.facts} facts, {summary.plans} plans"
    means = (summary.nodes_mean, summary.pods_per_hour, summary.faults_per_hour)
    console.print(f"{sums}; {means[0]:g} nodes on average, {means[1]:g} pods and {means[2]:g} faults an hour")
    console.print(
        f"{summary.cluster_hours_per_cpu_second:g} cluster-hours in a CPU second; hours count where a run has at least "
        f"{NODES_MEAN_MIN:g} nodes, {PODS_PER_HOUR_MIN:g} pods and {FAULTS_PER_HOUR_MIN:g} fault an hour"
    )
    never = (
        ("faults that never struck", summary.faults_never_struck),
        ("reasons never given", summary.reasons_never_given),
    )
    for what, missing in never:
        if missing:
            console.print(f"{what}: {', '.join(map(_with_why, missing))}", highlight=False)
    for failure in summary.broken:
        console.print(f"\n[bold red]seed {failure.seed}, commit {summary.commit}[/bold red]", highlight=False)
        console.print(f"broken: {failure.what}", highlight=False)
        size = "shortest list of faults found" if failure.is_shrunk else "faults"
        console.print(f"{size}: {told_faults(failure.faults)}", highlight=False, soft_wrap=True)
        for line in failure.last_facts:
            console.print(f"  {line}", highlight=False, soft_wrap=True)
        console.print(f"again: make sim SEED={failure.seed}{failure.arguments}", highlight=False)
        if failure.is_shrunk:
            again = f"make sim SEED={failure.seed}{failure.arguments_small}"
            console.print(f"with those faults alone: {again}", highlight=False, soft_wrap=True)
    console.print(f"broken: {len(summary.broken)}", highlight=False)


def _with_why(name: str) -> str:
    return f"{name} ({SELDOM[name]})" if name in SELDOM else name


def reason_tags() -> list[str]:
    """Return the tag of every reason, of decisions and of deferrals."""
    found = (getattr(reasons, name) for name in dir(reasons))
    return sorted(one.tag() for one in found if isinstance(one, type) and issubclass(one, Reason) and one is not Reason)


def _never(counts: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(name for name, count in counts.items() if not count)


def _counted(names: Iterable[str], counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return {name: total[name] for name in sorted({*names, *total})}
