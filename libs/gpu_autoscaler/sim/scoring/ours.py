"""Runs our real services in one scenario and returns their score."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.events.envelope import Envelope, Recorded
from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.model.ids import FactId, derive_id
from gpu_autoscaler.sim.actors.policies import Policies
from gpu_autoscaler.sim.adapters.assembly import AdapterFactory, Roles, tick_inputs_of_roles
from gpu_autoscaler.sim.adapters.bus import SimBus
from gpu_autoscaler.sim.adapters.store import Tables
from gpu_autoscaler.sim.invariants import PLAN_CHECK
from gpu_autoscaler.sim.invariants.monitor import InvariantMonitor, InvariantViolation
from gpu_autoscaler.sim.process_pool import BUG, Process, ProcessPool
from gpu_autoscaler.sim.scoring.metrics import Score
from gpu_autoscaler.sim.scoring.runner import POLICY, Manifest, ScoringRun, create_unmanaged
from gpu_autoscaler.sim.scoring.scenario import Scenario
from gpu_autoscaler.sim.virtual_time import ORIGIN

OURS = "gpu-autoscaler"
PLAIN_PODS = "plain pods"  # our system, with jobs that users create in Kubernetes
WITHOUT_SAVE_REQUESTS = "without checkpoint requests"  # our system, with checkpoint requests ignored by the work
# Our system with one rule that saves cost switched off, as far as settings can.
_REMOVAL, _SPOT, _YEAR_SECONDS = POLICY.removal, POLICY.spot, 365 * 86_400.0
WITHOUT_LEVER: Mapping[str, ScalingPolicy] = {
    "without idle rule": replace(POLICY, removal=replace(_REMOVAL, unneeded_idle_seconds=POLICY.idle_seconds_max)),
    "without waiting for spot": replace(
        POLICY, spot=replace(_SPOT, low_priority_wait_seconds=0.0, medium_priority_wait_seconds=0.0)
    ),
    "without early return to spot": replace(POLICY, spot=replace(_SPOT, return_to_spot_seconds_min=_YEAR_SECONDS)),
    "without keep versus buy": replace(POLICY, new_node_wait_seconds_max=0.0),
    "without consolidation": replace(POLICY, is_consolidation_on=False),
    "without capacity pool share": replace(POLICY, spot=replace(_SPOT, capacity_pool_gpu_ratio_max=1.0)),
    "without batching": replace(POLICY, batching=replace(POLICY.batching, wait_seconds_max=0.0)),
}
VARIANTS = (PLAIN_PODS, WITHOUT_SAVE_REQUESTS, *WITHOUT_LEVER)


def score_without_save_requests(scenario: Scenario, roles: Roles) -> Score:
    """Return our score where the work is drained under a notice without a checkpoint request."""
    scenario_without_requests = replace(
        scenario, checkpoints=replace(scenario.checkpoints, saves_on_request=False, annotates=False)
    )
    return replace(score_ours(scenario_without_requests, roles), system=WITHOUT_SAVE_REQUESTS)


def score_without_lever(scenario: Scenario, roles: Roles, name: str) -> Score:
    """Return our score with the policy of this name in WITHOUT_LEVER."""
    return replace(score_ours(scenario, roles, WITHOUT_LEVER[name]), system=name)


def score_plain_pods(scenario: Scenario, roles: Roles, manifest: Manifest) -> Score:
    """Return our score where users create the jobs in Kubernetes, as they do with the baselines: our system scales the
    nodes and neither queues nor places the pods.
    """
    return replace(score_ours(scenario, roles, manifest=manifest), system=PLAIN_PODS)


def score_ours(
    scenario: Scenario,
    roles: Roles,
    policy: ScalingPolicy = POLICY,
    manifest: Manifest | None = None,
    listener: Callable[[Recorded], None] = lambda _: None,
) -> Score:
    """Return the score of our services, composed from `roles`. `manifest`: of jobs that do not pass through our queue;
    None: all do. `listener`: is called with each published fact.
    """
    run = ScoringRun(scenario)
    asyncio.set_event_loop(run.loop)
    policies = Policies(policy, when_changed=lambda: None)
    tables = Tables()
    monitor = InvariantMonitor(run.loop, run.workloads, run.cloud, policies, tables.jobs, calm_since=lambda *_: 0.0)
    bus = SimBus(run.loop)
    bus.listen(monitor.on_fact)
    bus.listen(listener)
    adapter_factory = AdapterFactory(run.identity, run.workloads, run.replica_sets, run.cloud, monitor, tables)

    def compose(process: Process) -> Any:  # noqa: ANN401 - a Service of any kind
        refused = "the plan check refused a plan"
        bundle = adapter_factory.bundle(process, policy, on_refused_plan=lambda: monitor.report(PLAN_CHECK, refused))
        return roles[process.role].compose(bundle)

    def submit(request: JobRequested) -> None:
        if manifest is not None:
            create_unmanaged(run, request, manifest)
            return
        fact_id = FactId(request.condition() or derive_id("user", request.job_name))
        bus.publish(Envelope(id=fact_id, source="/users", time=run.loop.now(), fact=request))

    process_pool = ProcessPool(
        run.loop, run.faults, bus, tick_inputs_of_roles(roles, lambda: policy, skips_ticks=True), compose,
        lambda role, error: monitor.report(BUG, f"{role}: {error!r}"),
    )  # fmt: skip
    try:
        process_pool.begin()
        run.play(submit)
        violations = _by_invariant(monitor.violations)
        return run.metrics.score(
            world=scenario.name, system=OURS, began_at=ORIGIN, hours=scenario.hours, broken=violations
        )
    finally:
        process_pool.close()
        run.loop.end()


def _by_invariant(violations: Sequence[InvariantViolation]) -> tuple[str, ...]:
    """Return each violated invariant with its first violation. The run continues, as its figures are needed too."""
    first: dict[str, InvariantViolation] = {}
    for violation in violations:
        first.setdefault(violation.invariant, violation)
    counts = Counter(violation.invariant for violation in violations)
    return tuple(f"{violation}; {counts[invariant]} violations" for invariant, violation in first.items())
