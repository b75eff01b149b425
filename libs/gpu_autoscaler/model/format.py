"""Format amounts, instants, durations and names for people. Used by every text that a person reads."""

from collections.abc import Sequence
from datetime import UTC, datetime

from gpu_autoscaler.model.money import MICRO_USD_PER_USD

_DAY, _HOUR, _MINUTE = 86_400, 3_600, 60


def money(micro_usd: int) -> str:
    """`$2.46`: two decimal places, more for small amounts that need them."""
    text = f"{micro_usd / MICRO_USD_PER_USD:,.6f}".rstrip("0")
    whole, _, fraction = text.partition(".")
    return f"${whole}.{fraction.ljust(2, '0')}"


def price(micro_usd_per_hour: int | None) -> str:
    """`$2.46/h`, or `an unknown price`."""
    return "an unknown price" if micro_usd_per_hour is None else f"{money(micro_usd_per_hour)}/h"


def quantity(milli: int) -> str:
    """An amount in thousandths as Kubernetes writes it: `16`, `500m`, `64Gi`."""
    whole, rest = divmod(milli, 1000)
    if rest:
        return f"{milli}m"
    for suffix, size in (("Gi", 2**30), ("Mi", 2**20)):
        if whole and whole % size == 0:
            return f"{whole // size}{suffix}"
    return str(whole)


def instant(at: datetime) -> str:
    """`2026-11-21 12:00:05 UTC`."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def duration(seconds: float) -> str:
    """`45 s`, `10 min`, `1 h 30 min`, `7 d`: the two largest units; days from 48 hours on."""
    whole = round(seconds)
    if whole >= 2 * _DAY:
        return _in_units(whole, _DAY, "d", _HOUR, "h")
    if whole >= _HOUR:
        return _in_units(whole, _HOUR, "h", _MINUTE, "min")
    return _in_units(whole, _MINUTE, "min", 1, "s") if whole >= _MINUTE else f"{whole} s"


def _in_units(seconds: int, large: int, large_name: str, small: int, small_name: str) -> str:
    count, rest = divmod(seconds, large)
    return f"{count} {large_name}" + (f" {rest // small} {small_name}" if rest >= small else "")


def percent(ratio: float) -> str:
    """`80 %`."""
    return f"{ratio * 100:.0f} %"


def counted(count: int, noun: str) -> str:
    """`1 node`, `3 nodes`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(names: Sequence[str], *, most: int = 3, unlisted_count: int = 0) -> str:
    """`a, b and c`; beyond `most` names the rest is counted: `a, b, c and 2 more`, with those not in `names`."""
    more_count = max(0, len(names) - most) + unlisted_count
    if more_count:
        return f"{', '.join(names[:most])} and {more_count} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def subject_kind(key: str) -> str:
    """Return the kind in a key: `pod` of `pod/<uid>`, `cluster` of `cluster`."""
    return key.partition("/")[0]


def subject_name(key: str) -> str:
    """Return a key as people read it: `job train` for `job/train`, `member 3 of job train` for `member/train/3`."""
    kind, _, name = key.partition("/")
    first, _, last = name.rpartition("/")
    match kind:
        case "cluster":
            return "the cluster"
        case "member":
            return f"member {last} of job {first}"
        case "demand":
            return f"reported demand {first or name}"
        case "provisioning":
            return f"ProvisioningRequest {name}"
        case "group":
            return f"pod group {name}"
        case "forecast":
            return f"forecast demand for {'GPUs of any model' if name == 'any' else f'{name} GPUs'}"
        case _:
            return f"{kind} {name}" if name else kind


def capitalized(text: str) -> str:
    """The text with its first letter in upper case; the rest is unchanged."""
    return text[:1].upper() + text[1:]
