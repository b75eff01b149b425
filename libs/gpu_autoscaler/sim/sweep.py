"""Many runs on all cores: progress bar, summary for people, `out/sim.json` for programs."""

import hashlib
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from gpu_autoscaler.model.reasons import all_reasons
from gpu_autoscaler.sim.faults.injection import KINDS, Occurrence
from gpu_autoscaler.sim.invariants.reason_coverage import RARE_REASONS
from gpu_autoscaler.sim.simulation import Result, Setting

T = TypeVar("T")
Run = Callable[[Setting], Result]

RUNS_COUNT_MAX = 120
SECONDS_MAX = 60.0  # of wall time; a run in progress is completed
# With fewer faults the violation occurs at about the same time; attempts run only slightly longer.
LATER_HOURS = 0.5
NO_FAULT = "none"  # instead of an empty list of faults
SHRUNK_COUNT_MAX = 3  # shrinking takes as long as many runs
_FRESH_MIN = 1_000_000
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


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
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
    runs: tuple[RunSummary, ...]


class SweepLimits(msgspec.Struct, frozen=True, kw_only=True):
    """When to start no more runs."""

    cluster_hours: float | None = None  # that count; None: until all settings have run
    seconds: float | None = None  # of wall time; None: unlimited


NO_LIMITS = SweepLimits()


def fresh_seeds(text: str, count: int) -> tuple[int, ...]:
    """Return seeds that nobody chose, equal for equal texts: above all that are counted up from one."""
    return tuple(
        _FRESH_MIN + int.from_bytes(hashlib.blake2b(f"{text}/{number}".encode(), digest_size=4).digest(), "big")
        for number in range(count)
    )


def sweep(
    settings: Iterable[Setting],
    run: Run,
    *,
    console: Console,
    processes_count: int | None = None,
    limits: SweepLimits = NO_LIMITS,
) -> list[tuple[Setting, Result]]:
    """Run the settings in parallel within the limits. Return the results in the order of the settings."""
    count = processes_count or os.cpu_count() or 1
    began_at = time.monotonic()
    runs: dict[int, tuple[Setting, Result]] = {}
    with _progress(console) as progress, ProcessPoolExecutor(count) as pool:
        of_runs = len(settings) if isinstance(settings, Sized) else None
        task = progress.add_task("runs", total=limits.cluster_hours or of_runs, hours="")
        waiting, under_way = enumerate(settings), dict[Future[Result], tuple[int, Setting]]()
        while True:
            counted = sum(result.cluster_hours for _, result in runs.values() if is_counted(result))
            is_enough = (limits.cluster_hours is not None and counted >= limits.cluster_hours) or (
                limits.seconds is not None and time.monotonic() - began_at >= limits.seconds
            )
            progress.update(
                task,
                completed=len(runs) if limits.cluster_hours is None else counted,
                hours=f"{len(runs)} runs, {counted:.0f} counted cluster-hours",
            )
            if not is_enough:
                for number, setting in itertools.islice(waiting, count - len(under_way)):
                    under_way[pool.submit(run, setting)] = (number, setting)
            if not under_way:
                return [run for _, run in sorted(runs.items())]
            for done in wait(under_way, return_when=FIRST_COMPLETED).done:
                number, setting = under_way.pop(done)
                runs[number] = (setting, result := done.result())
                if result.violations:
                    progress.console.print(f"[red]seed {result.seed}[/red]: {result.violations[0]}", highlight=False)


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


def summarize(runs: Sequence[tuple[Setting, Result]], run: Run, *, commit: str, options: str = "") -> Summary:
    """Return the totals; the first failing runs are shrunk. `options`: the command options that `run` stands for."""
    results = [result for _, result in runs]
    hours = sum(result.cluster_hours for result in results)
    cpu_seconds = sum(result.cpu_seconds for result in results)
    faults = _counted(KINDS, (result.faults for result in results))
    reasons_given = _counted(reason_tags(), (result.reasons for result in results))
    failing = [(result, setting) for setting, result in runs if result.violations]
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
        runs=tuple(map(_run_summary, results)),
    )


def _run_summary(result: Result) -> RunSummary:
    return RunSummary(
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
        promise=result.invariant,
        what=result.violations[0],
        faults=small.happened,
        is_shrunk=smallest != setting,
        last_facts=small.last_facts,
        arguments=_arguments(setting, setting.only, options),
        arguments_small=_arguments(setting, small.happened, options),
    )


def _arguments(setting: Setting, only: Sequence[Occurrence] | None, options: str) -> str:
    parts = [*options.split(), f"--hours {setting.hours:g}"]
    if setting.jobs_per_hour is not None:
        parts.append(f"--jobs-per-hour {setting.jobs_per_hour:g}")
    if only is not None:
        parts.append(f"--only {format_faults(only)}")
    return f' ARGS="{" ".join(parts)}"'


def parse_faults(text: str) -> tuple[Occurrence, ...]:
    """Parse a list of faults as `format_faults` writes it. Raises ValueError."""
    if text == NO_FAULT:
        return ()
    occurrences = [item.partition("#") for item in text.split(",")]
    if unknown := sorted({kind for kind, _, _ in occurrences} - set(KINDS)):
        raise ValueError(f"unknown kind of fault: {', '.join(unknown)}; known: {', '.join(sorted(KINDS))}")
    return tuple((kind, int(number)) for kind, _, number in occurrences)


