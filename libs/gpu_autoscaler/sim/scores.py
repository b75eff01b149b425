"""Runs one system in one scene and says what came of it: ours with its real services, or a baseline.

Both stand before the same world: the same scheduler, controllers and kubelets, the same cloud with its boots, prices,
refusals and notices, reached through the same doors (`kube.py`, `capacity.py`).
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from gpu_autoscaler.core.admission import admit
from gpu_autoscaler.core.policy import DEFAULT_POLICY, ScalingPolicy
from gpu_autoscaler.events.envelope import Envelope
from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.kube.protocol import Cluster
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.ids import FactId, derive_id
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.sim.baselines.hands import Hands
from gpu_autoscaler.sim.baselines.protocol import Baseline
from gpu_autoscaler.sim.cloud import Cloud
from gpu_autoscaler.sim.crew import Crew
from gpu_autoscaler.sim.faults import Faults
from gpu_autoscaler.sim.groups import Groups
from gpu_autoscaler.sim.kubernetes import Kubernetes
from gpu_autoscaler.sim.outside import Outside, glances_of
from gpu_autoscaler.sim.policies import Policies
from gpu_autoscaler.sim.process import BUG, Process
from gpu_autoscaler.sim.record import Record
from gpu_autoscaler.sim.saving import SAVING_WORK, Savers
from gpu_autoscaler.sim.scene import Door, Scene, Staging
from gpu_autoscaler.sim.seat import Roles
from gpu_autoscaler.sim.store import Tables
from gpu_autoscaler.sim.tally import Score, Tally
from gpu_autoscaler.sim.timeline import ORIGIN, VirtualLoop
from gpu_autoscaler.sim.witness import Broken, Witness
from gpu_autoscaler.sim.workloads import Workloads

OURS = "gpu-autoscaler"
UNTOLD = "not asked to save"  # ours, with work that hears no request
NAMESPACE = "default"
HOURS_AFTER_MAX = 24.0  # from the last arrival; what has not ended then is told as unfinished
# The default policy, with room for every world: limits are not what is compared.
POLICY = ScalingPolicy(nodes_count_max=1000, queue_count_max=100_000, pools=DEFAULT_POLICY.pools)

Manifest = Callable[[JobSpec], dict[str, Any]]  # the Kubernetes Job of a job, suspended


class Stand:
    """The world of one scene, before anybody acts in it."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.loop = VirtualLoop()
        self.faults = Faults(scene.seed, kinds=())
        self.faults.clock = self.loop.time
        self.identity = Cluster(installation=derive_id("installation", scene.name), epoch=int(ORIGIN.timestamp()))
        self.cluster = Kubernetes(self.loop.now)
        self.workloads = Workloads(self.cluster, self.loop, self._chance("workloads"))
        self.groups = Groups(self.workloads)
        self.cloud = Cloud(self.workloads, self._chance("cloud"), scene.offers)
        self.tally = Tally(self.workloads, self.cloud, scene.saving)
        if scene.saving.answers:
            self.savers = Savers(self.workloads, self.tally.write_seconds)
        self._staging = Staging(scene, self.loop, self.groups, self.cloud)

    def play(self, door: Door, is_over: Callable[[], bool] = bool) -> None:
        """Let the scene happen until its last job has ended, `is_over` says so, or there has been time enough."""

        def ask(request: JobRequested) -> None:
            self.tally.asked(request)
            door(request)

        self._staging.begin(ask)
        least, most = self.scene.hours * 3600.0, (self.scene.hours + HOURS_AFTER_MAX) * 3600.0
        while self.loop.time() < least or (not self.tally.is_over() and self.loop.time() < most):
            self.loop.call_later(60.0, self.loop.stop)
            self.loop.run_forever()
            if is_over():
                return

    def close(self) -> None:
        """Give back what the loop holds."""
        self.loop.set_exception_handler(lambda *_: None)
        self.loop.call_later(0.0, self.loop.stop)
        self.loop.run_forever()
        self.loop.close()
        asyncio.set_event_loop(None)

    def _chance(self, of: str) -> random.Random:
        return random.Random(f"{self.scene.seed}/{of}")


def score_untold(scene: Scene, roles: Roles) -> Score:
    """Return what our services make of the scene where the work is drained under a notice and not asked to save."""
    untold = replace(scene, saving=replace(scene.saving, is_told=False, answers=False))
    return replace(score_ours(untold, roles), system=UNTOLD)


