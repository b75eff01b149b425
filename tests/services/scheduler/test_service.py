"""The scheduler: which jobs are admitted, created, released, lost and ended. A real API server and store."""

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
    TimedFact,
    given,
    job,
    node,
    pod,
    policy,
    record,
    request,
    synced,
)
from tests.support.telemetry import minutes

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
from gpu_autoscaler.runtime.publisher import as_outcome
from gpu_autoscaler.runtime.service import Outcome
from gpu_autoscaler.simcluster.api import DeleteOptions
from gpu_autoscaler.simcluster.faults import Refusal
from gpu_autoscaler.simcluster.kinds import JOBS
from gpu_autoscaler.store.sqlite import SqliteStore
from gpu_autoscaler_services.scheduler.attempts import losses
from gpu_autoscaler_services.scheduler.binder import Binder
from gpu_autoscaler_services.scheduler.service import ACCEPTANCE_SECONDS, Scheduler, scheduler_for

TRAIN = JobId("train")


class Bench:
    """A scheduler with everything that it acts on."""

    def __init__(self, here: RunningCluster, store: SqliteStore) -> None:
        self.here = here
        self.store = store
        self.view = StateView()
        self.scheduler = Scheduler(
            self.view, policy(queue_count_max=2), store, Binder(here.kube, "default"), lambda: T0
        )

    def record_story(self, *stories: Story) -> None:
        """Set the state to these stories."""
        self.view.advance(given(*stories), {})

    async def handle(self, fact: Fact, at: datetime = T0, unknown_fields: tuple[str, ...] = ()) -> Outcome:
        """Pass the fact to the scheduler."""
        (recorded,) = record([TimedFact(fact, at)])
        envelope = msgspec.structs.replace(recorded.envelope, unknown_fields=unknown_fields)
        outcome = await self.scheduler.on_fact(msgspec.structs.replace(recorded, envelope=envelope))
        return outcome if isinstance(outcome, Outcome) else Outcome(facts=tuple(outcome))

    async def accepted(self) -> JobQueued:
        """Admit the job `train` and record it."""
        (queued,) = (await self.handle(request("train"))).facts
        assert isinstance(queued, JobQueued)
        self.record_story((TimedFact(queued, T0),))
        return queued


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """A bench on an empty cluster, in real time, so that nothing happens by itself."""
    async with running_cluster(clock_factor=1.0) as here:
        store = await SqliteStore.open(tmp_path / "store.db")
        yield Bench(here, store)
        await store.close()


async def test_job_is_stored_before_it_is_queued(bench: Bench) -> None:
    """The same request again is the same job."""
    queued = await bench.accepted()
    row = await bench.store.job(TRAIN)
    assert row is not None
    assert row.spec == queued.spec
    assert (await bench.handle(request("train"))).facts == (queued,)


async def test_repeated_request_of_finished_job_starts_nothing(bench: Bench) -> None:
    """The state has forgotten the job, the store has not: one request is one job."""
    await bench.accepted()
    assert await bench.store.finish_job(TRAIN, outcome="completed", finished_at=T0)
    bench.record_story()

    assert await bench.handle(request("train")) == Outcome()


async def test_taken_id_is_rejected_without_job_id(bench: Bench) -> None:
    """Another body under the id: rejected and set aside; the rejection names no job."""
    await bench.accepted()
    outcome = await bench.handle(request("train", members=7))
    (rejected,) = outcome.facts
    assert isinstance(rejected, JobRejected)
    assert rejected.job_id is None
    assert [violation.field for violation in rejected.violations] == ["job_id"]
    assert outcome.set_aside_reason is not None
    assert "taken by a request with another body" in outcome.set_aside_reason


async def test_unknown_fields_are_rejected_unless_the_job_is_accepted(bench: Bench) -> None:
    """Beside every other violation; a redelivery to another release takes nothing back."""
    unknown = ("gpu_cuont: unknown key 'gpu_cuont'; known: members",)
    for wrong, fields in ((request("train"), ["gpu_cuont"]), (request("train", members=0), ["gpu_cuont", "members"])):
        (rejected,) = (await bench.handle(wrong, unknown_fields=unknown)).facts
        assert isinstance(rejected, JobRejected)
        assert [violation.field for violation in rejected.violations] == fields
        assert rejected.violations[0].reason.startswith("unknown key 'gpu_cuont'; known: members (this scheduler is ")
    assert await bench.store.job(TRAIN) is None

    queued = await bench.accepted()
    assert (await bench.handle(request("train"), unknown_fields=unknown)).facts == (queued,)


