"""`docs/reference/reasons.md`, written from the code: each reason, when it occurs, its sentence and its remedy.

`make schemas` runs `python -m gpu_autoscaler.contracts.reasons_page`, which prints the page.
"""

import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

from gpu_autoscaler.model.directives import PERMANENT, Attribution
from gpu_autoscaler.model.ids import JobId, NodeUid, PodUid
from gpu_autoscaler.model.reasons import all_reasons, buy, defer, defer_limits, defer_waits, drain, preempt, upkeep
from gpu_autoscaler.model.reasons.base import Reason

_NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
_LATER = _NOW + timedelta(minutes=30)
_TOMORROW = datetime(2026, 11, 22, tzinfo=UTC)
_SPOT = "p4d.24xlarge/eu-west-1a/spot"
_JOB = "job/train-7b"
_USD = 1_000_000

_OVERRIDE = Attribution(key="override/pool/training", by="ada", why="spend review", until=_LATER)

# One example of each reason. A reason without an example fails the build of the page.
EXAMPLES: tuple[Reason, ...] = (
    buy.UnmetDemand(
        demand=(_JOB,),
        offers_considered=12,
        price_micro_usd_per_hour=32_770_000,
        instead_of=buy.RejectedOffer(
            offer=_SPOT, price_micro_usd_per_hour=11_040_000, because=buy.RejectionCause.SPOT_NOT_ALLOWED
        ),
        dropped=(
            buy.DroppedPreference(
                preference="zone eu-west-1b",
                kept_by="p4d.24xlarge/eu-west-1b/on-demand",
                price_micro_usd_per_hour=33_100_000,
            ),
        ),
    ),
    buy.ReplacesAtRiskNode(
        node_uid=NodeUid("uid-7"), node_name="gpu-node-7", reclaim_at=_NOW + timedelta(minutes=2), demand=(_JOB,)
    ),
    buy.BelowMinimum(nodes_count=1, nodes_count_min=2),
    buy.ReplacesNodes(
        cause="expired", node_uids=(NodeUid("uid-7"),), node_names=("gpu-node-7",), demand=("pod/uid-1", "pod/uid-2")
    ),
    buy.CapacityBuffer(demand=("headroom/office-hours",), free_gpu_count=4, wanted_gpu_count=8),
    buy.BelowOverride(demand=("override/pool/training",), attribution=_OVERRIDE, unit="node", count=1, count_min=4),
    buy.UtilizationHigh(utilization_ratio=0.91, utilization_ratio_max=0.8),
    drain.NodeIdle(idle_seconds=640.0, idle_seconds_max=600.0),
    drain.NodeUnderused(
        pods=(PodUid("uid-1"), PodUid("uid-2")), saving_micro_usd_per_hour=2_460_000, utilization_ratio=0.12
    ),
    drain.NodeExpired(age_seconds=612_000.0, age_seconds_max=604_800.0),
    drain.NodeDrifted(difference="zone eu-west-1a is no longer allowed in pool training"),
    drain.NodeUnhealthy(evidence="GPU 3 reported XID 79", unhealthy_seconds=660.0, unhealthy_seconds_max=600.0),
    drain.SpotReclaim(notice_id="n-1", kind="terminate", reclaim_at=_NOW + timedelta(minutes=2)),
    drain.NodeDeleted(deleted_at=_NOW),
    drain.RebalanceRecommended(noticed_at=_NOW),
    drain.AboveOverride(attribution=_OVERRIDE, unit="node", count=5, count_max=4),
    drain.SpendExhausted(
        owner="project/vision", period="month", spent_micro_usd=9_870 * _USD, limit_micro_usd=10_000 * _USD,
        until=_TOMORROW,
    ),
    drain.BootTimedOut(
        booting_seconds=900.0, boot_seconds_max=900.0, missing_step="gpus", detail="0 of 8 nvidia.com/gpu"
    ),
    drain.NodeLost(),
    drain.NodeOrphaned(seen_seconds=600.0),
    drain.GangAbandoned(gang=_JOB, defer_reason="offers_unavailable"),
    drain.DemandReturned(demand=("pod/team-a/notebook-0",)),
    drain.NoticeWithdrawn(notice_id="n-1"),
    defer.NoOfferFits(detail="no offer has 16 GPUs of model T4 on one node (most: 4)"),
    defer.PodConstraintsViolated(rules=("spread over topology.kubernetes.io/zone with maxSkew 1",)),
    defer.OffersUnavailable(offers=(_SPOT,), retry_at=_NOW + timedelta(minutes=3)),
    defer.PriceUnknown(offers=("p4d.24xlarge/eu-west-1a/on-demand",)),
    defer.VolumeNotReady(detail="claim team-a/data does not exist"),
    defer.DeviceClaimsUnsupported(detail="request gpus has alternatives"),
    defer.ResourceQuotaExceeded(
        quota="gpu-research/gpus", resource="requests.nvidia.com/gpu",
        used_milli=12_000, needed_milli=8_000, hard_milli=16_000,
    ),
    defer.CapacityNotFree(members_count=4),
    defer.NoDomainFits(topology_key="topology.kubernetes.io/zone", domains_count=3, members_count=16),
    defer.GroupIncomplete(group="group/team-a/mpi", members_present=2, members_count_min=4),
    defer.NotYetIdle(idle_seconds=120.0, idle_seconds_max=600.0),
    defer.PodProtected(
        pod_uid=PodUid("uid-1"), pod="team-a/trainer-0", protection="annotation karpenter.sh/do-not-disrupt=true"
    ),
    defer.NodeProtected(protection="annotation gpu-autoscaler.io/do-not-disrupt=true"),
    defer.PodsFitNowhere(pods=(PodUid("uid-1"), PodUid("uid-2"))),
    defer.SavingTooSmall(saving_ratio=0.06, saving_ratio_min=0.15),
    defer.TooManyUnhealthy(unhealthy_count=6, nodes_count=10, unhealthy_ratio_max=0.45),
    defer.KeptAsBuffer(kept_for="forecast/A100"),
    defer.WatchStale(source="nodes", age_seconds=185.0, age_seconds_max=120.0),
    defer.TelemetryUnreliable(fault="silent", nodes_count=4, gpu_nodes_count=10),
    defer.UtilizationUnconfirmed(utilization_ratio=0.91, utilization_ratio_max=0.8),
    defer.ForecastUncertain(confidence_ratio=0.4, confidence_ratio_min=0.6),
    defer.PlanRejected(
        violation="p4d.24xlarge/a/on_demand is bought, but is not an available offer",
        attempts_count=2, retry_at=_NOW + timedelta(minutes=2),
    ),
    defer_limits.NodesLimit(nodes_count=10, nodes_count_max=10, owner="pool/training"),
    defer_limits.GpusLimit(gpu_count=64, gpu_count_max=64),
    defer_limits.HourlyPriceLimit(price_micro_usd_per_hour=32_770_000, price_micro_usd_per_hour_max=100 * _USD),
    defer_limits.SpendLimit(
        owner="cluster", period="day", spent_micro_usd=1_700 * _USD, reserved_micro_usd=200 * _USD,
        needed_micro_usd=196_620_000, limit_micro_usd=2_000 * _USD, until=_TOMORROW,
    ),
    defer_limits.SpendEnforcementBlocked(
        owner="cluster", period="day", left_micro_usd=3 * _USD, limit_micro_usd=2_000 * _USD, until=_TOMORROW,
        protection="pod team-a/trainer-0: annotation karpenter.sh/do-not-disrupt=true",
    ),
    defer_limits.QuotaReached(owner="project/vision", quota="gpu_count_max", used=24, needed=16, limit=32),
    defer_limits.CohortQuotaReached(
        project="vision", cohort="default", needed_gpu_count=16, used_gpu_count=8, nominal_gpu_count=32,
        available_gpu_count=8, borrowed_by=("speech",),
    ),
    defer_limits.PreemptedForJob(for_job=JobId("train-70b"), until=_LATER),
    preempt.QuotaReclaimed(
        for_job=JobId("train-70b"), for_project="vision", project="speech", cohort="default", borrowed_gpu_count=16,
        nominal_gpu_count=32,
    ),
    preempt.PriorityPreempted(for_job=JobId("train-70b"), for_priority=1000, priority=100, barred_by="gpus_limit"),
    preempt.MovedToSpot(
        node_names=("gpu-node-7", "gpu-node-8"), saving_micro_usd_per_hour=5 * _USD, remaining_seconds=18_000.0,
        move_micro_usd=400_000,
    ),
    defer_limits.Cooldown(remaining_seconds=95.0),
    defer_limits.Frozen(attribution=Attribution(key="freeze", by="ada", why="network maintenance", until=_LATER)),
    defer_limits.PoolPaused(
        pool="training", attribution=Attribution(key="pause/training", by="the policy", why="disabled", until=PERMANENT)
    ),
    defer_limits.OverrideReached(attribution=_OVERRIDE, unit="node", count=4, count_max=4),
    defer_limits.KeptByOverride(attribution=_OVERRIDE, unit="GPU", count=32, count_min=32),
    defer_limits.DisruptionBudgetReached(disrupting_count=2, disrupting_count_max=2),
    defer_limits.BrakeTripped(
        tripped_at=_NOW, node="gpu-node-7", nodes_count=3, nodes_count_max=3, price_micro_usd_per_hour=44 * _USD,
        price_micro_usd_per_hour_max=1_000 * _USD, is_of_price=False,
    ),
    defer_limits.MinimumReached(nodes_count=2, nodes_count_min=2),
    defer_limits.ProvisioningRequestsLimit(open_count_max=256),
    defer_waits.QueueHeadWaits(queue="research", job_id=JobId("train-7b")),
    defer_waits.CapacityReserved(job_id=JobId("train-7b"), gpu_count=32, until=_LATER),
    defer_waits.ReservationHeld(job_id=JobId("train-7b"), gpu_count=32, until=_LATER),
    defer_waits.CapacityExpected(node="gpu-node-7", expected_at=_NOW + timedelta(minutes=4)),
    defer_waits.BatchWindowOpen(members_count=12, until=_NOW + timedelta(seconds=10)),
    defer_waits.GangIncomplete(job_id=JobId("train-7b"), members_placed=3, members_count=4),
    defer_waits.GangPending(job_id=JobId("train-7b")),
    defer_waits.GangTimedOut(gang=_JOB, bought_seconds=1_260.0, complete_seconds_max=1_200.0),
    defer_waits.GangBackoff(gang=_JOB, abandoned_count=2, retry_at=_LATER),
    defer_waits.SpotAwaited(offers=(_SPOT,), saving_ratio=0.66, until=_LATER),
    defer_waits.SpotExcluded(interruptions_count=3, pods_remaining_count=1, until=_LATER),
    defer_waits.PlanFull(decisions_count=2_000),
    upkeep.InstanceGone(gone_since=_NOW),
    upkeep.FinalizerMissing(),
    upkeep.FinalizerUnneeded(cause="instance_ended"),
    upkeep.CheaperToEmpty(node_micro_usd_per_hour=1_852_000, open_micro_usd_per_hour=430_000),
    upkeep.TaintUnneeded(cause="cheapest"),
    upkeep.DeletedByKarpenter(deleted_at=_NOW),
    upkeep.JobIdle(idle_seconds=1_900.0, idle_seconds_max=1_800.0, busy_ratio_max=0.05),
    upkeep.WorkloadIdle(
        idle_seconds=2_500.0, idle_seconds_max=1_800.0, busy_ratio_max=0.05, announced_at=_NOW
    ),
    upkeep.OwnerUnsupported(owner_kind="RayCluster"),
    upkeep.CheckpointDue(
        last_saved_at=_NOW, interval_seconds=1_200.0, save_seconds=40.0, interruption_seconds=18_000.0
    ),
    upkeep.CheckpointsUnsupported(),
    upkeep.SaveInProgress(deadline_at=_LATER),
    upkeep.SavesConcurrentLimit(saves_count_max=64),
    upkeep.ReservationEnding(paid_until=_LATER, drain_seconds=1_800.0),
    upkeep.RequestAccepted(members_count=4),
    upkeep.RequestInvalid(detail="PodTemplate gpu-research/ppt-train does not exist"),
    upkeep.RequestExpired(valid_seconds=3_600.0),
    upkeep.CapacityFound(members_count=4, booked_seconds=600.0),
    upkeep.CapacityOrdered(members_count=4, expected_at=_LATER),
    upkeep.CapacityMissing(
        members_count=4, cause="nodes_limit", detail="All 16 of 16 nodes are used.", is_final=False
    ),
    upkeep.BookingEnded(booked_seconds=600.0),
    upkeep.BookedNodeLost(provider_id="i-0f3a9c"),
    upkeep.UpkeepRepeated(attempts_count=2, retry_at=_LATER),
)  # fmt: skip

