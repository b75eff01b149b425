"""Target tracking of GPU utilization per node group, as clouds offer it.

Source: AWS, EC2 Auto Scaling user guide, "Target tracking scaling policies" (read 2026-11-21), and its alarms: scale
out in proportion after 3 minutes above the target; scale in after 15 minutes below 90 % of it; cool-down of 300 s.
Pending pods are ignored: only running work is measured.

One group of on-demand nodes for each GPU model requested by name, and one for all other work. Each keeps at least one
node: an empty group has no utilization and would never grow.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.sim.cluster.controllers import is_ready
from gpu_autoscaler.sim.scoring.baselines.known_demand import PodDemand, cheapest_fleet, fits_on, pod_demands_of
from gpu_autoscaler.sim.scoring.baselines.observation import Action, Buy, Drain, Observation, OwnedMachine
from gpu_autoscaler.sim.scoring.scenario import Scenario

TARGET_RATIO = 0.7
LOW_SHARE = 0.9  # of the target: below it a group may shrink
HIGH_SECONDS, LOW_SECONDS = 180.0, 900.0
COOLDOWN_SECONDS = 300.0


@dataclass(slots=True)
class _Group:
    """Nodes of one offer."""

    offer: Offer
    high_since: float | None = None
    low_since: float | None = None
    changed_at: float = field(default=-COOLDOWN_SECONDS)


class UtilizationOnly:
    """Keeps the share of busy GPUs of each group near its target."""

    name = "utilization only"
    scan_seconds = 60.0

    def __init__(self, offers: Sequence[Offer]) -> None:
        """`offers`: one for each group."""
        self._groups = [_Group(offer) for offer in offers]
        self._bought_count = 0

    def step(self, observation: Observation) -> Iterable[Action]:
        pods = observation.pods_by_node()
        for group in self._groups:
            remaining = [
                machine
                for machine in observation.machines()
                if machine.offer.key == group.offer.key and not machine.is_draining
            ]
            if not remaining:
                yield self._buy(group.offer)
                continue
            usable = [machine for machine in remaining if machine.is_usable and machine.node is not None]
            if usable:
                yield from self._correct(
                    group,
                    observation,
                    remaining,
                    {machine.token: _busy(machine, pods, observation) for machine in usable},
                )

    def _correct(
        self, group: _Group, observation: Observation, remaining: list[OwnedMachine], busy: dict[str, float]
    ) -> Iterable[Action]:
        now, ratio = observation.now_seconds, sum(busy.values()) / len(busy)
        group.high_since = None if ratio <= TARGET_RATIO else group.high_since or now
        group.low_since = None if ratio >= TARGET_RATIO * LOW_SHARE else group.low_since or now
        if now - group.changed_at < COOLDOWN_SECONDS:
            return
        wanted_count = max(1, -int(-len(busy) * ratio / TARGET_RATIO // 1))
        if group.high_since is not None and now - group.high_since >= HIGH_SECONDS:
            missing_count = wanted_count - len(remaining)
            if missing_count > 0:
                group.changed_at = now
                yield from (self._buy(group.offer) for _ in range(missing_count))
        elif group.low_since is not None and now - group.low_since >= LOW_SECONDS and len(remaining) > wanted_count:
            group.changed_at = now
            # The least busy node is removed whatever runs there: only the group's utilization is considered.
            yield Drain(token=min(busy, key=lambda token: (busy[token], token)), is_forced=True)

    def _buy(self, offer: Offer) -> Buy:
        self._bought_count += 1
        return Buy(offer=offer, token=f"group-{self._bought_count}")


def groups_for(scenario: Scenario) -> tuple[Offer, ...]:
    """Return the offer of each group: of those that fit all of its work, the cheapest per GPU."""
    offers = [offer for offer in scenario.offers if offer.capacity_type is CapacityType.ON_DEMAND]
    by_model: dict[str | None, list[PodDemand]] = {}
    for pod in pod_demands_of(scenario):
        by_model.setdefault(pod.gpu_model, []).append(pod)
    chosen = []
    for _, pods in sorted(by_model.items(), key=lambda item: item[0] or ""):
        fitting = [offer for offer in offers if all(fits_on(pod, offer) for pod in pods)]
        chosen.append(
            min(fitting, key=_per_gpu) if fitting else cheapest_fleet([max(pods, key=PodDemand.size)], offers)[0]
        )
    return tuple(dict.fromkeys(chosen))


def _per_gpu(offer: Offer) -> tuple[float, str]:
    return (offer.price_micro_usd_per_hour or 0) / max(1, offer.resources.gpu_count), offer.key


def _busy(machine: OwnedMachine, pods: dict[str, list[core.Pod]], observation: Observation) -> float:
    """Return the share of the node's GPUs with running work, as its exporter reports it."""
    here = [] if machine.node is None else pods.get(machine.node.metadata.name, [])
    running = sum(observation.requests(pod).gpu_count for pod in here if is_ready(pod))
    return running / max(1, machine.offer.resources.gpu_count)
