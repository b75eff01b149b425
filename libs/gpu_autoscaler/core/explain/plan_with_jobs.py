"""What the next plan would decide if further jobs were queued now. Nothing is recorded or done."""

from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec

from gpu_autoscaler.core.checked_plan import checked_plan
from gpu_autoscaler.core.deferred_groups import ungrouped
from gpu_autoscaler.core.explain.differences import differences
from gpu_autoscaler.core.explain.names import decision_sentence, deferred_sentence, names_in_state
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.lineage import hand_on
from gpu_autoscaler.core.state.state import ClusterState, JobRecord
from gpu_autoscaler.events.job import JobQueued
from gpu_autoscaler.model.decisions import BuyNode, Difference, Plan
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.reasons.defer_waits import CapacityExpected


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan decides for one job. Without purchases, and if it need not wait, existing nodes take it."""

    purchases: tuple[BuyNode, ...]
    sentences: tuple[str, ...]  # why each is bought, what existing node takes the job, or why it has to wait
    has_to_wait: bool


class PlanWithJobs(msgspec.Struct, frozen=True, kw_only=True):
    """A plan with further jobs, compared with the plan without them."""

    jobs: Mapping[JobId, JobOutcome]
    purchases: tuple[BuyNode, ...]  # for any of the jobs, each once
    others: tuple[Difference, ...]  # what is decided differently about everything else


def plan_with_jobs(
    state: ClusterState, policy: ScalingPolicy, as_of: datetime, specs: Sequence[JobSpec]
) -> PlanWithJobs | None:
    """Return what the next plan decides with these jobs queued; None if the plan check accepts no plan now."""
    queued = {
        spec.job_id: JobRecord(queued=JobQueued(job_id=spec.job_id, spec=spec, queued_at=as_of)) for spec in specs
    }
    fuller = msgspec.structs.replace(state, jobs={**state.jobs, **queued})
    hand_on(state, fuller, {"jobs": frozenset(queued)})
    before, after = checked_plan(state, policy, as_of).plan, checked_plan(fuller, policy, as_of).plan
    if before is None or after is None:
        return None
    subjects = {f"job/{job_id}" for job_id in queued}
    decided = after.purchases
    return PlanWithJobs(
        jobs={job_id: _outcome(f"job/{job_id}", after, decided, fuller) for job_id in queued},
        purchases=tuple(decision for decision in decided if subjects & _served(decision)),
        others=tuple(change for change in differences(before, after, fuller) if change.subject not in subjects),
    )


def _served(decision: BuyNode) -> frozenset[str]:
    return frozenset(getattr(decision.reason, "demand", ()))


def _outcome(subject: str, plan: Plan, decided: Sequence[BuyNode], state: ClusterState) -> JobOutcome:
    name_of = names_in_state(state)
    purchases = tuple(decision for decision in decided if subject in _served(decision))
    deferred = () if purchases else tuple(entry for entry in ungrouped(plan, state) if entry.subject == subject)
    return JobOutcome(
        purchases=purchases,
        sentences=(
            *(decision_sentence(decision, name_of) for decision in purchases),
            *(deferred_sentence(entry, name_of) for entry in deferred),
        ),
        has_to_wait=any(not isinstance(entry.reason, CapacityExpected) for entry in deferred),
    )
