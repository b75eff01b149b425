"""Why a purchase was given back before it was of any use. Named in `reasons.py`, like all reasons."""

from typing import Literal

from gpu_autoscaler.model.reason import Reason

# What a node does on its way to being usable, in this order.
BootStep = Literal["node", "kubelet", "gpus", "startup_taint", "unknown"]


class BootTimedOut(Reason, frozen=True, kw_only=True, tag="boot_timed_out"):
    """Bought, but not usable by its deadline."""

    booting_seconds: float
    boot_seconds_max: float
    missing_step: BootStep = "unknown"  # the first step that never came
    detail: str = ""  # of that step: what is there instead
