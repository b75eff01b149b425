"""Offers of the simulated cloud: instance types, fixture prices and catalog files."""

from pathlib import Path

import pytest

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.gpu import GIBIBYTE, GPU_MODELS
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.simcluster.offers import INSTANCE_CATALOG, ZONES, capacity_of, load_catalog, offers_of

OFFERS = {offer.key: offer for offer in offers_of(INSTANCE_CATALOG)}


def price(key: str) -> int:
    """Micro-dollars an hour of an offer."""
    found = OFFERS[key].price_micro_usd_per_hour
    assert found is not None
    return found


def gpus(offer: Offer) -> tuple[str | None, int, int]:
    """Model, count, and GiB of one."""
    return offer.gpu_model, offer.resources.gpu_count, (offer.gpu_memory_bytes or 0) // GIBIBYTE


@pytest.mark.parametrize(
    ("instance_type", "expected"),
    [
        ("p4d.24xlarge", ("A100", 8, 40)),
        ("p4de.24xlarge", ("A100", 8, 80)),
        ("g6.48xlarge", ("L4", 8, 24)),
        ("g6e.48xlarge", ("L40S", 8, 48)),
        ("g4dn.12xlarge", ("T4", 4, 16)),
    ],
)
def test_instance_types_have_their_real_gpus(instance_type: str, expected: tuple[str, int, int]) -> None:
    """Including types that price lists often get wrong."""
    assert gpus(OFFERS[f"{instance_type}/sim-a/on-demand"]) == expected


def test_every_type_is_offered_in_every_zone_with_a_price() -> None:
    """On-demand and spot, spot cheaper; every GPU model is a known one."""
    assert len(OFFERS) == len(INSTANCE_CATALOG) * len(ZONES) * 2
    for kind in INSTANCE_CATALOG:
        for zone in ZONES:
            assert 0 < price(f"{kind.name}/{zone}/spot") < price(f"{kind.name}/{zone}/on-demand")
        assert kind.gpu_model is None or kind.gpu_model in GPU_MODELS


def test_listed_prices_are_used_exactly() -> None:
    """To the micro-dollar."""
    assert price("p4d.24xlarge/sim-b/on-demand") == 32_770_000
    assert price("g4dn.xlarge/sim-a/on-demand") == 526_000
    assert price("g4dn.xlarge/sim-a/spot") == 160_000
    assert price("p3.2xlarge/sim-a/spot") == 1_200_000


def test_allocatable_is_less_than_the_machine() -> None:
    """Kubelet and agents reserve CPU and memory, never a GPU; a trace's node shape reserves nothing."""
    kind = next(kind for kind in INSTANCE_CATALOG if kind.name == "g4dn.xlarge")
    allocatable, capacity = OFFERS["g4dn.xlarge/sim-a/spot"].resources, capacity_of(kind)
    assert 3_500 < allocatable.cpu_milli < capacity.cpu_milli
    assert 13 * GIBIBYTE < allocatable.memory_bytes < capacity.memory_bytes
    assert allocatable.gpu_count == capacity.gpu_count == 1


def test_a_catalog_is_read_from_a_file(tmp_path: Path) -> None:
    """A trace's shape is offered unchanged."""
    path = tmp_path / "offers.json"
    path.write_text(
        '[{"name": "openb-V100M32", "vcpu_count": 96, "memory_gib": 384, "gpu_count": 8, "gpu_model": "V100M32",'
        ' "gpu_memory_gib": 32, "price_usd_per_hour": 24.0, "is_allocatable": true}]'
    )
    (spot,) = [offer for offer in offers_of(load_catalog(path), ["z"]) if offer.capacity_type is CapacityType.SPOT]
    assert spot.key == "openb-V100M32/z/spot"
    assert (spot.resources.cpu_milli, spot.resources.memory_bytes) == (96_000, 384 * GIBIBYTE)
    assert spot.price_micro_usd_per_hour == 8_400_000


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[{"name": "a"}]', "vcpu_count"),
        ('[{"name": "a", "vcpu_count": -1, "memory_gib": 1}]', "vcpu_count"),
        ('[{"name": "a", "vcpu_count": 1, "memory_gib": 1, "color": 1}]', "color"),
        ('[{"name": "a", "vcpu_count": 1, "memory_gib": 1, "gpu_count": 2}]', "a: gpu_model"),
        ('[{"name": "a", "vcpu_count": 1, "memory_gib": 1}, {"name": "a", "vcpu_count": 1, "memory_gib": 1}]', "twice"),
        ("{", "not a list of instance types"),
    ],
)
def test_an_invalid_catalog_is_refused_by_name(tmp_path: Path, text: str, told: str) -> None:
    """The message has file and field."""
    path = tmp_path / "offers.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told) as refused:
        load_catalog(path)
    assert str(path) in str(refused.value)


def test_a_missing_catalog_is_refused_by_name(tmp_path: Path) -> None:
    """The message has the file."""
    with pytest.raises(ConfigError, match="cannot be read"):
        load_catalog(tmp_path / "none.json")
