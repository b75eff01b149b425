"""Policies kept as documents, merged under the policy file: what is in force, and which document cannot be.

The file's word stands for the whole cluster; a document adds pools, and says thresholds that the file then does not.
Called by whoever decides (`effective_policy`) and by the policy watcher (`resolve_documents`). Every document that was accepted
merges into a policy that can be followed, whatever the file comes to say: where they contradict each other the file's
limits are the narrower ones, and a pool of both is the document's.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from gpu_autoscaler.core.policies.spot import MixPolicy
from gpu_autoscaler.core.policy import DEFAULT_POLICY, NodePool, ScalingPolicy
from gpu_autoscaler.core.policy_check import mistakes
from gpu_autoscaler.core.remembered import remembered
from gpu_autoscaler.events.policy import PolicyDocumentsAccepted
from gpu_autoscaler.model.gpu import GPU_MODELS
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.policy_documents import DocumentPool, PolicyDocument

T = TypeVar("T")

_NO_SPOT = (CapacityType.ON_DEMAND, CapacityType.RESERVED)
# What there is one of in a cluster: two documents that say it have to say the same. Field -> its name for people.
_OF_THE_CLUSTER: Mapping[str, str] = {
    "high_ratio": "scaleUpThreshold",
    "low_ratio": "scaleDownThreshold",
    "scale_up_cooldown_seconds": "scaleUpCooldownSeconds",
    "scale_down_cooldown_seconds": "scaleDownCooldownSeconds",
    "pending_pod_timeout_seconds": "pendingPodTimeoutSeconds",
    "is_multi_tier": "enableMultiTierScaling",
    "is_forecast_on": "enablePredictiveScaling",
}


# ---- what is in force


@remembered(8)
def effective_policy(policy: ScalingPolicy, accepted: PolicyDocumentsAccepted | None) -> ScalingPolicy:
    """Return the policy file with the documents merged into it; the very same one where there is none."""
    documents = () if accepted is None else accepted.documents
    return merge_documents(policy, documents) if documents else policy


def merge_documents(policy: ScalingPolicy, documents: Sequence[PolicyDocument]) -> ScalingPolicy:
    """Return the file's policy with the documents' pools and thresholds."""
    ordered = sorted(documents, key=lambda each: each.age_key)
    kept = _file_pools(policy, ordered)
    bounds = [each.nodes_count_max for each in ordered]
    together = sum(bound for bound in bounds if bound is not None)
    most = policy.nodes_count_max if kept or None in bounds else min(policy.nodes_count_max, together)
    pools = [_pool(pool, document, most) for document in ordered for pool in document.pools]
    left = most - sum(each.nodes_count_min for each in kept)
    for index, pool in enumerate(pools):  # the file may have come to allow less than they want together
        least_of_pool = max(0, min(pool.nodes_count_min, left))
        left -= least_of_pool
        pools[index] = msgspec.structs.replace(pool, nodes_count_min=least_of_pool)
    enabled = [each for each in ordered if each.is_enabled]
    least = max(policy.nodes_count_min, sum(each.nodes_count_min for each in enabled if len(each.pools) > 1))
    cooldown = next((s for each in enabled if (s := each.scale_up_cooldown_seconds) is not None), None)
    return msgspec.structs.replace(
        policy,
        pools=(*kept, *pools),
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
        spot=msgspec.structs.replace(policy.spot, mix=_mix(policy.spot.mix, enabled, most)),
    )


def _first(documents: Iterable[PolicyDocument], field: str, default: T) -> T:
    """The oldest document's word, if one says it."""
    said = (getattr(each, field) for each in documents)
    return next((value for value in said if value is not None), default)


def _file_pools(policy: ScalingPolicy, documents: Sequence[PolicyDocument]) -> tuple[NodePool, ...]:
    """The file's own pools. The one that stands for a file without any gives way, as do those of a document's name."""
    if policy.pools == DEFAULT_POLICY.pools:
        return ()
    taken = {pool.name for document in documents for pool in document.pools}
    return tuple(pool for pool in policy.pools if pool.name not in taken)


def _pool(pool: DocumentPool, document: PolicyDocument, most: int) -> NodePool:
    bounds = (pool.nodes_count_max, document.nodes_count_max, most)
    bound = min(each for each in bounds if each is not None)
    return NodePool(
        name=pool.name,
        is_paused=not document.is_enabled,
        nodes_count_min=min(bound, _least(pool, document)),
        nodes_count_max=bound,
        priority=pool.priority,
        instance_types=pool.instance_types,
        gpu_models=pool.gpu_models,
        zones=pool.zones,
        capacity_types=_capacity_types(pool, document),
        labels=pool.labels,
    )


def _least(pool: DocumentPool, document: PolicyDocument) -> int:
    """What a policy of one pool wants at least, its pool does."""
    return max(pool.nodes_count_min, document.nodes_count_min) if len(document.pools) == 1 else pool.nodes_count_min


def _capacity_types(pool: DocumentPool, document: PolicyDocument) -> tuple[CapacityType, ...]:
    """Exactly what is said where a share is all or nothing."""
    if pool.capacity_type is not None:
        return (pool.capacity_type,)
    if not document.is_spot_allowed or pool.spot_ratio == 0:
        return _NO_SPOT
    return (CapacityType.SPOT,) if pool.spot_ratio == 1 else ()


