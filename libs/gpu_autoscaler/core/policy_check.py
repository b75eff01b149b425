"""Whether a policy means something: every pair of values that cannot both be meant, each with the next step.

Called where a policy is read (`runtime/policies.py`), so at start, in shadow, in replay and by `policy check`. Pairs
are found by their names: `x_min` and `x_max` of one table, whichever table it is.
"""

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from gpu_autoscaler.core.policies.ahead import Scheduled
from gpu_autoscaler.core.policies.money import money_mistakes
from gpu_autoscaler.core.policies.removal import budget_mistakes
from gpu_autoscaler.core.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.pools import pool_allows
from gpu_autoscaler.core.slicing import sharing_mistakes
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.gpu import GPU_MODELS
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.scheduling import STARTUP_PREFIXES, is_startup

# A policy that sets one of these to zero decides nothing, or undoes at once what it decides.
_NEVER_ZERO = {
    "boot_seconds_max": "every node would be given back as soon as it is ordered",
    "drain_seconds_max": "every drain would be given up as it begins",
    "watch_age_seconds_max": "every picture of the world would be too old to act on",
}
# What the autoscaler writes on each node itself; a pool's own word for it would be lost.
_OUR_LABELS = (
    labels.ACTION_ID,
    labels.POOL,
    labels.CAPACITY_TYPE,
    labels.GPU_MODEL,
    labels.PROJECT_ID,
    labels.MIG_CONFIG,
    labels.DEVICE_PLUGIN_CONFIG,
    labels.GPU_SHARE_MEMORY,
)


def mistakes(policy: ScalingPolicy, offers: tuple[Offer, ...] | None = None) -> tuple[str, ...]:
    """Return one sentence for each contradiction, in the order of the fields; empty: the policy can be followed.

    `offers` is all that is for sale; None: not known, and then nothing is said about what a pool may find there.
    """
    found = [*_orders(policy, ""), *_cluster(policy)]
    for index, pool in enumerate(policy.pools):
        found += _pool(pool, f"pools[{index}]", policy)
        if offers is not None:
            found += _on_sale(pool, f"pools[{index}]", offers)
        if pool.sharing is not None:
            found += sharing_mistakes(pool.sharing, f"pools[{index}].sharing", _sold_whole(pool, offers))
    return (
        *found,
        *budget_mistakes(policy.removal),
        *policy.spot.mistakes(),
        *_ahead(policy),
        *_money(policy),
    )


def _ahead(policy: ScalingPolicy) -> Iterator[str]:
    """What cannot be meant of capacity ahead of demand."""
    timed: list[tuple[str, Scheduled]] = [(f"headrooms[{index}]", one) for index, one in enumerate(policy.headrooms)]
    timed += [(f"scheduled_limits[{index}]", one) for index, one in enumerate(policy.scheduled_limits)]
    for at, one in timed:
        yield from (f"{at}: {mistake}" for mistake in one.mistakes())
    for index, room in enumerate(policy.headrooms):
        if room.gpu_model is not None and room.gpu_model not in GPU_MODELS:
            yield f"headrooms[{index}].gpu_model: there is no {room.gpu_model!r}; there are {', '.join(GPU_MODELS)}"
    for index, size in enumerate(policy.scheduled_limits):
        if size.nodes_count_min is None and size.nodes_count_max is None:
            yield f"scheduled_limits[{index}]: neither nodes_count_min nor nodes_count_max is set: it bounds nothing"
        least, most = size.nodes_count_min, policy.nodes_count_max
        if least is not None and least > most:
            yield f"scheduled_limits[{index}].nodes_count_min: {least} is above the cluster's nodes_count_max {most}; lower it"


def _money(policy: ScalingPolicy) -> Iterator[str]:
    """What cannot be meant of limits by day and month."""
    owned = [("limits.spend", policy.limits.spend)]
    owned += [(f"pools[{index}].spend", pool.spend) for index, pool in enumerate(policy.pools)]
    for name, parts in (("zones", policy.limits.zones), ("projects", policy.limits.projects)):
        owned += [(f"limits.{name}[{index}].spend", part.spend) for index, part in enumerate(parts)]
    for at, money in owned:
        yield from money_mistakes(money, at)


def _orders(table: msgspec.Struct, at: str) -> Iterator[str]:
    """Limits that stand the wrong way round, and names used twice, in this table and all below it."""
    fields = table.__struct_fields__
    for name in fields:
        value = getattr(table, name)
        stem, _, bound = name.rpartition("_")
        above = f"{stem}_max"
        if bound in ("min", "default") and above in fields:
            most = getattr(table, above)
            if value is not None and most is not None and value > most:
                yield (f"{at}{name}: {value:g} is above {at}{above} {most:g}; lower the one or raise the other")
        if isinstance(value, msgspec.Struct):
            yield from _orders(value, f"{at}{name}.")
        elif isinstance(value, tuple):
            tables = [one for one in value if isinstance(one, msgspec.Struct)]
            for index, one in enumerate(tables):
                yield from _orders(one, f"{at}{name}[{index}].")
            counts = Counter(one.name for one in tables if hasattr(one, "name"))
            for called, count in counts.items():
                if count > 1:
                    yield f"{at}{name}: the name {called!r} is used {count} times; give each its own"


