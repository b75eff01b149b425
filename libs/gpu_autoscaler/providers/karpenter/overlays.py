"""NodeOverlays: what users say of prices and of extended resources, over what the cloud says. Does no IO.

As Karpenter has it (sigs.k8s.io/karpenter v1.12.1, `pkg/controllers/nodeoverlay`, `cloudprovider.AdjustedPrice`; read
2026-11-22): the heaviest first, of equal weight the name that is later in the alphabet. Who was first has its say, for
each price and each resource apart; one that would say the same thing at the same weight is in conflict, and says
nothing at all. A price holds for the offers that are meant, a resource for the whole type of any of them.
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
from gpu_autoscaler.providers.karpenter.catalog import Shelf
from gpu_autoscaler.providers.karpenter.wire import CAPACITY_TYPE, GROUP, NODE_POOL


class Requirement(msgspec.Struct, frozen=True, kw_only=True):
    """What a label has to be."""

    key: str
    operator: str
    values: tuple[str, ...] = ()


class OverlaySpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What is said, and of what."""

    requirements: tuple[Requirement, ...] = ()
    price: str | None = None
    price_adjustment: str | None = None
    capacity: dict[str, str | int] = {}
    weight: int = 0

    @property
    def change(self) -> str | None:
        """What becomes of the price; None: nothing."""
        return self.price_adjustment if self.price is None else self.price


class OverlayCondition(Condition, frozen=True, kw_only=True):
    """A condition, and which generation of its object it is about."""

    observed_generation: int = 0


class OverlayStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What Karpenter says of it; nothing, where its feature gate is off."""

    conditions: tuple[OverlayCondition, ...] = ()


class NodeOverlay(Object, frozen=True, kw_only=True):
    """Somebody's word on offers."""

    spec: OverlaySpec = OverlaySpec()
    status: OverlayStatus = OverlayStatus()

    @property
    def is_refused(self) -> bool:
        """True where Karpenter has found it to be invalid, or in conflict, as it is now."""
        return any(
            condition.type == "ValidationSucceeded"
            and condition.status == "False"
            and condition.observed_generation >= self.metadata.generation
            for condition in self.status.conditions
        )


OVERLAYS = Kind(plural="nodeoverlays", api=f"/apis/{GROUP}/v1alpha1", type=NodeOverlay)


class Overlaid(msgspec.Struct, frozen=True, kw_only=True):
    """Offers as overlays leave them, and overlays that say nothing, with why, by name."""

    offers: tuple[Offer, ...]
    silent: Mapping[str, str]


def overlaid(
    offers: Sequence[Offer],
    overlays: Iterable[NodeOverlay],
    labels_of: Mapping[str, Mapping[str, str]],
    pool: Mapping[str, str | None],
) -> Overlaid:
    """Return the offers under these overlays.

    `labels_of`: of instance types, as far as they are known beside type, zone and capacity type. `pool`: labels that
    all nodes will have, None for one that none has. An overlay that asks for a label of which nothing is known is
    silent where the rest of it does not decide: it might mean the offer, or not.
    """
    table = _Table(offers)
    silent: dict[str, str] = {}
    for overlay in sorted(overlays, key=lambda overlay: (overlay.spec.weight, overlay.metadata.name), reverse=True):
        name, spec = overlay.metadata.name, overlay.spec
        if overlay.is_refused:
            silent[name] = "Karpenter has refused it, see its conditions"
            continue
        verdicts = {key: is_meant(spec, one, labels_of, pool) for key, one in table.on_sale.items()}
        if unknown := sorted({verdict for verdict in verdicts.values() if isinstance(verdict, str)}):
            silent[name] = f"nothing is known of {', '.join(unknown)}; write it into `labels` of the types that have it"
            continue
        meant = [table.on_sale[key] for key, verdict in verdicts.items() if verdict is True]
        if table.clashes(spec, meant):
            silent[name] = "in conflict with another of the same weight"
            continue
        try:
            capacity = _amounts(spec.capacity, name)
        except PermanentError as exc:
            silent[name] = str(exc)
            continue
        table.price(overlay, meant)
        table.give(spec, capacity, {one.instance_type for one in meant})
    return Overlaid(offers=tuple(table.on_sale.values()), silent=silent)


