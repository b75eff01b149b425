"""What the plan check refused lately: set aside with an exponential back-off, and forgotten an hour after its end."""

from datetime import datetime, timedelta

from gpu_autoscaler.core.state.state import ClusterState, RejectionRecord
from gpu_autoscaler.model.reasons.defer import PlanRejected

# Source of the figures: our own. A state that made the planner err has usually changed within minutes.
BACKOFF_SECONDS_FIRST = 60.0
BACKOFF_SECONDS_MAX = 3600.0
REJECTIONS_COUNT_MAX = 4096  # subjects in the state, and in one plan
_FORGOTTEN = timedelta(hours=1)


def is_forgotten(record: RejectionRecord, now: datetime) -> bool:
    """Return whether the record no longer counts, not even for the back-off."""
    return now - record.retry_at > _FORGOTTEN


def set_aside_now(state: ClusterState, as_of: datetime) -> dict[str, PlanRejected]:
    """Return what is set aside at this instant, by subject."""
    return {
        subject: PlanRejected(
            violation=record.violation, attempts_count=record.attempts_count, retry_at=record.retry_at
        )
        for subject, record in state.rejections.items()
        if as_of < record.retry_at
    }


def next_rejection(state: ClusterState, subject: str, violation: str, as_of: datetime) -> PlanRejected:
    """Return the reason for setting a subject aside now: each attempt in a row doubles the wait."""
    known = state.rejections.get(subject)
    attempts_count = 1 if known is None or is_forgotten(known, as_of) else known.attempts_count + 1
    seconds = min(BACKOFF_SECONDS_FIRST * 2.0 ** min(attempts_count - 1, 32), BACKOFF_SECONDS_MAX)
    return PlanRejected(violation=violation, attempts_count=attempts_count, retry_at=as_of + timedelta(seconds=seconds))
