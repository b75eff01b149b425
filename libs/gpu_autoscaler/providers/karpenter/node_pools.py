"""NodePools whose limits we write: their offer, their ledger, and the GPU limit that follows. Does no IO.

Karpenter excludes from a plan each type larger than a pool's remaining limit, counts planned machines by the largest
remaining type, and plans only when every claim has its machine (sigs.k8s.io/karpenter v1.12.1,
`scheduling/scheduler.go: filterByRemainingResources, subtractMax`, `state/cluster.go: Synced`; read 2026-11-22). So a
pool of one instance type is held to its GPU limit exactly; `limits.nodes` would not be, as no type contains "nodes".
Claims being deleted are not counted: the limit is lowered before.
"""

from collections.abc import Mapping, Sequence
from urllib.parse import quote, unquote

import msgspec

from gpu_autoscaler.kube.protocol import Kind
from gpu_autoscaler.kube.wire.core import Object, WireTaint
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.resources import GPU_RESOURCE, parse_quantity
from gpu_autoscaler.providers.desired_capacity import Ledger, decode_ledger
from gpu_autoscaler.providers.karpenter.options import NodeClass
from gpu_autoscaler.providers.karpenter.overlays import OverlaySpec, Requirement, matches
from gpu_autoscaler.providers.karpenter.translate import OFFER, PRICE
from gpu_autoscaler.providers.karpenter.wire import API_VERSION, CAPACITY_TYPE, GROUP, NodeClaim
from gpu_autoscaler.providers.protocol import Order

# On pools: owner, the GPU limit we wrote last, pending orders and foreign claims.
OWNER, WRITTEN, ORDERS = labels.INSTALLATION, f"{labels.PREFIX}/limit", f"{labels.PREFIX}/orders"
ORDERS_LENGTH_MAX = 60_000  # annotations of an object are limited to 256 KiB in all (Kubernetes, "Annotations")
# An order is retried every few seconds until its boot deadline, and abandoned then. Source: our own.
ABANDONED_SECONDS = 3600.0
_WITHDRAWING = "w"


class ClassRef(msgspec.Struct, frozen=True, kw_only=True):
    """Reference to a node class."""

    group: str = ""
    kind: str = ""
    name: str = ""


class TemplateSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Spec of the pool's claims."""

    requirements: tuple[Requirement, ...] = ()
    taints: tuple[WireTaint, ...] = ()
    startup_taints: tuple[WireTaint, ...] = ()
    node_class_ref: ClassRef = ClassRef()
    expire_after: str = ""


class TemplateMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of the pool's nodes."""

    labels: dict[str, str] = {}


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """Template of the pool's claims."""

    spec: TemplateSpec = TemplateSpec()
    metadata: TemplateMetadata = TemplateMetadata()


