"""The brake of a running system: it holds across restarts and lost streams until a person resumes."""

import asyncio
import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.services.scaler.test_service import scaler
from tests.support.braked_fleet import BROKE, BrakedFleet, forced
from tests.support.front import Front, front
from tests.support.stories import MINUTE, T0, TimedFact, given, record

from gpu_autoscaler.bus.streams import streams
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.state.forced_removals import removed_by_force, tripped_brake
from gpu_autoscaler.core.state.state import EMPTY_STATE
from gpu_autoscaler.events import ingress
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.policy import PolicyDirectiveLifted
from gpu_autoscaler.events.scaling import ScalingDecisionsRestored, ScalingPlanMade
from gpu_autoscaler.model.decisions import Cut, Plan
from gpu_autoscaler.model.ids import PlanId
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.publisher import as_outcome
from gpu_autoscaler.runtime.service import Outcome
from gpu_autoscaler.sim.adapters.store import Tables
from gpu_autoscaler.store.protocol import PlanRow
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.main import run
from gpu_autoscaler_services.scaler.living import living

NODES_COUNT = 10


def fleet(count: int = NODES_COUNT) -> BrakedFleet:
    """Nodes with work, which a hard spend budget cannot pay for."""
    world = BrakedFleet(BROKE)
    for number in range(count):
        world.add(f"n{number}")
    world.look()
    return world


async def _restarted(gate: Front) -> StateView:
    """What a process knows that has read nothing but the streams."""
    recorded = []
    for stream in sorted(stream.name for stream in streams()):
        for sequence in range(1, await gate.bus.last_sequence(stream) + 1):
            message = await gate.bus.message_at(stream, sequence)
            if message is not None:
                envelope = ingress.read(
                    message.subject, message.payload, message_id=None, arrived_at=gate.model.clock.now
                )
                recorded.append(Recorded(envelope=envelope, stream=stream, sequence=sequence))
    view = StateView()
    view.advance(fold(EMPTY_STATE, recorded), {entry.stream: entry.sequence for entry in recorded})
    return view


async def _plan_of_a_new_process(gate: Front, now: datetime) -> Plan | None:
    """Start a scaler, let it plan once and publish; None: it adds nothing to the last plan."""
    outcome = await scaler(await _restarted(gate), BROKE).on_tick(now)
    made = [fact for fact in outcome.facts if isinstance(fact, ScalingPlanMade)] if isinstance(outcome, Outcome) else []
    await gate.tell(tuple(TimedFact(fact, now) for fact in made))
    return made[0].plan if made else None


