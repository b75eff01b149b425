"""A drain that ends while it is called off: one of the two steps acts, and one alone."""

from tests.services.scaler.test_executor import IDLE, Bench, bench, cancellation, drain, is_cordoned, kinds
from tests.support.stories import planned

from gpu_autoscaler.events.scaling import ScalingDrainCancelled
from gpu_autoscaler.runtime.service import Outcome

__all__ = ["bench"]  # a fixture


async def test_a_node_that_empties_while_its_drain_is_cancelled_stays(bench: Bench) -> None:
    """Of two steps that cross each other one has to act: nobody ends the node, so it takes work again."""
    decision = drain(bench.here, IDLE, seconds=600)
    (started,) = await bench.begin(decision)
    (drained,) = (await bench.step(started)).facts
    story = planned(cancellation(decision), plan_id="plan-cancel", at=bench.here.clock.now())
    bench.knows(story)
    bench.told(drained)

    assert await bench.step(drained) == Outcome()
    assert kinds((await bench.step(story[0].fact)).facts) == [ScalingDrainCancelled]
    assert not is_cordoned(bench.here)


async def test_a_node_that_was_drained_before_is_not_called_back(bench: Bench) -> None:
    """Its instance ends, whatever a plan says that did not know it yet."""
    decision = drain(bench.here, IDLE, seconds=600)
    (started,) = await bench.begin(decision)
    (drained,) = (await bench.step(started)).facts
    bench.told(drained)

    assert await bench.begin(cancellation(decision)) == ()
    assert is_cordoned(bench.here)
