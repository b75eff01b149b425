"""Machines behind a fake cloud's instances: nodes of the simulated cluster, under the names that the cloud gives them.

A controller of that cluster. What the fake launched joins; what it was told to end goes; what the simulated cloud takes
back ends in the fake; refusals that were set there are the fake's. Prices and ends are those that the fake tells.
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


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """An instance with our tags, as the cloud itself knows it."""

    instance_id: str
    provider_id: ProviderId
    order: Order  # what was ordered, as tags and start-up data tell it
    launched_at: datetime
    ended_by_user_at: datetime | None
    is_alive: bool
    outbid_notice_seconds: float | None = None  # spot costs more by now than its launch allows: how it is told


class Books(Protocol):
    """A fake cloud, as the park reads it."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held while the park looks."""
        ...

    def now(self) -> datetime:
        """Cluster time."""
        ...

    def settle(self) -> None:
        """Bring every instance to where it is by now."""
        ...

    def seen(self) -> list[Seen]:
        """Return every instance that carries our tags, those that ended too."""
        ...

    def reclaim(self, instance_id: str) -> datetime:
        """Take the instance back; returns the instant that the cloud dates it to."""
        ...

    def refuse(self, rule: RefusalRule) -> None:
        """Refuse launches as the rule of the simulated cloud says, in the words of this one."""
        ...


@runtime_checkable
class Priced(Protocol):
    """Books whose cloud can ask other prices than its usual ones."""

    def follow_prices(self, ratio_of: Callable[[str], float]) -> None:
        """Ask so many times the usual price of an offer (`type/zone/capacity type`) from now on."""
        ...


class Park:
    """Keeps fake and cluster together, step by step."""

    def __init__(self, books: Books, cloud: Cloud) -> None:
        self._books = books
        self._cloud = cloud
        self._machines: dict[str, Machine] = {}
        if isinstance(books, Priced):
            books.follow_prices(cloud.price_ratio_of)

    def hear(self, change: Change) -> None:
        """Nothing in the cluster moves the cloud."""

    def step(self, now: datetime) -> None:  # noqa: ARG002 - both sides have the same clock
        """Bring both sides to where the other one is."""
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

    def _join(self, seen: Seen) -> Machine:
        return self._cloud.join(
            seen.order, instance_id=seen.instance_id, launched_at=seen.launched_at, provider_id=seen.provider_id
        )
