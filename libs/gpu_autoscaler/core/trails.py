"""For how long telemetry has said the same of a node's GPUs. Folded from summaries, one window after the other.

Which figures are too high or too low is the policy's to say, so what is kept are stairs: for each level that figures
came to, since when none was above it. What was not seen breaks off a trail: silence is no evidence of anything.
"""

from collections.abc import Callable
from datetime import timedelta
from math import ceil

import msgspec

from gpu_autoscaler.events.gpu import GpuNodeSummarised, GpuSummary
from gpu_autoscaler.model.observed import Instant

# A window that is lost now and then is none of the GPU's doing; more in a row is silence. Source: our own.
GAP_SECONDS_MAX = 150.0
# Different errors of one GPU that are remembered. Source: our own, a bound; a sick GPU repeats a few.
XIDS_COUNT_MAX = 16

StepFunction = tuple[tuple[int, Instant], ...]  # (level, since when no window was above it), both going up and back


class GpuTelemetryHistory(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What one GPU did without a break, up to the last window."""

    gpu: str
    gpu_uuid: str
    pod: str | None = None  # who held it; `busy` begins anew with each holder
    busy: StepFunction = ()  # percent of the time, rounded up
    cool: StepFunction = ()  # degrees Celsius below zero, rounded up: at most -85 means that it was never cooler than 85
    xids: tuple[tuple[int, Instant], ...] = ()  # errors since the driver was loaded, and when each was first named
    row_remap_failed_since: Instant | None = None
    double_bit_since: Instant | None = None

    @property
    def has_marks(self) -> bool:
        """True for a GPU that the driver has reported something of."""
        return bool(self.xids or self.row_remap_failed_since or self.double_bit_since)


class NodeTelemetryHistory(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What a node's GPUs did without a break, up to the last window that was answered."""

    seen_until: Instant
    changed_at: Instant  # end of the last window whose figures were not just those of the window before
    busy_ratio: float | None  # mean of all GPUs in the last window; None: not known of all
    celsius_max: int | None  # of the GPU that was coolest at its hottest; a first look at all of them
    has_marks: bool = False  # the driver has reported something of some GPU
    busy: StepFunction = ()  # percent of the time, mean of all GPUs, rounded up
    gpus: tuple[GpuTelemetryHistory, ...] = ()


def since_at_most(stairs: StepFunction, level: float) -> Instant | None:
    """Return since when no window was above the level; None: the last one was, or nobody knows."""
    return next((since for known, since in reversed(stairs) if known <= level), None)


def extend_telemetry_history(
    known: NodeTelemetryHistory | None, before: GpuNodeSummarised | None, window: GpuNodeSummarised
) -> NodeTelemetryHistory | None:
    """Return the trail with one more window; `before` is the window that came before it. Silence leaves it as it is."""
    if not window.gpus:
        return known
    began_at = window.window_started_at
    ended_at = began_at + timedelta(seconds=window.window_seconds)
    is_broken = known is None or began_at - known.seen_until > timedelta(seconds=GAP_SECONDS_MAX)
    trails = {} if known is None else {(each.gpu, each.gpu_uuid): each for each in known.gpus}
    gpus = tuple(_gpu_after(trails.get((each.gpu, each.gpu_uuid)), each, began_at, is_broken) for each in window.gpus)
    means = [each.utilization_ratio_mean for each in window.gpus if each.utilization_ratio_mean is not None]
    busy_ratio = round(sum(means) / len(means), 6) if len(means) == len(window.gpus) else None
    coolest = [each.temperature_celsius_min for each in window.gpus if each.temperature_celsius_min is not None]
    is_same = known is not None and before is not None and _figures(before) == _figures(window)
    return NodeTelemetryHistory(
        seen_until=ended_at,
        changed_at=known.changed_at if known is not None and is_same else ended_at,
        busy_ratio=busy_ratio,
        celsius_max=int(max(coolest)) if coolest else None,
        has_marks=any(each.has_marks for each in gpus),
        busy=_climbed(() if known is None or is_broken else known.busy, _percent(busy_ratio), began_at),
        gpus=gpus,
    )


def _gpu_after(known: GpuTelemetryHistory | None, seen: GpuSummary, at: Instant, is_broken: bool) -> GpuTelemetryHistory:  # noqa: FBT001 - said at its one caller
    is_other_holder = known is not None and known.pod != seen.pod
    busy = () if known is None or is_broken or is_other_holder else known.busy
    cool = () if known is None or is_broken else known.cool
    degrees = seen.temperature_celsius_min
    return GpuTelemetryHistory(
        gpu=seen.gpu,
        gpu_uuid=seen.gpu_uuid,
        pod=seen.pod,
        busy=_climbed(busy, _percent(seen.utilization_ratio_mean), at),
        cool=_climbed(cool, None if degrees is None else ceil(-degrees), at),
        xids=_xids_after(() if known is None else known.xids, seen, at),
        row_remap_failed_since=_since(known, lambda one: one.row_remap_failed_since, seen.is_row_remap_failed, at),
        double_bit_since=_since(
            known,
            lambda one: one.double_bit_since,
            None if seen.ecc_double_bit_count is None else seen.ecc_double_bit_count > 0,
            at,
        ),
    )


def _climbed(stairs: StepFunction, level: int | None, at: Instant) -> StepFunction:
    """The stairs after one more window of this level; nothing where it is not known."""
    if level is None:
        return ()
    below = 0
    while below < len(stairs) and stairs[below][0] <= level:
        below += 1
    if below == 1 and stairs[0][0] == level:
        return stairs
    since = stairs[below - 1][1] if below else at
    return ((level, since), *stairs[below:])


def _xids_after(
    known: tuple[tuple[int, Instant], ...], seen: GpuSummary, at: Instant
) -> tuple[tuple[int, Instant], ...]:
    """The gauge shows the last error alone, and keeps it: one of an application covers the broken GPU's, which is
    remembered here until the gauge is at zero, as it is when the driver was loaded again."""
    if seen.xid_last == 0:
        return ()
    named = {xid for xid, _ in known}
    new = tuple((xid, at) for xid in seen.xids if xid not in named)
    return (*known, *new)[:XIDS_COUNT_MAX] if new else known


def _since(
    known: GpuTelemetryHistory | None,
    of: Callable[[GpuTelemetryHistory], Instant | None],
    is_so: bool | None,  # noqa: FBT001 - three values
    at: Instant,
) -> Instant | None:
    """Since when it is so; what is not known leaves it as it was."""
    before = None if known is None else of(known)
    if is_so is None:
        return before
    return (before or at) if is_so else None


def _percent(ratio: float | None) -> int | None:
    return None if ratio is None else ceil(round(ratio * 100, 6))


def _figures(window: GpuNodeSummarised) -> list[tuple[object, ...]]:
    return [
        (
            each.gpu_uuid,
            each.utilization_ratio_min,
            each.utilization_ratio_mean,
            each.utilization_ratio_max,
            each.memory_used_bytes_max,
            each.temperature_celsius_max,
            each.power_watts_mean,
        )
        for each in window.gpus
    ]
