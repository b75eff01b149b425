"""Typed reasons of decisions and of deferrals, a module per kind of decision."""

from typing import get_args

from gpu_autoscaler.model.reasons.base import Reason
from gpu_autoscaler.model.reasons.buy import BuyReason
from gpu_autoscaler.model.reasons.defer import DeferReason
from gpu_autoscaler.model.reasons.drain import DrainReason, KeepReason, ReleaseReason
from gpu_autoscaler.model.reasons.preempt import PreemptReason
from gpu_autoscaler.model.reasons.upkeep import UpkeepReason


def all_reasons() -> tuple[type[Reason], ...]:
    """Return every reason once, in the order of the unions."""
    unions = (BuyReason, DrainReason, ReleaseReason, KeepReason, DeferReason, UpkeepReason, PreemptReason)
    return tuple(dict.fromkeys(reason for union in unions for reason in get_args(union)))
