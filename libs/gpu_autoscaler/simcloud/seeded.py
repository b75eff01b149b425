"""A fake cloud prepared for a cluster: its offers, its server, and the settings of a driver."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import msgspec

from gpu_autoscaler.simcloud.fleet_emulator import EmulatedFleet
from gpu_autoscaler.simcluster.offers import InstanceType


class SeededCloud(msgspec.Struct, frozen=True, kw_only=True):
    """One cloud before it serves."""

    fleet: EmulatedFleet
    catalog: tuple[InstanceType, ...]
    settings: msgspec.Struct  # of the driver
    serving: Callable[[int], AbstractAsyncContextManager[str]]  # on this port; yields the URL
