"""Why work waits though something could be bought for it: it is better bought later, or elsewhere.

Part of the reasons for what is held back (`model/reasons.py`).
"""

from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.reason import Reason


class GangIncomplete(Reason, frozen=True, kw_only=True, tag="gang_incomplete"):
    """Not every member of the gang can be placed; part of a gang is never bought."""

    job_id: JobId
    members_placed: int
    members_count: int


class GangPending(Reason, frozen=True, kw_only=True, tag="gang_pending"):
    """The job starts without this member, and what it cannot start without has no place yet."""

    job_id: JobId


class GangTimedOut(Reason, frozen=True, kw_only=True, tag="gang_timed_out"):
    """The nodes of the gang were not all usable in time: what is there of them is given back."""

    gang: str  # job/<id> or group/<namespace>/<name>
    bought_seconds: float  # since the first of them was bought
    complete_seconds_max: float


class GangBackoff(Reason, frozen=True, kw_only=True, tag="gang_backoff"):
    """Nodes for the gang were given back, as the rest could not be had: it waits before anything is bought again."""

    gang: str
    abandoned_count: int  # tries that ended so, one after the other
    retry_at: Instant


class SpotAwaited(Reason, frozen=True, kw_only=True, tag="spot_awaited"):
    """Only what is much dearer than spot can be had now, and the work is not in a hurry: it waits for spot a while."""

    offers: tuple[str, ...]  # of spot, that would do and were refused
    saving_ratio: float  # of the cheapest of them, for each member, against the cheapest that can be had
    until: Instant


class BatchWindowOpen(Reason, frozen=True, kw_only=True, tag="batch_window_open"):
    """More work is just coming: what is bought for all of it at once costs less, so the first of it waits a moment."""

    members_count: int  # that wait with it so far
    until: Instant  # at the latest


class SpotExcluded(Reason, frozen=True, kw_only=True, tag="spot_excluded"):
    """The job lost its place as often as the policy leaves it to spot: it is held, to start again on something else."""

    interruptions_count: int
    pods_remaining_count: int  # pods of it that are still there, which stop first
    until: Instant  # spot is better than no place from then on