def format_faults(faults: Sequence[Occurrence]) -> str:
    """Return the list in the form that `parse_faults` reads."""
    return ",".join(f"{kind}#{number}" for kind, number in faults) or NO_FAULT


def write(summary: Summary, path: Path) -> None:
    """Write the summary as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2))


def print_summary(summary: Summary, console: Console) -> None:
    """Print totals, faults and reasons that never occurred, and each failure with its command."""
    hours = f"{summary.cluster_hours_run:g} cluster-hours ({summary.cluster_hours:g} counted)"
    sums = f"{summary.seeds} seeds, {hours}, {summary.facts} facts, {summary.plans} plans"
    means = (summary.nodes_mean, summary.pods_per_hour, summary.faults_per_hour)
    console.print(f"{sums}; {means[0]:g} nodes on average, {means[1]:g} pods and {means[2]:g} faults per hour")
    console.print(
        f"{summary.cluster_hours_per_cpu_second:g} cluster-hours per CPU second; hours count in runs with at least "
        f"{NODES_MEAN_MIN:g} nodes, {PODS_PER_HOUR_MIN:g} pods and {FAULTS_PER_HOUR_MIN:g} fault per hour"
    )
    never = (
        ("faults that never struck", summary.faults_never_struck),
        ("reasons never given", summary.reasons_never_given),
    )
    for what, missing in never:
        if missing:
            whys = (f"{name} ({RARE_REASONS[name]})" if name in RARE_REASONS else name for name in missing)
            console.print(f"{what}: {', '.join(whys)}", highlight=False)
    for failure in summary.broken:
        console.print(f"\n[bold red]seed {failure.seed}, commit {summary.commit}[/bold red]", highlight=False)
        console.print(f"violated: {failure.what}", highlight=False)
        size = "fewest faults found" if failure.is_shrunk else "faults"
        console.print(f"{size}: {format_faults(failure.faults)}", highlight=False, soft_wrap=True)
        for line in failure.last_facts:
            console.print(f"  {line}", highlight=False, soft_wrap=True)
        console.print(f"reproduce: make sim SEED={failure.seed}{failure.arguments}", highlight=False)
        if failure.is_shrunk:
            again = f"make sim SEED={failure.seed}{failure.arguments_small}"
            console.print(f"with only these faults: {again}", highlight=False, soft_wrap=True)
    console.print(f"runs with violations: {len(summary.broken)}", highlight=False)


def reason_tags() -> list[str]:
    """Return the tag of every reason, of decisions and of deferrals."""
    return sorted(reason.tag() for reason in all_reasons())


def _never(counts: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(name for name, count in counts.items() if not count)


def _counted(names: Iterable[str], counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counter in counts:
        total.update(counter)
    return {name: total[name] for name in sorted({*names, *total})}


class _Attempts:
    """Attempts left, and the smallest run so far that violates the invariant."""

    def __init__(self, run: Run, setting: Setting, result: Result, until: float, now: Callable[[], float]) -> None:
        self.smallest, self.result = setting, result
        self._run = run
        self._invariant = result.invariant
        in_time = result.ended_at_hours < setting.hours
        self._ends_at_hours = result.ended_at_hours + LATER_HOURS if in_time else None
        self._left_count = RUNS_COUNT_MAX
        self._until = until
        self._now = now

    def reproduces(self, setting: Setting) -> bool:
        """True if this run violates the same invariant; False also when attempts or time are used up."""
        if self._left_count == 0 or self._now() >= self._until:
            return False
        self._left_count -= 1
        result = self._run(replace(setting, ends_at_hours=self._ends_at_hours, record_path=None))
        if result.invariant != self._invariant:
            return False
        self.smallest, self.result = setting, result
        return True


def shrink(
    setting: Setting,
    result: Result,
    run: Run,
    *,
    seconds_max: float = SECONDS_MAX,
    now: Callable[[], float] = time.monotonic,
) -> tuple[Setting, Result]:
    """Return the smallest run found that violates the invariant of `result`, and its result."""
    attempts = _Attempts(run, setting, result, now() + seconds_max, now)
    kinds = sorted(result.faults)
    kinds = list(_minimize(kinds, lambda kept: attempts.reproduces(replace(setting, kinds=tuple(kept)))))
    if not kinds and result.faults:
        return with_only_faults(setting, ()), attempts.result
    happened = [occurrence for occurrence in attempts.result.happened if occurrence[0] in kinds]
    _minimize(happened, lambda kept: attempts.reproduces(with_only_faults(setting, kept)))
    return attempts.smallest, attempts.result


def with_only_faults(setting: Setting, kept: Sequence[Occurrence]) -> Setting:
    """Return the same run with only these faults."""
    return replace(setting, kinds=tuple(sorted({kind for kind, _ in kept})), only=tuple(kept))


def _minimize(items: Sequence[T], reproduces: Callable[[Sequence[T]], bool]) -> Sequence[T]:
    """Return a subsequence of `items` from which no chunk can be removed; all of them at worst."""
    if not items or reproduces(()):
        return ()
    chunks_count = 2
    while len(items) > 1:
        size = -(-len(items) // chunks_count)
        for start in range(0, len(items), size):
            remaining = [*items[:start], *items[start + size :]]
            if remaining and reproduces(remaining):
                items, chunks_count = remaining, max(chunks_count - 1, 2)
                break
        else:
            if size == 1:
                break
            chunks_count = min(chunks_count * 2, len(items))
    return items
