"""The scaler: folds all facts, plans on each tick, has the plan checked and publishes it, fenced by its parent."""

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import ClassVar, NamedTuple, Protocol

import msgspec
import structlog

from gpu_autoscaler.bus.streams import Lane
from gpu_autoscaler.core.checked_plan import CheckedPlan, checked_plan
from gpu_autoscaler.core.deferred_groups import grouped, without_groups
from gpu_autoscaler.core.demand.history_samples import sample_due
from gpu_autoscaler.core.disruption.deleted_nodes import is_karpenter_managed
from gpu_autoscaler.core.limits.spend import SpendUse, spend_uses
from gpu_autoscaler.core.next_change import TrackedInstant, has_lasted, note
from gpu_autoscaler.core.policy.documents import effective_policy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.batching import BRAKED_PLAN_INTERVAL_MAX, PLAN_INTERVAL_MAX, replan_seconds
from gpu_autoscaler.core.provisioning.forecast_gauges import ForecastGauges, forecast_gauges
from gpu_autoscaler.core.state.interruption_history import is_reclaimed
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.catalog import STATE_FACTS
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.gpu import GpuNodeSummarized
from gpu_autoscaler.events.job import JobCancelRequested, JobFinished, JobPreempted, JobQueued
from gpu_autoscaler.events.node import (
    INSTANCE_STATE_VERSION,
    NodeGone,
    NodeInstanceListed,
    NodeInstanceObserved,
    NodeObserved,
    NodeWatched,
)
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.events.policy import (
    PolicyChanged,
    PolicyDirectiveGiven,
    PolicyDirectiveLifted,
    PolicyDocumentsAccepted,
)
from gpu_autoscaler.events.scaling import (
    ScalingCheckpointRequested,
    ScalingDecisionsRestored,
    ScalingDemandSampled,
    ScalingDrainCancelled,
    ScalingDrainResynced,
    ScalingDrainStarted,
    ScalingForecastScored,
    ScalingLaunchRefused,
    ScalingNodeDrained,
    ScalingNodeLaunched,
    ScalingNodeOrdered,
    ScalingNodeRemoved,
    ScalingNodeTerminated,
    ScalingPlanMade,
    ScalingPodEvicted,
)
from gpu_autoscaler.events.spot import SpotNoticeReceived, SpotNoticeWithdrawn
from gpu_autoscaler.model.decisions import Cut, Plan
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import PlanId, derive_id
from gpu_autoscaler.runtime.compute import Compute, compute_here
from gpu_autoscaler.runtime.digests import policy_digest
from gpu_autoscaler.runtime.lease import Lease
from gpu_autoscaler.runtime.metrics import package_version
from gpu_autoscaler.runtime.policy_reload import differences
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outcome, Outputs
from gpu_autoscaler_services.scaler.executor import Executor
from gpu_autoscaler_services.scaler.inventory import InstanceLists, InstancesListed
from gpu_autoscaler_services.scaler.living import RESYNCED, living
from gpu_autoscaler_services.scaler.purchases import late_launch
from gpu_autoscaler_services.scaler.recovery import DecisionRecovery

# Instance states are versioned by the cloud, so they never restart with a new cluster.
INSTANCE_EPOCH = 0

_TICK_SECONDS = 5.0
# A notice waits for no launch, no termination and no other drain. Drains and terminations are handled again every
# second until they are done, if need be for all nodes of a cluster; orders wait for the cloud. Source: our own.
LANES = (
    Lane(name="plans", facts=(ScalingPlanMade, ScalingDecisionsRestored), concurrency_max=16, max_ack_pending=256),
    Lane(name="drains", facts=(ScalingDrainStarted, ScalingDrainResynced), concurrency_max=32, max_ack_pending=8192),
    Lane(name="orders", facts=(ScalingNodeOrdered,), concurrency_max=16, max_ack_pending=1024),
    Lane(name="ends", facts=(ScalingNodeDrained,), concurrency_max=16, max_ack_pending=8192),
)
VIOLATIONS_LOGGED_MAX = 20
NOT_YET = datetime.max.replace(tzinfo=UTC)

log = structlog.get_logger()


