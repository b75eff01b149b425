"""`why` of the object of each act of upkeep: what the plan decided, and for which reason."""

import pytest
from msgspec.structs import replace
from tests.support.braked_fleet import with_finalizer
from tests.support.stories import (
    HOUR,
    MINUTE,
    T0,
    Story,
    TimedFact,
    bought,
    given,
    job,
    node,
    offer,
    pod,
    policy,
    provider_id,
    purchase,
    record,
)
from tests.support.telemetry import minutes
from tests.unit.core.test_upkeep import orphans

from gpu_autoscaler.core.explain.story import why_job, why_node
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.disruption_settings import IdleJobsPolicy, RemovalPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import Cut
from gpu_autoscaler.model.ids import PlanId
from gpu_autoscaler.model.labels import CHECKPOINTED_AT, IDLE_ANNOUNCED_AT, IDLE_ENDS_AT, KARPENTER_REGISTERED

NOW = T0 + HOUR
KARPENTERS = {KARPENTER_REGISTERED: "true"}
NO_FINALIZERS = policy(removal=RemovalPolicy(is_finalizer_on=False))
IDLE = policy(idle_jobs=IdleJobsPolicy(is_on=True))
PAID = replace(offer(), paid_from=T0 - HOUR, paid_until=NOW + 5 * MINUTE)
IDLE_JOB: Story = (
    *node("n1"),
    *job("train", gpus=1, placed_on=("n1",), is_running=True),
    *pod(
        "a",
        on="n1",
        gpus=1,
        owner_kind="Job",
        job_id="train",
        annotations={IDLE_ANNOUNCED_AT: (NOW - 12 * MINUTE).isoformat(), IDLE_ENDS_AT: NOW.isoformat()},
    ),
    *minutes("n1", 60, busy=0.03, pods={0: "default/a"}, sick={4: {"utilization_ratio_max": 0.9}}),
)


def history(story: Story, rules: ScalingPolicy) -> tuple[TimedFact, ...]:
    """The story, and the plan that is made of it."""
    made = plan(given(story, as_of=NOW), rules, NOW)
    fact = ScalingPlanMade(plan_id=PlanId("p1"), plan=made, cut=Cut(), policy_digest="p", core_digest="c")
    return (*story, TimedFact(fact, NOW))


@pytest.mark.parametrize(
    ("story", "rules", "name", "act", "reason"),
    [
        (node("n1"), policy(), "n1", "Add our finalizer to node n1.", "its pods would be killed at once"),
        (
            with_finalizer(node("n1")), NO_FINALIZERS, "n1", "Remove our finalizer from node n1.",
            "The policy uses no finalizers.",
        ),
        (
            (*node("n1", labels=KARPENTERS, deleting_since=T0 + MINUTE), *pod("p", on="n1")), policy(), "n1",
            "Ask the pods on node n1", "Karpenter has been deleting the node since",
        ),
        (
            orphans(), policy(watch_age_seconds_max=86_400.0), "n000",
            "Remove node object n000 if the cloud confirms the end.", "The instance of the node has ended",
        ),
        (
            bought(purchase("buy-1", PAID)), policy(), provider_id("buy-1"), "Publish a notice for instance",
            "The paid reservation of the instance ends at",
        ),
    ],
    ids=["add finalizer", "remove finalizer", "checkpoints", "orphaned node", "reservation"],
)  # fmt: skip
def test_a_node_is_explained(story: Story, rules: ScalingPolicy, name: str, act: str, reason: str) -> None:
    """By the act, and the cause in the same sentence."""
    lines = [line for line in why_node(record(history(story, rules)), name) if "Plan p1" in line]
    assert any(act in line and reason in line for line in lines), lines


def test_a_job_is_explained() -> None:
    """Its cancellation comes with the idle time, the announcement, and with what would keep it."""
    lines = [line for line in why_job(record(history(IDLE_JOB, IDLE)), "train") if "Plan p1" in line]
    assert any("Cancel job train." in line and "at most 5 % for 1 h" in line for line in lines), lines
    assert any("It was announced at 2026-11-21 12:48:00 UTC." in line for line in lines), lines


def test_a_request_to_save_is_explained() -> None:
    """With the last save, the interval and the deadline; a request that is deferred with what is missing."""
    story = (*node("n1"), *job("train", gpus=1, placed_on=("n1",), is_running=True, checkpoint_interval_seconds=300.0))
    for annotations, part in (
        ({CHECKPOINTED_AT: T0.isoformat()}, "last saved at 2026-11-21 12:00:00 UTC; it is asked every 5 min."),
        ({}, f"No running pod of the job has the annotation {CHECKPOINTED_AT}"),
    ):
        member = pod("a", on="n1", gpus=1, owner_kind="Job", job_id="train", annotations=annotations)
        lines = why_job(record(history((*story, *member), policy())), "train")
        assert any(part in line for line in lines), lines


def test_a_request_to_save_before_a_preemption_is_explained() -> None:
    """With the deadline, and the job and quota that it is for."""
    quotas = {"projects": [{"name": name, "nominal_gpu_count": count} for name, count in (("a", 0), ("b", 8))]}
    story = (
        *node("n1"),
        *job("train", gpus=8, project_id="a", placed_on=("n1",), is_running=True),
        *pod("p", on="n1", gpus=8, owner_kind="Job", job_id="train", annotations={CHECKPOINTED_AT: NOW.isoformat()}),
        *job("mine", gpus=8, project_id="b"),
    )
    lines = why_job(record(history(story, policy(quotas=quotas))), "train")
    parts = ("Ask job train to save by 2026-11-21 13:02:00 UTC, before its attempt ends.", "for job mine")
    assert any(all(part in line for part in parts) for line in lines), lines


def test_a_deferred_act_is_explained() -> None:
    """A freeze is the reason; the story of the job has it."""
    frozen = policy(idle_jobs=IdleJobsPolicy(is_on=True), is_frozen=True)
    lines = why_job(record(history(IDLE_JOB, frozen)), "train")
    assert any("Deferred for job train (step cancel_idle_job): The policy is frozen" in line for line in lines), lines
