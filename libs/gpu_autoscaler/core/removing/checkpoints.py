"""What a pod says of its saved work.

The contract with jobs: a pod that can save when it is told to carries the annotation `checkpointed-at` from its start
on, empty until its first save, and puts the instant of each save there (RFC 3339). It is told by the annotation
`checkpoint-requested`, which holds the deadline, and has answered once it has saved since.
"""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from gpu_autoscaler.model import labels

# Clocks of nodes differ a little, and what was saved just before the request is as good as saved for it.
ANSWER_SECONDS_BEFORE = 5.0


def can_save(annotations: Mapping[str, str]) -> bool:
    """True for a pod that takes part: it saves when it is told to, and says so."""
    return labels.CHECKPOINTED_AT in annotations


def checkpointed_at(annotations: Mapping[str, str]) -> datetime | None:
    """Return when the pod saved last; None: never, or nobody can read what it says."""
    try:
        at = datetime.fromisoformat(annotations.get(labels.CHECKPOINTED_AT, ""))
    except ValueError:
        return None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def has_answered(annotations: Mapping[str, str], asked_at: datetime) -> bool:
    """True once the pod has saved for a request of this instant."""
    saved_at = checkpointed_at(annotations)
    return saved_at is not None and saved_at >= asked_at - timedelta(seconds=ANSWER_SECONDS_BEFORE)
