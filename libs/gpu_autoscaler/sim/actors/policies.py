"""The policies of a run, drawn by the seed so that limits bind in some runs; then frozen, edited and tightened.

A changed policy file restarts the services that read it, like a rollout. Some runs also have policies kept as
Kubernetes objects; no change of these tightens a limit, so a plan made just before stays valid. Each part of a policy
has its own generator, so a new part keeps recorded seeds stable.
"""

import random
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from msgspec.structs import replace

from gpu_autoscaler.core.limits.spend import spend_caps
from gpu_autoscaler.core.policy.disruption_settings import (
    DisruptionBudget,
    GpuHealthPolicy,
    IdleJobsPolicy,
    RemovalCause,
    RemovalPolicy,
)
from gpu_autoscaler.core.policy.documents import merge_documents
from gpu_autoscaler.core.policy.gpu_slices import GpuSharing
from gpu_autoscaler.core.policy.limit_settings import LimitsPolicy, PartLimit, SpendPolicy
from gpu_autoscaler.core.policy.policy import NodePool, PlacementName, ScalingPolicy
from gpu_autoscaler.core.policy.prewarm_settings import ForecastPolicy, Headroom, ScheduledLimit
from gpu_autoscaler.core.policy.provisioning_settings import GangPolicy, MixPolicy, SpotPolicy
from gpu_autoscaler.events.envelope import Envelope
from gpu_autoscaler.events.policy import PolicyDocumentsAccepted
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import FactId, derive_id
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.policy_documents import DocumentPool, PolicyDocument
from gpu_autoscaler.model.scheduling import Taint
from gpu_autoscaler.runtime.digests import policy_digest
from gpu_autoscaler.sim.adapters.bus import SimBus
from gpu_autoscaler.sim.faults.injection import CLOUD, Faults
from gpu_autoscaler.sim.virtual_time import ORIGIN, VirtualLoop
from gpu_autoscaler.simcluster.offers import ZONES

# Parts of a run's policy: pace of removal, node expiry, headroom, size schedules and forecast. Each part has
# its own generator, so a new part keeps recorded seeds stable.

T = TypeVar("T")
_WEEK_SECONDS = 7 * 24 * 3600.0
_BUDGETS: tuple[tuple[DisruptionBudget, ...], ...] = (
    (),
    (),
    # A time each hour without removals, and underused nodes one at a time.
    (
        DisruptionBudget(nodes_count_max=0, schedule="20 * * * *", duration_seconds=900.0),
        DisruptionBudget(causes=(RemovalCause.UNDERUSED,), nodes_count_max=1),
    ),
    (DisruptionBudget(causes=(RemovalCause.EXPIRED, RemovalCause.DRIFTED), nodes_ratio_max=0.25),),
)
# They are active in the first hours of a run only, not during quiescence.
_HEADROOMS: tuple[tuple[Headroom, ...], ...] = (
    (),
    (),
    (),
    (Headroom(name="morning", free_gpu_count=2, schedule="50 0 * * *", duration_seconds=2700.0, lead_seconds=600.0),),
)
_SIZES: tuple[tuple[ScheduledLimit, ...], ...] = (
    (),
    (),
    (),
    (
        ScheduledLimit(
            name="rush", nodes_count_min=3, schedule="15 1 * * *", duration_seconds=1500.0, lead_seconds=600.0
        ),
    ),
    (ScheduledLimit(name="lull", nodes_count_max=8, schedule="30 0 * * *", duration_seconds=1800.0),),
)


def _chosen(seed: int, part: str, options: Sequence[T]) -> T:
    """Choose by a generator of its own. The strings that seed `Random` are part of each seed's meaning."""
    return random.Random(f"{seed}/{part}").choice(options)


def removal_of(seed: int) -> RemovalPolicy:
    """Return the removal policy. The strings that seed `Random` are part of each seed's meaning."""
    rng = random.Random(f"{seed}/removal")
    return RemovalPolicy(
        disruption_budgets=rng.choice(_BUDGETS),
        expire_seconds_max=rng.choice((None, _WEEK_SECONDS, 4500.0, 9000.0)),
        expire_grace_seconds=rng.choice((1800.0, 24 * 3600.0)),
        unhealthy_seconds_max=rng.choice((600.0, 1200.0)),
        forced_drain_seconds=rng.choice((300.0, 3600.0)),
        replacement_cooldown_seconds=rng.choice((1800.0, 6 * 3600.0)),
        gpu_health=GpuHealthPolicy(evidence_seconds=_chosen(seed, "health", (120.0, 600.0))),
    )


