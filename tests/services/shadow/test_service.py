"""The shadow publishes, once, where its policy decides differently, and does nothing else."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, cast

import pytest
from tests.support.stories import HOUR, MINUTE, SECOND, T0, given, job, node, on_sale, policy

from gpu_autoscaler.core.checked_plan import checked_plan
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.envelope import Envelope, Recorded
from gpu_autoscaler.events.shadow import ShadowPlanMade
from gpu_autoscaler.model.ids import FactId
from gpu_autoscaler.runtime.compute import Compute
from gpu_autoscaler.runtime.digests import policy_digest
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import FactInput, Outcome, WatchInput
from gpu_autoscaler_services.registry import services
from gpu_autoscaler_services.shadow import service as service_module
from gpu_autoscaler_services.shadow.service import Digests, Shadow

AS_OF = T0 + HOUR
WAITS_COUNT = {"waiting_micro_usd_per_hour": 10**12}  # no waiting to save money
PATIENT = policy(idle_seconds_max=7200.0, disruption_ratio_max=1.0, removal=WAITS_COUNT)
QUICK = policy(idle_seconds_max=600.0, disruption_ratio_max=1.0, removal=WAITS_COUNT)


def _shadow(state: ClusterState, real: ScalingPolicy, shadow: ScalingPolicy) -> Shadow:
    digests = Digests(shadow=policy_digest(shadow), real=policy_digest(real), core="core")
    return Shadow(StateView(state), real, shadow, digests)


def _idle() -> ClusterState:
    return given(on_sale(at=T0), node("n1", at=T0), as_of=AS_OF)


async def _published(service: Shadow, now: datetime = AS_OF) -> ShadowPlanMade | None:
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


async def test_shadow_decision_is_published() -> None:
    """With both reasons."""
    fact = await _published(_shadow(_idle(), PATIENT, QUICK))

    assert fact is not None
    (difference,) = fact.differences
    assert difference.name == "node/n1"
    assert (difference.made.what, difference.made.reason) == ("deferred", "not_yet_idle")
    assert (difference.other.what, difference.other.reason) == ("drain_node", "node_idle")
    assert fact.policy_digest == policy_digest(QUICK) != fact.real_policy_digest


async def test_missing_shadow_decision_is_published() -> None:
    """A decision of the real policy that the shadow does not make."""
    fact = await _published(_shadow(_idle(), QUICK, PATIENT))

    assert fact is not None
    (difference,) = fact.differences
    assert (difference.made.what, difference.other.what) == ("drain_node", "deferred")


async def test_unchanged_difference_is_published_once() -> None:
    """Passing time is no news, and neither is a restart."""
    service = _shadow(_idle(), PATIENT, QUICK)
    first = await _published(service)
    assert first is not None

    service.on_folded([_stored(first, 7)])
    assert await _published(service, AS_OF + 5 * SECOND) is None

    again = _shadow(_idle(), PATIENT, QUICK)
    again.on_folded([_stored(first, 7)])
    assert await _published(again, AS_OF + 10 * SECOND) is None


async def test_a_plan_that_is_too_large_for_the_broker_is_published_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With some of its differences; what was stored so is no news later."""
    monkeypatch.setattr(service_module, "DIFFERENCES_IF_TOO_LARGE_MAX", 1)
    state = given(on_sale(at=T0), node("n1", at=T0), node("n2", at=T0), as_of=AS_OF)
    service = _shadow(state, PATIENT, QUICK)
    outcome = await service.on_tick(AS_OF)
    assert isinstance(outcome, Outcome)
    (whole,), (shortened,) = outcome.facts, outcome.facts_if_too_large
    assert isinstance(whole, ShadowPlanMade)
    assert isinstance(shortened, ShadowPlanMade)
    assert len(whole.differences) == 2
    assert shortened.differences == whole.differences[:1]
    assert shortened.plan.decisions == whole.plan.decisions

    service.on_folded([_stored(shortened, 7)])
    assert await _published(service, AS_OF + 5 * SECOND) is None


async def test_planning_does_not_block_the_event_loop() -> None:
    """Both plans are made where the process has a place for them."""
    service, calls = _shadow(_idle(), PATIENT, QUICK), []

    async def compute(function: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401 - as `Compute`
        calls.append(function)
        return function(*args)

    service.compute = cast("Compute", compute)
    assert await _published(service) is not None
    assert calls == [plan, checked_plan]


async def test_shadow_has_its_own_chain() -> None:
    """A change is fenced by the shadow's last plan; the plan itself has a real parent."""
    service = _shadow(_idle(), PATIENT, QUICK)
    first = await _published(service)
    assert first is not None
    assert first.parent_sequence == 0
    service.on_folded([_stored(first, 7)])

    more = given(on_sale(at=T0), node("n1", at=T0), node("n2", at=T0), as_of=AS_OF + MINUTE)
    service._view.advance(more, {"NODE": 9})
    second = await _published(service, AS_OF + MINUTE)

    assert second is not None
    assert second.parent_sequence == 7
    assert second.plan.parent_sequence == more.last_plan_sequence
    assert second.plan_id != first.plan_id


async def test_shadow_names_the_facts_that_it_takes_into_account() -> None:
    """Its chain survives a quiet time as the scaler's does."""
    service = _shadow(_idle(), PATIENT, QUICK)
    service._view.advance(service._view.state, {"SHADOW": 12})
    outcome = await service.on_tick(AS_OF)
    assert isinstance(outcome, Outcome)
    assert outcome.folded_sequence == 12


async def test_agreement_is_published_once() -> None:
    """Silence would look like a shadow that does not run."""
    service = _shadow(given(on_sale(at=T0), job("j1", at=AS_OF - MINUTE), as_of=AS_OF), QUICK, PATIENT)

    fact = await _published(service)

    assert fact is not None
    assert fact.differences == ()
    assert fact.plan.decisions
    service.on_folded([_stored(fact, 1)])
    assert await _published(service, AS_OF + timedelta(seconds=5)) is None


def test_shadow_publishes_one_fact_and_consumes_none() -> None:
    """No executor, no watches; no service consumes its fact."""
    assert Shadow.publishes == (ShadowPlanMade,)
    assert Shadow.consumes == ()
    assert not any(ShadowPlanMade in service.consumes for service in services())
    assert not issubclass(Shadow, FactInput | WatchInput)
    assert [service.name for service in services() if ShadowPlanMade in service.publishes] == ["shadow"]