class PlanMetrics(Protocol):
    """Metrics of planning; implemented by `runtime/metrics.py`."""

    def count_refused_plan(self) -> None:
        """Count a plan that the plan check refused."""

    def set_forecast(self, gauges: ForecastGauges) -> None:
        """Set the gauges of the forecast."""

    def set_spend(self, uses: Callable[[], Sequence[SpendUse]]) -> None:
        """Compute by this function how much of each spend budget is used, whenever it is asked for."""


class Digests(msgspec.Struct, frozen=True, kw_only=True):
    """Digests of the policy and of the code that make plans (`runtime/digests.py`)."""

    policy: str
    core: str


class _Rest(NamedTuple):
    """The inputs of a tick that had nothing to do, and until when another one would have nothing to do either."""

    state: ClusterState
    file: ScalingPolicy
    until: datetime | None  # None: until the next fact


class Scaler:
    """Plans and executes. Of two concurrent scalers the stream refuses one plan; every execution step is idempotent."""

    name: ClassVar[str] = "scaler"
    consumes: ClassVar[tuple[type[Fact], ...]] = (
        ScalingPlanMade,
        ScalingDecisionsRestored,
        ScalingNodeOrdered,
        ScalingDrainStarted,
        ScalingDrainResynced,
        ScalingNodeDrained,
    )
    folds: ClassVar[tuple[type[Fact], ...]] = (*STATE_FACTS, GpuNodeSummarized)
    publishes: ClassVar[tuple[type[Fact], ...]] = (
        ScalingPlanMade,
        ScalingDecisionsRestored,
        ScalingNodeOrdered,
        ScalingNodeLaunched,
        ScalingLaunchRefused,
        ScalingDrainStarted,
        ScalingCheckpointRequested,
        ScalingPodEvicted,
        ScalingNodeDrained,
        ScalingDrainCancelled,
        ScalingNodeTerminated,
        ScalingNodeRemoved,
        ScalingDemandSampled,
        ScalingForecastScored,
        JobCancelRequested,
        PolicyChanged,
        NodeInstanceObserved,
        NodeInstanceListed,
        NodeWatched,
        SpotNoticeReceived,  # the end of a paid reservation
        *RESYNCED,
    )
    resyncs: ClassVar[tuple[type[Fact], ...]] = (NodeInstanceObserved, SpotNoticeReceived, *RESYNCED)
    urgent: ClassVar[tuple[type[Fact], ...]] = (
        JobQueued,
        JobPreempted,
        JobCancelRequested,
        DemandReported,
        PolicyDirectiveGiven,
        PolicyDirectiveLifted,
        PolicyChanged,  # planning waits until the stream has it
        PolicyDocumentsAccepted,
        JobFinished,
        PodObserved,  # only unschedulable pods, see `is_urgent`
        NodeObserved,  # only nodes that Karpenter deletes
        NodeGone,
        SpotNoticeReceived,
        SpotNoticeWithdrawn,
        ScalingLaunchRefused,
    )
    tick_seconds: ClassVar[float | None] = _TICK_SECONDS
    lanes: ClassVar[tuple[Lane, ...]] = LANES

    def __init__(
        self,
        view: StateView,
        policy: ScalingPolicy,
        executor: Executor,
        recovery: DecisionRecovery,
        instances: AsyncIterable[InstancesListed],
        *,
        digests: Digests,
        metrics: PlanMetrics,
        lease: Lease | None = None,
    ) -> None:
        """`instances` is `scaler/inventory.py: InstanceWatch` of the same provider as the executor's."""
        self._view = view
        self._policy = self._file = policy
        self._file_path = ""
        self._executor = executor
        self._recovery = recovery
        self.compute: Compute = compute_here  # makes the plans; a process has a thread for them
        self.lease = lease  # without a lease all scalers are active and only the fence decides
        self._instances = instances
        self._instance_lists = InstanceLists()
        self._digests = digests
        self._metrics = metrics
        self._change: PolicyChanged | None = None  # published on each tick until the stream has it
        self._rest: _Rest | None = None
        self._last_published: tuple[int, frozenset[tuple[str, str, str]]] = (-1, frozenset())  # parent, deferrals

    def is_urgent(self, fact: Fact) -> bool:
        """Return False for the frequent observations of scheduled pods and of nodes that Karpenter does not delete.

        Karpenter evicts pods at once, so they have only their own grace period to save a checkpoint in.
        """
        match fact:
            case PodObserved():
                return fact.unschedulable_since is not None and fact.node_name is None
            case NodeObserved():
                return fact.deleting_since is not None and is_karpenter_managed(fact)
            case _:
                return True

    def use_policy(self, policy: ScalingPolicy, path: str) -> None:
        """Use this policy from the next tick on and publish the change. `path`: of the policy file."""
        self._file, self._file_path = policy, path

    def _merge_policy(self, state: ClusterState) -> None:
        """Merge the policy file with the accepted documents; a difference becomes the change to publish."""
        accepted = state.policy_documents
        policy = effective_policy(self._file, accepted)
        if policy is self._policy:
            return
        before, self._policy = self._policy, policy
        self._recovery.use_policy(policy)
        digest = policy_digest(policy)
        if digest == self._digests.policy:
            return
        documents = () if accepted is None else accepted.documents
        names = [self._file_path, *(f"autoscalingpolicy/{document.name}" for document in documents)]
        self._change = PolicyChanged(
            policy_digest=digest,
            before_digest=self._digests.policy,
            changed_at=NOT_YET,
            differences=differences(before, policy),
            path=", ".join(name for name in names if name),
        )
        self._digests = Digests(policy=digest, core=self._digests.core)

    # ---- planning

    def needs_tick(self, now: datetime) -> bool:
        """Return False while nothing has changed since a tick that had nothing to do, and time changes nothing."""
        rest = self._rest
        if rest is None or rest.state is not self._view.state or rest.file is not self._file:
            return True
        return rest.until is not None and now >= rest.until

    async def on_tick(self, now: datetime) -> Outputs:
        """Return a new plan, fenced by its parent; nothing if it adds nothing to the last one."""
        self._rest = None
        self._merge_policy(self._view.state)
        if (recovered := await self._recovery.before_first_plan(self._view.state, now)) is not None:
            return recovered
        state, cut = self._view.state, self._view.cut
        if (change := self._unpublished_change(state, now)) is not None:
            return (change,)
        self._metrics.set_forecast(forecast_gauges(state, self._policy, now))
        self._metrics.set_spend(partial(spend_uses, state, self._policy, now))
        as_of = TrackedInstant.of(now)
        planned = self._accepted(await self.compute(checked_plan, state, self._policy, as_of), now)
        is_news = self._is_news(planned, state, as_of)
        again_seconds = replan_seconds(planned, _TICK_SECONDS)
        if not is_news:
            return self._without_plan(state, as_of, again_seconds)
        made = self._plan_made(await self.compute(grouped, planned, state), cut)
        if planned.brake is not None and planned.brake != state.brake:
            log.error("brake tripped", why=planned.brake.sentence(), step=planned.brake.remedy())
        return Outcome(
            facts=(made,),
            facts_if_too_large=(msgspec.structs.replace(made, plan=without_groups(made.plan)),),
            expected_last_sequence=planned.parent_sequence,
            folded_sequence=dict(cut.last_sequences).get(ScalingPlanMade.stream(), 0),
            next_tick_seconds=again_seconds,
            # The sample of this minute is due with the next tick.
            next_change_at=None if sample_due(state, self._policy, as_of) else as_of.next_change_at,
        )

    def _without_plan(self, state: ClusterState, as_of: TrackedInstant, again_seconds: float | None) -> Outcome:
        """Return what a tick publishes without a new plan."""
        facts = sample_due(state, self._policy, as_of)
        if not facts and again_seconds is None:
            self._rest = _Rest(state, self._file, as_of.next_change_at)
        return Outcome(facts=tuple(facts), next_tick_seconds=again_seconds, next_change_at=as_of.next_change_at)

    def _accepted(self, checked: CheckedPlan, now: datetime) -> Plan:
        """Return the accepted plan; report what was refused. Raises TransientError if nothing may be published."""
        if checked.violations:
            self._metrics.count_refused_plan()
            log.error(
                "plan refused",
                violations_count=len(checked.violations),
                violations=checked.violations[:VIOLATIONS_LOGGED_MAX],
                as_of=now.isoformat(),
                step="report it; what is named is set aside, the rest of the plan is published",
            )
        if checked.plan is None:
            first = checked.violations[0]
            raise TransientError(f"the plan check refused the whole plan: {first}; the next tick plans again")
        return checked.plan

    def _unpublished_change(self, state: ClusterState, now: datetime) -> PolicyChanged | None:
        """Return the policy change that the stream does not have yet. No plan is made in the same tick."""
        published = state.policy_changed
        if self._change is None or (published is not None and published.policy_digest == self._change.policy_digest):
            self._change = None
            return None
        self._change = msgspec.structs.replace(self._change, changed_at=now)
        return self._change

    def _is_news(self, planned: Plan, state: ClusterState, as_of: datetime) -> bool:
        """Return False if the plan decides nothing and defers the same as its parent for the same reason tags.

        The values of a reason (seconds idle) change with every tick and are no news. If the parent has not moved, the
        stream did not store the last plan: it is published again. A plan a day is always news, so that the stream
        never discards the parent of the next one; while the brake holds, one every ten minutes, since it is the memory
        of the trip.
        """
        upkeep = [deferral for act in planned.upkeep_deferred for deferral in act.each()]
        deferred = frozenset((item.step, item.subject, item.reason.tag()) for item in (*planned.deferred, *upkeep))
        last_parent, last_deferred = self._last_published
        is_unstored = last_parent == state.last_plan_sequence and bool(deferred)
        interval = PLAN_INTERVAL_MAX if planned.brake is None else BRAKED_PLAN_INTERVAL_MAX
        last_at = state.last_plan_at
        is_old = last_at is not None and has_lasted(last_at, interval.total_seconds(), as_of)
        is_changed = deferred != last_deferred or planned.brake != state.brake
        is_news = (
            bool(planned.decisions or planned.upkeep_decisions or planned.rejected)
            or is_changed
            or is_unstored
            or is_old
        )
        if is_news:
            self._last_published = (state.last_plan_sequence, deferred)
            note(as_of, as_of + interval)
        return is_news

    def _plan_made(self, planned: Plan, cut: Cut) -> ScalingPlanMade:
        digests = self._digests
        plan_id = derive_id(msgspec.json.encode(cut).hex(), planned.as_of.isoformat(), digests.policy, digests.core)
        return ScalingPlanMade(
            plan_id=PlanId(plan_id),
            plan=planned,
            cut=cut,
            policy_digest=digests.policy,
            core_digest=digests.core,
            service_version=package_version(),
        )

    # ---- executing

    async def on_fact(self, recorded: Recorded) -> Outputs:
        """Take the next step of a decision."""
        return await self._executor.step(recorded)

    # ---- the cloud's instances

    def living(self) -> Iterator[Fact]:
        """Yield what the state knows to be open: instances, notices, purchases, removals, directives, policies."""
        return living(self._view.state)

    def sources(self) -> Sequence[AsyncIterator[InstancesListed]]:
        """The cloud's list of our instances."""
        return [aiter(self._instances)]

    async def on_item(self, item: InstancesListed) -> Outputs:
        """Return each instance whose state is newer than the recorded one, with the launch of a late one; then the list
        of all.
        """
        known = self._view.state.instances
        facts: list[Fact] = []
        for instance in item.instances:
            version = INSTANCE_STATE_VERSION[instance.state]
            before = known.get(instance.provider_id)
            if before is not None and before.version >= version:
                continue
            facts.append(
                NodeInstanceObserved(
                    epoch=INSTANCE_EPOCH,
                    version=version,
                    provider_id=instance.provider_id,
                    action_id=instance.action_id,
                    state=instance.state,
                    instance_type=instance.instance_type,
                    zone=instance.zone,
                    capacity_type=instance.capacity_type,
                    price_micro_usd_per_hour=instance.price_micro_usd_per_hour,
                    launched_at=instance.launched_at,
                    terminated_at=instance.terminated_at,
                    is_reclaimed=is_reclaimed(self._view.state, instance.provider_id, instance.state),
                )
            )
            if (launched := late_launch(instance, self._view.state, item.listed_at)) is not None:
                facts.append(launched)
        return [*facts, self._instance_lists.fact(self._view.state, item)]
