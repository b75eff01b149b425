"""Runs once with ticks skipped and once with every tick: the facts must be equal.

Inputs forgotten in `inputs.py` show here as a violated invariant.
"""

from itertools import zip_longest

from msgspec.structs import replace

from gpu_autoscaler.events.envelope import Recorded, encode
from gpu_autoscaler.sim.adapters.bundle import Roles
from gpu_autoscaler.sim.simulation import Result, Setting, Simulation

PROMISE = "skipped ticks change nothing"


def run_differential(setting: Setting, roles: Roles) -> Result:
    """Return the result of the run; different facts are its first violation."""
    skipping, full = Simulation(setting, roles), Simulation(replace(setting, skips_ticks=False), roles)
    result, second = skipping.run(), full.run()
    if result.digest == second.digest:
        return result
    difference = f"{PROMISE}: {first_difference(skipping.bus.published, full.bus.published)}"
    return replace(result, violations=(difference, *result.violations), invariant=PROMISE)


def first_difference(skipping: list[Recorded], full: list[Recorded]) -> str:
    """Describe the first difference of two records. Raises ValueError if there is none."""
    for number, (first, second) in enumerate(zip_longest(skipping, full), start=1):
        first_text, second_text = (
            None if recorded is None else encode(recorded.envelope).decode() for recorded in (first, second)
        )
        if first_text != second_text:
            return (
                f"fact {number} is {first_text or 'none'} with ticks skipped, {second_text or 'none'} with all of them"
            )
    raise ValueError("the records are the same")