def _mix(mix: MixPolicy, documents: Sequence[PolicyDocument], most: int) -> MixPolicy:
    """The cluster has one mix: the shares of mixed pools, weighed by how large these may get."""
    weighed: list[tuple[float, float]] = []
    for document in documents:
        for pool in document.pools:
            said = next((each for each in (pool.spot_ratio, document.spot_ratio) if each is not None), None)
            if pool.capacity_type is None and document.is_spot_allowed:
                size = pool.nodes_count_max or document.nodes_count_max or most
                weighed.append((mix.spot_ratio if said is None else said, float(size)))
    is_tiered = _first(documents, "is_multi_tier", default=True)
    reserved = mix.reserved_ratio if is_tiered else 0.0
    total = sum(size for _, size in weighed)
    spot = sum(ratio * size for ratio, size in weighed) / total if total else mix.spot_ratio
    if spot == mix.spot_ratio and reserved == mix.reserved_ratio:
        return mix
    reserved = min(reserved, 1.0 - spot)
    return MixPolicy(spot_ratio=spot, reserved_ratio=reserved, on_demand_ratio=max(0.0, 1.0 - spot - reserved))


# ---- which documents can be in force


class DocumentResolution(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be in force, by age, and why the newest word of some documents is not."""

    accepted: tuple[PolicyDocument, ...]
    refused: Mapping[str, tuple[str, ...]]  # uid -> sentences


def resolve_documents(
    documents: Sequence[PolicyDocument], before: Iterable[PolicyDocument], policy: ScalingPolicy, provider: str
) -> DocumentResolution:
    """Return which of the documents that are there are in force, each at its newest generation that can be.

    `before` is what was in force. That stays so until a newer generation can take its place; of two new ones that
    contradict each other the older document comes first.
    """
    there = {each.uid: each for each in documents}
    in_force = {each.uid: each for each in before if each.uid in there}
    waiting = sorted((each for each in documents if in_force.get(each.uid) != each), key=lambda each: each.age_key)
    refused: dict[str, tuple[str, ...]] = {}
    while waiting:
        left = []
        for each in waiting:
            others = [one for uid, one in in_force.items() if uid != each.uid]
            refused[each.uid] = tuple(document_violations(each, others, policy, provider))
            if refused[each.uid]:
                left.append(each)
            else:
                in_force[each.uid] = each
        if len(left) == len(waiting):
            break
        waiting = left  # one that took its place may have made room for another
    return DocumentResolution(
        accepted=tuple(sorted(in_force.values(), key=lambda each: each.age_key)),
        refused={uid: sentences for uid, sentences in refused.items() if sentences},
    )


def document_violations(
    document: PolicyDocument, others: Sequence[PolicyDocument], policy: ScalingPolicy, provider: str
) -> Iterator[str]:
    """Yield why the document cannot be in force beside the others, with what is to be changed; nothing: it can."""
    if document.provider not in (None, provider):
        yield f"provider: it is meant for {document.provider}, and this system buys from {provider}"
    yield from _taken(document, others, policy)
    for pool in document.pools:
        for model in pool.gpu_models:
            if model not in GPU_MODELS:
                yield f"nodePools {pool.name}: there is no GPU {model!r}; there are {', '.join(GPU_MODELS)}"
    for field, name in _OF_THE_CLUSTER.items():
        said = getattr(document, field)
        for other in others:
            theirs = getattr(other, field)
            if None not in (said, theirs) and said != theirs:
                yield f"{name}: {told(said)} here, {told(theirs)} in {other.name}; the cluster has one: say it once"
    for one in (document, *others):
        if (others or _file_pools(policy, ())) and _overcommits(one):
            beside = (
                ", ".join(sorted(each.name for each in (document, *others) if each is not one)) or "the file's pools"
            )
            yield (
                f"maxNodes of {one.name}: its pools may have more than {one.nodes_count_max} nodes together, which"
                f" cannot be held beside {beside}; give each pool a maxSize, so that they add up to no more"
            )
    wanted = sum(_least(pool, each) for each in (document, *others) for pool in each.pools)
    if wanted > policy.nodes_count_max:
        yield f"minSize: all pools want {wanted} nodes at least, and the cluster may have {policy.nodes_count_max}"
    alone = merge_documents(msgspec.structs.replace(DEFAULT_POLICY, nodes_count_max=policy.nodes_count_max), [document])
    yield from mistakes(alone)


def told(value: object) -> str:
    """A value as people write it."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _taken(document: PolicyDocument, others: Sequence[PolicyDocument], policy: ScalingPolicy) -> Iterator[str]:
    owners = {pool.name: f"policy {other.name}" for other in others for pool in other.pools}
    owners = {each.name: "the policy file" for each in _file_pools(policy, ())} | owners
    for pool in document.pools:
        if (owner := owners.get(pool.name)) is not None:
            yield (
                f"nodePools {pool.name}: the pool belongs to {owner}, and policy {document.name} names it as well;"
                " give it another name here, or take it away there"
            )


def _overcommits(document: PolicyDocument) -> bool:
    """True where only the cluster's own limit could hold its pools to what it allows."""
    if document.nodes_count_max is None or len(document.pools) == 1:
        return False
    return sum(pool.nodes_count_max or document.nodes_count_max for pool in document.pools) > document.nodes_count_max
