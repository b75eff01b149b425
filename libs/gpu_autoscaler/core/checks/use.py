"""The part of the second opinion that looks at what is done for how busy GPUs are. Called by `core/check.py` alone.

Reads the last window of each node, where `core/use.py` reads trails.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta

from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.events.gpu import GpuNodeSummarised
from gpu_autoscaler.model.decisions import BuyNode, DrainNode, Plan
from gpu_autoscaler.model.reasons import NodeUnderused
from gpu_autoscaler.model.use_reasons import UtilizationHigh


def use_mistakes(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each node bought or drained for a figure that does not bear it out, or must not."""
    bought = [each for each in plan.decisions if isinstance(each, BuyNode) and isinstance(each.reason, UtilizationHigh)]
    drained = [
        (each, each.reason)
        for each in plan.decisions
        if isinstance(each, DrainNode)
        and isinstance(each.reason, NodeUnderused)
        and each.reason.utilization_ratio is not None
    ]
    if not bought and not drained:
        return
    if bought and policy.utilization_trigger != "direct":
        yield f"{len(bought)} nodes are bought for their use alone, which the policy does not want"
    if len(bought) > 1 or len(drained) > 1:
        yield f"{len(bought) + len(drained)} nodes come or go for their use at once"
    ratios = [
        ratio
        for uid, window in state.telemetry.items()
        if uid in state.nodes and (ratio := _busy(window, policy, plan.as_of)) is not None
    ]
    if bought and not any(ratio > policy.utilization.high_ratio for ratio in ratios):
        yield "a node is bought for high use, and no node's telemetry says so"
    for drain, _ in drained:
        known = state.telemetry.get(drain.node_uid)
        ratio = None if known is None else _busy(known, policy, plan.as_of)
        if ratio is None or not 0 < ratio <= policy.utilization.low_ratio:
            yield f"node {drain.node_name} is drained for low use, which its telemetry does not say"


def _busy(window: GpuNodeSummarised, policy: ScalingPolicy, as_of: datetime) -> float | None:
    """The mean of all GPUs in a window of late; None: it is old, or does not know of all."""
    ended_at = window.window_started_at + timedelta(seconds=window.window_seconds)
    known = [gpu.utilization_ratio_mean for gpu in window.gpus]
    sure = [ratio for ratio in known if ratio is not None]
    is_old = (as_of - ended_at).total_seconds() > policy.utilization.telemetry_age_seconds_max
    return None if is_old or not sure or len(sure) < len(known) else sum(sure) / len(sure)