class _Table:
    """What is on sale, and what was said of it so far."""

    def __init__(self, offers: Sequence[Offer]) -> None:
        self.on_sale = {offer.key: offer for offer in offers}
        self._price_weights: dict[str, int] = {}  # by offer: of who spoke last
        self._last_words: dict[str, tuple[int, frozenset[str]]] = {}  # by type: weight and resources of who spoke last
        self._given: dict[str, frozenset[str]] = {}  # by type: resources that somebody gave

    def clashes(self, spec: OverlaySpec, meant: Iterable[Offer]) -> bool:
        """Return whether the same thing was said last at the same weight."""
        for offer in meant:
            if spec.change is not None and self._price_weights.get(offer.key) == spec.weight:
                return True
            weight, names = self._last_words.get(offer.instance_type, (0, frozenset()))
            if weight == spec.weight and names & spec.capacity.keys():
                return True
        return False

    def price(self, overlay: NodeOverlay, meant: Iterable[Offer]) -> None:
        """Take its word for prices of which nobody has spoken."""
        change = overlay.spec.change
        for offer in meant if change is not None else ():
            if offer.key not in self._price_weights:
                self.on_sale[offer.key] = _priced(offer, str(change), overlay.metadata.name)
            self._price_weights[offer.key] = overlay.spec.weight

    def give(self, spec: OverlaySpec, capacity: Resources, types: Iterable[str]) -> None:
        """Take its word for resources of which nobody has spoken."""
        names = frozenset(spec.capacity)
        for one in types if names else ():
            new = names - self._given.get(one, frozenset())
            for key, offer in self.on_sale.items():
                if offer.instance_type == one:
                    resources = _given(offer.resources, capacity, new)
                    self.on_sale[key] = msgspec.structs.replace(offer, resources=resources)
            self._given[one] = self._given.get(one, frozenset()) | names
            self._last_words[one] = (spec.weight, names)


def is_meant(
    spec: OverlaySpec, offer: Offer, labels_of: Mapping[str, Mapping[str, str]], pool: Mapping[str, str | None]
) -> bool | str:
    """Return whether its requirements hold for the offer; the label that it hangs on where nothing is known of that."""
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
    """Return whether a label is as required; None: the node has no such label."""
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


def _priced(offer: Offer, change: str, name: str) -> Offer:
    """Return it at the price that is said; an adjustment of a price that is not known leaves it so."""
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
    """Return the extended resources that we count; Karpenter takes no others, and those of other kinds are nobody's
    here. Raises PermanentError where a quantity is none."""
    ours = {key: str(value) for key, value in capacity.items() if key == GPU_RESOURCE or is_slice(key)}
    return amounts(ours, of=f"NodeOverlay {name}")


def _given(before: Resources, capacity: Resources, names: frozenset[str]) -> Resources:
    slices = dict(before.slices) | {key: count for key, count in capacity.slices if key in names}
    return msgspec.structs.replace(
        before,
        gpu_count=capacity.gpu_count if GPU_RESOURCE in names else before.gpu_count,
        slices=tuple(sorted(slices.items())),
    )


# Reads NodeOverlays where they are installed, and says which of them go unheard.

NO_POOL: Mapping[str, str | None] = {}

log = structlog.get_logger()


class Overlays:
    """The overlays of a cluster."""

    def __init__(self, kube: KubeClient) -> None:
        self._kube = kube
        self._told: dict[str | None, Mapping[str, str]] = {}  # by pool

    async def over(self, shelf: Shelf, pool: Mapping[str, str | None]) -> Sequence[Offer]:
        """Return what the file sells, as the overlays leave it. Those that say nothing are told once; so is that we may
        not read them. Raises TransientError: a price that may be another one is not told."""
        try:
            found = await self.look(shelf, pool)
        except PermanentError as exc:
            found = Overlaid(offers=shelf.offers(), silent={"all of them": str(exc)})
        name_of_pool = pool.get(NODE_POOL)
        if found.silent != self._told.get(name_of_pool, {}):
            for name, why in found.silent.items():
                log.warning("node overlay not heeded", node_overlay=name, reason=why)
            self._told[name_of_pool] = found.silent
        return found.offers

    async def look(self, shelf: Shelf, pool: Mapping[str, str | None]) -> Overlaid:
        """Return the same, and what goes unheard. Raises PermanentError without the right, TransientError."""
        return overlaid(shelf.offers(), await self.read(), shelf.labels(), pool)

    async def read(self) -> Sequence[NodeOverlay]:
        """Return all of them; none where they are not installed. Raises PermanentError, TransientError."""
        found: list[NodeOverlay] = []
        query: dict[str, str] = {}
        while True:
            try:
                page = await self._kube.list_page(OVERLAYS, query)
            except NotFound:
                return ()
            found += [OVERLAYS.decode(item, "list") for item in page.items or ()]
            if not page.metadata.continue_:
                return found
            query = {"continue": page.metadata.continue_}
