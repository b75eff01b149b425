"""Small scenarios whose score is known by hand."""

from collections.abc import Callable, Iterable
from datetime import timedelta

from msgspec.structs import replace

from gpu_autoscaler.core.disruption.protection import request_annotations
from gpu_autoscaler.core.state.state import EMPTY_STATE
from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.kube.protocol import PODS
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.sim.cluster.cloud import Machine
from gpu_autoscaler.sim.cluster.objects import Kubernetes
from gpu_autoscaler.sim.scoring.baselines.observation import Action, Baseline, Observation
from gpu_autoscaler.sim.scoring.metrics import Score
from gpu_autoscaler.sim.scoring.runner import ScoringRun, run_baseline
from gpu_autoscaler.sim.scoring.scenario import Arrival, Reclaim, Scenario
from gpu_autoscaler.sim.virtual_time import ORIGIN
from gpu_autoscaler.simcluster.offers import INSTANCE_CATALOG, offers_of
from gpu_autoscaler_services.scheduler.manifest import job_manifest

HOUR = 3600.0
TYPES = tuple(entry for entry in INSTANCE_CATALOG if entry.name in ("g4dn.xlarge", "g4dn.12xlarge", "g5.xlarge"))
OFFERS = offers_of(TYPES)


def offer(key: str) -> Offer:
    """Return the offer of this key, as in `g4dn.xlarge/sim-a/spot`."""
    return next(candidate for candidate in OFFERS if candidate.key == key)


def job(
    name: str, at: float, run: float, *, gpus: int = 1, priority: str = "medium", work: str = "batch", members: int = 1,
    spot: bool = True,
) -> Arrival:  # fmt: skip
    """Return a job requested at this second, with this duration."""
    request = JobRequested(
        job_name=name,
        job_id=JobId(name),
        project_id="tests",
        gpu_requirements=GpuRequirements(gpu_count=gpus),
        container=ContainerRequest(image="work:1"),
        priority=priority,
        preemptible=spot,
        members=members,
        workload_type=work,
        max_duration_hours=48.0,
        run_seconds=run,
    )
    return Arrival(at_seconds=at, request=request)


def scenario(*arrivals: Arrival, hours: float, reclaims: tuple[Reclaim, ...] = ()) -> Scenario:
    """Return a scenario with these jobs."""
    return Scenario(
        name="small", description="a test", hours=hours, arrivals=arrivals, offers=OFFERS, reclaims=reclaims
    )


class Scripted:
    """A baseline that follows a script of actions by time."""

    name = "scripted"
    scan_seconds = 1.0

    def __init__(self, *acts: tuple[float, Action]) -> None:
        self._acts = list(acts)

    def step(self, observation: Observation) -> Iterable[Action]:
        """Return the actions that are due."""
        due = [action for at, action in self._acts if at <= observation.now_seconds]
        self._acts = [(at, action) for at, action in self._acts if at > observation.now_seconds]
        return due


def played(of: Scenario, baseline: Baseline, asked_at: Iterable[float] = ()) -> tuple[Score, list[Machine]]:
    """Return the score of the baseline and the machines that it bought. At `asked_at` all pods are asked to save."""
    run = ScoringRun(of)
    for seconds in asked_at:
        run.loop.call_later(seconds, _ask_all, run.cluster)
    run_baseline(run, baseline, lambda spec: job_manifest(spec, EMPTY_STATE))
    return run.metrics.score(world=of.name, system=baseline.name, began_at=ORIGIN, hours=of.hours), run.cloud.machines


def _ask_all(cluster: Kubernetes) -> None:
    now = cluster.now()
    for pod in cluster.all(PODS):
        annotations = {**pod.metadata.annotations, **request_annotations(now, now + timedelta(seconds=600.0))}
        cluster.put(PODS, replace(pod, metadata=replace(pod.metadata, annotations=annotations)))


def second_of(
    machine: Machine, event: Callable[[Machine], object] = lambda started: started.launched_at
) -> float | None:
    """Return when something happened to the machine, in seconds of the scenario; None: never."""
    at = event(machine)
    return None if at is None else (at - ORIGIN).total_seconds()  # type: ignore[operator]  # an instant