class Disruption(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """When Karpenter terminates nodes voluntarily."""

    consolidate_after: str = ""


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the pool may launch, and how much of it."""

    template: Template = Template()
    limits: dict[str, str | int] = {}
    replicas: int | None = None
    disruption: Disruption = Disruption()


class NodePool(Object, frozen=True, kw_only=True):
    """A NodePool of Karpenter."""

    spec: PoolSpec = PoolSpec()

    @property
    def labels(self) -> dict[str, str | None]:
        return {**self.spec.template.metadata.labels, f"{GROUP}/nodepool": self.metadata.name}

    @property
    def gpu_limit(self) -> int | None:
        """Maximum GPUs; None: unlimited."""
        limit = self.spec.limits.get(GPU_RESOURCE)
        return None if limit is None else parse_quantity(str(limit))


POOLS = Kind(plural="nodepools", api=f"/apis/{API_VERSION}", type=NodePool)


def pool_offer(
    pool: NodePool, offers: Sequence[Offer], labels_of: Mapping[str, Mapping[str, str]], node_class: NodeClass
) -> Offer:
    """Return the pool's only offer, from the catalog. Raises PermanentError if it has several or none, or cannot be
    limited. Requirements on unknown labels count as met."""
    name, template = pool.metadata.name, pool.spec.template.spec
    reference = template.node_class_ref
    if (reference.group, reference.kind, reference.name) != tuple(node_class):
        reference_text = f"{reference.group}/{reference.kind}/{reference.name}"
        raise PermanentError(f"NodePool {name} uses node class {reference_text}, not karpenter.node_class")
    if pool.spec.replicas is not None:
        raise PermanentError(f"NodePool {name} is static (spec.replicas): it launches without pending pods")
    requirements = OverlaySpec(requirements=template.requirements)
    matching = [offer for offer in offers if matches(requirements, offer, labels_of, pool.labels) is not False]
    if len(matching) != 1:
        keys = ", ".join(offer.key for offer in matching[:3]) or "nothing in karpenter.offers_path"
        raise PermanentError(
            f"NodePool {name} offers {keys}{', ...' if len(matching) > 3 else ''}; it needs exactly one: restrict its"
            " requirements to one instance type, zone and capacity type"
        )
    if not matching[0].resources.gpu_count:
        raise PermanentError(f"NodePool {name} offers {matching[0].key}, which has no GPUs to limit it by")
    return matching[0]


def missing_marks(pool: NodePool, offer: Offer, order: Order) -> list[str]:
    """Return labels and taints of the order that the pool's nodes lack. Labels with our prefix are set on the claim by
    us."""
    node_labels = pool.labels | {
        labels.INSTANCE_TYPE: offer.instance_type,
        labels.ZONE: offer.zone,
        CAPACITY_TYPE: offer.capacity_type.value,
    }
    template = pool.spec.template.spec
    taints = {(taint.key, taint.value, taint.effect) for taint in (*template.taints, *template.startup_taints)}
    missing = [
        f"label {key}={value}"
        for key, value in order.labels
        if not key.startswith((f"{labels.PREFIX}/", labels.HOSTNAME)) and node_labels.get(key) != value
    ]
    return missing + [
        f"taint {taint.key}={taint.value}:{taint.effect}"
        for taint in order.taints
        if (taint.key, taint.value, taint.effect) not in taints
    ]


def note_of(order: Order, second: int, *, is_withdrawing: bool = False) -> str:
    """Return the ledger's note of an order."""
    price = order.offer.price_micro_usd_per_hour
    mark = _WITHDRAWING if is_withdrawing else ""
    texts = (order.pool, dict(order.labels).get(labels.PROJECT_ID, ""))
    return "@".join(("" if price is None else str(price), str(second), mark, *(quote(text, safe="") for text in texts)))


def second_of(note: str) -> int:
    """Return when an order was recorded."""
    return int(note.split("@")[1])


def marks_of(action_id: ActionId, note: str, offer: Offer, installation: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return labels and annotations of an order's claim. Karpenter copies the labels to its node."""
    price, _, _, pool, project = note.split("@")
    known = offer.price_micro_usd_per_hour
    price = price or ("" if known is None else str(known))
    claim_labels = {
        labels.INSTALLATION: installation,
        labels.ACTION_ID: action_id,
        labels.CAPACITY_TYPE: offer.capacity_type.value,
        labels.POOL: unquote(pool),
        labels.PROJECT_ID: unquote(project),
        labels.GPU_MODEL: offer.gpu_model or "",
    }
    notes = {OFFER: offer.key, PRICE: price}
    return {key: value for key, value in claim_labels.items() if value}, {
        key: value for key, value in notes.items() if value
    }


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a pool at one moment, with new claims assigned to orders."""

    pool: NodePool
    claims: Mapping[str, NodeClaim]
    ledger: Ledger
    newly_assigned: Mapping[str, tuple[ActionId, str]]  # claims that lack their labels yet
    ending: frozenset[str] = frozenset()  # claims about to be deleted

    @property
    def counted_claims(self) -> list[str]:
        """Claims that count against Karpenter's limit and are kept."""
        return [
            name
            for name, claim in self.claims.items()
            if claim.metadata.deletion_timestamp is None and name not in self.ending
        ]

    def required_gpus(self, ledger: Ledger, gpu_count: int) -> int:
        pending = [note for _, note in ledger.pending if note.split("@")[2] != _WITHDRAWING]
        return gpu_count * (len(self.counted_claims) + len(pending))

    def claim_of(self, action_id: ActionId) -> NodeClaim | None:
        name = self.ledger.member_of(action_id)
        return None if name is None else self.claims.get(name)

    def wants(self, action_id: ActionId) -> bool:
        """Return whether the order is pending and not being withdrawn."""
        notes = (note for pending_id, note in self.ledger.pending if pending_id == action_id)
        return any(note.split("@")[2] != _WITHDRAWING for note in notes)

    def problem(self, installation: str, gpu_count: int) -> tuple[str, str] | None:
        """Return why nothing may be written to the pool, as code and sentence."""
        name, notes, limit = self.pool.metadata.name, self.pool.metadata.annotations, self.pool.gpu_limit
        owner, written = notes.get(OWNER), notes.get(WRITTEN)
        if owner is None:
            present_gpus = gpu_count * len(self.counted_claims)
            if limit == present_gpus:
                return None
            return "LimitsNotOurs", (
                f"NodePool {name} allows {'any number of' if limit is None else limit} GPUs and has {present_gpus}: to"
                f' hand its limits over, set spec.limits["{GPU_RESOURCE}"] to "{present_gpus}"'
            )
        if owner != installation:
            return "NodePoolNotOwned", f"limits of NodePool {name} are written by installation {owner}, not by ours"
        if str(limit) != written:
            return "LimitsChanged", (
                f'spec.limits["{GPU_RESOURCE}"] of NodePool {name} is {limit}, but we wrote {written}: somebody else'
                f" writes it; set it to {written}, or remove annotation {OWNER} to hand it over"
            )
        return None


def pool_state(
    pool: NodePool, claims: Sequence[NodeClaim], installation: str, now: float, ending: frozenset[str], requested: str
) -> PoolState:
    """Return the pool's state, with new claims assigned to pending orders.

    Claims that nobody ordered are Karpenter's replacements of claims that it deleted, and ours too: each becomes an
    order named after the claim. Claims from before the pool was handed over are foreign.
    """
    sorted_claims = sorted(claims, key=lambda claim: (claim.created_at, claim.metadata.name))
    labeled = {
        claim.metadata.name: (ActionId(claim.metadata.labels[labels.ACTION_ID]), "")
        for claim in sorted_claims
        if claim.metadata.labels.get(labels.INSTALLATION) == installation and labels.ACTION_ID in claim.metadata.labels
    }
    notes = pool.metadata.annotations
    stored = decode_ledger([notes[ORDERS]] if ORDERS in notes else [])
    for action_id, note in stored.pending:
        is_launched = any(action_id == labeled_id for labeled_id, _ in labeled.values())
        if is_launched or (action_id != requested and now - second_of(note) > ABANDONED_SECONDS):
            stored = stored.without_order(action_id)
    names = [claim.metadata.name for claim in sorted_claims]
    ledger = msgspec.structs.replace(stored, assigned=labeled).with_members(names)
    newly_assigned = {name: order for name, order in ledger.assigned.items() if name not in labeled}
    if notes.get(OWNER) == installation:
        new = [
            claim for claim in sorted_claims if claim.metadata.name in ledger.foreign_members - stored.foreign_members
        ]
        # A claim that is already being deleted without labels came and went between two reads.
        replacements = {
            claim.metadata.name: (ActionId(claim.metadata.uid.replace("-", "")), f"@{int(now)}@@@")
            for claim in new
            if claim.metadata.deletion_timestamp is None
        }
        newly_assigned |= replacements
        ledger = msgspec.structs.replace(
            ledger,
            assigned={**ledger.assigned, **replacements},
            foreign_members=ledger.foreign_members - replacements.keys(),
        )
    return PoolState(
        pool=pool,
        claims={claim.metadata.name: claim for claim in sorted_claims},
        ledger=ledger,
        newly_assigned=newly_assigned,
        ending=ending & frozenset(names),
    )
