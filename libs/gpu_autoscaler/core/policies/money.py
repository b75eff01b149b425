"""Limits of money that adds up, by day and by month of UTC. Those of an hour's price stand in `core/policy.py`."""

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from gpu_autoscaler.core.policies.ranges import MicroUsd


class SpendPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may be spent in a day and in a month. A purchase reserves its price for as long as its work may take."""

    day_micro_usd_max: Annotated[
        MicroUsd | None, Meta(description="Money a day of UTC at most; none: no limit. Source: S5, S116.")
    ] = None
    month_micro_usd_max: Annotated[
        MicroUsd | None, Meta(description="Money a month of UTC at most; none: no limit. Source: S5, S116.")
    ] = None
    is_hard: Annotated[
        bool,
        Meta(
            description="Nodes that run make way before a limit is passed; false: only nothing more is bought."
            " Source: S116."
        ),
    ] = True


def money_mistakes(money: SpendPolicy, at: str) -> Iterator[str]:
    """Yield what cannot be meant."""
    day, month = money.day_micro_usd_max, money.month_micro_usd_max
    if day is not None and month is not None and day > month:
        yield f"{at}.day_micro_usd_max: {day} is above month_micro_usd_max {month}; lower the one or raise the other"
