"""Why work waits although capacity could be bought for it: a later or another purchase is better."""

from gpu_autoscaler.model.format import counted, duration, instant, listed, percent, subject_name
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.reasons.base import Reason


class CapacityExpected(Reason, frozen=True, kw_only=True, tag="capacity_expected"):
    """A node that is ordered or booting, or capacity about to be free, will take this."""

    node: str  # node name, or action id of the order
    expected_at: Instant | None  # when it will be usable; None: unknown

    def sentence(self) -> str:
        when = "soon" if self.expected_at is None else f"about {instant(self.expected_at)}"
        return f"Capacity on node {self.node} is expected {when}."

    def remedy(self) -> str:
        return f"No action is needed: node {self.node} takes the work."


class BatchWindowOpen(Reason, frozen=True, kw_only=True, tag="batch_window_open"):
    """More work is arriving; one purchase for all of it costs less, so the first of it waits briefly."""

    members_count: int  # that wait so far
    until: Instant  # at the latest

    def sentence(self) -> str:
        waiting = counted(self.members_count, "member")
        return (
            f"More work is arriving: {waiting} so far {'waits' if self.members_count == 1 else 'wait'} until "
            f"{instant(self.until)} at the latest, as one purchase for all of it costs less."
        )

    def remedy(self) -> str:
        return (
            "No action is needed: a node is bought once no more work arrives; batching.wait_seconds_max is the limit."
        )


class GangIncomplete(Reason, frozen=True, kw_only=True, tag="gang_incomplete"):
    """Not every member of the gang has capacity; part of a gang is never bought."""

    job_id: JobId
    members_placed: int  # members with capacity
    members_count: int
    nodes_avoided_count: int = 0  # with free capacity, which a new node for less replaces

    def sentence(self) -> str:
        placed = f"{self.members_placed} of {counted(self.members_count, 'member')}"
        have = "has" if self.members_placed == 1 else "have"
        avoided = (
            f" {counted(self.nodes_avoided_count, 'node')} with free capacity would cost more to keep than a new one."
            if self.nodes_avoided_count
            else ""
        )
        return f"Only {placed} of job {self.job_id} {have} capacity; a gang starts whole or not at all.{avoided}"

    def remedy(self) -> str:
        if self.nodes_avoided_count:
            return "No action is needed: a new node is bought; new_node_wait_seconds_max limits how long the job waits."
        missing = counted(self.members_count - self.members_placed, "more member")
        return f"Wait until there is capacity for {missing}, or submit the job with fewer members."


class GangPending(Reason, frozen=True, kw_only=True, tag="gang_pending"):
    """The job starts without this elastic member, and its gang has no capacity yet."""

    job_id: JobId

    def sentence(self) -> str:
        return f"Elastic members wait for the gang of job {self.job_id}, which has no capacity yet."

    def remedy(self) -> str:
        return f"No action is needed: elastic members follow once the gang of job {self.job_id} has capacity."


class GangTimedOut(Reason, frozen=True, kw_only=True, tag="gang_timed_out"):
    """Not all nodes of the gang were usable in time; those that exist are released."""

    gang: str  # job/<id> or group/<namespace>/<name>
    bought_seconds: float  # since the first of them was bought
    complete_seconds_max: float  # limit of the policy

    def sentence(self) -> str:
        since, limit = duration(self.bought_seconds), duration(self.complete_seconds_max)
        return f"Not all nodes of {subject_name(self.gang)} are usable {since} after the purchase (limit: {limit})."

    def remedy(self) -> str:
        return (
            f"If nodes boot slower than that, raise gangs.complete_seconds_max ({duration(self.complete_seconds_max)})."
        )


class GangBackoff(Reason, frozen=True, kw_only=True, tag="gang_backoff"):
    """Nodes for the gang were released because the others could not be obtained; the next attempt waits."""

    gang: str
    abandoned_count: int  # consecutive attempts that ended so
    retry_at: Instant

    def sentence(self) -> str:
        times = "once" if self.abandoned_count == 1 else f"{self.abandoned_count} times in a row"
        return (
            f"The nodes of {subject_name(self.gang)} could not all be obtained ({times}) and were released; the next "
            f"attempt is at {instant(self.retry_at)}."
        )

    def remedy(self) -> str:
        return f"Wait until {instant(self.retry_at)}; to retry sooner, lower gangs.backoff_seconds_max."


