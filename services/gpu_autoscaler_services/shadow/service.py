"""The shadow: plans on the scaler's facts under another policy and publishes the differences.

It has no executor; no service acts on its facts.
"""

from collections import deque
from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timedelta
from typing import ClassVar

import msgspec
import structlog

from gpu_autoscaler.core.checked_plan import checked_plan
from gpu_autoscaler.core.deferred_groups import grouped, without_groups
from gpu_autoscaler.core.explain.differences import differences
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.documents import effective_policy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.catalog import STATE_FACTS
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.gpu import GpuNodeSummarized
from gpu_autoscaler.events.job import JobCancelRequested, JobFinished, JobPreempted, JobQueued
from gpu_autoscaler.events.node import NodeGone
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.events.policy import PolicyDocumentsAccepted
from gpu_autoscaler.events.scaling import ScalingLaunchRefused, ScalingPlanMade
from gpu_autoscaler.events.shadow import ShadowPlanMade
from gpu_autoscaler.events.spot import SpotNoticeReceived, SpotNoticeWithdrawn
from gpu_autoscaler.model.decisions import Cut, Difference, Plan
from gpu_autoscaler.model.ids import PlanId, derive_id
from gpu_autoscaler.runtime.compute import Compute, compute_here
from gpu_autoscaler.runtime.digests import policy_digest
from gpu_autoscaler.runtime.metrics import package_version
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outcome, Outputs
from gpu_autoscaler_services.shadow.recent import RecentStates

# Older real plans, which a start reads, are not compared; `replay` does that.
REAL_PLAN_AGE_MAX = timedelta(seconds=120)
REAL_PLANS_COUNT_MAX = 64
# Of a plan that is too large for the broker with all of them. `replay --policy` shows the others.
DIFFERENCES_IF_TOO_LARGE_MAX = 1_000

log = structlog.get_logger()


class Digests(msgspec.Struct, frozen=True, kw_only=True):
    """Digests of the policies and of the code that make plans (`runtime/digests.py`)."""

    shadow: str
    real: str
    core: str


# Digests of both policies; subject and kind of each difference.
_Signature = tuple[str, str, frozenset[tuple[str, str]]]


