"""What a baseline sees, and what it may do."""

from collections.abc import Iterable
from typing import Protocol

import msgspec

from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.sim.baselines.sight import Sight


class Buy(msgspec.Struct, frozen=True, kw_only=True):
    """Buy one node. `token` is the node's name for whoever buys it, and is never used twice."""

    offer: Offer
    token: str


class Leave(msgspec.Struct, frozen=True, kw_only=True):
    """Cordon the node, evict its pods, end its machine when it is empty."""

    token: str
    seconds_max: float | None = None  # after which the node stays after all; None: until it is empty
    is_forced: bool = False  # the pods go whatever their budgets say


class Stay(msgspec.Struct, frozen=True, kw_only=True):
    """Let the node take pods again."""

    token: str


Act = Buy | Leave | Stay


class Baseline(Protocol):
    """A way to size a cluster."""

    name: str
    scan_seconds: float  # between two looks

    def look(self, sight: Sight) -> Iterable[Act]:
        """Return what is to be done now, by what can be seen now."""
        ...
