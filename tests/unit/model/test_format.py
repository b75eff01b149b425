"""Amounts, durations, lists and keys as people read them."""

from gpu_autoscaler.model.format import counted, duration, listed, money, price, subject_name


def test_amounts_of_money_have_cents_and_more_where_needed() -> None:
    """Small prices are not rounded away."""
    assert [money(amount) for amount in (2_460_000, 526_000, 10_000_000, 120, 1_234_500_000)] == [
        "$2.46",
        "$0.526",
        "$10.00",
        "$0.00012",
        "$1,234.50",
    ]
    assert (price(2_460_000), price(None)) == ("$2.46/h", "an unknown price")


def test_durations_have_the_two_largest_units() -> None:
    """Days from 48 hours on."""
    assert [duration(seconds) for seconds in (0, 59.6, 90, 600, 3600, 5400, 90_000, 172_800, 612_000)] == [
        "0 s",
        "1 min",
        "1 min 30 s",
        "10 min",
        "1 h",
        "1 h 30 min",
        "25 h",
        "2 d",
        "7 d 2 h",
    ]


def test_long_lists_are_counted() -> None:
    """At most three names."""
    assert [listed(names) for names in ((), ("a",), ("a", "b"), ("a", "b", "c", "d", "e"))] == [
        "",
        "a",
        "a and b",
        "a, b, c and 2 more",
    ]
    assert (counted(1, "node"), counted(0, "node")) == ("1 node", "0 nodes")


def test_keys_are_named_by_kind() -> None:
    """Every kind of key that reasons and plans use."""
    names = {
        "job/train": "job train",
        "cluster": "the cluster",
        "pod/ml/train-0": "pod ml/train-0",
        "member/train/3": "member 3 of job train",
        "demand/notebooks/2": "reported demand notebooks",
        "demand/notebooks": "reported demand notebooks",
        "group/ml/mpi": "pod group ml/mpi",
        "forecast/any": "forecast demand for GPUs of any model",
        "forecast/A100": "forecast demand for A100 GPUs",
        "headroom/day": "headroom day",
    }
    assert {key: subject_name(key) for key in names} == names
