"""Money adds up, to the micro-dollar."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_autoscaler.model.money import cost_micro_usd, split_micro_usd


def test_an_hour_costs_the_price() -> None:
    """The unit of price is the hour."""
    assert cost_micro_usd(32_772_600, timedelta(hours=1)) == 32_772_600
    assert cost_micro_usd(32_772_600, timedelta(seconds=1)) == 9103


def test_a_lifetime_cannot_be_negative() -> None:
    """An instance that ends before it began is a broken fact, not a refund."""
    with pytest.raises(ValueError, match="negative"):
        cost_micro_usd(1, timedelta(seconds=-1))


@given(st.integers(0, 10**9), st.lists(st.integers(0, 10**10), min_size=1, max_size=20))
def test_accrual_by_spans_is_exact(price: int, spans_microseconds: list[int]) -> None:
    """Differences of the lifetime's cost add up to the lifetime's cost, however it is cut."""
    charged, elapsed = 0, timedelta()
    for microseconds in spans_microseconds:
        elapsed += timedelta(microseconds=microseconds)
        charged += cost_micro_usd(price, elapsed) - charged
    assert charged == cost_micro_usd(price, elapsed)


@given(st.integers(0, 10**12), st.lists(st.integers(0, 10**6), min_size=1, max_size=64).filter(any))
def test_shares_add_up(amount: int, weights: list[int]) -> None:
    """Exactly to the amount, and nothing for a weight of zero."""
    shares = split_micro_usd(amount, weights)
    assert sum(shares) == amount
    assert all(share >= 0 for share in shares)
    assert all(share == 0 for share, weight in zip(shares, weights, strict=True) if weight == 0)


def test_an_amount_cannot_be_split_without_weights() -> None:
    """Money without an owner is an error, not a rounding."""
    assert split_micro_usd(0, [0, 0]) == (0, 0)
    with pytest.raises(ValueError, match="weights"):
        split_micro_usd(5, [0, 0])
