"""How long jobs are expected to run: predictions with quantiles, for new and for running work.

Sources, in this order: `expected_duration_seconds` of the request, corrected by how such requests of the project came
true; the history of similar jobs (`core/state/duration_history.py`). A prediction never exceeds the job's time limit,
which stays the only bound that rules may rely on. It is None where nothing is known, where predictions for the project
were wrong lately, and where the work has outlived its prediction by far. None is unknown, not short.
"""

import math
from datetime import datetime
from statistics import NormalDist, median
from typing import Literal

import msgspec

from gpu_autoscaler.core.state.duration_history import (
    HIGH,
    LOW,
    MEDIAN,
    LogQuantiles,
    group_keys,
    history_quantiles,
    shrunk,
)
from gpu_autoscaler.core.state.state import ClusterState, JobRecord
from gpu_autoscaler.model.format import counted, duration
from gpu_autoscaler.model.jobs import JobSpec

# Predictions from the history are silenced for a project while half of its last errors are above this factor.
ERROR_RATIO_MAX = 3.0
ERRORS_COUNT_MIN = 8  # fewer do not silence. Project default.
# Of a thousand jobs with this prediction fewer would still run: the prediction is wrong.
OUTLIVED_RATIO = 0.999
_REQUESTED = LogQuantiles(-math.log(2.0), 0.0, math.log(2.0), 0)  # of requests that nothing is known about
_SPREAD_MIN = 0.05  # of a logarithm; equal samples are no certainty
_STANDARD = NormalDist()
_HIGH_DEVIATIONS = _STANDARD.inv_cdf(HIGH)


class Duration(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Seconds of cluster time: one in ten takes less than `low_seconds`, one in ten more than `high_seconds`."""

    low_seconds: float
    median_seconds: float
    high_seconds: float
    source: Literal["request", "history"]
    samples_count: int  # completed jobs of the most similar group; 0: the request alone

    @property
    def mean_seconds(self) -> float:
        """The expected value by Swanson's rule (A. Hurst, G. C. Brown, R. I. Swanson, "Swanson's 30-40-30 rule", 2000).
        It exceeds the median: work may take very long, and not less than nothing."""
        return 0.3 * self.low_seconds + 0.4 * self.median_seconds + 0.3 * self.high_seconds

    def sentence(self, *, from_now: bool = False) -> str:
        """Return where the prediction is from, and its range; `from_now`: it is what remains."""
        jobs = f"{counted(self.samples_count, 'completed job')} like it"
        source = jobs
        if self.source == "request":
            source = "the request" if not self.samples_count else f"the request, corrected by {jobs}"
        low, middle, high = map(duration, (self.low_seconds, self.median_seconds, self.high_seconds))
        return f"Expected to {'end in' if from_now else 'take'} {middle} (8 in 10 times {low} to {high}), by {source}."


class Durations:
    """Predictions from one state. Similar jobs share the arithmetic, so make one object for many jobs."""

    def __init__(self, state: ClusterState) -> None:
        self._jobs, self._groups = state.jobs, state.durations
        self._histories: dict[str, LogQuantiles | None] = {}  # by the most similar group

    def predicted(self, spec: JobSpec) -> Duration | None:
        """Return how long an attempt of the job is expected to run from its start; None: unknown."""
        return self.remaining(spec, 0.0)

    def remaining(self, spec: JobSpec, elapsed_seconds: float) -> Duration | None:
        """Return how much longer the job is expected to run after it has run for so long; None: unknown.

        Of the expected run times those are left that are longer, so the expectation grows with work that outlives it.
        """
        source: Literal["request", "history"] = "history" if spec.expected_duration_seconds is None else "request"
        quantiles = self._history(spec) if spec.expected_duration_seconds is None else self._requested(spec)
        left = None if quantiles is None else _left(quantiles, elapsed_seconds)
        limit_seconds = spec.duration_seconds_max - elapsed_seconds
        if quantiles is None or left is None or limit_seconds <= 0:
            return None
        # Whole seconds: logarithms differ in their last digit between machines, and equal states give equal figures.
        low, middle, high = (min(float(round(seconds)), limit_seconds) for seconds in left)
        return Duration(
            low_seconds=low,
            median_seconds=middle,
            high_seconds=high,
            source=source,
            samples_count=quantiles.samples_count,
        )

    def of_job(self, job: JobRecord, as_of: datetime) -> Duration | None:
        """Return how much longer a running job is expected to run, a waiting one from its start; None: unknown."""
        if job.queued is None or job.finished is not None:
            return None
        started_at = None if job.started is None else job.started.started_at
        if started_at is None or (job.preempted is not None and job.preempted.preempted_at >= started_at):
            return self.predicted(job.queued.spec)
        return self.remaining(job.queued.spec, max(0.0, (as_of - started_at).total_seconds()))

    def _history(self, spec: JobSpec) -> LogQuantiles | None:
        keys = group_keys(spec)
        if keys[-1] not in self._histories:
            project = self._groups.get(keys[1])
            errors = () if project is None else project.log_errors
            is_silenced = len(errors) >= ERRORS_COUNT_MIN and median(errors) > math.log(ERROR_RATIO_MAX)
            self._histories[keys[-1]] = None if is_silenced else history_quantiles(self._groups, spec)
        return self._histories[keys[-1]]

    def _requested(self, spec: JobSpec) -> LogQuantiles:
        assert spec.expected_duration_seconds is not None, "the request names it"  # noqa: S101 - by the caller
        groups = [self._groups[key].expectation_ratios for key in group_keys(spec)[1:] if key in self._groups]
        ratios, log_seconds = shrunk(groups, _REQUESTED), math.log(spec.expected_duration_seconds)
        low, middle, high = (log_seconds + ratio for ratio in ratios[:3])
        return LogQuantiles(low, middle, high, ratios.samples_count)


def _left(quantiles: LogQuantiles, elapsed_seconds: float) -> tuple[float, float, float] | None:
    """Return quantiles of the remaining seconds, with the run time log-normal; None: it was outlived by far."""
    if elapsed_seconds <= 0:
        return math.exp(quantiles.low), math.exp(quantiles.median), math.exp(quantiles.high)
    spread = max(_SPREAD_MIN, (quantiles.high - quantiles.low) / (2 * _HIGH_DEVIATIONS))
    run = NormalDist(quantiles.median, spread)
    gone = run.cdf(math.log(elapsed_seconds))
    if gone > OUTLIVED_RATIO:
        return None
    low, middle, high = (
        max(0.0, math.exp(run.inv_cdf(max(gone + ratio * (1 - gone), 1e-12))) - elapsed_seconds)
        for ratio in (LOW, MEDIAN, HIGH)
    )
    return low, middle, high