_GPU_TAINT = Taint(key="nvidia.com/gpu", value="present", effect="NoSchedule")
# Spot first, then on demand, with a taint that only GPU work tolerates; or pools that split the GPU models.
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
    SpotPolicy(capacity_pool_gpu_count_min=4, interruptions_count_max=1, low_priority_wait_seconds=120.0),
    SpotPolicy(mix=MixPolicy(spot_ratio=0.2, on_demand_ratio=0.8, reserved_ratio=0.0), interruption_ratio_max=0.06),
)
_GANGS: tuple[GangPolicy, ...] = (
    GangPolicy(),
    GangPolicy(complete_seconds_max=240.0, backoff_seconds_min=30.0, backoff_seconds_max=240.0),
)


# Pools whose GPUs are shared by pods; most runs have none.
_SHARING: tuple[NodePool, ...] = (
    NodePool(name="replicas", gpu_models=("T4", "A10G"), sharing=GpuSharing(replicas_count=4)),
    NodePool(name="slices", gpu_models=("A100",), sharing=GpuSharing(mig_profiles=("3g.20gb", "2g.10gb", "1g.5gb"))),
)
_SHARING_RATIO = 0.2


def sharing_of(seed: int) -> NodePool | None:
    """Return the pool with shared GPUs; None: the run has none."""
    rng = random.Random(f"{seed}/gpu sharing")
    return rng.choice(_SHARING) if rng.random() < _SHARING_RATIO else None


_PLACEMENTS: tuple[PlacementName, ...] = ("best-fit", "packing", "spreading", "least-loaded", "round-robin", "random")
_OTHER_PLACEMENT_RATIO = 0.2  # of runs with another placement policy than the default


def _placement(seed: int) -> PlacementName:
    rng = random.Random(f"{seed}/placement policy")
    return rng.choice(_PLACEMENTS) if rng.random() < _OTHER_PLACEMENT_RATIO else "fragmentation-gradient"


# Spend limits that bind and limits that do not; a run lasts a few hours of one day.
_MONEY: tuple[SpendPolicy, ...] = (
    SpendPolicy(),
    SpendPolicy(),
    SpendPolicy(),
    SpendPolicy(day_micro_usd_max=30_000_000),
    SpendPolicy(day_micro_usd_max=80_000_000, month_micro_usd_max=200_000_000),
    SpendPolicy(month_micro_usd_max=60_000_000, is_hard=False),
)


def _limits_of(seed: int) -> LimitsPolicy:
    limits = _chosen(seed, "limits", _LIMITS)
    return replace(
        limits,
        spend=_chosen(seed, "money", _MONEY),
        scale_up_cooldown_seconds=_chosen(seed, "cooldown", (0.0, 0.0, 0.0, 180.0)),
    )


def policy_of(seed: int) -> ScalingPolicy:
    """Return the policy at the start of the run. The strings that seed `Random` are part of each seed's meaning."""
    rng = random.Random(f"{seed}/policy")
    sharing = sharing_of(seed)
    return ScalingPolicy(
        idle_seconds_max=rng.choice((120.0, 300.0, 600.0)),
        scale_down_cooldown_seconds=rng.choice((60.0, 300.0, 600.0)),
        boot_seconds_max=rng.choice((300.0, 600.0, 900.0)),
        drain_seconds_max=rng.choice((120.0, 600.0)),
        nodes_count_max=rng.choice((12, 16, 24, 60)),
        gpu_count_max=rng.choice((None, None, 24, 64)),
        price_micro_usd_per_hour_max=rng.choice((None, None, 20_000_000, 60_000_000)),
        disruption_ratio_max=rng.choice((0.1, 0.3, 1.0)),
        nodes_count_min=rng.choice((0, 0, 2)),
        is_consolidation_on=rng.random() < 0.8,
        consolidation_requested_ratio_max=rng.choice((0.5, 0.8, 1.0)),
        consolidation_saving_ratio_min=rng.choice((0.05, 0.15, 0.6)),
        job_retries_count_max=rng.choice((1, 3)),
        utilization_trigger=_chosen(seed, "use", ("gated", "gated", "direct")),
        # All simulated work uses its GPUs: no telemetry may lead to a cancellation as idle.
        idle_jobs=IdleJobsPolicy(is_on=True, idle_seconds=600.0),
        removal=removal_of(seed),
        headrooms=_chosen(seed, "headrooms", _HEADROOMS),
        scheduled_limits=_chosen(seed, "sizes", _SIZES),
        forecast=ForecastPolicy(is_on=random.Random(f"{seed}/forecast").random() < 1 / 6),
        pools=(*rng.choice(_POOLS), *(() if sharing is None else (sharing,))),
        limits=_limits_of(seed),
        placement=_placement(seed),
        spot=_chosen(seed, "spot", _SPOT),
        gangs=_chosen(seed, "gangs", _GANGS),
    )


