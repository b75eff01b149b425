"""The part of the second opinion that looks at sick nodes: what is said against each, and how many there are.

Called by `core/checks/removals.py` alone. Reads the record GPU by GPU, where `core/gpu_health.py` looks for the
gravest.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.core.trails import GpuTelemetryHistory
from gpu_autoscaler.model.decisions import DrainNode
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.model.reasons import NodeUnhealthy

# A last window that ended longer ago is no evidence of today. Source: our own; two lost windows and a late one.
_SEEN_SECONDS_MAX = 180.0


def unproven_sickness(
    drains: Iterable[DrainNode], state: ClusterState, policy: ScalingPolicy, as_of: datetime
) -> Iterator[str]:
    """Yield a sentence for each node that goes as sick and was well lately, and where too many look sick."""
    chosen = [drain for drain in drains if isinstance(drain.reason, NodeUnhealthy)]
    if not chosen:
        return
    rules = policy.removal
    amiss = {uid for uid, at in state.unhealthy_since.items() if (as_of - at).total_seconds() >= rules.unhealthy_seconds_max}
    fatal = amiss | set(_with_gpus(state, policy, as_of, is_fatal=True))
    sick = fatal | set(_with_gpus(state, policy, as_of, is_fatal=False))
    for drain in chosen:
        if drain.node_uid not in (sick if drain.is_voluntary else fatal):
            yield f"node {drain.node_name} is drained as sick, and was well lately"
    known = sick & state.usable.keys()
    if len(known) > max(rules.unhealthy_nodes_ok_count, rules.unhealthy_ratio_max * len(state.usable)):
        yield f"{len(chosen)} nodes are drained as sick while {len(known)} of {len(state.usable)} look sick"


def _with_gpus(state: ClusterState, policy: ScalingPolicy, as_of: datetime, *, is_fatal: bool) -> Iterator[NodeUid]:
    """Nodes of which some GPU has been amiss for long enough, and was so when it was seen last, which was just now."""
    before = as_of - timedelta(seconds=policy.removal.gpu_health.evidence_seconds)
    for uid, trail in state.telemetry_history.items():
        is_fresh = as_of - trail.seen_until <= timedelta(seconds=_SEEN_SECONDS_MAX)
        if is_fresh and any(_is_amiss(gpu, policy, before, is_fatal=is_fatal) for gpu in trail.gpus):
            yield uid


def _is_amiss(gpu: GpuTelemetryHistory, policy: ScalingPolicy, before: datetime, *, is_fatal: bool) -> bool:
    rules = policy.removal.gpu_health
    codes = rules.xids_fatal if is_fatal else rules.xids_degraded
    if any(xid in codes and since <= before for xid, since in gpu.xids):
        return True
    if is_fatal:
        marks = (gpu.row_remap_failed_since, gpu.double_bit_since)
        return any(since is not None and since <= before for since in marks)
    return any(-level > rules.celsius_max and since <= before for level, since in gpu.cool)