# Title -> union. A reason of two unions is listed under the first.
_SECTIONS: Mapping[str, Any] = {
    "Why a node is bought": buy.BuyReason,
    "Why a node is drained": drain.DrainReason,
    "Why an instance is released": drain.ReleaseReason,
    "Why a drain is canceled": drain.KeepReason,
    "Why an action is deferred": defer.DeferReason,
    "Why an act of upkeep is decided": upkeep.UpkeepReason,
    "Why a job is preempted": preempt.PreemptReason,
}
_HEAD = """\
# Reasons

Every decision, and everything the autoscaler defers, carries one of these reasons. The tag is the
`reason` of facts, REST answers and metric labels; `gpu-autoscaler why`, Kubernetes Events and the
dashboard show the sentence and the next step. The values below are examples.

Generated by `make schemas` from `libs/gpu_autoscaler/model/reasons/`; not edited by hand.
"""


def reasons_page() -> str:
    """Return the page. Raises ValueError naming the reasons without an example."""
    examples = {type(example): example for example in EXAMPLES}
    if missing := [reason.tag() for reason in all_reasons() if reason not in examples]:
        raise ValueError(f"reasons without an example in EXAMPLES: {', '.join(missing)}")
    lines = [_HEAD]
    seen: set[type[Reason]] = set()
    for title, union in _SECTIONS.items():
        lines.append(f"## {title}\n")
        for reason in get_args(union):
            if reason not in seen:
                seen.add(reason)
                lines.extend(_entry(examples[reason]))
    return "\n".join(lines)


def _entry(example: Reason) -> Iterator[str]:
    remedy = example.remedy()
    yield f"### `{example.tag()}`\n"
    yield f"{_wrapped(inspect.getdoc(type(example)) or '')}\n"
    yield f"{_wrapped(example.sentence(), prefix='> ')}\n"
    if remedy is not None:
        yield f"{_wrapped(f'Next step: {remedy}')}\n"


def _wrapped(text: str, *, prefix: str = "") -> str:
    return textwrap.fill(
        " ".join(text.split()),
        width=100,
        initial_indent=prefix,
        subsequent_indent=prefix,
        break_long_words=False,
        break_on_hyphens=False,
    )


if __name__ == "__main__":
    sys.stdout.write(reasons_page())
