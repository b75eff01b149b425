"""Why money keeps something from being bought, or from staying. Named in the unions of `model/reasons.py`."""

from typing import Literal

from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.reason import Reason


class HourlyPriceLimit(Reason, frozen=True, kw_only=True, tag="hourly_price_limit"):
    """The purchase would pass the money limit."""

    price_micro_usd_per_hour: int
    price_micro_usd_per_hour_max: int


class SpendLimit(Reason, frozen=True, kw_only=True, tag="spend_limit"):
    """What the purchase may cost while the period lasts would pass its limit, with all that is spent and promised."""

    owner: str  # whose limit it is: cluster, pool/<name>, zone/<name> or project/<name>
    period: Literal["day", "month"]
    spent_micro_usd: int  # charged, and time that is over and not charged yet
    reserved_micro_usd: int  # promised to what runs, is on order, or is bought by this plan
    needed_micro_usd: int
    limit_micro_usd: int
    until: Instant  # the period's end


class SpendEnforcementBlocked(Reason, frozen=True, kw_only=True, tag="spend_enforcement_blocked"):
    """The node will pass a hard limit of money, and stays all the same: its work is protected."""

    owner: str  # as with `SpendLimit`
    period: Literal["day", "month"]
    left_micro_usd: int
    limit_micro_usd: int
    until: Instant
    protection: str  # in words: "pod ml/train-0: annotation ..."


class SpendExhausted(Reason, frozen=True, kw_only=True, tag="spend_exhausted"):
    """What runs would pass a hard limit of money; this goes before, as it costs least to lose."""

    owner: str  # as with `SpendLimit`
    period: Literal["day", "month"]
    spent_micro_usd: int
    limit_micro_usd: int
    until: Instant
