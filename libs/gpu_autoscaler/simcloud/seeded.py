"""A fake cloud that stands ready for a cluster: what is sold there, who serves it, and how a driver is led to it."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import msgspec

from gpu_autoscaler.simcloud.fleet_emulator import Books
from gpu_autoscaler.simcluster.offers import InstanceType


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """One cloud, before it serves."""

    books: Books
    catalogue: tuple[InstanceType, ...]
    settings: msgspec.Struct  # the driver's own
    serving: Callable[[int], AbstractAsyncContextManager[str]]  # on this port; yields the address
