"""Jobs with a budget of their own, at the scheduler's doors."""

from tests.services.scheduler.test_scheduler import Desk, desk
from tests.support.money import ledger
from tests.support.stories import MINUTE, T0, given, instance, job, node, pod, purchase

from gpu_autoscaler.events.job import JobFinished
from gpu_autoscaler.runtime.service import Outcome

__all__ = ["desk"]


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
