"""When a job is expected to start and what it is to cost, with how that is known."""

from typing import Literal

import msgspec

from gpu_autoscaler.model.observed import Instant

Basis = Literal["room", "nodes_coming", "to_be_bought", "work_ending", "unknown"]


class Estimate(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """None is unknown: `why` says for what reason. A tenth of such jobs starts before the range, a tenth after it."""

    basis: Basis
    why: str  # what it is made of, or why it cannot be told, in a sentence
    start_at: Instant | None = None
    start_at_earliest: Instant | None = None
    start_at_latest: Instant | None = None
    cost_micro_usd: int | None = None  # for as long as jobs of its name ran lately, else for the longest it may run
    cost_micro_usd_max: int | None = None  # for the longest it may run
    run_seconds: float | None = None  # that the cost was reckoned for
