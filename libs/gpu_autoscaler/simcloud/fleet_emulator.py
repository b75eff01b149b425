"""Emulates the machines behind a fake cloud's instances as nodes of the simulated cluster, with the cloud's ids.

A controller of that cluster. Launched instances join; terminated ones leave; instances reclaimed by the simulated cloud
end in the fake, and its refusals become the fake's. Prices and end dates are the fake's.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Protocol, runtime_checkable

import msgspec

from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.providers.protocol import Order
from gpu_autoscaler.simcluster.cloud import Cloud, RefusalRule
from gpu_autoscaler.simcluster.instances import Machine
from gpu_autoscaler.simcluster.store import Change


class FleetInstance(msgspec.Struct, frozen=True, kw_only=True):
    """An instance with our tags, as the cloud describes it."""

    instance_id: str
    provider_id: ProviderId
    order: Order  # reconstructed from tags and user data
    launched_at: datetime
    ended_by_user_at: datetime | None
    is_alive: bool
    outbid_notice_seconds: float | None = None  # notice, if the spot price exceeds the launch's ceiling by now


class EmulatedFleet(Protocol):
    """A fake cloud as the emulator reads it."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Return the lock that the emulator holds while reading."""
        ...

    def now(self) -> datetime:
        """Cluster time."""
        ...

    def settle(self) -> None:
        """Advance every instance to the current time."""
        ...

    def seen(self) -> list[FleetInstance]:
        """Return all instances with our tags, including ended ones."""
        ...

    def reclaim(self, instance_id: str) -> datetime:
        """Reclaim the instance; return the end date by the cloud."""
        ...

    def refuse(self, rule: RefusalRule) -> None:
        """Apply a refusal rule of the simulated cloud, with this cloud's error codes."""
        ...


@runtime_checkable
class AdjustsPrices(Protocol):
    """A fleet whose cloud can change its prices."""

    def follow_prices(self, ratio_of: Callable[[str], float]) -> None:
        """Multiply the usual price of an offer (`type/zone/capacity type`) by this ratio from now on."""
        ...


class FleetEmulator:
    """Synchronizes fake cloud and cluster, step by step."""

    def __init__(self, fleet: EmulatedFleet, cloud: Cloud) -> None:
        self._books = fleet
        self._cloud = cloud
        self._machines: dict[str, Machine] = {}
        if isinstance(fleet, AdjustsPrices):
            fleet.follow_prices(cloud.price_ratio_of)

    def on_change(self, change: Change) -> None:
        """Nothing: changes in the cluster do not affect the cloud."""

    def step(self, now: datetime) -> None:  # noqa: ARG002 - both have the same clock
        """Synchronize both sides."""
        with self._books.lock:
            self._books.settle()
            for rule in self._cloud.take_rules():
                self._books.refuse(rule)
            for seen in self._books.seen():
                machine = self._machines.get(seen.instance_id)
                if machine is None:
                    if seen.is_alive:
                        self._machines[seen.instance_id] = self._join(seen)
                elif seen.is_alive and not machine.is_alive:
                    machine.terminated_at = self._books.reclaim(seen.instance_id)
                elif not seen.is_alive and machine.is_alive:
                    self._cloud.end(machine, charged_until=seen.ended_by_user_at or self._books.now())
                elif seen.outbid_notice_seconds is not None and machine.is_alive and machine.notice is None:
                    self._cloud.give_notice(machine, seconds=seen.outbid_notice_seconds)

    def _join(self, seen: FleetInstance) -> Machine:
        return self._cloud.join(
            seen.order, instance_id=seen.instance_id, launched_at=seen.launched_at, provider_id=seen.provider_id
        )
