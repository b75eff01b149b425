"""A gang that was bought on-demand in a shortage goes back to spot, with the real services: once, as one, saved."""

from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.job import JobPlaced, JobPreempted, JobRequested
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements
from gpu_autoscaler.model.reasons.preempt import MovedToSpot
from gpu_autoscaler.sim.actors.checkpointing import CheckpointSettings
from gpu_autoscaler.sim.cluster.cloud import TYPES
from gpu_autoscaler.sim.scoring.metrics import Score
from gpu_autoscaler.sim.scoring.ours import score_ours
from gpu_autoscaler.sim.scoring.scenario import Arrival, Scenario, Shortage
from gpu_autoscaler.simcluster.offers import ZONES, offers_of
from gpu_autoscaler_services.simulation import ROLES

RUN_SECONDS = 4 * 3600.0
SHORT_SECONDS = 300.0


def played(checkpoints: CheckpointSettings, record: list[Recorded]) -> Score:
    """A gang of three members that trains for four hours arrives while no zone has spot, for five minutes."""
    request = JobRequested(
        job_name="train",
        job_id=JobId("train"),
        project_id="research",
        gpu_requirements=GpuRequirements(gpu_count=4, gpu_type="T4"),
        container=ContainerRequest(image="work:1"),
        members=3,
        priority="high",
        preemptible=True,
        workload_type="training",
        run_seconds=RUN_SECONDS,
    )
    scenario = Scenario(
        name="shortage",
        description="no zone has spot at first",
        hours=1.0,
        seed=1,
        arrivals=(Arrival(at_seconds=10.0, request=request),),
        offers=offers_of(TYPES),
        shortages=tuple(Shortage(zone=zone, from_seconds=0.0, to_seconds=SHORT_SECONDS) for zone in ZONES),
        checkpoints=checkpoints,
    )
    return score_ours(scenario, ROLES, listener=record.append)


def test_a_gang_goes_back_to_spot_as_one_and_saved() -> None:
    """After half an hour three spot nodes are bought, all save, and the gang goes on there. Without reports of saves it
    stays, for much more money.
    """
    record: list[Recorded] = []
    score = played(CheckpointSettings(annotates=True), record)
    placed = [seen.fact for seen in record if isinstance(seen.fact, JobPlaced)]
    (ended,) = [seen.fact for seen in record if isinstance(seen.fact, JobPreempted)]

    assert score.broken == ()
    assert isinstance(ended.preemption, MovedToSpot)
    assert (ended.retries_used, len(placed)) == (0, 2)
    assert set(placed[0].node_names).isdisjoint(placed[1].node_names)
    assert score.evicted_count == 3
    assert score.lost_gpu_hours < 0.2
    record_without: list[Recorded] = []
    stayed = played(CheckpointSettings(annotates=False), record_without)
    assert not [seen for seen in record_without if isinstance(seen.fact, JobPreempted)], "it cannot report a save"
    assert score.cost_usd < 0.6 * stayed.cost_usd
