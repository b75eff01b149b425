"""The second opinion on waiting for running work: never beyond what the policy allows, and never for high priority."""

from collections.abc import Iterator
from datetime import timedelta

from gpu_autoscaler.core.nodes.life import NodePhase, node_views
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.ids import JobId, PodUid
from gpu_autoscaler.model.reasons import CapacityExpected

_HIGH = 1000


def wait_mistakes(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each piece of work that is told to wait for longer than it may."""
    waits = [(held.subject, held.reason) for held in plan.deferred if isinstance(held.reason, CapacityExpected)]
    waits = [(subject, reason) for subject, reason in waits if reason.expected_at is not None]
    if not waits:
        return
    usable = {view.name for view in node_views(state, plan.as_of) if view.phase is NodePhase.READY}
    for subject, reason in waits:
        if reason.node not in usable or reason.expected_at is None:
            continue  # a node on its way: it was bought for somebody
        kind, _, name = subject.partition("/")
        job, pod = state.jobs.get(JobId(name)), state.pods.get(PodUid(name))
        if kind == "job" and job is not None and job.queued is not None:
            since, longest = job.queued.queued_at, policy.queued_timeout_seconds
            if job.queued.spec.priority >= _HIGH:
                yield f"{subject} is of high priority and waits for room on {reason.node}"
        elif kind == "pod" and pod is not None:
            since, longest = pod.unschedulable_since or pod.created_at, policy.pending_pod_timeout_seconds
        else:
            continue
        if reason.expected_at > since + timedelta(seconds=longest) or reason.expected_at <= plan.as_of:
            yield f"{subject} waits for room on {reason.node} until {reason.expected_at}, longer than it may"
