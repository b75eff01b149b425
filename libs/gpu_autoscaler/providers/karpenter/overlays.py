"""NodeOverlays: users' prices and extended resources, which override the cloud's.

As in Karpenter (sigs.k8s.io/karpenter v1.12.1, `pkg/controllers/nodeoverlay`, `cloudprovider.AdjustedPrice`; read
2026-11-22): the highest weight comes first; with equal weight, the name later in the alphabet. The first overlay wins,
for each price and resource separately; an overlay that would set the same value at the same weight is in conflict and
has no effect. A price applies to the matching offers, a resource to the whole instance type of any of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal

import msgspec
import structlog

from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.protocol import Kind, NotFound
from gpu_autoscaler.kube.translate.common import amounts
from gpu_autoscaler.kube.wire.core import Condition, Object
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.resources import GPU_RESOURCE, Resources, is_slice
from gpu_autoscaler.providers.karpenter.catalog import Catalog
from gpu_autoscaler.providers.karpenter.wire import CAPACITY_TYPE, GROUP, NODE_POOL

NO_POOL: Mapping[str, str | None] = {}

log = structlog.get_logger()


class Requirement(msgspec.Struct, frozen=True, kw_only=True):
    """Required value of a label."""

    key: str
    operator: str
    values: tuple[str, ...] = ()


class OverlaySpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Requirements and the values that an overlay sets."""

    requirements: tuple[Requirement, ...] = ()
    price: str | None = None
    price_adjustment: str | None = None
    capacity: dict[str, str | int] = {}
    weight: int = 0

    @property
    def change(self) -> str | None:
        """The price or its adjustment; None: unchanged."""
        return self.price_adjustment if self.price is None else self.price


class OverlayCondition(Condition, frozen=True, kw_only=True):
    """A condition with the generation of its object."""

    observed_generation: int = 0


class OverlayStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Karpenter's verdict; empty if its feature gate is off."""

    conditions: tuple[OverlayCondition, ...] = ()


class NodeOverlay(Object, frozen=True, kw_only=True):
    """An override of offers by a user."""

    spec: OverlaySpec = OverlaySpec()
    status: OverlayStatus = OverlayStatus()

    @property
    def is_refused(self) -> bool:
        """Return whether Karpenter found the current generation invalid or in conflict."""
        return any(
            condition.type == "ValidationSucceeded"
            and condition.status == "False"
            and condition.observed_generation >= self.metadata.generation
            for condition in self.status.conditions
        )


OVERLAYS = Kind(plural="nodeoverlays", api=f"/apis/{GROUP}/v1alpha1", type=NodeOverlay)


class OverlaidOffers(msgspec.Struct, frozen=True, kw_only=True):
    """Offers with overlays applied, and reasons of ignored overlays by name."""

    offers: tuple[Offer, ...]
    ignored: Mapping[str, str]


def apply_overlays(
    offers: Sequence[Offer],
    overlays: Iterable[NodeOverlay],
    labels_of: Mapping[str, Mapping[str, str]],
    pool: Mapping[str, str | None],
) -> OverlaidOffers:
    """Return the offers with these overlays applied.

    `labels_of`: known labels of instance types beside type, zone and capacity type. `pool`: labels of all nodes; None:
    no node has the label. An overlay is ignored if its effect depends on a label about which nothing is known.
    """
    table = _OverlayTable(offers)
    ignored: dict[str, str] = {}
    for overlay in sorted(overlays, key=lambda overlay: (overlay.spec.weight, overlay.metadata.name), reverse=True):
        name, spec = overlay.metadata.name, overlay.spec
        if overlay.is_refused:
            ignored[name] = "refused by Karpenter, see its conditions"
            continue
        verdicts = {key: matches(spec, offer, labels_of, pool) for key, offer in table.offers.items()}
        if unknown := sorted({verdict for verdict in verdicts.values() if isinstance(verdict, str)}):
            ignored[name] = f"unknown labels {', '.join(unknown)}; add them to `labels` of the types that have them"
            continue
        matching = [table.offers[key] for key, verdict in verdicts.items() if verdict is True]
        if table.clashes(spec, matching):
            ignored[name] = "in conflict with another overlay of the same weight"
            continue
        try:
            capacity = _amounts(spec.capacity, name)
        except PermanentError as exc:
            ignored[name] = str(exc)
            continue
        table.set_price(overlay, matching)
        table.set_resources(spec, capacity, {offer.instance_type for offer in matching})
    return OverlaidOffers(offers=tuple(table.offers.values()), ignored=ignored)