def _cluster(policy: ScalingPolicy) -> Iterator[str]:
    for name, what in _NEVER_ZERO.items():
        if getattr(policy, name) == 0:
            yield f"{name}: with 0 {what}; set the seconds that it really takes, or leave it out for the default"
    wanted = sum(pool.nodes_count_min for pool in policy.pools)
    if wanted > policy.nodes_count_max:
        yield f"pools: their nodes_count_min add up to {wanted}, above the cluster's nodes_count_max; lower one of them"
    least = policy.nodes_count_min
    if not least:
        return
    if policy.gpu_count_max == 0:
        yield f"gpu_count_max: 0 contradicts nodes_count_min {least}; allow GPUs, or keep no nodes"
    if policy.price_micro_usd_per_hour_max == 0:
        yield f"price_micro_usd_per_hour_max: 0 contradicts nodes_count_min {least}; allow money, or keep no nodes"
    bounds = [pool.nodes_count_max for pool in policy.pools]
    together = sum(bound for bound in bounds if bound is not None)
    if None not in bounds and together < least:
        yield f"nodes_count_min: {least} is above what all pools may hold together ({together}); raise one of theirs"


def _pool(pool: NodePool, at: str, policy: ScalingPolicy) -> Iterator[str]:
    for model in pool.gpu_models:
        if model not in GPU_MODELS:
            yield f"{at}.gpu_models: unknown GPU model {model!r}{_nearest(model, GPU_MODELS)}"
    for name in ("nodes_count_max", "gpu_count_max"):
        most, clusters = getattr(pool, name), getattr(policy, name)
        if most is not None and clusters is not None and most > clusters:
            yield f"{at}.{name}: {most} is above the cluster's {name} {clusters}; lower it, or raise the cluster's"
    if pool.nodes_count_max == 0:
        yield f"{at}.nodes_count_max: 0 lets nothing into pool {pool.name!r}; take the pool away, or allow a node"
    if pool.gpu_count_max == 0 and pool.gpu_models:
        yield f"{at}.gpu_count_max: 0 contradicts gpu_models; nothing can reach pool {pool.name!r}: allow GPUs"
    yield from _pool_labels(pool, at)
    both = (*pool.taints, *pool.startup_taints)
    for (key, effect), count in Counter((taint.key, taint.effect) for taint in both).items():
        if count > 1:
            yield f"{at}.taints: {key}:{effect} stands there {count} times, and Kubernetes takes one; keep one"
    for taint in pool.startup_taints:
        if not is_startup(taint):
            yield (
                f"{at}.startup_taints: nobody would know that {taint.key}:{taint.effect} passes; begin its key with"
                f" {STARTUP_PREFIXES[0]}, with effect NoSchedule or NoExecute"
            )


def _pool_labels(pool: NodePool, at: str) -> Iterator[str]:
    for key in _OUR_LABELS:
        if key in pool.labels:
            yield f"{at}.labels: {key} is written by the autoscaler itself; take it away"
    for key, name, allowed in (
        (labels.ZONE, "zones", pool.zones),
        (labels.INSTANCE_TYPE, "instance_types", pool.instance_types),
    ):
        said = pool.labels.get(key)
        if said is not None and (allowed != (said,)):
            yield f"{at}.labels: {key}={said} contradicts {name}; filter by {name}, and the node says it by itself"


def _sold_whole(pool: NodePool, offers: tuple[Offer, ...] | None) -> tuple[Offer, ...] | None:
    """What the pool's filters let in, whether or not its GPUs can be shared as it says."""
    whole = msgspec.structs.replace(pool, sharing=None)
    return None if offers is None else tuple(offer for offer in offers if pool_allows(whole, offer))


def _on_sale(pool: NodePool, at: str, offers: tuple[Offer, ...]) -> Iterator[str]:
    """Filters that pass nothing that is for sale: each value that is not sold, else that they exclude each other."""
    filters: tuple[tuple[str, tuple[str, ...], set[str]], ...] = (
        ("instance_types", pool.instance_types, {offer.instance_type for offer in offers}),
        ("gpu_models", pool.gpu_models, {offer.gpu_model for offer in offers if offer.gpu_model is not None}),
        ("zones", pool.zones, {offer.zone for offer in offers}),
        ("capacity_types", pool.capacity_types, {str(offer.capacity_type) for offer in offers}),
    )
    unsold = [
        f"{at}.{name}: {value!r} is not for sale{_nearest(value, sold)}"
        for name, allowed, sold in filters
        for value in map(str, allowed)
        if value not in sold
    ]
    yield from unsold
    if not unsold and not _sold_whole(pool, offers):
        names = " and ".join(name for name, allowed, _ in filters if allowed)
        what = f"{names} exclude each other" if names else "nothing at all is for sale"
        yield f"{at}: {what}: no offer can reach pool {pool.name!r}; widen one of them, or take the pool away"


def _nearest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(names) or 'none'}"
