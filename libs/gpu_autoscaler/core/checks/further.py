"""The second opinion on members beyond a gang: bought for only beside a gang that has its place, and never too many."""

from collections.abc import Iterator

from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.model.decisions import BuyNode, Plan
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.reasons import CapacityExpected, UnmetDemand


def further_mistakes(plan: Plan, state: ClusterState, _: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each node that is bought for a member which its job does not have, or cannot use yet."""
    held = {one.subject for one in plan.deferred if not isinstance(one.reason, CapacityExpected)}
    for decision in plan.decisions:
        if not isinstance(decision, BuyNode) or not isinstance(decision.reason, UnmetDemand):
            continue
        for key in decision.reason.demand:
            kind, rest = (*key.split("/", 1), "")[:2]
            if kind != "member":
                continue
            name, number = rest.rsplit("/", 1)
            job = state.jobs.get(JobId(name))
            if job is None or job.queued is None or job.finished is not None or job.cancel_requested is not None:
                yield f"{decision.offer.key} is bought for {key}, and its job wants no room"
                continue
            least, most = job.queued.spec.member_count_min, job.queued.spec.member_count
            if least is None or not least < int(number) <= most:
                yield f"{decision.offer.key} is bought for {key}, which is none beyond the gang of its job"
            if f"job/{name}" in held:
                yield f"{decision.offer.key} is bought for {key}, and the gang of its job has no place"
