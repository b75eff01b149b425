"""What NodeOverlays make of offers: as Karpenter's own tests and code have it, case by case."""

from typing import Any

import msgspec
import pytest

from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.providers.karpenter.overlays import OVERLAYS, NodeOverlay, Overlaid, overlaid

USD = 1_000_000
TYPE, ZONE, FAMILY = (
    "node.kubernetes.io/instance-type",
    "topology.kubernetes.io/zone",
    "karpenter.k8s.aws/instance-family",
)
POOL = "karpenter.sh/nodepool"


def offer(instance_type: str, zone: str = "a", *, usd: float | None = 1.0, gpus: int = 1) -> Offer:
    """One that is on sale."""
    return Offer(
        instance_type=instance_type,
        zone=zone,
        capacity_type=CapacityType.ON_DEMAND,
        resources=Resources(cpu_milli=8000, memory_bytes=1 << 35, gpu_count=gpus, pod_count=110),
        price_micro_usd_per_hour=None if usd is None else round(usd * USD),
    )


def overlay(
    name: str,
    *requirements: tuple[str, str, list[str]],
    said: dict[str, Any] | None = None,
    **spec: Any,  # noqa: ANN401 - as its fields are
) -> NodeOverlay:
    """As the API server has it; `said`: a condition of Karpenter's."""
    wanted = [{"key": key, "operator": operator, "values": values} for key, operator, values in requirements]
    item = {
        "metadata": {"name": name, "generation": 2},
        "spec": {"requirements": wanted, **spec},
        "status": {"conditions": [said] if said else []},
    }
    return OVERLAYS.decode(msgspec.json.encode(item), "test")


def under(offers: list[Offer], *overlays: NodeOverlay, **more: Any) -> Overlaid:  # noqa: ANN401 - as `overlaid`
    """Where no pool is, and nothing more is known of types."""
    return overlaid(offers, overlays, more.get("labels_of", {}), more.get("pool", {}))


def prices(found: Overlaid) -> list[float | None]:
    """US dollars an hour, in the order of the offers."""
    told = (one.price_micro_usd_per_hour for one in found.offers)
    return [None if price is None else price / USD for price in told]


OF_SMALL = (TYPE, "In", ["small"])


@pytest.mark.parametrize(
    ("spec", "usd"),
    [
        ({"price": "0.25"}, 0.25),
        ({"priceAdjustment": "+0.5"}, 1.5),
        ({"priceAdjustment": "-0.25"}, 0.75),
        ({"priceAdjustment": "+10%"}, 1.1),
        ({"priceAdjustment": "-15.5%"}, 0.845),
        ({"priceAdjustment": "-100%"}, 0.0),
        ({"priceAdjustment": "-7"}, 0.0),
        ({}, 1.0),
    ],
)
def test_a_price_is_set_or_adjusted_and_never_below_nothing(spec: dict[str, Any], usd: float) -> None:
    """Exactly; offers that are not meant stay as they were, and a word stands for its source."""
    found = under([offer("small"), offer("large", usd=4.0)], overlay("o", OF_SMALL, **spec))
    assert prices(found) == [usd, 4.0]
    assert [one.price_source for one in found.offers] == ["NodeOverlay o" if spec else None, None]
    assert found.silent == {}


def test_an_adjustment_of_what_is_not_known_makes_no_price() -> None:
    """Unknown stays unknown; a price that is set is known."""
    unknown = [offer("small", usd=None)]
    assert prices(under(unknown, overlay("o", OF_SMALL, priceAdjustment="+1"))) == [None]
    assert prices(under(unknown, overlay("o", OF_SMALL, price="2"))) == [2.0]


def test_the_heaviest_speaks_first_for_each_thing_apart() -> None:
    """The lighter one's price is not heard, its resource is."""
    found = under(
        [offer("small")],
        overlay("light", OF_SMALL, price="9", capacity={"nvidia.com/gpu.shared": 4}, weight=1),
        overlay("heavy", OF_SMALL, price="2", capacity={"nvidia.com/gpu": "8"}, weight=2),
    )
    assert prices(found) == [2.0]
    assert found.offers[0].resources.gpu_count == 8
    assert found.offers[0].resources.slices == (("nvidia.com/gpu.shared", 4),)
    assert found.silent == {}


