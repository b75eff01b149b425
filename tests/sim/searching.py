"""Runs one place after the other of the code that stands on the path, and prints what each broke: a line of JSON each.

`python -m tests.sim.searching PLACES SECONDS FOUND`: `PLACES` as JSON, `[[seed, hours, world], ...]`; begins no run
after so many seconds of CPU, and ends early after so many finds.
"""

import signal
import sys
import time
from collections.abc import Mapping

import msgspec

from gpu_autoscaler.sim.process import BUG
from gpu_autoscaler.sim.world import Setting
from gpu_autoscaler_services.simulate import run_one

# Of CPU; a run takes seconds, and one that a bug keeps from ending has shown nothing.
RUN_SECONDS_MAX = 60.0


class World(msgspec.Struct, frozen=True):
    """Which faults there are, and how many times as often as usual."""

    kinds: tuple[str, ...] | None = None  # None: the seed's own choice
    faults_times: float = 1.0
    jobs_per_hour: float | None = None  # None: the seed's own choice


SWARM = "swarm"
# What hides behind much other trouble, or comes together once in many years, shows where little else goes wrong.
WORLDS: Mapping[str, World] = {
    SWARM: World(),
    "calm": World(()),
    "busy": World((), jobs_per_hour=60.0),
    "services": World((), jobs_per_hour=5.0),
    "cordons": World(("node_cordoned",), 40.0, jobs_per_hour=40.0),
    "outages": World(("broker_away",), 30.0, jobs_per_hour=10.0),
    "quiet": World((), jobs_per_hour=10.0),
    "answers": World(
        ("launch_answer_lost", "instance_visible_late", "launch_slow", "service_killed"), 8.0, jobs_per_hour=60.0
    ),
    "ruins": World(("broker_lost", "service_killed", "kube_call_failed", "list_stale", "launch_slow"), 12.0),
    "warnings": World(("notice_120", "notice_30", "budget_tightened"), 10.0, jobs_per_hour=6.0),
    "users": World(("user_cancels", "user_asks_again", "user_talks_nonsense"), 4.0),
    "notices": World(
        ("notice_120", "notice_30", "notice_cancelled", "rebalance_hint", "storm_of_type", "budget_tightened"), 8.0
    ),
    "queue": World(
        ("metadata_closed", "notice_120", "notice_30", "rebalance_hint", "broker_away", "killed_before_publish"), 8.0
    ),
    "operators": World(("node_cordoned", "budget_tightened", "operator_marks_node", "pod_vanished"), 10.0),
    "overrulers": World(("operator_overrules", "operator_freezes"), 6.0, jobs_per_hour=40.0),
    "many words": World(("operator_overrules",), 25.0, jobs_per_hour=40.0),
    "launches": World(
        ("broker_away", "launch_slow", "launch_answer_lost", "instance_visible_late", "launch_refused", "two_scalers"),
        6.0,
    ),
    "refusals": World(("launch_refused", "launch_throttled", "capacity_gone"), 5.0, jobs_per_hour=40.0),
    "duds": World(("instance_never_registers", "gpus_never_allocatable", "node_vanished"), 8.0),
    "losses": World(("broker_lost", "instance_visible_late", "instance_left_behind", "capacity_gone"), 12.0),
    "lost duds": World(("broker_lost", "gpus_never_allocatable"), 25.0, jobs_per_hour=30.0),
    "crashes": World(
        (
            "service_killed", "killed_before_publish", "killed_before_ack", "killed_in_call", "publish_answer_lost",
            "store_answer_lost", "message_repeated", "user_asks_again",
        ),
        4.0,
    ),
    "redeliveries": World(
        ("launch_refused", "capacity_gone", "message_repeated", "killed_before_ack"), 6.0, jobs_per_hour=40.0
    ),
    "editors": World(("operator_edits_policy", "budget_spent_in_drain"), 12.0, jobs_per_hour=30.0),
    "ruined drains": World(("operator_edits_policy", "broker_lost"), 30.0, jobs_per_hour=30.0),
    "crossings": World(("message_delayed", "streams_overtaking"), 15.0, jobs_per_hour=40.0),
    "deleters": World(("node_vanished",), 20.0, jobs_per_hour=30.0),
    "left nodes": World(
        ("node_left_behind", "instances_left_out", "reclaimed_without_notice", "cloud_call_failed"), 8.0,
        jobs_per_hour=30.0,
    ),
    "blind": World(("kubernetes_away",), 40.0, jobs_per_hour=30.0),
    "late launches": World(("launches_held",), 30.0, jobs_per_hour=30.0),
    "messages": World(
        ("message_delayed", "message_repeated", "streams_overtaking", "list_stale", "watch_broken",
         "watch_history_lost", "pod_vanished", "node_vanished"),
        6.0,
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
        return Setting(
            seed=self.seed,
            hours=self.hours,
            kinds=world.kinds,
            faults_times=world.faults_times,
            jobs_per_hour=world.jobs_per_hour,
        )


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
    signal.setitimer(signal.ITIMER_PROF, RUN_SECONDS_MAX)
    began_at = time.process_time()
    try:
        result = run_one(place.setting)
    except Exception as exc:  # noqa: BLE001 - whatever a planted bug makes of the code is told
        return Looked(place, error=f"the run fell over: {exc!r}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    if result.promise == BUG:
        return Looked(place, error=result.broken[0])
    seconds = round(time.process_time() - began_at, 2)
    return Looked(place, result.promise, result.broken[0] if result.broken else "", seconds=seconds)


def main() -> None:
    """Print a line for each place, until there are enough finds or it is too late."""
    signal.signal(signal.SIGPROF, _too_long)
    places = msgspec.json.decode(sys.argv[1], type=list[Place])
    until, left = time.process_time() + float(sys.argv[2]), int(sys.argv[3])
    for place in places:
        looked = look(place)
        sys.stdout.write(msgspec.json.encode(looked).decode() + "\n")
        left -= looked.is_found
        if left <= 0 or time.process_time() >= until:
            return


def _too_long(*_: object) -> None:
    raise TimeoutError(f"more than {RUN_SECONDS_MAX:g} s of CPU")


if __name__ == "__main__":
    main()
