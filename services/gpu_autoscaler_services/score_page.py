"""Renders the results in docs/scores.md from the scores: tables, and where ours is worse."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from statistics import geometric_mean

import msgspec

from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.sim.scoring.baselines.karpenter import Karpenter
from gpu_autoscaler.sim.scoring.baselines.known_demand import BOUND
from gpu_autoscaler.sim.scoring.baselines.offline import OFFLINE
from gpu_autoscaler.sim.scoring.causes import Cause
from gpu_autoscaler.sim.scoring.metrics import ALL, Score
from gpu_autoscaler.sim.scoring.ours import OURS, PLAIN_PODS, VARIANTS, WITHOUT_LEVER, WITHOUT_SAVE_REQUESTS


class ScenarioScores(msgspec.Struct, frozen=True, kw_only=True):
    """All systems in one scenario."""

    world: str
    description: str = msgspec.field(name="told")
    scores: tuple[Score, ...]
    seed: int = 1


class ScoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """All scenarios of one run of the command."""

    seed: int
    hours: float
    rounds: tuple[ScenarioScores, ...]


# Figures of which less is better, with their names; smaller relative differences count as equal.
FIGURES: dict[str, Callable[[Score], float]] = {
    "cost": lambda score: score.cost_usd,
    "mean waiting": lambda score: score.waiting[ALL].mean_seconds,
    "95th percentile of waiting": lambda score: score.waiting[ALL].p95_seconds,
    "lost work": lambda score: score.lost_gpu_hours,
    "voluntary evictions": lambda score: float(score.evicted_count),
}
EQUAL_RATIO = 0.02
COLUMNS = (
    "system", "USD", "wait mean s", "p50", "p95", "max", "node-h", "GPU used", "evicted", "interrupted", "lost GPU-h",
    "one storm", "ended",
)  # fmt: skip
CAUSE_COLUMNS = ("USD", *Cause, "bill")
RATIO_COLUMNS = (
    "world",
    "system",
    "compared with",
    "USD",
    "least to most",
    "waiting mean",
    "p95",
    "evicted",
    "lost GPU-h",
)

BOUND_COLUMNS = (
    "world, seed",
    "karpenter-like",
    "ours",
    "offline",
    "bound",
    "ours, ratio",
    "offline, ratio",
    "bound, ratio",
)
LEVER_COLUMNS = (
    "rule",
    "world",
    "USD",
    "change of the ratio to karpenter-like",
    "waiting mean",
    "p95",
    "evicted",
    "lost GPU-h",
)

_RESULTS = "Results for seed "  # begins the part of the page that is written here


def page(report: ScoreReport, former: str) -> str:
    """Return the page: the method as people wrote it on the former page, then these results. Figures of each scenario
    are those of the first seed.
    """
    method, separator, _ = former.partition(f"\n{_RESULTS}")
    if not separator:
        raise ValueError(f"the page has no line that begins with {_RESULTS!r}: restore it from the repository")
    first = [scenario for scenario in report.rounds if scenario.seed == report.seed]
    parts = [f"{_RESULTS}{report.seed}, with jobs arriving for {report.hours:g} h in each scenario.\n"]
    parts += ["## Summary\n", _summary(first)]
    if len(first) < len(report.rounds):
        seeds = sorted({scenario.seed for scenario in report.rounds})
        parts += [f"### Seeds {seeds[0]} to {seeds[-1]}\n", _rows(RATIO_COLUMNS, ratio_rows(report.rounds))]
    for scenario in first:
        parts += [
            f"## {scenario.world}\n",
            f"{scenario.description}.\n",
            _table(scenario),
            _rows(CAUSE_COLUMNS, cause_rows([scenario])),
            _waiting(scenario),
            "\n".join(_comparison(scenario)) + "\n",
        ]
    return f"{method}\n" + "\n".join(parts)


def cause_rows(rounds: Sequence[ScenarioScores]) -> Iterator[tuple[str, ...]]:
    """Yield the dollars of each system by cause, as means over these seeds of one scenario."""
    for system in (score.system for score in rounds[0].scores if score.micro_usd_by_cause):
        scores = [score for scenario in rounds for score in scenario.scores if score.system == system]
        usd = {
            cause: sum(score.micro_usd_by_cause[cause] for score in scores) / len(scores) / MICRO_USD_PER_USD
            for cause in Cause
        }
        yield (system, *(f"{amount:,.1f}" for amount in usd.values()), f"{sum(usd.values()):,.2f}")


def ratio_rows(rounds: Sequence[ScenarioScores]) -> Iterator[tuple[str, ...]]:
    """Yield ours relative to each other system: in each scenario the geometric mean over seeds and its range, then over
    all scenarios.
    """
    worlds = dict.fromkeys(scenario.world for scenario in rounds)
    scopes = [*([world] for world in worlds), *([list(worlds)] if len(worlds) > 1 else [])]
    others = dict.fromkeys(score.system for scenario in rounds for score in scenario.scores if _is_other(score))
    for system, other, scope in product((OURS, PLAIN_PODS), others, scopes):
        pairs = [
            (ours, theirs)
            for scenario in rounds
            if scenario.world in scope
            for ours, theirs in product(scenario.scores, repeat=2)
            if (ours.system, theirs.system) == (system, other)
        ]
        if pairs:
            yield (scope[0] if len(scope) == 1 else "all", system, other, *_ratios(pairs))


def bound_rows(rounds: Sequence[ScenarioScores]) -> Iterator[tuple[str, ...]]:
    """Yield the cost of karpenter-like, ours, the offline schedule and the bound in each scenario with such a schedule.

    The least possible cost without reclaims is between the last two.
    """
    for scenario in rounds:
        usd = {score.system: score.cost_usd for score in scenario.scores}
        if OFFLINE not in usd:
            continue
        costs = [usd.get(system) for system in (Karpenter.name, OURS, OFFLINE, BOUND)]
        ratios = [cost / costs[0] if cost and costs[0] else None for cost in costs[1:]]
        figures = ("-" if figure is None else f"{figure:,.2f}" for figure in (*costs, *ratios))
        yield (f"{scenario.world}, {scenario.seed}", *figures)


def lever_rows(rounds: Sequence[ScenarioScores]) -> Iterator[tuple[str, ...]]:
    """Yield ours without one rule relative to ours, for each rule in each scenario: geometric means over seeds.

    The change is that of the cost relative to karpenter-like: above zero the rule saves.
    """
    for name, world in product(WITHOUT_LEVER, dict.fromkeys(scenario.world for scenario in rounds)):
        scores = [{score.system: score for score in scenario.scores} for scenario in rounds if scenario.world == world]
        pairs = [(by_system[name], by_system[OURS]) for by_system in scores if {name, OURS} <= by_system.keys()]
        if pairs:
            usd, _, *others = _ratios(pairs)
            yield (name, world, usd, _change(name, scores), *others)


def _change(name: str, scores: Sequence[Mapping[str, Score]]) -> str:
    compared = [by_system for by_system in scores if {name, OURS, Karpenter.name} <= by_system.keys()]
    if not compared:
        return "-"
    without, ours = (
        geometric_mean([by_system[system].cost_usd / by_system[Karpenter.name].cost_usd for by_system in compared])
        for system in (name, OURS)
    )
    return f"{without - ours:+.3f}"


def _ratios(pairs: Sequence[tuple[Score, Score]]) -> tuple[str, ...]:
    """Compare pairs of scores: ratios of cost and waiting, sums of evictions and lost work."""
    cost = [ours.cost_usd / theirs.cost_usd for ours, theirs in pairs if theirs.cost_usd and ours.cost_usd]
    waits = [(ours.waiting[ALL], theirs.waiting[ALL]) for ours, theirs in pairs]
    mean = [a.mean_seconds / b.mean_seconds for a, b in waits if a.mean_seconds and b.mean_seconds]
    p95 = [a.p95_seconds / b.p95_seconds for a, b in waits if a.p95_seconds and b.p95_seconds]
    evicted = [sum(score.evicted_count for score in side) for side in zip(*pairs, strict=True)]
    lost = [sum(score.lost_gpu_hours for score in side) for side in zip(*pairs, strict=True)]
    return (
        _mean(cost),
        f"{min(cost):.2f} to {max(cost):.2f}" if cost else "-",
        _mean(mean),
        _mean(p95),
        f"{evicted[0]} / {evicted[1]}",
        f"{lost[0]:,.1f} / {lost[1]:,.1f}",
    )


def _mean(ratios: Sequence[float]) -> str:
    return f"{geometric_mean(ratios):.2f}" if ratios else "-"


def _summary(rounds: Sequence[ScenarioScores]) -> str:
    """Compare ours with each other system over all scenarios: cost, waiting, evictions and lost work."""
    names = [score.system for score in rounds[0].scores if _is_other(score)]
    lines = []
    for name in names:
        pairs = [(_of(scenario, OURS), _of(scenario, name)) for scenario in rounds]
        cost = [(ours_figure.cost_usd, other_figure.cost_usd) for ours_figure, other_figure in pairs]
        waiting = [
            (ours_figure.waiting[ALL].mean_seconds, other_figure.waiting[ALL].mean_seconds)
            for ours_figure, other_figure in pairs
        ]
        evicted = [sum(scenario.evicted_count for scenario in side) for side in zip(*pairs, strict=True)]
        lost_pairs = [sum(scenario.lost_gpu_hours for scenario in side) for side in zip(*pairs, strict=True)]
        lines.append(
            (
                name,
                *_lower(cost),
                *_lower(waiting),
                f"{evicted[0]} / {evicted[1]}",
                f"{lost_pairs[0]:,.1f} / {lost_pairs[1]:,.1f}",
            )
        )
    head = (
        "compared with",
        "cheaper in",
        "relative cost",
        "waits less in",
        "relative mean waiting",
        "evicted",
        "lost GPU-h",
    )
    gains_text = "Ratios are geometric means over scenarios; evictions and lost work are sums: ours / theirs.\n"
    return _rows(head, lines) + "\n" + gains_text


def _lower(pairs: Sequence[tuple[float, float]]) -> tuple[str, str]:
    """Return the number of scenarios where ours is lower, and the mean ratio."""
    lower_count = sum(ours_figure < other_figure for ours_figure, other_figure in pairs)
    ratio = geometric_mean(
        [ours_figure / other_figure for ours_figure, other_figure in pairs if ours_figure > 0 and other_figure > 0]
        or [1.0]
    )
    return f"{lower_count} of {len(pairs)}", f"{ratio:.0%}"


def _is_other(score: Score) -> bool:
    """True for a system other than ours that runs."""
    return score.system not in (OURS, *VARIANTS) and score.node_hours is not None


def _of(scenario: ScenarioScores, system: str) -> Score:
    return next(score for score in scenario.scores if score.system == system)


def cells(score: Score) -> tuple[str, ...]:
    """Return one row of a table, by COLUMNS."""
    waiting, ratio = score.waiting[ALL], score.gpu_used_ratio
    seconds = (waiting.mean_seconds, waiting.p50_seconds, waiting.p95_seconds, waiting.max_seconds)
    return (
        score.system,
        f"{score.cost_usd:,.2f}",
        *(f"{seconds_value:,.0f}" for seconds_value in seconds),
        "-" if score.node_hours is None else f"{score.node_hours:,.1f}",
        "-" if ratio is None else f"{ratio:.0%}",
        str(score.evicted_count),
        str(score.interrupted_count),
        f"{score.lost_gpu_hours:,.1f}",
        "-" if score.storm_ratio is None else f"{score.storm_ratio:.0%}",
        f"{score.jobs_count - score.failed_count - score.unfinished_count} of {score.jobs_count}",
    )


def _table(scenario: ScenarioScores) -> str:
    return _rows(COLUMNS, [cells(score) for score in scenario.scores])


def _rows(names: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    head = [f"| {' | '.join(names)} |", "| --- |" + " ---: |" * (len(names) - 1)]
    return "\n".join([*head, *(f"| {' | '.join(line)} |" for line in lines)]) + "\n"


def _waiting(scenario: ScenarioScores) -> str:
    """Return mean and 95th percentile of waiting by class, for each system."""
    classes = sorted({name for score in scenario.scores for name in score.waiting} - {ALL})
    return _rows(
        ("wait s, mean / p95", *classes),
        (
            (
                score.system,
                *(
                    f"{waiting.mean_seconds:,.0f} / {waiting.p95_seconds:,.0f}" if waiting is not None else "-"
                    for waiting in map(score.waiting.get, classes)
                ),
            )
            for score in scenario.scores
        ),
    )


def _comparison(scenario: ScenarioScores) -> Iterator[str]:
    """Yield sentences on where ours is better and worse than each system."""
    ours = _of(scenario, OURS)
    for other in scenario.scores:
        if other.system == OURS or other.node_hours is None:
            continue
        better: list[str] = []
        worse: list[str] = []
        for name, figure in FIGURES.items():
            ours_figure, other_figure = figure(ours), figure(other)
            if abs(ours_figure - other_figure) > EQUAL_RATIO * max(ours_figure, other_figure):
                (better if ours_figure < other_figure else worse).append(
                    f"{name} ({ours_figure:,.4g} to {other_figure:,.4g})"
                )
        sentences = [f"**worse** in {', '.join(worse)}"] if worse else []
        sentences += [f"better in {', '.join(better)}"] if better else []
        yield f"- Compared with {other.system}, ours is {'; '.join(sentences) or 'equal'}."
        if ours.cost_usd > other.cost_usd:
            yield f"- {_gains(ours, other)}"
    if ours.interrupted_jobs_count:
        yield (
            f"- Of {ours.interrupted_jobs_count} interrupted jobs of ours, "
            f"{ours.recovered_jobs_count} completed ({ours.recovered_jobs_count / ours.interrupted_jobs_count:.1%})."
        )
    without_requests = next((score for score in scenario.scores if score.system == WITHOUT_SAVE_REQUESTS), None)
    if without_requests is not None and without_requests.lost_gpu_hours:
        yield (
            f"- With checkpoint requests {ours.lost_gpu_hours:,.1f} GPU-h of work were lost, without them "
            f"{without_requests.lost_gpu_hours:,.1f} ({ours.lost_gpu_hours / without_requests.lost_gpu_hours:.0%})."
        )
    yield from (f"- **Violated invariant**: {what}." for what in ours.broken)
    bound = next((score for score in scenario.scores if score.node_hours is None), None)
    if bound is not None and bound.cost_usd:
        yield f"- Ours costs {ours.cost_usd / bound.cost_usd:.2f} times the bound."


def _gains(ours: Score, other: Score) -> str:
    """Return what the higher cost of ours buys compared with the other system."""
    more_usd = ours.cost_usd - other.cost_usd
    saved_hours = _waited_hours(other) - _waited_hours(ours)
    gains = []
    if saved_hours > 0:
        gains.append(f"{saved_hours:,.1f} h less waiting of all jobs ({more_usd / saved_hours:,.2f} USD per hour)")
    if ours.lost_gpu_hours < other.lost_gpu_hours:
        gains.append(f"{other.lost_gpu_hours - ours.lost_gpu_hours:,.1f} GPU-h less lost work")
    if ours.evicted_count < other.evicted_count:
        gains.append(f"{other.evicted_count - ours.evicted_count} fewer evictions")
    if ours.storm_ratio is not None and other.storm_ratio is not None and ours.storm_ratio < other.storm_ratio:
        gains.append(f"{ours.storm_ratio:.0%} of the GPUs exposed to one storm instead of {other.storm_ratio:.0%}")
    cost = f"{more_usd:,.2f} USD ({more_usd / other.cost_usd:.1%}) of additional cost"
    return f"The {cost} compared with {other.system} buy {'; '.join(gains) or '**nothing** that is measured here'}."


def _waited_hours(score: Score) -> float:
    return score.waiting[ALL].mean_seconds * score.waiting[ALL].count / 3600.0
