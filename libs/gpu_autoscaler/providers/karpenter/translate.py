"""Orders as NodeClaims, NodeClaims as instances, and Karpenter's launch errors as refusals.

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

# On claims: offer and agreed price. An offer's key has slashes, so it cannot be a label.
OFFER = f"{labels.PREFIX}/offer"
PRICE = f"{labels.PREFIX}/price-micro-usd-per-hour"
# Holds the claim for an hour after its instance ended, or until its refusal is read: a used token never launches again.
FINALIZER = f"{labels.PREFIX}/node-claim"
# Reserved for Karpenter, or set by it.
_KARPENTER_LABELS = (f"{GROUP}/", labels.HOSTNAME)

# Error codes of clouds, in whatever sentence of Karpenter's they appear.
_KNOWN_CODES: Mapping[str, tuple[RefusalKind, RefusalScope]] = {
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
KNOWN_CODES = tuple(_KNOWN_CODES)
_CODE = re.compile(rf"\b({'|'.join(_KNOWN_CODES)})")
# On claims, defined by Karpenter: when it stops waiting for pods and volumes of a node being terminated.
ENDS_AT = f"{GROUP}/nodeclaim-termination-timestamp"
INSUFFICIENT, NOT_READY = "InsufficientCapacityError", "NodeClassNotReady"  # Karpenter's own reasons
_RETRIED_BY_KARPENTER = re.compile(
    r"RequestLimitExceeded|Throttl|timeout|deadline exceeded|connection re", re.IGNORECASE
)


def name_of(order: Order) -> str:
    """Return the claim's name: one per order, so that a second claim cannot be created."""
    return f"gpu-autoscaler-{idempotency_token(order.installation, order.action_id)}"


def claim_of(order: Order, node_class: NodeClass, gpu_count: int | None = None) -> dict[str, Any]:
    """Return the order as a NodeClaim that leaves Karpenter no choice.

    `gpu_count`: of the instance type without NodeOverlays, which Karpenter does not apply to claims without NodePool.
    The claim has no `karpenter.sh/do-not-disrupt`: without NodePool it is not consolidated anyway, and the annotation
    would protect the node from us as well.
    """
    offer = order.offer
    claim_labels = {key: value for key, value in order.labels if not key.startswith(_KARPENTER_LABELS)}
    claim_labels |= {
        labels.INSTALLATION: order.installation,
        labels.ACTION_ID: order.action_id,
        labels.POOL: order.pool,
    }
    if offer.gpu_model is not None:
        claim_labels.setdefault(labels.GPU_MODEL, offer.gpu_model)
    annotations = {OFFER: offer.key}
    if offer.price_micro_usd_per_hour is not None:
        annotations[PRICE] = str(offer.price_micro_usd_per_hour)
    requirements = (
        (labels.INSTANCE_TYPE, offer.instance_type),
        (labels.ZONE, offer.zone),
        (CAPACITY_TYPE, offer.capacity_type.value),
    )
    # Only GPUs, so that Karpenter waits for them, unless they are shared under other resource names. CPU and memory
    # would be compared with Karpenter's own estimate.
    is_cut = any(key in (labels.MIG_CONFIG, labels.DEVICE_PLUGIN_CONFIG) for key, _ in order.labels)
    gpu_count = offer.resources.gpu_count if gpu_count is None else gpu_count
    requests = {GPU_RESOURCE: str(gpu_count)} if gpu_count and not is_cut else {}
    return {
        "apiVersion": API_VERSION,
        "kind": "NodeClaim",
        "metadata": {
            "name": name_of(order),
            "labels": claim_labels,
            "annotations": annotations,
            "finalizers": [FINALIZER],
        },
        "spec": {
            "nodeClassRef": node_class._asdict(),
            "requirements": [{"key": key, "operator": "In", "values": [value]} for key, value in requirements],
            "resources": {"requests": requests},
            "taints": [_taint(taint) for taint in order.taints if not is_startup(taint)],
            "startupTaints": [_taint(taint) for taint in order.taints if is_startup(taint)],
            "expireAfter": "Never",  # the policy decides about node age
        },
    }


def _taint(taint: Taint) -> dict[str, str]:
    return {"key": taint.key, "effect": taint.effect} | ({"value": taint.value} if taint.value else {})


def instance_of(claim: NodeClaim) -> Instance:
    """Return the instance of a launched claim."""
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
    """Return instance type, zone and capacity type, from the claim's labels or its annotation."""
    instance_type, zone, capacity_type = claim.metadata.annotations.get(OFFER, "//").split("/")
    claim_labels = claim.metadata.labels
    return (
        claim_labels.get(labels.INSTANCE_TYPE, instance_type),
        claim_labels.get(labels.ZONE, zone),
        claim_labels.get(CAPACITY_TYPE, capacity_type or CapacityType.ON_DEMAND.value),
    )


def state_of(claim: NodeClaim) -> InstanceState:
    """Return the state of the instance: Karpenter removes its finalizer only when the instance is gone."""
    if claim.metadata.deletion_timestamp is not None:
        return "terminating" if KARPENTER_FINALIZER in claim.metadata.finalizers else "terminated"
    return "running" if claim.has(REGISTERED) else "pending"


def ended_at(claim: NodeClaim) -> datetime:
    """Return when the instance's termination began; its cloud bills at most until then."""
    return max(
        claim.metadata.deletion_timestamp or claim.created_at, _since(claim, INSTANCE_TERMINATING) or claim.created_at
    )


def is_ended_by_us(claim: NodeClaim) -> bool:
    """Return whether we deleted the claim."""
    return ENDS_AT in claim.metadata.annotations


def _since(claim: NodeClaim, name: str) -> datetime | None:
    condition = claim.condition(name)
    return condition.last_transition_time if condition is not None and condition.status == "True" else None


def failure_of(claim: NodeClaim) -> tuple[str, str] | None:
    """Return reason and message of a failed launch that Karpenter does not retry by itself."""
    launched = claim.condition(LAUNCHED)
    if launched is None or launched.status == "True" or launched.reason in ("", LAUNCHED, "AwaitingReconciliation"):
        return None
    if _RETRIED_BY_KARPENTER.search(launched.message):
        return None
    return launched.reason, launched.message


def refused(claim_name: str, reason: str, message: str) -> LaunchRefused:
    """Return the refusal for Karpenter's error; an unknown one is a configuration error."""
    code_match = _CODE.search(f"{reason} {message}")
    kind: RefusalKind
    scope: RefusalScope
    if code_match is not None:
        kind, scope = _KNOWN_CODES[code_match[1]]
    else:
        kind, scope = ("capacity" if reason == INSUFFICIENT else "configuration"), "offer"
    code = code_match[1] if code_match is not None else reason
    return LaunchRefused(f"NodeClaim {claim_name}: {reason}: {code}: {message}", code=code, kind=kind, scope=scope)


def rejected(exc: PermanentError) -> LaunchRefused:
    """Return the API server's refusal of a claim: missing permission, or a field that its definition rejects."""
    is_forbidden = re.search(r": 403\b", str(exc)) is not None  # wording of `kube/api_errors.py`
    kind: RefusalKind = "permission" if is_forbidden else "configuration"
    code = "Forbidden" if is_forbidden else "Invalid"
    return LaunchRefused(f"{code}: {exc}", code=code, kind=kind, scope="region")
