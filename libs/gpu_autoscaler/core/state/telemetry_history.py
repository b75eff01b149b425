"""Telemetry history: for each level, since when no window of the GPUs of a node was above it. Folded from summaries.

A gap in telemetry ends the history: silence proves nothing.
"""

from collections.abc import Callable
from datetime import timedelta
from math import ceil

import msgspec

from gpu_autoscaler.events.gpu import GpuNodeSummarized, GpuSummary
from gpu_autoscaler.model.observed import Instant

# A single lost window is tolerated; more in a row are a gap. Source: project default.
GAP_SECONDS_MAX = 150.0
# Maximum number of different Xids per GPU; an unhealthy GPU repeats a few. Source: project default.
XIDS_COUNT_MAX = 16

StepFunction = tuple[tuple[int, Instant], ...]  # (level, since when no window was above it), ascending levels


class GpuTelemetryHistory(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """History of one GPU without gaps, up to the last window."""

    gpu: str
    gpu_uuid: str
    pod: str | None = None  # the holder; utilization restarts with each holder
    utilization: StepFunction = ()  # percent, rounded up
    negated_celsius: StepFunction = ()  # rounded up: at most -85 means never cooler than 85
    xids: tuple[tuple[int, Instant], ...] = ()  # Xids since the driver was loaded, with first occurrence
    row_remap_failed_since: Instant | None = None
    double_bit_since: Instant | None = None

    @property
    def has_errors(self) -> bool:
        """True if the driver reported any error of the GPU."""
        return bool(self.xids or self.row_remap_failed_since or self.double_bit_since)


class NodeTelemetryHistory(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """History of the GPUs of a node without gaps, up to the last window."""

    seen_until: Instant
    changed_at: Instant  # end of the last window whose figures differ from the previous ones
    busy_ratio: float | None  # mean of all GPUs in the last window; None: unknown for some
    celsius_max: int | None  # highest minimum temperature of a GPU in the last window
    has_errors: bool = False  # the driver reported an error of some GPU
    utilization: StepFunction = ()  # percent, mean of all GPUs, rounded up
    gpus: tuple[GpuTelemetryHistory, ...] = ()


def since_at_most(steps: StepFunction, level: float) -> Instant | None:
    """Return since when no window was above the level; None: the last one was, or it is unknown."""
    return next((since for known, since in reversed(steps) if known <= level), None)


def extend_telemetry_history(
    known: NodeTelemetryHistory | None, before: GpuNodeSummarized | None, window: GpuNodeSummarized
) -> NodeTelemetryHistory | None:
    """Return the history with one more window; `before` is the previous window. An empty window changes nothing."""
    if not window.gpus:
        return known
    began_at = window.window_started_at
    ended_at = began_at + timedelta(seconds=window.window_seconds)
    is_broken = known is None or began_at - known.seen_until > timedelta(seconds=GAP_SECONDS_MAX)
    known_gpus = {} if known is None else {(gpu.gpu, gpu.gpu_uuid): gpu for gpu in known.gpus}
    gpus = tuple(
        _extend_gpu(known_gpus.get((gpu.gpu, gpu.gpu_uuid)), gpu, began_at, is_broken=is_broken) for gpu in window.gpus
    )
    means = [gpu.utilization_ratio_mean for gpu in window.gpus if gpu.utilization_ratio_mean is not None]
    busy_ratio = round(sum(means) / len(means), 6) if len(means) == len(window.gpus) else None
    minimums = [gpu.temperature_celsius_min for gpu in window.gpus if gpu.temperature_celsius_min is not None]
    is_same = known is not None and before is not None and _figures(before) == _figures(window)
    return NodeTelemetryHistory(
        seen_until=ended_at,
        changed_at=known.changed_at if known is not None and is_same else ended_at,
        busy_ratio=busy_ratio,
        celsius_max=int(max(minimums)) if minimums else None,
        has_errors=any(gpu.has_errors for gpu in gpus),
        utilization=_add_step(() if known is None or is_broken else known.utilization, _percent(busy_ratio), began_at),
        gpus=gpus,
    )


def _extend_gpu(
    known: GpuTelemetryHistory | None, seen: GpuSummary, at: Instant, *, is_broken: bool
) -> GpuTelemetryHistory:
    has_new_holder = known is not None and known.pod != seen.pod
    utilization = () if known is None or is_broken or has_new_holder else known.utilization
    negated_celsius = () if known is None or is_broken else known.negated_celsius
    degrees = seen.temperature_celsius_min
    return GpuTelemetryHistory(
        gpu=seen.gpu,
        gpu_uuid=seen.gpu_uuid,
        pod=seen.pod,
        utilization=_add_step(utilization, _percent(seen.utilization_ratio_mean), at),
        negated_celsius=_add_step(negated_celsius, None if degrees is None else ceil(-degrees), at),
        xids=_xids_after(() if known is None else known.xids, seen, at),
        row_remap_failed_since=_since(known, lambda gpu: gpu.row_remap_failed_since, seen.is_row_remap_failed, at),
        double_bit_since=_since(
            known,
            lambda gpu: gpu.double_bit_since,
            None if seen.ecc_double_bit_count is None else seen.ecc_double_bit_count > 0,
            at,
        ),
    )


def _add_step(steps: StepFunction, level: int | None, at: Instant) -> StepFunction:
    """Return the step function after one more window of this level; empty if the level is unknown."""
    if level is None:
        return ()
    below = 0
    while below < len(steps) and steps[below][0] <= level:
        below += 1
    if below == 1 and steps[0][0] == level:
        return steps
    since = steps[below - 1][1] if below else at
    return ((level, since), *steps[below:])


def _xids_after(
    known: tuple[tuple[int, Instant], ...], seen: GpuSummary, at: Instant
) -> tuple[tuple[int, Instant], ...]:
    """Return the Xids after one more window. The gauge shows only the last Xid, so a later application error hides that
    of the hardware. Xids are kept until the gauge is zero, which it is after the driver is reloaded."""
    if seen.xid_last == 0:
        return ()
    named = {xid for xid, _ in known}
    new = tuple((xid, at) for xid in seen.xids if xid not in named)
    return (*known, *new)[:XIDS_COUNT_MAX] if new else known


def _since(
    known: GpuTelemetryHistory | None,
    field: Callable[[GpuTelemetryHistory], Instant | None],
    holds: bool | None,  # noqa: FBT001 - three values
    at: Instant,
) -> Instant | None:
    """Return since when the condition holds; an unknown condition changes nothing."""
    before = None if known is None else field(known)
    if holds is None:
        return before
    return (before or at) if holds else None


def _percent(ratio: float | None) -> int | None:
    return None if ratio is None else ceil(round(ratio * 100, 6))


def _figures(window: GpuNodeSummarized) -> list[tuple[object, ...]]:
    return [
        (
            gpu.gpu_uuid,
            gpu.utilization_ratio_min,
            gpu.utilization_ratio_mean,
            gpu.utilization_ratio_max,
            gpu.memory_used_bytes_max,
            gpu.temperature_celsius_max,
            gpu.power_watts_mean,
        )
        for gpu in window.gpus
    ]