class _RealPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan under the real policy, with the state that it was made from."""

    state: ClusterState
    cut: Cut
    real: Plan
    real_plan_id: PlanId | None = None


class Shadow:
    """Compares each real plan that decides something, and each tick, with a plan under the shadow policy."""

    name: ClassVar[str] = "shadow"
    consumes: ClassVar[tuple[type[Fact], ...]] = ()
    folds: ClassVar[tuple[type[Fact], ...]] = (
        *STATE_FACTS,
        GpuNodeSummarized,
        ShadowPlanMade,  # its own chain
    )
    publishes: ClassVar[tuple[type[Fact], ...]] = (ShadowPlanMade,)
    urgent: ClassVar[tuple[type[Fact], ...]] = (  # like the scaler's
        JobQueued,
        JobPreempted,
        JobCancelRequested,
        DemandReported,
        JobFinished,
        PodObserved,
        NodeGone,
        SpotNoticeReceived,
        SpotNoticeWithdrawn,
        ScalingLaunchRefused,
        ScalingPlanMade,  # to be compared
        ShadowPlanMade,  # the next one waits until the last is stored
    )
    tick_seconds: ClassVar[float | None] = 5.0
    remembers: ClassVar[tuple[type[Fact], ...]] = (ShadowPlanMade,)  # its own chain is no part of the state

    def __init__(self, view: StateView, real: ScalingPolicy, shadow: ScalingPolicy, digests: Digests) -> None:
        """`real`: the active policy; it is the scaler's as long as both read the same file."""
        self._view = view
        self._real = real
        self._shadow = shadow
        self._digests = digests
        self._recent = RecentStates(view)
        self._real_plans: deque[ScalingPlanMade] = deque(maxlen=REAL_PLANS_COUNT_MAX)
        self._last_sequence = 0
        self._published: _Signature | None = None
        self.compute: Compute = compute_here  # makes the plans; a process has a thread for them

    def use_real(self, policy: ScalingPolicy) -> None:
        """Use this real policy from now on."""
        self._real = policy
        self._digests = msgspec.structs.replace(self._digests, real=policy_digest(policy))

    def use_shadow(self, policy: ScalingPolicy) -> None:
        """Use this shadow policy from now on."""
        self._shadow = policy
        self._digests = msgspec.structs.replace(self._digests, shadow=policy_digest(policy))

    def on_folded(self, recorded: Sequence[Recorded]) -> None:
        """Remember real plans, and the last plan of the shadow's chain, whichever replica made it."""
        self._recent.folded(recorded)
        for item in recorded:
            if isinstance(item.fact, ScalingPlanMade) and item.fact.plan.decisions:
                self._real_plans.append(item.fact)
            elif isinstance(item.fact, ShadowPlanMade):
                self._last_sequence = item.sequence
                self._published = _signature(
                    item.fact.policy_digest, item.fact.real_policy_digest, item.fact.differences
                )

    async def on_tick(self, now: datetime) -> Outputs:
        """Return the shadow's plan if its differences are not those of its last published plan."""
        async for real in self._real_plans_to_compare(now):
            if (fact := await self._compare(real)) is not None:
                return Outcome(
                    facts=(fact,),
                    facts_if_too_large=(_shortened(fact),),
                    expected_last_sequence=self._last_sequence,
                    folded_sequence=self._view.last_sequence(fact.stream()),
                )
        return ()

    async def _real_plans_to_compare(self, now: datetime) -> AsyncIterator[_RealPlan]:
        """Yield the real plans that arrived, in order, then a plan of this instant."""
        while self._real_plans:
            made = self._real_plans[0]
            is_late = made.plan.as_of < now - REAL_PLAN_AGE_MAX
            if not is_late and not self._recent.has(made.cut):
                return  # facts of its cut have not arrived yet
            self._real_plans.popleft()
            state = None if is_late else self._recent.at(made.cut)
            if state is not None:
                yield _RealPlan(state=state, cut=made.cut, real=made.plan, real_plan_id=made.plan_id)
        state, cut = self._view.state, self._view.cut
        policy = effective_policy(self._real, state.policy_documents)
        yield _RealPlan(state=state, cut=cut, real=await self.compute(plan, state, policy, now))

    async def _compare(self, real_plan: _RealPlan) -> ShadowPlanMade | None:
        """Return the shadow's plan for the same state; None if its differences are published already."""
        as_of, documents = real_plan.real.as_of, real_plan.state.policy_documents
        shadow = effective_policy(self._shadow, documents)
        digests, parent_sequence = self._digests_under(documents), self._last_sequence
        checked = await self.compute(checked_plan, real_plan.state, shadow, as_of)
        if checked.violations:
            log.error("shadow plan refused", violations=checked.violations[:3], as_of=str(as_of), step="report it")
        if (other := checked.plan) is None:
            return None
        differing = differences(real_plan.real, other, real_plan.state)
        decided = tuple(difference for difference in differing if difference.is_decision)
        listed = (decided, decided[:DIFFERENCES_IF_TOO_LARGE_MAX])  # either may be what was stored
        if any(self._published == _signature(digests.shadow, digests.real, which) for which in listed):
            return None
        return ShadowPlanMade(
            plan_id=PlanId(
                derive_id("shadow", msgspec.json.encode(real_plan.cut).hex(), as_of.isoformat(), digests.shadow)
            ),
            parent_sequence=parent_sequence,
            plan=grouped(other, real_plan.state),
            cut=real_plan.cut,
            policy_digest=digests.shadow,
            real_policy_digest=digests.real,
            core_digest=digests.core,
            real_plan_id=real_plan.real_plan_id,
            differences=decided,
            service_version=package_version(),
        )

    def _digests_under(self, documents: PolicyDocumentsAccepted | None) -> Digests:
        """Return the digests of both policy files, each merged with the documents."""
        if documents is None or not documents.documents:
            return self._digests
        merged = (effective_policy(policy, documents) for policy in (self._shadow, self._real))
        shadow, real = (policy_digest(policy) for policy in merged)
        return Digests(shadow=shadow, real=real, core=self._digests.core)


def _shortened(fact: ShadowPlanMade) -> ShadowPlanMade:
    """Return the fact for a broker that refuses it as too large: fewer differences, what is deferred as numbers."""
    return msgspec.structs.replace(
        fact, plan=without_groups(fact.plan), differences=fact.differences[:DIFFERENCES_IF_TOO_LARGE_MAX]
    )


def _signature(shadow: str, real: str, differing: Sequence[Difference]) -> _Signature:
    return shadow, real, frozenset((difference.subject, difference.kind) for difference in differing)
