"""The interface of a baseline: its observation and its actions."""

from collections.abc import Iterable
from typing import Protocol

import msgspec

from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.sim.scoring.baselines.observation import Observation


class Buy(msgspec.Struct, frozen=True, kw_only=True):
    """Buy one node. `token` identifies the node and is never reused."""

    offer: Offer
    token: str


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """Cordon the node, evict its pods, terminate its machine when it is empty."""

    token: str
    seconds_max: float | None = None  # after which the drain is canceled; None: no limit
    is_forced: bool = False  # delete pods regardless of their budgets


class Uncordon(msgspec.Struct, frozen=True, kw_only=True):
    """Uncordon the node and cancel its drain."""

    token: str


Action = Buy | Drain | Uncordon


class Baseline(Protocol):
    """A method of sizing a cluster."""

    name: str
    scan_seconds: float  # between steps

    def step(self, observation: Observation) -> Iterable[Action]:
        """Return the actions for this observation."""
        ...
