"""The offline schedule: what a scenario's work costs with arrivals, lengths, prices and shortages known ahead.

Whole nodes are paid from launch to the end of their termination, boot included. Each pod stays where it starts, the
members of a job start together, and work starts at once where its priority is high, else within the waiting that the
default policy allows. Nodes boot before work arrives, since it is known. Nothing is reclaimed, and no capacity pool has
a share: it is a schedule for the scenario without its reclaims.

A heuristic: no optimum. The schedule is feasible, so the least possible cost is at most its cost, and at least that of
`floor_micro_usd`. Work is inserted where it adds least cost; then the work of a few nodes at a time is taken out and
inserted again in another order, and kept by simulated annealing (Schrimpf et al., "Record Breaking Optimization Results
Using the Ruin and Recreate Principle", 2000). Equal scenarios give equal schedules.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY
from gpu_autoscaler.model.jobs import PRIORITY_NAMES
from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.sim.cluster.cloud import BOOT_RATIO, TERMINATION_SECONDS
from gpu_autoscaler.sim.cluster.controllers import START_SECONDS
from gpu_autoscaler.sim.scoring.baselines.known_demand import PodDemand, demand_of_job, demand_of_replica, fits_on
from gpu_autoscaler.sim.scoring.causes import Cause, share_by_cause
from gpu_autoscaler.sim.scoring.metrics import ALL, SERVING, Score, class_of, waiting_of
from gpu_autoscaler.sim.scoring.scenario import Scenario

OFFLINE = "offline"
ROUNDS_COUNT = 2000  # of taking work out and inserting it again
_NODES_COUNT_MAX = 3  # whose work is taken out in one round
_STARTS_COUNT_MAX = 5  # instants tried for each piece of work
_TEMPERATURE_RATIO = 0.001  # of the cost, at the first round; falls to zero
# Means of what the simulation draws.
_BOOT_RATIO = sum(BOOT_RATIO) / 2.0
_TERMINATION_SECONDS = sum(TERMINATION_SECONDS) / 2.0
_START_SECONDS = sum(START_SECONDS) / 2.0
_HOUR_SECONDS = 3600.0

_Amounts = tuple[int, int, int, int, int]  # GPUs, CPU, memory, disk, pods


class Work(NamedTuple):
    """A job, or one replica of a service."""

    name: str
    class_name: str  # of waiting
    pod: PodDemand  # of each member, without waiting
    members_count: int
    wait_seconds_max: float


class Run(NamedTuple):
    """A pod on its node, from its binding to its end."""

    work: int  # number of its work
    from_seconds: float
    to_seconds: float
    amounts: _Amounts


class Kind(NamedTuple):
    """An offer as the schedule needs it."""

    offer: Offer
    usd_per_second: float
    boot_seconds: float
    capacity: _Amounts
    shortages: tuple[tuple[float, float], ...]  # when none is launched, the latest first

    def launched_at(self, ready_at: float) -> float:
        """Return the latest launch outside of shortages of a node that is ready by then."""
        at = ready_at - self.boot_seconds
        for from_seconds, to_seconds in self.shortages:
            if from_seconds <= at < to_seconds:
                at = from_seconds - 1.0
        return at


class Node(NamedTuple):
    """A node with its pods. It is launched for the first and terminated after the last of them."""

    kind: Kind
    runs: tuple[Run, ...]
    launched_at: float
    ended_at: float

    @property
    def usd(self) -> float:
        """What it costs."""
        return self.kind.usd_per_second * (self.ended_at - self.launched_at)


def _node(kind: Kind, runs: tuple[Run, ...]) -> Node:
    first_at, last_at = min(run.from_seconds for run in runs), max(run.to_seconds for run in runs)
    return Node(kind, runs, kind.launched_at(first_at), last_at + _TERMINATION_SECONDS)


_Nodes = dict[int, Node]


def work_of(scenario: Scenario) -> tuple[Work, ...]:
    """Return all work of the scenario, by arrival."""
    jobs = [
        Work(
            name=str(arrival.request.job_id),
            class_name=(name := class_of(arrival.request)),
            pod=demand_of_job(arrival.at_seconds, arrival.request),
            members_count=arrival.request.members,
            wait_seconds_max=0.0 if _is_high(name) else DEFAULT_POLICY.queued_timeout_seconds,
        )
        for arrival in scenario.arrivals
    ]
    replicas = [
        Work(
            name=f"{service.name}/{number}",
            class_name=SERVING,
            pod=demand_of_replica(service, scenario.hours),
            members_count=1,
            wait_seconds_max=DEFAULT_POLICY.pending_pod_timeout_seconds,
        )
        for service in scenario.services
        for number in range(service.replicas_count)
    ]
    return tuple(sorted((*jobs, *replicas), key=lambda work: (work.pod.from_seconds, work.name)))


def _is_high(class_name: str) -> bool:
    return PRIORITY_NAMES.get(class_name, 0) >= PRIORITY_NAMES["high"]


class OfflineSchedule:
    """Nodes for all work of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.work = work_of(scenario)
        kinds = _kinds(scenario)
        self._amounts = [_amounts_of(work.pod.resources) for work in self.work]
        fitting = [tuple(kind for kind in kinds if fits_on(work.pod, kind.offer)) for work in self.work]
        self._fitting = [frozenset(kind.offer.key for kind in of_work) for of_work in fitting]
        self._new = [_undominated(of_work) for of_work in fitting]
        self._nodes: _Nodes = {}
        self._next_id = 0
        for number in range(len(self.work)):
            self._insert(number)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes, in the order of their launch."""
        return tuple(sorted(self._nodes.values(), key=lambda node: (node.launched_at, node.kind.offer.key, node.runs)))

    @property
    def usd(self) -> float:
        """What all nodes cost."""
        return sum(node.usd for node in self._nodes.values())

    def improve(self, rng: random.Random, rounds_count: int) -> None:
        """Take the work of a few nodes out and insert it again, this many times; keep the cheapest schedule."""
        usd = best_usd = self.usd
        best = self._nodes
        for done_count in range(rounds_count if self._nodes else 0):
            before = self._nodes
            self._nodes = dict(before)
            for number in self._taken_out(rng):
                self._insert(number)
            now_usd = self.usd
            temperature = _TEMPERATURE_RATIO * best_usd * (1.0 - done_count / rounds_count)
            if now_usd > usd - temperature * math.log(1.0 - rng.random()):
                self._nodes = before
                continue
            usd = now_usd
            if usd < best_usd:
                best, best_usd = self._nodes, usd
        self._nodes = best

    def _taken_out(self, rng: random.Random) -> Sequence[int]:
        """Take out all work of some nodes that exist at the same time; return it in the order of its insertion."""
        keys = sorted(self._nodes)
        first = self._nodes[rng.choice(keys)]
        near = [key for key in keys if _overlap(first, self._nodes[key])]
        taken = {
            run.work
            for key in rng.sample(near, min(len(near), rng.randint(1, _NODES_COUNT_MAX)))
            for run in self._nodes[key].runs
        }
        for key in keys:
            node = self._nodes[key]
            left = tuple(run for run in node.runs if run.work not in taken)
            if not left:
                del self._nodes[key]
            elif len(left) < len(node.runs):
                self._nodes[key] = _node(node.kind, left)
        numbers = sorted(taken)
        rng.shuffle(numbers)
        order = rng.choice(_ORDERS)
        return sorted(numbers, key=lambda number: order(self.work[number]))

    def _insert(self, number: int) -> None:
        """Insert the work where and when it adds least cost; of equal cost, at the earliest."""
        best: tuple[float, _Nodes] | None = None
        for start in self._starts(self.work[number]):
            placed = self._placed(number, start, math.inf if best is None else best[0])
            if placed is not None:
                best = placed
        assert best is not None, f"no offer fits {self.work[number].name}"  # noqa: S101 - a bug of the scenario
        self._nodes = best[1]

    def _starts(self, work: Work) -> Sequence[float]:
        """Return instants at which the work may start: its arrival, and those at which other work ends."""
        at, until = work.pod.from_seconds, work.pod.from_seconds + work.wait_seconds_max
        ends = {run.to_seconds for node in self._nodes.values() for run in node.runs if at < run.to_seconds <= until}
        later = sorted({*ends, until} - {at})
        step = max(1, len(later) // _STARTS_COUNT_MAX)
        return (at, *later[::step])

    def _placed(self, number: int, start: float, below_usd: float) -> tuple[float, _Nodes] | None:
        """Return the added cost and the nodes with all members started then; None: it adds no less than that."""
        work, nodes, added_usd = self.work[number], dict(self._nodes), 0.0
        length = work.pod.to_seconds - work.pod.from_seconds
        if work.class_name == SERVING:
            length -= start - work.pod.from_seconds + _START_SECONDS  # it ends with the hours of the scenario
        run = Run(number, start, start + _START_SECONDS + length, self._amounts[number])
        for _ in range(work.members_count):
            usd, key, node = self._cheapest(run, nodes)
            added_usd += usd
            if added_usd >= below_usd - 1e-9:
                return None
            if key < 0:
                key, self._next_id = self._next_id, self._next_id + 1
            nodes[key] = node
        return added_usd, nodes

    def _cheapest(self, run: Run, nodes: Mapping[int, Node]) -> tuple[float, int, Node]:
        """Return the node that the pod adds least cost to, with that cost; the key of a new node is -1."""
        best = min((_node(kind, (run,)) for kind in self._new[run.work]), key=lambda node: node.usd)
        usd, key = best.usd, -1
        fitting, ends_at = self._fitting[run.work], run.to_seconds + _TERMINATION_SECONDS
        for other, node in nodes.items():
            kind, launched_at, ended_at = node.kind, node.launched_at, node.ended_at
            if run.from_seconds < launched_at + kind.boot_seconds:
                launched_at = kind.launched_at(run.from_seconds)
            more = max(ended_at, ends_at) - launched_at - (ended_at - node.launched_at)
            more_usd = kind.usd_per_second * more
            if more_usd < usd - 1e-9 and kind.offer.key in fitting and _fits(node, run):
                usd, key = more_usd, other
                best = Node(kind, (*node.runs, run), launched_at, max(ended_at, ends_at))
        return usd, key, best


# By which work is inserted again.
_ORDERS: tuple[Callable[[Work], float], ...] = (
    lambda work: work.pod.from_seconds - work.pod.to_seconds,  # the longest first
    lambda work: -work.members_count * work.pod.resources.gpu_count,  # the largest first
    lambda work: work.pod.from_seconds,  # by arrival
    lambda _: 0.0,  # by chance
)


def _kinds(scenario: Scenario) -> tuple[Kind, ...]:
    return tuple(
        Kind(
            offer=offer,
            usd_per_second=offer.price_micro_usd_per_hour / MICRO_USD_PER_USD / _HOUR_SECONDS,
            boot_seconds=offer.boot_seconds * _BOOT_RATIO,
            capacity=_amounts_of(offer.resources),
            shortages=tuple(
                sorted(
                    (
                        (shortage.from_seconds, shortage.to_seconds)
                        for shortage in scenario.shortages
                        if offer.capacity_type is CapacityType.SPOT and shortage.zone == offer.zone
                    ),
                    reverse=True,
                )
            ),
        )
        for offer in scenario.offers
        if offer.price_micro_usd_per_hour is not None
    )


def _undominated(kinds: Sequence[Kind]) -> tuple[Kind, ...]:
    """Return the offers of which a new node may be cheapest: none always in stock is cheaper and as large."""
    return tuple(
        kind
        for number, kind in enumerate(kinds)
        if not any(
            not other.shortages
            and (other.usd_per_second, place) < (kind.usd_per_second, number)
            and other.boot_seconds <= kind.boot_seconds
            and all(has >= need for has, need in zip(other.capacity, kind.capacity, strict=True))
            for place, other in enumerate(kinds)
        )
    )


def _amounts_of(amount: Resources) -> _Amounts:
    disk_bytes = amount.ephemeral_storage_bytes
    return amount.gpu_count, amount.cpu_milli, amount.memory_bytes, disk_bytes, amount.pod_count


def _overlap(node: Node, other: Node) -> bool:
    return node.launched_at < other.ended_at and other.launched_at < node.ended_at


def _fits(node: Node, run: Run) -> bool:
    """True if at no time the pods of the node need more than it has."""
    meanwhile = [
        other for other in node.runs if other.from_seconds < run.to_seconds and run.from_seconds < other.to_seconds
    ]
    if _is_within(node.kind.capacity, run, meanwhile):
        return True
    instants = [run.from_seconds, *(other.from_seconds for other in meanwhile if other.from_seconds > run.from_seconds)]
    return all(
        _is_within(
            node.kind.capacity, run, [other for other in meanwhile if other.from_seconds <= at < other.to_seconds]
        )
        for at in instants
    )


def _is_within(capacity: _Amounts, run: Run, others: Iterable[Run]) -> bool:
    needs = zip(run.amounts, *(other.amounts for other in others), strict=True)
    return all(sum(need) <= has for need, has in zip(needs, capacity, strict=True))


# ---- score


def score_offline(scenario: Scenario, rounds_count: int = ROUNDS_COUNT) -> Score:
    """Return the figures of the offline schedule, which is computed, not run."""
    schedule = OfflineSchedule(scenario)
    schedule.improve(random.Random(f"offline/{scenario.name}/{scenario.seed}"), rounds_count)
    nodes = schedule.nodes
    usd_by_cause = dict.fromkeys(Cause, 0.0)
    for node in nodes:
        for cause, usd in _usd_by_cause(node, schedule.work, scenario.offers):
            usd_by_cause[cause] += usd
    runs = [run for node in nodes for run in node.runs]
    started_at = {run.work: run.from_seconds + _START_SECONDS for run in runs}
    waits: dict[str, list[float]] = {}
    for number, work in enumerate(schedule.work):
        for name in (work.class_name,) if work.class_name == SERVING else (work.class_name, ALL):
            waits.setdefault(name, []).append(started_at[number] - work.pod.from_seconds)
    return Score(
        world=scenario.name,
        system=OFFLINE,
        hours=round(max([scenario.hours, *(run.to_seconds / _HOUR_SECONDS for run in runs)]), 3),
        cost_usd=round(schedule.usd, 2),
        waiting={name: waiting_of(seconds) for name, seconds in sorted(waits.items())},
        node_hours=_hours(node.ended_at - node.launched_at for node in nodes),
        gpu_hours_bought=_hours((node.ended_at - node.launched_at) * node.kind.capacity[0] for node in nodes),
        gpu_hours_used=_hours((run.to_seconds - run.from_seconds - _START_SECONDS) * run.amounts[0] for run in runs),
        lost_gpu_hours=0.0,
        evicted_count=0,
        interrupted_count=0,
        jobs_count=len(scenario.arrivals),
        failed_count=0,
        unfinished_count=0,
        micro_usd_by_cause={str(cause): round(usd * MICRO_USD_PER_USD) for cause, usd in usd_by_cause.items()},
    )


def _usd_by_cause(node: Node, work: Sequence[Work], offers: Sequence[Offer]) -> Iterator[tuple[Cause, float]]:
    """Yield what the node costs, by cause, as for nodes of a run: pods count from their start."""
    kind, left_usd, busy_seconds = node.kind, node.usd, 0.0
    until = first_at = min(run.from_seconds for run in node.runs) + _START_SECONDS
    for run in sorted(node.runs, key=lambda run: run.from_seconds):
        start = run.from_seconds + _START_SECONDS
        busy_seconds += max(0.0, run.to_seconds - max(start, until))
        until = max(until, run.to_seconds)
        pod = work[run.work].pod
        accepted = [offer for offer in offers if _is_accepted(pod, offer)]
        shares = share_by_cause(pod.resources, kind.offer, kind.offer.price_micro_usd_per_hour or 0, accepted)
        for cause, micro_usd_per_hour in shares.items():
            usd = float(micro_usd_per_hour / MICRO_USD_PER_USD) * (run.to_seconds - start) / _HOUR_SECONDS
            left_usd -= usd
            yield cause, usd
    empty = {
        Cause.BOOT: kind.boot_seconds,
        Cause.BEFORE: first_at - node.launched_at - kind.boot_seconds,
        Cause.BETWEEN: until - first_at - busy_seconds,
        Cause.AFTER: node.ended_at - until,
    }
    for cause, seconds in empty.items():
        left_usd -= seconds * kind.usd_per_second
        yield cause, seconds * kind.usd_per_second
    yield Cause.STRANDED, left_usd


def _is_accepted(pod: PodDemand, offer: Offer) -> bool:
    """True for offers that the pod's requirements allow, whatever their size, as causes of a run count them."""
    may_run = pod.allows_spot or offer.capacity_type is not CapacityType.SPOT
    return may_run and pod.gpu_model in (None, offer.gpu_model)


def _hours(seconds: Iterable[float]) -> float:
    return round(sum(seconds) / _HOUR_SECONDS, 3)
