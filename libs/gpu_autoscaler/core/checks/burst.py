"""The second opinion on waiting for the rest of a burst: never longer than the policy allows, nor by what may not."""

from collections.abc import Iterator
from datetime import timedelta

from gpu_autoscaler.core.checks.pods import pods_read
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.ids import JobId, PodUid
from gpu_autoscaler.model.waits import BatchWindowOpen

_HIGH = 1000


def burst_mistakes(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each piece of work that waits for others though it is late, alone, urgent, or a gang."""
    held = {each.subject: each.reason for each in plan.deferred if isinstance(each.reason, BatchWindowOpen)}
    if not held:
        return
    longest = timedelta(seconds=policy.batching.wait_seconds_max)
    unbound_count = len(pods_read(state.pods).unbound)
    unplaced_count = sum(job.queued is not None and job.finished is None for job in state.jobs.values())
    if unbound_count + unplaced_count < 2:
        yield f"{next(iter(held))} is told to wait for others, and nothing else waits"
    for subject, reason in held.items():
        kind, _, name = subject.partition("/")
        pod, job = state.pods.get(PodUid(name)), state.jobs.get(JobId(name))
        if kind == "pod" and pod is not None:
            came = pod.created_at
            owner = None if pod.job_id is None else state.jobs.get(pod.job_id)
            priority = _HIGH if pod.priority > 0 else 0
            if owner is not None and owner.queued is not None:
                priority = owner.queued.spec.priority
        elif kind == "job" and job is not None and job.queued is not None:
            came, priority = job.queued.queued_at, job.queued.spec.priority
            if job.queued.spec.gang_count > 1 and not any(pod.job_id == name for pod in state.pods.values()):
                yield f"{subject} is a gang, and waits for the rest of a burst"
        else:
            yield f"{subject} is told to wait for the rest of a burst, and is neither a pod nor a job that waits"
            continue
        if priority >= _HIGH:
            yield f"{subject} is of high priority, and waits for the rest of a burst"
        if not plan.as_of < reason.until <= came + longest:
            yield f"{subject} waits for the rest of its burst until {reason.until}, longer than it may"
