"""Scenarios for scoring: the jobs that arrive, the available offers, and the reclaims of spot machines.

Nothing in a scenario depends on the system under test, so all systems are scored under equal conditions.
"""

import random
from typing import Protocol

import msgspec

from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.resources import GPU_RESOURCE
from gpu_autoscaler.sim.actors.checkpointing import CheckpointSettings
from gpu_autoscaler.sim.cluster.cloud import Cloud
from gpu_autoscaler.sim.cluster.replica_sets import ReplicaSets
from gpu_autoscaler.sim.virtual_time import VirtualLoop


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """A job request."""

    at_seconds: float
    request: JobRequested  # with its id and duration


class ServiceReplicas(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas that run until the hours of the scenario end; their PodDisruptionBudget allows one disruption."""

    name: str
    at_seconds: float
    replicas_count: int
    gpu_count: int  # per replica
    is_movable: bool = True


class Reclaim(msgspec.Struct, frozen=True, kw_only=True):
    """The cloud reclaims a share of the spot machines of a zone."""

    at_seconds: float
    zone: str
    ratio: float  # probability of each machine
    notice_seconds: float


class Shortage(msgspec.Struct, frozen=True, kw_only=True):
    """A time without spot capacity in a zone."""

    zone: str
    from_seconds: float
    to_seconds: float


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions under which systems are scored."""

    name: str
    description: str  # one sentence
    hours: float  # in which jobs arrive
    arrivals: tuple[Arrival, ...]
    offers: tuple[Offer, ...]
    services: tuple[ServiceReplicas, ...] = ()
    reclaims: tuple[Reclaim, ...] = ()
    shortages: tuple[Shortage, ...] = ()
    checkpoints: CheckpointSettings = CheckpointSettings()  # of checkpointing work
    seed: int = 1  # of random events: boot times, pod starts, reclaimed machines


class SubmitJob(Protocol):
    """Receives job requests."""

    def __call__(self, request: JobRequested) -> None:
        """Submit the job."""
        ...


class ScenarioPlayer:
    """Plays a scenario."""

    def __init__(self, scenario: Scenario, loop: VirtualLoop, replica_sets: ReplicaSets, cloud: Cloud) -> None:
        self._scenario = scenario
        self._loop = loop
        self._replica_sets = replica_sets
        self._cloud = cloud
        self._service_uids: list[str] = []

    def begin(self, submit: SubmitJob) -> None:
        """Schedule all events of the scenario."""
        for arrival in self._scenario.arrivals:
            self._loop.call_later(arrival.at_seconds, submit, arrival.request)
        for service in self._scenario.services:
            self._loop.call_later(service.at_seconds, self._serve, service)
        for number, reclaim in enumerate(self._scenario.reclaims):
            self._loop.call_later(reclaim.at_seconds, self._reclaim, reclaim, number)
        for shortage in self._scenario.shortages:
            self._loop.call_later(shortage.from_seconds, self._cloud.zones_without_spot.add, shortage.zone)
            self._loop.call_later(shortage.to_seconds, self._cloud.zones_without_spot.discard, shortage.zone)
        self._loop.call_later(self._scenario.hours * 3600.0, self._close)

    def _close(self) -> None:
        for uid in self._service_uids:
            self._replica_sets.stop(uid)

    def _serve(self, service: ServiceReplicas) -> None:
        amounts = {"cpu": "1", "memory": "2Gi", GPU_RESOURCE: str(service.gpu_count)}
        container = core.Container(name="main", resources=core.ResourceList(requests=amounts, limits=amounts))
        keep = {labels.DO_NOT_DISRUPT: "true", labels.KARPENTER_DO_NOT_DISRUPT: "true", labels.SAFE_TO_EVICT: "false"}
        self._service_uids.append(
            self._replica_sets.start(
                service.name,
                core.PodSpec(containers=(container,)),
                replicas_count=service.replicas_count,
                annotations={} if service.is_movable else keep,
                healthy_count_min=max(1, service.replicas_count - 1),
            )
        )

    def _reclaim(self, reclaim: Reclaim, number: int) -> None:
        """Warn each spot machine of the zone with its probability; the n-th machine draws the same number in every
        system.
        """
        rng = random.Random(f"{self._scenario.name}/{self._scenario.seed}/{number}")
        for machine in self._cloud.spot():
            if machine.offer.zone == reclaim.zone and rng.random() < reclaim.ratio:
                self._cloud.warn(machine, reclaim.notice_seconds)
