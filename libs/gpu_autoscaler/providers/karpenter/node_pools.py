"""NodePools whose limits we write: what one sells, what it remembers, and how many GPUs follow from that. Does no IO.

Karpenter leaves out of a plan each type that holds more than a pool's limits still allow, counts what it is about to
make by the largest type that is left, and plans only when every claim has its machine (sigs.k8s.io/karpenter v1.12.1,
`scheduling/scheduler.go: filterByRemainingResources, subtractMax`, `state/cluster.go: Synced`; read 2026-11-22). So a
pool of one type is held to its limit of GPUs exactly; its `limits.nodes` would not be, as no type holds "nodes".
Machines that are ending are not counted: the limit goes down before they do.
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
from gpu_autoscaler.providers.karpenter.overlays import OverlaySpec, Requirement, is_meant
from gpu_autoscaler.providers.karpenter.translate import OFFER, PRICE
from gpu_autoscaler.providers.karpenter.wire import API_VERSION, CAPACITY_TYPE, GROUP, NodeClaim
from gpu_autoscaler.providers.protocol import Order

# On pools, beside their limits: whose they are, the GPUs that we wrote last, orders without a claim yet, strangers.
OWNER, WRITTEN, ORDERS = labels.INSTALLATION, f"{labels.PREFIX}/limit", f"{labels.PREFIX}/orders"
ORDERS_LENGTH_MAX = 60_000  # all annotations of an object together may have 256 KiB (Kubernetes, "Annotations")
# An order is asked for again every few seconds until its boot deadline, and given back then. Source: our own.
GIVEN_UP_SECONDS = 3600.0
_WITHDRAWING = "w"


class ClassRef(msgspec.Struct, frozen=True, kw_only=True):
    """What its machines are made from."""

    group: str = ""
    kind: str = ""
    name: str = ""


class TemplateSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What its claims ask for."""

    requirements: tuple[Requirement, ...] = ()
    taints: tuple[WireTaint, ...] = ()
    startup_taints: tuple[WireTaint, ...] = ()
    node_class_ref: ClassRef = ClassRef()
    expire_after: str = ""


class TemplateMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What its nodes are marked with."""

    labels: dict[str, str] = {}


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """Of its claims."""

    spec: TemplateSpec = TemplateSpec()
    metadata: TemplateMetadata = TemplateMetadata()


class Disruption(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """When Karpenter ends its nodes by choice."""

    consolidate_after: str = ""


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What it may make, and how much of it."""

    template: Template = Template()
    limits: dict[str, str | int] = {}
    replicas: int | None = None
    disruption: Disruption = Disruption()


class NodePool(Object, frozen=True, kw_only=True):
    """A NodePool of Karpenter's."""

    spec: PoolSpec = PoolSpec()

    @property
    def labels(self) -> dict[str, str | None]:
        """What all of its nodes carry."""
        return {**self.spec.template.metadata.labels, f"{GROUP}/nodepool": self.metadata.name}

    @property
    def gpu_limit(self) -> int | None:
        """GPUs that it may have; None: as many as it likes."""
        limit = self.spec.limits.get(GPU_RESOURCE)
        return None if limit is None else parse_quantity(str(limit))


POOLS = Kind(plural="nodepools", api=f"/apis/{API_VERSION}", type=NodePool)


def sold_by(
    pool: NodePool, offers: Sequence[Offer], labels_of: Mapping[str, Mapping[str, str]], node_class: NodeClass
) -> Offer:
    """Return the one offer that the pool makes; offers are as its cloud has them. Raises PermanentError where it is to
    make several or none, or could not be held to a limit. Requirements on labels that nobody told are taken for met."""
    name, template = pool.metadata.name, pool.spec.template.spec
    reference = template.node_class_ref
    if (reference.group, reference.kind, reference.name) != tuple(node_class):
        asked = f"{reference.group}/{reference.kind}/{reference.name}"
        raise PermanentError(f"NodePool {name} is made from {asked}, not from karpenter.node_class")
    if pool.spec.replicas is not None:
        raise PermanentError(f"NodePool {name} is static (spec.replicas), and makes what no pod waits for")
    asked_for = OverlaySpec(requirements=template.requirements)
    found = [offer for offer in offers if is_meant(asked_for, offer, labels_of, pool.labels) is not False]
    if len(found) != 1:
        keys = ", ".join(one.key for one in found[:3]) or "nothing that karpenter.offers_path sells"
        raise PermanentError(
            f"NodePool {name} makes {keys}{', ...' if len(found) > 3 else ''}; its machines have to be alike: have its"
            " requirements name one instance type, zone and capacity type"
        )
    if not found[0].resources.gpu_count:
        raise PermanentError(f"NodePool {name} makes {found[0].key}, which has no GPUs to limit it by")
    return found[0]


def lacking(pool: NodePool, offer: Offer, order: Order) -> list[str]:
    """Return which labels and taints of the order the pool's nodes would not have. Those with our prefix they get from
    us, with their claim."""
    have = pool.labels | {
        labels.INSTANCE_TYPE: offer.instance_type,
        labels.ZONE: offer.zone,
        CAPACITY_TYPE: offer.capacity_type.value,
    }
    template = pool.spec.template.spec
    taints = {(taint.key, taint.value, taint.effect) for taint in (*template.taints, *template.startup_taints)}
    missing = [
        f"label {key}={value}"
        for key, value in order.labels
        if not key.startswith((f"{labels.PREFIX}/", labels.HOSTNAME)) and have.get(key) != value
    ]
    return missing + [
        f"taint {taint.key}={taint.value}:{taint.effect}"
        for taint in order.taints
        if (taint.key, taint.value, taint.effect) not in taints
    ]


