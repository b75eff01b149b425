"""The policies of a run: limits that bind in some runs, patience and thrift that differ, one pool or two, and a freeze.

Services are started with the policy that holds; when it changes, they are started again, as a roll-out would do it.
"""

import random
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from gpu_autoscaler.core.documents import merged
from gpu_autoscaler.core.policies.gang import GangPolicy
from gpu_autoscaler.core.policies.limits import LimitsPolicy, PartLimit
from gpu_autoscaler.core.policies.money import MoneyPolicy
from gpu_autoscaler.core.policies.spot import MixPolicy, SpotPolicy
from gpu_autoscaler.core.policies.use import IdleJobsPolicy
from gpu_autoscaler.core.policy import NodePool, PlacementName, ScalingPolicy
from gpu_autoscaler.core.slicing import GpuSharing
from gpu_autoscaler.core.spending.money import caps
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.policy_documents import PolicyDocument
from gpu_autoscaler.model.scheduling import Taint
from gpu_autoscaler.runtime.digests import policy_digest
from gpu_autoscaler.sim.rules import forecast_of, headrooms_of, removal_of, sizes_of
from gpu_autoscaler.simcluster.offers import ZONES

_GPU_TAINT = Taint(key="nvidia.com/gpu", value="present", effect="NoSchedule")
# Spot first and then what is sure, with a taint that only work for GPUs tolerates; and pools that split the models.
_POOLS: tuple[tuple[NodePool, ...], ...] = (
    (NodePool(name="default"),),
    (NodePool(name="default"),),
    (
        NodePool(
            name="spot", priority=10, capacity_types=(CapacityType.SPOT,), nodes_count_max=8, taints=(_GPU_TAINT,)
        ),
        NodePool(name="sure", capacity_types=(CapacityType.ON_DEMAND,)),
    ),
    (NodePool(name="t4", gpu_models=("T4",), gpu_count_max=16), NodePool(name="others", labels={"tier": "rest"})),
)


_LIMITS: tuple[LimitsPolicy, ...] = (
    LimitsPolicy(),
    LimitsPolicy(),
    LimitsPolicy(
        zones=(PartLimit(name=ZONES[0], nodes_count_max=3), PartLimit(name=ZONES[1], gpu_count_max=9)),
        projects=(PartLimit(name="speech", gpu_count_max=8), PartLimit(name="ranking", nodes_count_max=4)),
    ),
)


_SPOT: tuple[SpotPolicy, ...] = (
    SpotPolicy(),
    SpotPolicy(storm_gpu_count_min=4, losses_count_max=1, low_priority_wait_seconds=120.0),
    SpotPolicy(mix=MixPolicy(spot_ratio=0.2, on_demand_ratio=0.8, reserved_ratio=0.0), interruption_ratio_max=0.06),
)
_GANGS: tuple[GangPolicy, ...] = (
    GangPolicy(),
    GangPolicy(complete_seconds_max=240.0, wait_seconds_min=30.0, wait_seconds_max=240.0),
)


# Pools whose GPUs several pods share; in most runs there is none.
_SHARING: tuple[NodePool, ...] = (
    NodePool(name="replicas", gpu_models=("T4", "A10G"), sharing=GpuSharing(replicas_count=4)),
    NodePool(name="slices", gpu_models=("A100",), sharing=GpuSharing(mig_profiles=("3g.20gb", "2g.10gb", "1g.5gb"))),
)
_SHARING_RATIO = 0.2


def sharing_of(seed: int) -> NodePool | None:
    """The pool of the run whose GPUs are shared; None: all GPUs are whole."""
    chance = random.Random(f"{seed}/gpu sharing")
    return chance.choice(_SHARING) if chance.random() < _SHARING_RATIO else None


_PLACEMENTS: tuple[PlacementName, ...] = (
    "best-fit",
    "packing",
    "spreading",
    "least-loaded",
    "round-robin",
    "random",
)
_OTHER_PLACEMENT_RATIO = 0.2  # of runs: nodes are filled by another policy than the default


def _placement(seed: int) -> PlacementName:
    chance = random.Random(f"{seed}/placement policy")
    return chance.choice(_PLACEMENTS) if chance.random() < _OTHER_PLACEMENT_RATIO else "fragmentation-gradient"


# Money that is enough, and money that is not; a run is a few hours of one day.
_MONEY: tuple[MoneyPolicy, ...] = (
    MoneyPolicy(),
    MoneyPolicy(),
    MoneyPolicy(),
    MoneyPolicy(day_micro_usd_max=30_000_000),
    MoneyPolicy(day_micro_usd_max=80_000_000, month_micro_usd_max=200_000_000),
    MoneyPolicy(month_micro_usd_max=60_000_000, is_hard=False),
)


def _limits_of(seed: int) -> LimitsPolicy:
    limits = random.Random(f"{seed}/limits").choice(_LIMITS)
    return replace(
        limits,
        money=random.Random(f"{seed}/money").choice(_MONEY),
        scale_up_cooldown_seconds=random.Random(f"{seed}/cooldown").choice((0.0, 0.0, 0.0, 180.0)),
    )


