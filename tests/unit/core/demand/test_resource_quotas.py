"""ResourceQuotas: jobs whose pods a quota would refuse wait with it as their reason, and nothing is bought for them."""

from datetime import timedelta
from typing import Any

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import (
    EPOCH,
    T0,
    Story,
    TimedFact,
    given,
    job,
    node,
    offer,
    on_sale,
    pod,
    policy,
    quota,
    record,
)

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.demand.resource_quotas import quota_violation
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.queue_settings import QueuePolicy
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.job import JobPreempted
from gpu_autoscaler.events.pod import PodQuotaGone, PodQuotaListed, PodWatched
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import Runtime
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.defer import DeferReason, ResourceQuotaExceeded
from gpu_autoscaler.model.reasons.defer_waits import QueueHeadWaits
from gpu_autoscaler.model.reasons.preempt import PriorityPreempted
from gpu_autoscaler.model.scheduling import LabelRequirement

GPUS = "requests.nvidia.com/gpu"
SOLD = on_sale(offer())


def research(job_id: str, **changes: Any) -> Story:  # noqa: ANN401 - fields of a job
    """A queued job of the namespace `research`, with one member of eight GPUs by default."""
    return job(job_id, **{"namespace": "research", **changes})


def bought_for(state: ClusterState) -> set[str]:
    """What nodes are bought for, by a plan that the plan check accepts."""
    made = accepted_plan(state, policy(), T0)
    return {key for one in made.purchases for key in getattr(one.reason, "demand", ())}


def waits(state: ClusterState, subject: str) -> DeferReason:
    """Why the plan defers this."""
    (reason,) = [entry.reason for entry in plan(state, policy(), T0).deferred if entry.subject == subject]
    return reason


def refused(quota_name: str, *, used: int, needed: int, hard: int, resource: str = GPUS) -> ResourceQuotaExceeded:
    """The reason with whole amounts."""
    return ResourceQuotaExceeded(
        quota=f"research/{quota_name}",
        resource=resource,
        used_milli=1000 * used,
        needed_milli=1000 * needed,
        hard_milli=1000 * hard,
    )


def test_nothing_is_bought_for_a_pod_that_its_quota_refuses() -> None:
    """Eight of twelve GPUs are used, and the job needs eight more; without the quota it gets a node."""
    story = (SOLD, research("train"))
    assert bought_for(given(*story)) == {"job/train"}

    state = given(*story, quota("gpus", {GPUS: 12}, {GPUS: 8}))

    assert bought_for(state) == set()
    assert waits(state, "job/train") == refused("gpus", used=8, needed=8, hard=12)
    reason = waits(state, "job/train")
    assert reason.sentence() == (
        "ResourceQuota research/gpus would refuse the pods: they need 8 more requests.nvidia.com/gpu, "
        "and 8 of 12 are used."
    )
    assert "kubectl describe quota gpus --namespace=research" in str(reason.remedy())


def test_a_job_is_not_released_into_a_full_quota() -> None:
    """The node is free; the schedule names the quota."""
    story = (node("n1"), research("train"))
    assert schedule(given(*story), policy(), T0).placements

    outcome = schedule(given(*story, quota("gpus", {GPUS: 4})), policy(), T0)

    assert outcome.placements == ()
    assert [(entry.subject, entry.reason) for entry in outcome.deferred] == [
        ("job/train", refused("gpus", used=0, needed=8, hard=4))
    ]


def test_the_pod_of_a_lost_node_comes_before_other_jobs() -> None:
    """The Job of an attempt that lost its node is not suspended: its controller creates the pod again at once, and the
    quota has room for one job."""
    lost = TimedFact(JobPreempted(job_id=JobId("lost"), attempt=1, cause="gone", preempted_at=T0), T0)
    story = (node("n1"), node("n2"), research("lost", priority=100, placed_on=("gone",), is_running=True), (lost,))
    state = given(*story, research("first", priority=900), quota("gpus", {GPUS: 8}))

    made = schedule(state, policy(), T0)

    assert [str(placement.job_id) for placement in made.placements] == ["lost"]
    assert [(entry.subject, entry.reason) for entry in made.deferred] == [
        ("job/first", refused("gpus", used=8, needed=8, hard=8))
    ]
    full = schedule(given(*story, quota("gpus", {GPUS: 4})), policy(), T0)
    assert [entry.reason for entry in full.deferred] == [refused("gpus", used=0, needed=8, hard=4)]


