"""The scheduler's doors: what is accepted, made, released, lost and ended. A real API server and a real store."""

from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from tests.support.cluster import RunningCluster, running_cluster
from tests.support.stories import (
    EPOCH,
    HOUR,
    LIST_VERSION,
    MINUTE,
    T0,
    Story,
    Told,
    given,
    job,
    node,
    pod,
    policy,
    record,
    request,
    synced,
)

from gpu_autoscaler.core.state.tables import tombstone_of
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import (
    JobCancelRequested,
    JobEstimated,
    JobFinished,
    JobListed,
    JobPlaced,
    JobPreempted,
    JobQueued,
    JobRejected,
)
from gpu_autoscaler.events.pod import PodGone
from gpu_autoscaler.model.demands import DemandShape
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.ids import JobId, NodeUid, PodUid
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outcome
from gpu_autoscaler.simcluster.api import DeleteOptions
from gpu_autoscaler.simcluster.faults import Refusal
from gpu_autoscaler.simcluster.kinds import JOBS
from gpu_autoscaler.store.sqlite import SqliteStore
from gpu_autoscaler_services.scheduler.attempts import losses
from gpu_autoscaler_services.scheduler.binder import Binder
from gpu_autoscaler_services.scheduler.service import ACCEPTANCE_SECONDS, Scheduler

TRAIN = JobId("train")


class Desk:
    """A scheduler with everything it acts on."""

    def __init__(self, here: RunningCluster, store: SqliteStore) -> None:
        self.here = here
        self.store = store
        self.view = StateView()
        self.scheduler = Scheduler(
            self.view, policy(queue_count_max=2), store, Binder(here.kube, "default"), lambda: T0
        )

    def knows(self, *stories: Story) -> None:
        """The record says this."""
        self.view.advance(given(*stories), {})

    async def hear(self, fact: Fact, at: datetime = T0) -> Outcome:
        """Hand the fact to the door."""
        (recorded,) = record([Told(fact, at)])
        outcome = await self.scheduler.on_fact(recorded)
        return outcome if isinstance(outcome, Outcome) else Outcome(facts=tuple(outcome))

    async def accepted(self) -> JobQueued:
        """The job `train`, on record and known."""
        (queued,) = (await self.hear(request("train"))).facts
        assert isinstance(queued, JobQueued)
        self.knows((Told(queued, T0),))
        return queued


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    """A desk on an empty cluster; real time, so that nothing happens by itself."""
    async with running_cluster(clock_factor=1.0) as here:
        store = await SqliteStore.open(tmp_path / "store.db")
        yield Desk(here, store)
        await store.close()


async def test_a_job_is_on_record_before_it_is_queued(desk: Desk) -> None:
    """The row is there; the same request again is the same job."""
    queued = await desk.accepted()
    row = await desk.store.job(TRAIN)
    assert row is not None
    assert row.spec == queued.spec
    assert (await desk.hear(request("train"))).facts == (queued,)


async def test_a_request_that_comes_again_when_its_job_is_long_over_starts_nothing(desk: Desk) -> None:
    """The state has forgotten the job by then; the row has not, and one request is one job for good."""
    await desk.accepted()
    assert await desk.store.finish_job(TRAIN, outcome="completed", finished_at=T0)
    desk.knows()

    assert await desk.hear(request("train")) == Outcome()


async def test_a_taken_id_is_refused_without_a_word_about_its_owner(desk: Desk) -> None:
    """Another body under the id: refused and set aside, and the refusal carries no job id."""
    await desk.accepted()
    outcome = await desk.hear(request("train", members=7))
    (rejected,) = outcome.facts
    assert isinstance(rejected, JobRejected)
    assert rejected.job_id is None
    assert [mistake.field for mistake in rejected.mistakes] == ["job_id"]
    assert outcome.set_aside_reason is not None
    assert "taken by another request" in outcome.set_aside_reason


async def test_a_full_queue_refuses_and_says_how_full(desk: Desk) -> None:
    """Counted by those who wait; a job that is in already is not refused for it."""
    queued = await desk.accepted()
    desk.knows((Told(queued, T0),), job("second"))
    outcome = await desk.hear(request("third"), at=T0 - MINUTE)
    assert outcome.set_aside_reason == "job refused: queue: 2 jobs wait already, the policy allows 2; try later"
    assert (await desk.hear(request("train"))).facts == (queued,)


