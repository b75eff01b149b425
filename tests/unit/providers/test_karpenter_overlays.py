"""NodeOverlays applied to offers, after Karpenter's own test cases."""

from typing import Any

import msgspec
import pytest

from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.providers.karpenter.overlays import OVERLAYS, NodeOverlay, OverlaidOffers, apply_overlays

USD = 1_000_000
TYPE, ZONE, FAMILY = (
    "node.kubernetes.io/instance-type",
    "topology.kubernetes.io/zone",
    "karpenter.k8s.aws/instance-family",
)
POOL = "karpenter.sh/nodepool"


def offer(instance_type: str, zone: str = "a", *, usd: float | None = 1.0, gpus: int = 1) -> Offer:
    """Return an available offer."""
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


def under(offers: list[Offer], *overlays: NodeOverlay, **more: Any) -> OverlaidOffers:  # noqa: ANN401 - as `overlaid`
    """Where no pool is, and nothing more is known of types."""
    return apply_overlays(offers, overlays, more.get("labels_of", {}), more.get("pool", {}))


def prices(found: OverlaidOffers) -> list[float | None]:
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
def test_a_price_is_set_or_adjusted_and_never_negative(spec: dict[str, Any], usd: float) -> None:
    """Exactly; other offers keep theirs, and the source of the price is recorded."""
    found = under([offer("small"), offer("large", usd=4.0)], overlay("o", OF_SMALL, **spec))
    assert prices(found) == [usd, 4.0]
    assert [one.price_source for one in found.offers] == ["NodeOverlay o" if spec else None, None]
    assert found.ignored == {}


def test_an_unknown_price_cannot_be_adjusted() -> None:
    """It stays unknown; a price that is set is known."""
    unknown = [offer("small", usd=None)]
    assert prices(under(unknown, overlay("o", OF_SMALL, priceAdjustment="+1"))) == [None]
    assert prices(under(unknown, overlay("o", OF_SMALL, price="2"))) == [2.0]


def test_the_highest_weight_wins_per_field() -> None:
    """Price and resources are decided separately."""
    found = under(
        [offer("small")],
        overlay("light", OF_SMALL, price="9", capacity={"nvidia.com/gpu.shared": 4}, weight=1),
        overlay("heavy", OF_SMALL, price="2", capacity={"nvidia.com/gpu": "8"}, weight=2),
    )
    assert prices(found) == [2.0]
    assert found.offers[0].resources.gpu_count == 8
    assert found.offers[0].resources.slices == (("nvidia.com/gpu.shared", 4),)
    assert found.ignored == {}


def test_of_equal_weights_the_later_name_wins() -> None:
    """A conflict over one offer disables the other overlay for all its offers."""
    found = under(
        [offer("small"), offer("large")],
        overlay("a", (TYPE, "Exists", []), price="3", weight=5),
        overlay("b", OF_SMALL, price="2", weight=5),
    )
    assert prices(found) == [2.0, 1.0]
    assert found.ignored == {"a": "in conflict with another overlay of the same weight"}


def test_equal_weights_without_conflict_both_apply() -> None:
    """To other offers or another resource."""
    found = under(
        [offer("small"), offer("large")],
        overlay("a", OF_SMALL, price="3", capacity={"nvidia.com/gpu": 2}),
        overlay("b", (TYPE, "NotIn", ["small"]), price="2"),
        overlay("c", OF_SMALL, capacity={"nvidia.com/gpu.shared": 3}),
    )
    assert (prices(found), found.ignored) == ([3.0, 2.0], {})
    assert [one.resources.gpu_count for one in found.offers] == [2, 1]


def test_a_resource_applies_to_the_type_a_price_to_the_offer() -> None:
    """If the overlay selects one zone."""
    found = under(
        [offer("small"), offer("small", "b")],
        overlay("o", (ZONE, "In", ["b"]), price="2", capacity={"nvidia.com/gpu": 3}),
    )
    assert prices(found) == [1.0, 2.0]
    assert [one.resources.gpu_count for one in found.offers] == [3, 3]


@pytest.mark.parametrize(
    ("operator", "values", "matches"),
    [("In", ["g5", "p5"], True), ("NotIn", ["g5"], False), ("Exists", [], True), ("DoesNotExist", [], False)],
)
def test_labels_of_the_file_are_matched(operator: str, values: list[str], *, matches: bool) -> None:
    """With every operator."""
    asked = overlay("o", (FAMILY, operator, values), price="2")
    assert prices(under([offer("small")], asked, labels_of={"small": {FAMILY: "g5"}})) == [2.0 if matches else 1.0]


@pytest.mark.parametrize(
    ("operator", "matches"), [("Gt", False), ("Gte", True), ("Lt", False), ("Lte", True), ("Unheard", False)]
)
def test_numbers_are_compared_numerically(operator: str, *, matches: bool) -> None:
    """12 is greater than 9."""
    key = "karpenter.k8s.aws/instance-cpu"
    asked = overlay("o", (key, operator, ["12"]), (key, "Gt", ["9"]), price="2")
    assert prices(under([offer("small")], asked, labels_of={"small": {key: "12"}})) == [2.0 if matches else 1.0]


def test_an_overlay_on_an_unknown_label_is_ignored_and_reported() -> None:
    """Unless its other requirements already exclude these offers."""
    asked = overlay("o", OF_SMALL, (FAMILY, "In", ["g5"]), price="2")
    found = under([offer("small"), offer("large")], asked)
    assert prices(found) == [1.0, 1.0]
    assert found.ignored == {"o": f"unknown labels {FAMILY}; add them to `labels` of the types that have them"}
    assert under([offer("large")], asked).ignored == {}


def test_an_overlay_of_a_node_pool_applies_only_there() -> None:
    """Claims without a pool are not affected."""
    asked = overlay("o", (POOL, "In", ["gpu"]), price="2")
    assert (prices(under([offer("small")], asked)), under([offer("small")], asked).ignored) == ([1.0], {})
    assert prices(under([offer("small")], asked, pool={POOL: "gpu"})) == [2.0]


def test_an_overlay_that_karpenter_refuses_is_ignored() -> None:
    """A condition of an older generation does not count."""
    refused = {"type": "ValidationSucceeded", "status": "False", "reason": "RuntimeValidation", "message": "restricted"}
    now = overlay("o", OF_SMALL, price="2", said=refused | {"observedGeneration": 2})
    before = overlay("o", OF_SMALL, price="2", said=refused | {"observedGeneration": 1})
    assert prices(under([offer("small")], now)) == [1.0]
    assert under([offer("small")], now).ignored == {"o": "refused by Karpenter, see its conditions"}
    assert prices(under([offer("small")], before)) == [2.0]


def test_an_invalid_quantity_disables_its_overlay() -> None:
    """The reason names the overlay."""
    found = under([offer("small")], overlay("o", OF_SMALL, price="2", capacity={"nvidia.com/gpu": "many"}))
    assert prices(found) == [1.0]
    assert "NodeOverlay o: nvidia.com/gpu" in found.ignored["o"]
