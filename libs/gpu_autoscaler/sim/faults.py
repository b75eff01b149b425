"""What goes wrong, how often, and what did. The seed switches kinds on (a swarm: every run has its own mix).

Each kind draws from its own random numbers: a kind that is switched off, or one occurrence that is left out, leaves
the others as they were, as far as the run itself does. That is what makes a failing run small enough to read.
"""

import random
from collections.abc import Callable, Collection, Mapping

import msgspec

Occurrence = tuple[str, int]  # kind and number within the run, 1 for the first


class Kind(msgspec.Struct, frozen=True):
    """A kind of fault: by chance at each opportunity (`ratio`), or so often an hour (`per_hour`).

    `place` is what it disturbs, and so may make late; a process is named by its role, when it strikes. Without a place
    it is something that the system is there to deal with in time.
    """

    name: str
    ratio: float = 0.0
    per_hour: float = 0.0
    place: str = ""
    is_newer: bool = False  # than seeds that were kept: drawn by itself, so that their mix stays what it was
    share_max: float = 1.0  # of runs: what keeps others from striking is on in few of them, and is a newer one


PROCESS = "process"  # the one that it strikes
BROKER, KUBERNETES, CLOUD, STORE = "broker", "kubernetes", "cloud", "store"
RECORD = "record"  # all that the broker holds

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
        # processes
        Kind("service_killed", per_hour=0.25, place=PROCESS),
        Kind("killed_before_publish", ratio=0.002, place=PROCESS),
        Kind("killed_before_ack", ratio=0.002, place=PROCESS),
        Kind("killed_in_call", ratio=0.001, place=PROCESS),
        Kind("two_scalers", per_hour=0.2, place=PROCESS),
        Kind("clocks_differ", ratio=0.7),
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
        Kind("launch_slow", ratio=0.08, place=CLOUD),
        Kind("launch_throttled", ratio=0.05, place=CLOUD),
        Kind("launch_answer_lost", ratio=0.05, place=CLOUD),
        Kind("launches_held", per_hour=0.1, place=CLOUD, is_newer=True),
        Kind("launched_together", ratio=1.0, is_newer=True),  # nodes of a gang that are alike: all of them or none
        Kind("cloud_call_failed", ratio=0.01, place=CLOUD),
        Kind("instance_visible_late", ratio=0.08, place=CLOUD),
        Kind("instances_left_out", ratio=0.01, place=CLOUD, is_newer=True),
        # Nobody takes the node's object away when its machine has ended: a cluster without a cloud-controller-manager.
        Kind("node_left_behind", ratio=0.3, is_newer=True),
        Kind("instance_never_registers", ratio=0.03, place=CLOUD),
        Kind("gpus_never_allocatable", ratio=0.03, place=CLOUD),
        Kind("notice_120", per_hour=0.3),
        Kind("notice_30", per_hour=0.25),
        Kind("notice_0", per_hour=0.1),
        Kind("reclaimed_without_notice", per_hour=0.15),
        Kind("notice_cancelled", ratio=0.4),
        Kind("rebalance_hint", per_hour=0.2),
        # What the cloud warns of comes by its queue then, and is never taken back.
        Kind("metadata_closed", ratio=0.5, is_newer=True, share_max=0.25),
        Kind("storm_in_zone", per_hour=0.15),
        Kind("storm_of_type", per_hour=0.15),
        Kind("price_jumping", per_hour=0.2),
        Kind("price_missing", per_hour=0.15, place=CLOUD),
        Kind("instance_left_behind", per_hour=0.06),
        # telemetry
        Kind("telemetry_silent", per_hour=0.2),
        Kind("telemetry_frozen", per_hour=0.2),
        Kind("telemetry_all_zero", per_hour=0.2),
        Kind("telemetry_absurd", per_hour=0.2),
        # one GPU: broken, hot, worn, or only said to have failed an application
        Kind("worn_gpu", per_hour=0.3, is_newer=True),
        # the store of record
        Kind("store_full", per_hour=0.12, place=STORE),
        Kind("store_slow", ratio=0.02, place=PROCESS),
        Kind("store_answer_lost", ratio=0.01, place=PROCESS, is_newer=True),
        # snapshots of the state, as they are found
        Kind("snapshot_corrupt", ratio=0.1),
        Kind("snapshot_of_old_version", ratio=0.1),
        Kind("snapshot_of_other_stream", ratio=0.1),
        # operators and users
        Kind("operator_freezes", per_hour=0.1, place=PROCESS),
        Kind("operator_edits_policy", per_hour=0.1, place=PROCESS, is_newer=True),
        Kind("operator_edits_documents", per_hour=0.5, is_newer=True),
        Kind("operator_marks_node", per_hour=0.3),
        # While it is tight nothing is bought, and the fleet shrinks: on in few runs.
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
        """`kinds`: those switched on, None: the seed's own choice; `only`: the occurrences that happen, None: all;
        `times`: as often as usual."""
        self.kinds = frozenset(swarm(seed) if kinds is None else kinds)
        self.counts: dict[str, int] = {}
        self.happened: list[Occurrence] = []
        self.is_over = False
        self.clock: Callable[[], float] = float  # the world's, once there is one
        self._disturbed_until: dict[str, float] = {}  # by place, in the loop's seconds
        self._only = None if only is None else frozenset(only)
        self._times = times
        self._numbers: dict[str, int] = {}
        self._random = {name: random.Random(f"{seed}/{name}") for name in sorted(KINDS)}

    def strikes(self, name: str, role: str = "") -> bool:
        """True when this opportunity goes wrong; counted. `role`: of the process that it would strike."""
        if self.is_over or name not in self.kinds:
            return False
        return self._random[name].random() < KINDS[name].ratio * self._times and self.happens(name, role)

    def happens(self, name: str, role: str = "") -> bool:
        """A fault of this kind occurs now, unless that very one is left out."""
        number = self._numbers[name] = self._numbers.get(name, 0) + 1
        if self._only is not None and (name, number) not in self._only:
            return False
        self.counts[name] = self.counts.get(name, 0) + 1
        self.happened.append((name, number))
        if place := KINDS[name].place:
            self.lasts(0.0, role if place == PROCESS else place)
        return True

    def lasts(self, seconds: float, place: str) -> None:
        """What has just happened there is in force for so long."""
        self._disturbed_until[place] = max(self.disturbed_until(place), self.clock() + seconds)

    def disturbed_until(self, *places: str) -> float:
        """When the last fault at one of these places was, or will be, over; at any place for none given."""
        return max((self._disturbed_until.get(place, 0.0) for place in places or self._disturbed_until), default=0.0)

    def seconds(self, name: str, least: float, most: float) -> float:
        """How long this one lasts, or is away."""
        return self._random[name].uniform(least, most)

    def choose(self, name: str, among: list[str]) -> str:
        """Whom it hits."""
        return self._random[name].choice(among)

    def next_in_seconds(self, name: str) -> float | None:
        """When the next one of a kind that comes by itself is due; None: this kind never comes by itself."""
        per_hour = KINDS[name].per_hour
        if name not in self.kinds or per_hour <= 0:
            return None
        return self._random[name].expovariate(per_hour * self._times / 3600.0)


def swarm(seed: int) -> frozenset[str]:
    """The kinds that a seed switches on: none at all once in a while, each by a chance that the seed chooses."""
    chance = random.Random(f"{seed}/swarm")
    share = chance.choice((0.0, 0.1, 0.25, 0.5, 0.75, 1.0))
    return frozenset(
        name
        for name in sorted(KINDS)
        if (random.Random(f"{seed}/swarm/{name}") if KINDS[name].is_newer else chance).random()
        < min(share, KINDS[name].share_max)
    )
