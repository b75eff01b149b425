"""Renders docs/scores.md from the scores: method, tables, and where ours is worse."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import geometric_mean

import msgspec

from gpu_autoscaler.sim.scoring.metrics import ALL, Score
from gpu_autoscaler.sim.scoring.runner import OURS, WITHOUT_SAVE_REQUESTS


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """All systems in one scenario."""

    world: str
    told: str
    scores: tuple[Score, ...]


class Board(msgspec.Struct, frozen=True, kw_only=True):
    """All scenarios of one run of the command."""

    seed: int
    hours: float
    rounds: tuple[Round, ...]


# Figures of which less is better, with their names; smaller relative differences count as equal.
FIGURES: dict[str, Callable[[Score], float]] = {
    "cost": lambda score: score.cost_usd,
    "mean waiting": lambda score: score.waiting[ALL].mean_seconds,
    "waiting of the slowest 5 %": lambda score: score.waiting[ALL].p95_seconds,
    "lost work": lambda score: score.lost_gpu_hours,
    "evictions by choice": lambda score: float(score.evicted_count),
}
EQUAL_RATIO = 0.02
COLUMNS = (
    "system", "USD", "wait mean s", "p50", "p95", "max", "node-h", "GPU used", "evicted", "interrupted", "lost GPU-h",
    "one storm", "ended",
)  # fmt: skip

_HEAD = """\
# Scores

Written by `make score ARGS=--write`; never edited by hand. `make score` prints the same tables and writes
`out/score.json`; `ARGS="--world openb --seed 3 --hours 24"` scores one world, another window, other hours.

Each system acts in the same worlds (`libs/gpu_autoscaler/sim`), by the same doors: one cloud with its boot times,
prices, refusals and notices, one Kubernetes with its scheduler, budgets and grace periods.

- **gpu-autoscaler**: ours. The real services, put together as in the simulator, the default policy, no limit on nodes.
- **fixed fleet**: on-demand nodes, bought once, by one who knows all jobs beforehand: enough for the demand of 95 % of
  the time, and one node more for each shape that would otherwise fit nowhere.
- **utilisation only**: a group of on-demand nodes for each GPU model that is asked for, held near 70 % of busy GPUs.
  What waits does not count.
- **cluster-autoscaler-like**: a scan each 10 s; expanders `least-waste,price`; a node goes when it was below 50 % and
  unneeded for 10 min, none within 10 min of an addition. Hears no notices.
- **karpenter-like**: batches of 1 to 10 s, the cheapest offer that fits what is put on it, consolidation at once within
  a budget of 10 %. Hears notices.
- **not asked to save**: ours, where work hears no request to save: drained under a notice and no more. In one world.
- **omniscient (a bound)**: not run but computed. What the work costs at least for anybody: each pod pays for its share
  of the node where that is cheapest, for as long as it runs. Waiting is a pod's start alone.

How a figure is made:

- **USD**: the cloud's invoice of the hours in which work arrives, and on to the end of the last job; what is left
  running then is billed no further.
- **wait**: of each job, all the time from its request to its end in which its slowest member did not run: before its
  first start, and after each interruption. Classes are the jobs' priorities; `serving` are single replicas of services.
- **GPU used**: GPU-hours of running pods, work that is done again included, of the GPU-hours bought.
- **evicted**: pods that lost their place by the system's choice; **interrupted**: because the cloud took the machine.
- **lost GPU-h**: work that had to be done again. Jobs of type `training` save every 30 min, and within 20 s when they
  are told to (by the annotation, or by the end of their pod); all others start over, and are marked as not to be moved.
  In `bamboo-checkpoints` they save every 15 min and when the annotation asks for it; a save takes 5 to 90 s, each
  length as likely as its double.
- **one storm**: the share of the GPU-hours bought that was spot of one type in one zone, the place of each moment that
  had most: what one storm could have taken. Ours keeps it to half where a fleet has more than 64 GPUs
  (`spot.capacity_pool_gpu_ratio_max`), and pays for the zones that are dearer.