def test_a_job_that_ended_for_another_one_waits_its_turn() -> None:
    """Its Job is suspended, so it uses no quota until it starts again."""
    reason = PriorityPreempted(for_job=JobId("first"), for_priority=900, priority=100, barred_by="gpus_limit")
    ended = JobPreempted(
        job_id=JobId("victim"), attempt=1, cause="priority", preempted_at=T0, preemption=reason, is_own_choice=True
    )
    victim = research("victim", priority=100, placed_on=("n1",), is_running=True)
    jobs = (victim, (TimedFact(ended, T0),), research("first", priority=900))

    made = schedule(given(node("n1"), *jobs, quota("gpus", {GPUS: 8})), policy(), T0)

    assert [str(placement.job_id) for placement in made.placements] == ["first"]


def test_a_quota_concerns_its_namespace_only() -> None:
    """The other project buys."""
    state = given(SOLD, research("train"), research("other", namespace="vision"), quota("gpus", {GPUS: 0}))
    assert bought_for(state) == {"job/other"}


def test_jobs_share_a_quota_in_the_order_in_which_they_are_served() -> None:
    """Two of three fit; the one of lowest priority waits for what the others take."""
    jobs = [research(name, priority=priority) for name, priority in (("a", 100), ("b", 900), ("c", 500))]
    state = given(SOLD, *jobs, quota("gpus", {GPUS: 16}))
    assert bought_for(state) == {"job/b", "job/c"}
    assert waits(state, "job/a") == refused("gpus", used=16, needed=8, hard=16)


def test_a_smaller_job_passes_one_that_does_not_fit() -> None:
    """What a waiting job cannot use is no reason for others to wait."""
    state = given(SOLD, research("big", members=3, priority=900), research("small"), quota("gpus", {GPUS: 16}))
    assert bought_for(state) == {"job/small"}


def test_a_gang_needs_its_whole_quota() -> None:
    """Room for one of two members buys none."""
    state = given(SOLD, research("gang", members=2), quota("gpus", {GPUS: 8}))
    assert bought_for(state) == set()
    assert waits(state, "job/gang") == refused("gpus", used=0, needed=16, hard=8)


def test_an_elastic_job_grows_as_far_as_its_quota() -> None:
    """Two of four members, and one more within the quota."""
    state = given(SOLD, research("elastic", members=4, member_count_min=2), quota("gpus", {GPUS: 24}))
    assert bought_for(state) == {"job/elastic", "member/elastic/3"}
    assert waits(state, "member/elastic/4") == refused("gpus", used=24, needed=8, hard=24)


def test_an_elastic_job_without_its_gang_has_no_further_members() -> None:
    """The quota has room for one member, which is useless without the other one of the gang."""
    state = given(SOLD, research("elastic", members=4, member_count_min=2), quota("gpus", {GPUS: 8}))
    assert bought_for(state) == set()


def test_a_placed_job_keeps_its_quota_until_its_pods_exist() -> None:
    """Released a moment ago: its eight GPUs are not in the quota's own figure."""
    state = given(SOLD, node("n1"), research("first", placed_on=("n1",)), research("second"), quota("gpus", {GPUS: 8}))
    assert bought_for(state) == set()
    assert waits(state, "job/second") == refused("gpus", used=8, needed=8, hard=8)


def test_a_running_job_keeps_its_quota_before_its_pods_are_seen() -> None:
    """The fact that it runs arrived before those of its pods, which have another stream."""
    first = research("first", placed_on=("n1",), is_running=True)
    state = given(SOLD, node("n1"), first, research("second"), quota("gpus", {GPUS: 8}))
    assert waits(state, "job/second") == refused("gpus", used=8, needed=8, hard=8)
    larger = given(SOLD, node("n1"), first, research("second"), quota("gpus", {GPUS: 16}))
    assert not any(isinstance(held.reason, ResourceQuotaExceeded) for held in plan(larger, policy(), T0).deferred)


