"""Worlds in which hours count: with ten nodes or a few more, some thirty pods an hour, and always something amiss.

Each is the seed's own world, with limits that bind where such a fleet stands rather than long before: a world that can
buy nothing all day is dull, and its queue is dear to plan. What comes seldom is more frequent here. Worlds of seeds
that were kept are not touched: this holds for runs that ask for it alone.
"""

import random
from collections.abc import Callable

from msgspec.structs import replace

from gpu_autoscaler.core.policies.limits import LimitsPolicy, PartLimit
from gpu_autoscaler.core.policies.money import MoneyPolicy
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.sim.documents import DOCUMENTED, documents_of
from gpu_autoscaler.sim.faults import swarm
from gpu_autoscaler.sim.policies import Policies, policy_of
from gpu_autoscaler.simcluster.offers import ZONES

JOBS_PER_HOUR = 24.0
_NODES_COUNT_MAX = {12: 14}  # of ten that are there on average some come and some go
_GPU_COUNT_MAX = {24: 40}
_PRICE_MICRO_USD_MAX = {20_000_000: 40_000_000}
_ZONES = (PartLimit(name=ZONES[0], nodes_count_max=6), PartLimit(name=ZONES[1], gpu_count_max=24))
_PROJECTS = (PartLimit(name="speech", gpu_count_max=16), PartLimit(name="ranking", nodes_count_max=7))
# Most nodes reserve what they cost to the end of the period, as nobody knows how long they are needed.
_MONEY: tuple[MoneyPolicy, ...] = (
    MoneyPolicy(),
    MoneyPolicy(),
    MoneyPolicy(),
    MoneyPolicy(day_micro_usd_max=200_000_000),
    MoneyPolicy(day_micro_usd_max=400_000_000, month_micro_usd_max=12_000_000_000),
    MoneyPolicy(month_micro_usd_max=8_000_000_000, is_hard=False),
)
_DOCUMENTED_RATIO = 0.25
_SICK_RATIO = 0.25  # of worlds: where two nodes are sick at a time, people are asked rather than nodes taken away
# Something is amiss in every world: where the seed chose little, these as well, some two an hour.
_KINDS_COUNT_MIN = 6
# What is on in few worlds for good reasons is on in these: else a sweep of two dozen may come to none of them.
_CLOSED = "metadata_closed"
_CLOSED_EVERY = 12
_FREQUENT = ("budget_tightened", "notice_120", "pod_vanished", "service_killed", "worn_gpu")


def kinds_of(seed: int) -> frozenset[str]:
    """The kinds of fault that the seed switches on."""
    chosen = swarm(seed) if seed % _CLOSED_EVERY else swarm(seed) | {_CLOSED}
    return chosen if len(chosen) >= _KINDS_COUNT_MIN else chosen.union(_FREQUENT)


def policies_of(seed: int, when_changed: Callable[[], None]) -> Policies:
    """The policies of the seed's run; `when_changed` as in `Policies`."""
    is_documented = random.Random(f"{seed}/large/documents").random() < _DOCUMENTED_RATIO
    documents = DOCUMENTED if is_documented else documents_of(seed)
    return Policies(widened(policy_of(seed), seed), documents, when_changed=when_changed)


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
        money=random.Random(f"{seed}/large/money").choice(_MONEY),
    )


def _sick_limits(seed: int) -> dict[str, float]:
    if random.Random(f"{seed}/large/sick").random() >= _SICK_RATIO:
        return {}
    return {"sick_nodes_count_max": 1, "sick_ratio_max": 0.1}
