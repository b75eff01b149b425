"""Outcomes side by side, as rows of a table: cost, nodes, jobs, waiting."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.tools.outcome import ALL, Outcome
from gpu_autoscaler_services.cli.output import Row

_COUNTS: tuple[tuple[str, Callable[[Outcome], int]], ...] = (
    ("jobs", lambda one: one.jobs_count),
    ("jobs started", lambda one: one.started_count),
    ("jobs finished", lambda one: one.finished_count),
    ("attempts lost", lambda one: one.interrupted_count),
)


def figures(outcomes: Mapping[str, Outcome]) -> Iterator[Row]:
    """Yield a row a figure: its `name`, one column an outcome by its name, and the `difference` of the last two."""
    ones = tuple(outcomes.values())
    names = list(dict.fromkeys(name for one in ones for name in one.waiting))
    heads = tuple(outcomes)
    yield _row("cost", heads, [one.cost_micro_usd / MICRO_USD_PER_USD for one in ones], "${:,.2f}")
    yield _row("node-hours", heads, [one.node_hours for one in ones], "{:,.2f}")
    yield _row("nodes at most", heads, [one.nodes_count_max for one in ones], "{:d}")
    for name, pick in _COUNTS:
        yield _row(name, heads, [pick(one) for one in ones], "{:d}")
    for name in names:
        waiting = [one.waiting.get(name) for one in ones]
        whose = "all jobs" if name == ALL else f"priority {name}"
        means = [None if one is None else one.mean_seconds for one in waiting]
        yield _row(f"wait, mean ({whose})", heads, means, "{:,.0f} s")
        late = [None if one is None else one.p95_seconds for one in waiting]
        yield _row(f"wait, 95 % ({whose})", heads, late, "{:,.0f} s")


def _row(name: str, heads: Sequence[str], values: Sequence[float | None], form: str) -> Row:
    told = ["-" if value is None else form.format(value) for value in values]
    before, after = values[-2:]
    difference = "" if before is None or after is None else _signed(form.format(abs(after - before)), after - before)
    return {"name": name, **dict(zip(heads, told, strict=True)), "difference": difference}


def _signed(text: str, amount: float) -> str:
    return text if not any(digit in text for digit in "123456789") else f"{'+' if amount > 0 else '-'}{text}"
