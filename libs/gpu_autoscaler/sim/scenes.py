"""Scenes that are made up: work by chance, from a seed."""

import random
from collections.abc import Iterable, Iterator

from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements
from gpu_autoscaler.sim.cloud import TYPES
from gpu_autoscaler.sim.saving import SAVING_WORK
from gpu_autoscaler.sim.scene import Arrival, Reclaim, Scene, Serving
from gpu_autoscaler.simcluster.offers import ZONES, offers_of

JOBS_PER_HOUR = 20.0
RUN_SECONDS_MIN, RUN_SECONDS_MEDIAN, RUN_SECONDS_MAX = 30.0, 1200.0, 3 * 3600.0
HOURS_MAX = 48.0  # of a job, waiting included: no job of a scene ends because of it
RECLAIMS_PER_HOUR = 0.5
RECLAIM_RATIO = 0.15
NOTICE_SECONDS = 120.0
BURST_EVERY_SECONDS, BURST_SECONDS, BURST_COUNT = 3 * 3600.0, 120.0, 40


def steady(seed: int, hours: float) -> Scene:
    """Jobs of all kinds at a steady rate, three services, and single reclaims now and then."""
    chance = random.Random(f"steady/{seed}")
    return Scene(
        name="steady",
        told=f"{JOBS_PER_HOUR:g} jobs an hour, three services; now and then spot machines of a zone are taken",
        hours=hours,
        seed=seed,
        arrivals=tuple(_jobs(chance, _by_chance(chance, hours, JOBS_PER_HOUR))),
        offers=offers_of(TYPES),
        servings=tuple(
            Serving(
                name=f"service-{number}",
                at_seconds=600.0 * number,
                replicas_count=number + 1,
                gpu_count=1,
                is_movable=number > 0,
            )
            for number in range(3)
        ),
        reclaims=tuple(
            Reclaim(at_seconds=at, zone=chance.choice(ZONES), ratio=RECLAIM_RATIO, notice_seconds=NOTICE_SECONDS)
            for at in _by_chance(chance, hours, RECLAIMS_PER_HOUR)
        ),
    )


def bursts(seed: int, hours: float) -> Scene:
    """Nothing for hours, then many jobs within two minutes; the cloud takes nothing back."""
    chance = random.Random(f"bursts/{seed}")
    began = [number * BURST_EVERY_SECONDS for number in range(int(hours * 3600.0 // BURST_EVERY_SECONDS) or 1)]
    instants = sorted(at + 300.0 + chance.uniform(0.0, BURST_SECONDS) for at in began for _ in range(BURST_COUNT))
    return Scene(
        name="bursts",
        told=f"{BURST_COUNT} jobs within two minutes, every {BURST_EVERY_SECONDS / 3600:g} hours, and nothing between",
        hours=hours,
        seed=seed,
        arrivals=tuple(_jobs(chance, instants)),
        offers=offers_of(TYPES),
    )


def preemptible_jobs(chance: random.Random, hours: float, jobs_per_hour: float) -> tuple[Arrival, ...]:
    """Return jobs at this rate that may all run on spot."""
    return tuple(_jobs(chance, _by_chance(chance, hours, jobs_per_hour), is_preemptible=True))


def _by_chance(chance: random.Random, hours: float, per_hour: float) -> Iterator[float]:
    at = chance.expovariate(per_hour / 3600.0)
    while at < hours * 3600.0:
        yield at
        at += chance.expovariate(per_hour / 3600.0)


def _jobs(chance: random.Random, instants: Iterable[float], *, is_preemptible: bool = False) -> Iterator[Arrival]:
    for number, at in enumerate(instants):
        yield Arrival(at_seconds=round(at, 3), request=_job(chance, number, is_preemptible=is_preemptible))


def _job(chance: random.Random, number: int, *, is_preemptible: bool) -> JobRequested:
    run_seconds = min(max(chance.lognormvariate(0.0, 1.0) * RUN_SECONDS_MEDIAN, RUN_SECONDS_MIN), RUN_SECONDS_MAX)
    name = f"work-{number:04d}"
    return JobRequested(
        job_name=name,
        job_id=JobId(name),
        project_id=chance.choice(("vision", "speech", "ranking")),
        gpu_requirements=GpuRequirements(
            gpu_count=chance.choice((1, 1, 1, 1, 2, 4)), gpu_type=chance.choice((None, None, None, "T4", "A10G", "L4"))
        ),
        container=ContainerRequest(image="work:1"),
        priority=chance.choice(("low", "medium", "medium", "high")),
        preemptible=chance.random() < 0.8 or is_preemptible,
        members=chance.choice((1, 1, 1, 1, 2, 3)),
        workload_type=chance.choice((SAVING_WORK, "batch")),
        max_duration_hours=HOURS_MAX,
        run_seconds=round(run_seconds, 1),
    )
