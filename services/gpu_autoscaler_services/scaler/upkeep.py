"""Carries out the acts of upkeep that a recorded plan decided. Decides nothing.

A failed act is not repeated here: a later plan decides it again, after its back-off.
"""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import assert_never

import structlog

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobCancelRequested
from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.kube.protocol import Conflict, NotFound
from gpu_autoscaler.model.decisions import (
    AddFinalizer,
    AnnounceIdleJob,
    AnnounceIdleWorkload,
    AnnounceReservationEnd,
    AnswerProvisioningRequest,
    AnyUpkeep,
    AvoidNode,
    CancelIdleJob,
    EndIdleWorkload,
    OpenNode,
    RemoveFinalizer,
    RemoveOrphanedNode,
    RequestCheckpoints,
    RequestJobCheckpoint,
    RequestPreemptionCheckpoint,
    RequeueJob,
)
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import PlanId
from gpu_autoscaler_services.scaler.checkpoint_notices import CheckpointNotices
from gpu_autoscaler_services.scaler.finalizers import Finalizers
from gpu_autoscaler_services.scaler.idle_workloads import IdleWorkloads
from gpu_autoscaler_services.scaler.node_taints import NodeTaints
from gpu_autoscaler_services.scaler.orphaned_nodes import OrphanedNodes
from gpu_autoscaler_services.scaler.request_answers import RequestAnswers

REQUESTED_BY = "gpu-autoscaler"  # in requests to cancel idle jobs

log = structlog.get_logger()


class UpkeepSteps:
    """Dispatches each act to its step."""

    def __init__(
        self,
        finalizers: Finalizers,
        node_taints: NodeTaints,
        checkpoint_notices: CheckpointNotices,
        orphaned_nodes: OrphanedNodes,
        request_answers: RequestAnswers,
        idle_workloads: IdleWorkloads,
        now: Callable[[], datetime],
    ) -> None:
        self._finalizers = finalizers
        self._node_taints = node_taints
        self._checkpoint_notices = checkpoint_notices
        self._orphaned_nodes = orphaned_nodes
        self._request_answers = request_answers
        self._idle_workloads = idle_workloads
        self._now = now

    async def take(self, decision: AnyUpkeep, plan_id: PlanId) -> Sequence[Fact]:
        """Take the step of this act, and return the facts about it; none after its `retry_at`, as of an old plan that
        is delivered again."""
        if self._now() >= decision.retry_at:
            return ()
        try:
            return await self._take(decision, plan_id)
        except (NotFound, Conflict):
            return ()  # deleted or changed meanwhile: the next plan sees it
        except (TransientError, PermanentError) as exc:
            log.warning(
                "upkeep failed, retried",
                decision=decision.tag(),
                subject=decision.subject,
                action_id=decision.action_id,
                attempts_count=decision.attempts_count,
                retry_at=decision.retry_at.isoformat(),
                error=str(exc),
            )
            return ()

    async def _take(self, decision: AnyUpkeep, plan_id: PlanId) -> Sequence[Fact]:
        match decision:
            case AddFinalizer() | RemoveFinalizer():
                await self._finalizers.write(decision)
                return ()
            case AvoidNode() | OpenNode():
                await self._node_taints.write(decision)
                return ()
            case RequestCheckpoints():
                return await self._checkpoint_notices.send(decision, plan_id, self._now())
            case RequestJobCheckpoint() | RequestPreemptionCheckpoint():
                return await self._checkpoint_notices.send_to_job(decision, plan_id, self._now())
            case RequeueJob():
                return ()  # plan and schedule read it from the recorded plan
            case RemoveOrphanedNode():
                return await self._orphaned_nodes.remove(decision, self._now())
            case AnswerProvisioningRequest():
                await self._request_answers.write(decision)
                return ()
            case CancelIdleJob():
                return (_cancellation(decision),)
            case AnnounceIdleWorkload() | AnnounceIdleJob():
                await self._idle_workloads.announce(decision)
                return ()
            case EndIdleWorkload():
                await self._idle_workloads.end(decision)
                return ()
            case AnnounceReservationEnd():
                return (_notice(decision, self._now()),)
            case _:
                assert_never(decision)


def _cancellation(decision: CancelIdleJob) -> JobCancelRequested:
    return JobCancelRequested(
        job_id=decision.job_id, requested_by=REQUESTED_BY, note=decision.reason.note(), action_id=decision.action_id
    )


def _notice(decision: AnnounceReservationEnd, now: datetime) -> SpotNoticeReceived:
    return SpotNoticeReceived(
        provider_id=decision.provider_id,
        kind="paid_period_over",
        provider_event=decision.reclaim_at.isoformat(),
        reclaim_at=decision.reclaim_at,
        received_at=now,
        channel="calendar",
    )
