"""Money in whole micro-dollars: exact, and equal in any order of addition."""

from collections.abc import Sequence
from datetime import timedelta

MICRO_USD_PER_USD = 1_000_000
HOURS_PER_MONTH = 730  # a twelfth of a year of 8,760 hours, as cloud price lists count
_MICROSECONDS_PER_HOUR = 3_600_000_000


def cost_micro_usd(price_micro_usd_per_hour: int, duration: timedelta) -> int:
    """Return the cost of `duration` at this price, rounded down to the micro-dollar.

    Rounding once for a whole lifetime and accruing differences of it keeps every partial sum exact.
    Raises ValueError for a negative duration: an instance cannot end before it began.
    """
    microseconds = duration // timedelta(microseconds=1)
    if microseconds < 0:
        raise ValueError(f"cost of a negative duration: {duration}")
    return price_micro_usd_per_hour * microseconds // _MICROSECONDS_PER_HOUR


def split_micro_usd(amount_micro_usd: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Split an amount by weights so that the shares add up to it exactly (largest remainder, first wins ties). Raises
    ValueError for an amount other than zero without a weight above zero."""
    total = sum(weights)
    if total <= 0:
        if amount_micro_usd == 0:
            return tuple(0 for _ in weights)
        raise ValueError(f"no weights to split {amount_micro_usd} micro-dollars over")
    shares = [amount_micro_usd * weight // total for weight in weights]
    remainders = [amount_micro_usd * weight % total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda index: (-remainders[index], index))
    for index in by_remainder[: amount_micro_usd - sum(shares)]:
        shares[index] += 1
    return tuple(shares)
