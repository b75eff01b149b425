"""AutoscalingPolicy documents merged with the policy file, and validation of the documents.

The policy file sets limits of the whole cluster. A document adds pools and overrides thresholds. Accepted documents
always merge into a valid policy: the stricter limit applies, and of two pools with one name that of the document.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.policy.disruption_settings import POOL_COOLDOWN_SECONDS_MAX, RemovalPolicy
from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY, NodePool, ScalingPolicy
from gpu_autoscaler.core.policy.pools import pool_with_filters_of_labels
from gpu_autoscaler.core.policy.provisioning_settings import MixPolicy
from gpu_autoscaler.core.policy.validation import policy_violations
from gpu_autoscaler.events.policy import PolicyDocumentsAccepted
from gpu_autoscaler.model.gpu import GPU_MODELS
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.policy_documents import DocumentPool, PolicyDocument

T = TypeVar("T")

_NO_SPOT = (CapacityType.ON_DEMAND, CapacityType.RESERVED)
# Settings of the whole cluster: documents that set one of them must agree. Field -> name in the custom resource.
_CLUSTER_FIELDS: Mapping[str, str] = {
    "high_ratio": "scaleUpThreshold",
    "low_ratio": "scaleDownThreshold",
    "scale_up_cooldown_seconds": "scaleUpCooldownSeconds",
    "scale_down_cooldown_seconds": "scaleDownCooldownSeconds",
    "pending_pod_timeout_seconds": "pendingPodTimeoutSeconds",
    "is_multi_tier": "enableMultiTierScaling",
    "is_forecast_on": "enablePredictiveScaling",
}

_POOL_FIELDS: Mapping[str, str] = {
    "nodes_count_min": "minSize",
    "nodes_count_max": "maxSize",
    "gpu_models": "gpuType",
    "instance_types": "instanceTypes",
    "capacity_types": "capacityType",
    "spot_ratio": "spotPercentage",
    "zones": "availabilityZones",
}


# ---- effective policy


@cached_by_identity(8)
def effective_policy(policy: ScalingPolicy, accepted: PolicyDocumentsAccepted | None) -> ScalingPolicy:
    """Return the policy file merged with the accepted documents; the same object if there are none."""
    documents = () if accepted is None else accepted.documents
    return merge_documents(policy, documents) if documents else policy


def merge_documents(policy: ScalingPolicy, documents: Sequence[PolicyDocument]) -> ScalingPolicy:
    """Return the policy with pools and thresholds of the documents."""
    ordered = sorted(documents, key=lambda document: document.age_key)
    file_pools = _file_pools(policy, ordered)
    bounds = [document.nodes_count_max for document in ordered]
    total_max = sum(bound for bound in bounds if bound is not None)
    most = policy.nodes_count_max if file_pools or None in bounds else min(policy.nodes_count_max, total_max)
    pools = [_pool(pool, document, most) for document in ordered for pool in document.pools]
    remaining = most - sum(pool.nodes_count_min for pool in file_pools)
    for index, pool in enumerate(pools):  # the file may allow fewer nodes than the minimums of all pools
        pool_min = max(0, min(pool.nodes_count_min, remaining))
        remaining -= pool_min
        pools[index] = msgspec.structs.replace(pool, nodes_count_min=pool_min)
    enabled = [document for document in ordered if document.is_enabled]
    least = max(policy.nodes_count_min, sum(entry.nodes_count_min for entry in enabled if len(entry.pools) > 1))
    cooldown = next((s for document in enabled if (s := document.scale_up_cooldown_seconds) is not None), None)
    return msgspec.structs.replace(
        policy,
        pools=(*file_pools, *pools),
        nodes_count_max=most,
        nodes_count_min=min(most, least),
        pending_pod_timeout_seconds=_first(enabled, "pending_pod_timeout_seconds", policy.pending_pod_timeout_seconds),
        scale_down_cooldown_seconds=_first(enabled, "scale_down_cooldown_seconds", policy.scale_down_cooldown_seconds),
        limits=policy.limits
        if cooldown is None
        else msgspec.structs.replace(policy.limits, scale_up_cooldown_seconds=cooldown),
        utilization=msgspec.structs.replace(
            policy.utilization,
            high_ratio=_first(enabled, "high_ratio", policy.utilization.high_ratio),
            low_ratio=_first(enabled, "low_ratio", policy.utilization.low_ratio),
            cooldown_seconds=policy.utilization.cooldown_seconds if cooldown is None else cooldown,
        ),
        forecast=msgspec.structs.replace(
            policy.forecast, is_on=_first(enabled, "is_forecast_on", policy.forecast.is_on)
        ),
        removal=_removal(policy.removal, enabled),
        spot=msgspec.structs.replace(policy.spot, mix=_mix(policy.spot.mix, enabled, most)),
    )


def _removal(removal: RemovalPolicy, documents: Sequence[PolicyDocument]) -> RemovalPolicy:
    seconds = _first(documents, "scale_down_cooldown_seconds", removal.pool_cooldown_seconds)
    if seconds is None:
        return removal
    return msgspec.structs.replace(removal, pool_cooldown_seconds=min(seconds, POOL_COOLDOWN_SECONDS_MAX))


def _first(documents: Iterable[PolicyDocument], field: str, default: T) -> T:
    """The value of the oldest document that sets the field."""
    values = (getattr(document, field) for document in documents)
    return next((value for value in values if value is not None), default)


def _file_pools(policy: ScalingPolicy, documents: Sequence[PolicyDocument]) -> tuple[NodePool, ...]:
    """Pools of the policy file, without the default pool and without pools that a document defines."""
    if policy.pools == DEFAULT_POLICY.pools:
        return ()
    taken = {pool.name for document in documents for pool in document.pools}
    return tuple(pool for pool in policy.pools if pool.name not in taken)


def _pool(pool: DocumentPool, document: PolicyDocument, most: int) -> NodePool:
    bounds = (pool.nodes_count_max, document.nodes_count_max, most)
    bound = min(limit for limit in bounds if limit is not None)
    merged = NodePool(
        name=pool.name,
        is_paused=not document.is_enabled,
        nodes_count_min=min(bound, _pool_min(pool, document)),
        nodes_count_max=bound,
        priority=pool.priority,
        instance_types=pool.instance_types,
        gpu_models=pool.gpu_models,
        gpu_memory_gib_min=pool.gpu_memory_gib_min,
        zones=pool.zones,
        capacity_types=_capacity_types(pool, document),
        spot_ratio=pool.spot_ratio if document.is_spot_allowed else None,
        labels=pool.labels,
        idle_seconds=document.idle_seconds if pool.idle_seconds is None else pool.idle_seconds,
    )
    return pool_with_filters_of_labels(merged)


def _pool_min(pool: DocumentPool, document: PolicyDocument) -> int:
    """The minimum of the pool; the minimum of a document with one pool is also that of the pool."""
    return max(pool.nodes_count_min, document.nodes_count_min) if len(document.pools) == 1 else pool.nodes_count_min


def _capacity_types(pool: DocumentPool, document: PolicyDocument) -> tuple[CapacityType, ...]:
    """Capacity types of the pool; a spot share of 0 or 1 allows one side only."""
    if pool.capacity_type is not None:
        return (pool.capacity_type,)
    if not document.is_spot_allowed or pool.spot_ratio == 0:
        return _NO_SPOT
    return (CapacityType.SPOT,) if pool.spot_ratio == 1 else ()


def _mix(mix: MixPolicy, documents: Sequence[PolicyDocument], most: int) -> MixPolicy:
    """The mix of all pools without a share of their own: that of their documents, weighted by maximum size."""
    weighted: list[tuple[float, float]] = []
    for document in documents:
        spot_ratio = mix.spot_ratio if document.spot_ratio is None else document.spot_ratio
        for pool in document.pools:
            if pool.capacity_type is None and pool.spot_ratio is None and document.is_spot_allowed:
                size = pool.nodes_count_max or document.nodes_count_max or most
                weighted.append((spot_ratio, float(size)))
    reserved = mix.reserved_ratio if _first(documents, "is_multi_tier", default=True) else 0.0
    total = sum(size for _, size in weighted)
    spot = sum(ratio * size for ratio, size in weighted) / total if total else mix.spot_ratio
    if spot == mix.spot_ratio and reserved == mix.reserved_ratio:
        return mix
    reserved = min(reserved, 1.0 - spot)
    return MixPolicy(spot_ratio=spot, reserved_ratio=reserved, on_demand_ratio=max(0.0, 1.0 - spot - reserved))


# ---- validation of documents


class DocumentResolution(msgspec.Struct, frozen=True, kw_only=True):
    """The accepted documents, oldest first, and why others were rejected."""

    accepted: tuple[PolicyDocument, ...]
    rejected: Mapping[str, tuple[str, ...]]  # uid -> violations


def resolve_documents(
    documents: Sequence[PolicyDocument], before: Iterable[PolicyDocument], policy: ScalingPolicy, provider: str
) -> DocumentResolution:
    """Return the documents that are active, each at its newest valid generation; `before` were active so far. Of two
    new documents that contradict each other the older one is accepted."""
    existing = {document.uid: document for document in documents}
    active = {document.uid: document for document in before if document.uid in existing}
    waiting = [document for document in documents if active.get(document.uid) != document]
    waiting.sort(key=lambda document: document.age_key)
    rejected: dict[str, tuple[str, ...]] = {}
    while waiting:
        remaining = []
        for document in waiting:
            others = [other for uid, other in active.items() if uid != document.uid]
            rejected[document.uid] = tuple(document_violations(document, others, policy, provider))
            if rejected[document.uid]:
                remaining.append(document)
            else:
                active[document.uid] = document
        if len(remaining) == len(waiting):
            break
        waiting = remaining  # an accepted generation may have resolved a conflict of another document
    return DocumentResolution(
        accepted=tuple(sorted(active.values(), key=lambda document: document.age_key)),
        rejected={uid: violations for uid, violations in rejected.items() if violations},
    )


def document_violations(
    document: PolicyDocument, others: Sequence[PolicyDocument], policy: ScalingPolicy, provider: str
) -> Iterator[str]:
    """Yield why the document cannot be active beside the others, with the next step; nothing: it can."""
    if document.provider not in (None, provider):
        yield f"provider: {document.provider} does not match provider {provider} of this installation; change it"
    yield from _duplicate_pools(document, others, policy)
    for pool in document.pools:
        for model in pool.gpu_models:
            if model not in GPU_MODELS:
                yield f"nodePools {pool.name}: unknown GPU model {model!r}; known: {', '.join(GPU_MODELS)}"
    for field, name in _CLUSTER_FIELDS.items():
        value = getattr(document, field)
        for other in others:
            other_value = getattr(other, field)
            if None not in (value, other_value) and value != other_value:
                yield (
                    f"{name}: {format_value(value)} here, {format_value(other_value)} in {other.name}; it is a setting"
                    " of the whole cluster; set it in one policy only"
                )
    for checked in (document, *others):
        if (others or _file_pools(policy, ())) and _overcommits(checked):
            beside = (
                ", ".join(sorted(other.name for other in (document, *others) if other is not checked))
                or "pools of the policy file"
            )
            yield (
                f"maxNodes of {checked.name}: its pools may exceed {checked.nodes_count_max} nodes in total, which is"
                f" not enforceable beside {beside}; set maxSize of each pool so that they add up to at most that"
            )
    total_min = sum(_pool_min(pool, owner) for owner in (document, *others) for pool in owner.pools)
    if total_min > policy.nodes_count_max:
        yield (
            f"minSize: all pools need at least {total_min} nodes, above nodes_count_max {policy.nodes_count_max} of the"
            " policy file; lower one of them"
        )
    alone = merge_documents(msgspec.structs.replace(DEFAULT_POLICY, nodes_count_max=policy.nodes_count_max), [document])
    yield from (_in_words_of_documents(violation, document) for violation in policy_violations(alone))


def _in_words_of_documents(violation: str, document: PolicyDocument) -> str:
    """Return the violation with pools and fields as the document names them."""
    found = re.match(r"pools\[(\d+)\]\.?", violation)
    if found is None:
        return violation
    words = f"nodePools {document.pools[int(found[1])].name}: {violation[found.end() :]}"
    return re.sub("|".join(_POOL_FIELDS), lambda name: _POOL_FIELDS[name[0]], words)


def format_value(value: object) -> str:
    """Format a value as written in YAML."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _duplicate_pools(
    document: PolicyDocument, others: Sequence[PolicyDocument], policy: ScalingPolicy
) -> Iterator[str]:
    owners = {pool.name: f"policy {other.name}" for other in others for pool in other.pools}
    owners = {pool.name: "the policy file" for pool in _file_pools(policy, ())} | owners
    for pool in document.pools:
        if (owner := owners.get(pool.name)) is not None:
            yield (
                f"nodePools {pool.name}: pool already defined in {owner}; rename it in policy {document.name}, or"
                " remove it there"
            )


def _overcommits(document: PolicyDocument) -> bool:
    """True if only the limit of the whole cluster could enforce the limit of the document."""
    if document.nodes_count_max is None or len(document.pools) == 1:
        return False
    return sum(pool.nodes_count_max or document.nodes_count_max for pool in document.pools) > document.nodes_count_max
