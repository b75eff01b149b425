"""Rules of the plan check on idle nodes: the idle time, and the use that work would make of an unneeded node.

Arrivals are read again from jobs and pods. Where other GPUs are free, nothing is certain, and nothing is checked.
"""

from collections import Counter
from collections.abc import Iterator
from datetime import datetime

from gpu_autoscaler.core.check.violation import Violation
from gpu_autoscaler.core.nodes.views import NodeView, node_views
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.decisions import DrainNode, Plan
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.drain import AboveOverride, NodeIdle

_STEP_SECONDS = 300
_STARTS_COUNT_MIN, _STARTS_COUNT_MAX = 6, 24
_USE_RATIO = 0.6322  # just above 1 - 1/e, the most that any node needs
_ARRIVALS_COUNT_MAX = 256


def idle_violations(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each node that is drained as idle too early, or as unneeded although work would use it."""
    idle = [(decision, decision.reason) for decision in plan.drains if isinstance(decision.reason, NodeIdle)]
    for drain, reason in idle:
        usable = state.usable.get(drain.node_uid)
        since = (state.busy_until.get(drain.node_name), None if usable is None else usable.since)
        last_at = max((at for at in since if at is not None), default=None)
        if last_at is not None and (plan.as_of - last_at).total_seconds() < reason.idle_seconds_max:
            yield Violation(f"node {drain.node_name} is drained as idle before its idle time is over", drain)
    unneeded = {drain.node_name: drain for drain, reason in idle if reason.rule and reason.rule.name == "unneeded"}
    if unneeded:
        yield from _needed(unneeded, plan, state, policy)


def _needed(
    unneeded: dict[str, DrainNode], plan: Plan, state: ClusterState, policy: ScalingPolicy
) -> Iterator[Violation]:
    views = node_views(state, plan.as_of)
    # How many exceed an override depends on what else leaves: these may have counted as free.
    drained = {decision.node_name for decision in plan.drains if not isinstance(decision.reason, AboveOverride)}
    taken: Counter[str] = Counter()
    for pod in state.pods.values():
        if pod.node_name is not None and pod.phase in ("pending", "running"):
            taken[pod.node_name] += pod.requests.gpu_count
    # Of several unneeded nodes one may take what another one is not needed for.
    free = {
        view.name
        for view in views
        if view.is_schedulable
        and (view.name not in drained or view.name in unneeded)
        and view.allocatable.gpu_count > taken[view.name]
    }
    set_seconds = {pool.name: pool.idle_seconds for pool in policy.pools}
    for view in views:
        drain = unneeded.get(view.name)
        if drain is None or not isinstance(drain.reason, NodeIdle) or drain.reason.rule is None:
            continue
        if policy.idle_seconds is not None or set_seconds.get(view.pool or "") is not None:
            yield Violation(f"node {view.name} is drained as unneeded, but its idle time is set", drain)
        if drain.reason.idle_seconds_max < policy.removal.unneeded_idle_seconds:
            yield Violation(f"node {view.name} is drained as unneeded before the policy allows it", drain)
        seconds = drain.reason.rule.kept_seconds
        if free <= {view.name} and seconds is not None and _is_used(view, seconds, plan.as_of, state):
            yield Violation(f"node {view.name} is drained as unneeded, but work would likely use it soon", drain)


def _is_used(view: NodeView, seconds: float, as_of: datetime, state: ClusterState) -> bool:
    """True if, from most instants of the last two hours, work arrived within this time that only this node takes."""
    arrivals = sorted(_arrivals(state))[-_ARRIVALS_COUNT_MAX:]
    end = int(as_of.timestamp()) // _STEP_SECONDS * _STEP_SECONDS
    starts = [
        start
        for start in range(end - _STARTS_COUNT_MAX * _STEP_SECONDS, end, _STEP_SECONDS)
        if arrivals and start + _STEP_SECONDS > arrivals[0][0] and end - start >= seconds
    ]
    is_spot = view.capacity_type is CapacityType.SPOT
    fitting = [
        at
        for at, gpu_count, models, is_spot_allowed in arrivals
        if gpu_count <= view.allocatable.gpu_count
        and (not models or view.gpu_model in models)
        and (is_spot_allowed or not is_spot)
    ]
    uses_count = sum(1 for start in starts if any(start <= at <= start + seconds for at in fitting))
    return len(starts) >= _STARTS_COUNT_MIN and uses_count >= _USE_RATIO * len(starts)


def _arrivals(state: ClusterState) -> Iterator[tuple[float, int, tuple[str, ...], bool]]:
    for job in state.jobs.values():
        if job.queued is not None and (count := job.queued.spec.member_resources.gpu_count):
            spec = job.queued.spec
            yield spec.requested_at.timestamp(), count, spec.models, spec.is_preemptible
    for pod in state.pods.values():
        if pod.job_id is None and pod.requests.gpu_count and pod.owner_kind not in ("DaemonSet", "Node"):
            models = pod.gpu_models or (() if pod.gpu_model is None else (pod.gpu_model,))
            # Pods that Kubernetes protects from eviction never run on spot.
            yield pod.created_at.timestamp(), pod.requests.gpu_count, models, pod.priority < 2_000_000_000
