"""What the fake's machines are to the park of machines: orders again, read from tags and custom data."""

import base64
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime

from gpu_autoscaler.cloudmeta.azure import provider_id_of
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.providers.azure.translate import (
    ACTION_TAG,
    INSTALLATION_TAG,
    POOL_TAG,
    PRICE_TAG,
    zone_name,
)
from gpu_autoscaler.providers.protocol import Order
from gpu_autoscaler.simcloud.azure.fake import AzureFake
from gpu_autoscaler.simcloud.azure.machines import Machine
from gpu_autoscaler.simcloud.azure.market import CATALOGUE, is_above_ceiling
from gpu_autoscaler.simcloud.faults import Fault
from gpu_autoscaler.simcloud.fleet_emulator import Seen
from gpu_autoscaler.simcloud.node_texts import labels_in, taints_in
from gpu_autoscaler.simcluster.cloud import REFUSALS, RefusalRule
from gpu_autoscaler.simcluster.offers import offers_of

_NOTICE_SECONDS = 30.0  # the least that Scheduled Events give (Azure documentation, "Scheduled Events", `Preempt`)
_OFFERS = {offer.instance_type: offer for offer in offers_of(CATALOGUE)}
_CODES = {
    "capacity": "ZonalAllocationFailed",
    "quota": "OperationNotAllowed",
    "permission": "AuthorizationFailed",
    "configuration": "InvalidParameter",
}


class AzureBooks:
    """The fake of Azure, as the park reads it."""

    def __init__(self, fake: AzureFake) -> None:
        self._fake = fake

    @property
    def lock(self) -> AbstractContextManager[object]:
        """The fake answers in the loop that the park steps in."""
        return nullcontext()

    def now(self) -> datetime:
        """The fake's clock."""
        return self._fake.now()

    def settle(self) -> None:
        """A machine is where it is by its own dates."""

    def seen(self) -> list[Seen]:
        """Return every machine that carries our tags, but for those that were never allocated."""
        every = self._fake.machines.ever()
        return [self._seen(one) for one in every if ACTION_TAG in one.tags and one.failure is None]

    def reclaim(self, instance_id: str) -> datetime:
        """Evict it."""
        return self._fake.machines.evict(self._fake.id_of("virtualMachines", instance_id))

    def refuse(self, rule: RefusalRule) -> None:
        """The simulated cloud speaks EC2's words: Azure's of the same kind."""
        code = _CODES[REFUSALS[rule.code][0]]
        call = "VirtualMachines_CreateOrUpdate"
        self._fake.faults.add(
            Fault(kind="refused", offer=rule.pattern, call=call, code=code, left_count=rule.left_count)
        )

    def follow_prices(self, ratio_of: Callable[[str], float]) -> None:
        """The price list tells spot's changed prices."""
        self._fake.spot_ratio_of = ratio_of

    def _seen(self, one: Machine) -> Seen:
        return Seen(
            instance_id=one.name,
            provider_id=provider_id_of(one.resource_id),
            order=_order(one),
            launched_at=one.created_at,
            ended_by_user_at=one.ended_by_user_at,
            is_alive=one.ends_at is None,
            outbid_notice_seconds=_NOTICE_SECONDS if is_above_ceiling(one, self._fake.spot_ratio_of) else None,
        )


def _order(one: Machine) -> Order:
    known = _OFFERS[one.size]
    given = base64.b64decode(one.properties.get("osProfile", {}).get("customData", "")).decode()
    offer = Offer(
        instance_type=one.size,
        zone=zone_name(one.location, one.zones),
        capacity_type=CapacityType.SPOT if one.is_spot else CapacityType.ON_DEMAND,
        resources=known.resources,
        gpu_model=known.gpu_model,
        gpu_memory_bytes=known.gpu_memory_bytes,
        price_micro_usd_per_hour=int(one.tags[PRICE_TAG]),
    )
    return Order(
        action_id=ActionId(one.tags[ACTION_TAG]),
        installation=one.tags[INSTALLATION_TAG],
        pool=one.tags[POOL_TAG],
        offer=offer,
        labels=labels_in(given),
        taints=taints_in(given),
    )
