"""AWS instances for the fleet emulator: orders reconstructed from tags and user data."""

import base64
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime

from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.labels import ACTION_ID, INSTALLATION, POOL
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.providers.aws.translate import PRICE, PROVIDER_ID_PREFIX
from gpu_autoscaler.providers.protocol import Order
from gpu_autoscaler.simcloud.aws import machines
from gpu_autoscaler.simcloud.aws.fake import AwsFake
from gpu_autoscaler.simcloud.aws.market import costs_more_than
from gpu_autoscaler.simcloud.faults import Fault
from gpu_autoscaler.simcloud.fleet_emulator import FleetInstance
from gpu_autoscaler.simcloud.node_texts import labels_in, taints_in
from gpu_autoscaler.simcluster.cloud import NOTICE_SECONDS, RefusalRule
from gpu_autoscaler.simcluster.offers import INSTANCE_CATALOG, offers_of

_OFFERS = {offer.instance_type: offer for offer in offers_of(INSTANCE_CATALOG)}


class AwsFleet:
    """The fake AWS as the emulator reads it."""

    def __init__(self, fake: AwsFake) -> None:
        self._fake = fake

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Return the fake's lock: it answers in its own threads."""
        return self._fake.lock

    def now(self) -> datetime:
        """The fake's clock."""
        return self._fake.now()

    def settle(self) -> None:
        """Advance every instance to the current time."""
        self._fake.machines.settle()

    def seen(self) -> list[FleetInstance]:
        """Return all instances with our tags."""
        return [_seen(machine, self._fake) for machine in self._fake.machines.seen() if ACTION_ID in machine.tags]

    def reclaim(self, instance_id: str) -> datetime:
        """Reclaim it as EC2 reclaims spot."""
        return self._fake.machines.reclaim(instance_id)

    def refuse(self, rule: RefusalRule) -> None:
        """Apply the rule as is: the simulated cloud uses EC2's codes."""
        self._fake.faults.add(
            Fault(kind="refused", offer=rule.pattern, call="*Instances", code=rule.code, left_count=rule.left_count)
        )

    def follow_prices(self, ratio_of: Callable[[str], float]) -> None:
        """Change the spot price history; the price list stays."""
        self._fake.spot_ratio_of = ratio_of


def _seen(machine: machines.FleetInstance, fake: AwsFake) -> FleetInstance:
    offer = f"{machine.instance_type}/{machine.zone}/spot"
    is_outbid = machine.is_spot and costs_more_than(machine.usd_per_hour_max, offer, fake.zones, fake.spot_ratio_of)
    return FleetInstance(
        instance_id=machine.instance_id,
        provider_id=ProviderId(f"{PROVIDER_ID_PREFIX}{machine.zone}/{machine.instance_id}"),
        order=_order(machine),
        launched_at=machine.launched_at,
        ended_by_user_at=machine.ended_by_user_at,
        is_alive=machine.is_alive,
        outbid_notice_seconds=NOTICE_SECONDS if is_outbid else None,
    )


def _order(machine: machines.FleetInstance) -> Order:
    known = _OFFERS[machine.instance_type]
    given = base64.b64decode(machine.user_data).decode()
    offer = Offer(
        instance_type=machine.instance_type,
        zone=machine.zone,
        capacity_type=CapacityType.SPOT if machine.is_spot else CapacityType.ON_DEMAND,
        resources=known.resources,
        gpu_model=known.gpu_model,
        gpu_memory_bytes=known.gpu_memory_bytes,
        price_micro_usd_per_hour=int(machine.tags[PRICE]),
    )
    return Order(
        action_id=ActionId(machine.tags[ACTION_ID]),
        installation=machine.tags[INSTALLATION],
        pool=machine.tags[POOL],
        offer=offer,
        labels=labels_in(given),
        taints=taints_in(given),
    )
