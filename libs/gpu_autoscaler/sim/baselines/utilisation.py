"""Groups that follow the mean utilisation of their GPUs, and nothing else: target tracking, as clouds offer it.

Source: AWS, EC2 Auto Scaling user guide, "Target tracking scaling policies" (read 2026-11-21), and its alarms: more
after 3 minutes above the target, in proportion; fewer after 15 minutes more than a tenth below it; nothing during the
cool-down of 300 s. Pods that wait count for nothing: only what runs is measured.

One group of on-demand nodes for each GPU model that work asks for by name, and one for all other work. Each keeps one
node at least: an empty group has no utilisation, and would never grow again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gpu_autoscaler.kube import wire
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.sim.baselines.protocol import Act, Buy, Leave
from gpu_autoscaler.sim.baselines.sight import Held, Sight
from gpu_autoscaler.sim.baselines.wishes import Wish, cheapest_fleet, fits_on, wishes_of
from gpu_autoscaler.sim.scene import Scene
from gpu_autoscaler.sim.workloads import is_ready

TARGET_RATIO = 0.7
LOW_SHARE = 0.9  # of the target: below it a group may shrink
HIGH_SECONDS, LOW_SECONDS = 180.0, 900.0
COOLDOWN_SECONDS = 300.0


@dataclass(slots=True)
class _Group:
    """Nodes of one kind."""

    offer: Offer
    high_since: float | None = None
    low_since: float | None = None
    changed_at: float = field(default=-COOLDOWN_SECONDS)


class UtilisationOnly:
    """Keeps the share of busy GPUs of each group near its target."""

    name = "utilisation only"
    scan_seconds = 60.0

    def __init__(self, offers: Sequence[Offer]) -> None:
        """`offers`: one for each group."""
        self._groups = [_Group(offer) for offer in offers]
        self._bought_count = 0

    def look(self, sight: Sight) -> Iterable[Act]:
        """Measure each group, and correct it."""
        pods = sight.pods_by_node()
        for group in self._groups:
            staying = [held for held in sight.held() if held.offer.key == group.offer.key and not held.is_leaving]
            if not staying:
                yield self._buy(group.offer)
                continue
            usable = [held for held in staying if held.is_usable and held.node is not None]
            if usable:
                yield from self._correct(
                    group, sight, staying, {held.token: _busy(held, pods, sight) for held in usable}
                )

    def _correct(self, group: _Group, sight: Sight, staying: list[Held], busy: dict[str, float]) -> Iterable[Act]:
        now, ratio = sight.now_seconds, sum(busy.values()) / len(busy)
        group.high_since = None if ratio <= TARGET_RATIO else group.high_since or now
        group.low_since = None if ratio >= TARGET_RATIO * LOW_SHARE else group.low_since or now
        if now - group.changed_at < COOLDOWN_SECONDS:
            return
        wanted_count = max(1, -int(-len(busy) * ratio / TARGET_RATIO // 1))
        if group.high_since is not None and now - group.high_since >= HIGH_SECONDS:
            more = wanted_count - len(staying)
            if more > 0:
                group.changed_at = now
                yield from (self._buy(group.offer) for _ in range(more))
        elif group.low_since is not None and now - group.low_since >= LOW_SECONDS and len(staying) > wanted_count:
            group.changed_at = now
            # The least busy goes, whatever runs there: the group's measure is all that is looked at.
            yield Leave(token=min(busy, key=lambda token: (busy[token], token)), is_forced=True)

    def _buy(self, offer: Offer) -> Buy:
        self._bought_count += 1
        return Buy(offer=offer, token=f"group-{self._bought_count}")


def groups_for(scene: Scene) -> tuple[Offer, ...]:
    """Return the node of each group: of those that take all of its work, the one whose GPUs are cheapest."""
    offers = [offer for offer in scene.offers if offer.capacity_type is CapacityType.ON_DEMAND]
    by_model: dict[str | None, list[Wish]] = {}
    for wish in wishes_of(scene):
        by_model.setdefault(wish.gpu_model, []).append(wish)
    chosen = []
    for _, wishes in sorted(by_model.items(), key=lambda item: item[0] or ""):
        fitting = [offer for offer in offers if all(fits_on(wish, offer) for wish in wishes)]
        chosen.append(
            min(fitting, key=_per_gpu) if fitting else cheapest_fleet([max(wishes, key=Wish.size)], offers)[0]
        )
    return tuple(dict.fromkeys(chosen))


def _per_gpu(offer: Offer) -> tuple[float, str]:
    return (offer.price_micro_usd_per_hour or 0) / max(1, offer.resources.gpu_count), offer.key


def _busy(held: Held, pods: dict[str, list[wire.Pod]], sight: Sight) -> float:
    """The share of the node's GPUs in which work runs, as its exporter would say."""
    here = [] if held.node is None else pods.get(held.node.metadata.name, [])
    running = sum(sight.wanted(pod).gpu_count for pod in here if is_ready(pod))
    return running / max(1, held.offer.resources.gpu_count)