class _OverlayTable:
    """The offers, and which values were set so far."""

    def __init__(self, offers: Sequence[Offer]) -> None:
        self.offers = {offer.key: offer for offer in offers}
        self._price_weights: dict[str, int] = {}  # by offer: weight of the last overlay that set a price
        # by type: weight and resources of the last overlay that set some
        self._last_resources: dict[str, tuple[int, frozenset[str]]] = {}
        self._resources_set: dict[str, frozenset[str]] = {}  # by type: resources set so far

    def clashes(self, spec: OverlaySpec, matching: Iterable[Offer]) -> bool:
        """Return whether another overlay of the same weight set the same value last."""
        for offer in matching:
            if spec.change is not None and self._price_weights.get(offer.key) == spec.weight:
                return True
            weight, names = self._last_resources.get(offer.instance_type, (0, frozenset()))
            if weight == spec.weight and names & spec.capacity.keys():
                return True
        return False

    def set_price(self, overlay: NodeOverlay, matching: Iterable[Offer]) -> None:
        change = overlay.spec.change
        for offer in matching if change is not None else ():
            if offer.key not in self._price_weights:
                self.offers[offer.key] = _with_price(offer, str(change), overlay.metadata.name)
            self._price_weights[offer.key] = overlay.spec.weight

    def set_resources(self, spec: OverlaySpec, capacity: Resources, types: Iterable[str]) -> None:
        names = frozenset(spec.capacity)
        for instance_type in types if names else ():
            new = names - self._resources_set.get(instance_type, frozenset())
            for key, offer in self.offers.items():
                if offer.instance_type == instance_type:
                    resources = _with_resources(offer.resources, capacity, new)
                    self.offers[key] = msgspec.structs.replace(offer, resources=resources)
            self._resources_set[instance_type] = self._resources_set.get(instance_type, frozenset()) | names
            self._last_resources[instance_type] = (spec.weight, names)


def matches(
    spec: OverlaySpec, offer: Offer, labels_of: Mapping[str, Mapping[str, str]], pool: Mapping[str, str | None]
) -> bool | str:
    """Return whether its requirements match the offer; the name of a label if that is unknown."""
    of_offer = {
        labels.INSTANCE_TYPE: offer.instance_type,
        labels.ZONE: offer.zone,
        CAPACITY_TYPE: offer.capacity_type.value,
    }
    known = {NODE_POOL: None, **pool, **labels_of.get(offer.instance_type, {}), **of_offer}
    if not all(
        _holds(requirement, known[requirement.key]) for requirement in spec.requirements if requirement.key in known
    ):
        return False
    return next((requirement.key for requirement in spec.requirements if requirement.key not in known), True)


def _holds(requirement: Requirement, value: str | None) -> bool:
    """Return whether the label meets the requirement; None: the node lacks the label."""
    match requirement.operator:
        case "In":
            return value in requirement.values
        case "NotIn":
            return value not in requirement.values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    if value is None or not value.isdigit() or not requirement.values or not requirement.values[0].isdigit():
        return False
    number, limit = int(value), int(requirement.values[0])
    by_operator = {"Gt": number > limit, "Gte": number >= limit, "Lt": number < limit, "Lte": number <= limit}
    return by_operator.get(requirement.operator, False)


def _with_price(offer: Offer, change: str, name: str) -> Offer:
    """Return the offer with the price; an adjustment of an unknown price has no effect."""
    before = offer.price_micro_usd_per_hour
    if not change.startswith(("+", "-")):
        price = Decimal(change) * MICRO_USD_PER_USD
    elif before is None:
        return offer
    elif change.endswith("%"):
        price = before * (1 + Decimal(change[:-1]) / 100)
    else:
        price = before + Decimal(change) * MICRO_USD_PER_USD
    return msgspec.structs.replace(
        offer, price_micro_usd_per_hour=max(0, round(price)), price_source=f"NodeOverlay {name}"
    )


def _amounts(capacity: Mapping[str, str | int], name: str) -> Resources:
    """Return the extended resources that we count; others are ignored. Raises PermanentError for invalid quantities."""
    ours = {key: str(value) for key, value in capacity.items() if key == GPU_RESOURCE or is_slice(key)}
    return amounts(ours, of=f"NodeOverlay {name}")


def _with_resources(before: Resources, capacity: Resources, names: frozenset[str]) -> Resources:
    slices = dict(before.slices) | {key: count for key, count in capacity.slices if key in names}
    return msgspec.structs.replace(
        before,
        gpu_count=capacity.gpu_count if GPU_RESOURCE in names else before.gpu_count,
        slices=tuple(sorted(slices.items())),
    )


class Overlays:
    """Reads the NodeOverlays of a cluster."""

    def __init__(self, kube: KubeClient) -> None:
        self._kube = kube
        self._logged: dict[str | None, Mapping[str, str]] = {}  # ignored overlays, by pool

    async def apply_to(self, catalog: Catalog, pool: Mapping[str, str | None]) -> Sequence[Offer]:
        """Return the catalog's offers with overlays applied; ignored overlays and missing permissions are logged once.
        Raises TransientError: prices may be wrong without the overlays."""
        try:
            overlaid = await self.look(catalog, pool)
        except PermanentError as exc:
            overlaid = OverlaidOffers(offers=catalog.offers(), ignored={"all of them": str(exc)})
        name_of_pool = pool.get(NODE_POOL)
        if overlaid.ignored != self._logged.get(name_of_pool, {}):
            for name, why in overlaid.ignored.items():
                log.warning("node overlay ignored", node_overlay=name, reason=why)
            self._logged[name_of_pool] = overlaid.ignored
        return overlaid.offers

    async def look(self, catalog: Catalog, pool: Mapping[str, str | None]) -> OverlaidOffers:
        """Return the same with ignored overlays. Raises PermanentError without permission, TransientError."""
        return apply_overlays(catalog.offers(), await self.read(), catalog.labels(), pool)

    async def read(self) -> Sequence[NodeOverlay]:
        """Return all overlays; none if the kind is not installed. Raises PermanentError, TransientError."""
        try:
            return await self._kube.list_all(OVERLAYS)
        except NotFound:
            return ()
