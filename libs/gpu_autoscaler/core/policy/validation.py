"""Validation of a policy: every contradiction, each with the next step.

Limits are compared by name: `x_min` and `x_max` of one table.
"""

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from gpu_autoscaler.core.policy.cron import Scheduled
from gpu_autoscaler.core.policy.gpu_slices import sharing_violations
from gpu_autoscaler.core.policy.limit_settings import spend_violations
from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.policy.pools import pool_allows
from gpu_autoscaler.core.policy.queue_settings import queue_violations
from gpu_autoscaler.core.policy.quota_settings import quota_contradictions
from gpu_autoscaler.core.policy.tenancy_settings import tenancy_violations
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.gpu import GIBIBYTE, GPU_MODELS
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.scheduling import STARTUP_PREFIXES, is_startup

# With zero, the policy would decide nothing or revert its own decisions.
_NEVER_ZERO = {
    "boot_seconds_max": "every node would be terminated as soon as it is ordered",
    "drain_seconds_max": "every drain would be canceled as soon as it starts",
    "watch_age_seconds_max": "every list would be too old to act on",
}
# Labels that the autoscaler writes on each node.
_RESERVED_LABELS = (
    labels.ACTION_ID,
    labels.POOL,
    labels.CAPACITY_TYPE,
    labels.GPU_MODEL,
    labels.PROJECT_ID,
    labels.MIG_CONFIG,
    labels.DEVICE_PLUGIN_CONFIG,
    labels.GPU_SHARE_MEMORY,
)

# Labels that stand for a filter of the pool. Source: docs/decisions.md#shares.
_FILTER_LABELS = {labels.CAPACITY_TYPE: "capacity_types", labels.GPU_MODEL: "gpu_models"}


def policy_violations(policy: ScalingPolicy, offers: tuple[Offer, ...] | None = None) -> tuple[str, ...]:
    """Return one sentence for each contradiction, in the order of the fields; empty: the policy is valid. Filters of
    pools are compared with `offers`; None: unknown."""
    violations = [*_range_violations(policy, ""), *_cluster_violations(policy)]
    for index, pool in enumerate(policy.pools):
        violations += _pool_violations(pool, f"pools[{index}]", policy)
        if offers is not None:
            violations += _unavailable_filters(pool, f"pools[{index}]", offers)
        if pool.sharing is not None:
            allowed = _offers_before_sharing(pool, offers)
            violations += sharing_violations(pool.sharing, f"pools[{index}].sharing", allowed)
    return (
        *violations,
        *_schedule_violations("removal.disruption_budgets", policy.removal.disruption_budgets),
        *policy.spot.violations(),
        *queue_violations(policy.queues),
        *_prewarm_violations(policy),
        *_spend_violations(policy),
        *quota_contradictions(policy.quotas),
        *tenancy_violations(policy.tenancy),
    )


def _schedule_violations(name: str, entries: tuple[Scheduled, ...]) -> Iterator[str]:
    for index, entry in enumerate(entries):
        yield from (f"{name}[{index}]: {violation}" for violation in entry.violations())


def _prewarm_violations(policy: ScalingPolicy) -> Iterator[str]:
    yield from _schedule_violations("headrooms", policy.headrooms)
    yield from _schedule_violations("scheduled_limits", policy.scheduled_limits)
    for index, headroom in enumerate(policy.headrooms):
        model = headroom.gpu_model
        if model is not None and model not in GPU_MODELS:
            yield f"headrooms[{index}].gpu_model: unknown GPU model {model!r}{_nearest(model, GPU_MODELS)}"
    for index, limit in enumerate(policy.scheduled_limits):
        if limit.nodes_count_min is None and limit.nodes_count_max is None:
            yield f"scheduled_limits[{index}]: set nodes_count_min or nodes_count_max: without them it has no effect"
        least, most = limit.nodes_count_min, policy.nodes_count_max
        if least is not None and least > most:
            yield (
                f"scheduled_limits[{index}].nodes_count_min: {least} is above nodes_count_max {most} of the cluster;"
                " lower it"
            )


