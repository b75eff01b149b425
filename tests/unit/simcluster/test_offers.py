"""What the simulated cloud sells: real shapes, fixture prices, catalogues from files."""

from pathlib import Path

import pytest

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.gpu import GIBIBYTE, GPU_MODELS
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.simcluster.offers import CATALOGUE, ZONES, capacity_of, load_catalogue, offers_of

OFFERS = {offer.key: offer for offer in offers_of(CATALOGUE)}


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
def test_types_carry_the_gpus_that_they_really_have(instance_type: str, expected: tuple[str, int, int]) -> None:
    """The figures that price lists of the field get wrong are right here."""
    assert gpus(OFFERS[f"{instance_type}/sim-a/on-demand"]) == expected


def test_every_type_is_sold_in_every_zone_in_both_ways_with_a_price() -> None:
    """No offer is without a price; spot is cheaper; every GPU model is one that we know by name."""
    assert len(OFFERS) == len(CATALOGUE) * len(ZONES) * 2
    for kind in CATALOGUE:
        for zone in ZONES:
            assert 0 < price(f"{kind.name}/{zone}/spot") < price(f"{kind.name}/{zone}/on-demand")
        assert kind.gpu_model is None or kind.gpu_model in GPU_MODELS


def test_listed_prices_are_the_listed_ones() -> None:
    """Where a price is given it is that price, to the micro-dollar."""
    assert price("p4d.24xlarge/sim-b/on-demand") == 32_770_000
    assert price("g4dn.xlarge/sim-a/on-demand") == 526_000
    assert price("g4dn.xlarge/sim-a/spot") == 160_000
    assert price("p3.2xlarge/sim-a/spot") == 1_200_000


def test_pods_get_less_than_the_machine_has() -> None:
    """Kubelet and agents keep some CPU and memory, never a GPU; a trace's node shape keeps nothing."""
    kind = next(kind for kind in CATALOGUE if kind.name == "g4dn.xlarge")
    allocatable, capacity = OFFERS["g4dn.xlarge/sim-a/spot"].resources, capacity_of(kind)
    assert 3_500 < allocatable.cpu_milli < capacity.cpu_milli
    assert 13 * GIBIBYTE < allocatable.memory_bytes < capacity.memory_bytes
    assert allocatable.gpu_count == capacity.gpu_count == 1


def test_a_catalogue_comes_from_a_file(tmp_path: Path) -> None:
    """A trace's shape is sold as it stands there."""
    path = tmp_path / "offers.json"
    path.write_text(
        '[{"name": "openb-V100M32", "vcpu_count": 96, "memory_gib": 384, "gpu_count": 8, "gpu_model": "V100M32",'
        ' "gpu_memory_gib": 32, "price_usd_per_hour": 24.0, "is_allocatable": true}]'
    )
    (spot,) = [offer for offer in offers_of(load_catalogue(path), ["z"]) if offer.capacity_type is CapacityType.SPOT]
    assert spot.key == "openb-V100M32/z/spot"
    assert (spot.resources.cpu_milli, spot.resources.memory_bytes) == (96_000, 384 * GIBIBYTE)
    assert spot.price_micro_usd_per_hour == 8_400_000


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[{"name": "a"}]', "vcpu_count"),
        ('[{"name": "a", "vcpu_count": -1, "memory_gib": 1}]', "vcpu_count"),
        ('[{"name": "a", "vcpu_count": 1, "memory_gib": 1, "colour": 1}]', "colour"),
        ('[{"name": "a", "vcpu_count": 1, "memory_gib": 1, "gpu_count": 2}]', "a: gpu_model"),
        ('[{"name": "a", "vcpu_count": 1, "memory_gib": 1}, {"name": "a", "vcpu_count": 1, "memory_gib": 1}]', "twice"),
        ("{", "no list of instance types"),
    ],
)
def test_a_broken_catalogue_is_refused_by_name(tmp_path: Path, text: str, told: str) -> None:
    """The file and the field stand in the message."""
    path = tmp_path / "offers.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told) as refused:
        load_catalogue(path)
    assert str(path) in str(refused.value)


def test_a_missing_catalogue_is_refused_by_name(tmp_path: Path) -> None:
    """A file that is not there is told as such."""
    with pytest.raises(ConfigError, match="cannot be read"):
        load_catalogue(tmp_path / "none.json")