def note_of(order: Order, second: int, *, is_withdrawing: bool = False) -> str:
    """Return what the ledger keeps of an order beside its name."""
    price = order.offer.price_micro_usd_per_hour
    mark = _WITHDRAWING if is_withdrawing else ""
    told = (order.pool, dict(order.labels).get(labels.PROJECT_ID, ""))
    return "@".join(("" if price is None else str(price), str(second), mark, *(quote(one, safe="") for one in told)))


def second_of(note: str) -> int:
    """Return when an order was written down."""
    return int(note.split("@")[1])


def marks_of(action_id: ActionId, note: str, offer: Offer, installation: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return labels and annotations of an order's claim. Karpenter gives its node the labels."""
    price, _, _, pool, project = note.split("@")
    known = offer.price_micro_usd_per_hour
    price = price or ("" if known is None else str(known))
    told = {
        labels.INSTALLATION: installation,
        labels.ACTION_ID: action_id,
        labels.CAPACITY_TYPE: offer.capacity_type.value,
        labels.POOL: unquote(pool),
        labels.PROJECT_ID: unquote(project),
        labels.GPU_MODEL: offer.gpu_model or "",
    }
    notes = {OFFER: offer.key, PRICE: price}
    return {key: value for key, value in told.items() if value}, {key: value for key, value in notes.items() if value}


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """A pool at one moment, with newcomers given to their orders."""

    pool: NodePool
    claims: Mapping[str, NodeClaim]
    ledger: Ledger
    newly_assigned: Mapping[str, tuple[ActionId, str]]  # newcomers that do not carry their labels yet
    ending: frozenset[str] = frozenset()  # claims that are about to be deleted

    @property
    def counted(self) -> list[str]:
        """Claims that Karpenter holds against the limit, and that are to stay."""
        return [
            name
            for name, claim in self.claims.items()
            if claim.metadata.deletion_timestamp is None and name not in self.ending
        ]

    def due(self, ledger: Ledger, gpu_count: int) -> int:
        """Return the GPUs that follow from what there is, and from what is remembered."""
        wanted = [note for _, note in ledger.pending if note.split("@")[2] != _WITHDRAWING]
        return gpu_count * (len(self.counted) + len(wanted))

    def claim_of(self, action_id: ActionId) -> NodeClaim | None:
        """Return the order's claim."""
        name = self.ledger.member_of(action_id)
        return None if name is None else self.claims.get(name)

    def wants(self, action_id: ActionId) -> bool:
        """Return whether the order stands, and is not about to be taken back."""
        notes = (note for one, note in self.ledger.pending if one == action_id)
        return any(note.split("@")[2] != _WITHDRAWING for note in notes)

    def problem(self, installation: str, gpu_count: int) -> tuple[str, str] | None:
        """Return why nothing may be written to the pool: a word and a sentence."""
        name, notes, limit = self.pool.metadata.name, self.pool.metadata.annotations, self.pool.gpu_limit
        owner, written = notes.get(OWNER), notes.get(WRITTEN)
        if owner is None:
            there = gpu_count * len(self.counted)
            if limit == there:
                return None
            return "LimitsNotOurs", (
                f"NodePool {name} may have {'any number of' if limit is None else limit} GPUs and has {there}: to hand"
                f' its limits to us, set spec.limits["{GPU_RESOURCE}"] to "{there}"'
            )
        if owner != installation:
            return "NodePoolNotOwned", f"NodePool {name} is written to by installation {owner}, not by ours"
        if str(limit) != written:
            return "LimitsChanged", (
                f'spec.limits["{GPU_RESOURCE}"] of NodePool {name} is {limit}, and we wrote {written}: somebody else'
                f" writes there, so we do not; set it to {written}, or take annotation {OWNER} away to hand it over"
            )
        return None


def look_at(
    pool: NodePool, claims: Sequence[NodeClaim], installation: str, now: float, ending: frozenset[str], asked: str
) -> Look:
    """Return the pool with the newcomers among its claims given to the orders that stand; where nobody ordered them,
    they are Karpenter's own successors of what it ended, and ours all the same: each is an order of its own name.

    Claims of before the pool was handed to us belong to nobody.
    """
    there = sorted(claims, key=lambda claim: (claim.created_at, claim.metadata.name))
    own = {
        one.metadata.name: (ActionId(one.metadata.labels[labels.ACTION_ID]), "")
        for one in there
        if one.metadata.labels.get(labels.INSTALLATION) == installation and labels.ACTION_ID in one.metadata.labels
    }
    notes = pool.metadata.annotations
    stored = decode_ledger([notes[ORDERS]] if ORDERS in notes else [])
    for action_id, note in stored.pending:
        is_made = any(action_id == one for one, _ in own.values())
        if is_made or (action_id != asked and now - second_of(note) > GIVEN_UP_SECONDS):
            stored = stored.without_order(action_id)
    names = [one.metadata.name for one in there]
    ledger = msgspec.structs.replace(stored, assigned=own).with_members(names)
    newly_assigned = {name: order for name, order in ledger.assigned.items() if name not in own}
    if notes.get(OWNER) == installation:
        new = [one for one in there if one.metadata.name in ledger.foreign_members - stored.foreign_members]
        # One that is ending already, and that nobody has named, came and went between two looks.
        alone = {
            one.metadata.name: (ActionId(one.metadata.uid.replace("-", "")), f"@{int(now)}@@@")
            for one in new
            if one.metadata.deletion_timestamp is None
        }
        newly_assigned |= alone
        ledger = msgspec.structs.replace(
            ledger, assigned={**ledger.assigned, **alone}, foreign_members=ledger.foreign_members - alone.keys()
        )
    return Look(
        pool=pool,
        claims={one.metadata.name: one for one in there},
        ledger=ledger,
        newly_assigned=newly_assigned,
        ending=ending & frozenset(names),
    )
