"""Why a node makes way that the cloud only hints about. Part of the reasons for which nodes go (`model/reasons.py`)."""

from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.reason import Reason


class RebalanceRecommended(Reason, frozen=True, kw_only=True, tag="rebalance_recommended"):
    """The cloud says that it is likelier to take the node, and all of its work is cheap to move."""

    noticed_at: Instant
