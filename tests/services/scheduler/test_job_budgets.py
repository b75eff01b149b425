"""Job budgets, at the scheduler's inputs."""

from datetime import timedelta
from typing import Any

import pytest
from tests.services.scheduler.test_service import Bench, bench
from tests.support.kube_objects import pod as pod_json
from tests.support.money import ledger
from tests.support.stories import MINUTE, T0, given, instance, job, node, pod, purchase
from tests.support.timed_facts import SECOND

from gpu_autoscaler.events.job import JobFinished
from gpu_autoscaler.model.labels import CHECKPOINT_REQUESTED, JOB_ID
from gpu_autoscaler.runtime.service import Outcome
from gpu_autoscaler.simcluster.kinds import JOBS

__all__ = ["bench"]


async def test_each_attempt_is_asked_for_checkpoint_once(bench: Bench) -> None:
    """The pods of the next attempt have not been asked."""
    deadlines: list[str | None] = []
    bench.here.add_node("n1")
    for attempt in (1, 1, 2, 2):
        name = f"train-{attempt}"
        if not bench.here.item("pods", name):
            item = pod_json(name, nodeName="n1")
            item["metadata"]["labels"] = {JOB_ID: "train"}
            bench.here.add("pods", item)
        running = (
            *ledger(), *node("n1"), *instance(purchase("buy-n1")),
            *job("train", placed_on=("n1",), attempt=attempt, is_running=True, budget_limit_micro_usd=5_000_000),
            *pod(name, on="n1", gpus=8, job_id="train", owner_kind="Job", at=T0),
        )  # fmt: skip
        at = T0 + 29 * MINUTE + len(deadlines) * SECOND
        bench.view.advance(given(running, as_of=at), {})
        await bench.scheduler.on_tick(at)
        deadlines.append(bench.here.item("pods", name)["metadata"].get("annotations", {}).get(CHECKPOINT_REQUESTED))
    assert deadlines[0] == deadlines[1] is not None
    assert deadlines[2] == deadlines[3] is not None
    assert deadlines[2] != deadlines[0]


RUNNING = (
    *ledger(), *node("n1"), *instance(purchase("buy-n1")),
    *job("train", placed_on=("n1",), is_running=True, budget_limit_micro_usd=5_000_000),
    *pod("train-0", on="n1", gpus=8, job_id="train", owner_kind="Job", at=T0),
)  # fmt: skip


@pytest.mark.parametrize("condition", ["Complete", "Failed", None])
async def test_job_that_ended_by_itself_is_not_cancelled(bench: Bench, condition: str | None) -> None:
    """The state may show its pods for as long as the broker was away: nothing was spent since its end, and its real
    outcome follows. So it is where its Job is gone (None)."""
    await bench.handle(await bench.accepted())

    def end(item: dict[str, Any]) -> None:
        """End the Job as its controller does."""
        item["status"]["conditions"] = [{"type": condition, "status": "True"}]

    if condition is None:
        bench.here.world.api.delete(JOBS, "default/train")
    else:
        bench.here.world.api.modify(JOBS, "default/train", end)
    at = T0 + 31 * MINUTE
    bench.view.advance(given(RUNNING, as_of=at), {})
    outputs = await bench.scheduler.on_tick(at)
    assert isinstance(outputs, Outcome)
    assert [fact for fact in outputs.facts if isinstance(fact, JobFinished)] == []
    assert outputs.next_change_at == at + timedelta(microseconds=1)  # is asked again


async def test_job_is_cancelled_when_its_budget_is_spent(bench: Bench) -> None:
    """It never runs beyond its budget; the message gives the reason."""
    await bench.handle(await bench.accepted())
    for minutes, ends in ((10, False), (31, True)):
        at = T0 + minutes * MINUTE
        bench.view.advance(given(RUNNING, as_of=at), {})
        outputs = await bench.scheduler.on_tick(at)
        assert isinstance(outputs, Outcome)
        facts = outputs.facts
        assert (outputs.next_change_at == at + timedelta(microseconds=1)) is ends  # until the store has its end
        found = [fact for fact in facts if isinstance(fact, JobFinished)]
        assert [fact.outcome for fact in found] == (["cancelled"] if ends else [])
        assert not ends or "budget of $5.00 is spent" in found[0].message
