"""Dollars of a run by cause, from the true state of the simulation; they add up to the cloud's bill exactly."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from gpu_autoscaler.kube.protocol import NODES
from gpu_autoscaler.kube.translate.pod import pod_requests
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model.money import cost_micro_usd, split_micro_usd
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.sim.cluster.cloud import Machine, labels_of
from gpu_autoscaler.sim.cluster.objects import Entry, Kubernetes, is_true
from gpu_autoscaler.sim.cluster.scheduler import accepts

_MICROSECOND = timedelta(microseconds=1)


class Cause(StrEnum):
    """What a dollar bought. Pods pay for their share of a node: of its GPUs, or of its CPUs where it has no GPU."""

    FLOOR = "floor"  # running pods, at the lowest price per GPU of all offers that they accept
    TYPE = "type"  # what their instance type costs more than that
    ON_DEMAND = "on-demand"  # what on-demand costs more than spot of the same type and zone, if they accept spot
    ZONE = "zone"  # what the zone costs more than the cheapest one
    STRANDED = "stranded"  # the free share of nodes with running pods
    BOOT = "boot"  # from the launch of a node to Ready
    NEVER = "never"  # empty nodes on which no pod ever ran
    BEFORE = "before"  # empty nodes before their first pod
    BETWEEN = "between"  # empty nodes between two pods
    AFTER = "after"  # empty nodes after their last pod
    DRAIN = "drain"  # empty nodes that are cordoned


class PodRun(NamedTuple):
    """A pod while it ran on a node."""

    pod: core.Pod
    from_at: datetime
    to_at: datetime


class NodeHistory:
    """Records when each node became Ready, and when it was cordoned."""

    def __init__(self, cluster: Kubernetes) -> None:
        self._cluster = cluster
        self._ready_at: dict[str, datetime] = {}
        self._cordons: dict[str, list[tuple[datetime, bool]]] = {}
        cluster.listen(self._on_change)

    def ready_at(self, node_name: str) -> datetime | None:
        return self._ready_at.get(node_name)

    def cordons(self, node_name: str) -> Sequence[tuple[datetime, bool]]:
        """Return the changes of the node's cordon, in order."""
        return self._cordons.get(node_name, ())

    def _on_change(self, plural: str, entry: Entry) -> None:
        if plural != NODES.plural:
            return
        assert isinstance(entry.object, core.Node)  # noqa: S101 - of this kind
        name, now = entry.object.metadata.name, self._cluster.now()
        if is_true(entry.object.status.conditions, "Ready"):
            self._ready_at.setdefault(name, now)
        changes = self._cordons.setdefault(name, [])
        if entry.object.spec.unschedulable != (bool(changes) and changes[-1][1]):
            changes.append((now, entry.object.spec.unschedulable))


