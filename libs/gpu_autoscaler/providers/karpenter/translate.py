"""Orders as NodeClaims, NodeClaims as instances, and what Karpenter says of a launch as refusals.

Sources: sigs.k8s.io/karpenter v1.12.1, `pkg/apis/v1/nodeclaim.go` and `pkg/controllers/nodeclaim/lifecycle`;
karpenter-provider-aws, `pkg/errors/errors.go` (read 2026-11-22).
"""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from gpu_autoscaler.events.node import InstanceState
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.resources import GPU_RESOURCE
from gpu_autoscaler.model.scheduling import Taint, is_startup
from gpu_autoscaler.providers.karpenter.options import NodeClass
from gpu_autoscaler.providers.karpenter.wire import (
    API_VERSION,
    CAPACITY_TYPE,
    GROUP,
    INSTANCE_TERMINATING,
    KARPENTER_FINALIZER,
    LAUNCHED,
    REGISTERED,
    NodeClaim,
)
from gpu_autoscaler.providers.protocol import Instance, LaunchRefused, Order, RefusalKind, RefusalScope
from gpu_autoscaler.providers.tokens import idempotency_token

# On claims: what was ordered and agreed. An offer's key has slashes, so it is no label.
OFFER = f"{labels.PREFIX}/offer"
PRICE = f"{labels.PREFIX}/price-micro-usd-per-hour"
# Holds the claim for an hour after its instance has ended, or until its refusal is read: a used token never buys again.
HELD = f"{labels.PREFIX}/node-claim"
# Karpenter keeps these to itself, or sets them by what it makes.
_NOT_OURS_TO_SET = (f"{GROUP}/", labels.HOSTNAME)

# What clouds say when they do not make an instance, in whichever sentence of Karpenter's it stands.
_WORDS: Mapping[str, tuple[RefusalKind, RefusalScope]] = {
    "InsufficientInstanceCapacity": ("capacity", "offer"),
    "InsufficientHostCapacity": ("capacity", "offer"),
    "ReservationCapacityExceeded": ("capacity", "offer"),
    "UnfulfillableCapacity": ("capacity", "offer"),
    "Unsupported": ("capacity", "offer"),
    "InsufficientFreeAddressesInSubnet": ("capacity", "zone"),
    "VcpuLimitExceeded": ("quota", "region"),
    "MaxSpotInstanceCountExceeded": ("quota", "region"),
    "MaxFleetCountExceeded": ("quota", "region"),
    "UnauthorizedOperation": ("permission", "region"),
    "AccessDenied": ("permission", "region"),
    "AuthFailure": ("permission", "region"),
}
KNOWN_WORDS = tuple(_WORDS)
_WORD = re.compile(rf"\b({'|'.join(_WORDS)})")
# On claims, and Karpenter's word: when it stops waiting for pods and volumes of a node that it ends.
ENDS_AT = f"{GROUP}/nodeclaim-termination-timestamp"
INSUFFICIENT, NOT_READY = "InsufficientCapacityError", "NodeClassNotReady"  # Karpenter's own words
_RETRIED_BY_KARPENTER = re.compile(
    r"RequestLimitExceeded|Throttl|timeout|deadline exceeded|connection re", re.IGNORECASE
)


def name_of(order: Order) -> str:
    """The claim's name: the same order, the same claim, so that a second one cannot be made."""
    return f"gpu-autoscaler-{idempotency_token(order.installation, order.action_id)}"


def claim_of(order: Order, node_class: NodeClass, gpu_count: int | None = None) -> dict[str, Any]:
    """Return the order as a NodeClaim that leaves Karpenter no choice. `gpu_count`: of the type as its cloud has it,
    where the offer says what a NodeOverlay makes of it; Karpenter applies none to a claim of no NodePool.

    It carries no `karpenter.sh/do-not-disrupt`: what belongs to no NodePool is not consolidated, and the mark would
    keep ourselves from the node, as a user's would.
    """
    offer = order.offer
    marks = {key: value for key, value in order.labels if not key.startswith(_NOT_OURS_TO_SET)}
    marks |= {
        labels.INSTALLATION: order.installation,
        labels.ACTION_ID: order.action_id,
        labels.POOL: order.pool,
    }
    if offer.gpu_model is not None:
        marks.setdefault(labels.GPU_MODEL, offer.gpu_model)
    notes = {OFFER: offer.key}
    if offer.price_micro_usd_per_hour is not None:
        notes[PRICE] = str(offer.price_micro_usd_per_hour)
    wanted = (
        (labels.INSTANCE_TYPE, offer.instance_type),
        (labels.ZONE, offer.zone),
        (CAPACITY_TYPE, offer.capacity_type.value),
    )
    # Not what pods get of it: Karpenter would compare that with its own estimate. GPUs, so that it waits for them;
    # but not where they come as slices, under other names.
    is_cut = any(key in (labels.MIG_CONFIG, labels.DEVICE_PLUGIN_CONFIG) for key, _ in order.labels)
    gpu_count = offer.resources.gpu_count if gpu_count is None else gpu_count
    asked = {GPU_RESOURCE: str(gpu_count)} if gpu_count and not is_cut else {}
    return {
        "apiVersion": API_VERSION,
        "kind": "NodeClaim",
        "metadata": {"name": name_of(order), "labels": marks, "annotations": notes, "finalizers": [HELD]},
        "spec": {
            "nodeClassRef": node_class._asdict(),
            "requirements": [{"key": key, "operator": "In", "values": [value]} for key, value in wanted],
            "resources": {"requests": asked},
            "taints": [_taint(taint) for taint in order.taints if not is_startup(taint)],
            "startupTaints": [_taint(taint) for taint in order.taints if is_startup(taint)],
            "expireAfter": "Never",  # how old a node may be is the policy's to say
        },
    }


