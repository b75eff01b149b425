"""Properties of every plan."""

import random
from collections import Counter
from typing import Any

import msgspec
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from tests.support.situations import Situation, situations

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.nodes.views import node_views
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.jobs import JobSpec


def shuffled(state: ClusterState, seed: int) -> ClusterState:
    """The same state with shuffled mappings."""
    order = random.Random(seed)  # noqa: S311 - order, not secrets

    def mixed(mapping: dict[Any, Any]) -> dict[Any, Any]:
        items = list(mapping.items())
        order.shuffle(items)
        return dict(items)

    fields = {name: getattr(state, name) for name in state.__struct_fields__}
    return msgspec.structs.replace(
        state, **{name: mixed(value) for name, value in fields.items() if isinstance(value, dict)}
    )


@settings(max_examples=300, deadline=None)
@for_all(situations())
def test_every_plan_is_valid_within_limits_and_does_not_merge_nodes_while_it_buys(situation: Situation) -> None:
    """`check` finds nothing. Purchases fit the limits of nodes and GPUs, launches in flight included. A plan that buys
    for unmet demand merges no nodes that could have stayed."""
    result = plan(situation.state, situation.policy, situation.as_of)
    bought = result.purchases
    views = [view for view in node_views(situation.state, situation.as_of) if view.is_ours and view.is_counted]

    assert check(result, situation.state, situation.policy) == ()
    if bought:
        assert len(views) + len(bought) <= situation.policy.nodes_count_max
    gpus_bought = sum(each.offer.resources.gpu_count for each in bought)
    if gpus_bought and situation.policy.gpu_count_max is not None:
        gpus = sum(view.allocatable.gpu_count for view in views)
        assert gpus + gpus_bought <= situation.policy.gpu_count_max
    if any(each.reason.tag() == "unmet_demand" for each in bought):
        drained = result.drains
        assert not any(each.reason.tag() == "node_underused" for each in drained)


@settings(max_examples=150, deadline=None)
@for_all(situations(), st.integers())
def test_equal_states_give_equal_plans_byte_for_byte(situation: Situation, seed: int) -> None:
    """Whatever the order of mappings."""
    mixed = shuffled(situation.state, seed)
    args = (situation.policy, situation.as_of)

    assert msgspec.json.encode(plan(mixed, *args)) == msgspec.json.encode(plan(situation.state, *args))
    assert msgspec.json.encode(schedule(mixed, *args)) == msgspec.json.encode(schedule(situation.state, *args))


@settings(max_examples=200, deadline=None)
@for_all(situations())
def test_a_schedule_never_overcommits_a_node(situation: Situation) -> None:
    """All started jobs fit the free capacity."""
    started = schedule(situation.state, situation.policy, situation.as_of).placements
    requested: Counter[str] = Counter()
    for placement in started:
        queued = situation.state.jobs[placement.job_id].queued
        assert queued is not None
        spec: JobSpec = queued.spec
        assert len(placement.node_uids) == spec.member_count
        for name in placement.node_names:
            requested[name] += spec.member_resources.gpu_count
    for pod in situation.state.pods.values():
        if pod.node_name is not None:
            requested[pod.node_name] += pod.requests.gpu_count
    nodes = {node.name: node for node in situation.state.nodes.values()}

    assert all(count <= nodes[name].allocatable.gpu_count for name, count in requested.items())
