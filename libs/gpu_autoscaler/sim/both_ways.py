"""One run with the ticks skipped that see nothing new, and again with all of them: the facts have to be the same.

What `glances.py` forgets shows here, as a promise that the run broke.
"""

from itertools import zip_longest

from msgspec.structs import replace

from gpu_autoscaler.events.envelope import Recorded, encode
from gpu_autoscaler.sim.seat import Roles
from gpu_autoscaler.sim.world import Result, Setting, World

PROMISE = "skipped ticks change nothing"


def run_both_ways(setting: Setting, roles: Roles) -> Result:
    """Return what came of the run; facts that differ are its first broken promise."""
    skipping, ticking = World(setting, roles), World(replace(setting, skips_ticks=False), roles)
    result, other = skipping.run(), ticking.run()
    if result.digest == other.digest:
        return result
    told = f"{PROMISE}: {first_difference(skipping.record.order, ticking.record.order)}"
    return replace(result, broken=(told, *result.broken), promise=PROMISE)


def first_difference(skipping: list[Recorded], ticking: list[Recorded]) -> str:
    """Say where two records part. Raises ValueError where they do not."""
    for number, (one, other) in enumerate(zip_longest(skipping, ticking), start=1):
        said, said_ticking = (None if each is None else encode(each.envelope).decode() for each in (one, other))
        if said != said_ticking:
            return f"fact {number} is {said or 'none'} with ticks skipped, {said_ticking or 'none'} with all of them"
    raise ValueError("the records are the same")
