"""Synthetic scenarios, drawn from a seed. The strings that seed `Random` are part of each seed's meaning."""

import random
from collections.abc import Iterable, Iterator

from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements
from gpu_autoscaler.sim.actors.checkpointing import CHECKPOINTING_WORKLOAD
from gpu_autoscaler.sim.cluster.cloud import TYPES
from gpu_autoscaler.sim.scoring.scenario import Arrival, Reclaim, Scenario, ServiceReplicas
from gpu_autoscaler.simcluster.offers import ZONES, offers_of

JOBS_PER_HOUR = 20.0
RUN_SECONDS_MIN, RUN_SECONDS_MEDIAN, RUN_SECONDS_MAX = 30.0, 1200.0, 3 * 3600.0
HOURS_MAX = 48.0  # of a job, waiting included; no job of a scenario reaches it
RECLAIMS_PER_HOUR = 0.5
RECLAIM_RATIO = 0.15
NOTICE_SECONDS = 120.0
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
    return JobRequested(
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
        run_seconds=round(run_seconds, 1),
    )
