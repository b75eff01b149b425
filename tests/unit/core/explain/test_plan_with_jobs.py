"""What the next plan would decide about further jobs equals what it decides once they are queued."""

from tests.support.stories import HOUR, MINUTE, T0, given, job, node, offer, on_sale, policy

from gpu_autoscaler.core.checked_plan import checked_plan
from gpu_autoscaler.core.explain.plan_with_jobs import PlanWithJobs, plan_with_jobs
from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY, ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.job import JobQueued
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec

AS_OF = T0 + HOUR


def _spec(job_id: str, **changes: object) -> JobSpec:
    facts = (each.fact for each in job(job_id, at=AS_OF, **changes))  # type: ignore[arg-type]
    return next(fact.spec for fact in facts if isinstance(fact, JobQueued))


def _asked(state: ClusterState, *specs: JobSpec, under: ScalingPolicy = DEFAULT_POLICY) -> PlanWithJobs:
    made = plan_with_jobs(state, under, AS_OF, specs)
    assert made is not None
    return made


def test_purchases_are_those_of_the_plan_with_the_jobs() -> None:
    """The same offers for the same work, and nothing for the jobs that wait already."""
    stories = (on_sale(offer(gpus=8), at=T0), job("earlier", gpus=8, at=AS_OF - MINUTE))
    state, specs = given(*stories, as_of=AS_OF), (_spec("one", gpus=8), _spec("two", gpus=8, members=2))

    made = _asked(state, *specs)

    queued = given(*stories, job("one", gpus=8, at=AS_OF), job("two", gpus=8, members=2, at=AS_OF), as_of=AS_OF)
    plan = checked_plan(queued, DEFAULT_POLICY, AS_OF).plan
    assert plan is not None
    bought = plan.purchases
    assert len(bought) == 4
    assert [purchase.offer for purchase in made.purchases] == [
        purchase.offer for purchase in bought if "job/earlier" not in getattr(purchase.reason, "demand", ())
    ]
    assert [len(made.jobs[JobId(name)].purchases) for name in ("one", "two")] == [1, 2]
    assert JobId("one") not in state.jobs


def test_free_capacity_needs_no_purchase() -> None:
    """An idle node is large enough."""
    made = _asked(given(on_sale(at=T0), node("n1", at=T0), as_of=AS_OF), _spec("one", gpus=1))

    outcome = made.jobs[JobId("one")]
    assert (outcome.purchases, outcome.has_to_wait, made.purchases) == ((), False, ())
    assert "node n1" in outcome.sentences[0]


def test_a_node_that_the_job_keeps_is_another_difference() -> None:
    """Without the job the idle node is drained; with the job it stays."""
    state = given(on_sale(at=T0), node("n1", at=T0), as_of=AS_OF)

    (change,) = _asked(state, _spec("one", gpus=1)).others

    assert (change.name, change.made.what, change.other.what) == ("node/n1", "drain_node", "nothing")


def test_a_limit_is_named() -> None:
    """The job would wait, with the reason of the plan."""
    state = given(on_sale(offer(gpus=8), at=T0), as_of=AS_OF)

    outcome = _asked(state, _spec("one", gpus=8), under=policy(nodes_count_max=0)).jobs[JobId("one")]

    assert outcome.has_to_wait
    assert "0 nodes" in outcome.sentences[0], outcome.sentences
