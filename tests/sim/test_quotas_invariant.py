"""The monitor's rule on reclaims: what a project uses is judged without its jobs that end for others."""

import asyncio
import random

from tests.support.stories import T0, job, policy

from gpu_autoscaler.events.job import JobPlaced, JobPreempted, JobQueued
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.reasons.preempt import QuotaReclaimed
from gpu_autoscaler.sim.actors.policies import Policies
from gpu_autoscaler.sim.cluster.controllers import Workloads
from gpu_autoscaler.sim.cluster.objects import Kubernetes
from gpu_autoscaler.sim.invariants.quotas import QuotasInvariant
from gpu_autoscaler.sim.virtual_time import VirtualLoop
from gpu_autoscaler.store.protocol import JobRow


class World:
    """Projects a, b and c with 4 GPUs each: a uses 5, b 5, c 2; a, b and c want 2 more, as `a2`, `b2` and `c2`."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        loop = VirtualLoop()
        asyncio.set_event_loop(loop)
        workloads = Workloads(Kubernetes(loop.now), loop, random.Random(1))  # noqa: S311 - not for secrets
        rules = policy(quotas={"projects": [{"name": name, "nominal_gpu_count": 4} for name in "abc"]})
        jobs: dict[JobId, JobRow] = {}
        for name, gpus in (("a1", 5), ("b0", 2), ("b1", 3), ("c1", 2), ("a2", 2), ("b2", 2), ("c2", 2)):
            (queued,) = (
                told.fact for told in job(name, gpus=gpus, project_id=name[0]) if isinstance(told.fact, JobQueued)
            )
            jobs[JobId(name)] = JobRow(spec=queued.spec, request_digest="", accepted_at=T0)
        policies = Policies(rules, when_changed=lambda: None)
        self.invariant = QuotasInvariant(workloads, policies, jobs, lambda _, what: self.violations.append(what))
        for name in ("a1", "b0", "b1", "c1"):
            placed = JobPlaced(job_id=JobId(name), attempt=1, node_uids=(), node_names=("n1",), placed_at=T0)
            self.invariant.on_fact(placed)

    def reclaim(self, victim: str, beneficiary: str) -> list[str]:
        """End the victim for the beneficiary; return what the monitor reports."""
        reason = QuotaReclaimed(
            for_job=JobId(beneficiary),
            for_project=beneficiary[0],
            project=victim[0],
            cohort="default",
            borrowed_gpu_count=1,
            nominal_gpu_count=4,
        )
        fact = JobPreempted(job_id=JobId(victim), attempt=1, cause="preempted", preempted_at=T0, preemption=reason)
        self.invariant.on_fact(fact)
        return self.violations


def test_a_project_whose_own_job_ends_for_another_may_reclaim_at_once() -> None:
    """B uses 2 of its 4 once `b1` has ended, so a must return what it borrows."""
    world = World()
    assert world.reclaim("b1", "c2") == []
    assert world.reclaim("a1", "b2") == []


def test_a_project_beyond_its_nominal_quota_reclaims_nothing() -> None:
    """B uses 5 of 4; and c, which uses 2, can take nothing from itself."""
    assert "7 are needed" in World().reclaim("a1", "b2")[0]
    assert "-2 GPUs were borrowed" in World().reclaim("c1", "c2")[0]
