"""A drain that completes while it is cancelled: exactly one of the two steps acts."""

from tests.services.scaler.test_executor import IDLE, Bench, bench, cancellation, drain, is_cordoned, kinds
from tests.support.stories import planned

from gpu_autoscaler.events.scaling import ScalingDrainCancelled
from gpu_autoscaler.runtime.service import Outcome

__all__ = ["bench"]  # a fixture


async def test_node_drained_during_cancellation_is_uncordoned(bench: Bench) -> None:
    """Nobody terminates the node, so the cancellation uncordons it."""
    decision = drain(bench.here, IDLE, seconds=600)
    (started,) = await bench.begin(decision)
    (drained,) = (await bench.step(started)).facts
    story = planned(cancellation(decision), plan_id="plan-cancel", at=bench.here.clock.now())
    bench.record_story(story)
    bench.record_fact(drained)

    assert await bench.step(drained) == Outcome()
    assert kinds((await bench.step(story[0].fact)).facts) == [ScalingDrainCancelled]
    assert not is_cordoned(bench.here)


async def test_node_drained_before_cancellation_is_terminated(bench: Bench) -> None:
    """The plan did not know it yet; the instance still ends."""
    decision = drain(bench.here, IDLE, seconds=600)
    (started,) = await bench.begin(decision)
    (drained,) = (await bench.step(started)).facts
    bench.record_fact(drained)

    assert await bench.begin(cancellation(decision)) == ()
    assert is_cordoned(bench.here)