EDITED = "example.com/generation"


class Policies:
    """The active policy and all former ones: a policy file, and policy documents merged over it."""

    def __init__(
        self, policy: ScalingPolicy, documents: Sequence[PolicyDocument] = (), *, when_changed: Callable[[], None]
    ) -> None:
        """`when_changed`: restart every process that was started with the former file."""
        self._base = policy
        self._when_changed = when_changed
        self._edits_count = 0
        self.file = policy  # services start with it
        self.documents = tuple(documents)  # services read them from their stream
        self._files = [policy]
        self._document_sets: list[tuple[PolicyDocument, ...]] = [(), self.documents] if documents else [()]
        self.now = _merged(policy, documents)
        self.by_digest: dict[str, ScalingPolicy] = {}
        for document_set in self._document_sets:
            self._remember(policy, document_set)

    def keep(self, documents: tuple[PolicyDocument, ...]) -> None:
        """Replace the policy documents; no process is restarted."""
        self.documents = documents
        self._document_sets.append(documents)
        for file in self._files:  # a process that has not read the newest documents still plans by the former ones
            self._remember(file, documents)
        self.now = _merged(self.file, documents)

    def digests_under(self, documents: tuple[PolicyDocument, ...]) -> frozenset[str]:
        """Return the digests of all policies that these documents give with any file so far."""
        return frozenset(policy_digest(_merged(file, documents)) for file in self._files)

    def freeze(self, *, is_frozen: bool) -> None:
        if is_frozen != self.now.is_frozen:
            self._change(is_frozen=is_frozen)

    def edit(self) -> None:
        """Change a label of every pool, so that nodes bought earlier have drifted."""
        self._edits_count += 1
        pools = [replace(pool, labels={**pool.labels, EDITED: str(self._edits_count)}) for pool in self._base.pools]
        self._base = replace(self._base, pools=tuple(pools))
        self._change(is_frozen=self.now.is_frozen)

    def lower_spend_limit(self, day_micro_usd_max: int) -> None:
        """Set a hard daily spend limit of the cluster in place of its other spend limits."""
        self._change_spend_limit(SpendPolicy(day_micro_usd_max=day_micro_usd_max))

    def restore_spend_limit(self) -> None:
        self._change_spend_limit(self._files[0].limits.spend)

    def _change_spend_limit(self, money: SpendPolicy) -> None:
        if money != self._base.limits.spend:
            self._base = replace(self._base, limits=replace(self._base.limits, spend=money))
            self._change(is_frozen=self.now.is_frozen)

    def lift_spend_limits(self) -> None:
        """Remove all spend limits: money spent stays spent until the next period, and waiting work must be served."""
        if spend_caps(self._base):
            self._base = replace(
                self._base,
                pools=tuple(replace(pool, spend=SpendPolicy()) for pool in self._base.pools),
                limits=replace(self._base.limits, spend=SpendPolicy()),
            )
            self._change(is_frozen=self.now.is_frozen)

    def _change(self, *, is_frozen: bool) -> None:
        self.file = replace(self._base, is_frozen=is_frozen)
        self._files.append(self.file)
        for documents in self._document_sets:
            self._remember(self.file, documents)
        self.now = _merged(self.file, self.documents)
        self._when_changed()

    def _remember(self, file: ScalingPolicy, documents: tuple[PolicyDocument, ...]) -> None:
        policy = _merged(file, documents)
        self.by_digest[policy_digest(policy)] = policy


