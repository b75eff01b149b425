"""Amounts of resources and Kubernetes quantities."""

import pytest

from gpu_autoscaler.model.gpu import gpu_model_name
from gpu_autoscaler.model.resources import Resources, parse_quantity, parse_quantity_milli


@pytest.mark.parametrize(
    ("text", "milli"),
    [
        ("500m", 500), ("2", 2000), ("0.5", 500), ("0.0005", 1), ("1Ki", 1_024_000), ("1.5Gi", 1_610_612_736_000),
        ("1e3", 1_000_000), ("1.5e3", 1_500_000), ("100k", 100_000_000), ("-1", -1000), ("0", 0), ("1E", 10**21),
    ],
)  # fmt: skip
def test_a_quantity_is_parsed_exactly(text: str, milli: int) -> None:
    """Thousandths, rounded up, as the API server does."""
    assert parse_quantity_milli(text) == milli


@pytest.mark.parametrize("text", ["", "m", "Gi", "1 Gi", "1GiB", "one", "1e", "0x10", "--1", "1.2.3", "1e100"])
def test_an_invalid_quantity_is_rejected(text: str) -> None:
    """The message shows the text."""
    with pytest.raises(ValueError, match="quantity"):
        parse_quantity_milli(text)


def test_whole_units_round_up() -> None:
    """Half a byte needs a byte."""
    assert parse_quantity("500m") == 1
    assert parse_quantity("16Gi") == 16 * 2**30


def test_capacity_is_compared_in_every_dimension() -> None:
    """Enough GPUs do not make up for missing memory."""
    room = Resources(cpu_milli=4000, memory_bytes=10, gpu_count=2, pod_count=3)
    need = Resources(cpu_milli=4000, memory_bytes=10, gpu_count=1, pod_count=1)
    assert need.fits_in(room)
    assert not (need + Resources(memory_bytes=1)).fits_in(room)
    assert (room - need) + need == room


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("NVIDIA-A100-SXM4-40GB", "A100"), ("a100", "A100"), ("Tesla T4", "T4"), ("NVIDIA L40S", "L40S"),
        ("Tesla-V100-SXM2-16GB", "V100"), ("NVIDIA-H100-80GB-HBM3", "H100"), ("GeForce GTX 1080", None), ("", None),
    ],
)  # fmt: skip
def test_foreign_labels_map_to_our_name(label: str, name: str | None) -> None:
    """One name per model, whatever the label; an unknown one stays unknown."""
    assert gpu_model_name(label) == name
