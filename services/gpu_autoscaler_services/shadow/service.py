"""The shadow: plans as the scaler does, on the same facts, under another policy, and says where the two differ.

It has no executor and publishes one fact that nobody acts on.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import ClassVar

import msgspec
import structlog

from gpu_autoscaler.core.check import check
from gpu_autoscaler.core.differences import differences
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.events.catalogue import FACTS
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.gpu import GpuNodeSummarised
from gpu_autoscaler.events.job import JobCancelRequested, JobFinished, JobPreempted, JobQueued
from gpu_autoscaler.events.node import NodeGone
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.events.scaling import ScalingLaunchRefused
from gpu_autoscaler.events.shadow import ShadowPlanMade
from gpu_autoscaler.events.spot import SpotNoticeReceived, SpotNoticeWithdrawn
from gpu_autoscaler.model.decisions import Difference
from gpu_autoscaler.model.ids import PlanId, derive_id
from gpu_autoscaler.runtime.metrics import package_version
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outcome, Outputs

_FOLDED_DOMAINS = frozenset({"pod", "node", "spot", "job", "scaling"})  # what the scaler folds

log = structlog.get_logger()


class Digests(msgspec.Struct, frozen=True, kw_only=True):
    """Which policies and which code plans are made with (`runtime/digests.py`)."""

    shadow: str
    real: str
    core: str


_Said = tuple[str, str, frozenset[tuple[str, str]]]  # digests of both policies; subject and kind of each difference


class Shadow:
    """Plans twice at each tick, under the policy in force and under the other, and says where they differ by now."""

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
        JobFinished,
        PodObserved,
        NodeGone,
        SpotNoticeReceived,
        SpotNoticeWithdrawn,
        ScalingLaunchRefused,
    )
    tick_seconds: ClassVar[float | None] = 5.0

    def __init__(self, view: StateView, real: ScalingPolicy, shadow: ScalingPolicy, digests: Digests) -> None:
        """`real`: the policy in force, which is the scaler's while both are given the same file."""
        self._view = view
        self._real = real
        self._shadow = shadow
        self._digests = digests
        self._last_sequence = 0
        self._said: _Said | None = None

    def on_folded(self, recorded: Sequence[Recorded]) -> None:
        """Remember the last plan of the shadow's own chain, whoever of its replicas made it."""
        for each in recorded:
            if isinstance(each.fact, ShadowPlanMade):
                self._last_sequence = each.sequence
                self._said = _saying(each.fact.policy_digest, each.fact.real_policy_digest, each.fact.differences)

    async def on_tick(self, now: datetime) -> Outputs:
        """Return the shadow's plan where it differs otherwise than the last one did; nothing while that stays so."""
        state, cut, digests = self._view.state, self._view.cut, self._digests
        other = plan(state, self._shadow, now)
        if mistakes := check(other, state, self._shadow):
            log.error("shadow plan refused by the second opinion, it is not said", mistakes=mistakes, as_of=str(now))
            return ()
        found = tuple(one for one in differences(plan(state, self._real, now), other, state) if one.is_decision)
        if _saying(digests.shadow, digests.real, found) == self._said:
            return ()
        made = ShadowPlanMade(
            plan_id=PlanId(derive_id("shadow", msgspec.json.encode(cut).hex(), now.isoformat(), digests.shadow)),
            parent_sequence=self._last_sequence,
            plan=other,
            cut=cut,
            policy_digest=digests.shadow,
            real_policy_digest=digests.real,
            core_digest=digests.core,
            differences=found,
            service_version=package_version(),
        )
        return Outcome(facts=(made,), expected_last_sequence=self._last_sequence)


def _saying(shadow: str, real: str, found: Sequence[Difference]) -> _Said:
    return shadow, real, frozenset((one.subject, one.kind) for one in found)
