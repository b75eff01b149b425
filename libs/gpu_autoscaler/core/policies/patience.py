"""The policy's part about work that is better left where it is for now."""

from typing import Annotated

import msgspec
from msgspec import Meta

from gpu_autoscaler.core.policies.ranges import Seconds

Priority = Annotated[int, Meta(ge=0, le=1000)]


class ProtectionPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which work is left alone for now, although nothing forbids that it moves."""

    run_seconds_min: Annotated[
        Seconds, Meta(description="A pod runs so long before it is moved by choice. Source: our own, against thrash.")
    ] = 300.0
    ending_soon_seconds: Annotated[
        Seconds, Meta(description="Work that ends within this is let end. Source: S80, as long as work done twice.")
    ] = 900.0
    job_priority_min: Annotated[
        Priority | None,
        Meta(description="Jobs of this priority and above stay; none: all may move. Source: Decisions, priority."),
    ] = 1000