def micro_usd_by_cause(
    machines: Iterable[tuple[Machine, datetime]], runs: Iterable[PodRun], history: NodeHistory, offers: Sequence[Offer]
) -> dict[Cause, int]:
    """Return the bill of the machines, each until its time, by cause. `offers`: what the cloud sells, with prices."""
    by_node: defaultdict[str, list[PodRun]] = defaultdict(list)
    for run in runs:
        by_node[run.pod.spec.node_name or ""].append(run)
    prices = _Prices(offers)
    result = dict.fromkeys(Cause, 0)
    for machine, until in machines:
        weights: defaultdict[Cause, Fraction] = defaultdict(Fraction)
        for cause, price, duration in _spans(machine, until, by_node[machine.node_name], history, prices):
            weights[cause] += price * (duration // _MICROSECOND)
        unit = math.lcm(*(weight.denominator for weight in weights.values()))
        bill = cost_micro_usd(machine.price_micro_usd_per_hour, until - machine.launched_at)
        for cause, share in zip(weights, split_micro_usd(bill, [int(w * unit) for w in weights.values()]), strict=True):
            result[cause] += share
    return result


_Span = tuple[Cause, Fraction | int, timedelta]


def _spans(
    machine: Machine, until: datetime, runs: Sequence[PodRun], history: NodeHistory, prices: "_Prices"
) -> Iterator[_Span]:
    """Yield cause, price per hour and duration; the prices of each moment add up to the machine's price."""
    ready_at = history.ready_at(machine.node_name) or until
    cordons = history.cordons(machine.node_name)
    first_at, last_at = min((run.from_at for run in runs), default=None), max((run.to_at for run in runs), default=None)
    changes = {machine.launched_at, until, ready_at, *(at for at, _ in cordons)}
    changes.update(at for run in runs for at in (run.from_at, run.to_at))
    for start, end in pairwise(sorted(at for at in changes if machine.launched_at <= at <= until)):
        running = [run.pod for run in runs if run.from_at <= start < run.to_at]
        if running:
            yield from ((cause, price, end - start) for cause, price in _of_work(machine, running, prices))
        else:
            is_cordoned = next((is_on for at, is_on in reversed(cordons) if at <= start), False)
            yield (
                _of_empty(start, ready_at, first_at, last_at, is_cordoned=is_cordoned),
                machine.price_micro_usd_per_hour,
                end - start,
            )


def _of_empty(
    at: datetime, ready_at: datetime, first_at: datetime | None, last_at: datetime | None, *, is_cordoned: bool
) -> Cause:
    if at < ready_at:
        return Cause.BOOT
    if is_cordoned:
        return Cause.DRAIN
    if first_at is None or last_at is None:
        return Cause.NEVER
    if at < first_at:
        return Cause.BEFORE
    return Cause.BETWEEN if at < last_at else Cause.AFTER


def _of_work(machine: Machine, running: Sequence[core.Pod], prices: "_Prices") -> Iterator[tuple[Cause, Fraction]]:
    left = Fraction(machine.price_micro_usd_per_hour)
    for pod in running:
        for cause, price in prices.of(pod, machine):
            left -= price
            yield cause, price
    yield Cause.STRANDED, left


class _Prices:
    """What a pod's share of a machine costs, by cause."""

    def __init__(self, offers: Sequence[Offer]) -> None:
        self._offers = [offer for offer in offers if offer.price_micro_usd_per_hour is not None]
        self._known: dict[tuple[str, str], Mapping[Cause, Fraction]] = {}

    def of(self, pod: core.Pod, machine: Machine) -> Iterable[tuple[Cause, Fraction]]:
        key = (pod.metadata.uid, machine.node_name)
        if key not in self._known:
            self._known[key] = self._by_cause(pod, machine)
        return self._known[key].items()

    def _by_cause(self, pod: core.Pod, machine: Machine) -> Mapping[Cause, Fraction]:
        accepted = [other for other in self._offers if accepts(pod.spec, _node_of(other))]
        return share_by_cause(pod_requests(pod), machine.offer, machine.price_micro_usd_per_hour, accepted)


def share_by_cause(
    requests: Resources, offer: Offer, price_micro_usd_per_hour: int, accepted: Sequence[Offer]
) -> Mapping[Cause, Fraction]:
    """Return what an hour of a pod's share of a node costs, by cause.

    Compares the node's price with those of other zones, spot, and other types among the offers that the pod accepts.
    """
    price, has_gpus = price_micro_usd_per_hour, bool(offer.resources.gpu_count)
    comparable = [other for other in accepted if bool(other.resources.gpu_count) == has_gpus]
    alike = [other for other in comparable if other.instance_type == offer.instance_type]
    spot = [_price(o) for o in alike if o.capacity_type is CapacityType.SPOT and o.zone == offer.zone]
    is_bridged = bool(spot) and offer.capacity_type is not CapacityType.SPOT
    in_zone = min(spot) if is_bridged else price
    capacity_type = CapacityType.SPOT if is_bridged else offer.capacity_type
    of_type = min([in_zone, *(_price(o) for o in alike if o.capacity_type is capacity_type)])
    share = _share(requests, offer)
    floor = min([of_type * share, *(_price(other) * _share(requests, other) for other in comparable)])
    return {
        Cause.FLOOR: floor,
        Cause.TYPE: of_type * share - floor,
        Cause.ZONE: (in_zone - of_type) * share,
        Cause.ON_DEMAND: (price - in_zone) * share,
    }


def _price(offer: Offer) -> int:
    return offer.price_micro_usd_per_hour or 0


def _share(requests: Resources, offer: Offer) -> Fraction:
    capacity = offer.resources
    if capacity.gpu_count:
        return Fraction(requests.gpu_count, capacity.gpu_count)
    return Fraction(requests.cpu_milli, capacity.cpu_milli)


@lru_cache(maxsize=1024)
def _node_of(offer: Offer) -> core.Node:
    """Return a node of this offer, as the scheduler sees it."""
    return core.Node(metadata=core.Metadata(labels=labels_of(offer, "")))
