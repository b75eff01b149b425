"""A job that loses spot repeatedly, with the real services: its last attempt runs on demand."""

from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements
from gpu_autoscaler.sim.cluster.cloud import TYPES
from gpu_autoscaler.sim.scoring.ours import score_ours
from gpu_autoscaler.sim.scoring.scenario import Arrival, Reclaim, Scenario
from gpu_autoscaler.simcluster.offers import ZONES, offers_of
from gpu_autoscaler_services.simulation import ROLES

RECLAIMED_EVERY_SECONDS = 1200.0
RUN_SECONDS = 5400.0


def test_the_last_attempt_outlives_every_storm() -> None:
    """All spot is reclaimed every twenty minutes, and the job takes ninety: three losses, then completion."""
    request = JobRequested(
        job_name="train",
        job_id=JobId("train"),
        project_id="research",
        gpu_requirements=GpuRequirements(gpu_count=1),
        container=ContainerRequest(image="work:1"),
        preemptible=True,
        workload_type="batch",
        run_seconds=RUN_SECONDS,
    )
    score = score_ours(
        Scenario(
            name="storms",
            description="all spot is reclaimed every twenty minutes",
            hours=3.0,
            seed=1,
            arrivals=(Arrival(at_seconds=10.0, request=request),),
            offers=offers_of(TYPES),
            reclaims=tuple(
                Reclaim(at_seconds=RECLAIMED_EVERY_SECONDS * number, zone=zone, ratio=1.0, notice_seconds=120.0)
                for number in range(1, 9)
                for zone in ZONES
            ),
        ),
        ROLES,
    )

    assert score.broken == ()
    assert (score.failed_count, score.unfinished_count) == (0, 0)
    assert score.recovered_jobs_count == 1
    assert score.interrupted_count <= 3
