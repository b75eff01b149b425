"""The type of a planted bug."""

from collections.abc import Callable, Iterator

import msgspec
from tests.sim.searching import SEED_CHOICE

from gpu_autoscaler.core.policy.policy import ScalingPolicy


class Planted(msgspec.Struct, frozen=True):
    """One bug: this text of this file is replaced."""

    name: str
    promise: int  # the one that it attacks, see `mutants_page.py`
    path: str  # relative to the repository root
    right: str
    wrong: str
    profile: str = SEED_CHOICE  # where it shows best, see `searching.py`
    where: Callable[[ScalingPolicy], object] | None = None  # true for policies under which it can show; None: all
    hours: float | None = None  # of a run; None: short ones and some long ones
    also: tuple[tuple[str, str, str], ...] = ()  # more changes of the same rule: path, right, wrong

    def changes(self) -> Iterator[tuple[str, str, str]]:
        """Yield path, right and wrong text of all changes."""
        yield self.path, self.right, self.wrong
        yield from self.also
