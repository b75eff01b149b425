"""How amounts, instants and names read in sentences. Used by `core/explain.py` and `core/words/telling.py`."""

from collections.abc import Sequence
from datetime import UTC, datetime

from gpu_autoscaler.model.directives import FOR_GOOD, Attribution
from gpu_autoscaler.model.money import MICRO_USD_PER_USD


def money(micro_usd: int) -> str:
    """`$2.46`: at least cents, and as many digits more as a small price needs."""
    text = f"{micro_usd / MICRO_USD_PER_USD:,.6f}".rstrip("0")
    whole, _, fraction = text.partition(".")
    return f"${whole}.{fraction.ljust(2, '0')}"


def price(micro_usd_per_hour: int | None) -> str:
    """`$2.46/h`; an unknown price says so."""
    return "an unknown price" if micro_usd_per_hour is None else f"{money(micro_usd_per_hour)}/h"


def instant(at: datetime) -> str:
    """`2026-11-21 12:00:05 UTC`."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def span(seconds: float) -> str:
    """`45 s`, `10 min`, `1 h 30 min`: whole units, the two largest."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        minutes, rest = divmod(whole, 60)
        return f"{minutes} min" + (f" {rest} s" if rest else "")
    hours, rest = divmod(whole, 3600)
    return f"{hours} h" + (f" {rest // 60} min" if rest >= 60 else "")


def percent(ratio: float) -> str:
    """`80 %`."""
    return f"{ratio * 100:.0f} %"


def counted(count: int, noun: str) -> str:
    """`1 node`, `3 nodes`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def named(names: Sequence[str], *, most: int = 3) -> str:
    """`a, b and c`; of more than `most` the rest is counted."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def thing(key: str) -> str:
    """`job/train` as `job train`; `member/train/3` as `member 3 of job train`; `cluster` as `the whole cluster`."""
    kind, _, name = key.partition("/")
    if kind == "member":
        job_id, _, number = name.rpartition("/")
        return f"member {number} of job {job_id}"
    return f"{kind} {name}" if name else "the whole cluster" if kind == "cluster" else kind


def told(said: Attribution | None) -> str:
    """`by ada until 2026-11-21 14:00:00 UTC: the reviewers come`; nothing where nobody said it."""
    if said is None:
        return ""
    until = "" if said.until >= FOR_GOOD else f" until {instant(said.until)}"
    return f"by {said.by}{until}: {said.why.strip().rstrip('.')}"
