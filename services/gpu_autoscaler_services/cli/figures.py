"""Tabulate outcomes side by side: cost, nodes, jobs, waiting time."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.replay.outcome import ALL, Outcome
from gpu_autoscaler_services.cli.output import Row

_COUNTS: tuple[tuple[str, Callable[[Outcome], int]], ...] = (
    ("jobs", lambda outcome: outcome.jobs_count),
    ("jobs started", lambda outcome: outcome.started_count),
    ("jobs finished", lambda outcome: outcome.finished_count),
    ("interrupted attempts", lambda outcome: outcome.interrupted_count),
)


def figures(outcomes: Mapping[str, Outcome]) -> Iterator[Row]:
    """Yield one row per figure: `name`, a column per outcome, and the `difference` of the last two."""
    values = tuple(outcomes.values())
    names = list(dict.fromkeys(name for outcome in values for name in outcome.waiting))
    heads = tuple(outcomes)
    yield _row("cost", heads, [outcome.cost_micro_usd / MICRO_USD_PER_USD for outcome in values], "${:,.2f}")
    yield _row("node-hours", heads, [outcome.node_hours for outcome in values], "{:,.2f}")
    yield _row("peak nodes", heads, [outcome.nodes_count_max for outcome in values], "{:d}")
    for name, pick in _COUNTS:
        yield _row(name, heads, [pick(outcome) for outcome in values], "{:d}")
    for name in names:
        waits = [outcome.waiting.get(name) for outcome in values]
        scope = "all jobs" if name == ALL else f"priority {name}"
        means = [None if wait is None else wait.mean_seconds for wait in waits]
        yield _row(f"mean wait ({scope})", heads, means, "{:,.0f} s")
        p95s = [None if wait is None else wait.p95_seconds for wait in waits]
        yield _row(f"p95 wait ({scope})", heads, p95s, "{:,.0f} s")


def _row(name: str, heads: Sequence[str], values: Sequence[float | None], form: str) -> Row:
    cells = ["-" if value is None else form.format(value) for value in values]
    before, after = values[-2:]
    difference = "" if before is None or after is None else _signed(form.format(abs(after - before)), after - before)
    return {"name": name, **dict(zip(heads, cells, strict=True)), "difference": difference}


def _signed(text: str, amount: float) -> str:
    return text if not any(digit in text for digit in "123456789") else f"{'+' if amount > 0 else '-'}{text}"
