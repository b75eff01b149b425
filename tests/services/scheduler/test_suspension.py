"""The last attempt of a job: its Job is held and let go anew, so that nothing binds it to spot. A real API server."""

from datetime import timedelta

import pytest
from tests.services.scheduler.test_service import TRAIN, Desk
from tests.services.scheduler.test_service import desk as desk  # noqa: PLC0414 - a fixture
from tests.support.cluster import until
from tests.support.stories import T0, Told, given, job, node, offer

from gpu_autoscaler.events.job import JobPlaced, JobPreempted, JobQueued
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import JobId, NodeUid
from gpu_autoscaler.model.jobs import Runtime
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.runtime.service import Outputs
from gpu_autoscaler.simcluster.faults import Refusal
from gpu_autoscaler_services.scheduler.binder import Binder


def placements(facts: Outputs) -> list[JobPlaced]:
    """Those among what a tick said."""
    return [fact for fact in facts if isinstance(fact, JobPlaced)]  # type: ignore[union-attr]


async def held(desk: Desk) -> JobPlaced:
    """The place of a last attempt: its Job, which Kubernetes had bound to free spot again, is held by then."""
    (queued,) = (told.fact for told in job("train") if isinstance(told.fact, JobQueued))
    await desk.hear(queued)
    spot = {labels.CAPACITY_TYPE: "spot"}
    desk.here.add_node("free", gpus=8, labels=spot)
    placed = JobPlaced(job_id=TRAIN, attempt=3, node_uids=(NodeUid("u"),), node_names=("free",), placed_at=T0)
    desk.knows((Told(queued, T0),))
    await desk.hear(placed)
    await until(lambda: any(pod["spec"].get("nodeName") == "free" for pod in desk.here.items("pods")))
    lost = JobPreempted(job_id=TRAIN, attempt=3, cause="gone", preempted_at=T0)
    lasting = node("n1", offer(capacity_type=CapacityType.ON_DEMAND))
    desk.knows(lasting, (Told(queued, T0), Told(placed, T0), Told(lost, T0)))

    assert placements(await desk.scheduler.on_tick(T0)) == []
    await until(lambda: not desk.here.items("pods"))
    await until(lambda: not desk.here.item("jobs", "train")["status"]["terminating"])
    (last,) = placements(await desk.scheduler.on_tick(T0 + timedelta(seconds=2)))
    assert last.attempt == 4
    desk.knows(lasting, (Told(queued, T0), Told(placed, T0), Told(lost, T0), Told(last, T0)))
    return last


async def test_a_last_attempt_is_let_go_anew_and_on_no_spot(desk: Desk) -> None:
    """Spot stays free, and what was stopped for it counts as no failure."""
    last = await held(desk)
    await desk.hear(last)
    (pod,) = await until(lambda: [pod for pod in desk.here.items("pods") if pod["status"].get("conditions")])
    assert "nodeName" not in pod["spec"]
    assert desk.here.item("jobs", "train")["status"].get("failed", 0) == 0


async def test_kubernetes_is_asked_seldom_for_pods_that_take_long_to_go(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first every tick, then ever more seldom; once the Job is held not at all, until it has a place."""
    (queued,) = (told.fact for told in job("train") if isinstance(told.fact, JobQueued))
    lost = JobPreempted(job_id=TRAIN, attempt=3, cause="gone", preempted_at=T0)
    placed = JobPlaced(job_id=TRAIN, attempt=3, node_uids=(NodeUid("u"),), node_names=("free",), placed_at=T0)
    story = (Told(queued, T0), Told(placed, T0), Told(lost, T0))
    desk.knows(story)
    asked, answers = list[int](), [False]

    async def suspend(self: Binder, job_id: JobId, runtime: Runtime) -> bool:
        """Count, and answer what the test says."""
        asked.append(tick)
        return answers[-1]

    monkeypatch.setattr(Binder, "suspend", suspend)
    for tick in range(30):
        await desk.scheduler.on_tick(T0 + tick * timedelta(seconds=2))
    assert asked == [0, 1, 3, 7, 15, 23]

    answers.append(True)
    for tick in range(30, 60):
        await desk.scheduler.on_tick(T0 + tick * timedelta(seconds=2))
    assert asked[6:] == [31]
    at = T0 + 60 * timedelta(seconds=2)
    desk.view.advance(given(node("n1", offer(capacity_type=CapacityType.ON_DEMAND)), story, as_of=at), {})
    tick = 60
    assert placements(await desk.scheduler.on_tick(at))
    assert asked[7:] == [60]


async def test_where_a_held_job_cannot_change_it_goes_on_all_the_same(desk: Desk) -> None:
    """An older server fixes the template for good: a place on spot is better than none."""
    last = await held(desk)
    desk.here.world.faults.refuse(Refusal(method="PATCH", path_prefix="/apis/batch", status=422, left_count=1))
    await desk.hear(last)
    assert desk.here.item("jobs", "train")["spec"]["suspend"] is False
