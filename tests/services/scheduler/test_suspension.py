"""A job that must leave spot capacity: its Job is suspended and resumed without spot. A real API server."""

from datetime import datetime, timedelta

import pytest
from tests.services.scheduler.test_service import TRAIN, Bench
from tests.services.scheduler.test_service import bench as bench  # noqa: PLC0414 - a fixture
from tests.support.cluster import until
from tests.support.stories import T0, TimedFact, given, job, node, offer

from gpu_autoscaler.events.job import JobPlaced, JobPreempted, JobQueued
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import JobId, NodeUid
from gpu_autoscaler.model.jobs import Runtime
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.preempt import PriorityPreempted
from gpu_autoscaler.runtime.publisher import as_outcome
from gpu_autoscaler.runtime.service import Outputs
from gpu_autoscaler.simcluster.faults import Refusal
from gpu_autoscaler_services.scheduler.binder import Binder


def placements(outputs: Outputs) -> list[JobPlaced]:
    """Return the placements among the facts of a tick."""
    return [fact for fact in as_outcome(outputs).facts if isinstance(fact, JobPlaced)]


async def suspended_job(bench: Bench) -> JobPlaced:
    """Return the placement of a last attempt; its Job, bound to free spot again, is suspended."""
    (queued,) = (recorded.fact for recorded in job("train") if isinstance(recorded.fact, JobQueued))
    await bench.handle(queued)
    spot = {labels.CAPACITY_TYPE: "spot"}
    bench.here.add_node("free", gpus=8, labels=spot)
    placed = JobPlaced(job_id=TRAIN, attempt=3, node_uids=(NodeUid("u"),), node_names=("free",), placed_at=T0)
    bench.record_story((TimedFact(queued, T0),))
    await bench.handle(placed)
    await until(lambda: any(pod["spec"].get("nodeName") == "free" for pod in bench.here.items("pods")))
    lost = JobPreempted(job_id=TRAIN, attempt=3, cause="gone", preempted_at=T0)
    lasting = node("n1", offer(capacity_type=CapacityType.ON_DEMAND))
    bench.record_story(lasting, (TimedFact(queued, T0), TimedFact(placed, T0), TimedFact(lost, T0)))

    assert placements(await bench.scheduler.on_tick(T0)) == []
    await until(lambda: not bench.here.items("pods"))
    await until(lambda: not bench.here.item("jobs", "train")["status"]["terminating"])
    (last,) = placements(await bench.scheduler.on_tick(T0 + timedelta(seconds=2)))
    assert last.attempt == 4
    bench.record_story(
        lasting, (TimedFact(queued, T0), TimedFact(placed, T0), TimedFact(lost, T0), TimedFact(last, T0))
    )
    return last


async def test_last_attempt_is_resumed_without_spot(bench: Bench) -> None:
    """Spot nodes stay free, and stopped pods count as no failure."""
    last = await suspended_job(bench)
    await bench.handle(last)
    (pod,) = await until(lambda: [pod for pod in bench.here.items("pods") if pod["status"].get("conditions")])
    assert "nodeName" not in pod["spec"]
    assert bench.here.item("jobs", "train")["status"].get("failed", 0) == 0


async def test_a_placement_that_was_preempted_releases_nothing(bench: Bench) -> None:
    """As where a lost stream is published again, with placements that have ended. Where the scheduler reads it before
    it knows of the end, the Job is suspended again."""
    (queued,) = (recorded.fact for recorded in job("train") if isinstance(recorded.fact, JobQueued))
    await bench.handle(queued)
    placed = JobPlaced(job_id=TRAIN, attempt=1, node_uids=(NodeUid("u"),), node_names=("free",), placed_at=T0)
    reason = PriorityPreempted(for_job=JobId("other"), for_priority=1000, priority=100, barred_by="nodes_limit")
    ended = JobPreempted(job_id=TRAIN, attempt=1, cause="preempted", preempted_at=T0, preemption=reason)
    known = (TimedFact(queued, T0), TimedFact(placed, T0))
    bench.record_story((*known, TimedFact(ended, T0)))
    await bench.scheduler.on_tick(T0)
    await bench.handle(placed)
    assert bench.here.item("jobs", "train")["spec"]["suspend"] is True

    bench.record_story(known)
    await bench.handle(placed)
    assert bench.here.item("jobs", "train")["spec"]["suspend"] is False
    bench.record_story((*known, TimedFact(ended, T0)))
    await bench.scheduler.on_tick(T0)
    assert bench.here.item("jobs", "train")["spec"]["suspend"] is True


async def test_terminating_pods_are_polled_with_backoff(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """At first every tick, then with back-off; a suspended Job only when it is placed. Each tick says when that is."""
    (queued,) = (recorded.fact for recorded in job("train") if isinstance(recorded.fact, JobQueued))
    lost = JobPreempted(job_id=TRAIN, attempt=3, cause="gone", preempted_at=T0)
    placed = JobPlaced(job_id=TRAIN, attempt=3, node_uids=(NodeUid("u"),), node_names=("free",), placed_at=T0)
    story = (TimedFact(queued, T0), TimedFact(placed, T0), TimedFact(lost, T0))
    bench.record_story(story)
    asked, answers = list[int](), [False]
    due: list[datetime | None] = []

    async def suspend(self: Binder, job_id: JobId, runtime: Runtime, namespace: str) -> bool:
        """Count the call and return the test's answer."""
        asked.append(tick)
        return answers[-1]

    monkeypatch.setattr(Binder, "suspend", suspend)
    for tick in range(30):
        outputs = await bench.scheduler.on_tick(T0 + tick * timedelta(seconds=2))
        due.append(as_outcome(outputs).next_change_at)
    assert asked == [0, 1, 3, 7, 15, 23]
    assert [due[tick - 1] for tick in asked[1:]] == [T0 + tick * timedelta(seconds=2) for tick in asked[1:]]

    answers.append(True)
    for tick in range(30, 60):
        await bench.scheduler.on_tick(T0 + tick * timedelta(seconds=2))
    assert asked[6:] == [31]
    at = T0 + 60 * timedelta(seconds=2)
    bench.view.advance(given(node("n1", offer(capacity_type=CapacityType.ON_DEMAND)), story, as_of=at), {})
    tick = 60
    assert placements(await bench.scheduler.on_tick(at))
    assert asked[7:] == [60]


async def test_immutable_template_is_resumed_unchanged(bench: Bench) -> None:
    """Older servers fix the template: a placement on spot is better than none."""
    last = await suspended_job(bench)
    bench.here.world.faults.refuse(Refusal(method="PATCH", path_prefix="/apis/batch", status=422, left_count=1))
    await bench.handle(last)
    assert bench.here.item("jobs", "train")["spec"]["suspend"] is False
