"""The shadow: plans as the scaler does, on the same facts, under another policy, and says where the two differ.

It has no executor and publishes one fact that nobody acts on.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import ClassVar

import msgspec
import structlog

from gpu_autoscaler.core.check import check
from gpu_autoscaler.core.differences import differences
from gpu_autoscaler.core.documents import effective_policy
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.events.catalogue import FACTS
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.gpu import GpuNodeSummarised
from gpu_autoscaler.events.job import JobCancelRequested, JobFinished, JobPreempted, JobQueued
from gpu_autoscaler.events.node import NodeGone
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.events.policy import PolicyDocumentsAccepted
from gpu_autoscaler.events.scaling import ScalingLaunchRefused, ScalingPlanMade
from gpu_autoscaler.events.shadow import ShadowPlanMade
from gpu_autoscaler.events.spot import SpotNoticeReceived, SpotNoticeWithdrawn
from gpu_autoscaler.model.decisions import Cut, Difference, Plan
from gpu_autoscaler.model.ids import PlanId, derive_id
from gpu_autoscaler.runtime.digests import policy_digest
from gpu_autoscaler.runtime.metrics import package_version
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outcome, Outputs
from gpu_autoscaler_services.shadow.recent import Recent

# A real plan that is older is history (a start reads all of it), and `replay` tells of that.
REAL_PLAN_AGE_MAX = timedelta(seconds=120)
REAL_PLANS_COUNT_MAX = 64
_FOLDED_DOMAINS = frozenset(
    {"pod", "node", "spot", "job", "demand", "policy", "scaling", "cost"}
)  # what the scaler folds

log = structlog.get_logger()


class Digests(msgspec.Struct, frozen=True, kw_only=True):
    """Which policies and which code plans are made with (`runtime/digests.py`)."""

    shadow: str
    real: str
    core: str


_Said = tuple[str, str, frozenset[tuple[str, str]]]  # digests of both policies; subject and kind of each difference


class _Moment(msgspec.Struct, frozen=True, kw_only=True):
    """One state and one instant, and what the real policy makes of it."""

    state: ClusterState
    cut: Cut
    real: Plan
    real_plan_id: PlanId | None = None


class Shadow:
    """Plans beside each real plan that decides something, and at each tick, and says where the two policies differ."""

    name: ClassVar[str] = "shadow"
    consumes: ClassVar[tuple[type[Fact], ...]] = ()
    folds: ClassVar[tuple[type[Fact], ...]] = (
        *(fact for fact in FACTS if fact.domain() in _FOLDED_DOMAINS),
        GpuNodeSummarised,
        ShadowPlanMade,  # its own, for the chain
    )
    publishes: ClassVar[tuple[type[Fact], ...]] = (ShadowPlanMade,)
    urgent: ClassVar[tuple[type[Fact], ...]] = (  # as the scaler's
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
        ScalingPlanMade,  # to stand beside it
        ShadowPlanMade,  # what else is to be said waits for the last one to be stored
    )
    tick_seconds: ClassVar[float | None] = 5.0
    starts_from_snapshot: ClassVar[bool] = False  # its own chain is no part of the state

    def __init__(self, view: StateView, real: ScalingPolicy, shadow: ScalingPolicy, digests: Digests) -> None:
        """`real`: the policy in force, which is the scaler's while both are given the same file."""
        self._view = view
        self._real = real
        self._shadow = shadow
        self._digests = digests
        self._recent = Recent(view)
        self._real_plans: deque[ScalingPlanMade] = deque(maxlen=REAL_PLANS_COUNT_MAX)
        self._last_sequence = 0
        self._said: _Said | None = None

    def use_real(self, policy: ScalingPolicy) -> None:
        """Compare with this policy from now on."""
        self._real = policy
        self._digests = msgspec.structs.replace(self._digests, real=policy_digest(policy))

    def use_shadow(self, policy: ScalingPolicy) -> None:
        """Ask this policy from now on."""
        self._shadow = policy
        self._digests = msgspec.structs.replace(self._digests, shadow=policy_digest(policy))

    def on_folded(self, recorded: Sequence[Recorded]) -> None:
        """Remember real plans, and the last one of the shadow's own chain, whoever of its replicas made it."""
        self._recent.folded(recorded)
        for each in recorded:
            if isinstance(each.fact, ScalingPlanMade) and each.fact.plan.decisions:
                self._real_plans.append(each.fact)
            elif isinstance(each.fact, ShadowPlanMade):
                self._last_sequence = each.sequence
                self._said = _saying(each.fact.policy_digest, each.fact.real_policy_digest, each.fact.differences)

    async def on_tick(self, now: datetime) -> Outputs:
        """Return the shadow's plan where it differs otherwise than the last one did; nothing while that stays so."""
        for moment in self._moments(now):
            fact = self._beside(moment)
            if fact is not None:
                return Outcome(facts=(fact,), expected_last_sequence=self._last_sequence)
        return ()

    def _moments(self, now: datetime) -> Iterator[_Moment]:
        """The real plans that have come, in their order, then this instant."""
        while self._real_plans:
            made = self._real_plans[0]
            is_late = made.plan.as_of < now - REAL_PLAN_AGE_MAX
            if not is_late and not self._recent.has(made.cut):
                return  # what it knew is still on its way here
            self._real_plans.popleft()
            state = None if is_late else self._recent.at(made.cut)
            if state is not None:
                yield _Moment(state=state, cut=made.cut, real=made.plan, real_plan_id=made.plan_id)
        state = self._view.state
        real = effective_policy(self._real, state.policy_documents)
        yield _Moment(state=state, cut=self._view.cut, real=plan(state, real, now))

    def _beside(self, moment: _Moment) -> ShadowPlanMade | None:
        """What the shadow would do at this moment; None where that is no news."""
        as_of, documents = moment.real.as_of, moment.state.policy_documents
        shadow = effective_policy(self._shadow, documents)
        digests = self._digests_under(documents)
        other = plan(moment.state, shadow, as_of)
        if mistakes := check(other, moment.state, shadow):
            log.error("shadow plan refused by the second opinion, it is not said", mistakes=mistakes, as_of=str(as_of))
            return None
        found = tuple(one for one in differences(moment.real, other, moment.state) if one.is_decision)
        if _saying(digests.shadow, digests.real, found) == self._said:
            return None
        return ShadowPlanMade(
            plan_id=PlanId(
                derive_id("shadow", msgspec.json.encode(moment.cut).hex(), as_of.isoformat(), digests.shadow)
            ),
            parent_sequence=self._last_sequence,
            plan=other,
            cut=moment.cut,
            policy_digest=digests.shadow,
            real_policy_digest=digests.real,
            core_digest=digests.core,
            real_plan_id=moment.real_plan_id,
            differences=found,
            service_version=package_version(),
        )

    def _digests_under(self, documents: PolicyDocumentsAccepted | None) -> Digests:
        """Those of what both files amount to with the documents."""
        if documents is None or not documents.documents:
            return self._digests
        merged = (effective_policy(each, documents) for each in (self._shadow, self._real))
        shadow, real = (policy_digest(each) for each in merged)
        return Digests(shadow=shadow, real=real, core=self._digests.core)


def _saying(shadow: str, real: str, found: Sequence[Difference]) -> _Said:
    return shadow, real, frozenset((one.subject, one.kind) for one in found)
