"""Google Cloud instances for the fleet emulator: orders reconstructed from metadata."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime

from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.providers.gcp.translate import (
    ACTION_ID,
    INSTALLATION,
    NODE_LABELS,
    NODE_TAINTS,
    POOL,
    PRICE,
    provider_id_of,
)
from gpu_autoscaler.providers.protocol import Order
from gpu_autoscaler.simcloud.faults import Fault
from gpu_autoscaler.simcloud.fleet_emulator import FleetInstance
from gpu_autoscaler.simcloud.gcp.catalog import TYPES
from gpu_autoscaler.simcloud.gcp.fake import CREATE, GcpFake
from gpu_autoscaler.simcloud.gcp.machines import PROJECT, Machine
from gpu_autoscaler.simcloud.node_texts import USER_DATA, labels_in, taints_in
from gpu_autoscaler.simcluster.cloud import REFUSALS, RefusalRule
from gpu_autoscaler.simcluster.offers import offers_of

_OFFERS = {offer.instance_type: offer for offer in offers_of(TYPES)}
_CODES = {
    "capacity": "ZONE_RESOURCE_POOL_EXHAUSTED",
    "quota": "QUOTA_EXCEEDED",
    "permission": "forbidden",
    "configuration": "invalid",
}


class GcpFleet:
    """The fake Google Cloud as the emulator reads it."""

    def __init__(self, fake: GcpFake) -> None:
        self._fake = fake
        self._seen: dict[str, Machine] = {}  # by name, including deleted ones

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Return no lock: the fake answers in the emulator's loop."""
        return nullcontext()

    def now(self) -> datetime:
        """The fake's clock."""
        return self._fake.now()

    def settle(self) -> None:
        """Advance every instance to the current time."""
        self._fake.machines.settle()

    def seen(self) -> list[FleetInstance]:
        """Return all instances with our metadata, including deleted ones."""
        living = {machine.name: machine for machine in self._fake.machines.machines.values()}
        self._seen |= {name: machine for name, machine in living.items() if ACTION_ID in machine.metadata}
        return [self._told(machine, is_there=name in living) for name, machine in self._seen.items()]

    def reclaim(self, instance_id: str) -> datetime:
        """Reclaim it as Google preempts spot."""
        return self._fake.machines.preempt(instance_id)

    def refuse(self, rule: RefusalRule) -> None:
        """Apply the rule with Google's code of the same kind: the simulated cloud uses EC2's."""
        code = _CODES[REFUSALS[rule.code][0]]
        self._fake.faults.add(
            Fault(kind="refused", offer=rule.pattern, call=CREATE, code=code, left_count=rule.left_count)
        )

    def follow_prices(self, ratio_of: Callable[[str], float]) -> None:
        """Change the spot prices of the capacity history; the price catalog stays."""
        self._fake.spot_ratio_of = ratio_of

    def _told(self, machine: Machine, *, is_there: bool) -> FleetInstance:
        return FleetInstance(
            instance_id=machine.name,
            provider_id=provider_id_of(PROJECT, machine.zone, machine.name),
            order=_order(machine),
            launched_at=machine.created_at,
            ended_by_user_at=machine.gone_at or machine.stopped_at,
            is_alive=is_there and machine.is_alive,
        )


def _order(machine: Machine) -> Order:
    known, metadata = _OFFERS[machine.machine_type], machine.metadata
    given = USER_DATA.format(labels=metadata[NODE_LABELS], taints=metadata[NODE_TAINTS])
    offer = Offer(
        instance_type=machine.machine_type,
        zone=machine.zone,
        capacity_type=machine.capacity_type,
        resources=known.resources,
        gpu_model=known.gpu_model,
        gpu_memory_bytes=known.gpu_memory_bytes,
        price_micro_usd_per_hour=int(metadata[PRICE]),
    )
    return Order(
        action_id=ActionId(metadata[ACTION_ID]),
        installation=metadata[INSTALLATION],
        pool=metadata[POOL],
        offer=offer,
        labels=labels_in(given),
        taints=taints_in(given),
    )
