"""What a planted bug is."""

from collections.abc import Callable

import msgspec
from tests.sim.searching import SWARM

from gpu_autoscaler.core.policy import ScalingPolicy


class Planted(msgspec.Struct, frozen=True):
    """One bug: in this file, this text becomes that."""

    name: str
    promise: int  # the one that it attacks
    path: str  # from the repository's root
    right: str
    wrong: str
    world: str = SWARM  # where it shows best; see `searching.py`
    where: Callable[[ScalingPolicy], object] | None = None  # true for policies under which it can show; None: any
