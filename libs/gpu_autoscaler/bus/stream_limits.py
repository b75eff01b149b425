"""Reads ages and sizes of streams from settings: `NODE=1GiB/14d`, `NODE=1GiB` or `NODE=14d`."""

import re
from collections.abc import Iterable, Mapping

from gpu_autoscaler.bus.streams import DAY_SECONDS, MEBIBYTE, STREAMS, StreamLimits

_UNITS = {"MiB": MEBIBYTE, "GiB": 1024 * MEBIBYTE, "min": 60, "h": 3600, "d": DAY_SECONDS}
_PART = re.compile(r"([1-9][0-9]*)(MiB|GiB|min|h|d)")
_SIZE_UNITS = frozenset({"MiB", "GiB"})
# Twice the largest message; and longer than services that look every minute what to publish again (runtime/resync.py)
# take to do so, and than the broker remembers ids. Source: our own.
BYTES_MIN, AGE_SECONDS_MIN = 16 * MEBIBYTE, 600
_FORM = "write NAME=SIZE/AGE, NAME=SIZE or NAME=AGE with MiB or GiB and min, h or d, for example NODE=1GiB/7d"


def stream_limits(texts: Iterable[str]) -> Mapping[str, StreamLimits]:
    """Return the limits of the streams named. Raises ValueError with the error of each text, one a line."""
    limits, errors = dict[str, StreamLimits](), list[str]()
    specs = {spec.name: spec for spec in STREAMS}
    for text in texts:
        name, _, value = text.strip().partition("=")
        spec = specs.get(name)
        if spec is None:
            errors.append(f"{text!r} names no stream; known: {', '.join(specs)}; {_FORM}")
            continue
        if name in limits:
            errors.append(f"{name} is set twice; keep one of them")
            continue
        values = {"size": spec.max_bytes, "age": spec.max_age_seconds}
        if (error := _read_parts(value, values)) is not None:
            errors.append(f"{name}: {error}")
            continue
        limits[name] = StreamLimits(max_age_seconds=values["age"], max_bytes=values["size"])
    if errors:
        raise ValueError("\n".join(errors))
    return limits


def _read_parts(text: str, values: dict[str, int]) -> str | None:
    """Set the sizes and ages of the text; return what is wrong with it, None if nothing is."""
    seen: set[str] = set()
    for part in text.split("/"):
        match = _PART.fullmatch(part.strip())
        if match is None:
            return f"{text!r} is no size and age; {_FORM}"
        number, unit = match.groups()
        kind = "size" if unit in _SIZE_UNITS else "age"
        if kind in seen:
            return f"{text!r} has two of one kind; {_FORM}"
        seen.add(kind)
        values[kind] = int(number) * _UNITS[unit]
    if values["size"] < BYTES_MIN:
        return f"{text!r} is too small for its largest messages; set at least {BYTES_MIN // MEBIBYTE}MiB"
    if values["age"] < AGE_SECONDS_MIN:
        return f"{text!r} is too short to publish again what is alive; set at least {AGE_SECONDS_MIN // 60}min"
    return None