class SpotAwaited(Reason, frozen=True, kw_only=True, tag="spot_awaited"):
    """Only capacity much more expensive than spot is available, and the work is not urgent."""

    offers: tuple[str, ...]  # the first spot offers that fit and are unavailable
    saving_ratio: float  # of the cheapest of them against the cheapest available offer, per member
    until: Instant
    offers_unlisted_count: int = 0

    def sentence(self) -> str:
        offers = listed(self.offers, unlisted_count=self.offers_unlisted_count)
        return (
            f"Spot offers ({offers}) cost {percent(self.saving_ratio)} less than the available offers but "
            f"are unavailable; work below high priority waits for them until {instant(self.until)}."
        )

    def remedy(self) -> str:
        return (
            "To start sooner, raise the priority of the work, or lower spot.medium_priority_wait_seconds (of low "
            "priority: spot.low_priority_wait_seconds)."
        )


class SpotExcluded(Reason, frozen=True, kw_only=True, tag="spot_excluded"):
    """The job was interrupted as often as the policy allows on spot; it waits for its pods to stop, then for other
    capacity."""

    interruptions_count: int  # on spot so far
    pods_remaining_count: int  # pods of the job that still exist and must stop first
    until: Instant  # spot is allowed again from then on

    def sentence(self) -> str:
        pods = counted(self.pods_remaining_count, "pod")
        return (
            f"Spot is excluded until {instant(self.until)} after {counted(self.interruptions_count, 'interruption')}; "
            f"{pods} of the last attempt must stop first."
        )

    def remedy(self) -> str:
        return "No action is needed: once its pods have stopped, the job starts on capacity that is not spot."


class PlanFull(Reason, frozen=True, kw_only=True, tag="plan_full"):
    """The plan has as many decisions as one plan may have; the next plan continues."""

    decisions_count: int  # of the same kind, purchases or removals, that the plan has
    nodes_count: int = 1  # that are bought together or not at all
    is_too_large: bool = False  # no plan can hold that many nodes of one gang

    def sentence(self) -> str:
        if self.is_too_large:
            return f"The gang needs {counted(self.nodes_count, 'node')} at once, which is more than one plan can hold."
        return f"The plan has {counted(self.decisions_count, 'decision')} of this kind; the next plan continues."

    def remedy(self) -> str:
        if self.is_too_large:
            return "Submit the job with fewer or smaller members, or allow instance types with more GPUs per node."
        return "No action is needed: the next plan follows at once."


class QueueHeadWaits(Reason, frozen=True, kw_only=True, tag="queue_head_waits"):
    """The job waits behind another one in a queue in which no job passes another."""

    queue: str  # name of the queue
    job_id: JobId  # the first one that does not start

    def sentence(self) -> str:
        return f"Job {self.job_id} is ahead in queue {self.queue} and waits; in this queue (fcfs-strict) none passes."

    def remedy(self) -> str:
        return f"Wait until job {self.job_id} starts; with fcfs-best-effort, jobs that fit would pass it."


class CapacityReserved(Reason, frozen=True, kw_only=True, tag="capacity_reserved"):
    """The job fits, but would delay one that has waited for long and reserves capacity."""

    job_id: JobId  # that reserves
    gpu_count: int
    until: Instant  # at the latest, by the time limits of running jobs

    def sentence(self) -> str:
        gpus = counted(self.gpu_count, "GPU")
        return (
            f"Job {self.job_id} has waited longer and reserves {gpus} until it starts, at {instant(self.until)} at the "
            "latest; this job could run longer than that on the same capacity."
        )

    def remedy(self) -> str:
        return f"Wait until job {self.job_id} starts, or submit the job with a time limit that ends before."


class ReservationHeld(Reason, frozen=True, kw_only=True, tag="reservation_held"):
    """The job has waited for long and reserves the capacity that running jobs will release."""

    job_id: JobId
    gpu_count: int
    until: Instant  # at the latest

    def sentence(self) -> str:
        gpus = counted(self.gpu_count, "GPU")
        return f"{gpus} are reserved for job {self.job_id}; running jobs release them by {instant(self.until)}."

    def remedy(self) -> str:
        return "No action is needed: no other queued job delays it any more."


WaitReason = (
    QueueHeadWaits
    | CapacityReserved
    | ReservationHeld
    | CapacityExpected
    | BatchWindowOpen
    | GangIncomplete
    | GangPending
    | GangTimedOut
    | GangBackoff
    | SpotAwaited
    | SpotExcluded
    | PlanFull
)
