"""How long work takes is known to simulated kubelets only: no decision depends on a length that nobody could know."""

import random
from datetime import timedelta

import pytest
from msgspec.structs import replace

from gpu_autoscaler.events.envelope import Recorded, encode
from gpu_autoscaler.events.job import JobQueued, JobRequested
from gpu_autoscaler.sim.scoring.ours import score_ours
from gpu_autoscaler.sim.scoring.scenario import Arrival, Scenario, bursts
from gpu_autoscaler.sim.virtual_time import ORIGIN
from gpu_autoscaler_services.simulation import ROLES

UNTIL_SECONDS = 1500.0


def facts_of(scenario: Scenario) -> list[bytes]:
    """Return all facts up to then, without the requests, which carry the length to the simulated kubelets."""
    facts: list[bytes] = []
    until = ORIGIN + timedelta(seconds=UNTIL_SECONDS)

    def keep(recorded: Recorded) -> None:
        if recorded.envelope.time < until and not isinstance(recorded.envelope.fact, JobRequested | JobQueued):
            facts.append(encode(recorded.envelope))

    score_ours(scenario, ROLES, listener=keep)
    return facts


def longer(arrival: Arrival, rng: random.Random) -> Arrival:
    """Return the arrival with another length, if it cannot have ended until then."""
    seconds = arrival.request.run_seconds or 0.0
    if arrival.at_seconds + seconds <= UNTIL_SECONDS:
        return arrival
    least = max(1.0, UNTIL_SECONDS - arrival.at_seconds)
    return replace(arrival, request=replace(arrival.request, run_seconds=round(least + rng.uniform(1.0, 900.0), 1)))


@pytest.mark.sweep  # two runs of one scenario, compared plan by plan
def test_lengths_of_unfinished_work_change_nothing_before_its_end() -> None:
    """The lengths of all work that is unfinished after 25 minutes are scrambled: until then every plan, placement and
    estimate is the same, byte for byte."""
    world = bursts(seed=1, hours=UNTIL_SECONDS / 3600.0)
    rng = random.Random(7)  # noqa: S311 - a scenario
    scrambled = replace(world, arrivals=tuple(longer(arrival, rng) for arrival in world.arrivals))
    assert sum(a != b for a, b in zip(world.arrivals, scrambled.arrivals, strict=True)) >= 10
    facts = facts_of(world)
    assert len(facts) > 100
    assert facts_of(scrambled) == facts
