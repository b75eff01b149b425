"""What was bought counts against every limit, also where its order left the record: planner and plan check agree."""

import pytest
from tests.support.stories import T0, Story, bought, given, instance, job, node, offer, on_sale, policy, purchase

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.demand.items import BillingScope
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.limits.limits import LimitUsage
from gpu_autoscaler.core.policy.limit_settings import LimitsPolicy, PartLimit
from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.reasons.buy import UnmetDemand

MARKS = {labels.POOL: "default", labels.PROJECT_ID: "research"}
BUY = purchase("buy-n1", labels=MARKS)
MORE = purchase(
    "more",
    labels=MARKS,
    reason=UnmetDemand(demand=("job/train",), offers_considered=1, price_micro_usd_per_hour=10_000_000),
)
SITUATIONS: dict[str, Story] = {
    "whole GPUs": node("n1", labels=MARKS),
    "MIG slices": node("n1", labels=MARKS, slices={"nvidia.com/mig-1g.5gb": 56}),
    "shared GPUs": node("n1", labels=MARKS, slices={"nvidia.com/gpu.shared": 32}),
    "a failed GPU": node("n1", labels=MARKS, gpus_allocatable=7),
    "GPUs that are not allocatable yet": node("n1", labels=MARKS, gpus_allocatable=0, is_ready=False),
    "an instance without a node": bought(BUY),
}
LIMITS: dict[str, ScalingPolicy] = {
    "nodes": policy(nodes_count_max=1),
    "GPUs": policy(gpu_count_max=15),
    "price": policy(price_micro_usd_per_hour_max=19_999_999),
    "nodes of a pool": policy(pools=(NodePool(name="default", nodes_count_max=1),)),
    "GPUs of a pool": policy(pools=(NodePool(name="default", gpu_count_max=15),)),
    "nodes of a zone": policy(limits=LimitsPolicy(zones=(PartLimit(name="zone-a", nodes_count_max=1),))),
    "GPUs of a zone": policy(limits=LimitsPolicy(zones=(PartLimit(name="zone-a", gpu_count_max=15),))),
    "nodes of a project": policy(limits=LimitsPolicy(projects=(PartLimit(name="research", nodes_count_max=1),))),
    "GPUs of a project": policy(limits=LimitsPolicy(projects=(PartLimit(name="research", gpu_count_max=15),))),
}


def world(story: Story, *, has_order: bool) -> ClusterState:
    """One bought node or instance, offers, and a job that waits; without its order on request."""
    kept = tuple(told for told in story if has_order or told.fact.domain() != "scaling")
    return given(kept, instance(BUY), on_sale(offer()), job("train"))


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("story", SITUATIONS.values(), ids=SITUATIONS)
def test_a_node_counts_without_its_order_as_with_it(story: Story, limits: ScalingPolicy) -> None:
    """One more node would exceed the limit: the planner defers it, and the plan check refuses it."""
    excess, violations = [], []
    for has_order in (True, False):
        state = world(story, has_order=has_order)
        usage = LimitUsage(Draft.start(state, T0).views, limits)
        excess.append(usage.excess("default", MORE.offer, BillingScope("research")))
        plan = Plan(as_of=T0, parent_sequence=state.last_plan_sequence, decisions=(MORE,), deferred=())
        violations.append([violation for violation in check(plan, state, limits) if "of at most" in violation])

    assert excess[0] == excess[1] is not None
    assert violations[0] == violations[1] != []


def test_what_belongs_to_another_project_does_not_count() -> None:
    """Only of an instance without order and node is the project unknown."""
    limits = LIMITS["nodes of a project"]
    other = node("n1", labels={**MARKS, labels.PROJECT_ID: "vision"})
    unknown = bought(BUY)
    for story, is_counted in ((other, False), (unknown, True)):
        views = Draft.start(world(story, has_order=False), T0).views

        excess = LimitUsage(views, limits).excess("default", MORE.offer, BillingScope("research"))

        assert (excess is not None) is is_counted


@pytest.mark.parametrize(
    ("slices", "gpu_count"),
    [({"nvidia.com/mig-1g.5gb": 56}, 7), ({"nvidia.com/gpu.shared": 32}, 32), ({}, 8)],
    ids=["MIG slices", "shared GPUs", "whole GPUs"],
)
def test_gpus_of_a_type_that_is_not_offered_are_estimated(slices: dict[str, int], gpu_count: int) -> None:
    """By the memory of the slices; a replica may be a whole GPU. Never as none."""
    story = node("n1", labels=MARKS, slices=slices)
    kept = tuple(told for told in story if told.fact.domain() != "scaling")

    (view,) = Draft.start(given(kept, instance(BUY)), T0).views

    assert view.order is None
    assert view.gpu_count == gpu_count
