"""What an examination of a cloud's set-up says: each thing with its name and the next step."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

import msgspec

from gpu_autoscaler.model.offers import Offer

CLOCK_SKEW_SECONDS_MAX = (
    60.0  # clouds give the other side's clock some minutes at most; ours is to be right long before
)

# fault: nothing can be bought, or removed, until it is changed · advice: it works, and something is lost
Level = Literal["ok", "warning", "error"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    level: Level
    subject: str  # what was looked at: a setting, a call, a group
    said: str
    next_step: str = ""  # empty where nothing is to be done


def ok(subject: str, said: str) -> Finding:
    """It is as it should be."""
    return Finding(level="ok", subject=subject, said=said)


def warning(subject: str, said: str, next_step: str) -> Finding:
    """It works, and something is lost."""
    return Finding(level="warning", subject=subject, said=said, next_step=next_step)


def error(subject: str, said: str, next_step: str) -> Finding:
    """It does not work."""
    return Finding(level="error", subject=subject, said=said, next_step=next_step)


def clock_findings(cloud_ahead: timedelta | None, whose: str) -> list[Finding]:
    """Say how far this machine's clock is from the cloud's, where that matters; nothing where it was not told."""
    if cloud_ahead is None or abs(cloud_ahead) <= timedelta(seconds=CLOCK_SKEW_SECONDS_MAX):
        return []
    side = "behind" if cloud_ahead > timedelta() else "ahead of"
    step = "set this machine's clock (NTP); tokens that are signed by it may be refused"
    return [warning("clock", f"is {abs(cloud_ahead.total_seconds()):.0f} s {side} {whose}", step)]


def stale_price_findings(offers: Sequence[Offer], setting: str) -> list[Finding]:
    """Say which price is the oldest of those that their source said nothing of lately; `setting` names the file."""
    old = [(offer.priced_at, offer.key, offer.price_source) for offer in offers if offer.priced_at is not None]
    if not old:
        return []
    at, key, source = min(old)
    said = f"that of {key} is of {at}, by the {source}; {len(old)} are old"
    return [warning("prices", said, f"renew {setting}, or see why the source does not answer")]
