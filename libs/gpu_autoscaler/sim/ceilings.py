"""Invariant: the limits of the policy, checked against the real machines at each launch."""

from collections.abc import Callable, Sequence

from gpu_autoscaler.model import labels
from gpu_autoscaler.sim.cloud import Cloud, Machine
from gpu_autoscaler.sim.policies import Policies

_LIMITS = "limits"


class Ceilings:
    """Counts machines by cluster, pool, zone and project."""

    def __init__(self, cloud: Cloud, policies: Policies, breaks: Callable[[str, str], None]) -> None:
        self._cloud = cloud
        self._policies = policies
        self._breaks = breaks

    def launched(self, machine: Machine) -> None:
        """A machine was launched. Late launches of calls that timed out are not counted."""
        policy = self._policies.now
        standing = [
            each
            for each in self._cloud.machines
            if each.is_ordered and not each.was_held and each.state != "terminated"
        ]
        self._see("the cluster", standing, policy.nodes_count_max, policy.gpu_count_max)
        for kind, limited in (
            ("pool", policy.pools),
            ("zone", policy.limits.zones),
            ("project", policy.limits.projects),
        ):
            for part in limited:
                if _part(machine, kind) == part.name:
                    there = [each for each in standing if _part(each, kind) == part.name]
                    self._see(f"{kind} {part.name}", there, part.nodes_count_max, part.gpu_count_max)
        price_max = policy.price_micro_usd_per_hour_max
        price = sum(each.offer.price_micro_usd_per_hour or 0 for each in standing)
        if price_max is not None and price > price_max:
            self._breaks(_LIMITS, f"{price} micro-dollars an hour, the policy allows {price_max}")

    def _see(self, where: str, there: Sequence[Machine], nodes_max: int | None, gpus_max: int | None) -> None:
        if nodes_max is not None and len(there) > nodes_max:
            self._breaks(_LIMITS, f"{len(there)} machines in {where}, the policy allows {nodes_max}")
        gpu_count = sum(each.offer.resources.gpu_count for each in there)
        if gpus_max is not None and gpu_count > gpus_max:
            self._breaks(_LIMITS, f"{gpu_count} GPUs in {where}, the policy allows {gpus_max}")


def _part(machine: Machine, kind: str) -> str | None:
    parts = {"pool": machine.order.pool, "zone": machine.offer.zone}
    return parts.get(kind) or dict(machine.order.labels).get(labels.PROJECT_ID)
