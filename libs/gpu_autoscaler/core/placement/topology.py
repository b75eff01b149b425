"""Who stands with whom in a room: for each tally how many pods each bin has, and which bins a shape's rules leave open.

Used by `core/placement/engine.py`. Bins are known by their place in the room.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from gpu_autoscaler.core.placement.pod_affinity import AffinityTerm, PodConstraints, Tally, count
from gpu_autoscaler.core.placement.resources import Bools, Ints
from gpu_autoscaler.core.placement.shapes import Bin
from gpu_autoscaler.model import labels

OtherDomains = Callable[[str], Collection[str]]  # topology key -> domains in which there could be a node


class Domains:
    """Which bins are near each other by one label."""

    def __init__(self, key: str, bins: Sequence[Bin]) -> None:
        """Every bin is a host of its own; by any other key only a bin that has the label is in a domain."""
        names = [entry.key if key == labels.HOSTNAME else entry.labels.get(key) for entry in bins]
        self.numbers: dict[str, int] = {}
        for name in names:
            if name is not None:
                self.numbers.setdefault(name, len(self.numbers))
        self.of_bin = np.array([-1 if name is None else self.numbers[name] for name in names], dtype=np.int64)

    def sums(self, of_bin: Ints) -> Ints:
        """Return the sum of each domain; there is one number more, of the bins in no domain."""
        sums = np.zeros(len(self.numbers) + 1, dtype=np.int64)
        np.add.at(sums, self.of_bin, of_bin)
        return sums


class PodTopology:
    """Counts of pods by bin. Whoever places pods says so here, and takes it back here."""

    def __init__(self) -> None:
        self._bins: Sequence[Bin] = ()
        self._domains: dict[str, Domains] = {}
        self._counts: dict[Tally, Ints] = {}
        self._placed: dict[Tally, dict[int, int]] = {}

    def set_bins(self, bins: Sequence[Bin]) -> None:
        """From now on these are the bins: those of before with more after them, or fewer of them."""
        before = len(self._bins)
        for tally, counts in self._counts.items():
            added = [count(entry.pods, tally) if entry.pods else 0 for entry in bins[before:]]
            self._counts[tally] = np.append(counts[: len(bins)], added).astype(np.int64)
        self._bins = tuple(bins)
        self._domains.clear()

    def add(self, place: int, pod_constraints: PodConstraints, pods_count: int) -> None:
        """Note that so many more (or, below zero, fewer) pods of this company stand in the bin."""
        for tally in pod_constraints.tallies:
            placed = self._placed.setdefault(tally, {})
            placed[place] = placed.get(place, 0) + pods_count
            if tally in self._counts:
                self._counts[tally][place] += pods_count

    def open_bins(
        self, pod_constraints: PodConstraints, eligible: Bools, is_there: Bools, elsewhere: OtherDomains
    ) -> Bools:
        """Return for each bin whether one more pod of this company may stand there.

        `eligible` are the bins that are right for the pod in everything but room and neighbours: their domains are
        those over which it is spread, with those `elsewhere`.
        """
        right = is_there.copy()
        for each in pod_constraints.apart:
            domains, sums = self._sums(each.topology_key, each.tally, is_there)
            sums[-1] = 0
            right &= sums[domains.of_bin] == 0
        for each in pod_constraints.together:
            domains, sums = self._sums(each.topology_key, each.tally, is_there)
            is_first = not sums.any() and each.tally in pod_constraints.tallies
            right &= (domains.of_bin >= 0) & (is_first | (sums[domains.of_bin] > 0))
        for spread in pod_constraints.spreads:
            domains, sums = self._sums(spread.topology_key, spread.tally, is_there)
            least = self._least(domains, sums, eligible & is_there, elsewhere(spread.topology_key))
            own = spread.tally in pod_constraints.tallies
            right &= (domains.of_bin >= 0) & (sums[domains.of_bin] + own - least <= spread.skew_count_max)
        return right

    def bins_kept(
        self,
        pod_constraints: PodConstraints,
        eligible: Bools,
        is_there: Bools,
        elsewhere: OtherDomains,
        open_counts: Mapping[Tally, int],
    ) -> Bools:
        """Return for each bin whether a pod of this company that stands there may, as pods stand now.

        Pods of a tally that have no place yet, so many as `open_counts` says, may come where the fewest are.
        """
        right = is_there.copy()
        for each in pod_constraints.apart:
            domains, sums = self._sums(each.topology_key, each.tally, is_there)
            sums[-1] = 0
            right &= sums[domains.of_bin] <= (each.tally in pod_constraints.tallies)
        for each in pod_constraints.together:
            domains, sums = self._sums(each.topology_key, each.tally, is_there)
            own = int(each.tally in pod_constraints.tallies)
            is_alone = own > 0 and int(sums.sum()) <= own
            right &= (domains.of_bin >= 0) & (is_alone | (sums[domains.of_bin] > own))
        for spread in pod_constraints.spreads:
            domains, sums = self._sums(spread.topology_key, spread.tally, is_there)
            least = self._least(domains, sums, eligible & is_there, elsewhere(spread.topology_key))
            skew_max = spread.skew_count_max + open_counts.get(spread.tally, 0)
            right &= (domains.of_bin >= 0) & (sums[domains.of_bin] - least <= skew_max)
        return right

    def open_new_nodes(
        self,
        pod_constraints: PodConstraints,
        eligible: Bools,
        is_there: Bools,
        elsewhere: OtherDomains,
        zones: Sequence[str | None],
    ) -> Bools:
        """Return for nodes that do not exist, by their zones, whether one pod of this company may stand on each.

        A new host is empty. By other labels than host and zone nothing is known of a new node, and nothing is allowed.
        """
        is_open = dict.fromkeys(zones, True)
        nears = (*pod_constraints.apart, *pod_constraints.together)
        for key in {*(each.topology_key for each in nears), *(each.topology_key for each in pod_constraints.spreads)}:
            for zone in is_open:
                is_open[zone] = is_open[zone] and self._is_new_node_open(
                    pod_constraints, eligible, is_there, elsewhere, key, zone if key == labels.ZONE else None
                )
        return np.array([is_open[zone] for zone in zones], dtype=np.bool_)

    def _is_new_node_open(
        self,
        pod_constraints: PodConstraints,
        eligible: Bools,
        is_there: Bools,
        elsewhere: OtherDomains,
        key: str,
        domain: str | None,
    ) -> bool:
        if domain is None and key != labels.HOSTNAME:
            return False
        for each in (each for each in (*pod_constraints.apart, *pod_constraints.together) if each.topology_key == key):
            domains, sums = self._sums(key, each.tally, is_there)
            stand_there = 0 if domain not in domains.numbers else int(sums[domains.numbers[domain]])
            if each in pod_constraints.apart and stand_there:
                return False
            is_first = not sums.any() and each.tally in pod_constraints.tallies
            if each in pod_constraints.together and not (stand_there or is_first):
                return False
        for spread in (spread for spread in pod_constraints.spreads if spread.topology_key == key):
            domains, sums = self._sums(key, spread.tally, is_there)
            stand_there = 0 if domain not in domains.numbers else int(sums[domains.numbers[domain]])
            least = self._least(domains, sums, eligible & is_there, elsewhere(key))
            if stand_there + (spread.tally in pod_constraints.tallies) - least > spread.skew_count_max:
                return False
        return True

    def counts_by_domain(self, key: str, tally: Tally, is_there: Bools) -> dict[str, int]:
        """Return how many pods of the tally stand in each domain that has a bin."""
        domains, sums = self._sums(key, tally, is_there)
        return {name: int(sums[number]) for name, number in domains.numbers.items()}

    def counts_near(self, near: AffinityTerm, is_there: Bools) -> Ints:
        """Return how many pods of the tally are in each bin's domain; below zero for a bin that is in none."""
        domains, sums = self._sums(near.topology_key, near.tally, is_there)
        sums[-1] = -1
        counts: Ints = sums[domains.of_bin]
        return counts

    def _least(self, domains: Domains, sums: Ints, eligible: Bools, elsewhere: Collection[str]) -> int:
        """The fewest pods in any domain that could take the pod. A host that is not there yet has none."""
        inside = np.unique(domains.of_bin[eligible & (domains.of_bin >= 0)])
        if any(name not in domains.numbers for name in elsewhere):
            return 0
        looked_at = {int(each) for each in inside} | {domains.numbers[name] for name in elsewhere}
        return min((int(sums[each]) for each in looked_at), default=0)

    def _sums(self, key: str, tally: Tally, is_there: Bools) -> tuple[Domains, Ints]:
        domains = self._domains.get(key)
        if domains is None:
            domains = self._domains[key] = Domains(key, self._bins)
        counts = self._counts.get(tally)
        if counts is None:
            counts = np.array([count(entry.pods, tally) for entry in self._bins], dtype=np.int64)
            for place, pods_count in self._placed.get(tally, {}).items():
                counts[place] += pods_count
            self._counts[tally] = counts
        return domains, domains.sums(np.where(is_there, counts, 0))
