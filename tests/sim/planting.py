"""What a planted bug is."""

import msgspec
from tests.sim.searching import SWARM


class Planted(msgspec.Struct, frozen=True):
    """One bug: in this file, this text becomes that."""

    name: str
    promise: int  # the one that it attacks
    path: str  # from the repository's root
    right: str
    wrong: str
    world: str = SWARM  # where it shows best; see `searching.py`
