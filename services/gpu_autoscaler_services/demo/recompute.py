"""Recompute every plan of a run from the facts of its cut, in one pass.

`gpu-autoscaler recompute` does the same for one plan, from the start of the streams.
"""

import msgspec

from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.replay.history import Stored
from gpu_autoscaler.replay.retrace import RecordedState
from gpu_autoscaler.runtime.digests import core_digest, policy_digest
from gpu_autoscaler_services.demo.record import Record


def differing_plans(record: Record, policy: ScalingPolicy) -> tuple[str, ...]:
    """Return a sentence for each recorded plan that this code and policy do not reproduce byte for byte."""
    recorded = RecordedState(Stored(at=seen.stored_at, recorded=seen.recorded) for seen in record.seen)
    core, own_policy = core_digest(), policy_digest(policy)
    differing = []
    for fact, _ in record.of(ScalingPlanMade):
        if (fact.core_digest, fact.policy_digest) != (core, own_policy):
            differing.append(f"plan {fact.plan_id} was made by another core or another policy")
            continue
        recorded.to_cut(fact.cut)
        recomputed = plan(recorded.state, policy, fact.plan.as_of)
        if msgspec.json.encode(recomputed) != msgspec.json.encode(fact.plan):
            differing.append(
                f"plan {fact.plan_id} differs when recomputed; see: gpu-autoscaler recompute {fact.plan_id}"
            )
    return tuple(differing)
