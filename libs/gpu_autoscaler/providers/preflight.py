"""Findings of a preflight check of a cloud: subject, what was found and the next step."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

import msgspec

from gpu_autoscaler.model.offers import Offer

CLOCK_SKEW_SECONDS_MAX = 60.0  # clouds tolerate a skew of a few minutes

# error: purchases or removals fail until it is fixed · warning: works with a loss
Level = Literal["ok", "warning", "error"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one check."""

    level: Level
    subject: str  # what was checked: a setting, a call, a group
    message: str
    next_step: str = ""  # empty if nothing needs to be done


def ok(subject: str, message: str) -> Finding:
    """The check passed."""
    return Finding(level="ok", subject=subject, message=message)


def warning(subject: str, message: str, next_step: str) -> Finding:
    """It works with a loss."""
    return Finding(level="warning", subject=subject, message=message, next_step=next_step)


def error(subject: str, message: str, next_step: str) -> Finding:
    """It does not work."""
    return Finding(level="error", subject=subject, message=message, next_step=next_step)


def clock_findings(cloud_ahead: timedelta | None, whose: str) -> list[Finding]:
    """Report a clock skew that matters; nothing if the skew is unknown."""
    if cloud_ahead is None or abs(cloud_ahead) <= timedelta(seconds=CLOCK_SKEW_SECONDS_MAX):
        return []
    side = "behind" if cloud_ahead > timedelta() else "ahead of"
    step = "set this machine's clock (NTP); the cloud may reject requests signed by it"
    return [warning("clock", f"is {abs(cloud_ahead.total_seconds()):.0f} s {side} {whose}", step)]


def stale_price_findings(offers: Sequence[Offer], setting: str) -> list[Finding]:
    """Report the oldest price that its source has not confirmed recently; `setting` names the price file."""
    old = [(offer.priced_at, offer.key, offer.price_source) for offer in offers if offer.priced_at is not None]
    if not old:
        return []
    at, key, source = min(old)
    message = f"price of {key} is from {at} ({source}); {len(old)} prices are stale"
    return [warning("prices", message, f"renew {setting}, or find out why the source does not answer")]


def unpriced_findings(offers: Sequence[Offer], next_step: str) -> list[Finding]:
    """Report instance types without a price."""
    names = sorted(
        {f"{offer.instance_type} {offer.capacity_type}" for offer in offers if offer.price_micro_usd_per_hour is None}
    )
    if not names:
        return []
    message = f"unknown for {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}; such offers are not used"
    return [warning("prices", message, next_step)]
