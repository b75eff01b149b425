"""Kinds of faults, their frequency, and the faults that struck. The seed chooses the kinds, so every run has its own
mix.

Each kind has its own random numbers: switching off a kind, or leaving out one occurrence, does not change the others,
except through the run itself. This is what makes shrinking possible.
"""

import random
from collections.abc import Callable, Collection, Mapping
from copy import copy

import msgspec

Occurrence = tuple[str, int]  # kind and number within the run, from 1


class Kind(msgspec.Struct, frozen=True):
    """A kind of fault: by chance at each opportunity (`ratio`), or at a rate (`per_hour`).

    `place` is the component that it disturbs and may delay; a process is named by its role when the fault strikes.
    Without a place it is an event that the system must handle in time.
    """

    name: str
    ratio: float = 0.0
    per_hour: float = 0.0
    place: str = ""
    is_newer: bool = False  # drawn from its own generator, to keep the mix of recorded seeds stable
    share_max: float = 1.0  # of runs; below 1 for a kind that suppresses others, which then must be a newer one


PROCESS = "process"  # the process that it strikes
SNAPSHOT_FAULTS = ("snapshot_corrupt", "snapshot_of_old_version", "snapshot_of_other_stream")
BROKER, KUBERNETES, CLOUD, STORE = "broker", "kubernetes", "cloud", "store"
RECORD = "record"  # everything in the broker
COST_TRACKER = "cost_tracker"

KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        # messages
        Kind("message_delayed", ratio=0.01, place=PROCESS),
        Kind("message_repeated", ratio=0.02, place=PROCESS),
        Kind("streams_overtaking", per_hour=0.15, place=PROCESS),
        Kind("publish_answer_lost", ratio=0.002, place=PROCESS),
        Kind("broker_away", per_hour=0.15, place=BROKER),
        Kind("broker_lost", per_hour=0.05, place=RECORD),
        # Streams discard by age and size while what they tell of still lives.
        Kind("retention_short", ratio=1.0, is_newer=True, share_max=0.25),
        Kind("streams_overflow", ratio=1.0, is_newer=True, share_max=0.1),  # by size alone
        Kind("plans_discarded", per_hour=2.0, is_newer=True),  # every stored plan, as after a quiet month
        # processes
        Kind("service_killed", per_hour=0.25, place=PROCESS),
        # A paused container or virtual machine: it continues as if no time had passed.
        Kind("service_suspended", per_hour=0.2, place=PROCESS, is_newer=True, share_max=0.1),
        Kind("killed_before_publish", ratio=0.002, place=PROCESS),
        Kind("killed_before_ack", ratio=0.002, place=PROCESS),
        Kind("killed_in_call", ratio=0.001, place=PROCESS),
        Kind("two_scalers", per_hour=0.2, place=PROCESS),
        Kind("clocks_differ", ratio=0.7),
        # The clock of a node, or of the pod watcher's host, is hours ahead (a hardware clock in local time).
        Kind("clock_far_ahead", ratio=0.5, is_newer=True, share_max=0.25),
        # The ledger falls behind by minutes or hours, while the cloud charges on.
        Kind("cost_tracker_away", per_hour=0.2, place=COST_TRACKER, is_newer=True, share_max=0.1),
        # Kubernetes
        Kind("list_stale", ratio=0.2, place=PROCESS),
        Kind("watch_broken", per_hour=0.3, place=KUBERNETES),
        Kind("watch_history_lost", per_hour=0.15, place=KUBERNETES),
        Kind("kubernetes_away", per_hour=0.1, place=KUBERNETES, is_newer=True),
        Kind("kube_call_failed", ratio=0.01, place=PROCESS),
        Kind("kube_answer_lost", ratio=0.01, place=PROCESS),
        Kind("node_vanished", per_hour=0.2),
        Kind("pod_vanished", per_hour=0.2),
        Kind("node_cordoned", per_hour=0.3),
        Kind("budget_tightened", per_hour=0.8),
        Kind("budget_spent_in_drain", ratio=0.25, is_newer=True),
        # clouds
        Kind("launch_refused", ratio=0.08),
        Kind("capacity_gone", per_hour=0.15),
        # The account's quota of GPUs is zero for a while: no launch succeeds, and work waits for hours.
        Kind("quota_zero", per_hour=0.3, is_newer=True, share_max=0.15),
        Kind("launch_slow", ratio=0.08, place=CLOUD),
        Kind("launch_throttled", ratio=0.05, place=CLOUD),
        Kind("launch_answer_lost", ratio=0.05, place=CLOUD),
        Kind("launches_held", per_hour=0.1, place=CLOUD, is_newer=True),
        Kind("launched_together", ratio=1.0, is_newer=True),  # same-shape nodes of a gang: all or none
        Kind("cloud_call_failed", ratio=0.01, place=CLOUD),
        Kind("instance_visible_late", ratio=0.08, place=CLOUD),
        Kind("instances_left_out", ratio=0.01, place=CLOUD, is_newer=True),
        # A cluster without a cloud-controller-manager: node objects of ended machines are not removed.
        Kind("node_left_behind", ratio=0.3, is_newer=True),
        Kind("instance_never_registers", ratio=0.03, place=CLOUD),
        Kind("gpus_never_allocatable", ratio=0.03, place=CLOUD),
        Kind("notice_120", per_hour=0.3),
        Kind("notice_30", per_hour=0.25),
        Kind("notice_0", per_hour=0.1),
        Kind("reclaimed_without_notice", per_hour=0.15),
        Kind("notice_cancelled", ratio=0.4),
        Kind("rebalance_hint", per_hour=0.2),
        # Warnings then arrive by the interruption queue, and are never withdrawn.
        Kind("metadata_closed", ratio=0.5, is_newer=True, share_max=0.25),
        Kind("storm_in_zone", per_hour=0.15),
        Kind("storm_of_type", per_hour=0.15),
        Kind("price_jumping", per_hour=0.2),
        Kind("price_missing", per_hour=0.15, place=CLOUD),
        Kind("instance_left_behind", per_hour=0.06),
        # Every pod has a checkpoint hook that answers nobody in time.
        Kind("hooks_silent", ratio=1.0, is_newer=True, share_max=0.25),
        # telemetry
        Kind("telemetry_silent", per_hour=0.2),
        Kind("telemetry_frozen", per_hour=0.2),
        Kind("telemetry_all_zero", per_hour=0.2),
        Kind("telemetry_absurd", per_hour=0.2),
        # one GPU: broken, hot, degraded, or only with an application error
        Kind("worn_gpu", per_hour=0.3, is_newer=True),
        # the store
        Kind("store_full", per_hour=0.12, place=STORE),
        Kind("store_slow", ratio=0.02, place=PROCESS),
        Kind("store_answer_lost", ratio=0.01, place=PROCESS, is_newer=True),
        # corrupted snapshots
        Kind("snapshot_corrupt", ratio=0.1),
        Kind("snapshot_of_old_version", ratio=0.1),
        Kind("snapshot_of_other_stream", ratio=0.1),
        # operators and users
        Kind("operator_freezes", per_hour=0.1, place=PROCESS),
        Kind("operator_edits_policy", per_hour=0.1, place=PROCESS, is_newer=True),
        Kind("operator_edits_documents", per_hour=0.5, is_newer=True),
        Kind("operator_marks_node", per_hour=0.3),
        # While the limit is low nothing is bought and the fleet shrinks, so few runs have it.
        Kind("operator_lowers_money", per_hour=0.4, place=PROCESS, is_newer=True, share_max=0.25),
        Kind("operator_overrules", per_hour=0.6, is_newer=True),
        Kind("user_cancels", ratio=0.08),
        Kind("user_asks_again", ratio=0.08),
        Kind("user_talks_nonsense", ratio=0.06),
    )
}


