"""What the fake's instances are to the park of machines: orders again, read from tags and user data."""

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
from gpu_autoscaler.simcloud.fleet_emulator import Seen
from gpu_autoscaler.simcloud.node_texts import labels_in, taints_in
from gpu_autoscaler.simcluster.cloud import NOTICE_SECONDS, RefusalRule
from gpu_autoscaler.simcluster.offers import CATALOGUE, offers_of

_OFFERS = {offer.instance_type: offer for offer in offers_of(CATALOGUE)}


class AwsBooks:
    """The fake of AWS, as the park reads it."""

    def __init__(self, fake: AwsFake) -> None:
        self._fake = fake

    @property
    def lock(self) -> AbstractContextManager[object]:
        """The fake answers in threads of its own."""
        return self._fake.lock

    def now(self) -> datetime:
        """The fake's clock."""
        return self._fake.now()

    def settle(self) -> None:
        """Bring every instance to where it is by now."""
        self._fake.machines.settle()

    def seen(self) -> list[Seen]:
        """Return every instance that carries our tags."""
        return [_seen(one, self._fake) for one in self._fake.machines.seen() if ACTION_ID in one.tags]

    def reclaim(self, instance_id: str) -> datetime:
        """Take it back as EC2 takes spot."""
        return self._fake.machines.reclaim(instance_id)

    def refuse(self, rule: RefusalRule) -> None:
        """The simulated cloud speaks EC2's words."""
        self._fake.faults.add(
            Fault(kind="refused", offer=rule.pattern, call="*Instances", code=rule.code, left_count=rule.left_count)
        )

    def follow_prices(self, ratio_of: Callable[[str], float]) -> None:
        """Spot's history tells the changed prices; the price list stays."""
        self._fake.spot_ratio_of = ratio_of


def _seen(one: machines.Seen, fake: AwsFake) -> Seen:
    offer = f"{one.instance_type}/{one.zone}/spot"
    is_outbid = one.is_spot and costs_more_than(one.usd_per_hour_max, offer, fake.zones, fake.spot_ratio_of)
    return Seen(
        instance_id=one.instance_id,
        provider_id=ProviderId(f"{PROVIDER_ID_PREFIX}{one.zone}/{one.instance_id}"),
        order=_order(one),
        launched_at=one.launched_at,
        ended_by_user_at=one.ended_by_user_at,
        is_alive=one.is_alive,
        outbid_notice_seconds=NOTICE_SECONDS if is_outbid else None,
    )


def _order(one: machines.Seen) -> Order:
    known = _OFFERS[one.instance_type]
    given = base64.b64decode(one.user_data).decode()
    offer = Offer(
        instance_type=one.instance_type,
        zone=one.zone,
        capacity_type=CapacityType.SPOT if one.is_spot else CapacityType.ON_DEMAND,
        resources=known.resources,
        gpu_model=known.gpu_model,
        gpu_memory_bytes=known.gpu_memory_bytes,
        price_micro_usd_per_hour=int(one.tags[PRICE]),
    )
    return Order(
        action_id=ActionId(one.tags[ACTION_ID]),
        installation=one.tags[INSTALLATION],
        pool=one.tags[POOL],
        offer=offer,
        labels=labels_in(given),
        taints=taints_in(given),
    )