def score_ours(scene: Scene, roles: Roles, policy: ScalingPolicy = POLICY) -> Score:
    """Return what our services, put together from `roles`, make of the scene."""
    stand = Stand(scene)
    asyncio.set_event_loop(stand.loop)
    policies = Policies(policy, when_changed=lambda: None)
    tables = Tables()
    witness = Witness(stand.loop, stand.workloads, stand.cloud, policies, tables.jobs, calm_since=lambda *_: 0.0)
    record = Record(stand.loop)
    record.listen(witness.heard)
    outside = Outside(stand.identity, stand.workloads, stand.groups, stand.cloud, witness, tables)

    def compose(process: Process) -> Any:  # noqa: ANN401 - a Service of any kind
        refused = "a plan was refused by `core/check.py`"
        seat = outside.seat(process, policy, on_refused_plan=lambda: witness.breaks("the second opinion", refused))
        return roles[process.role].compose(seat)

    def ask(request: JobRequested) -> None:
        fact_id = FactId(request.condition() or derive_id("user", request.job_name))
        record.publish(Envelope(id=fact_id, source="/users", time=stand.loop.now(), fact=request))

    crew = Crew(
        stand.loop, stand.faults, record, glances_of(roles, lambda: policy, skips_ticks=True), compose,
        lambda role, error: witness.breaks(BUG, f"{role}: {error!r}"),
    )  # fmt: skip
    try:
        crew.begin()
        stand.play(ask)
        broken = _by_promise(witness.broken)
        return stand.tally.score(world=scene.name, system=OURS, began_at=ORIGIN, hours=scene.hours, broken=broken)
    finally:
        crew.close()
        stand.close()


def _by_promise(broken: Sequence[Broken]) -> tuple[str, ...]:
    """Return each promise that broke, with the first time that it did. The run goes on: its figures are wanted too."""
    first: dict[str, Broken] = {}
    for each in broken:
        first.setdefault(each.promise, each)
    counts = Counter(each.promise for each in broken)
    return tuple(f"{each}; {counts[promise]} times in all" for promise, each in first.items())


def score_baseline(scene: Scene, baseline: Baseline, manifest: Manifest) -> Score:
    """Return what the baseline makes of the scene."""
    stand = Stand(scene)
    act(stand, baseline, manifest)
    return stand.tally.score(world=scene.name, system=baseline.name, began_at=ORIGIN, hours=scene.hours)


def act(stand: Stand, baseline: Baseline, manifest: Manifest) -> None:
    """Let the baseline act in the scene. Jobs go straight to Kubernetes, as people without us put them there."""
    asyncio.set_event_loop(stand.loop)
    hands = Hands(stand.loop, stand.faults, stand.identity, stand.workloads, stand.groups, stand.cloud)

    def ask(request: JobRequested) -> None:
        spec = spec_of(request, stand.loop)
        stand.workloads.create_job(NAMESPACE, plain(manifest(spec), spec))

    try:
        hands.begin(baseline)
        stand.play(ask, hands.has_stumbled)
    finally:
        hands.close()
        stand.close()


def spec_of(request: JobRequested, loop: VirtualLoop) -> JobSpec:
    """Return the accepted job. Raises ConfigError where a scene asks for what nobody could accept."""
    now = loop.now()
    spec = admit(
        request, event_id=request.job_name, at=now, now=now, policy=POLICY, gpu_models=frozenset(),
        gpus_per_node_max=None,
    )  # fmt: skip
    if not isinstance(spec, JobSpec):
        raise ConfigError(str(request.job_id), [f"{mistake.field}: {mistake.reason}" for mistake in spec])
    return spec


def plain(manifest: dict[str, Any], spec: JobSpec) -> dict[str, Any]:
    """Return the Job as people run it without us: it starts at once, its pods have the job's priority, and work that
    would start over says so to who asks (as the documents of cluster-autoscaler and Karpenter advise)."""
    told: Mapping[str, Any] = manifest["spec"]["template"]
    metadata: dict[str, Any] = dict(told["metadata"])
    if spec.workload_type != SAVING_WORK:
        keep = {labels.SAFE_TO_EVICT: "false", labels.KARPENTER_DO_NOT_DISRUPT: "true"}
        metadata["annotations"] = {**metadata.get("annotations", {}), **keep}
    template = {"metadata": metadata, "spec": {**told["spec"], "priority": spec.priority}}
    return {**manifest, "spec": {**manifest["spec"], "suspend": False, "template": template}}
