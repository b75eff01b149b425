"""The scaler: folds everything, plans on each tick, has the plan checked, publishes it behind its fence."""

from collections.abc import AsyncIterable, AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import ClassVar, Protocol

import msgspec
import structlog

from gpu_autoscaler.core.buying.burst import planned_again_seconds
from gpu_autoscaler.core.check import check
from gpu_autoscaler.core.demand_levels import sample_due
from gpu_autoscaler.core.documents import policy_in_force
from gpu_autoscaler.core.foresight import Foresight, foresight
from gpu_autoscaler.core.idle_jobs import idle_jobs_cancelled
from gpu_autoscaler.core.interruptions import is_taken
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.removing.deleted import is_karpenters
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.events.catalogue import FACTS
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.gpu import GpuNodeSummarised
from gpu_autoscaler.events.job import JobCancelRequested, JobFinished, JobPreempted, JobQueued
from gpu_autoscaler.events.node import (
    INSTANCE_STATE_VERSION,
    NodeGone,
    NodeInstanceListed,
    NodeInstanceObserved,
    NodeObserved,
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
from gpu_autoscaler.model.ids import PlanId, derive_id
from gpu_autoscaler.runtime.digests import policy_digest
from gpu_autoscaler.runtime.following import differences
from gpu_autoscaler.runtime.lease import Lease
from gpu_autoscaler.runtime.metrics import package_version
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outcome, Outputs
from gpu_autoscaler_services.scaler.executor import Executor
from gpu_autoscaler_services.scaler.inventory import InstancesListed
from gpu_autoscaler_services.scaler.paid import ends_due
from gpu_autoscaler_services.scaler.past import Past

# An instance's life is the cloud's to count and never starts over, whatever becomes of the cluster.
INSTANCE_EPOCH = 0
_FOLDED_DOMAINS = frozenset({"pod", "node", "spot", "job", "demand", "policy", "scaling", "cost"})

_TICK_SECONDS = 5.0
NOT_YET = datetime.max.replace(tzinfo=UTC)

log = structlog.get_logger()


class Figures(Protocol):
    """What planning tells besides plans, e.g. to `runtime/metrics.py`."""

    def tell_plan_refused(self) -> None:
        """The second opinion refused a plan: count what must never happen."""
        ...

    def tell_foresight(self, foresight: Foresight) -> None:
        """What the forecast says now."""
        ...


class Digests(msgspec.Struct, frozen=True, kw_only=True):
    """Which policy and which code plans are made with (`runtime/digests.py`)."""

    policy: str
    core: str


class Scaler:
    """Plans and executes. Of two of it one plan is refused by the stream; every step of execution bears repeating."""

    name: ClassVar[str] = "scaler"
    consumes: ClassVar[tuple[type[Fact], ...]] = (
        ScalingPlanMade,
        ScalingDecisionsRestored,
        ScalingNodeOrdered,
        ScalingDrainStarted,
        ScalingNodeDrained,
    )
    folds: ClassVar[tuple[type[Fact], ...]] = (
        *(fact for fact in FACTS if fact.domain() in _FOLDED_DOMAINS),
        GpuNodeSummarised,
    )
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
        SpotNoticeReceived,  # that a paid period is nearly over
    )
    urgent: ClassVar[tuple[type[Fact], ...]] = (
        JobQueued,
        JobPreempted,
        JobCancelRequested,
        DemandReported,
        PolicyDirectiveGiven,
        PolicyDirectiveLifted,
        PolicyChanged,  # what waited for it is planned now
        PolicyDocumentsAccepted,
        JobFinished,
        PodObserved,  # one that is unschedulable; see `is_urgent`
        NodeObserved,  # one that Karpenter ends
        NodeGone,
        SpotNoticeReceived,
        SpotNoticeWithdrawn,
        ScalingLaunchRefused,
    )
    tick_seconds: ClassVar[float | None] = _TICK_SECONDS
    starts_from_snapshot: ClassVar[bool] = True
    handles_at_once: ClassVar[int] = 16  # a slow launch never keeps a drain from its deadline

    def __init__(
        self,
        view: StateView,
        policy: ScalingPolicy,
        executor: Executor,
        past: Past,
        instances: AsyncIterable[InstancesListed],
        *,
        digests: Digests,
        figures: Figures,
        lease: Lease | None = None,
    ) -> None:
        """`instances` is `scaler/inventory.py: InstanceWatch` of the same provider as the executor's."""
        self._view = view
        self._policy = self._file = policy
        self._file_path = ""
        self._executor = executor
        self._past = past
        self.lease = lease  # without one all scalers are active, and the fence alone decides
        self._instances = instances
        self._digests = digests
        self._figures = figures
        self._change: PolicyChanged | None = None  # to be said until the stream has it
        self._last_said: tuple[int, frozenset[tuple[str, str, str]]] = (-1, frozenset())  # parent, what was held back

    def is_urgent(self, fact: Fact) -> bool:
        """True for what is declared, but of pods only for those that wait for room, and of nodes only for those that
        Karpenter ends: the others come all the time. Pods there have their own grace alone to save in, and are evicted
        at once."""
        match fact:
            case PodObserved():
                return fact.unschedulable_since is not None and fact.node_name is None
            case NodeObserved():
                return fact.deleting_since is not None and is_karpenters(fact)
            case _:
                return True

    def use_policy(self, policy: ScalingPolicy, path: str) -> None:
        """Decide by this policy from the next tick on, and say so; `path` is that of the file."""
        self._file, self._file_path = policy, path

    def _merge(self, state: ClusterState) -> None:
        """Take up what file and documents amount to now, and what is to be said of the change."""
        accepted = state.policy_documents
        policy = policy_in_force(self._file, accepted)
        if policy is self._policy:
            return
        before, self._policy = self._policy, policy
        self._past.use_policy(policy)
        digest = policy_digest(policy)
        if digest == self._digests.policy:
            return
        documents = () if accepted is None else accepted.documents
        names = [self._file_path, *(f"autoscalingpolicy/{each.name}" for each in documents)]
        self._change = PolicyChanged(
            policy_digest=digest,
            before_digest=self._digests.policy,
            changed_at=NOT_YET,
            differences=differences(before, policy),
            path=", ".join(name for name in names if name),
        )
        self._digests = Digests(policy=digest, core=self._digests.core)

    # ---- planning

    async def on_tick(self, now: datetime) -> Outputs:
        """Return the plan of this instant, fenced by its parent; nothing where it adds nothing to the last one."""
        self._merge(self._view.state)
        if (first := await self._past.before_first_plan(self._view.state, now)) is not None:
            return first
        state, cut = self._view.state, self._view.cut
        if (change := self._change_to_say(state, now)) is not None:
            return (change,)
        self._figures.tell_foresight(foresight(state, self._policy, now))
        made = plan(state, self._policy, now)
        if mistakes := check(made, state, self._policy):
            self._figures.tell_plan_refused()
            log.error("plan refused by the second opinion, nothing is done", mistakes=mistakes, as_of=now.isoformat())
            return ()
        is_news = self._is_news(made, state)
        # A plan that says something does not wait for calls to Kubernetes, but for those that have waited for long.
        await self._executor.guards.keep(state, self._policy, now, is_late_only=is_news)
        await self._executor.farewells.tell(state)
        again_seconds = planned_again_seconds(made, _TICK_SECONDS)
        if not is_news:
            removed = await self._executor.leftovers.remove(state, self._policy, now)
            facts = (*removed, *idle_jobs_cancelled(state, self._policy, now), *sample_due(state, self._policy, now))
            return facts if again_seconds is None else Outcome(facts=facts, next_tick_seconds=again_seconds)
        return Outcome(
            facts=(self._plan_made(made, cut),),
            expected_last_sequence=made.parent_sequence,
            next_tick_seconds=again_seconds,
        )

    def _change_to_say(self, state: ClusterState, now: datetime) -> PolicyChanged | None:
        """The change of policy that the stream does not have yet. The tick that says it makes no plan."""
        said = state.policy_changed
        if self._change is None or (said is not None and said.policy_digest == self._change.policy_digest):
            self._change = None
            return None
        self._change = msgspec.structs.replace(self._change, changed_at=now)
        return self._change

    def _is_news(self, made: Plan, state: ClusterState) -> bool:
        """True unless the plan decides nothing and holds back the same as its parent, for the same kinds of reason.

        How long a node has been idle changes with every tick; that it is not idle for long enough is said once. A
        parent that has not moved means that the stream never took what was said: it is said again.
        """
        held = frozenset((one.step, one.subject, one.reason.tag()) for one in made.held_back)
        said_after, said = self._last_said
        is_news = bool(made.decisions) or held != said or (said_after == state.last_plan_sequence and bool(held))
        if is_news:
            self._last_said = (state.last_plan_sequence, held)
        return is_news

    def _plan_made(self, made: Plan, cut: Cut) -> ScalingPlanMade:
        digests = self._digests
        plan_id = derive_id(msgspec.json.encode(cut).hex(), made.as_of.isoformat(), digests.policy, digests.core)
        return ScalingPlanMade(
            plan_id=PlanId(plan_id),
            plan=made,
            cut=cut,
            policy_digest=digests.policy,
            core_digest=digests.core,
            service_version=package_version(),
        )

    # ---- executing

    async def on_fact(self, recorded: Recorded) -> Outputs:
        """Take the next step of what was decided."""
        return await self._executor.step(recorded)

    # ---- seeing what the cloud has

    def sources(self) -> Sequence[AsyncIterator[InstancesListed]]:
        """The cloud's list of our instances."""
        return [aiter(self._instances)]

    async def on_item(self, item: InstancesListed) -> Outputs:
        """Return each instance whose state is further than what is known of it, then the list as a whole."""
        known = self._view.state.instances
        facts: list[Fact] = []
        for one in item.instances:
            version = INSTANCE_STATE_VERSION[one.state]
            before = known.get(one.provider_id)
            if before is not None and before.version >= version:
                continue
            facts.append(
                NodeInstanceObserved(
                    epoch=INSTANCE_EPOCH,
                    version=version,
                    provider_id=one.provider_id,
                    action_id=one.action_id,
                    state=one.state,
                    instance_type=one.instance_type,
                    zone=one.zone,
                    capacity_type=one.capacity_type,
                    price_micro_usd_per_hour=one.price_micro_usd_per_hour,
                    launched_at=one.launched_at,
                    terminated_at=one.terminated_at,
                    is_taken=is_taken(self._view.state, one.provider_id, one.state),
                )
            )
        uids = tuple(sorted(one.provider_id for one in item.instances))
        facts += ends_due(self._view.state, self._policy, item)
        return [*facts, NodeInstanceListed(provider_ids=uids, listed_at=item.listed_at)]
