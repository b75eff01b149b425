"""Counts of pods by bin and domain, and the bins that a shape's pod constraints leave open.

Used by `core/placement/engine.py`. Bins are known by their position.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from gpu_autoscaler.core.placement.pod_affinity import AffinityTerm, PodConstraints, SpreadConstraint, Tally, count
from gpu_autoscaler.core.placement.resources import Bools, Ints
from gpu_autoscaler.core.placement.shapes import Bin
from gpu_autoscaler.model import labels

OtherDomains = Callable[[str], Collection[str]]  # topology key -> domains that could have a node
SpreadBins = Callable[[SpreadConstraint], Bools]  # those over whose domains the constraint spreads a pod


class Domains:
    """The domain of each bin by one label."""

    def __init__(self, key: str, bins: Sequence[Bin]) -> None:
        """Every bin is its own host; by any other key only a bin with the label is in a domain."""
        names = [entry.key if key == labels.HOSTNAME else entry.labels.get(key) for entry in bins]
        self.numbers: dict[str, int] = {}
        for name in names:
            if name is not None:
                self.numbers.setdefault(name, len(self.numbers))
        self.of_bin = np.array([-1 if name is None else self.numbers[name] for name in names], dtype=np.int64)

    def of(self, bins: Bools) -> frozenset[str]:
        """Return the names of the domains of these bins."""
        names = list(self.numbers)
        return frozenset(names[number] for number in np.unique(self.of_bin[bins]).tolist() if number >= 0)

    def sums(self, of_bin: Ints) -> Ints:
        """Return the sum of each domain, followed by the sum of the bins in no domain."""
        sums = np.zeros(len(self.numbers) + 1, dtype=np.int64)
        np.add.at(sums, self.of_bin, of_bin)
        return sums


class PodTopology:
    """Counts of pods by bin. The engine reports each pod that it places or removes."""

    def __init__(self, bins: Sequence[Bin]) -> None:
        """`bins` are those of the engine, which adds and removes the last ones."""
        self._bins = bins
        self._domains: dict[str, Domains] = {}
        self._counts: dict[Tally, Ints] = {}
        self._placed: dict[Tally, dict[int, int]] = {}

    def follow(self, before: int) -> None:
        """Follow the bins: before there were this many."""
        for tally, counts in self._counts.items():
            self._counts[tally] = np.append(counts[: len(self._bins)], _counts(self._bins[before:], tally))
        self._domains.clear()

    def add(self, place: int, pod_constraints: PodConstraints, pods_count: int) -> None:
        """Add this many pods with these constraints to the bin; a negative count removes them."""
        for tally in pod_constraints.tallies:
            placed = self._placed.setdefault(tally, {})
            placed[place] = placed.get(place, 0) + pods_count
            if not placed[place]:
                del placed[place]  # the bin may be removed next
            if tally in self._counts:
                self._counts[tally][place] += pods_count

    def open_bins(
        self, pod_constraints: PodConstraints, eligible: SpreadBins, is_there: Bools, elsewhere: OtherDomains
    ) -> Bools:
        """Return for each bin whether the constraints allow one more pod there.

        The pod is spread over the domains of the `eligible` bins and those `elsewhere`.
        """
        allowed = is_there.copy()
        for term in pod_constraints.apart:
            domains, sums = self._sums(term.topology_key, term.tally, is_there)
            sums[-1] = 0
            allowed &= sums[domains.of_bin] == 0
        for term in pod_constraints.together:
            domains, sums = self._sums(term.topology_key, term.tally, is_there)
            is_first = not sums.any() and term.tally in pod_constraints.tallies
            allowed &= (domains.of_bin >= 0) & (is_first | (sums[domains.of_bin] > 0))
        for spread in pod_constraints.spreads:
            domains, sums = self._sums(spread.topology_key, spread.tally, is_there)
            least = self._least(domains, sums, eligible(spread) & is_there, elsewhere(spread.topology_key), spread)
            own = spread.tally in pod_constraints.tallies
            allowed &= (domains.of_bin >= 0) & (sums[domains.of_bin] + own - least <= spread.skew_count_max)
        return allowed

    def bins_kept(
        self,
        pod_constraints: PodConstraints,
        eligible: SpreadBins,
        is_there: Bools,
        elsewhere: OtherDomains,
        open_counts: Mapping[Tally, int],
    ) -> Bools:
        """Return for each bin whether the constraints allow a pod that is already there.

        `open_counts` are pods of a tally without a place yet, which may go where the fewest are.
        """
        allowed = is_there.copy()
        for term in pod_constraints.apart:
            domains, sums = self._sums(term.topology_key, term.tally, is_there)
            sums[-1] = 0
            allowed &= sums[domains.of_bin] <= (term.tally in pod_constraints.tallies)
        for term in pod_constraints.together:
            domains, sums = self._sums(term.topology_key, term.tally, is_there)
            own = int(term.tally in pod_constraints.tallies)
            is_alone = own > 0 and int(sums.sum()) <= own
            allowed &= (domains.of_bin >= 0) & (is_alone | (sums[domains.of_bin] > own))
        for spread in pod_constraints.spreads:
            domains, sums = self._sums(spread.topology_key, spread.tally, is_there)
            least = self._least(domains, sums, eligible(spread) & is_there, elsewhere(spread.topology_key), spread)
            skew_max = spread.skew_count_max + open_counts.get(spread.tally, 0)
            allowed &= (domains.of_bin >= 0) & (sums[domains.of_bin] - least <= skew_max)
        return allowed

    def open_new_nodes(
        self,
        pod_constraints: PodConstraints,
        eligible: SpreadBins,
        is_there: Bools,
        elsewhere: OtherDomains,
        zones: Sequence[str | None],
    ) -> Bools:
        """Return for nodes that do not exist yet, by zone, whether the constraints allow one pod on each.

        A new host is empty. Labels of a new node other than host and zone are unknown, which allows nothing.
        """
        is_open = dict.fromkeys(zones, True)
        nears = (*pod_constraints.apart, *pod_constraints.together)
        for key in {
            *(near.topology_key for near in nears),
            *(spread.topology_key for spread in pod_constraints.spreads),
        }:
            for zone in is_open:
                is_open[zone] = is_open[zone] and self._is_new_node_open(
                    pod_constraints, eligible, is_there, elsewhere, key, zone if key == labels.ZONE else None
                )
        return np.array([is_open[zone] for zone in zones], dtype=np.bool_)

    def _is_new_node_open(
        self,
        pod_constraints: PodConstraints,
        eligible: SpreadBins,
        is_there: Bools,
        elsewhere: OtherDomains,
        key: str,
        domain: str | None,
    ) -> bool:
        if domain is None and key != labels.HOSTNAME:
            return False
        terms = (*pod_constraints.apart, *pod_constraints.together)
        for term in (term for term in terms if term.topology_key == key):
            domains, sums = self._sums(key, term.tally, is_there)
            pods_there = 0 if domain not in domains.numbers else int(sums[domains.numbers[domain]])
            if term in pod_constraints.apart and pods_there:
                return False
            is_first = not sums.any() and term.tally in pod_constraints.tallies
            if term in pod_constraints.together and not (pods_there or is_first):
                return False
        for spread in (spread for spread in pod_constraints.spreads if spread.topology_key == key):
            domains, sums = self._sums(key, spread.tally, is_there)
            pods_there = 0 if domain not in domains.numbers else int(sums[domains.numbers[domain]])
            least = self._least(domains, sums, eligible(spread) & is_there, elsewhere(key), spread)
            if pods_there + (spread.tally in pod_constraints.tallies) - least > spread.skew_count_max:
                return False
        return True

    def counts_by_domain(self, key: str, tally: Tally, is_there: Bools) -> dict[str, int]:
        """Return how many pods of the tally each domain with a bin has."""
        domains, sums = self._sums(key, tally, is_there)
        return {name: int(sums[number]) for name, number in domains.numbers.items()}

    def counts_near(self, near: AffinityTerm, is_there: Bools) -> Ints:
        """Return how many pods of the tally are in each bin's domain; negative for a bin in none."""
        domains, sums = self._sums(near.topology_key, near.tally, is_there)
        sums[-1] = -1
        counts: Ints = sums[domains.of_bin]
        return counts

    def _least(
        self, domains: Domains, sums: Ints, eligible: Bools, elsewhere: Collection[str], spread: SpreadConstraint
    ) -> int:
        """Return the fewest pods in any domain that could take the pod; none where there are too few such domains.

        A host that does not exist yet has none.
        """
        inside = np.unique(domains.of_bin[eligible & (domains.of_bin >= 0)])
        if any(name not in domains.numbers for name in elsewhere):
            return 0
        considered = {int(number) for number in inside} | {domains.numbers[name] for name in elsewhere}
        if len(considered) < spread.domains_count_min:
            return 0
        return min((int(sums[number]) for number in considered), default=0)

    def domains(self, key: str) -> Domains:
        """Return the domains of the bins by this label."""
        domains = self._domains.get(key)
        if domains is None:
            domains = self._domains[key] = Domains(key, self._bins)
        return domains

    def _sums(self, key: str, tally: Tally, is_there: Bools) -> tuple[Domains, Ints]:
        domains = self.domains(key)
        counts = self._counts.get(tally)
        if counts is None:
            counts = _counts(self._bins, tally)
            for place, pods_count in self._placed.get(tally, {}).items():
                counts[place] += pods_count
            self._counts[tally] = counts
        return domains, domains.sums(np.where(is_there, counts, 0))


def _counts(bins: Sequence[Bin], tally: Tally) -> Ints:
    """Return how many pods of the tally run on each bin; most new nodes have none at all."""
    return np.array([count(entry.pods, tally) if entry.pods else 0 for entry in bins], dtype=np.int64)