async def test_it_holds_across_restarts_until_a_person_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shown by status and directives; `resume brake` says who and why, and releases as many again."""
    monkeypatch.setenv("LOGNAME", "alice")
    async with front(tmp_path) as gate:
        here = ("--gateway", gate.url)
        world = fleet()
        await gate.tell(tuple(TimedFact(entry.fact, entry.envelope.time) for entry in world.facts))
        first = await _plan_of_a_new_process(gate, T0)
        second = await _plan_of_a_new_process(gate, T0 + MINUTE)
        assert first is not None
        assert second is not None
        assert (len(forced(first)), second.decisions) == (3, ())
        assert first.brake is not None
        assert second.brake == first.brake

        assert await asyncio.to_thread(run, ("status", *here)) == Exit.OK
        assert "brake: no removals by force, by the scaler until resumed: The brake has held" in capsys.readouterr().out
        assert await asyncio.to_thread(run, ("directives", "-o", "json", *here)) == Exit.OK
        assert [item["key"] for item in json.loads(capsys.readouterr().out)["items"]] == ["brake"]

        assert await asyncio.to_thread(run, ("resume", "brake", "--reason", "looked", *here)) == Exit.OK
        assert "count anew" in capsys.readouterr().err
        message = await gate.bus.message_at("POLICY", 1)
        assert message is not None
        resumed = ingress.read(message.subject, message.payload, message_id=None, arrived_at=gate.model.clock.now).fact
        assert isinstance(resumed, PolicyDirectiveLifted)
        assert (resumed.lifted_by, resumed.reason, resumed.tripped_at) == ("alice", "looked", T0)

        third = await _plan_of_a_new_process(gate, T0 + 2 * MINUTE)
        assert third is not None
        assert len(forced(third)) == 3
        assert set(forced(third)).isdisjoint(forced(first))
        assert third.brake is not None
        assert third.brake.tripped_at == T0 + 2 * MINUTE


async def test_without_a_trip_there_is_nothing_to_resume(tmp_path: Path) -> None:
    """The key is unknown then."""
    async with front(tmp_path) as gate:
        assert await asyncio.to_thread(run, ("resume", "brake", "--gateway", gate.url)) == Exit.NOT_FOUND


async def test_a_plan_keeps_the_trip_in_its_stream() -> None:
    """While the brake holds, the plan that names it is published again before any stream discards the last one."""
    world = fleet()
    world.plan()
    view = StateView()
    view.advance(world.state, {"SCALING": 1})
    service = scaler(view, BROKE)
    outcome = await service.on_tick(T0 + MINUTE)
    assert isinstance(outcome, Outcome)
    world.fact(outcome.facts[0])
    world.now = T0 + 9 * MINUTE
    world.look()
    view.advance(replace(world.state, last_plan_at=T0), {"SCALING": 1})

    assert as_outcome(await service.on_tick(world.now)).facts == ()
    world.now = T0 + 10 * MINUTE
    world.look()
    view.advance(replace(world.state, last_plan_at=T0), {"SCALING": 1})
    outcome = await service.on_tick(world.now)
    assert isinstance(outcome, Outcome)
    (made,) = outcome.facts
    assert isinstance(made, ScalingPlanMade)
    assert (made.plan.decisions, made.plan.brake) == ((), world.plans[0].brake)


async def test_a_lost_stream_does_not_release_the_brake() -> None:
    """The last plan in the store names the trip."""
    world = fleet()
    made = world.plan()
    tables = Tables()
    fact = ScalingPlanMade(plan_id=PlanId("last"), plan=made, cut=Cut(), policy_digest="p", core_digest="c")
    tables.plans[fact.plan_id] = PlanRow(fact=fact, made_at=T0)
    lost = replace(fleet().state, last_plan_sequence=0, last_plan_at=None)  # no plan is in the new streams
    view = StateView()
    view.advance(lost, {"JOB": 1})
    outcome = await scaler(view, BROKE, tables).on_tick(T0)
    assert isinstance(outcome, Outcome)
    (restored,) = outcome.facts
    assert isinstance(restored, ScalingDecisionsRestored)
    after = fold(lost, record((TimedFact(restored, T0),)))

    assert made.brake is not None
    assert tripped_brake(after) == made.brake
    assert forced(plan(after, BROKE, T0)) == []


def test_what_counts_can_be_rebuilt_from_what_is_published_again() -> None:
    """Of the last hour, also the removals that have ended; and who ended the last trip."""
    world = fleet()
    made = world.plan()
    world.resume()
    for drain in made.drains:
        world.end(drain)
    known = removed_by_force(replace(world.state, brake_releases={}), world.now)
    again = tuple(TimedFact(fact, world.now) for fact in living(world.state))
    rebuilt = given(again, is_synced=False)

    assert len(known) == 3
    assert removed_by_force(replace(rebuilt, brake_releases={}), world.now) == known
    assert rebuilt.brake_releases == world.state.brake_releases
    assert [record.terminated is None for record in rebuilt.drains.values()] == [False] * 3
    later = replace(world.state, newest={**world.state.newest, "scaling": world.now + timedelta(hours=1)})
    assert not [fact for fact in living(later) if "drain" in type(fact).__name__.lower()]