def _merged(file: ScalingPolicy, documents: Sequence[PolicyDocument]) -> ScalingPolicy:
    return merge_documents(file, documents) if documents else file


EDITS_POLICY_OBJECTS = "operator_edits_documents"
OFF_SECONDS = (300.0, 2400.0)
AFTERWARDS_SECONDS = 900.0  # until deferred purchases are made and usable
RETRY_SECONDS = 2.0  # the policy watcher's tick interval
POLICY_OBJECTS_RATIO = 0.12  # of runs

POLICY_OBJECTS = (
    PolicyDocument(
        name="training",
        uid="uid-training",
        generation=1,
        created_at=ORIGIN,
        pools=(
            DocumentPool(name="cheap", priority=5, capacity_type=CapacityType.SPOT, nodes_count_max=8),
            DocumentPool(name="lasting", capacity_type=CapacityType.ON_DEMAND),
        ),
    ),
    PolicyDocument(
        name="inference",
        uid="uid-inference",
        generation=1,
        created_at=ORIGIN + timedelta(seconds=1),
        pools=(DocumentPool(name="small", gpu_models=("T4",), nodes_count_min=1, labels={"tier": "inference"}),),
    ),
)


def documents_of(seed: int) -> tuple[PolicyDocument, ...]:
    """Return the initial policy objects. The string that seeds `Random` is part of each seed's meaning."""
    return POLICY_OBJECTS if random.Random(f"{seed}/documents").random() < POLICY_OBJECTS_RATIO else ()


Change = Callable[[ScalingPolicy], ScalingPolicy]


def policies_of(seed: int, when_changed: Callable[[], None], change: Change = lambda policy: policy) -> Policies:
    """Return the policies of a run, with its documents merged; `when_changed` as in `Policies`."""
    return Policies(change(policy_of(seed)), documents_of(seed), when_changed=when_changed)


class PolicyObjects:
    """Operators of policy objects, and the policy watcher."""

    def __init__(self, loop: VirtualLoop, bus: SimBus, policies: Policies, faults: Faults) -> None:
        self._loop = loop
        self._bus = bus
        self._policies = policies
        self._faults = faults
        self._published_count = 0
        self._is_lost = False

    def streams_lost(self) -> None:
        """The stream with the published documents is lost."""
        self._is_lost = bool(self._policies.documents)

    def publish_if_lost(self) -> None:
        """The broker is back: publish again if the documents were lost."""
        if self._is_lost:
            self.publish()

    def publish(self) -> None:
        """Publish the accepted documents; retry until the broker has stored them."""
        documents = self._policies.documents
        if not documents:
            return
        self._published_count += 1
        fact = PolicyDocumentsAccepted(documents=documents, accepted_at=self._loop.now())
        name = FactId(derive_id("documents", self._published_count))
        try:
            self._bus.publish(Envelope(id=name, source="/policy_watcher", time=self._loop.now(), fact=fact))
            self._is_lost = False
        except TransientError:
            self._loop.call_later(RETRY_SECONDS, self.publish)

    def edit(self) -> None:
        """Disable a policy for a while, or change the labels of its nodes."""
        name = self._faults.choose(EDITS_POLICY_OBJECTS, sorted(document.name for document in self._policies.documents))
        if self._faults.seconds(EDITS_POLICY_OBJECTS, 0.0, 1.0) < 0.5:
            seconds = self._faults.seconds(EDITS_POLICY_OBJECTS, *OFF_SECONDS)
            self._faults.disturb(seconds + AFTERWARDS_SECONDS, CLOUD)
            self._change(name, is_enabled=False)
            self._loop.call_later(seconds, self._enable, name)
        else:
            (document,) = (document for document in self._policies.documents if document.name == name)
            pools = [replace(pool, labels={**pool.labels, EDITED: str(document.generation)}) for pool in document.pools]
            self._change(name, pools=tuple(pools))

    def end(self) -> None:
        for document in self._policies.documents:
            self._enable(document.name)

    def _enable(self, name: str) -> None:
        if any(document.name == name and not document.is_enabled for document in self._policies.documents):
            self._change(name, is_enabled=True)

    def _change(self, name: str, **changes: object) -> None:
        self._policies.keep(
            tuple(
                replace(document, generation=document.generation + 1, **changes) if document.name == name else document
                for document in self._policies.documents
            )
        )
        self.publish()