def policy_of(seed: int) -> ScalingPolicy:
    """The policy that a run begins with."""
    chance = random.Random(f"{seed}/policy")
    sharing = sharing_of(seed)
    return ScalingPolicy(
        idle_seconds_max=chance.choice((120.0, 300.0, 600.0)),
        scale_down_cooldown_seconds=chance.choice((60.0, 300.0, 600.0)),
        boot_seconds_max=chance.choice((300.0, 600.0, 900.0)),
        drain_seconds_max=chance.choice((120.0, 600.0)),
        nodes_count_max=chance.choice((12, 16, 24, 60)),
        gpu_count_max=chance.choice((None, None, 24, 64)),
        price_micro_usd_per_hour_max=chance.choice((None, None, 20_000_000, 60_000_000)),
        disruption_ratio_max=chance.choice((0.1, 0.3, 1.0)),
        nodes_count_min=chance.choice((0, 0, 2)),
        is_consolidation_on=chance.random() < 0.8,
        consolidation_requested_ratio_max=chance.choice((0.5, 0.8, 1.0)),
        consolidation_saving_ratio_min=chance.choice((0.05, 0.15, 0.6)),
        job_retries_count_max=chance.choice((1, 3)),
        utilization_trigger=random.Random(f"{seed}/use").choice(("gated", "gated", "direct")),
        # All work of this world works: whatever its telemetry says, none of it is to be ended as idle.
        idle_jobs=IdleJobsPolicy(is_on=True, idle_seconds=600.0),
        removal=removal_of(seed),
        headrooms=headrooms_of(seed),
        sizes=sizes_of(seed),
        forecast=forecast_of(seed),
        pools=(*chance.choice(_POOLS), *(() if sharing is None else (sharing,))),
        limits=_limits_of(seed),
        placement=_placement(seed),
        spot=random.Random(f"{seed}/spot").choice(_SPOT),
        gangs=random.Random(f"{seed}/gangs").choice(_GANGS),
    )


EDITED = "example.com/generation"


class Policies:
    """Which policy holds now, and which ones have held: a file, and documents merged under it."""

    def __init__(
        self, policy: ScalingPolicy, documents: Sequence[PolicyDocument] = (), *, when_changed: Callable[[], None]
    ) -> None:
        """`when_changed`: start everybody again who was started with the old file."""
        self._own = policy
        self._when_changed = when_changed
        self._edits_count = 0
        self.file = policy  # what services are started with
        self.documents = tuple(documents)  # what they read of the record
        self._files = [policy]
        self._kept: list[tuple[PolicyDocument, ...]] = [(), self.documents] if documents else [()]
        self.now = _merged(policy, documents)
        self.by_digest: dict[str, ScalingPolicy] = {}
        for each in self._kept:
            self._hold(policy, each)

    def keep(self, documents: tuple[PolicyDocument, ...]) -> None:
        """People keep these documents from now on; nobody is started again for them."""
        self.documents = documents
        self._kept.append(documents)
        for file in self._files:  # whoever has not heard of the last one plans by it
            self._hold(file, documents)
        self.now = _merged(self.file, documents)

    def digests_under(self, documents: tuple[PolicyDocument, ...]) -> frozenset[str]:
        """Return what may be planned by where these are known, under any file that ever held."""
        return frozenset(policy_digest(_merged(file, documents)) for file in self._files)

    def freeze(self, *, is_frozen: bool) -> None:
        """Change nothing from now on, or go on."""
        if is_frozen != self.now.is_frozen:
            self._change(is_frozen=is_frozen)

    def edit(self) -> None:
        """Somebody gives the nodes of every pool another label: those that were bought before have drifted."""
        self._edits_count += 1
        pools = [replace(pool, labels={**pool.labels, EDITED: str(self._edits_count)}) for pool in self._own.pools]
        self._own = replace(self._own, pools=tuple(pools))
        self._change(is_frozen=self.now.is_frozen)

    def lower_money(self, day_micro_usd_max: int) -> None:
        """No more than this is to be spent today, of all that runs; hard. Other limits of the cluster are put aside."""
        self._change_money(MoneyPolicy(day_micro_usd_max=day_micro_usd_max))

    def restore_money(self) -> None:
        """The cluster's limits are again what they were in the beginning."""
        self._change_money(self._files[0].limits.money)

    def _change_money(self, money: MoneyPolicy) -> None:
        if money != self._own.limits.money:
            self._own = replace(self._own, limits=replace(self._own.limits, money=money))
            self._change(is_frozen=self.now.is_frozen)

    def lift_money(self) -> None:
        """Let there be money for all that waits: what is spent of a day is spent until the next one."""
        if caps(self._own):
            self._own = replace(
                self._own,
                pools=tuple(replace(pool, money=MoneyPolicy()) for pool in self._own.pools),
                limits=replace(self._own.limits, money=MoneyPolicy()),
            )
            self._change(is_frozen=self.now.is_frozen)

    def _change(self, *, is_frozen: bool) -> None:
        self.file = replace(self._own, is_frozen=is_frozen)
        self._files.append(self.file)
        for documents in self._kept:
            self._hold(self.file, documents)
        self.now = _merged(self.file, self.documents)
        self._when_changed()

    def _hold(self, file: ScalingPolicy, documents: tuple[PolicyDocument, ...]) -> None:
        policy = _merged(file, documents)
        self.by_digest[policy_digest(policy)] = policy


def _merged(file: ScalingPolicy, documents: Sequence[PolicyDocument]) -> ScalingPolicy:
    return merged(file, documents) if documents else file