def test_of_equal_weight_the_earlier_name_is_in_conflict_and_silent_as_a_whole() -> None:
    """Karpenter goes by the later name first. A conflict over one offer silences the overlay for all of its offers."""
    found = under(
        [offer("small"), offer("large")],
        overlay("a", (TYPE, "Exists", []), price="3", weight=5),
        overlay("b", OF_SMALL, price="2", weight=5),
    )
    assert prices(found) == [2.0, 1.0]
    assert found.silent == {"a": "in conflict with another of the same weight"}


def test_equal_weights_that_say_different_things_are_both_heard() -> None:
    """Other offers, or another resource."""
    found = under(
        [offer("small"), offer("large")],
        overlay("a", OF_SMALL, price="3", capacity={"nvidia.com/gpu": 2}),
        overlay("b", (TYPE, "NotIn", ["small"]), price="2"),
        overlay("c", OF_SMALL, capacity={"nvidia.com/gpu.shared": 3}),
    )
    assert (prices(found), found.silent) == ([3.0, 2.0], {})
    assert [one.resources.gpu_count for one in found.offers] == [2, 1]


def test_a_resource_is_the_whole_types_and_a_price_the_offers() -> None:
    """Where one zone of it is meant."""
    found = under(
        [offer("small"), offer("small", "b")],
        overlay("o", (ZONE, "In", ["b"]), price="2", capacity={"nvidia.com/gpu": 3}),
    )
    assert prices(found) == [1.0, 2.0]
    assert [one.resources.gpu_count for one in found.offers] == [3, 3]


@pytest.mark.parametrize(
    ("operator", "values", "is_meant"),
    [
        ("In", ["g5", "p5"], True),
        ("NotIn", ["g5"], False),
        ("Exists", [], True),
        ("DoesNotExist", [], False),
    ],
)
def test_labels_of_the_file_are_asked(operator: str, values: list[str], *, is_meant: bool) -> None:
    """Each operator."""
    asked = overlay("o", (FAMILY, operator, values), price="2")
    assert prices(under([offer("small")], asked, labels_of={"small": {FAMILY: "g5"}})) == [2.0 if is_meant else 1.0]


@pytest.mark.parametrize(
    ("operator", "is_meant"), [("Gt", False), ("Gte", True), ("Lt", False), ("Lte", True), ("Unheard", False)]
)
def test_numbers_are_compared_as_numbers(operator: str, *, is_meant: bool) -> None:
    """Twelve is more than nine."""
    key = "karpenter.k8s.aws/instance-cpu"
    asked = overlay("o", (key, operator, ["12"]), (key, "Gt", ["9"]), price="2")
    assert prices(under([offer("small")], asked, labels_of={"small": {key: "12"}})) == [2.0 if is_meant else 1.0]


def test_what_hangs_on_a_label_that_nobody_told_says_nothing_and_is_named() -> None:
    """Unless the rest of it decides: then it is not about these offers."""
    asked = overlay("o", OF_SMALL, (FAMILY, "In", ["g5"]), price="2")
    found = under([offer("small"), offer("large")], asked)
    assert prices(found) == [1.0, 1.0]
    assert found.silent == {"o": f"nothing is known of {FAMILY}; write it into `labels` of the types that have it"}
    assert under([offer("large")], asked).silent == {}


def test_what_is_of_a_node_pool_is_not_about_claims_of_none() -> None:
    """It is where that pool buys."""
    asked = overlay("o", (POOL, "In", ["gpu"]), price="2")
    assert (prices(under([offer("small")], asked)), under([offer("small")], asked).silent) == ([1.0], {})
    assert prices(under([offer("small")], asked, pool={POOL: "gpu"})) == [2.0]


def test_what_karpenter_refuses_is_not_heeded_until_it_is_changed() -> None:
    """Its word on an older generation is old."""
    refused = {"type": "ValidationSucceeded", "status": "False", "reason": "RuntimeValidation", "message": "restricted"}
    now = overlay("o", OF_SMALL, price="2", said=refused | {"observedGeneration": 2})
    before = overlay("o", OF_SMALL, price="2", said=refused | {"observedGeneration": 1})
    assert prices(under([offer("small")], now)) == [1.0]
    assert under([offer("small")], now).silent == {"o": "Karpenter has refused it, see its conditions"}
    assert prices(under([offer("small")], before)) == [2.0]


def test_a_quantity_that_is_none_silences_its_overlay() -> None:
    """And names it."""
    found = under([offer("small")], overlay("o", OF_SMALL, price="2", capacity={"nvidia.com/gpu": "many"}))
    assert prices(found) == [1.0]
    assert "NodeOverlay o: nvidia.com/gpu" in found.silent["o"]
