"""Jobs with a budget of their own, at the scheduler's doors."""

from tests.services.scheduler.test_service import Desk, desk
from tests.support.kube_objects import pod as pod_json
from tests.support.money import ledger
from tests.support.stories import MINUTE, T0, given, instance, job, node, pod, purchase
from tests.support.told import SECOND

from gpu_autoscaler.events.job import JobFinished
from gpu_autoscaler.model.labels import CHECKPOINT_REQUESTED, JOB_ID
from gpu_autoscaler.runtime.service import Outcome

__all__ = ["desk"]


async def test_each_attempt_is_told_to_save_and_once(desk: Desk) -> None:
    """The pods of the next one have heard nothing of what was said to those before."""
    told: list[str | None] = []
    desk.here.add_node("n1")
    for attempt in (1, 1, 2, 2):
        name = f"train-{attempt}"
        if not desk.here.item("pods", name):
            item = pod_json(name, nodeName="n1")
            item["metadata"]["labels"] = {JOB_ID: "train"}
            desk.here.add("pods", item)
        running = (
            *ledger(), *node("n1"), *instance(purchase("buy-n1")),
            *job("train", placed_on=("n1",), attempt=attempt, is_running=True, budget_limit_micro_usd=5_000_000),
            *pod(name, on="n1", gpus=8, job_id="train", owner_kind="Job", at=T0),
        )  # fmt: skip
        at = T0 + 29 * MINUTE + len(told) * SECOND
        desk.view.advance(given(running, as_of=at), {})
        await desk.scheduler.on_tick(at)
        told.append(desk.here.item("pods", name)["metadata"].get("annotations", {}).get(CHECKPOINT_REQUESTED))
    assert told[0] == told[1] is not None
    assert told[2] == told[3] is not None
    assert told[2] != told[0]


async def test_a_job_is_told_to_save_and_ended_when_its_budget_is_spent(desk: Desk) -> None:
    """It never goes on beyond it; what it says of its end is the reason."""
    await desk.accepted()
    running = (
        *ledger(), *node("n1"), *instance(purchase("buy-n1")),
        *job("train", placed_on=("n1",), is_running=True, budget_limit_micro_usd=5_000_000),
        *pod("train-0", on="n1", gpus=8, job_id="train", owner_kind="Job", at=T0),
    )  # fmt: skip
    for minutes, ends in ((10, False), (31, True)):
        at = T0 + minutes * MINUTE
        desk.view.advance(given(running, as_of=at), {})
        said = await desk.scheduler.on_tick(at)
        facts = said.facts if isinstance(said, Outcome) else said
        found = [fact for fact in facts if isinstance(fact, JobFinished)]
        assert [fact.outcome for fact in found] == (["cancelled"] if ends else [])
        assert not ends or "budget of $5.00 is spent" in found[0].message
