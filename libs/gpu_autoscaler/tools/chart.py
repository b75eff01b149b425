"""A picture of what was and what would have been: machines over time, and jobs that waited, as steps in an SVG."""

import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from html import escape
from pathlib import Path

import msgspec

from gpu_autoscaler.core.words.wording import instant
from gpu_autoscaler.tools.whatif import WhatIf

WIDTH, PANEL_HEIGHT, LEFT, RIGHT, TOP, GAP, BOTTOM = 960, 210, 56, 24, 84, 54, 46
TICKS_COUNT = 6
# Told apart also by who sees no colours, and in print: line styles differ as well.
_INK, _FAINT, _GRID = "#1f2933", "#616e7c", "#e4e7eb"
_LINES = (
    ("recorded", "#7b8794", 'stroke-width="5" stroke-opacity="0.45"'),
    ("model, policy of the time", "#0b5cad", 'stroke-width="1.8" stroke-dasharray="6 3"'),
    ("model, other policy", "#c2410c", 'stroke-width="2"'),
)

Steps = Sequence[tuple[datetime, int]]


class _Panel(msgspec.Struct, frozen=True):
    title: str
    lines: tuple[Steps, ...]


def picture(found: WhatIf) -> str:
    """Return the SVG."""
    outcomes = (found.recorded, found.modelled, found.other)
    panels = (
        _Panel("machines that are paid for", tuple(one.nodes for one in outcomes)),
        _Panel("jobs that wait for their first start", tuple(one.queue for one in outcomes)),
    )
    height = TOP + len(panels) * PANEL_HEIGHT + (len(panels) - 1) * GAP + BOTTOM
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{_INK}">'
    )
    parts = [head, f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>', *_legend(found)]
    for number, panel in enumerate(panels):
        parts += _panel(panel, TOP + number * (PANEL_HEIGHT + GAP), found)
    return "\n".join([*parts, *_instants(found, height - BOTTOM), "</svg>", ""])


def draw(found: WhatIf, path: Path) -> None:
    """Write the picture to a file."""
    path.write_text(picture(found), encoding="utf-8")


def _legend(found: WhatIf) -> Iterator[str]:
    yield f'<text x="{LEFT}" y="26" font-size="16" font-weight="600">What was, and what would have been</text>'
    x = LEFT
    for name, colour, style in _LINES:
        yield f'<line x1="{x}" y1="46" x2="{x + 30}" y2="46" stroke="{colour}" {style}/>'
        yield f'<text x="{x + 38}" y="50">{escape(name)}</text>'
        x += 64 + 7 * len(name)
    if found.parted_at is not None:
        yield f'<line x1="{x + 6}" y1="38" x2="{x + 6}" y2="54" stroke="{_INK}" stroke-dasharray="2 3"/>'
        yield f'<text x="{x + 16}" y="50">the worlds part</text>'


def _panel(panel: _Panel, top: int, found: WhatIf) -> Iterator[str]:
    most = max((count for steps in panel.lines for _, count in steps), default=0)
    step = _round_step(most)
    ceiling = max(step, math.ceil(most / step) * step)
    bottom = top + PANEL_HEIGHT
    yield f'<text x="{LEFT}" y="{top - 10}" font-weight="600">{escape(panel.title)}</text>'
    for count in range(0, ceiling + 1, step):
        y = bottom - PANEL_HEIGHT * count / ceiling
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{_GRID}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{_FAINT}">{count}</text>'
    if found.parted_at is not None:
        x = _x(found.parted_at, found)
        yield f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="{_INK}" stroke-dasharray="2 3"/>'
    for steps, (_, colour, style) in zip(panel.lines, _LINES, strict=True):
        yield f'<path d="{_path(steps, bottom, ceiling, found)}" fill="none" stroke="{colour}" {style}/>'


def _path(steps: Steps, bottom: int, ceiling: int, found: WhatIf) -> str:
    marks = []
    for number, (at, count) in enumerate(steps):
        x, y = _x(at, found), bottom - PANEL_HEIGHT * count / ceiling
        marks.append(f"M{x:.1f} {y:.1f}" if number == 0 else f"H{x:.1f}V{y:.1f}")
    return "".join([*marks, f"H{WIDTH - RIGHT}"])


def _instants(found: WhatIf, bottom: int) -> Iterator[str]:
    span = found.to_at - found.from_at
    for number in range(TICKS_COUNT + 1):
        at = found.from_at + span * number / TICKS_COUNT
        x = _x(at, found)
        anchor = "end" if number == TICKS_COUNT else "middle" if number else "start"
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="{anchor}" fill="{_FAINT}">{at:%H:%M:%S}</text>'
    yield f'<text x="{LEFT}" y="{bottom + 36}" fill="{_FAINT}">from {instant(found.from_at)}</text>'


def _x(at: datetime, found: WhatIf) -> float:
    ratio = (at - found.from_at) / (found.to_at - found.from_at)
    return LEFT + (WIDTH - LEFT - RIGHT) * min(max(ratio, 0.0), 1.0)


def _round_step(most: int) -> int:
    """1, 2 or 5 times a power of ten, so that there are at most five lines."""
    size = 1
    while True:
        for factor in (1, 2, 5):
            if most <= 5 * size * factor:
                return size * factor
        size *= 10
