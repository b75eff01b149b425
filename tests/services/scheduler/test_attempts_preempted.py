"""Jobs that are preempted for others, at the scheduler's inputs: ended once they have saved, suspended."""

from collections.abc import Mapping
from datetime import datetime

from msgspec.structs import replace
from tests.services.scheduler.test_service import Bench, bench, gone
from tests.support.cluster import until
from tests.support.stories import HOUR, SECOND, T0, Story, TimedFact, given, job, node, pod, policy

from gpu_autoscaler.core.disruption.protection import request_annotations
from gpu_autoscaler.core.draft import save_key
from gpu_autoscaler.core.state.state import UpkeepRecord
from gpu_autoscaler.events.job import JobFinished, JobPlaced, JobPreempted, JobQueued
from gpu_autoscaler.model.ids import JobId, NodeUid
from gpu_autoscaler.model.labels import CHECKPOINTED_AT
from gpu_autoscaler.model.reasons.preempt import QuotaReclaimed
from gpu_autoscaler.runtime.publisher import as_outcome
from gpu_autoscaler_services.scheduler.attempts import losses

__all__ = ["bench"]

RULES = policy(
    quotas={"projects": [{"name": name, "nominal_gpu_count": 8} for name in ("a", "b")], "checkpoint_seconds_max": 60}
)
WAITING = job("mine", gpus=8, project_id="b")


def borrower(name: str, saved: str | None, requested: Mapping[str, str] | None = None) -> Story:
    """A running job of project a with 8 GPUs."""
    annotations = {**(requested or {}), **({} if saved is None else {CHECKPOINTED_AT: saved})}
    return (
        *job(name, project_id="a", placed_on=(f"node-{name}",), is_running=True),
        *pod(f"{name}-0", on=f"node-{name}", gpus=8, job_id=name, owner_kind="Job", annotations=annotations),
        *node(f"node-{name}"),
    )


async def ended(
    bench: Bench, seconds: float, *stories: Story, decided_at: datetime | None = None
) -> list[JobPreempted]:
    """The attempts that end in the tick at this time. `decided_at`: when a plan decided to ask `low` to save."""
    at = T0 + seconds * SECOND
    bench.scheduler.use_policy(RULES)
    known = UpkeepRecord(attempts_count=1, retry_at=at, decided_at=decided_at)
    upkeep = {} if decided_at is None else {save_key(JobId("low"), 1): known}
    bench.view.advance(replace(given(*stories, as_of=at), upkeep=upkeep), {})
    return [fact for fact in as_outcome(await bench.scheduler.on_tick(at)).facts if isinstance(fact, JobPreempted)]


async def test_a_borrower_without_checkpoints_ends_at_once(bench: Bench) -> None:
    """The fact has the reason, and counts no retry."""
    (fact,) = await ended(bench, 0, borrower("low", None), borrower("other", None), WAITING)

    assert isinstance(fact.preemption, QuotaReclaimed)
    assert (fact.preemption.for_job, fact.preemption.project) == ("mine", "a")
    assert (fact.is_own_choice, fact.retries_used) == (True, 0)


GUARDED = job("other", project_id="a", placed_on=("n9",), is_preemptible=False)


def asked(at: datetime, saved: datetime | None = None) -> Story:
    """The borrower `low`, asked to save then."""
    requested = request_annotations(at, at + 60 * SECOND)
    return borrower("low", "" if saved is None else saved.isoformat(), requested)


async def test_a_borrower_ends_when_it_has_saved_for_a_plan(bench: Bench) -> None:
    """Not before a plan has decided to ask it, nor before it was asked; an older save does not count."""
    decided, old = T0 + 2 * SECOND, T0 - 60 * SECOND
    waiting = [
        await ended(bench, 1, borrower("low", ""), GUARDED, WAITING),
        await ended(bench, 2, borrower("low", ""), GUARDED, WAITING, decided_at=decided),
        await ended(bench, 3, asked(old, old), GUARDED, WAITING, decided_at=decided),
        await ended(bench, 4, asked(decided, old), GUARDED, WAITING, decided_at=decided),
    ]
    assert waiting == [[], [], [], []]

    (fact,) = await ended(bench, 5, asked(decided, T0 + 4 * SECOND), GUARDED, WAITING, decided_at=decided)
    assert fact.job_id == "low"


async def test_a_borrower_that_does_not_save_ends_at_the_deadline(bench: Bench) -> None:
    """The wait is bounded by checkpoint_seconds_max from the request on."""
    story = (asked(T0 + SECOND), GUARDED, WAITING)

    assert await ended(bench, 60, *story, decided_at=T0) == []
    assert [fact.job_id for fact in await ended(bench, 61, *story, decided_at=T0)] == ["low"]


async def test_a_borrower_ends_when_a_later_periodic_save_is_over(bench: Bench) -> None:
    """It has saved for the plan, and saves once more when it is to end: that save has the same time."""
    story = (asked(T0 + 30 * SECOND, T0 + 5 * SECOND), GUARDED, WAITING)

    assert await ended(bench, 40, *story, decided_at=T0) == []
    assert await ended(bench, 89, *story, decided_at=T0) == []
    assert [fact.job_id for fact in await ended(bench, 90, *story, decided_at=T0)] == ["low"]


async def test_a_preempted_job_is_suspended_and_its_lost_pods_use_no_retry(bench: Bench) -> None:
    """Its Job runs on until the fact is known; then its pods end, which is no further loss."""
    (queued,) = (each.fact for each in job("train", gpus=8, project_id="a") if isinstance(each.fact, JobQueued))
    await bench.handle(queued)
    bench.here.add_node("n1", gpus=8)
    placed = JobPlaced(job_id=JobId("train"), attempt=1, node_uids=(NodeUid("u"),), node_names=("n1",), placed_at=T0)
    bench.record_story((TimedFact(queued, T0),))
    await bench.handle(placed)
    await until(lambda: any(item["spec"].get("nodeName") == "n1" for item in bench.here.items("pods")))

    other = job("other", project_id="a", placed_on=("n9",), is_preemptible=False)
    known: Story = (TimedFact(queued, T0), TimedFact(placed, T0), *other, *WAITING)
    (fact,) = await ended(bench, 0, known)
    assert bench.here.item("jobs", "train")["spec"]["suspend"] is False

    after: Story = (*known, TimedFact(fact, T0))
    assert await ended(bench, 2, after) == []
    await until(lambda: not bench.here.items("pods"))
    assert bench.here.item("jobs", "train")["spec"]["suspend"] is True
    lost = TimedFact(gone(job_id=JobId("train"), node_name="n1"), T0 + 3 * SECOND)
    assert losses(given(after, (lost,)), RULES, T0 + HOUR) == {}


def test_the_last_retry_is_not_used_by_preemptions() -> None:
    """After three preemptions for others the first loss of a node is the first retry; the job goes on."""
    placed = JobPlaced(
        job_id=JobId("train"), attempt=4, node_uids=(), node_names=(), placed_at=T0, retries_used_count=0
    )
    state = given(job("train"), (TimedFact(placed, T0), TimedFact(gone(), T0 + SECOND)))

    (facts,) = losses(state, policy(), T0 + HOUR).values()
    assert [type(fact) for fact in facts] == [JobPreempted]
    assert not any(isinstance(fact, JobFinished) for fact in facts)
