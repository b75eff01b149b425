"""Kubernetes cluster-autoscaler with default parameters, as far as the simulation has its inputs.

Source: kubernetes/autoscaler, cluster-autoscaler/FAQ.md, "How does scale-up work?", "How does scale-down work?", "What
are Expanders?", "What are the parameters to CA?" (read 2026-11-21). One node group per type, zone and capacity type.
Expanders `least-waste,price`: the default, and the cheapest of equals. Each scan grows at most one group.

It receives no interruption notices: a reclaimed machine is replaced when its pods are pending. Work that must not be
moved has the annotation `safe-to-evict: "false"`.
"""

from collections.abc import Iterable, Sequence

from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.sim.scoring.baselines.observation import (
    Action,
    Buy,
    Drain,
    Observation,
    OwnedMachine,
    Slot,
    is_protected,
)

UTILIZATION_MAX = 0.5
UNNEEDED_SECONDS = 600.0
DELAY_AFTER_ADD_SECONDS = 600.0
PROVISION_SECONDS_MAX = 900.0
BACKOFF_SECONDS = 300.0  # of a group whose last purchase was refused
EMPTY_COUNT_MAX = 10  # empty nodes removed at once; others are removed one by one
DRAIN_SECONDS_MAX = 600.0


class ClusterAutoscaler:
    """Grows one group at a time for pending pods, and removes nodes unneeded for long enough."""

    name = "cluster-autoscaler-like"
    scan_seconds = 10.0

    def __init__(self) -> None:
        self._bought_count = 0
        self._added_at = -DELAY_AFTER_ADD_SECONDS
        self._unneeded_since: dict[str, float] = {}

    def step(self, observation: Observation) -> Iterable[Action]:
        machines = observation.machines()
        yield from (
            Drain(token=machine.token)
            for machine in machines
            if not machine.is_usable
            and machine.node is None
            and observation.now_seconds - machine.launched_seconds > PROVISION_SECONDS_MAX
        )
        growth = list(self._grow(observation))
        yield from growth
        self._note_unneeded(observation, machines)
        if not growth and observation.now_seconds - self._added_at >= DELAY_AFTER_ADD_SECONDS:
            yield from self._shrink(observation, machines)

    # ---- scale up

    def _grow(self, observation: Observation) -> Iterable[Action]:
        waiting = _unplaced(observation.pending(), observation.slots(), observation)
        if not waiting:
            return
        options = [
            option for offer in observation.offers if (option := self._option(offer, waiting, observation)) is not None
        ]
        if not options:
            return
        _, _, count, offer = min(options, key=lambda option: (option[0], option[1], option[3].key))
        self._added_at = observation.now_seconds
        for _ in range(count):
            self._bought_count += 1
            yield Buy(offer=offer, token=f"ca-{self._bought_count}")

    @staticmethod
    def _option(
        offer: Offer, waiting: Sequence[core.Pod], observation: Observation
    ) -> tuple[float, int, int, Offer] | None:
        """Return waste, price and number of nodes of the group for the pods that fit it; None if none fits."""
        refused_at = observation.refused_at.get(offer.key)
        if refused_at is not None and observation.now_seconds - refused_at < BACKOFF_SECONDS:
            return None
        slots: list[Slot] = []
        used_cpu = used_memory = 0
        for pod in waiting:
            requests = observation.requests(pod)
            slot = next((slot for slot in slots if slot.takes(pod, requests)), None)
            if slot is None:
                slot = observation.slot_of_offer(offer, f"{len(slots)}")
                if not slot.takes(pod, requests):
                    continue
                slots.append(slot)
            slot.put(requests)
            used_cpu, used_memory = used_cpu + requests.cpu_milli, used_memory + requests.memory_bytes
        if not slots:
            return None
        capacity = offer.resources
        waste_cpu = 1 - used_cpu / (capacity.cpu_milli * len(slots))
        waste_memory = 1 - used_memory / (capacity.memory_bytes * len(slots))
        price = (offer.price_micro_usd_per_hour or 0) * len(slots)
        return round(waste_cpu + waste_memory, 9), price, len(slots), offer

    # ---- scale down

    def _note_unneeded(self, observation: Observation, machines: Sequence[OwnedMachine]) -> None:
        """Record since when each node has been unneeded: less than half used, and all its pods fit elsewhere."""
        pods = observation.pods_by_node()
        slots = observation.slots(include_booting=False)
        unneeded: dict[str, float] = {}
        for machine in machines:
            if not machine.is_usable or machine.node is None or machine.is_draining or machine.node.spec.unschedulable:
                continue
            pods_here = pods.get(machine.node.metadata.name, [])
            if _used(machine, pods_here, observation) < UTILIZATION_MAX and _can_drain(
                machine, pods_here, slots, observation
            ):
                unneeded[machine.token] = self._unneeded_since.get(machine.token, observation.now_seconds)
        self._unneeded_since = unneeded

    def _shrink(self, observation: Observation, machines: Sequence[OwnedMachine]) -> Iterable[Action]:
        pods = observation.pods_by_node()
        removable = [
            machine
            for machine in machines
            if observation.now_seconds - self._unneeded_since.get(machine.token, observation.now_seconds)
            >= UNNEEDED_SECONDS
        ]
        empty = [
            machine for machine in removable if machine.node is not None and not pods.get(machine.node.metadata.name)
        ]
        if empty:
            yield from (Drain(token=machine.token) for machine in empty[:EMPTY_COUNT_MAX])
        elif removable and not observation.draining & {machine.token for machine in machines}:
            yield Drain(token=removable[0].token, seconds_max=DRAIN_SECONDS_MAX)


def _unplaced(pods: Sequence[core.Pod], slots: Sequence[Slot], observation: Observation) -> list[core.Pod]:
    """Place the pods on running and future nodes; return those that do not fit."""
    unplaced = []
    for pod in sorted(pods, key=lambda pod: -pod.spec.priority):
        requests = observation.requests(pod)
        slot = next((slot for slot in slots if slot.takes(pod, requests)), None)
        if slot is None:
            unplaced.append(pod)
        else:
            slot.put(requests)
    return unplaced


def _used(machine: OwnedMachine, pods: Sequence[core.Pod], observation: Observation) -> float:
    """Return requested over allocatable: of GPUs where the node has some, else the larger of CPU and memory."""
    capacity = machine.offer.resources
    if capacity.gpu_count:
        return sum(observation.requests(pod).gpu_count for pod in pods) / capacity.gpu_count
    cpu = sum(observation.requests(pod).cpu_milli for pod in pods) / capacity.cpu_milli
    return max(cpu, sum(observation.requests(pod).memory_bytes for pod in pods) / capacity.memory_bytes)


def _can_drain(
    machine: OwnedMachine, pods: Sequence[core.Pod], slots: Sequence[Slot], observation: Observation
) -> bool:
    """True if every pod may be moved and fits on another running node."""
    if any(is_protected(pod) or observation.is_blocked(pod) for pod in pods):
        return False
    other_slots = [Slot(slot.name, slot.node, slot.free, slot.offer) for slot in slots if slot.name != machine.token]
    return not _unplaced(pods, other_slots, observation)