@pytest.mark.parametrize("reported", [{}, {GPUS: 0}])
def test_pods_count_before_the_quota_reports_them(reported: dict[str, int]) -> None:
    """The status of a quota follows its pods, and is missing at first."""
    running = pod("other", on="n1", gpus=8, namespace="research")
    state = given(SOLD, node("n1"), running, research("train"), quota("gpus", {GPUS: 8}, reported))
    assert waits(state, "job/train") == refused("gpus", used=8, needed=8, hard=8)


def test_pods_that_ended_do_not_count() -> None:
    """As in Kubernetes."""
    ended = pod("other", on="n1", gpus=8, namespace="research", phase="succeeded")
    assert bought_for(given(SOLD, ended, research("train"), quota("gpus", {GPUS: 8}))) == {"job/train"}


@pytest.mark.parametrize(
    ("hard", "used", "needed"),
    [
        ({"pods": 1}, 0, 2),
        ({"count/pods": 1}, 0, 2),
        ({"requests.cpu": 1}, 0, 2),
        ({"limits.cpu": 1}, 0, 2),
        ({"memory": 6 * 2**30}, 0, 8 * 2**30),
    ],
)
def test_every_amount_of_pods_counts(hard: dict[str, int], used: int, needed: int) -> None:
    """Two members of one CPU and 4 GiB."""
    ((key, most),) = hard.items()
    state = given(SOLD, research("gang", members=2), quota("all", hard))
    assert waits(state, "job/gang") == refused("all", resource=key, used=used, needed=needed, hard=most)


def test_amounts_that_the_job_does_not_need_do_not_matter() -> None:
    """A quota of slices that is full."""
    state = given(SOLD, research("train"), quota("slices", {"requests.nvidia.com/mig-1g.5gb": 0, "services": 0}))
    assert bought_for(state) == {"job/train"}


def of_class(operator: str, *values: str) -> LabelRequirement:
    """A scope."""
    return msgspec.convert({"key": "PriorityClass", "operator": operator, "values": values}, LabelRequirement)


@pytest.mark.parametrize(
    ("scope", "applies"),
    [
        (of_class("In", "high"), True),
        (of_class("In", "low"), False),
        (of_class("NotIn", "low"), True),
        (of_class("NotIn", "high"), False),
        (of_class("Exists"), True),
        (of_class("DoesNotExist"), False),
        (LabelRequirement("NotBestEffort", "Exists"), True),
        (LabelRequirement("BestEffort", "Exists"), False),
        (LabelRequirement("NotTerminating", "Exists"), True),
        (LabelRequirement("Terminating", "Exists"), False),
        (LabelRequirement("CrossNamespacePodAffinity", "Exists"), False),
    ],
)
def test_a_quota_with_a_scope_concerns_the_jobs_in_it(scope: LabelRequirement, applies: bool) -> None:  # noqa: FBT001
    """By PriorityClass, and by what the pods have."""
    state = given(SOLD, research("train", priority_class="high"), quota("gpus", {GPUS: 0}, scopes=(scope,)))
    assert bought_for(state) == (set() if applies else {"job/train"})


def test_without_a_class_of_ours_no_quota_of_a_class_applies() -> None:
    """The cluster may have a default PriorityClass: unknown."""
    state = given(SOLD, research("train"), quota("gpus", {GPUS: 0}, scopes=(of_class("NotIn", "low"),)))
    assert bought_for(state) == {"job/train"}


def test_pods_of_a_volcano_job_have_a_time_limit() -> None:
    """So they are in the scope Terminating."""
    scope = LabelRequirement("Terminating", "Exists")
    state = given(SOLD, research("train", runtime=Runtime.VOLCANO), quota("gpus", {GPUS: 0}, scopes=(scope,)))
    assert bought_for(state) == set()


