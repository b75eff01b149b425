"""The policy's part about work that comes in a burst: how long the first of it waits for the rest."""

from typing import Annotated

import msgspec
from msgspec import Meta

from gpu_autoscaler.core.policies.ranges import Count

# Longer than nodes take to boot nothing is gained any more by buying for all at once.
_Pause = Annotated[float, Meta(ge=0, le=60)]


class BatchingPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What comes in pieces and is bought for in pieces costs more nodes, and dearer ones, than what is bought whole."""

    wait_seconds_max: Annotated[
        _Pause,
        Meta(
            description="Work of a burst waits so long at most for the rest of it; 0: never. Source: Karpenter's"
            " BATCH_MAX_DURATION, and the scan interval of cluster-autoscaler."
        ),
    ] = 10.0
    quiet_seconds: Annotated[
        _Pause,
        Meta(
            description="A burst is over when nothing came for so long. Source: Karpenter's BATCH_IDLE_DURATION, and"
            " two seconds more, as Kubernetes tells whole seconds alone and a busy one tells them late."
        ),
    ] = 3.0
    members_count_min: Annotated[
        Count,
        Meta(
            description="So many within quiet_seconds are a burst, though Kubernetes has spoken of each of them."
            " Source: bench case BURST."
        ),
    ] = 20