def _spend_violations(policy: ScalingPolicy) -> Iterator[str]:
    budgets = [("limits.spend", policy.limits.spend)]
    budgets += [(f"pools[{index}].spend", pool.spend) for index, pool in enumerate(policy.pools)]
    for name, parts in (("zones", policy.limits.zones), ("projects", policy.limits.projects)):
        budgets += [(f"limits.{name}[{index}].spend", part.spend) for index, part in enumerate(parts)]
    for at, spend in budgets:
        yield from spend_violations(spend, at)


def _range_violations(table: msgspec.Struct, at: str) -> Iterator[str]:
    """Minimums above their maximum, and duplicate names, in this table and all tables below it."""
    fields = table.__struct_fields__
    for name in fields:
        value = getattr(table, name)
        stem, _, bound = name.rpartition("_")
        upper = f"{stem}_max"
        if bound in ("min", "default") and upper in fields:
            most = getattr(table, upper)
            if value is not None and most is not None and value > most:
                yield f"{at}{name}: {value:g} is above {at}{upper} {most:g}; lower it or raise the other"
        if isinstance(value, msgspec.Struct):
            yield from _range_violations(value, f"{at}{name}.")
        elif isinstance(value, tuple):
            entries = [entry for entry in value if isinstance(entry, msgspec.Struct)]
            for index, entry in enumerate(entries):
                yield from _range_violations(entry, f"{at}{name}[{index}].")
            counts = Counter(entry.name for entry in entries if hasattr(entry, "name"))
            for entry_name, count in counts.items():
                if count > 1:
                    yield f"{at}{name}: name {entry_name!r} is used {count} times; use unique names"


def _cluster_violations(policy: ScalingPolicy) -> Iterator[str]:
    for name, effect in _NEVER_ZERO.items():
        if getattr(policy, name) == 0:
            yield f"{name}: with 0 {effect}; set a realistic time, or omit the field for the default"
    total_min = sum(pool.nodes_count_min for pool in policy.pools)
    if total_min > policy.nodes_count_max:
        yield (
            f"pools: nodes_count_min of all pools adds up to {total_min}, above nodes_count_max of the cluster"
            f" ({policy.nodes_count_max}); lower one of them"
        )
    least = policy.nodes_count_min
    if not least:
        return
    if policy.gpu_count_max == 0:
        yield f"gpu_count_max: 0 contradicts nodes_count_min {least}; raise it, or set nodes_count_min to 0"
    if policy.price_micro_usd_per_hour_max == 0:
        yield (
            f"price_micro_usd_per_hour_max: 0 contradicts nodes_count_min {least}; raise it, or set nodes_count_min"
            " to 0"
        )
    bounds = [pool.nodes_count_max for pool in policy.pools]
    total_max = sum(bound for bound in bounds if bound is not None)
    if None not in bounds and total_max < least:
        yield (
            f"nodes_count_min: {least} is above the sum of nodes_count_max of all pools ({total_max}); raise one of"
            " them"
        )


def _pool_violations(pool: NodePool, at: str, policy: ScalingPolicy) -> Iterator[str]:
    for model in pool.gpu_models:
        if model not in GPU_MODELS:
            yield f"{at}.gpu_models: unknown GPU model {model!r}{_nearest(model, GPU_MODELS)}"
    for name in ("nodes_count_max", "gpu_count_max"):
        most, cluster_max = getattr(pool, name), getattr(policy, name)
        if most is not None and cluster_max is not None and most > cluster_max:
            yield f"{at}.{name}: {most} is above {name} {cluster_max} of the cluster; lower it or raise the other"
    if pool.nodes_count_max == 0:
        yield f"{at}.nodes_count_max: 0 allows no node in pool {pool.name!r}; raise it, or remove the pool"
    if pool.gpu_count_max == 0 and pool.gpu_models:
        yield f"{at}.gpu_count_max: 0 contradicts gpu_models of pool {pool.name!r}; raise it"
    yield from _share_violations(pool, at)
    yield from _label_violations(pool, at)
    taints = (*pool.taints, *pool.startup_taints)
    for (key, effect), count in Counter((taint.key, taint.effect) for taint in taints).items():
        if count > 1:
            yield f"{at}.taints: {key}:{effect} is set {count} times; Kubernetes accepts it once; keep one"
    for taint in pool.startup_taints:
        if not is_startup(taint):
            yield (
                f"{at}.startup_taints: {taint.key}:{taint.effect} is not recognized as temporary; use a key that starts"
                f" with {STARTUP_PREFIXES[0]} and effect NoSchedule or NoExecute"
            )