def test_a_gang_larger_than_its_quota_is_refused() -> None:
    """The violation names quota, amounts and project; one that only has to wait is accepted."""
    state = given(research("gang", members=2), quota("gpus", {GPUS: 12}, {GPUS: 12}))
    queued = state.jobs[JobId("gang")].queued
    assert queued is not None
    violation = quota_violation(queued.spec, state, policy())
    assert violation is not None
    assert violation.reason == (
        "need 16 requests.nvidia.com/gpu together, but ResourceQuota research/gpus of project research allows 12; "
        "request less, or have the quota raised"
    )
    assert quota_violation(msgspec.structs.replace(queued.spec, member_count=1), state, policy()) is None


def listed(*uids: str, version: int = 200) -> Story:
    """A list of quotas."""
    return (TimedFact(PodQuotaListed(epoch=EPOCH, version=version, quota_uids=uids, listed_at=T0), T0),)


def test_a_deleted_quota_is_forgotten() -> None:
    """By its end, and by a list without it."""
    full = quota("gpus", {GPUS: 0})
    gone = PodQuotaGone(epoch=EPOCH, version=300, quota_uid="uid-gpus", namespace="research", name="gpus")
    assert bought_for(given(SOLD, research("train"), full, listed("uid-gpus"))) == set()
    assert bought_for(given(SOLD, research("train"), full, (TimedFact(gone, T0),))) == {"job/train"}
    assert bought_for(given(SOLD, research("train"), full, listed())) == {"job/train"}


def test_quotas_that_are_no_longer_watched_are_forgotten() -> None:
    """Hours after the last list, measured in the same stream: an unknown quota is no quota."""
    state = given(quota("gpus", {GPUS: 0}), listed("uid-gpus"))
    for hours, known in ((6, {"uid-gpus"}), (8, set())):
        at = T0 + timedelta(hours=hours)
        watched = TimedFact(PodWatched(epoch=EPOCH, version=300 + hours, watched_at=at), at)
        state = fold(state, record([watched]))
        assert set(state.quotas) == known


def test_the_plan_check_refuses_what_a_quota_forbids() -> None:
    """A plan that was made without the quota, checked with it."""
    story = (SOLD, research("train"))
    made = accepted_plan(given(*story), policy(), T0)
    violations = check(made, given(*story, quota("gpus", {GPUS: 12}, {GPUS: 8})), policy())
    assert len(violations) == 1
    assert violations[0] == (
        "nodes are bought for pods that need 8 requests.nvidia.com/gpu, but 8 of 12 of ResourceQuota research/gpus "
        "are used"
    )
    assert violations[0].demand == ("job/train",)


# ---- with queues and quotas of the policy

STRICT = QueuePolicy(name="all", scheduling_policy="fcfs-strict")


def test_the_first_job_of_a_strict_queue_gets_the_quota_before_more_urgent_ones() -> None:
    """Otherwise the urgent one keeps the quota that the first lacks, waits for it, and neither ever starts."""
    first = research("first", priority=100, at=T0 - timedelta(hours=2))
    urgent = research("urgent", gpus=4, priority=1000, at=T0 - timedelta(hours=1))
    state = given(node("n1"), first, urgent, quota("gpus", {GPUS: 8}))

    made = schedule(state, policy(queues=(STRICT,)), T0)

    assert [placement.job_id for placement in made.placements] == ["first"]
    assert [type(held.reason) for held in made.deferred] == [ResourceQuotaExceeded]


def test_behind_a_job_without_quota_nobody_of_its_strict_queue_gets_any() -> None:
    """What is granted behind it would be used by nobody: a job of another queue in the same namespace starts."""
    state = given(
        node("n1"),
        research("big", members=2, project_id="a", priority=1000, at=T0 - timedelta(hours=1)),
        research("next", gpus=12, project_id="a", priority=1000),
        research("other", gpus=4, project_id="b", priority=100),
        quota("gpus", {GPUS: 12}),
    )
    queues = (QueuePolicy(name="a", projects=("a",), scheduling_policy="fcfs-strict"), QueuePolicy(name="rest"))

    made = schedule(state, policy(queues=queues), T0)

    assert [placement.job_id for placement in made.placements] == ["other"]
    assert {held.subject: type(held.reason) for held in made.deferred} == {
        "job/big": ResourceQuotaExceeded, "job/next": QueueHeadWaits
    }  # fmt: skip