async def test_full_queue_rejects_new_jobs(bench: Bench) -> None:
    """Waiting jobs count; a job that is already accepted is not rejected."""
    queued = await bench.accepted()
    bench.record_story((TimedFact(queued, T0),), job("second"))
    outcome = await bench.handle(request("third"), at=T0 - MINUTE)
    assert outcome.set_aside_reason == "job refused: queue: is full: 2 jobs wait, queue_count_max is 2; retry later"
    assert (await bench.handle(request("train"))).facts == (queued,)


async def test_promised_job_is_queued_despite_full_queue(bench: Bench) -> None:
    """The gateway answers 202, and its row may follow the request: a young request is redelivered once."""
    bench.record_story(job("first"), job("second"))
    assert await bench.handle(request("train")) == Outcome(redeliver_after_seconds=ACCEPTANCE_SECONDS)
    bench.record_story()
    await bench.accepted()
    bench.record_story(job("first"), job("second"))

    (queued,) = (await bench.handle(request("train"))).facts

    assert isinstance(queued, JobQueued)


async def test_job_is_created_suspended_and_released_once(bench: Bench) -> None:
    """Creation is idempotent; released, it prefers the nodes of its placement and does not change again."""
    queued = await bench.accepted()
    await bench.handle(queued)
    await bench.handle(queued)
    made = bench.here.item("jobs", "train")
    assert made["spec"]["suspend"] is True
    placed = JobPlaced(job_id=TRAIN, attempt=1, node_uids=(NodeUid("u"),), node_names=("gpu-a",), placed_at=T0)
    await bench.handle(placed)
    released = bench.here.item("jobs", "train")
    assert released["spec"]["suspend"] is False
    affinity = released["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (preferred,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preferred["preference"]["matchExpressions"][0]["values"] == ["gpu-a"]
    version = released["metadata"]["generation"]
    await bench.handle(placed)
    assert bench.here.item("jobs", "train")["metadata"]["generation"] == version


async def test_node_requirements_become_required_affinity(bench: Bench) -> None:
    """Model, memory, and no spot for non-preemptible jobs, by labels that nodes carry."""
    story = job("train", model="A100", is_preemptible=False, gpu_memory_bytes_min=80 * 2**30)
    (queued,) = (recorded.fact for recorded in story if isinstance(recorded.fact, JobQueued))
    bench.record_story(story, node("n1"))
    await bench.handle(queued)
    template = bench.here.item("jobs", "train")["spec"]["template"]["spec"]
    terms = template["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    for term in terms:
        by_key = {condition["key"]: condition for condition in term["matchExpressions"]}
        assert by_key["gpu-autoscaler.io/gpu-model"]["values"] == ["A100"]
        capacity = [condition for key, condition in by_key.items() if "capacity" in key or "scalesetpriority" in key]
        assert len(capacity) == 1
        assert not {"spot", "SPOT"} & set(capacity[0]["values"])
    assert any(
        "nvidia.com/gpu.memory" in {condition["key"] for condition in term["matchExpressions"]} for term in terms
    )
    assert template["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists"},
        {"key": "gpu", "operator": "Equal", "value": "true", "effect": "NoSchedule"},
        {"key": "gpu-autoscaler.io/avoid", "operator": "Exists", "effect": "PreferNoSchedule"},
    ]


async def test_cancelled_job_ends_before_its_job_is_deleted(bench: Bench) -> None:
    """Published once and never created again; a second cancellation is ignored, an unknown job is an error."""
    queued = await bench.accepted()
    await bench.handle(queued)
    cancel = JobCancelRequested(job_id=TRAIN, note="enough")
    (end,) = (await bench.handle(cancel)).facts
    assert isinstance(end, JobFinished)
    assert (end.outcome, end.message) == ("cancelled", "cancelled: enough")
    assert bench.here.item("jobs", "train")
    await bench.handle(end)
    assert not bench.here.item("jobs", "train")
    await bench.handle(end)
    bench.record_story((TimedFact(queued, T0), TimedFact(cancel, T0), TimedFact(end, T0)))
    await bench.handle(queued)
    assert not bench.here.item("jobs", "train")
    assert (await bench.handle(cancel)).facts == ()
    with pytest.raises(PermanentError, match=r"cancellation of .nobody. failed"):
        await bench.handle(JobCancelRequested(job_id=JobId("nobody")))


async def test_foreign_job_of_same_name_is_not_adopted(bench: Bench) -> None:
    """A Job without our label is not touched; the message gives the next step."""
    queued = await bench.accepted()
    bench.here.add("jobs", {"metadata": {"name": "train"}, "spec": {"template": minimal_template(), "suspend": True}})
    with pytest.raises(PermanentError, match="delete or rename it"):
        await bench.handle(queued)


async def test_job_that_kubernetes_rejects_fails_with_its_reason(bench: Bench) -> None:
    """Its author gets the message; it does not wait for ever, and no operator finds a dead letter."""
    queued = await bench.accepted()
    spec = msgspec.structs.replace(queued.spec, image="")
    (failed,) = (await bench.handle(msgspec.structs.replace(queued, spec=spec))).facts
    assert isinstance(failed, JobFinished)
    assert failed.outcome == "failed"
    assert "Kubernetes rejects the job; correct it and submit it again" in failed.message
    assert "containers[0].image" in failed.message


def set_condition(bench: Bench, condition_type: str) -> None:
    """Set this condition on the Job, as the Job controller does."""
    condition = {"type": condition_type, "status": "True", "reason": "DeadlineExceeded", "message": "too long"}
    bench.here.world.api.modify(JOBS, "default/train", lambda item: item["status"].update(conditions=[condition]))


async def test_pod_ended_by_its_job_is_no_loss(bench: Bench) -> None:
    """While the Job runs it is a loss; if the Job fails or is deleted, its own end is published."""
    queued = await bench.accepted()
    await bench.handle(queued)
    running = job("train", placed_on=("n1",), is_running=True)[2:]
    bench.record_story(node("n1"), (TimedFact(queued, T0),), running, (TimedFact(gone(), LOST_AT),))
    (lost,) = as_outcome(await bench.scheduler.on_tick(LOST_AT)).facts
    assert isinstance(lost, JobPreempted)
    set_condition(bench, "FailureTarget")
    assert as_outcome(await bench.scheduler.on_tick(LOST_AT)).facts == ()
    set_condition(bench, "Failed")
    assert as_outcome(await bench.scheduler.on_tick(LOST_AT)).facts == ()
    bench.here.world.api.delete(JOBS, "default/train", DeleteOptions(propagation="Background"))
    assert as_outcome(await bench.scheduler.on_tick(LOST_AT)).facts == ()


async def test_failed_job_lookup_does_not_delay_placements(bench: Bench) -> None:
    """Other jobs are placed; the loss is published by a later tick."""
    queued = await bench.accepted()
    await bench.handle(queued)
    running = job("train", placed_on=("n1",), is_running=True)[2:]
    bench.view.advance(
        given(
            node("n1"),
            node("n2"),
            (TimedFact(queued, T0),),
            running,
            (TimedFact(gone(), LOST_AT),),
            job("next"),
            as_of=LOST_AT,
        ),
        {},
    )
    bench.here.world.faults.refuse(Refusal(method="GET", path_prefix="/apis/batch", status=503, left_count=1))
    assert [type(fact) for fact in as_outcome(await bench.scheduler.on_tick(LOST_AT)).facts] == [
        JobPlaced,
        JobEstimated,
    ]
    assert [type(fact) for fact in as_outcome(await bench.scheduler.on_tick(LOST_AT)).facts] == [
        JobPreempted,
        JobPlaced,
        JobEstimated,
    ]


# ---- Jobs that went while nobody watched


def listing(*job_ids: JobId) -> JobListed:
    """Return a list of Kubernetes Jobs, read at T0."""
    return JobListed(epoch=EPOCH, version=LIST_VERSION, job_ids=job_ids, listed_at=T0)


async def test_never_created_job_is_created_after_list(bench: Bench) -> None:
    """Its creation was lost: it is created suspended; a second list changes nothing."""
    await bench.accepted()
    assert (await bench.handle(listing())).facts == ()
    made = bench.here.item("jobs", "train")
    assert made["spec"]["suspend"] is True
    assert (await bench.handle(listing())).facts == ()
    assert bench.here.item("jobs", "train")["metadata"]["uid"] == made["metadata"]["uid"]


async def test_never_created_placed_job_is_created_and_released(bench: Bench) -> None:
    """Nothing shows that it ever ran, so it may be created."""
    bench.record_story(node("n1"), job("train", placed_on=("n1",)))
    assert (await bench.handle(listing())).facts == ()
    assert bench.here.item("jobs", "train")["spec"]["suspend"] is False


async def test_started_job_without_job_object_is_cancelled_once(bench: Bench) -> None:
    """Whether it ran, was lost, or only had pods: nobody else publishes its end."""
    lost = TimedFact(JobPreempted(job_id=TRAIN, attempt=1, cause="notice", preempted_at=T0), T0)
    at_work = (
        (job("train", placed_on=("n1",), is_running=True),),
        (job("train", placed_on=("n1",)), (lost,)),
        (job("train", placed_on=("n1",)), pod("train-0", on="n1", job_id="train", owner_kind="Job")),
    )
    for stories in at_work:
        bench.record_story(node("n1"), *stories)
        (end,) = (await bench.handle(listing())).facts
        assert isinstance(end, JobFinished)
        assert (end.job_id, end.outcome) == (TRAIN, "cancelled")
        assert end.message == "its Kubernetes Job was deleted while unwatched; how it ended is unknown"
        bench.record_story(node("n1"), *stories, (TimedFact(end, T0),))
        assert (await bench.handle(listing())).facts == ()
        assert not bench.here.item("jobs", "train")


async def test_list_is_ignored_for_listed_finished_or_ending_jobs(bench: Bench) -> None:
    """Or if the Job was created since: nothing is created or published."""
    running = job("train", placed_on=("n1",), is_running=True)
    end = JobFinished(job_id=TRAIN, outcome="completed", finished_at=T0)
    cancel = JobCancelRequested(job_id=TRAIN)
    for story, listed in (((), (TRAIN,)), ((TimedFact(end, T0),), ()), ((TimedFact(cancel, T0),), ())):
        bench.record_story(node("n1"), running, story)
        assert (await bench.handle(listing(*listed))).facts == ()
        assert not bench.here.item("jobs", "train")
    bench.record_story(node("n1"), running)
    bench.here.add("jobs", {"metadata": {"name": "train"}, "spec": {"template": minimal_template(), "suspend": True}})
    assert (await bench.handle(listing())).facts == ()


def minimal_template() -> dict[str, object]:
    """Return the smallest valid pod template."""
    return {"spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "x"}]}}


# ---- attempts


def gone(**changes: object) -> PodGone:
    """Return the end of a member of `train`."""
    fields = {"epoch": 1, "version": 9, "pod_uid": PodUid("p"), "namespace": "default", "name": "train-0-x"}
    return PodGone(**{**fields, "node_name": "n1", "job_id": TRAIN, "phase": "running", **changes})  # type: ignore[arg-type]


LOST_AT = T0 + timedelta(hours=1)


def test_lost_member_ends_attempt_once() -> None:
    """Further losses before the next placement are the same loss."""
    placed = job("train", placed_on=("n1",), is_running=True)
    both = (TimedFact(gone(), LOST_AT), TimedFact(gone(pod_uid=PodUid("other"), version=10), LOST_AT))
    ((lost,),) = losses(given(node("n1"), placed, both), policy(), LOST_AT + MINUTE).values()
    assert isinstance(lost, JobPreempted)
    assert (lost.attempt, lost.preempted_at) == (1, LOST_AT)
    assert lost.cause == "pod default/train-0-x on node n1 was lost"
    assert losses(given(node("n1"), placed, both, (TimedFact(lost, LOST_AT),)), policy(), LOST_AT + MINUTE) == {}


def test_loss_before_placement_is_ignored() -> None:
    """The next attempt begins complete; only later losses end it."""
    again = job("train", placed_on=("n1",), attempt=2, is_running=True, at=LOST_AT + timedelta(minutes=5))
    assert losses(given(node("n1"), again, (TimedFact(gone(), LOST_AT),)), policy(), LOST_AT + MINUTE) == {}


def test_loss_before_its_job_is_known_is_published_later() -> None:
    """Streams are not ordered: the pod's end may be read before the placement."""
    early = (TimedFact(gone(), LOST_AT),)
    assert losses(given(early), policy(), LOST_AT + MINUTE) == {}
    assert list(losses(given(early, node("n1"), job("train", placed_on=("n1",))), policy(), LOST_AT + MINUTE)) == [
        TRAIN
    ]


@pytest.mark.parametrize("changes", [{"phase": "succeeded"}, {"job_id": None}, {"job_id": JobId("unknown")}])
def test_succeeded_or_unknown_pod_is_no_loss(changes: dict[str, object]) -> None:
    """It had succeeded, or its job is unknown."""
    running = job("train", placed_on=("n1",), is_running=True)
    assert losses(given(node("n1"), running, (TimedFact(gone(**changes), LOST_AT),)), policy(), LOST_AT + MINUTE) == {}


def test_pod_missing_from_list_is_no_loss() -> None:
    """It may have succeeded: how it ended is unknown."""
    running = job("train", placed_on=("n1",), is_running=True)
    story = (*node("n1"), *running, *pod("train-0", on="n1", job_id="train", owner_kind="Job"))
    state = given(story, synced((*node("n1"), *running), as_of=LOST_AT), is_synced=False)
    assert not state.pods
    assert tombstone_of(state.pods_gone, PodUid("uid-train-0")) is not None
    assert losses(state, policy(), LOST_AT + MINUTE) == {}


def test_waiting_or_finished_job_has_no_loss() -> None:
    """Not placed yet, or finished already."""
    assert losses(given(job("train"), (TimedFact(gone(), LOST_AT),)), policy(), LOST_AT + MINUTE) == {}
    end = JobFinished(job_id=TRAIN, outcome="completed", finished_at=T0)
    over = given(node("n1"), job("train", placed_on=("n1",)), (TimedFact(gone(), LOST_AT), TimedFact(end, T0)))
    assert losses(over, policy(), LOST_AT + MINUTE) == {}


def test_last_retry_ends_job() -> None:
    """With one retry allowed the second loss is the end, and the message counts attempts."""
    allowed = policy(job_retries_count_max=1)
    running = job("train", placed_on=("n1",), attempt=2, is_running=True)
    ((lost, end),) = losses(
        given(node("n1"), running, (TimedFact(gone(), LOST_AT),)), allowed, LOST_AT + MINUTE
    ).values()
    assert isinstance(lost, JobPreempted)
    assert isinstance(end, JobFinished)
    assert (end.outcome, end.finished_at) == ("failed", LOST_AT)
    assert "lost 2 attempts, job_retries_count_max is 1" in end.message


@pytest.mark.parametrize("is_measured", [True, False])
async def test_a_job_goes_where_gpus_are_used_least(bench: Bench, *, is_measured: bool) -> None:
    """By a scheduler that has started with the policy: it alone reads telemetry. The figure is published."""
    measuring = policy(placement="least-utilized")
    kind = scheduler_for(measuring if is_measured else policy())
    began = T0 - HOUR
    stories = (
        node("n1", at=began), pod("a", on="n1", gpus=4), node("n2", at=began), pod("b", on="n2", gpus=2),
        minutes("n1", 60, start=began, busy=0.05, pods=dict.fromkeys(range(4), "default/a")),
        minutes("n2", 60, start=began, busy=0.9, pods=dict.fromkeys(range(2), "default/b")),
        job("train", gpus=1),
    )  # fmt: skip
    bench.record_story(*(tuple(told for told in story if type(told.fact) in kind.folds) for story in stories))
    scheduler = kind(bench.view, policy(), bench.store, Binder(bench.here.kube, "default"), lambda: T0)
    scheduler.use_policy(measuring)
    (placed,) = [fact for fact in as_outcome(await scheduler.on_tick(T0)).facts if isinstance(fact, JobPlaced)]
    assert (placed.node_names, placed.gpu_use_ratios) == ((("n1",), (0.025,)) if is_measured else (("n2",), (None,)))


async def test_invalid_demand_report_is_set_aside_with_all_violations(bench: Bench) -> None:
    """A valid report needs no action: the state has it."""
    good = DemandReported(source="kafka", shape=DemandShape(gpu_count=1), count=1, until=T0 + HOUR)
    assert await bench.handle(good) == Outcome()

    outcome = await bench.handle(msgspec.structs.replace(good, count=-1, until=T0))
    assert outcome.set_aside_reason is not None
    assert "count: is -1" in outcome.set_aside_reason
    assert "until: is in the past" in outcome.set_aside_reason
