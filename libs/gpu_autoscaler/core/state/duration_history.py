"""How long completed jobs ran, by groups of ever more similar jobs. Folded from JOB alone, when a job has completed.

The groups of a job, each the parent of the next: all jobs, its project, its workload (image or pod template), its size
(GPUs and models), its name without numbers. Quantiles of a group are shrunk towards those of its parent: n samples
count n/(n + SHRINK_SAMPLES_COUNT). `core/demand/durations.py` predicts from them.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gpu_autoscaler.core.state.state import DurationGroup, JobRecord
from gpu_autoscaler.core.state.tables import Batch
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import derive_id
from gpu_autoscaler.model.jobs import JobSpec

SAMPLES_COUNT_MAX = 32  # of a group: the last ones, so that a changed workload is learned. Project default.
GROUPS_COUNT_MAX = 4096  # about 3 MiB; the one whose last job completed first is forgotten. Project default.
SHRINK_SAMPLES_COUNT = 2.0  # samples of a group that count as much as its parent. Project default.
SPREAD_RATIO = 3.0  # of a run time whose spread is unknown: high over median, and median over low. Project default.
LOW, MEDIAN, HIGH = 0.1, 0.5, 0.9
_WORKLOAD_LENGTH_MAX = 64  # a longer image becomes a digest
_NAME_LENGTH_MAX = 64
_NUMBER = re.compile(r"[-_.]?(?:[0-9a-f]{8,}|\d+)")  # of a run, as in train-17 or train-5d41402a


class LogQuantiles(NamedTuple):
    """Natural logarithms of quantiles LOW, MEDIAN and HIGH, and how many samples they are from."""

    low: float
    median: float
    high: float
    samples_count: int


def group_keys(spec: JobSpec) -> tuple[str, ...]:
    """Return the groups of a job, the most general first."""
    image = spec.image if len(spec.image) <= _WORKLOAD_LENGTH_MAX else derive_id("image", spec.image)
    gpus_count = spec.member_count * spec.member_resources.gpu_count
    size = f"{1 << (gpus_count - 1).bit_length() if gpus_count else 0}x{','.join(spec.models) or 'any'}"
    name = _NUMBER.sub("#", spec.job_name[:_NAME_LENGTH_MAX])
    parts = ("all", spec.project_id, spec.template_digest or image, size, name)
    return tuple(" ".join(parts[: count + 1]) for count in range(len(parts)))


def run_seconds_of(job: JobRecord) -> float | None:
    """Return how long the work of a completed job took; None: unknown, or its last attempt ran only a part of it."""
    queued, started, finished = job.queued, job.started, job.finished
    if queued is None or started is None or finished is None or finished.outcome != "completed":
        return None
    if job.preempted is not None and labels.CHECKPOINTED_AT in queued.spec.pod_annotations:
        return None
    seconds = (finished.finished_at - started.started_at).total_seconds()
    return seconds if seconds > 0 else None


def history_quantiles(groups: Mapping[str, DurationGroup], spec: JobSpec) -> LogQuantiles | None:
    """Return the run time of the job by its groups, in log seconds; None: no job of its project has completed."""
    keys = group_keys(spec)
    if keys[1] not in groups:
        return None
    samples = [groups[key].run_seconds for key in keys if key in groups]
    center, spread = _quantile(sorted(map(math.log, samples[0])), MEDIAN), math.log(SPREAD_RATIO)
    return shrunk(samples, LogQuantiles(center - spread, center, center + spread, 0))


def shrunk(groups: Iterable[Iterable[float]], parent: LogQuantiles) -> LogQuantiles:
    """Return the quantiles of the last group, each shrunk towards those before; the first towards the `parent`.

    They are between the smallest and the largest of all quantiles involved, and ordered.
    """
    for group in groups:
        logs = sorted(map(math.log, group))
        if not logs:
            continue
        weight = len(logs) / (len(logs) + SHRINK_SAMPLES_COUNT)
        low, median, high = (
            weight * _quantile(logs, ratio) + (1 - weight) * before
            for ratio, before in zip((LOW, MEDIAN, HIGH), parent[:3], strict=True)
        )
        parent = LogQuantiles(low, median, high, len(logs))
    return parent


def _quantile(ordered: list[float], ratio: float) -> float:
    """Return the quantile of ascending values, interpolated."""
    place = ratio * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def fold_duration(batch: Batch, before: JobRecord, after: JobRecord) -> None:
    """Add the run time of a job that has completed between these two records. Repeats find it completed."""
    seconds = run_seconds_of(after)
    if seconds is None or run_seconds_of(before) is not None or after.queued is None or after.finished is None:
        return
    spec, table, at = after.queued.spec, batch.durations, after.finished.finished_at
    expected, foreseen = spec.expected_duration_seconds, history_quantiles(table.now, spec)
    ratio = None if expected is None else seconds / expected
    error = None if foreseen is None else abs(math.log(seconds) - foreseen.median)
    for key in group_keys(spec):
        known = table.get(key) or DurationGroup(last_at=at)
        group = DurationGroup(
            run_seconds=_with(known.run_seconds, seconds),
            expectation_ratios=_with(known.expectation_ratios, ratio),
            log_errors=_with(known.log_errors, error),
            last_at=max(at, known.last_at),
        )
        table.set(key, group)
    if len(table.now) > GROUPS_COUNT_MAX:
        # Of one instant the most specific goes first: a parent is never forgotten before its groups.
        groups = sorted(table.now, key=lambda key: (table.now[key].last_at, -len(key), key))
        for key in groups[: len(groups) - GROUPS_COUNT_MAX]:
            table.remove(key)


def _with(samples: tuple[float, ...], sample: float | None) -> tuple[float, ...]:
    return samples if sample is None else (*samples, sample)[-SAMPLES_COUNT_MAX:]