def test_nothing_is_bought_for_a_job_behind_the_head_of_a_strict_queue() -> None:
    """Two jobs are alike; between them the quota refuses one, which the second may not pass."""
    sizes = (("first", 4), ("large", 8), ("like-first", 4))
    jobs = [research(name, gpus=gpus, at=T0 - timedelta(hours=3 - number)) for number, (name, gpus) in enumerate(sizes)]
    state, rules = given(SOLD, *jobs, quota("gpus", {GPUS: 11})), policy(queues=(STRICT,))

    made = accepted_plan(state, rules, T0)

    assert [each.reason.demand for each in made.purchases if isinstance(each.reason, UnmetDemand)] == [("job/first",)]
    assert {held.subject: type(held.reason) for held in made.deferred} == {
        "job/large": ResourceQuotaExceeded, "job/like-first": QueueHeadWaits
    }  # fmt: skip


def test_a_job_over_a_quota_of_the_policy_takes_no_resource_quota() -> None:
    """Its user has reached a limit; the namespace's quota is for the next job."""
    state = given(
        SOLD, research("over", submitted_by="ann", priority=900), research("fits", submitted_by="bob"),
        quota("gpus", {GPUS: 8}),
    )  # fmt: skip
    rules = policy(quotas={"users": [{"name": "ann", "gpu_count_max": 4}]})

    made = accepted_plan(state, rules, T0)
    bought = [each.reason for each in made.purchases]
    assert [reason.demand for reason in bought if isinstance(reason, UnmetDemand)] == [("job/fits",)]


def test_what_was_bought_for_a_refused_job_serves_others() -> None:
    """The quota was lowered while the node booted: the job keeps no place on it from a job of another namespace."""
    reason = UnmetDemand(demand=("job/train",), offers_considered=1, price_micro_usd_per_hour=1)
    story = (
        node("n1", reason=reason),
        SOLD,
        research("train"),
        quota("gpus", {GPUS: 4}),
        research("other", namespace="vision"),
    )
    assert bought_for(given(*story)) == set()


# ---- of namespaces that the scheduler creates

CREATED = {"namespace_template": "gpu-{project}", "quota": {GPUS: "8"}}


def test_the_quota_of_the_policy_counts_before_its_namespace_exists() -> None:
    """Two jobs need sixteen GPUs; one node is bought, and the other job waits with the quota that it will find."""
    jobs = [job(name, project_id="vision", namespace="gpu-vision") for name in ("one", "two")]
    state, rules = given(SOLD, *jobs), policy(tenancy=CREATED)

    made = plan(state, rules, T0)

    assert len(made.purchases) == 1
    (held,) = made.deferred
    assert isinstance(held.reason, ResourceQuotaExceeded)
    assert held.reason.quota == "gpu-vision/gpu-autoscaler"
    assert len(schedule(given(node("n1"), node("n2"), *jobs), rules, T0).placements) == 1


def test_the_quota_that_kubernetes_reports_replaces_that_of_the_policy() -> None:
    """Somebody has raised it; the scheduler sets it back, but until then this one counts."""
    jobs = [job(name, project_id="vision", namespace="gpu-vision") for name in ("one", "two")]
    raised = quota("gpu-autoscaler", {GPUS: 16}, namespace="gpu-vision")

    made = plan(given(SOLD, raised, *jobs), policy(tenancy=CREATED), T0)

    assert len(made.purchases) == 2


def test_the_first_gang_of_a_project_larger_than_its_quota_is_refused() -> None:
    """The namespace does not exist yet; a project with a larger quota of its own is accepted."""
    spec = given(job("gang", members=2, project_id="vision", namespace="gpu-vision")).jobs[JobId("gang")].queued
    assert spec is not None
    violation = quota_violation(spec.spec, given(), policy(tenancy=CREATED))
    assert violation is not None
    assert (violation.kind, "ResourceQuota gpu-vision/gpu-autoscaler" in violation.reason) == ("quota", True)
    larger = {**CREATED, "projects": [{"name": "vision", "quota": {GPUS: "16"}}]}
    assert quota_violation(spec.spec, given(), policy(tenancy=larger)) is None