class Faults:
    """The faults of one run."""

    def __init__(
        self,
        seed: int,
        *,
        kinds: Collection[str] | None = None,
        only: Collection[Occurrence] | None = None,
        times: float = 1.0,
    ) -> None:
        """`kinds`: switched on, None: chosen by the seed; `only`: the only occurrences, None: all; `times`: multiplies
        the frequency.
        """
        self.kinds = frozenset(kinds_of_seed(seed) if kinds is None else kinds)
        self.counts: dict[str, int] = {}
        self.happened: list[Occurrence] = []
        self.clock: Callable[[], float] = float  # the simulation's clock, once it exists
        self._disturbed_until: dict[str, float] = {}  # by place, in seconds of the loop
        self._only = None if only is None else frozenset(only)
        self._times = times
        self._numbers: dict[str, int] = {}
        self.random_by_kind = {name: random.Random(f"{seed}/{name}") for name in sorted(KINDS)}
        self._seed = seed
        self._ends: list[float] = []  # when faults ended; one list for all that draw apart
        self._apart: dict[str, Faults] = {}

    def apart(self, of: str, kinds: Collection[str]) -> "Faults":
        """Return these kinds of the faults with random numbers of their own: what draws them changes no other draw."""
        if of not in self._apart:
            self._apart[of] = faults = copy(self)
            faults.kinds = self.kinds.intersection(kinds)
            faults.random_by_kind = {name: random.Random(f"{self._seed}/{of}/{name}") for name in kinds}
        return self._apart[of]

    @property
    def is_over(self) -> bool:
        """True once no fault strikes any more."""
        return bool(self._ends)

    def end(self) -> None:
        """No fault strikes from now on."""
        self._ends.append(self.clock())

    def strikes(self, name: str, role: str = "") -> bool:
        """True if this opportunity fails; counted. `role`: of the process that it would strike."""
        if self.is_over or name not in self.kinds:
            return False
        return self.random_by_kind[name].random() < KINDS[name].ratio * self._times and self.happens(name, role)

    def happens(self, name: str, role: str = "") -> bool:
        """Count an occurrence; False if it is left out."""
        number = self._numbers[name] = self._numbers.get(name, 0) + 1
        if self._only is not None and (name, number) not in self._only:
            return False
        self.counts[name] = self.counts.get(name, 0) + 1
        self.happened.append((name, number))
        if place := KINDS[name].place:
            self.disturb(0.0, role if place == PROCESS else place)
        return True

    def disturb(self, seconds: float, place: str) -> None:
        """Mark the place as disturbed for this time."""
        self._disturbed_until[place] = max(self.disturbed_until(place), self.clock() + seconds)

    def disturbed_until(self, *places: str) -> float:
        """When the last fault at one of these places ends or ended; without places: at any place."""
        return max((self._disturbed_until.get(place, 0.0) for place in places or self._disturbed_until), default=0.0)

    def seconds(self, name: str, least: float, most: float) -> float:
        return self.random_by_kind[name].uniform(least, most)

    def choose(self, name: str, among: list[str]) -> str:
        return self.random_by_kind[name].choice(among)

    def next_in_seconds(self, name: str) -> float | None:
        """Return the seconds to the next fault of a scheduled kind; None: the kind is off or not scheduled."""
        per_hour = KINDS[name].per_hour
        if name not in self.kinds or per_hour <= 0:
            return None
        return self.random_by_kind[name].expovariate(per_hour * self._times / 3600.0)


def kinds_of_seed(seed: int) -> frozenset[str]:
    """Return the kinds that a seed switches on: none in some runs, each with a probability that the seed chooses.

    The strings that seed `Random` are part of each seed's meaning.
    """
    rng = random.Random(f"{seed}/swarm")
    share = rng.choice((0.0, 0.1, 0.25, 0.5, 0.75, 1.0))
    return frozenset(
        name
        for name in sorted(KINDS)
        if (random.Random(f"{seed}/swarm/{name}") if KINDS[name].is_newer else rng).random()
        < min(share, KINDS[name].share_max)
    )
