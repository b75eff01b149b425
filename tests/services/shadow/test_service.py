"""A policy in shadow says where it would decide otherwise, once, and does nothing."""

from datetime import datetime, timedelta

from tests.support.stories import HOUR, MINUTE, SECOND, T0, given, job, node, on_sale, policy

from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.envelope import Envelope, Recorded
from gpu_autoscaler.events.shadow import ShadowPlanMade
from gpu_autoscaler.model.ids import FactId
from gpu_autoscaler.runtime.digests import policy_digest
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import FactInput, Outcome, WatchInput
from gpu_autoscaler_services.registry import SERVICES
from gpu_autoscaler_services.shadow.service import Digests, Shadow

AS_OF = T0 + HOUR
WAITS_COUNT = {"waiting_micro_usd_per_hour": 10**12}  # nobody waits to save money
PATIENT = policy(idle_seconds_max=7200.0, disruption_ratio_max=1.0, removal=WAITS_COUNT)
QUICK = policy(idle_seconds_max=600.0, disruption_ratio_max=1.0, removal=WAITS_COUNT)


def _shadow(state: ClusterState, real: ScalingPolicy, shadow: ScalingPolicy) -> Shadow:
    digests = Digests(shadow=policy_digest(shadow), real=policy_digest(real), core="core")
    return Shadow(StateView(state), real, shadow, digests)


def _idle() -> ClusterState:
    return given(on_sale(at=T0), node("n1", at=T0), as_of=AS_OF)


async def _said(service: Shadow, now: datetime = AS_OF) -> ShadowPlanMade | None:
    outcome = await service.on_tick(now)
    if not isinstance(outcome, Outcome):
        assert outcome == ()
        return None
    (fact,) = outcome.facts
    assert isinstance(fact, ShadowPlanMade)
    assert outcome.expected_last_sequence == fact.parent_sequence
    return fact


def _stored(fact: ShadowPlanMade, sequence: int) -> Recorded:
    envelope = Envelope(id=FactId(f"f{sequence}"), source="/shadow", time=fact.plan.as_of, fact=fact)
    return Recorded(envelope=envelope, stream=fact.stream(), sequence=sequence)


async def test_what_it_would_do_and_the_real_one_does_not_is_said() -> None:
    """With both reasons."""
    fact = await _said(_shadow(_idle(), PATIENT, QUICK))

    assert fact is not None
    (one,) = fact.differences
    assert one.name == "node/n1"
    assert (one.made.what, one.made.reason) == ("deferred", "not_yet_idle")
    assert (one.other.what, one.other.reason) == ("drain_node", "node_idle")
    assert fact.policy_digest == policy_digest(QUICK) != fact.real_policy_digest


async def test_the_other_way_round_as_well() -> None:
    """What the real one does and the shadow would not."""
    fact = await _said(_shadow(_idle(), QUICK, PATIENT))

    assert fact is not None
    (one,) = fact.differences
    assert (one.made.what, one.other.what) == ("drain_node", "deferred")


async def test_it_is_said_once_as_long_as_it_stays_so() -> None:
    """Nobody acts on it, so it stays so for long; seconds that pass are no news, a restart is none either."""
    service = _shadow(_idle(), PATIENT, QUICK)
    first = await _said(service)
    assert first is not None

    service.on_folded([_stored(first, 7)])
    assert await _said(service, AS_OF + 5 * SECOND) is None

    again = _shadow(_idle(), PATIENT, QUICK)
    again.on_folded([_stored(first, 7)])
    assert await _said(again, AS_OF + 10 * SECOND) is None


async def test_its_chain_is_its_own() -> None:
    """A change is said after the shadow's own last plan, which is the fence; the plan itself has a real parent."""
    service = _shadow(_idle(), PATIENT, QUICK)
    first = await _said(service)
    assert first is not None
    assert first.parent_sequence == 0
    service.on_folded([_stored(first, 7)])

    more = given(on_sale(at=T0), node("n1", at=T0), node("n2", at=T0), as_of=AS_OF + MINUTE)
    service._view.advance(more, {"NODE": 9})
    second = await _said(service, AS_OF + MINUTE)

    assert second is not None
    assert second.parent_sequence == 7
    assert second.plan.parent_sequence == more.last_plan_sequence
    assert second.plan_id != first.plan_id


async def test_two_policies_that_agree_say_so_once() -> None:
    """Silence would look like a shadow that does not run."""
    service = _shadow(given(on_sale(at=T0), job("j1", at=AS_OF - MINUTE), as_of=AS_OF), QUICK, PATIENT)

    fact = await _said(service)

    assert fact is not None
    assert fact.differences == ()
    assert fact.plan.decisions
    service.on_folded([_stored(fact, 1)])
    assert await _said(service, AS_OF + timedelta(seconds=5)) is None


def test_it_can_do_nothing_else() -> None:
    """One fact to publish, which nobody consumes; nothing to carry out, and nothing seen but the record."""
    assert Shadow.publishes == (ShadowPlanMade,)
    assert Shadow.consumes == ()
    assert not any(ShadowPlanMade in service.consumes for service in SERVICES)
    assert not issubclass(Shadow, FactInput | WatchInput)
    assert [service.name for service in SERVICES if ShadowPlanMade in service.publishes] == ["shadow"]
