"""Large clusters, whose hours count: ten or more nodes, about thirty pods an hour, and frequent faults.

Each starts from the policy of the seed, with limits scaled to such a fleet. Used only with `is_large`, so other seeds
are not affected.
"""

import random
from collections.abc import Callable

from msgspec.structs import replace

from gpu_autoscaler.core.policy.limit_settings import LimitsPolicy, PartLimit, SpendPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.sim.actors.policies import POLICY_OBJECTS, Change, Policies, documents_of, policy_of
from gpu_autoscaler.sim.faults.injection import kinds_of_seed
from gpu_autoscaler.simcluster.offers import ZONES

JOBS_PER_HOUR = 24.0
_NODES_COUNT_MAX = {12: 14}  # the mean fleet is ten nodes
_GPU_COUNT_MAX = {24: 40}
_PRICE_MICRO_USD_MAX = {20_000_000: 40_000_000}
_ZONES = (PartLimit(name=ZONES[0], nodes_count_max=6), PartLimit(name=ZONES[1], gpu_count_max=24))
_PROJECTS = (PartLimit(name="speech", gpu_count_max=16), PartLimit(name="ranking", nodes_count_max=7))
# Most nodes reserve their cost to the end of the period, as the end of their work is unknown.
_MONEY: tuple[SpendPolicy, ...] = (
    SpendPolicy(),
    SpendPolicy(),
    SpendPolicy(),
    SpendPolicy(day_micro_usd_max=200_000_000),
    SpendPolicy(day_micro_usd_max=400_000_000, month_micro_usd_max=12_000_000_000),
    SpendPolicy(month_micro_usd_max=8_000_000_000, is_hard=False),
)
_DOCUMENTED_RATIO = 0.25
_SICK_RATIO = 0.25  # of runs: two unhealthy nodes exceed the limit for automatic replacement
# Seeds with few kinds get these as well, about two faults an hour.
_KINDS_COUNT_MIN = 6
# Kinds that few seeds switch on are forced in every n-th seed: otherwise a sweep of 24 may have none.
_CLOSED = "metadata_closed"
_CLOSED_EVERY = 12
_FREQUENT = ("budget_tightened", "notice_120", "pod_vanished", "service_killed", "worn_gpu")


def kinds_of(seed: int) -> frozenset[str]:
    """Return the kinds of fault that the seed switches on."""
    chosen = kinds_of_seed(seed) if seed % _CLOSED_EVERY else kinds_of_seed(seed) | {_CLOSED}
    return chosen if len(chosen) >= _KINDS_COUNT_MIN else chosen.union(_FREQUENT)


def policies_of(seed: int, when_changed: Callable[[], None], change: Change = lambda policy: policy) -> Policies:
    """Return the policies of the run; `when_changed` as in `Policies`.

    The strings that seed `Random` are part of each seed's meaning.
    """
    is_documented = random.Random(f"{seed}/large/documents").random() < _DOCUMENTED_RATIO
    documents = POLICY_OBJECTS if is_documented else documents_of(seed)
    return Policies(change(widened(policy_of(seed), seed)), documents, when_changed=when_changed)


def widened(policy: ScalingPolicy, seed: int) -> ScalingPolicy:
    """Return the policy with limits for a fleet of ten nodes."""
    nodes_count_max, gpu_count_max = policy.nodes_count_max, policy.gpu_count_max
    price_max = policy.price_micro_usd_per_hour_max
    return replace(
        policy,
        nodes_count_max=_NODES_COUNT_MAX.get(nodes_count_max, nodes_count_max),
        gpu_count_max=None if gpu_count_max is None else _GPU_COUNT_MAX.get(gpu_count_max, gpu_count_max),
        price_micro_usd_per_hour_max=None if price_max is None else _PRICE_MICRO_USD_MAX.get(price_max, price_max),
        pools=tuple(replace(pool, gpu_count_max=None) for pool in policy.pools),
        limits=_limits(policy.limits, seed),
        removal=replace(policy.removal, **_sick_limits(seed)),
    )


def _limits(limits: LimitsPolicy, seed: int) -> LimitsPolicy:
    return replace(
        limits,
        zones=_ZONES if limits.zones else (),
        projects=_PROJECTS if limits.projects else (),
        spend=random.Random(f"{seed}/large/money").choice(_MONEY),
    )


def _sick_limits(seed: int) -> dict[str, float]:
    if random.Random(f"{seed}/large/sick").random() >= _SICK_RATIO:
        return {}
    return {"unhealthy_nodes_ok_count": 1, "unhealthy_ratio_max": 0.1}
