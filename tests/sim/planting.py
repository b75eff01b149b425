"""What a planted bug is."""

from collections.abc import Callable, Iterator

import msgspec
from tests.sim.searching import SEED_CHOICE

from gpu_autoscaler.core.policy.policy import ScalingPolicy


class Planted(msgspec.Struct, frozen=True):
    """One bug: in this file, this text becomes that."""

    name: str
    promise: int  # the one that it attacks
    path: str  # from the repository's root
    right: str
    wrong: str
    profile: str = SEED_CHOICE  # where it shows best; see `searching.py`
    where: Callable[[ScalingPolicy], object] | None = None  # true for policies under which it can show; None: any
    hours: float | None = None  # of a run; None: short ones, and now and then a long one
    also: tuple[tuple[str, str, str], ...] = ()  # other places of the same rule: path, right, wrong

    def changes(self) -> Iterator[tuple[str, str, str]]:
        """Yield path, right and wrong text of all that is changed."""
        yield self.path, self.right, self.wrong
        yield from self.also
