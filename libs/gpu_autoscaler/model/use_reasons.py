"""Reasons about how busy GPUs are. Part of `model/reasons.py`, which has the unions."""

from typing import Literal

from gpu_autoscaler.model.reason import Reason

TelemetryFault = Literal["silent", "frozen", "corrupt", "all_zero"]


class UtilizationHigh(Reason, frozen=True, kw_only=True, tag="utilization_high"):
    """GPUs are used more than the policy likes, and it wants a node for that alone."""

    utilization_ratio: float
    utilization_ratio_max: float


class TelemetryUnreliable(Reason, frozen=True, kw_only=True, tag="telemetry_unreliable"):
    """How busy GPUs are cannot be told: nothing is done for it."""

    fault: TelemetryFault
    nodes_count: int  # that are so
    gpu_nodes_count: int


class UtilizationUnconfirmed(Reason, frozen=True, kw_only=True, tag="utilization_unconfirmed"):
    """GPUs are used much, but nobody waits and no forecast is sure: a figure alone buys no node."""

    utilization_ratio: float
    utilization_ratio_max: float
