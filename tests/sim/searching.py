"""Runs one place after the other with the code on the import path, and prints the violations: a line of JSON each.

`python -m tests.sim.searching PLACES SECONDS FOUND`: `PLACES` as JSON, `[[seed, hours, profile], ...]`; starts no run
after SECONDS of CPU, and ends after FOUND finds.
"""

import signal
import sys
import time
from collections.abc import Mapping

import msgspec

from gpu_autoscaler.sim.process_pool import BUG
from gpu_autoscaler.sim.simulation import Setting
from gpu_autoscaler_services.simulate import run_one

# Of CPU; a run takes seconds, and a run that a bug keeps from ending counts as nothing found.
RUN_SECONDS_MAX = 60.0


class FaultProfile(msgspec.Struct, frozen=True):
    """Kinds of faults and their frequency."""

    kinds: tuple[str, ...] | None = None  # None: chosen by the seed
    faults_times: float = 1.0
    jobs_per_hour: float | None = None  # None: chosen by the seed
    expects_refusals: bool = False  # by the plan check; for bugs in what follows them
    quiet_days: int = 0  # skipped at rest, before more work comes
    has_teams: bool = False
    has_kueue: bool = False


SEED_CHOICE = "mixed"
# Rare conditions show best where few other faults occur.
PROFILES: Mapping[str, FaultProfile] = {
    SEED_CHOICE: FaultProfile(),
    "calm": FaultProfile(()),
    "busy": FaultProfile((), jobs_per_hour=60.0),
    "teams": FaultProfile((), jobs_per_hour=30.0, has_teams=True),
    "kueue": FaultProfile((), jobs_per_hour=2.0, has_kueue=True),
    "kueue and notices": FaultProfile(("notice_120", "notice_30"), 10.0, jobs_per_hour=2.0, has_kueue=True),
    "services": FaultProfile((), jobs_per_hour=5.0),
    "cordons": FaultProfile(("node_cordoned",), 40.0, jobs_per_hour=40.0),
    "outages": FaultProfile(("broker_away",), 30.0, jobs_per_hour=10.0),
    "quiet": FaultProfile((), jobs_per_hour=10.0),
    "lost answers": FaultProfile(
        ("launch_answer_lost", "instance_visible_late", "launch_slow", "service_killed"), 8.0, jobs_per_hour=60.0
    ),
    "losses and faults": FaultProfile(
        ("broker_lost", "service_killed", "kube_call_failed", "list_stale", "launch_slow"), 12.0
    ),
    "warnings": FaultProfile(("notice_120", "notice_30", "budget_tightened"), 10.0, jobs_per_hour=6.0),
    "users": FaultProfile(("user_cancels", "user_asks_again", "user_talks_nonsense"), 4.0),
    "notices": FaultProfile(
        ("notice_120", "notice_30", "notice_cancelled", "rebalance_hint", "storm_of_type", "budget_tightened"), 8.0
    ),
    "queue": FaultProfile(
        ("metadata_closed", "notice_120", "notice_30", "rebalance_hint", "broker_away", "killed_before_publish"), 8.0
    ),
    "operators": FaultProfile(("node_cordoned", "budget_tightened", "operator_marks_node", "pod_vanished"), 10.0),
    "quiet months": FaultProfile(("plans_discarded",), 6.0, jobs_per_hour=20.0),
    "a month without work": FaultProfile((), jobs_per_hour=20.0, quiet_days=35),
    "ledger behind": FaultProfile(
        ("cost_tracker_away", "operator_lowers_money", "service_killed"), 6.0, jobs_per_hour=40.0
    ),
    "silent hooks": FaultProfile(
        ("hooks_silent", "storm_of_type", "storm_in_zone", "notice_120"), 12.0, jobs_per_hour=60.0
    ),
    "cost tracker restarts": FaultProfile(("service_killed", "retention_short"), 20.0, jobs_per_hour=30.0),
    "refused purchases": FaultProfile(
        ("notice_120", "notice_30"), 40.0, jobs_per_hour=30.0, expects_refusals=True
    ),
    "overrides": FaultProfile(("operator_overrules", "operator_freezes"), 6.0, jobs_per_hour=40.0),
    "many overrides": FaultProfile(("operator_overrules",), 25.0, jobs_per_hour=40.0),
    "launches": FaultProfile(
        ("broker_away", "launch_slow", "launch_answer_lost", "instance_visible_late", "launch_refused", "two_scalers"),
        6.0,
    ),
    "slow launches": FaultProfile(("launch_slow", "notice_120", "notice_30"), 40.0, jobs_per_hour=60.0),
    "refusals": FaultProfile(("launch_refused", "launch_throttled", "capacity_gone"), 5.0, jobs_per_hour=40.0),
    "quota of zero": FaultProfile(("quota_zero", "notice_120", "notice_30", "service_killed"), 6.0, jobs_per_hour=40.0),
    "failed boots": FaultProfile(("instance_never_registers", "gpus_never_allocatable", "node_vanished"), 8.0),
    "losses": FaultProfile(("broker_lost", "instance_visible_late", "instance_left_behind", "capacity_gone"), 12.0),
    "losses and failed boots": FaultProfile(("broker_lost", "gpus_never_allocatable"), 25.0, jobs_per_hour=30.0),
    "crashes": FaultProfile(
        (
            "service_killed", "killed_before_publish", "killed_before_ack", "killed_in_call", "publish_answer_lost",
            "store_answer_lost", "message_repeated", "user_asks_again",
        ),
        4.0,
    ),
    "redeliveries": FaultProfile(
        ("launch_refused", "capacity_gone", "message_repeated", "killed_before_ack"), 6.0, jobs_per_hour=40.0
    ),
    "policy edits": FaultProfile(("operator_edits_policy", "budget_spent_in_drain"), 12.0, jobs_per_hour=30.0),
    "losses and policy edits": FaultProfile(("operator_edits_policy", "broker_lost"), 30.0, jobs_per_hour=30.0),
    "overtaking streams": FaultProfile(("message_delayed", "streams_overtaking"), 15.0, jobs_per_hour=40.0),
    "deleted nodes": FaultProfile(("node_vanished",), 20.0, jobs_per_hour=30.0),
    "orphaned nodes": FaultProfile(
        ("node_left_behind", "instances_left_out", "reclaimed_without_notice", "cloud_call_failed"), 8.0,
        jobs_per_hour=30.0,
    ),
    "API outages": FaultProfile(("kubernetes_away",), 40.0, jobs_per_hour=30.0),
    "delayed launches": FaultProfile(("launches_held",), 30.0, jobs_per_hour=30.0),
    "short retention": FaultProfile(("retention_short", "service_killed", "snapshot_corrupt"), 8.0),
    "suspended readers": FaultProfile(("service_suspended", "retention_short"), 8.0, jobs_per_hour=30.0),
    "overflowing streams": FaultProfile(("streams_overflow", "service_killed", "snapshot_corrupt"), 8.0),
    "clocks": FaultProfile(("clock_far_ahead", "notice_120", "notice_30"), 8.0),
    "messages": FaultProfile(
        ("message_delayed", "message_repeated", "streams_overtaking", "list_stale", "watch_broken",
         "watch_history_lost", "pod_vanished", "node_vanished"),
        6.0,
    ),
    "telemetry": FaultProfile(
        ("telemetry_all_zero", "telemetry_frozen", "telemetry_silent", "telemetry_absurd", "worn_gpu"), 10.0
    ),
}  # fmt: skip


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A run to search."""

    seed: int
    hours: float
    profile: str = SEED_CHOICE

    @property
    def setting(self) -> Setting:
        """The settings of the run."""
        profile = PROFILES[self.profile]
        return Setting(
            seed=self.seed,
            hours=self.hours,
            kinds=profile.kinds,
            faults_times=profile.faults_times,
            jobs_per_hour=profile.jobs_per_hour,
            quiet_days=profile.quiet_days,
            has_teams=profile.has_teams,
            has_kueue=profile.has_kueue,
            expects_refusals=profile.expects_refusals,
        )


class SearchResult(msgspec.Struct, frozen=True):
    """Result of one place. An exception or a run without end counts as nothing found."""

    place: Place
    promise: str = ""  # empty: no violation
    what: str = ""
    error: str = ""
    seconds: float = 0.0  # of CPU

    @property
    def is_found(self) -> bool:
        """True if an invariant was violated."""
        return bool(self.promise)


def search_place(place: Place) -> SearchResult:
    """Run one seed."""
    signal.setitimer(signal.ITIMER_PROF, RUN_SECONDS_MAX)
    began_at = time.process_time()
    try:
        result = run_one(place.setting)
    except Exception as exc:  # noqa: BLE001 - any effect of a planted bug is reported
        return SearchResult(place, error=f"the run fell over: {exc!r}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    if result.invariant == BUG:
        return SearchResult(place, error=result.violations[0])
    seconds = round(time.process_time() - began_at, 2)
    return SearchResult(place, result.invariant, result.violations[0] if result.violations else "", seconds=seconds)


def main() -> None:
    """Print a line for each place, until enough was found or time is up."""
    signal.signal(signal.SIGPROF, _too_long)
    places = msgspec.json.decode(sys.argv[1], type=list[Place])
    until, remaining = time.process_time() + float(sys.argv[2]), int(sys.argv[3])
    for place in places:
        result = search_place(place)
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
        remaining -= result.is_found
        if remaining <= 0 or time.process_time() >= until:
            return


def _too_long(*_: object) -> None:
    raise TimeoutError(f"more than {RUN_SECONDS_MAX:g} s of CPU")


if __name__ == "__main__":
    main()
