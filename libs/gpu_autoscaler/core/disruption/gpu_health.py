"""What telemetry proves against a node's GPUs. Evidence over a window; what is not known, or stale, proves nothing."""

from collections.abc import Iterator
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.core.policy.disruption_settings import GpuHealthPolicy
from gpu_autoscaler.core.state.telemetry_history import (
    GAP_SECONDS_MAX,
    GpuTelemetryHistory,
    NodeTelemetryHistory,
    since_at_most,
)
from gpu_autoscaler.model.observed import Instant


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, and since when."""

    description: str  # "GPU 3 reported XID 79"
    since: Instant
    is_fatal: bool  # False: the GPU still works


def is_suspect(history: NodeTelemetryHistory, rules: GpuHealthPolicy) -> bool:
    """True where a closer look may find something."""
    return history.has_errors or (history.celsius_max is not None and history.celsius_max >= rules.celsius_max)


def gpu_evidence(history: NodeTelemetryHistory, rules: GpuHealthPolicy, as_of: datetime) -> Evidence | None:
    """Return the gravest, then the longest, that has stood for long enough and still does; None: nothing."""
    if not is_suspect(history, rules) or as_of - history.seen_until > timedelta(seconds=GAP_SECONDS_MAX):
        return None
    found = [each for gpu in history.gpus for each in _findings(gpu, rules)]
    proven = [each for each in found if (as_of - each.since).total_seconds() >= rules.evidence_seconds]
    return min(proven, key=lambda each: (not each.is_fatal, each.since, each.description), default=None)


def _findings(gpu: GpuTelemetryHistory, rules: GpuHealthPolicy) -> Iterator[Evidence]:
    for xid, since in gpu.xids:
        if xid in rules.xids_fatal or xid in rules.xids_degraded:
            description = f"GPU {gpu.gpu} reported XID {xid}"
            yield Evidence(description=description, since=since, is_fatal=xid in rules.xids_fatal)
    if gpu.row_remap_failed_since is not None:
        description = f"GPU {gpu.gpu} could not put broken memory rows aside"
        yield Evidence(description=description, since=gpu.row_remap_failed_since, is_fatal=True)
    if gpu.double_bit_since is not None:
        description = f"GPU {gpu.gpu} counted memory errors that nothing corrects"
        yield Evidence(description=description, since=gpu.double_bit_since, is_fatal=True)
    # Whole degrees, and the stairs hold what was never cooler: above 85 is 86 at least.
    hot_since = since_at_most(gpu.negated_celsius, -(rules.celsius_max + 1e-9))
    if hot_since is not None:
        description = f"GPU {gpu.gpu} was never cooler than {-gpu.negated_celsius[0][0]} °C"
        yield Evidence(description=description, since=hot_since, is_fatal=False)
