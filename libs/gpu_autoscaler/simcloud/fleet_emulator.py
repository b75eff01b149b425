"""Emulates the machines behind a fake cloud's instances as nodes of the simulated cluster, with the cloud's ids.

A controller of that cluster. Launched instances join; terminated ones leave; instances reclaimed by the simulated cloud
end in the fake, and its refusals become the fake's. Prices and end dates are the fake's.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from datetime import datetime
from typing import Protocol

import msgspec

from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.scheduling import Taint
from gpu_autoscaler.providers.protocol import Order
from gpu_autoscaler.simcloud.faults import Fault, Faults
from gpu_autoscaler.simcluster.cloud import REFUSALS, Cloud, RefusalRule
from gpu_autoscaler.simcluster.instances import Machine
from gpu_autoscaler.simcluster.offers import InstanceType
from gpu_autoscaler.simcluster.store import Change

# User data of fake nodes, in the syntax of kubelet flags; the drivers fill it in like any other.
USER_DATA = "labels={labels}\ntaints={taints}\n"


class FleetInstance(msgspec.Struct, frozen=True, kw_only=True):
    """An instance with our tags, as the cloud describes it."""

    instance_id: str
    provider_id: ProviderId
    order: Order  # reconstructed from tags and user data
    launched_at: datetime
    ended_by_user_at: datetime | None
    is_alive: bool
    outbid_notice_seconds: float | None = None  # notice, if the spot price exceeds the launch's ceiling by now


class Fake(Protocol):
    """What all fake clouds have."""

    faults: Faults
    spot_ratio_of: Callable[[str], float]  # by offer key: times the usual price

    def now(self) -> datetime:
        """Return cluster time."""


class EmulatedFleet(ABC):
    """A fake cloud as the emulator reads it."""

    fake: Fake
    launch_calls: str  # pattern of the calls that refusals apply to
    codes: Mapping[str, str] = {}  # the cloud's code of each kind of refusal; empty: the simulated cloud's, EC2's

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Return the lock that the emulator holds while reading; none for a fake that answers in its loop."""
        return nullcontext()

    @abstractmethod
    def settle(self) -> None:
        """Advance every instance to the current time."""

    @abstractmethod
    def seen(self) -> list[FleetInstance]:
        """Return all instances with our tags, including ended ones."""

    @abstractmethod
    def reclaim(self, instance_id: str) -> datetime:
        """Reclaim the instance; return the end date by the cloud."""

    def refuse(self, rule: RefusalRule) -> None:
        """Apply a refusal rule of the simulated cloud, with this cloud's error code of the same kind."""
        code = self.codes[REFUSALS[rule.code][0]] if self.codes else rule.code
        self.fake.faults.add(
            Fault(kind="refused", offer=rule.pattern, call=self.launch_calls, code=code, left_count=rule.left_count)
        )


class SeededCloud(msgspec.Struct, frozen=True, kw_only=True):
    """A fake cloud prepared for a cluster: its offers, its server, and the settings of a driver."""

    fleet: EmulatedFleet
    catalog: tuple[InstanceType, ...]
    settings: msgspec.Struct  # of the driver
    serving: Callable[[int], AbstractAsyncContextManager[str]]  # on this port; yields the URL


def ordered(
    known: Offer,
    zone: str,
    capacity_type: CapacityType,
    marks: Mapping[str, str],
    keys: tuple[str, str, str, str],
    user_data: str,
) -> Order:
    """Return the order of an instance. `keys`: of action id, installation, pool and price in its tags or metadata."""
    action_id, installation, pool, price = (marks[key] for key in keys)
    given = dict(line.split("=", 1) for line in user_data.splitlines() if "=" in line)
    return Order(
        action_id=ActionId(action_id),
        installation=installation,
        pool=pool,
        offer=Offer(
            instance_type=known.instance_type,
            zone=zone,
            capacity_type=capacity_type,
            resources=known.resources,
            gpu_model=known.gpu_model,
            gpu_memory_bytes=known.gpu_memory_bytes,
            price_micro_usd_per_hour=int(price),
        ),
        labels=tuple((key, value) for key, _, value in (entry.partition("=") for entry in _entries(given, "labels"))),
        taints=tuple(_taint(entry) for entry in _entries(given, "taints")),
    )


def _entries(given: Mapping[str, str], name: str) -> list[str]:
    return [entry for entry in given.get(name, "").split(",") if entry]


def _taint(text: str) -> Taint:
    head, _, effect = text.rpartition(":")
    key, _, value = head.partition("=")
    return Taint(key, effect, value)  # type: ignore[arg-type]


class FleetEmulator:
    """Synchronizes fake cloud and cluster, step by step."""

    def __init__(self, fleet: EmulatedFleet, cloud: Cloud) -> None:
        self._fleet = fleet
        self._cloud = cloud
        self._machines: dict[str, Machine] = {}
        fleet.fake.spot_ratio_of = cloud.price_ratio_of

    def on_change(self, change: Change) -> None:
        """Nothing: changes in the cluster do not affect the cloud."""

    def step(self, now: datetime) -> None:  # noqa: ARG002 - both have the same clock
        with self._fleet.lock:
            self._fleet.settle()
            for rule in self._cloud.take_rules():
                self._fleet.refuse(rule)
            for seen in self._fleet.seen():
                machine = self._machines.get(seen.instance_id)
                if machine is None:
                    if seen.is_alive:
                        self._machines[seen.instance_id] = self._join(seen)
                elif seen.is_alive and not machine.is_alive:
                    machine.terminated_at = self._fleet.reclaim(seen.instance_id)
                elif not seen.is_alive and machine.is_alive:
                    self._cloud.end(machine, charged_until=seen.ended_by_user_at or self._fleet.fake.now())
                elif seen.outbid_notice_seconds is not None and machine.is_alive and machine.notice is None:
                    self._cloud.give_notice(machine, seconds=seen.outbid_notice_seconds)

    def _join(self, seen: FleetInstance) -> Machine:
        return self._cloud.join(
            seen.order, instance_id=seen.instance_id, launched_at=seen.launched_at, provider_id=seen.provider_id
        )
