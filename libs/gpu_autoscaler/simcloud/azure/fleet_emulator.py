"""Azure machines for the fleet emulator: orders reconstructed from tags and custom data."""

import base64
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime

from gpu_autoscaler.cloudmeta.azure import provider_id_of
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.providers.azure.translate import ACTION_TAG, INSTALLATION_TAG, POOL_TAG, PRICE_TAG, zone_name
from gpu_autoscaler.providers.protocol import Order
from gpu_autoscaler.simcloud.azure.fake import AzureFake
from gpu_autoscaler.simcloud.azure.machines import Machine
from gpu_autoscaler.simcloud.azure.market import INSTANCE_CATALOG, is_above_ceiling
from gpu_autoscaler.simcloud.faults import Fault
from gpu_autoscaler.simcloud.fleet_emulator import FleetInstance
from gpu_autoscaler.simcloud.node_texts import labels_in, taints_in
from gpu_autoscaler.simcluster.cloud import REFUSALS, RefusalRule
from gpu_autoscaler.simcluster.offers import offers_of

_NOTICE_SECONDS = 30.0  # minimum of Scheduled Events (Azure documentation, "Scheduled Events", `Preempt`)
_OFFERS = {offer.instance_type: offer for offer in offers_of(INSTANCE_CATALOG)}
_CODES = {
    "capacity": "ZonalAllocationFailed",
    "quota": "OperationNotAllowed",
    "permission": "AuthorizationFailed",
    "configuration": "InvalidParameter",
}


class AzureFleet:
    """The fake Azure as the emulator reads it."""

    def __init__(self, fake: AzureFake) -> None:
        self._fake = fake

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Return no lock: the fake answers in the emulator's loop."""
        return nullcontext()

    def now(self) -> datetime:
        """The fake's clock."""
        return self._fake.now()

    def settle(self) -> None:
        """Nothing to do: a machine's state follows from its dates."""

    def seen(self) -> list[FleetInstance]:
        """Return all machines with our tags, except those that were never allocated."""
        every = self._fake.machines.ever()
        return [self._seen(machine) for machine in every if ACTION_TAG in machine.tags and machine.failure is None]

    def reclaim(self, instance_id: str) -> datetime:
        """Evict it."""
        return self._fake.machines.evict(self._fake.id_of("virtualMachines", instance_id))

    def refuse(self, rule: RefusalRule) -> None:
        """Apply the rule with Azure's code of the same kind: the simulated cloud uses EC2's."""
        code = _CODES[REFUSALS[rule.code][0]]
        call = "VirtualMachines_CreateOrUpdate"
        self._fake.faults.add(
            Fault(kind="refused", offer=rule.pattern, call=call, code=code, left_count=rule.left_count)
        )

    def follow_prices(self, ratio_of: Callable[[str], float]) -> None:
        """Change the spot prices of the price list."""
        self._fake.spot_ratio_of = ratio_of

    def _seen(self, machine: Machine) -> FleetInstance:
        return FleetInstance(
            instance_id=machine.name,
            provider_id=provider_id_of(machine.resource_id),
            order=_order(machine),
            launched_at=machine.created_at,
            ended_by_user_at=machine.ended_by_user_at,
            is_alive=machine.ends_at is None,
            outbid_notice_seconds=_NOTICE_SECONDS if is_above_ceiling(machine, self._fake.spot_ratio_of) else None,
        )


def _order(machine: Machine) -> Order:
    known = _OFFERS[machine.size]
    given = base64.b64decode(machine.properties.get("osProfile", {}).get("customData", "")).decode()
    offer = Offer(
        instance_type=machine.size,
        zone=zone_name(machine.location, machine.zones),
        capacity_type=CapacityType.SPOT if machine.is_spot else CapacityType.ON_DEMAND,
        resources=known.resources,
        gpu_model=known.gpu_model,
        gpu_memory_bytes=known.gpu_memory_bytes,
        price_micro_usd_per_hour=int(machine.tags[PRICE_TAG]),
    )
    return Order(
        action_id=ActionId(machine.tags[ACTION_TAG]),
        installation=machine.tags[INSTALLATION_TAG],
        pool=machine.tags[POOL_TAG],
        offer=offer,
        labels=labels_in(given),
        taints=taints_in(given),
    )
