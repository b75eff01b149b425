"""GPU faults that telemetry proves over a window. Unknown or stale telemetry proves nothing."""

from collections.abc import Iterator
from datetime import datetime

import msgspec

from gpu_autoscaler.core.next_change import has_lasted, has_lasted_longer
from gpu_autoscaler.core.policy.disruption_settings import GpuHealthPolicy
from gpu_autoscaler.core.state.telemetry_history import (
    GAP_SECONDS_MAX,
    GpuTelemetryHistory,
    NodeTelemetryHistory,
    since_at_most,
)
from gpu_autoscaler.model.observed import Instant


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """A fault, and since when it is observed."""

    description: str  # "GPU 3 reported XID 79"
    since: Instant
    is_fatal: bool  # False: the GPU still works


def is_suspect(history: NodeTelemetryHistory, rules: GpuHealthPolicy) -> bool:
    """True if a closer look may find a fault."""
    return history.has_errors or (history.celsius_max is not None and history.celsius_max >= rules.celsius_max)


def gpu_evidence(history: NodeTelemetryHistory, rules: GpuHealthPolicy, as_of: datetime) -> Evidence | None:
    """Return the gravest, then the longest fault that has lasted long enough and still lasts; None: there is none."""
    if not is_suspect(history, rules) or has_lasted_longer(history.seen_until, GAP_SECONDS_MAX, as_of):
        return None
    faults = [fault for gpu in history.gpus for fault in _findings(gpu, rules)]
    proven = [fault for fault in faults if has_lasted(fault.since, rules.evidence_seconds, as_of)]
    return min(proven, key=lambda fault: (not fault.is_fatal, fault.since, fault.description), default=None)


def _findings(gpu: GpuTelemetryHistory, rules: GpuHealthPolicy) -> Iterator[Evidence]:
    for xid, since in gpu.xids:
        if xid in rules.xids_fatal or xid in rules.xids_degraded:
            description = f"GPU {gpu.gpu} reported XID {xid}"
            yield Evidence(description=description, since=since, is_fatal=xid in rules.xids_fatal)
    if gpu.row_remap_failed_since is not None:
        description = f"GPU {gpu.gpu} failed to remap memory rows"
        yield Evidence(description=description, since=gpu.row_remap_failed_since, is_fatal=True)
    if gpu.double_bit_since is not None:
        description = f"GPU {gpu.gpu} counted uncorrectable memory errors"
        yield Evidence(description=description, since=gpu.double_bit_since, is_fatal=True)
    # Whole degrees, and the step function holds the coolest reading: above 85 is 86 at least.
    hot_since = since_at_most(gpu.negated_celsius, -(rules.celsius_max + 1e-9))
    if hot_since is not None:
        description = f"GPU {gpu.gpu} was never cooler than {-gpu.negated_celsius[0][0]} °C"
        yield Evidence(description=description, since=hot_since, is_fatal=False)
