"""Notebooks in a simulated world: those that are idle end in namespaces that opted in, and no others do."""

import asyncio
import math
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.stories import TimedFact, policy, record

from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.kube.protocol import PODS
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import Cut, EndIdleWorkload, Plan, Upkeep, WorkloadPod
from gpu_autoscaler.model.ids import ActionId, PlanId, PodUid
from gpu_autoscaler.model.reasons.upkeep import WorkloadIdle
from gpu_autoscaler.sim.actors.notebooks import GRACE_SECONDS, IDLE_SECONDS, OPTED_IN, OTHER, Notebooks, Use
from gpu_autoscaler.sim.actors.policies import Policies
from gpu_autoscaler.sim.cluster.controllers import Workloads, controller_of
from gpu_autoscaler.sim.cluster.objects import Kubernetes
from gpu_autoscaler.sim.invariants.idle_workloads import IdleWorkloadsInvariant
from gpu_autoscaler.sim.simulation import Setting
from gpu_autoscaler.sim.virtual_time import VirtualLoop
from gpu_autoscaler_services.simulate import run_one

NOW_SECONDS = 7200.0
IDLE = Use(NOW_SECONDS - IDLE_SECONDS, math.inf)


@pytest.mark.sweep
@pytest.mark.parametrize(("seed", "kinds"), [(1, ()), (2, None), (3, None), (8, ())])
def test_idle_notebooks_end_and_no_invariant_is_violated(
    seed: int, kinds: tuple[str, ...] | None, tmp_path: Path
) -> None:
    """Also under faults, of telemetry among others, where some may stay. Namespaces opt in by label or policy (3), and
    jobs are placed by measured use (3, 8)."""
    path = tmp_path / "facts.jsonl"
    setting = Setting(seed=seed, hours=1.0, jobs_per_hour=1.0, kinds=kinds, has_notebooks=True, record_path=str(path))
    assert run_one(setting).violations == ()
    assert kinds is None or '"end_idle_workload"' in path.read_text(encoding="utf-8")


class World:
    """Two hours after its start a world with a notebook of one member, and the monitor's rule."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        loop = VirtualLoop()
        asyncio.set_event_loop(loop)
        self.cluster = Kubernetes(loop.now)
        self.workloads = Workloads(self.cluster, loop, random.Random(1))  # noqa: S311 - start times, not secrets
        self.notebooks = Notebooks(loop, self.workloads, random.Random(3))  # noqa: S311 - as above
        policies = Policies(policy(), when_changed=lambda: None)
        self.invariant = IdleWorkloadsInvariant(
            self.cluster, self.notebooks, policies, lambda _, what: self.violations.append(what)
        )
        self.notebooks.begin()
        loop.call_later(NOW_SECONDS, loop.stop)
        loop.run_forever()

    def end(self, use: Use = IDLE, announced_seconds: float = GRACE_SECONDS, namespace: str = OPTED_IN) -> list[str]:
        """Decide to end a notebook that was announced so long ago; return what the monitor reports."""
        now = self.cluster.now()
        pod = next(pod for pod in self.cluster.all(PODS) if pod.metadata.namespace == namespace)
        announced_at = (now - timedelta(seconds=announced_seconds)).isoformat()
        annotations = {**pod.metadata.annotations, labels.IDLE_ANNOUNCED_AT: announced_at}
        self.cluster.put(PODS, replace(pod, metadata=replace(pod.metadata, annotations=annotations)))
        owner_uid = controller_of(pod) or ""
        self.notebooks.uses[owner_uid] = use
        decision = EndIdleWorkload(
            action_id=ActionId("a"), retry_at=now, namespace=namespace, owner_kind="Job", owner_uid=owner_uid,
            pods=(WorkloadPod(name=pod.metadata.name, pod_uid=PodUid(pod.metadata.uid)),),
            reason=WorkloadIdle(idle_seconds=IDLE_SECONDS, idle_seconds_max=IDLE_SECONDS, busy_ratio_max=0.05),
        )  # fmt: skip
        plan = Plan(as_of=now, parent_sequence=0, upkeep=Upkeep(decisions=(decision,)))
        made = ScalingPlanMade(plan_id=PlanId("p"), plan=plan, cut=Cut(), policy_digest="", core_digest="")
        (recorded,) = record([TimedFact(made, now)])
        self.invariant.on_fact(recorded)
        self.workloads.delete_job(self.workloads.works[owner_uid].job)
        return self.violations


def test_a_notebook_that_is_idle_and_announced_may_end() -> None:
    """It was idle for the whole time; or it is used again, which telemetry does not show yet."""
    assert World().end() == []
    assert World().end(Use(IDLE.idle_from, NOW_SECONDS - 200.0)) == []


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"use": Use(NOW_SECONDS - 500.0, math.inf)}, "it uses its GPUs"),
        ({"use": Use(0.0, NOW_SECONDS - 400.0)}, "it uses its GPUs"),
        ({"announced_seconds": GRACE_SECONDS - 1.0}, "announced at"),
        ({"namespace": OTHER}, "did not opt in"),
    ],
)
def test_no_other_end_is_justified(arguments: dict[str, Any], what: str) -> None:
    """Whatever a process believes."""
    (violation,) = World().end(**arguments)
    assert what in violation


def test_no_notebook_ends_without_a_decision() -> None:
    """But its user may end it."""
    world = World()
    pod = next(pod for pod in world.cluster.all(PODS) if pod.metadata.namespace == OPTED_IN)
    world.workloads.delete_job(world.workloads.works[controller_of(pod) or ""].job)
    assert "no plan has decided its end" in world.violations[0]
    world.notebooks.stop()
    assert len(world.violations) == 1
