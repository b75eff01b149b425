"""A plan that the plan check accepts, whatever the planner does: what it refuses is set aside, the rest is decided.

Pure as `plan` is: with the same state, policy and `as_of` a recorded plan is made again byte for byte.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime

import msgspec

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.check.violation import Violation
from gpu_autoscaler.core.deferred_groups import like_recorded
from gpu_autoscaler.core.draft import is_discretionary
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.rejections import REJECTIONS_COUNT_MAX, next_rejection
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.decisions import (
    FORCED,
    AnyDecision,
    AnyUpkeep,
    Deferred,
    DeferredUpkeep,
    DrainNode,
    Plan,
    Rejection,
    Upkeep,
    rejection_subjects,
)
from gpu_autoscaler.model.reasons.defer import PlanRejected

ROUNDS_COUNT_MAX = 4  # plans made before only what the cloud forces is kept
VIOLATION_LENGTH_MAX = 300  # of its sentence in a plan
_STEP = "plan_check"


class CheckedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that the plan check accepts; what it refused on the way."""

    plan: Plan | None  # None: not even the drains that the cloud forces pass; nothing may be published
    violations: tuple[str, ...] = ()  # of all rounds; empty: the first plan was accepted


def checked_plan(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> CheckedPlan:
    """Return the plan; where the check refuses something, plan again without it.

    A violation that cannot be attributed, or the end of the rounds, leaves only the drains that the cloud forces.
    """
    rejected: dict[str, PlanRejected] = {}
    rejections: list[Rejection] = []
    violations: list[Violation] = []
    made = plan(state, policy, as_of)
    for _ in range(ROUNDS_COUNT_MAX):
        refused = check(made, state, policy)
        violations += refused
        if not refused:
            return CheckedPlan(plan=_with_rejections(made, rejections), violations=tuple(violations))
        before = len(rejected)
        for violation in refused:
            _reject(violation, made, state, rejected, rejections)
        if len(rejected) == before or len(rejected) > REJECTIONS_COUNT_MAX:
            break
        made = plan(state, policy, as_of, rejected)
    forced = _forced_part(made, state, policy, violations, rejected)
    return CheckedPlan(
        plan=None if forced is None else _with_rejections(forced, rejections), violations=tuple(violations)
    )


def recomputed_plan(recorded: Plan, state: ClusterState, policy: ScalingPolicy) -> Plan:
    """Return the plan that this code makes where the recorded one was made, in the form in which it was published.

    The check runs only if they differ.
    """
    made = plan(state, policy, recorded.as_of)
    published = like_recorded(made, recorded, state)
    if published == recorded:
        return published
    return like_recorded(checked_plan(state, policy, recorded.as_of).plan or made, recorded, state)


def _reject(
    violation: Violation,
    made: Plan,
    state: ClusterState,
    rejected: dict[str, PlanRejected],
    rejections: list[Rejection],
) -> None:
    """Set aside what the violation names: until the end of its back-off, or for this plan if the cloud forces it."""
    sentence = violation[:VIOLATION_LENGTH_MAX]
    lasting: dict[str, list[str]] = {}  # by the time of the next attempt
    reasons: dict[str, PlanRejected] = {}
    for subject in _subjects(violation, (*made.decisions, *made.upkeep_decisions)):
        if subject in rejected:
            continue
        reason = next_rejection(state, subject, sentence, made.as_of)
        rejected[subject] = reason
        if not subject.startswith(FORCED):
            lasting.setdefault(reason.retry_at.isoformat(), []).append(subject)
            reasons[reason.retry_at.isoformat()] = reason
    if len(rejected) <= REJECTIONS_COUNT_MAX:
        rejections += [
            Rejection(violation=sentence, subjects=tuple(subjects), retry_at=reasons[at].retry_at)
            for at, subjects in lasting.items()
        ]


def _subjects(violation: Violation, decisions: Iterable[AnyDecision | AnyUpkeep]) -> tuple[str, ...]:
    """Return what the violation names, each once, in the order of the plan."""
    subjects: dict[str, None] = dict.fromkeys(violation.demand)
    for decision in decisions:
        if decision.action_id in violation.action_ids:
            prefix = FORCED if _is_forced(decision) else ""
            subjects.update(dict.fromkeys(prefix + subject for subject in rejection_subjects(decision)))
    return tuple(subjects)


def _is_forced(decision: AnyDecision | AnyUpkeep) -> bool:
    return isinstance(decision, DrainNode) and not is_discretionary(decision)


def _forced_part(
    made: Plan,
    state: ClusterState,
    policy: ScalingPolicy,
    violations: list[Violation],
    rejected: Mapping[str, PlanRejected],
) -> Plan | None:
    """Return only the drains that the cloud forces, with everything else deferred; None if even these are refused."""
    known = next((violation for violation in violations if not violation.is_attributed), violations[-1])
    reason = next_rejection(state, "", known[:VIOLATION_LENGTH_MAX], made.as_of)
    drains = tuple(decision for decision in made.decisions if _is_forced(decision))
    dropped = (decision for decision in made.decisions if not _is_forced(decision))
    subjects = dict.fromkeys(subject for decision in dropped for subject in rejection_subjects(decision))
    accounted = {deferral.subject for deferral in made.deferred}
    deferred = [
        *made.deferred,
        *(
            Deferred(step=_STEP, subject=subject, reason=rejected.get(subject, reason))
            for subject in subjects
            if subject not in accounted
        ),
    ]
    upkeep = _deferred_upkeep(made, rejected, reason)
    for _ in range(ROUNDS_COUNT_MAX):
        kept = msgspec.structs.replace(made, decisions=drains, deferred=tuple(deferred), upkeep=upkeep)
        refused = check(kept, state, policy)
        violations += refused
        causes = frozenset[str]().union(*(violation.action_ids for violation in refused))
        drains = tuple(drain for drain in drains if drain.action_id not in causes)
        if not causes:
            return kept  # what is left names no drain: something is missing in the plan, and no drain makes it worse
    return None


def _deferred_upkeep(made: Plan, rejected: Mapping[str, PlanRejected], reason: PlanRejected) -> Upkeep:
    """Return the upkeep of the plan with every act deferred."""
    dropped = (
        DeferredUpkeep(
            decision=decision.tag(),
            reason=rejected.get(decision.key, reason),
            objects_count=1,
            subjects=(decision.subject,),
        )
        for decision in made.upkeep_decisions
    )
    return Upkeep(deferred=(*made.upkeep_deferred, *dropped))


def _with_rejections(made: Plan, rejections: list[Rejection]) -> Plan:
    return msgspec.structs.replace(made, rejected=tuple(rejections)) if rejections else made
