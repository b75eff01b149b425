"""What the policy says about gangs: how long their nodes may take to come, and the waits after that failed."""

from typing import Annotated

import msgspec
from msgspec import Meta

from gpu_autoscaler.core.policies.ranges import Seconds

# What is remembered of a gang that was given up is forgotten after some hours; no wait is longer.
_Wait = Annotated[float, Meta(ge=0, le=7200)]


class GangPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All nodes of a gang are one purchase, with a deadline; after one that failed the gang waits longer each time."""

    complete_seconds_max: Annotated[
        Seconds,
        Meta(
            description="All nodes of a gang are usable so long after the first was bought, or all are given back."
            " Source: our own, twice boot_seconds_max."
        ),
    ] = 1800.0
    backoff_seconds_min: Annotated[
        _Wait, Meta(description="After the first purchase that failed nothing is bought so long. Source: our own.")
    ] = 60.0
    backoff_seconds_max: Annotated[
        _Wait, Meta(description="The wait doubles with each further one, up to this. Source: our own.")
    ] = 1800.0
