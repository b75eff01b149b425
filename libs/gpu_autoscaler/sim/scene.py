"""What a system is put into to be scored: the work that comes, what is for sale, and when the cloud takes spot back.

A scene holds nothing that depends on who acts in it, so that all are scored on the same world.
"""

import random
from typing import Protocol

import msgspec

from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.kube import wire
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.resources import GPU_RESOURCE
from gpu_autoscaler.sim.cloud import Cloud
from gpu_autoscaler.sim.groups import Groups
from gpu_autoscaler.sim.saving import Saving
from gpu_autoscaler.sim.timeline import VirtualLoop


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """A job that somebody asks for."""

    at_seconds: float
    request: JobRequested  # with its id, and how long the work takes


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas that stay until the scene's hours are over, of which one may be away at a time."""

    name: str
    at_seconds: float
    replicas_count: int
    gpu_count: int  # of each
    is_movable: bool = True


class Reclaim(msgspec.Struct, frozen=True, kw_only=True):
    """The cloud takes a share of the spot machines of a zone."""

    at_seconds: float
    zone: str
    ratio: float  # each machine's chance
    notice_seconds: float


class Shortage(msgspec.Struct, frozen=True, kw_only=True):
    """A time in which a zone sells no spot machine."""

    zone: str
    from_seconds: float
    to_seconds: float


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """One world to be scored in."""

    name: str
    told: str  # what it is, in a sentence
    hours: float  # in which work arrives
    arrivals: tuple[Arrival, ...]
    offers: tuple[Offer, ...]
    servings: tuple[Serving, ...] = ()
    reclaims: tuple[Reclaim, ...] = ()
    shortages: tuple[Shortage, ...] = ()
    saving: Saving = Saving()  # of work that saves itself
    seed: int = 1  # of what happens by chance while it runs: boot times, starts of pods, who is reclaimed


class Door(Protocol):
    """Where jobs are asked for."""

    def __call__(self, request: JobRequested) -> None:
        """Somebody asks."""
        ...


class Staging:
    """Lets a scene happen."""

    def __init__(self, scene: Scene, loop: VirtualLoop, groups: Groups, cloud: Cloud) -> None:
        self._scene = scene
        self._loop = loop
        self._groups = groups
        self._cloud = cloud
        self._started: list[str] = []

    def begin(self, door: Door) -> None:
        """Set the timers of everything that will happen."""
        for arrival in self._scene.arrivals:
            self._loop.call_later(arrival.at_seconds, door, arrival.request)
        for serving in self._scene.servings:
            self._loop.call_later(serving.at_seconds, self._serve, serving)
        for number, reclaim in enumerate(self._scene.reclaims):
            self._loop.call_later(reclaim.at_seconds, self._reclaim, reclaim, number)
        for shortage in self._scene.shortages:
            self._loop.call_later(shortage.from_seconds, self._cloud.zones_without_spot.add, shortage.zone)
            self._loop.call_later(shortage.to_seconds, self._cloud.zones_without_spot.discard, shortage.zone)
        self._loop.call_later(self._scene.hours * 3600.0, self._close)

    def _close(self) -> None:
        for uid in self._started:
            self._groups.stop(uid)

    def _serve(self, serving: Serving) -> None:
        amounts = {"cpu": "1", "memory": "2Gi", GPU_RESOURCE: str(serving.gpu_count)}
        container = wire.Container(name="main", resources=wire.ResourceList(requests=amounts, limits=amounts))
        keep = {labels.DO_NOT_DISRUPT: "true", labels.KARPENTER_DO_NOT_DISRUPT: "true", labels.SAFE_TO_EVICT: "false"}
        self._started.append(
            self._groups.start(
                serving.name,
                wire.PodSpec(containers=(container,)),
                replicas_count=serving.replicas_count,
                annotations={} if serving.is_movable else keep,
                healthy_count_min=max(1, serving.replicas_count - 1),
            )
        )

    def _reclaim(self, reclaim: Reclaim, number: int) -> None:
        """Warn each spot machine of the zone by its chance; the n-th machine has the same chance whoever bought it."""
        chance = random.Random(f"{self._scene.name}/{self._scene.seed}/{number}")
        for machine in self._cloud.spot():
            if machine.offer.zone == reclaim.zone and chance.random() < reclaim.ratio:
                self._cloud.warn(machine, reclaim.notice_seconds)
