"""After a week the state is as large as after a day."""

from collections.abc import Iterator, Mapping

import msgspec
from tests.support.stories import bought, drained, instance, job, node, notice, on_sale, pod, provider_id, purchase
from tests.support.timed_facts import EPOCH, HOUR, MINUTE, T0, TimedFact, record

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.retention import BUSY_HOURS
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.job import JobFinished
from gpu_autoscaler.events.node import NodeGone, NodeInstanceListed
from gpu_autoscaler.events.pod import PodGone
from gpu_autoscaler.events.scaling import ScalingNodeDrained, ScalingNodeTerminated
from gpu_autoscaler.model.ids import ActionId, JobId, NodeUid, PlanId, PodUid

NODES_PER_HOUR = 4
WEEK_HOURS = 7 * 24
# How long each node's last work is remembered: it is the one thing that is kept for as long as a policy may ask.
KEPT_FOR_DAYS = {"busy_until"}


def a_node_and_its_job(name: str, hour: int, quarter: int) -> Iterator[TimedFact]:
    """Bought for a job, then drained or interrupted, and deleted."""
    at = T0 + hour * HOUR + quarter * 15 * MINUTE
    decision = purchase(f"buy-{name}", at=at)
    yield from bought(decision, at=at)
    yield from node(name, at=at)[-1:]
    yield from instance(decision, at=at)
    yield from job(name, at=at, placed_on=(name,), is_running=True)
    yield from pod(name, on=name, at=at, job_id=name)
    ended = at + 10 * MINUTE
    if quarter == 0:
        yield from notice(name, reclaim_at=ended, at=at + 8 * MINUTE)
    yield TimedFact(
        PodGone(
            pod_uid=PodUid(f"uid-{name}"), namespace="default", name=name, node_name=name, epoch=EPOCH, version=2,
            phase="succeeded", job_id=JobId(name),
        ),
        ended,
    )  # fmt: skip
    yield TimedFact(JobFinished(job_id=JobId(name), outcome="completed", finished_at=ended), ended)
    yield from drained(name, at=ended)
    yield from instance(decision, state="terminated", at=ended)
    action, uid, instance_id = ActionId(f"drain-{name}"), NodeUid(f"uid-{name}"), provider_id(decision.action_id)
    plan_id = PlanId(f"plan-{action}")
    drained_fact = ScalingNodeDrained(
        action_id=action, plan_id=plan_id, node_uid=uid, node_name=name, provider_id=instance_id, drained_at=ended
    )
    yield TimedFact(drained_fact, ended)
    terminated = ScalingNodeTerminated(
        action_id=action,
        plan_id=plan_id,
        provider_id=instance_id,
        order_action_id=decision.action_id,
        node_name=name,
        terminated_at=ended,
    )
    yield TimedFact(terminated, ended)
    # The cloud's list is what says that an instance is not there any more.
    yield TimedFact(NodeInstanceListed(provider_ids=(), listed_at=ended), ended)
    yield TimedFact(NodeGone(node_uid=uid, name=name, provider_id=instance_id, epoch=EPOCH, version=2), ended)


def sizes(state: ClusterState) -> dict[str, int]:
    """The number of entries of each mapping."""
    values = {field.name: getattr(state, field.name) for field in msgspec.structs.fields(ClusterState)}
    return {name: len(value) for name, value in values.items() if isinstance(value, Mapping)}


def test_the_state_does_not_grow_with_history() -> None:
    """Except what is kept for a week on purpose."""
    state = fold(EMPTY_STATE, record(on_sale(at=T0)))
    after_two_days: dict[str, int] = {}
    for hour in range(WEEK_HOURS):
        names = [(f"n{hour}-{quarter}", quarter) for quarter in range(NODES_PER_HOUR)]
        story = [event for name, quarter in names for event in a_node_and_its_job(name, hour, quarter)]
        state = fold(state, record(story))
        if hour == 2 * 24:
            after_two_days = sizes(state)

    after_a_week = sizes(state)
    assert after_two_days.keys() == after_a_week.keys()
    grown = {name for name, size in after_a_week.items() if size > after_two_days[name] + NODES_PER_HOUR}
    assert grown <= KEPT_FOR_DAYS
    assert after_a_week["busy_until"] <= (BUSY_HOURS + 1) * NODES_PER_HOUR
    assert max(size for name, size in after_a_week.items() if name not in KEPT_FOR_DAYS) < 24 * NODES_PER_HOUR
    assert after_a_week["pods_gone"] > 0
    assert after_a_week["jobs"] > 0
