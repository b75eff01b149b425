"""Machines behind the fake's instances: nodes of the simulated cluster, under the names that AWS gives them.

A controller of that cluster. What the fake launched joins; what it was told to end goes; what the simulated cloud takes
back ends in the fake; refusals that were set there are the fake's. Prices and ends are those that AWS tells.
"""

import base64
from datetime import datetime

from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.labels import ACTION_ID, INSTALLATION, POOL
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.scheduling import Taint
from gpu_autoscaler.providers.aws.translate import PRICE, PROVIDER_ID_PREFIX
from gpu_autoscaler.providers.protocol import Order
from gpu_autoscaler.simcloud.aws.fake import AwsFake
from gpu_autoscaler.simcloud.aws.machines import Seen
from gpu_autoscaler.simcloud.faults import Fault
from gpu_autoscaler.simcluster.cloud import Cloud
from gpu_autoscaler.simcluster.instances import Machine
from gpu_autoscaler.simcluster.offers import CATALOGUE, offers_of
from gpu_autoscaler.simcluster.store import Change

# What the nodes of the launch template start with; the driver fills it in (aws.user_data_path).
USER_DATA = "labels={labels}\ntaints={taints}\n"
_OFFERS = {offer.instance_type: offer for offer in offers_of(CATALOGUE)}


class Park:
    """Keeps fake and cluster together, step by step."""

    def __init__(self, fake: AwsFake, cloud: Cloud) -> None:
        self._fake = fake
        self._cloud = cloud
        self._machines: dict[str, Machine] = {}

    def hear(self, change: Change) -> None:
        """Nothing in the cluster moves AWS."""

    def step(self, now: datetime) -> None:  # noqa: ARG002 - both sides have the same clock
        """Bring both sides to where the other one is."""
        with self._fake.lock:
            self._fake.machines.settle()
            for rule in self._cloud.take_rules():
                self._fake.faults.add(
                    Fault(
                        kind="refused",
                        offer=rule.pattern,
                        call="*Instances",
                        code=rule.code,
                        left_count=rule.left_count,
                    )
                )
            for seen in self._fake.machines.seen():
                machine = self._machines.get(seen.instance_id)
                if machine is None and seen.is_alive and ACTION_ID in seen.tags:
                    self._machines[seen.instance_id] = self._join(seen)
                elif machine is None:
                    continue
                elif seen.is_alive and not machine.is_alive:
                    machine.terminated_at = self._fake.machines.reclaim(seen.instance_id)
                elif not seen.is_alive and machine.is_alive:
                    self._cloud.end(machine, charged_until=seen.ended_by_user_at or self._fake.now())

    def _join(self, seen: Seen) -> Machine:
        return self._cloud.join(
            _order(seen),
            instance_id=seen.instance_id,
            launched_at=seen.launched_at,
            provider_prefix=PROVIDER_ID_PREFIX,
        )


def _order(seen: Seen) -> Order:
    """Return what was ordered, as tags and user data tell it."""
    known = _OFFERS[seen.instance_type]
    given = dict(line.split("=", 1) for line in base64.b64decode(seen.user_data).decode().splitlines() if "=" in line)
    offer = Offer(
        instance_type=seen.instance_type,
        zone=seen.zone,
        capacity_type=CapacityType.SPOT if seen.is_spot else CapacityType.ON_DEMAND,
        resources=known.resources,
        gpu_model=known.gpu_model,
        gpu_memory_bytes=known.gpu_memory_bytes,
        price_micro_usd_per_hour=int(seen.tags[PRICE]),
    )
    return Order(
        action_id=ActionId(seen.tags[ACTION_ID]),
        installation=seen.tags[INSTALLATION],
        pool=seen.tags[POOL],
        offer=offer,
        labels=tuple((key, value) for key, _, value in (one.partition("=") for one in _listed(given, "labels"))),
        taints=tuple(_taint(text) for text in _listed(given, "taints")),
    )


def _listed(given: dict[str, str], name: str) -> list[str]:
    return [one for one in given.get(name, "").split(",") if one]


def _taint(text: str) -> Taint:
    head, _, effect = text.rpartition(":")
    key, _, value = head.partition("=")
    return Taint(key, effect, value)  # type: ignore[arg-type]