def _share_violations(pool: NodePool, at: str) -> Iterator[str]:
    ratio, types = pool.spot_ratio, pool.capacity_types
    if ratio and types and CapacityType.SPOT not in types:
        yield f"{at}.spot_ratio: {ratio:g}, but capacity_types has no spot; add spot, or remove spot_ratio"
    if ratio is not None and ratio < 1 and types == (CapacityType.SPOT,):
        yield f"{at}.spot_ratio: {ratio:g}, but capacity_types allows only spot; add another capacity type, or set 1"


def _label_violations(pool: NodePool, at: str) -> Iterator[str]:
    for key in _RESERVED_LABELS:
        if key in pool.labels and key not in _FILTER_LABELS:
            yield f"{at}.labels: {key} is written by the autoscaler; remove it"
    for key, name in _FILTER_LABELS.items():
        if key in pool.labels:  # what filters can express, `pools.py` has removed
            known = getattr(pool, name) or (CapacityType if key == labels.CAPACITY_TYPE else GPU_MODELS)
            yield (
                f"{at}.labels: {key}={pool.labels[key]} contradicts {name} ({', '.join(map(str, known))}); remove the"
                f" label, or change {name}"
            )
    for key, name, allowed in (
        (labels.ZONE, "zones", pool.zones),
        (labels.INSTANCE_TYPE, "instance_types", pool.instance_types),
    ):
        value = pool.labels.get(key)
        if value is not None and (allowed != (value,)):
            yield f"{at}.labels: {key}={value} contradicts {name}; set {name} and remove the label"


def _offers_before_sharing(pool: NodePool, offers: tuple[Offer, ...] | None) -> tuple[Offer, ...] | None:
    """Offers that pass the filters of the pool, whether or not their GPUs support its sharing."""
    whole = msgspec.structs.replace(pool, sharing=None)
    return None if offers is None else tuple(offer for offer in offers if pool_allows(whole, offer))


def _unavailable_filters(pool: NodePool, at: str, offers: tuple[Offer, ...]) -> Iterator[str]:
    """Filters that no available offer passes: each unavailable value, else the combination."""
    filters: tuple[tuple[str, tuple[str, ...], set[str]], ...] = (
        ("instance_types", pool.instance_types, {offer.instance_type for offer in offers}),
        ("gpu_models", pool.gpu_models, {offer.gpu_model for offer in offers if offer.gpu_model is not None}),
        ("zones", pool.zones, {offer.zone for offer in offers}),
        ("capacity_types", pool.capacity_types, {str(offer.capacity_type) for offer in offers}),
    )
    unavailable = [
        f"{at}.{name}: {value!r} is not offered{_nearest(value, available)}"
        for name, allowed, available in filters
        for value in map(str, allowed)
        if value not in available
    ]
    memory = [round((offer.gpu_memory_bytes or 0) / GIBIBYTE) for offer in offers]
    if pool.gpu_memory_gib_min and max(memory, default=0) < pool.gpu_memory_gib_min:
        unavailable.append(
            f"{at}.gpu_memory_gib_min: no GPU with {pool.gpu_memory_gib_min} GiB is offered; the largest has"
            f" {max(memory, default=0)} GiB"
        )
    yield from unavailable
    if not unavailable and not _offers_before_sharing(pool, offers):
        with_memory = ["gpu_memory_gib_min"] if pool.gpu_memory_gib_min else []
        names = " and ".join([*(name for name, allowed, _ in filters if allowed), *with_memory])
        cause = f"{names} exclude each other" if names else "there are no offers"
        yield f"{at}: {cause}: no offer matches pool {pool.name!r}; widen a filter, or remove the pool"


def _nearest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(names) or 'none'}"
