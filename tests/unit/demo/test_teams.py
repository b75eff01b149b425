"""Figures and promises of teams that share quota, on records made for the purpose."""

from datetime import timedelta

import msgspec
import pytest
from tests.unit.demo.test_promises import WALL

from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.quota_settings import ProjectQuota, QuotasPolicy
from gpu_autoscaler.events import examples
from gpu_autoscaler.events.envelope import Envelope, Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobFinished, JobPlaced, JobPreempted, JobQueued
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import FactId, JobId
from gpu_autoscaler.model.reasons.preempt import QuotaReclaimed
from gpu_autoscaler_services.demo.record import Record, Seen
from gpu_autoscaler_services.demo.teams import broken_quotas, team_figures

POLICY = ScalingPolicy(
    quotas=QuotasPolicy(
        projects=(ProjectQuota(name="research", nominal_gpu_count=1), ProjectQuota(name="product", nominal_gpu_count=2))
    )
)
QUEUED = next(envelope.fact for envelope in examples.examples() if isinstance(envelope.fact, JobQueued))
POD = next(envelope.fact for envelope in examples.examples() if isinstance(envelope.fact, PodObserved))


def record_of(*facts: Fact) -> Record:
    """The facts, stored a second apart."""
    record = Record()
    for number, fact in enumerate(facts, 1):
        envelope = Envelope(id=FactId(str(number)), source="/t", time=WALL, fact=fact)
        recorded = Recorded(envelope=envelope, stream=fact.stream(), sequence=number)
        record.add(Seen(recorded=recorded, stored_at=WALL + timedelta(seconds=number)))
    return record


def queued(name: str, project: str, gpus: int) -> JobQueued:
    """A job of one member."""
    resources = msgspec.structs.replace(QUEUED.spec.member_resources, gpu_count=gpus)
    changes = {"job_id": JobId(name), "project_id": project, "member_count": 1, "member_resources": resources}
    spec = msgspec.structs.replace(QUEUED.spec, **changes)
    return JobQueued(job_id=JobId(name), spec=spec, queued_at=WALL)


def placed(name: str, hours: float) -> JobPlaced:
    """Its placement after some hours."""
    at = WALL + timedelta(hours=hours)
    return JobPlaced(job_id=JobId(name), attempt=1, retries_used_count=0, node_uids=(), node_names=(), placed_at=at)


def preempted(name: str, hours: float, *, retries: int = 0) -> JobPreempted:
    """Its end for `owned` after some hours."""
    reason = QuotaReclaimed(
        for_job=JobId("owned"), for_project="product", project="research", cohort="default",
        borrowed_gpu_count=1, nominal_gpu_count=2,
    )  # fmt: skip
    return JobPreempted(
        job_id=JobId(name), attempt=1, cause="c", preempted_at=WALL + timedelta(hours=hours),
        preemption=reason, is_own_choice=True, retries_used_count=retries,
    )  # fmt: skip


def saved(name: str, at: str, *, started_hours: float = 0.0) -> PodObserved:
    """Its pod with a save at that time; empty: it can save."""
    annotations, started_at = ((labels.CHECKPOINTED_AT, at),), WALL + timedelta(hours=started_hours)
    return msgspec.structs.replace(POD, job_id=JobId(name), annotations=annotations, started_at=started_at)


def finished(name: str, hours: float) -> JobFinished:
    """Its completion after some hours."""
    return JobFinished(job_id=JobId(name), outcome="completed", finished_at=WALL + timedelta(hours=hours))


def story(**changes: Fact | None) -> tuple[Fact, ...]:
    """Research borrows one GPU, product takes it back; `changes` replace a step, or leave it out."""
    steps: dict[str, Fact | None] = {
        "borrows": queued("borrows", "research", 2),
        "borrows_placed": placed("borrows", 0.0),
        "owned": queued("owned", "product", 2),
        "saved": saved("borrows", (WALL + timedelta(hours=1)).isoformat()),
        "preempted": preempted("borrows", 1.0),
        "owned_placed": placed("owned", 1.0),
        "owned_finished": finished("owned", 2.0),
        "again": placed("borrows", 2.0),
        "borrows_finished": finished("borrows", 3.0),
    }
    return tuple(fact for fact in (steps | changes).values() if fact is not None)


def test_figures_of_two_teams() -> None:
    """GPUs at most, GPU-hours of all attempts, what was borrowed and taken back, and refusals by team."""
    research, product = team_figures(record_of(*story()), POLICY, [("research", "quota-exceeded")])

    assert (research.used_gpu_count_max, research.borrowed_gpu_count_max, research.jobs_preempted) == (2, 1, 1)
    assert (product.used_gpu_count_max, product.borrowed_gpu_count_max, product.jobs_preempted) == (2, 0, 0)
    assert (research.gpu_hours, product.gpu_hours) == (4.0, 2.0)
    assert research.gpu_hours_ratio == pytest.approx(2 / 3, abs=0.001)
    assert (research.requests_refused, product.requests_refused) == (("quota-exceeded",), ())
    assert (research.jobs_completed, product.jobs_completed) == (1, 1)


def test_teams_without_jobs_have_no_figures() -> None:
    """A trace of other projects shows none."""
    assert team_figures(record_of(queued("a", "other", 8), placed("a", 0.0)), POLICY) == ()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, ""),
        ({"preempted": None}, "cohort default used 4 GPUs after the placement of owned, but has 3"),
        ({"saved": saved("borrows", "")}, "before it had saved"),
        ({"saved": saved("borrows", "", started_hours=0.995)}, ""),
        ({"preempted": preempted("borrows", 1.0, retries=1)}, "lost a retry"),
        ({"owned_placed": None}, "in vain: owned never started"),
        ({"borrows_finished": None}, "never completed"),
    ],
)
def test_each_broken_promise_of_quotas_is_found(changes: dict[str, Fact | None], sentence: str) -> None:
    """Borrowed quota returns after a save, uses no retry, and the job completes later."""
    broken = "\n".join(broken_quotas(record_of(*story(**changes)), POLICY))

    assert broken == "" if not sentence else sentence in broken