- **ended**: jobs that completed. Others failed, or had not ended a day after the last arrival.

What speaks for the baselines here: they never crash, their calls never fail, the members of a gang start one by one and
need not wait for each other, and work that saved before it was moved loses nothing but the start of a pod. What speaks
for ours: jobs say what it reads (gangs, priorities, whether spot will do). Worlds are small, prices are the simulated
cloud's fixtures, and one seed is one sample: a few per cent mean nothing.
"""


def page(board: Board) -> str:
    """Return the page."""
    parts = [_HEAD, f"Told here: seed {board.seed}, work arriving for {board.hours:g} h in each world.\n"]
    parts += ["## In short\n", _summary(board)]
    for each in board.rounds:
        parts += [
            f"## {each.world}\n",
            f"{each.told}.\n",
            _table(each),
            _waiting(each),
            "\n".join(_judged(each)) + "\n",
        ]
    return "\n".join(parts)


def _summary(board: Board) -> str:
    """Compare ours with each other system over all scenarios: cost, waiting, evictions and lost work."""
    names = [one.system for one in board.rounds[0].scores if one.system != OURS and one.node_hours is not None]
    lines = []
    for name in names:
        pairs = [(_of(each, OURS), _of(each, name)) for each in board.rounds]
        cost = [(mine.cost_usd, its.cost_usd) for mine, its in pairs]
        waiting = [(mine.waiting[ALL].mean_seconds, its.waiting[ALL].mean_seconds) for mine, its in pairs]
        evicted = [sum(each.evicted_count for each in side) for side in zip(*pairs, strict=True)]
        lost = [sum(each.lost_gpu_hours for each in side) for side in zip(*pairs, strict=True)]
        lines.append(
            (name, *_won(cost), *_won(waiting), f"{evicted[0]} / {evicted[1]}", f"{lost[0]:,.1f} / {lost[1]:,.1f}")
        )
    head = (
        "ours against",
        "cheaper in",
        "cost of its",
        "waits less in",
        "mean waiting of its",
        "evicted",
        "lost GPU-h",
    )
    told = "Means over worlds are geometric; of evictions and lost work, the sums: ours / its.\n"
    return _rows(head, lines) + "\n" + told


def _won(pairs: Sequence[tuple[float, float]]) -> tuple[str, str]:
    """Return the number of scenarios where ours is lower, and the mean ratio."""
    lower_count = sum(mine < its for mine, its in pairs)
    ratio = geometric_mean([mine / its for mine, its in pairs if mine > 0 and its > 0] or [1.0])
    return f"{lower_count} of {len(pairs)}", f"{ratio:.0%}"


def _of(each: Round, system: str) -> Score:
    return next(one for one in each.scores if one.system == system)


def cells(one: Score) -> tuple[str, ...]:
    """Return one row of a table, by COLUMNS."""
    waiting, ratio = one.waiting[ALL], one.gpu_used_ratio
    seconds = (waiting.mean_seconds, waiting.p50_seconds, waiting.p95_seconds, waiting.max_seconds)
    return (
        one.system,
        f"{one.cost_usd:,.2f}",
        *(f"{each:,.0f}" for each in seconds),
        "-" if one.node_hours is None else f"{one.node_hours:,.1f}",
        "-" if ratio is None else f"{ratio:.0%}",
        str(one.evicted_count),
        str(one.interrupted_count),
        f"{one.lost_gpu_hours:,.1f}",
        "-" if one.storm_ratio is None else f"{one.storm_ratio:.0%}",
        f"{one.jobs_count - one.failed_count - one.unfinished_count} of {one.jobs_count}",
    )


def _table(each: Round) -> str:
    return _rows(COLUMNS, [cells(one) for one in each.scores])


def _rows(names: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    head = [f"| {' | '.join(names)} |", "| --- |" + " ---: |" * (len(names) - 1)]
    return "\n".join([*head, *(f"| {' | '.join(line)} |" for line in lines)]) + "\n"


def _waiting(each: Round) -> str:
    """Return mean and 95th percentile of waiting by class, for each system."""
    classes = sorted({name for one in each.scores for name in one.waiting} - {ALL})
    return _rows(
        ("wait s, mean / p95", *classes),
        ((one.system, *(_of_class(one, name) for name in classes)) for one in each.scores),
    )


def _of_class(one: Score, name: str) -> str:
    waiting = one.waiting.get(name)
    return "-" if waiting is None else f"{waiting.mean_seconds:,.0f} / {waiting.p95_seconds:,.0f}"


def _judged(each: Round) -> Iterator[str]:
    """Yield sentences on where ours is better and worse than each system."""
    ours = _of(each, OURS)
    for other in each.scores:
        if other.system == OURS or other.node_hours is None:
            continue
        better: list[str] = []
        worse: list[str] = []
        for name, figure in FIGURES.items():
            mine, its = figure(ours), figure(other)
            if abs(mine - its) > EQUAL_RATIO * max(mine, its):
                (better if mine < its else worse).append(f"{name} {_against(mine, its)}")
        said = [f"**worse** in {', '.join(worse)}"] if worse else []
        said += [f"better in {', '.join(better)}"] if better else []
        yield f"- Against {other.system}, ours is {'; '.join(said) or 'equal'}."
        if ours.cost_usd > other.cost_usd:
            yield f"- {_bought(ours, other)}"
    if ours.interrupted_jobs_count:
        yield (
            f"- Of {ours.interrupted_jobs_count} jobs that the cloud interrupted under ours, "
            f"{ours.recovered_jobs_count} ended well ({ours.recovered_jobs_count / ours.interrupted_jobs_count:.1%})."
        )
    untold = next((one for one in each.scores if one.system == WITHOUT_SAVE_REQUESTS), None)
    if untold is not None and untold.lost_gpu_hours:
        yield (
            f"- Asked to save, work lost {ours.lost_gpu_hours:,.1f} GPU-h; drained under its notice and not asked, "
            f"{untold.lost_gpu_hours:,.1f}: {ours.lost_gpu_hours / untold.lost_gpu_hours:.0%} of it."
        )
    yield from (f"- **A promise of ours broke**: {what}." for what in ours.broken)
    bound = next((one for one in each.scores if one.node_hours is None), None)
    if bound is not None and bound.cost_usd:
        yield f"- Ours costs {ours.cost_usd / bound.cost_usd:.2f} times the bound."


def _bought(ours: Score, other: Score) -> str:
    """Return what the higher cost of ours buys compared with the other system."""
    more_usd = ours.cost_usd - other.cost_usd
    spared_hours = _waited_hours(other) - _waited_hours(ours)
    gains = []
    if spared_hours > 0:
        gains.append(
            f"{spared_hours:,.1f} h less waiting of all jobs together ({more_usd / spared_hours:,.2f} USD an hour)"
        )
    if ours.lost_gpu_hours < other.lost_gpu_hours:
        gains.append(f"{other.lost_gpu_hours - ours.lost_gpu_hours:,.1f} GPU-h less of lost work")
    if ours.evicted_count < other.evicted_count:
        gains.append(f"{other.evicted_count - ours.evicted_count} evictions fewer")
    if ours.storm_ratio is not None and other.storm_ratio is not None and ours.storm_ratio < other.storm_ratio:
        gains.append(f"{ours.storm_ratio:.0%} of the GPUs within reach of one storm, not {other.storm_ratio:.0%}")
    told = "; ".join(gains) or "**nothing** that is counted here"
    return (
        f"The {more_usd:,.2f} USD ({more_usd / other.cost_usd:.1%}) that it costs more than {other.system} buy {told}."
    )


def _waited_hours(one: Score) -> float:
    return one.waiting[ALL].mean_seconds * one.waiting[ALL].count / 3600.0


def _against(mine: float, its: float) -> str:
    return f"({mine:,.4g} to {its:,.4g})"
