"""The monitor's rules on quotas: what a reclaim may take, and which refusals of pods are mistakes."""

import asyncio
import random
from datetime import timedelta

import pytest
from msgspec.structs import replace
from tests.support.stories import T0, given, job, on_sale, policy

from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.events.job import JobPlaced, JobPreempted, JobQueued
from gpu_autoscaler.kube.protocol import JOBS, PODS, QUOTAS
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.reasons.preempt import QuotaReclaimed
from gpu_autoscaler.sim.actors.policies import Policies
from gpu_autoscaler.sim.cluster.controllers import Workloads
from gpu_autoscaler.sim.cluster.objects import Kubernetes
from gpu_autoscaler.sim.invariants.quotas import QuotasInvariant, ResourceQuotasInvariant
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


def test_what_is_published_again_after_a_loss_of_the_streams_is_no_news() -> None:
    """A placement and its preemption were judged when they happened."""
    world = World()
    assert world.reclaim("a1", "c2") == []
    for name, attempt in (("c2", 1), ("a1", 1)):
        placed = JobPlaced(job_id=JobId(name), attempt=attempt, node_uids=(), node_names=("n1",), placed_at=T0)
        world.invariant.on_fact(placed)
    assert world.reclaim("a1", "c2") == []


def test_a_project_whose_own_job_ends_for_another_may_reclaim_at_once() -> None:
    """B uses 2 of its 4 once `b1` has ended, so a must return what it borrows."""
    world = World()
    assert world.reclaim("b1", "c2") == []
    assert world.reclaim("a1", "b2") == []


def test_a_project_beyond_its_nominal_quota_reclaims_nothing() -> None:
    """B uses 5 of 4; and c, which uses 2, can take nothing from itself."""
    assert "7 are needed" in World().reclaim("a1", "b2")[0]
    assert "-2 GPUs were borrowed" in World().reclaim("c1", "c2")[0]


@pytest.mark.parametrize(("deleted_seconds_ago", "is_reported"), [(None, True), (5, False), (300, True)])
def test_a_pod_that_replaces_a_deleted_one_may_be_refused(
    deleted_seconds_ago: int | None, *, is_reported: bool
) -> None:
    """The quota still counts the deleted pod; a Job that was just released is no such case."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    cluster, violations = Kubernetes(loop.now), list[str]()
    invariant = ResourceQuotasInvariant(cluster, {}, lambda _, what: violations.append(what))

    def member(name: str) -> core.Pod:
        return core.Pod(metadata=replace(cluster.metadata("research", name), labels={labels.JOB_ID: "train"}))

    if deleted_seconds_ago is not None:
        before = cluster.put(PODS, member("train-1"))
        deleted_at = loop.now() - timedelta(seconds=deleted_seconds_ago)
        cluster.put(PODS, replace(before, metadata=replace(before.metadata, deletion_timestamp=deleted_at)))
    full = core.QuotaStatus(used={"pods": "1"})
    quota = core.ResourceQuota(
        metadata=cluster.metadata("research", "q"), spec=core.QuotaSpec(hard={"pods": "1"}), status=full
    )
    invariant.on_refused(member("train-2"), quota)
    assert bool(violations) == is_reported


@pytest.mark.parametrize(("completed_count", "is_reported"), [(0, True), (1, False), (2, False)])
def test_completed_members_need_no_quota(completed_count: int, *, is_reported: bool) -> None:
    """Four of eight GPUs are used. A gang of two members with four GPUs each is bought for."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    cluster, violations = Kubernetes(loop.now), list[str]()
    cluster.serve(QUOTAS)
    (queued,) = (
        told.fact
        for told in job("train", members=3, member_count_min=2, gpus=4, namespace="research")
        if isinstance(told.fact, JobQueued)
    )
    jobs = {JobId("train"): JobRow(spec=queued.spec, request_digest="", accepted_at=T0)}
    invariant = ResourceQuotasInvariant(cluster, jobs, lambda _, what: violations.append(what))
    status = core.JobStatus(succeeded=completed_count)
    cluster.put(JOBS, core.Job(metadata=cluster.metadata("research", "train"), status=status))
    container = core.Container(resources=core.ResourceList(requests={"nvidia.com/gpu": "4"}))
    spec = core.PodSpec(containers=(container,))
    cluster.put(PODS, core.Pod(metadata=cluster.metadata("research", "other"), spec=spec))
    hard = core.QuotaSpec(hard={"requests.nvidia.com/gpu": "8"})
    cluster.put(QUOTAS, core.ResourceQuota(metadata=cluster.metadata("research", "q"), spec=hard))

    state = given(job("train", gpus=4), on_sale(), as_of=T0)
    invariant.on_plan(plan(state, policy(), T0), is_calm=True)
    assert bool(violations) == is_reported