def _taint(taint: Taint) -> dict[str, str]:
    return {"key": taint.key, "effect": taint.effect} | ({"value": taint.value} if taint.value else {})


def instance_of(claim: NodeClaim) -> Instance:
    """Return what a claim that has its instance tells of it."""
    instance_type, zone, capacity_type = offer_of(claim)
    state = state_of(claim)
    price = claim.metadata.annotations.get(PRICE, "")
    action_id = claim.metadata.labels.get(labels.ACTION_ID)
    return Instance(
        provider_id=ProviderId(claim.status.provider_id),
        action_id=None if action_id is None else ActionId(action_id),
        state=state,
        instance_type=instance_type,
        zone=zone,
        capacity_type=CapacityType(capacity_type),
        price_micro_usd_per_hour=int(price) if price.isdigit() else None,
        launched_at=_since(claim, LAUNCHED) or claim.created_at,
        terminated_at=ended_at(claim) if state == "terminated" else None,
    )


def offer_of(claim: NodeClaim) -> tuple[str, str, str]:
    """Return type, zone and capacity type that were ordered, as they stand in the claim's labels or its notes."""
    instance_type, zone, capacity_type = claim.metadata.annotations.get(OFFER, "//").split("/")
    told = claim.metadata.labels
    return (
        told.get(labels.INSTANCE_TYPE, instance_type),
        told.get(labels.ZONE, zone),
        told.get(CAPACITY_TYPE, capacity_type or CapacityType.ON_DEMAND.value),
    )


def state_of(claim: NodeClaim) -> InstanceState:
    """Return the state of its instance: Karpenter takes its finalizer away when that is gone, and not before."""
    if claim.metadata.deletion_timestamp is not None:
        return "terminating" if KARPENTER_FINALIZER in claim.metadata.finalizers else "terminated"
    return "running" if claim.has(REGISTERED) else "pending"


def ended_at(claim: NodeClaim) -> datetime:
    """Return when the instance was told to end: the last instant that its cloud can ask money for is not later."""
    return max(
        claim.metadata.deletion_timestamp or claim.created_at,
        _since(claim, INSTANCE_TERMINATING) or claim.created_at,
    )


def is_ended_by_us(claim: NodeClaim) -> bool:
    """True for a claim that we deleted, and did not find deleted."""
    return ENDS_AT in claim.metadata.annotations


def _since(claim: NodeClaim, name: str) -> datetime | None:
    found = claim.condition(name)
    return found.last_transition_time if found is not None and found.status == "True" else None


def failure_of(claim: NodeClaim) -> tuple[str, str] | None:
    """Return reason and message of a launch that failed and that another try of Karpenter's does not mend by itself."""
    launched = claim.condition(LAUNCHED)
    if launched is None or launched.status == "True" or launched.reason in ("", LAUNCHED, "AwaitingReconciliation"):
        return None
    if _RETRIED_BY_KARPENTER.search(launched.message):
        return None
    return launched.reason, launched.message


def refused(claim_name: str, reason: str, message: str) -> LaunchRefused:
    """Return the refusal that Karpenter's words amount to; what it says of no word that is known, somebody has to see
    to."""
    word = _WORD.search(f"{reason} {message}")
    kind: RefusalKind
    scope: RefusalScope
    if word is not None:
        kind, scope = _WORDS[word[1]]
    else:
        kind, scope = ("capacity" if reason == INSUFFICIENT else "configuration"), "offer"
    code = word[1] if word is not None else reason
    return LaunchRefused(f"NodeClaim {claim_name}: {reason}: {code}: {message}", code=code, kind=kind, scope=scope)


def unwanted(exc: PermanentError) -> LaunchRefused:
    """Return the API server's refusal of a claim: the right is missing, or its definition does not take a field."""
    is_right = re.search(r": 403\b", str(exc)) is not None  # as `kube/api_errors.py` words it
    kind: RefusalKind = "permission" if is_right else "configuration"
    code = "Forbidden" if is_right else "Invalid"
    return LaunchRefused(f"{code}: {exc}", code=code, kind=kind, scope="region")