async def test_a_job_that_was_promised_is_queued_however_many_wait(desk: Desk) -> None:
    """The gateway answers 202 for it, and its row may come after the request: a young one is looked at once more."""
    desk.knows(job("first"), job("second"))
    assert await desk.hear(request("train")) == Outcome(redeliver_after_seconds=ACCEPTANCE_SECONDS)
    desk.knows()
    await desk.accepted()
    desk.knows(job("first"), job("second"))

    (queued,) = (await desk.hear(request("train"))).facts

    assert isinstance(queued, JobQueued)


async def test_a_job_waits_suspended_and_is_released_once(desk: Desk) -> None:
    """Made twice it is one Job; released it likes the nodes of its placement, and stays as it is from then on."""
    queued = await desk.accepted()
    await desk.hear(queued)
    await desk.hear(queued)
    made = desk.here.item("jobs", "train")
    assert made["spec"]["suspend"] is True
    placed = JobPlaced(job_id=TRAIN, attempt=1, node_uids=(NodeUid("u"),), node_names=("gpu-a",), placed_at=T0)
    await desk.hear(placed)
    released = desk.here.item("jobs", "train")
    assert released["spec"]["suspend"] is False
    affinity = released["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (preferred,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preferred["preference"]["matchExpressions"][0]["values"] == ["gpu-a"]
    version = released["metadata"]["generation"]
    await desk.hear(placed)
    assert desk.here.item("jobs", "train")["metadata"]["generation"] == version


async def test_what_a_job_needs_of_its_nodes_is_required(desk: Desk) -> None:
    """Model, memory, and never spot where it must not be interrupted: by labels that nodes carry."""
    story = job("train", model="A100", is_preemptible=False, gpu_memory_bytes_min=80 * 2**30)
    (queued,) = (told.fact for told in story if isinstance(told.fact, JobQueued))
    desk.knows(story, node("n1"))
    await desk.hear(queued)
    template = desk.here.item("jobs", "train")["spec"]["template"]["spec"]
    terms = template["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    for term in terms:
        by_key = {one["key"]: one for one in term["matchExpressions"]}
        assert by_key["gpu-autoscaler.io/gpu-model"]["values"] == ["A100"]
        capacity = [one for key, one in by_key.items() if "capacity" in key or "scalesetpriority" in key]
        assert len(capacity) == 1
        assert not {"spot", "SPOT"} & set(capacity[0]["values"])
    assert any("nvidia.com/gpu.memory" in {one["key"] for one in term["matchExpressions"]} for term in terms)
    assert template["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]


async def test_a_cancelled_job_ends_on_record_first_and_its_job_goes_after(desk: Desk) -> None:
    """Said once; never made again; a second cancel finds it over; a cancel of nothing says so."""
    queued = await desk.accepted()
    await desk.hear(queued)
    cancel = JobCancelRequested(job_id=TRAIN, note="enough")
    (end,) = (await desk.hear(cancel)).facts
    assert isinstance(end, JobFinished)
    assert (end.outcome, end.message) == ("cancelled", "cancelled: enough")
    assert desk.here.item("jobs", "train")
    await desk.hear(end)
    assert not desk.here.item("jobs", "train")
    await desk.hear(end)
    desk.knows((Told(queued, T0), Told(cancel, T0), Told(end, T0)))
    await desk.hear(queued)
    assert not desk.here.item("jobs", "train")
    assert (await desk.hear(cancel)).facts == ()
    with pytest.raises(PermanentError, match="nobody' was never accepted"):
        await desk.hear(JobCancelRequested(job_id=JobId("nobody")))


async def test_somebody_elses_job_of_the_name_is_left_alone(desk: Desk) -> None:
    """A Job without our label is not taken over: the message says what to do."""
    queued = await desk.accepted()
    desk.here.add("jobs", {"metadata": {"name": "train"}, "spec": {"template": desk_template(), "suspend": True}})
    with pytest.raises(PermanentError, match="delete or rename it"):
        await desk.hear(queued)


def conclude(desk: Desk, condition_type: str) -> None:
    """The Job controller writes this condition."""
    condition = {"type": condition_type, "status": "True", "reason": "DeadlineExceeded", "message": "too long"}
    desk.here.world.api.modify(JOBS, "default/train", lambda item: item["status"].update(conditions=[condition]))


async def test_a_pod_that_its_own_job_ends_is_no_loss(desk: Desk) -> None:
    """While the Job goes on it is; once the Job fails, or is deleted, its end is said for it and no attempt is lost."""
    queued = await desk.accepted()
    await desk.hear(queued)
    running = job("train", placed_on=("n1",), is_running=True)[2:]
    desk.knows(node("n1"), (Told(queued, T0),), running, (Told(gone(), LOST_AT),))
    (lost,) = await desk.scheduler.on_tick(LOST_AT)  # type: ignore[misc]
    assert isinstance(lost, JobPreempted)
    conclude(desk, "FailureTarget")
    assert await desk.scheduler.on_tick(LOST_AT) == []
    conclude(desk, "Failed")
    assert await desk.scheduler.on_tick(LOST_AT) == []
    desk.here.world.api.delete(JOBS, "default/train", DeleteOptions(propagation="Background"))
    assert await desk.scheduler.on_tick(LOST_AT) == []


async def test_a_loss_waits_for_kubernetes_and_keeps_nobody_waiting(desk: Desk) -> None:
    """The Job cannot be asked now: other jobs are placed all the same, and the loss is told by a later tick."""
    queued = await desk.accepted()
    await desk.hear(queued)
    running = job("train", placed_on=("n1",), is_running=True)[2:]
    desk.view.advance(
        given(
            node("n1"), node("n2"), (Told(queued, T0),), running, (Told(gone(), LOST_AT),), job("next"), as_of=LOST_AT
        ),
        {},
    )
    desk.here.world.faults.refuse(Refusal(method="GET", path_prefix="/apis/batch", status=503, left_count=1))
    assert [type(fact) for fact in await desk.scheduler.on_tick(LOST_AT)] == [JobPlaced, JobEstimated]  # type: ignore[union-attr]
    assert [type(fact) for fact in await desk.scheduler.on_tick(LOST_AT)] == [JobPreempted, JobPlaced, JobEstimated]  # type: ignore[union-attr]


# ---- Jobs that went while nobody watched


def listing(*job_ids: JobId) -> JobListed:
    """A whole list of Kubernetes Jobs, read at T0."""
    return JobListed(epoch=EPOCH, version=LIST_VERSION, job_ids=job_ids, listed_at=T0)


async def test_a_job_that_was_never_made_is_made_when_a_list_lacks_it(desk: Desk) -> None:
    """Its creation got lost: it waits suspended, as if nothing had been; a second list changes nothing."""
    await desk.accepted()
    assert (await desk.hear(listing())).facts == ()
    made = desk.here.item("jobs", "train")
    assert made["spec"]["suspend"] is True
    assert (await desk.hear(listing())).facts == ()
    assert desk.here.item("jobs", "train")["metadata"]["uid"] == made["metadata"]["uid"]


async def test_a_placed_job_that_was_never_made_is_made_and_released(desk: Desk) -> None:
    """Nothing shows that it ever was at work, so nothing is lost by making it (again)."""
    desk.knows(node("n1"), job("train", placed_on=("n1",)))
    assert (await desk.hear(listing())).facts == ()
    assert desk.here.item("jobs", "train")["spec"]["suspend"] is False


async def test_a_job_at_work_whose_job_is_gone_is_cancelled_once(desk: Desk) -> None:
    """Whether it ran, was lost, or only had pods: nobody will say its end, so the scheduler does."""
    lost = Told(JobPreempted(job_id=TRAIN, attempt=1, cause="notice", preempted_at=T0), T0)
    at_work = (
        (job("train", placed_on=("n1",), is_running=True),),
        (job("train", placed_on=("n1",)), (lost,)),
        (job("train", placed_on=("n1",)), pod("train-0", on="n1", job_id="train", owner_kind="Job")),
    )
    for stories in at_work:
        desk.knows(node("n1"), *stories)
        (end,) = (await desk.hear(listing())).facts
        assert isinstance(end, JobFinished)
        assert (end.job_id, end.outcome) == (TRAIN, "cancelled")
        assert end.message == "its Kubernetes Job is gone, and nobody saw how it ended"
        desk.knows(node("n1"), *stories, (Told(end, T0),))
        assert (await desk.hear(listing())).facts == ()
        assert not desk.here.item("jobs", "train")


async def test_a_list_says_nothing_about_jobs_that_are_there_over_or_ending(desk: Desk) -> None:
    """In the list, made since the list was read, finished, or to be cancelled: nothing is made or said."""
    running = job("train", placed_on=("n1",), is_running=True)
    end = JobFinished(job_id=TRAIN, outcome="completed", finished_at=T0)
    cancel = JobCancelRequested(job_id=TRAIN)
    for told, listed in (((), (TRAIN,)), ((Told(end, T0),), ()), ((Told(cancel, T0),), ())):
        desk.knows(node("n1"), running, told)
        assert (await desk.hear(listing(*listed))).facts == ()
        assert not desk.here.item("jobs", "train")
    desk.knows(node("n1"), running)
    desk.here.add("jobs", {"metadata": {"name": "train"}, "spec": {"template": desk_template(), "suspend": True}})
    assert (await desk.hear(listing())).facts == ()


def desk_template() -> dict[str, object]:
    """The least that a Job's template may be."""
    return {"spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "x"}]}}


# ---- attempts


def gone(**changes: object) -> PodGone:
    """A member of `train` that is gone."""
    told = {"epoch": 1, "version": 9, "pod_uid": PodUid("p"), "namespace": "default", "name": "train-0-x"}
    return PodGone(**{**told, "node_name": "n1", "job_id": TRAIN, "phase": "running", **changes})  # type: ignore[arg-type]


LOST_AT = T0 + timedelta(hours=1)


def test_a_lost_member_ends_the_attempt_once() -> None:
    """The first loss is told; what goes with it before the next placement is the same loss."""
    placed = job("train", placed_on=("n1",), is_running=True)
    both = (Told(gone(), LOST_AT), Told(gone(pod_uid=PodUid("other"), version=10), LOST_AT))
    ((lost,),) = losses(given(node("n1"), placed, both), policy()).values()
    assert isinstance(lost, JobPreempted)
    assert (lost.attempt, lost.preempted_at) == (1, LOST_AT)
    assert lost.cause == "pod default/train-0-x on node n1 was lost"
    assert losses(given(node("n1"), placed, both, (Told(lost, LOST_AT),)), policy()) == {}


def test_what_was_lost_before_a_placement_is_no_loss_of_it() -> None:
    """The next attempt begins whole; only what goes after that ends it."""
    again = job("train", placed_on=("n1",), attempt=2, is_running=True, at=LOST_AT + timedelta(minutes=5))
    assert losses(given(node("n1"), again, (Told(gone(), LOST_AT),)), policy()) == {}


def test_a_loss_that_came_early_is_told_when_its_job_is_known() -> None:
    """Streams come as they come: the pod's end may be read before the placement that it ends."""
    early = (Told(gone(), LOST_AT),)
    assert losses(given(early), policy()) == {}
    assert list(losses(given(early, node("n1"), job("train", placed_on=("n1",))), policy())) == [TRAIN]


@pytest.mark.parametrize("changes", [{"phase": "succeeded"}, {"job_id": None}, {"job_id": JobId("unknown")}])
def test_the_end_of_a_pod_may_mean_nothing(changes: dict[str, object]) -> None:
    """It had done its work, or it is none of ours."""
    running = job("train", placed_on=("n1",), is_running=True)
    assert losses(given(node("n1"), running, (Told(gone(**changes), LOST_AT),)), policy()) == {}


def test_a_pod_that_only_a_list_shows_to_be_gone_is_no_loss() -> None:
    """It may have done its work: nobody knows."""
    running = job("train", placed_on=("n1",), is_running=True)
    story = (*node("n1"), *running, *pod("train-0", on="n1", job_id="train", owner_kind="Job"))
    state = given(story, synced((*node("n1"), *running), as_of=LOST_AT), is_synced=False)
    assert not state.pods
    assert tombstone_of(state.pods_gone, PodUid("uid-train-0")) is not None
    assert losses(state, policy()) == {}


def test_a_job_that_waits_or_is_over_loses_nothing() -> None:
    """Not placed yet, or finished already."""
    assert losses(given(job("train"), (Told(gone(), LOST_AT),)), policy()) == {}
    end = JobFinished(job_id=TRAIN, outcome="completed", finished_at=T0)
    over = given(node("n1"), job("train", placed_on=("n1",)), (Told(gone(), LOST_AT), Told(end, T0)))
    assert losses(over, policy()) == {}


def test_the_last_retry_ends_the_job() -> None:
    """With one retry allowed the second loss is the end, and the message counts."""
    allowed = policy(job_retries_count_max=1)
    running = job("train", placed_on=("n1",), attempt=2, is_running=True)
    ((lost, end),) = losses(given(node("n1"), running, (Told(gone(), LOST_AT),)), allowed).values()
    assert isinstance(lost, JobPreempted)
    assert isinstance(end, JobFinished)
    assert (end.outcome, end.finished_at) == ("failed", LOST_AT)
    assert "lost its place 2 times, the policy allows 1 retries" in end.message


async def test_a_wish_that_cannot_be_meant_is_set_aside_with_every_mistake(desk: Desk) -> None:
    """Where somebody can look at it; a good one is no work for anybody: the state has it."""
    good = DemandReported(source="kafka", shape=DemandShape(gpu_count=1), count=1, until=T0 + HOUR)
    assert await desk.hear(good) == Outcome()

    said = await desk.hear(msgspec.structs.replace(good, count=-1, until=T0))
    assert said.set_aside_reason is not None
    assert "count: is -1" in said.set_aside_reason
    assert "until: is over already" in said.set_aside_reason
