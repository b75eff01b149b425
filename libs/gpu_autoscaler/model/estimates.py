"""When a job is expected to start and what it will cost."""

from typing import Literal

import msgspec

from gpu_autoscaler.model.observed import Instant

Basis = Literal["free_capacity", "booting_nodes", "purchase", "job_completion", "reservation", "unknown"]
RunSource = Literal["request", "history", "time_limit"]


class Estimate(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """None if unknown; `why` gives the reason. One job in ten starts before the range, one in ten after it."""

    basis: Basis  # what the job is expected to start on
    why: str  # the basis of the estimate, or why it is unknown, in a sentence
    start_at: Instant | None = None  # expected start; None: unknown
    start_at_earliest: Instant | None = None  # start of the range; None: unknown
    start_at_latest: Instant | None = None  # end of the range; None: unknown
    cost_micro_usd: int | None = None  # for `run_seconds`; None: unknown
    cost_micro_usd_max: int | None = None  # for its time limit; None: unknown
    run_seconds: float | None = None  # that the cost is for: the predicted median, else the time limit; None: unknown
    run_seconds_low: float | None = None  # one in ten runs for less; None: no prediction
    run_seconds_high: float | None = None  # one in ten runs for longer; None: no prediction
    run_source: RunSource = "time_limit"  # where the run time is from: the request, similar jobs, or the time limit
    run_samples_count: int = 0  # completed jobs of the most similar group that the prediction is from
