"""Kubernetes' cluster-autoscaler with its defaults, as far as this world has what it looks at.

Source: kubernetes/autoscaler, cluster-autoscaler/FAQ.md, "How does scale-up work?", "How does scale-down work?", "What
are Expanders?", "What are the parameters to CA?" (read 2026-11-21). One node group for each type, zone and capacity
type. The expanders are `least-waste,price`: the default, and the cheapest of equals. A scan grows one group at most.

It knows nothing of notices: a machine that is taken back is replaced when its pods wait. Work that must not be moved
says so by `safe-to-evict: "false"`.
"""

from collections.abc import Iterable, Sequence

from gpu_autoscaler.kube import wire
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.sim.baselines.protocol import Act, Buy, Leave
from gpu_autoscaler.sim.baselines.sight import Held, Sight, Slot, is_protected

UTILISATION_MAX = 0.5
UNNEEDED_SECONDS = 600.0
DELAY_AFTER_ADD_SECONDS = 600.0
PROVISION_SECONDS_MAX = 900.0
BACKOFF_SECONDS = 300.0  # of a group whose last purchase was refused
EMPTY_COUNT_MAX = 10  # empty nodes that go at once; others go one by one
DRAIN_SECONDS_MAX = 600.0


class ClusterAutoscaler:
    """Grows one group at a time for pods that wait, and removes what has been unneeded for long enough."""

    name = "cluster-autoscaler-like"
    scan_seconds = 10.0

    def __init__(self) -> None:
        self._bought_count = 0
        self._added_at = -DELAY_AFTER_ADD_SECONDS
        self._unneeded_since: dict[str, float] = {}

    def look(self, sight: Sight) -> Iterable[Act]:
        """One pass: scale up, else scale down."""
        held = sight.held()
        yield from (
            Leave(token=each.token)
            for each in held
            if not each.is_usable
            and each.node is None
            and sight.now_seconds - each.launched_seconds > PROVISION_SECONDS_MAX
        )
        growth = list(self._grow(sight))
        yield from growth
        self._note_unneeded(sight, held)
        if not growth and sight.now_seconds - self._added_at >= DELAY_AFTER_ADD_SECONDS:
            yield from self._shrink(sight, held)

    # ---- up

    def _grow(self, sight: Sight) -> Iterable[Act]:
        waiting = _unplaced(sight.pending(), sight.slots(), sight)
        if not waiting:
            return
        options = [option for offer in sight.offers if (option := self._option(offer, waiting, sight)) is not None]
        if not options:
            return
        _, _, count, offer = min(options, key=lambda option: (option[0], option[1], option[3].key))
        self._added_at = sight.now_seconds
        for _ in range(count):
            self._bought_count += 1
            yield Buy(offer=offer, token=f"ca-{self._bought_count}")

    @staticmethod
    def _option(offer: Offer, waiting: Sequence[wire.Pod], sight: Sight) -> tuple[float, int, int, Offer] | None:
        """Waste and price of the group for the pods that it can take, and how many nodes; None: it takes none."""
        refused_at = sight.refused_at.get(offer.key)
        if refused_at is not None and sight.now_seconds - refused_at < BACKOFF_SECONDS:
            return None
        slots: list[Slot] = []
        used_cpu = used_memory = 0
        for pod in waiting:
            wanted = sight.wanted(pod)
            slot = next((one for one in slots if one.takes(pod, wanted)), None)
            if slot is None:
                slot = sight.slot_of_offer(offer, f"{len(slots)}")
                if not slot.takes(pod, wanted):
                    continue
                slots.append(slot)
            slot.put(wanted)
            used_cpu, used_memory = used_cpu + wanted.cpu_milli, used_memory + wanted.memory_bytes
        if not slots:
            return None
        whole = offer.resources
        waste_cpu = 1 - used_cpu / (whole.cpu_milli * len(slots))
        waste_memory = 1 - used_memory / (whole.memory_bytes * len(slots))
        price = (offer.price_micro_usd_per_hour or 0) * len(slots)
        return round(waste_cpu + waste_memory, 9), price, len(slots), offer

    # ---- down

    def _note_unneeded(self, sight: Sight, held: Sequence[Held]) -> None:
        """Keep since when each node has been unneeded: used by half at most, and all its pods fit elsewhere."""
        pods = sight.pods_by_node()
        slots = sight.slots(coming=False)
        unneeded: dict[str, float] = {}
        for each in held:
            if not each.is_usable or each.node is None or each.is_leaving or each.node.spec.unschedulable:
                continue
            here = pods.get(each.node.metadata.name, [])
            if _used(each, here, sight) < UTILISATION_MAX and _can_leave(each, here, slots, sight):
                unneeded[each.token] = self._unneeded_since.get(each.token, sight.now_seconds)
        self._unneeded_since = unneeded

    def _shrink(self, sight: Sight, held: Sequence[Held]) -> Iterable[Act]:
        pods = sight.pods_by_node()
        ripe = [
            each
            for each in held
            if sight.now_seconds - self._unneeded_since.get(each.token, sight.now_seconds) >= UNNEEDED_SECONDS
        ]
        empty = [each for each in ripe if each.node is not None and not pods.get(each.node.metadata.name)]
        if empty:
            yield from (Leave(token=each.token) for each in empty[:EMPTY_COUNT_MAX])
        elif ripe and not sight.leaving & {each.token for each in held}:
            yield Leave(token=ripe[0].token, seconds_max=DRAIN_SECONDS_MAX)


def _unplaced(pods: Sequence[wire.Pod], slots: Sequence[Slot], sight: Sight) -> list[wire.Pod]:
    """Put the pods where there is room, there or coming; return those that have none."""
    left = []
    for pod in sorted(pods, key=lambda one: -one.spec.priority):
        wanted = sight.wanted(pod)
        slot = next((one for one in slots if one.takes(pod, wanted)), None)
        if slot is None:
            left.append(pod)
        else:
            slot.put(wanted)
    return left


def _used(held: Held, pods: Sequence[wire.Pod], sight: Sight) -> float:
    """Requests of allocatable: of GPUs alone where the node has some, else the larger of CPU and memory."""
    whole = held.offer.resources
    if whole.gpu_count:
        return sum(sight.wanted(pod).gpu_count for pod in pods) / whole.gpu_count
    cpu = sum(sight.wanted(pod).cpu_milli for pod in pods) / whole.cpu_milli
    return max(cpu, sum(sight.wanted(pod).memory_bytes for pod in pods) / whole.memory_bytes)


def _can_leave(held: Held, pods: Sequence[wire.Pod], slots: Sequence[Slot], sight: Sight) -> bool:
    """True when every pod may be moved, and fits on another node as they are now."""
    if any(is_protected(pod) or sight.is_blocked(pod) for pod in pods):
        return False
    others = [Slot(one.name, one.node, one.free, one.offer) for one in slots if one.name != held.token]
    return not _unplaced(pods, others, sight)
