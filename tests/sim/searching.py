"""Runs one place after the other of the code that stands on the path, and prints what each broke: a line of JSON each.

`python -m tests.sim.searching PLACES SECONDS FOUND`: `PLACES` as JSON, `[[seed, hours, world], ...]`; begins no run
after so many seconds of wall time, and ends early after so many finds.
"""

import signal
import sys
import time
from collections.abc import Mapping

import msgspec

from gpu_autoscaler.sim.process import BUG
from gpu_autoscaler.sim.world import Setting
from gpu_autoscaler_services.simulate import run_one

# Of wall time; a run takes seconds, and one that a bug keeps from ending has shown nothing.
RUN_SECONDS_MAX = 300


class World(msgspec.Struct, frozen=True):
    """Which faults there are, and how many times as often as usual."""

    kinds: tuple[str, ...] | None = None  # None: the seed's own choice
    faults_times: float = 1.0


SWARM = "swarm"
# What hides behind much other trouble, or comes together once in many years, shows where little else goes wrong.
WORLDS: Mapping[str, World] = {
    SWARM: World(),
    "notices": World(
        ("notice_120", "notice_30", "notice_cancelled", "rebalance_hint", "storm_of_type", "budget_tightened"), 8.0
    ),
    "operators": World(("node_cordoned", "budget_tightened", "operator_marks_node", "pod_vanished"), 10.0),
    "launches": World(
        ("broker_away", "launch_slow", "launch_answer_lost", "instance_visible_late", "launch_refused", "two_scalers"),
        6.0,
    ),
    "losses": World(("broker_lost", "instance_visible_late", "instance_left_behind", "capacity_gone"), 12.0),
    "crashes": World(
        (
            "service_killed", "killed_before_publish", "killed_before_ack", "killed_in_call", "publish_answer_lost",
            "store_answer_lost", "message_repeated", "user_asks_again",
        ),
        4.0,
    ),
    "sensors": World(
        ("telemetry_all_zero", "telemetry_frozen", "telemetry_silent", "telemetry_absurd", "worn_gpu"), 10.0
    ),
}  # fmt: skip


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A run in which to look."""

    seed: int
    hours: float
    world: str = SWARM

    @property
    def setting(self) -> Setting:
        """What makes the run."""
        world = WORLDS[self.world]
        return Setting(seed=self.seed, hours=self.hours, kinds=world.kinds, faults_times=world.faults_times)


class Looked(msgspec.Struct, frozen=True):
    """What one place showed. A run that fell over by an exception, or never ended, has found nothing."""

    place: Place
    promise: str = ""  # empty: all were kept
    what: str = ""
    error: str = ""
    seconds: float = 0.0  # of CPU

    @property
    def is_found(self) -> bool:
        """True where a promise broke, or the end was not settled."""
        return bool(self.promise)


def look(place: Place) -> Looked:
    """Run one seed."""
    signal.alarm(RUN_SECONDS_MAX)
    began_at = time.process_time()
    try:
        result = run_one(place.setting)
    except Exception as exc:  # noqa: BLE001 - whatever a planted bug makes of the code is told
        return Looked(place, error=f"the run fell over: {exc!r}")
    finally:
        signal.alarm(0)
    if result.promise == BUG:
        return Looked(place, error=result.broken[0])
    seconds = round(time.process_time() - began_at, 2)
    return Looked(place, result.promise, result.broken[0] if result.broken else "", seconds=seconds)


def main() -> None:
    """Print a line for each place, until there are enough finds or it is too late."""
    signal.signal(signal.SIGALRM, _too_long)
    places = msgspec.json.decode(sys.argv[1], type=list[Place])
    until, left = time.monotonic() + float(sys.argv[2]), int(sys.argv[3])
    for place in places:
        looked = look(place)
        sys.stdout.write(msgspec.json.encode(looked).decode() + "\n")
        left -= looked.is_found
        if left <= 0 or time.monotonic() >= until:
            return


def _too_long(*_: object) -> None:
    raise TimeoutError(f"more than {RUN_SECONDS_MAX} s")


if __name__ == "__main__":
    main()
