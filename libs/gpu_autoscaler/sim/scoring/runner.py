"""Runs a baseline in one scenario and returns its score; `ours` does the same for our real services.

All systems use the same simulated scheduler, controllers, kubelets and cloud, through the same adapters.
"""

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any

from gpu_autoscaler.core.intake.admission import UNKNOWN_SUPPLY, admit
from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY, ScalingPolicy
from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.kube.protocol import Cluster
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.ids import derive_id
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.sim.actors.checkpointing import CHECKPOINTING_WORKLOAD, CheckpointingPods
from gpu_autoscaler.sim.cluster.cloud import Cloud
from gpu_autoscaler.sim.cluster.controllers import Workloads
from gpu_autoscaler.sim.cluster.objects import Kubernetes
from gpu_autoscaler.sim.cluster.replica_sets import ReplicaSets
from gpu_autoscaler.sim.faults.injection import Faults
from gpu_autoscaler.sim.scoring.baselines.actuator import Actuator
from gpu_autoscaler.sim.scoring.baselines.observation import Baseline
from gpu_autoscaler.sim.scoring.metrics import MetricsCollector, Score
from gpu_autoscaler.sim.scoring.scenario import Scenario, ScenarioPlayer, SubmitJob
from gpu_autoscaler.sim.virtual_time import ORIGIN, VirtualLoop

NAMESPACE = "default"
HOURS_AFTER_MAX = 24.0  # from the last arrival; jobs still running then are unfinished
# The default policy with limits that never bind: limits are not compared.
POLICY = ScalingPolicy(nodes_count_max=1000, queue_count_max=100_000, pools=DEFAULT_POLICY.pools)

Manifest = Callable[[JobSpec], dict[str, Any]]  # the suspended Kubernetes Job of a job


class ScoringRun:
    """The simulation of one scenario, without a system under test."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.loop = VirtualLoop()
        self.faults = Faults(scenario.seed, kinds=())
        self.faults.clock = self.loop.time
        self.identity = Cluster(installation=derive_id("installation", scenario.name), epoch=int(ORIGIN.timestamp()))
        self.cluster = Kubernetes(self.loop.now)
        self.workloads = Workloads(self.cluster, self.loop, self._rng("workloads"))
        self.replica_sets = ReplicaSets(self.workloads)
        self.cloud = Cloud(self.workloads, self._rng("cloud"), scenario.offers)
        self.metrics = MetricsCollector(self.workloads, self.cloud, scenario.checkpoints)
        if scenario.checkpoints.annotates:
            self.checkpointing_pods = CheckpointingPods(self.workloads, self.metrics.write_seconds)
        self._player = ScenarioPlayer(scenario, self.loop, self.replica_sets, self.cloud)

    def play(self, submit_job: SubmitJob) -> None:
        """Play the scenario until its last job has ended or the time limit is reached."""

        def submit(request: JobRequested) -> None:
            self.metrics.job_requested(request)
            submit_job(request)

        self._player.begin(submit)
        min_seconds, max_seconds = self.scenario.hours * 3600.0, (self.scenario.hours + HOURS_AFTER_MAX) * 3600.0
        while self.loop.time() < min_seconds or (not self.metrics.is_over() and self.loop.time() < max_seconds):
            self.loop.call_later(60.0, self.loop.stop)
            self.loop.run_forever()

    def _rng(self, of: str) -> random.Random:
        """Return a generator of its own. These strings are part of each seed's meaning."""
        return random.Random(f"{self.scenario.seed}/{of}")


def score_baseline(scenario: Scenario, baseline: Baseline, manifest: Manifest) -> Score:
    """Return the score of the baseline."""
    run = ScoringRun(scenario)
    run_baseline(run, baseline, manifest)
    return run.metrics.score(world=scenario.name, system=baseline.name, began_at=ORIGIN, hours=scenario.hours)


def run_baseline(run: ScoringRun, baseline: Baseline, manifest: Manifest) -> None:
    """Run the baseline in the scenario. Jobs are created directly in Kubernetes, as without our system."""
    asyncio.set_event_loop(run.loop)
    actuator = Actuator(run.loop, run.faults, run.identity, run.workloads, run.replica_sets, run.cloud)

    try:
        actuator.begin(baseline)
        run.play(lambda request: create_unmanaged(run, request, manifest))
    finally:
        actuator.close()
        run.loop.end()


def create_unmanaged(run: ScoringRun, request: JobRequested, manifest: Manifest) -> None:
    """Create the job directly in Kubernetes, as without our system."""
    spec = spec_of(request, run.loop)
    run.workloads.create_job(NAMESPACE, unmanaged(manifest(spec), spec))


def spec_of(request: JobRequested, loop: VirtualLoop) -> JobSpec:
    """Return the accepted job. Raises ConfigError for an invalid job of a scenario."""
    now = loop.now()
    spec = admit(request, event_id=request.job_name, at=now, now=now, policy=POLICY, supply=UNKNOWN_SUPPLY)
    if not isinstance(spec, JobSpec):
        raise ConfigError(str(request.job_id), [f"{violation.field}: {violation.reason}" for violation in spec])
    return spec


def unmanaged(manifest: dict[str, Any], spec: JobSpec) -> dict[str, Any]:
    """Return the Job as without our system: not suspended, with the job's priority, and protected by annotations if its
    work would restart from zero (as the documents of cluster-autoscaler and Karpenter advise).
    """
    template: Mapping[str, Any] = manifest["spec"]["template"]
    metadata: dict[str, Any] = dict(template["metadata"])
    if spec.workload_type != CHECKPOINTING_WORKLOAD:
        protection = {labels.SAFE_TO_EVICT: "false", labels.KARPENTER_DO_NOT_DISRUPT: "true"}
        metadata["annotations"] = {**metadata.get("annotations", {}), **protection}
    tolerations = [each for each in template["spec"].get("tolerations", ()) if each.get("key") != labels.AVOID_TAINT]
    pod_spec = {**template["spec"], "priority": spec.priority, "tolerations": tolerations}
    template = {"metadata": metadata, "spec": pod_spec}
    return {**manifest, "spec": {**manifest["spec"], "suspend": False, "template": template}}
