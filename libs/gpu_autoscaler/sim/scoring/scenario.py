"""Scenarios for scoring: the jobs that arrive, the available offers, and the reclaims of spot machines.

Nothing in a scenario depends on the system under test, so all systems are scored under equal conditions.
"""

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from msgspec.structs import replace

from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.resources import GPU_RESOURCE
from gpu_autoscaler.sim.actors.checkpointing import CHECKPOINTING_WORKLOAD, CheckpointSettings
from gpu_autoscaler.sim.cluster.cloud import TYPES, Cloud
from gpu_autoscaler.sim.cluster.replica_sets import ReplicaSets
from gpu_autoscaler.sim.virtual_time import VirtualLoop
from gpu_autoscaler.simcluster.offers import ZONES, offers_of


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


@dataclass(slots=True)
class ScenarioPlayer:
    """Plays a scenario."""

    _scenario: Scenario
    _loop: VirtualLoop
    _replica_sets: ReplicaSets
    _cloud: Cloud
    _service_uids: list[str] = field(default_factory=list)

    def begin(self, submit: SubmitJob) -> None:
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


JOBS_PER_HOUR = 20.0
RUN_SECONDS_MIN, RUN_SECONDS_MEDIAN, RUN_SECONDS_MAX = 30.0, 1200.0, 3 * 3600.0
HOURS_MAX = 48.0  # of a job, waiting included; no job of a scenario reaches it
RECLAIMS_PER_HOUR = 0.5
RECLAIM_RATIO = 0.15
NOTICE_SECONDS = 120.0
# Programs of made-up jobs, from short to long ones, and the standard deviation of the logarithm of the factor between
# a length and the one that a job's template is drawn by.
TEMPLATES = ("probe", "evaluate", "tune", "train")
TEMPLATE_SPREAD = 1.25
BURST_EVERY_SECONDS, BURST_SECONDS, BURST_COUNT = 3 * 3600.0, 120.0, 40


def steady(seed: int, hours: float) -> Scenario:
    """Return mixed jobs at a steady rate, three services, and occasional reclaims."""
    rng = random.Random(f"steady/{seed}")
    return Scenario(
        name="steady",
        description=f"{JOBS_PER_HOUR:g} jobs per hour, three services; occasional reclaims of spot machines of a zone",
        hours=hours,
        seed=seed,
        arrivals=tuple(_jobs(rng, _by_chance(rng, hours, JOBS_PER_HOUR))),
        offers=offers_of(TYPES),
        services=tuple(
            ServiceReplicas(
                name=f"service-{number}",
                at_seconds=600.0 * number,
                replicas_count=number + 1,
                gpu_count=1,
                is_movable=number > 0,
            )
            for number in range(3)
        ),
        reclaims=tuple(
            Reclaim(at_seconds=at, zone=rng.choice(ZONES), ratio=RECLAIM_RATIO, notice_seconds=NOTICE_SECONDS)
            for at in _by_chance(rng, hours, RECLAIMS_PER_HOUR)
        ),
    )


def bursts(seed: int, hours: float) -> Scenario:
    """Return many jobs within two minutes every few hours, without reclaims."""
    rng = random.Random(f"bursts/{seed}")
    starts = [number * BURST_EVERY_SECONDS for number in range(int(hours * 3600.0 // BURST_EVERY_SECONDS) or 1)]
    instants = sorted(at + 300.0 + rng.uniform(0.0, BURST_SECONDS) for at in starts for _ in range(BURST_COUNT))
    return Scenario(
        name="bursts",
        description=f"{BURST_COUNT} jobs within two minutes, every {BURST_EVERY_SECONDS / 3600:g} hours",
        hours=hours,
        seed=seed,
        arrivals=tuple(_jobs(rng, instants)),
        offers=offers_of(TYPES),
    )


def preemptible_jobs(rng: random.Random, hours: float, jobs_per_hour: float) -> tuple[Arrival, ...]:
    """Return jobs at this rate that may all run on spot."""
    return tuple(_jobs(rng, _by_chance(rng, hours, jobs_per_hour), is_preemptible=True))


def _by_chance(rng: random.Random, hours: float, per_hour: float) -> Iterator[float]:
    at = rng.expovariate(per_hour / 3600.0)
    while at < hours * 3600.0:
        yield at
        at += rng.expovariate(per_hour / 3600.0)


def _jobs(rng: random.Random, instants: Iterable[float], *, is_preemptible: bool = False) -> Iterator[Arrival]:
    for number, at in enumerate(instants):
        yield Arrival(at_seconds=round(at, 3), request=_job(rng, number, is_preemptible=is_preemptible))


def _job(rng: random.Random, number: int, *, is_preemptible: bool) -> JobRequested:
    run_seconds = min(max(rng.lognormvariate(0.0, 1.0) * RUN_SECONDS_MEDIAN, RUN_SECONDS_MIN), RUN_SECONDS_MAX)
    name = f"work-{number:04d}"
    request = JobRequested(
        job_name=name,
        job_id=JobId(name),
        project_id=rng.choice(("vision", "speech", "ranking")),
        gpu_requirements=GpuRequirements(
            gpu_count=rng.choice((1, 1, 1, 1, 2, 4)), gpu_type=rng.choice((None, None, None, "T4", "A10G", "L4"))
        ),
        container=ContainerRequest(image="work:1"),
        priority=rng.choice(("low", "medium", "medium", "high")),
        preemptible=rng.random() < 0.8 or is_preemptible,
        members=rng.choice((1, 1, 1, 1, 2, 3)),
        workload_type=rng.choice((CHECKPOINTING_WORKLOAD, "batch")),
        max_duration_hours=HOURS_MAX,
    )
    return of_length(request, round(run_seconds, 1))


def of_length(request: JobRequested, run_seconds: float) -> JobRequested:
    """Return the job with this length and the image of its template. Lengths of one template are alike, but spread
    widely, as jobs of one program do: the template is drawn by the length times a random factor.
    """
    rng = random.Random(f"template/{request.job_name}/{run_seconds}")
    level = (math.log(run_seconds / RUN_SECONDS_MEDIAN) + rng.gauss(0.0, TEMPLATE_SPREAD)) / TEMPLATE_SPREAD
    template = TEMPLATES[min(max(math.floor(level) + len(TEMPLATES) // 2, 0), len(TEMPLATES) - 1)]
    return replace(request, container=ContainerRequest(image=f"{template}:1"), run_seconds=run_seconds)
