"""Draw a policy comparison as an SVG: nodes and waiting jobs over time."""

import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from html import escape
from pathlib import Path

import msgspec

from gpu_autoscaler.model.format import instant
from gpu_autoscaler.replay.counterfactual import PolicyComparison

WIDTH, PANEL_HEIGHT, LEFT, RIGHT, TOP, GAP, BOTTOM = 960, 210, 56, 24, 84, 54, 46
TICKS_COUNT = 6
# Line styles differ too, for print and for readers who cannot distinguish the colors.
_INK, _FAINT, _GRID = "#1f2933", "#616e7c", "#e4e7eb"
_LINES = (
    ("recorded", "#7b8794", 'stroke-width="5" stroke-opacity="0.45"'),
    ("modeled, recorded policy", "#0b5cad", 'stroke-width="1.8" stroke-dasharray="6 3"'),
    ("modeled, other policy", "#c2410c", 'stroke-width="2"'),
)

Steps = Sequence[tuple[datetime, int]]


class _Panel(msgspec.Struct, frozen=True):
    title: str
    lines: tuple[Steps, ...]


def render(comparison: PolicyComparison) -> str:
    """Return the SVG."""
    outcomes = (comparison.recorded, comparison.modeled, comparison.other)
    panels = (
        _Panel("billed nodes", tuple(outcome.nodes for outcome in outcomes)),
        _Panel("jobs waiting for their first start", tuple(outcome.queue for outcome in outcomes)),
    )
    height = TOP + len(panels) * PANEL_HEIGHT + (len(panels) - 1) * GAP + BOTTOM
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{_INK}">'
    )
    parts = [head, f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>', *_legend(comparison)]
    for number, panel in enumerate(panels):
        parts += _panel(panel, TOP + number * (PANEL_HEIGHT + GAP), comparison)
    return "\n".join([*parts, *_instants(comparison, height - BOTTOM), "</svg>", ""])


def draw(comparison: PolicyComparison, path: Path) -> None:
    """Write the chart to a file."""
    path.write_text(render(comparison), encoding="utf-8")


def _legend(comparison: PolicyComparison) -> Iterator[str]:
    yield f'<text x="{LEFT}" y="26" font-size="16" font-weight="600">Recorded and modeled outcome</text>'
    x = LEFT
    for name, color, style in _LINES:
        yield f'<line x1="{x}" y1="46" x2="{x + 30}" y2="46" stroke="{color}" {style}/>'
        yield f'<text x="{x + 38}" y="50">{escape(name)}</text>'
        x += 64 + 7 * len(name)
    if comparison.diverged_at is not None:
        yield f'<line x1="{x + 6}" y1="38" x2="{x + 6}" y2="54" stroke="{_INK}" stroke-dasharray="2 3"/>'
        yield f'<text x="{x + 16}" y="50">first different decision</text>'


def _panel(panel: _Panel, top: int, comparison: PolicyComparison) -> Iterator[str]:
    most = max((count for steps in panel.lines for _, count in steps), default=0)
    step = _round_step(most)
    ceiling = max(step, math.ceil(most / step) * step)
    bottom = top + PANEL_HEIGHT
    yield f'<text x="{LEFT}" y="{top - 10}" font-weight="600">{escape(panel.title)}</text>'
    for count in range(0, ceiling + 1, step):
        y = bottom - PANEL_HEIGHT * count / ceiling
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{_GRID}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{_FAINT}">{count}</text>'
    if comparison.diverged_at is not None:
        x = _x(comparison.diverged_at, comparison)
        yield f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="{_INK}" stroke-dasharray="2 3"/>'
    for steps, (_, color, style) in zip(panel.lines, _LINES, strict=True):
        yield f'<path d="{_path(steps, bottom, ceiling, comparison)}" fill="none" stroke="{color}" {style}/>'


def _path(steps: Steps, bottom: int, ceiling: int, comparison: PolicyComparison) -> str:
    marks = []
    for number, (at, count) in enumerate(steps):
        x, y = _x(at, comparison), bottom - PANEL_HEIGHT * count / ceiling
        marks.append(f"M{x:.1f} {y:.1f}" if number == 0 else f"H{x:.1f}V{y:.1f}")
    return "".join([*marks, f"H{WIDTH - RIGHT}"])


def _instants(comparison: PolicyComparison, bottom: int) -> Iterator[str]:
    span = comparison.to_at - comparison.from_at
    for number in range(TICKS_COUNT + 1):
        at = comparison.from_at + span * number / TICKS_COUNT
        x = _x(at, comparison)
        anchor = "end" if number == TICKS_COUNT else "middle" if number else "start"
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="{anchor}" fill="{_FAINT}">{at:%H:%M:%S}</text>'
    yield f'<text x="{LEFT}" y="{bottom + 36}" fill="{_FAINT}">from {instant(comparison.from_at)}</text>'


def _x(at: datetime, comparison: PolicyComparison) -> float:
    ratio = (at - comparison.from_at) / (comparison.to_at - comparison.from_at)
    return LEFT + (WIDTH - LEFT - RIGHT) * min(max(ratio, 0.0), 1.0)


def _round_step(most: int) -> int:
    """Return 1, 2 or 5 times a power of ten, so that there are at most five grid lines."""
    size = 1
    while True:
        for factor in (1, 2, 5):
            if most <= 5 * size * factor:
                return size * factor
        size *= 10
