"""A picture of rules that size a fleet: node-hours against hours short, with the frontier of each kind of rule."""

import math
from collections.abc import Iterable, Iterator
from html import escape

import msgspec

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 520, 70, 30, 96, 60
_X_RANGE = (0.725, 0.81)
_Y_RANGE = (5.0, 400.0)  # node-hours, on a scale of powers
_INK, _FAINT, _GRID = "#1f2933", "#616e7c", "#e4e7eb"
_OURS, _REACTIVE = "#c2410c", "#0b5cad"


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one rule on the evaluated days."""

    node_hours_ratio: float  # of the fixed fleet's
    short_node_hours: float
    scale_ups_a_day: float


class Frontier(msgspec.Struct, frozen=True, kw_only=True):
    """All rules, the reported ones, and the bounds."""

    ours: tuple[Point, ...]
    reactive: tuple[Point, ...]
    chosen: Point
    rival: Point
    omniscient_ratio: float
    node_hours_ratio_max: float
    short_node_hours_max: float
    scale_ups_a_day_max: float


def picture(told: Frontier) -> str:
    """Return the SVG."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{_INK}">'
    )
    parts = [head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>', *_axes(), *_bounds(told)]
    for points, color, dash in ((told.reactive, _REACTIVE, "6 3"), (told.ours, _OURS, "")):
        allowed = [point for point in points if point.scale_ups_a_day <= told.scale_ups_a_day_max]
        parts += [_dot(each, color, 2, 0.35) for each in allowed if _is_seen(each)]
        parts.append(_line(frontier(allowed), color, dash))
    parts += [_dot(told.rival, _REACTIVE, 5, 1.0), _dot(told.chosen, _OURS, 5, 1.0)]
    return "\n".join([*parts, *_words(told), "</svg>", ""])


def frontier(points: Iterable[Point]) -> list[Point]:
    """The points that no other beats in both, by node-hours."""
    best: list[Point] = []
    for each in sorted(points, key=lambda point: (point.node_hours_ratio, point.short_node_hours)):
        if not best or each.short_node_hours < best[-1].short_node_hours:
            best.append(each)
    return best


def _axes() -> Iterator[str]:
    bottom = HEIGHT - BOTTOM
    for percent in range(73, 82):
        x = _x(percent / 100)
        yield f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="{_GRID}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="{_FAINT}">{percent} %</text>'
    for hours in (5, 10, 20, 50, 100, 200, 400):
        y = _y(hours)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{_GRID}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{_FAINT}">{hours}</text>'
    yield f'<text x="{LEFT}" y="{HEIGHT - 14}" fill="{_FAINT}">node-hours, of a fixed fleet</text>'
    yield f'<text x="{LEFT - 50}" y="{TOP - 12}" fill="{_FAINT}">node-hours short</text>'


def _bounds(told: Frontier) -> Iterator[str]:
    x, y = _x(told.node_hours_ratio_max), _y(told.short_node_hours_max)
    yield (
        f'<rect x="{LEFT}" y="{y:.1f}" width="{x - LEFT:.1f}" height="{HEIGHT - BOTTOM - y:.1f}" fill="#16a34a" '
        'fill-opacity="0.08"/>'
    )
    x = _x(told.omniscient_ratio)
    yield f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="{_INK}" stroke-dasharray="2 3"/>'
    yield f'<text x="{x + 6:.1f}" y="{HEIGHT - BOTTOM - 8}">who knows the future pays this</text>'


def _words(told: Frontier) -> Iterator[str]:
    title = "Philly's minutes, nodes that come after five: what each rule pays, and what it is short of"
    yield f'<text x="{LEFT - 50}" y="26" font-size="16" font-weight="600">{escape(title)}</text>'
    for row, (name, point, color) in enumerate(
        (("forecast, tuned on earlier days", told.chosen, _OURS), ("best reactive in hindsight", told.rival, _REACTIVE))
    ):
        y = 48 + 20 * row
        figures = (
            f"{name}: {point.node_hours_ratio:.1%}, {point.short_node_hours:.1f} node-h short, "
            f"{point.scale_ups_a_day:.1f} scale-ups a day"
        )
        yield f'<circle cx="{LEFT - 44}" cy="{y - 4}" r="5" fill="{color}"/>'
        yield f'<text x="{LEFT - 32}" y="{y}">{escape(figures)}</text>'


def _dot(point: Point, color: str, radius: int, opacity: float) -> str:
    x, y = _x(point.node_hours_ratio), _y(point.short_node_hours)
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{color}" fill-opacity="{opacity}"/>'


def _line(points: Iterable[Point], color: str, dash: str) -> str:
    places = " ".join(
        f"{_x(point.node_hours_ratio):.1f},{_y(point.short_node_hours):.1f}" for point in points if _is_seen(point)
    )
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="2"{dashed}/>'


def _is_seen(point: Point) -> bool:
    return _X_RANGE[0] <= point.node_hours_ratio <= _X_RANGE[1] and _Y_RANGE[0] <= point.short_node_hours <= _Y_RANGE[1]


def _x(ratio: float) -> float:
    low, high = _X_RANGE
    return LEFT + (WIDTH - LEFT - RIGHT) * (ratio - low) / (high - low)


def _y(hours: float) -> float:
    low, high = (math.log(each) for each in _Y_RANGE)
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log(hours) - low) / (high - low)
