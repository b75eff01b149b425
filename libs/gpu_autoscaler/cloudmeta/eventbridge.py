"""Parses EventBridge messages about EC2 instances. No IO; the queue is read elsewhere.

Sources: EC2 User Guide, "Spot Instance interruption notices", "EC2 instance rebalance recommendations", "Monitor
Capacity Blocks using EventBridge", "Monitor interruptible Capacity Reservations with EventBridge"; EC2 Auto Scaling
User Guide, "Amazon EventBridge event reference"; AWS Health User Guide, "Amazon EventBridge event schema"; and what
aws-node-termination-handler (pkg/monitor/sqsevent) and karpenter-provider-aws (pkg/controllers/interruption) read;
read 2026-11-22.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from gpu_autoscaler.cloudmeta.protocol import ReclaimNotice
from gpu_autoscaler.model.observed import Instant

# The warning is sent two minutes ahead; its time is that of the warning, and it contains no deadline.
SPOT_WARNING = timedelta(seconds=120)
# The message does not contain the hook's time limit. Heartbeats extend it to at least 100 times its limit of at least
# 30 s (EC2 Auto Scaling API Reference, "RecordLifecycleActionHeartbeat"); ours is that of a voluntary drain.
HOOK_DRAIN = timedelta(seconds=600)
_HEALTH_DATE = "%a, %d %b %Y %H:%M:%S %Z"  # Sat, 05 Jun 2021 15:10:09 GMT
# AWS documents both names.
_CAPACITY_BLOCK_ENDS = frozenset({"Capacity Block Expiration Warning", "Capacity Block Reservation Expiration Warning"})


class Notices(msgspec.Struct, frozen=True):
    """Interruption notices of instances."""

    instance_ids: tuple[str, ...]
    notice: ReclaimNotice


class RebalanceRecommendation(msgspec.Struct, frozen=True):
    """A rebalance recommendation: the instance is at higher risk of interruption."""

    instance_id: str
    noticed_at: Instant


class Ending(msgspec.Struct, frozen=True):
    """An instance that is already ending or stopping, for any reason."""

    instance_id: str
    notice: ReclaimNotice  # with a deadline that has passed


class LifecycleHook(msgspec.Struct, frozen=True):
    """A lifecycle hook of a group that terminates an instance and waits for completion."""

    instance_id: str
    group: str
    hook: str
    token: str
    notice: ReclaimNotice


class Irrelevant(msgspec.Struct, frozen=True):
    """A known but irrelevant message: a starting instance, a test message, a growing group."""

    detail: str


class Unparsed(msgspec.Struct, frozen=True):
    """A message that could not be parsed; it stays in the queue."""

    detail: str


Event = Notices | RebalanceRecommendation | Ending | LifecycleHook | Irrelevant | Unparsed


class _Envelope(msgspec.Struct, frozen=True, rename={"detail_type": "detail-type"}):
    id: str = ""
    detail_type: str = ""
    time: Instant | None = None
    detail: dict[str, Any] = {}


def read_event(body: str) -> Event:
    """Return the event of a message. Never raises: an unreadable message is Unparsed, with the reason."""
    try:
        raw = msgspec.json.decode(body)
        if isinstance(raw, dict) and "LifecycleTransition" in raw:  # a hook that publishes to the queue itself
            at = msgspec.convert(raw.get("Time"), Instant)
            return _hook(raw, at)
        if isinstance(raw, dict) and raw.get("Event") == "autoscaling:TEST_NOTIFICATION":
            return Irrelevant("test message of a new hook")
        event = msgspec.convert(raw, _Envelope)
        if event.time is None:
            return Unparsed(f"{event.detail_type or 'message without detail-type'}: no time")
        return _read(event, event.time)
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as exc:
        return Unparsed(f"{body[:200]!r}: {type(exc).__name__}: {exc}")


def _read(event: _Envelope, at: datetime) -> Event:
    detail = event.detail
    match event.detail_type:
        case "EC2 Spot Instance Interruption Warning":
            # Hibernation starts at once (EC2 User Guide, "Hibernate Spot Instances").
            deadline = at if detail["instance-action"] == "hibernate" else at + SPOT_WARNING
            return _notices([detail["instance-id"]], detail["instance-action"], event.id, deadline)
        case "EC2 Capacity Reservation Instance Interruption Warning":
            deadline = msgspec.convert(detail["instance-termination-time"], Instant)
            return _notices([detail["instance-id"]], detail.get("instance-action", "terminate"), event.id, deadline)
        case "EC2 Instance Rebalance Recommendation":
            return RebalanceRecommendation(detail["instance-id"], at)
        case "EC2 Instance State-change Notification":
            return _state_change(event, at)
        case "EC2 Instance-terminate Lifecycle Action":
            return _hook(detail, at)
        case "EC2 Instance-launch Lifecycle Action":
            return Irrelevant("instance of a group starting")
        case "AWS Health Event":
            return _health(event)
        case name if name in _CAPACITY_BLOCK_ENDS:
            # The end is known from the reservation, and work is moved before it (`paid_until` of offers).
            return Irrelevant(f"{detail.get('capacity-reservation-id')} ends {detail.get('end-date')}")
    return Unparsed(f"unknown detail-type {event.detail_type!r}")


def _notices(instance_ids: list[str], kind: Any, event: str, deadline: datetime) -> Notices:  # noqa: ANN401 - any JSON value
    notice = msgspec.convert({"kind": kind, "provider_event": event, "reclaim_at": deadline}, ReclaimNotice)
    return Notices(tuple(instance_ids), notice)


def _state_change(event: _Envelope, at: datetime) -> Event:
    instance_id, state = event.detail["instance-id"], event.detail["state"]
    if state in ("shutting-down", "terminated"):
        return Ending(instance_id, ReclaimNotice("terminate", event.id, at))
    if state in ("stopping", "stopped"):
        return Ending(instance_id, ReclaimNotice("stop", event.id, at))
    return Irrelevant(f"{instance_id} is {state}")


def _hook(detail: dict[str, Any], at: datetime) -> Event:
    if detail["LifecycleTransition"] != "autoscaling:EC2_INSTANCE_TERMINATING":
        return Irrelevant("instance of a group starting")
    token = str(detail["LifecycleActionToken"])
    notice = ReclaimNotice("terminate", f"lifecycle/{token}", at + HOOK_DRAIN)
    return LifecycleHook(
        str(detail["EC2InstanceId"]),
        str(detail["AutoScalingGroupName"]),
        str(detail["LifecycleHookName"]),
        token,
        notice,
    )


def _health(event: _Envelope) -> Event:
    detail = event.detail
    if detail.get("service") != "EC2" or detail.get("eventTypeCategory") != "scheduledChange":
        return Irrelevant(f"{detail.get('eventTypeCode')} changes no instance")
    starts_at = datetime.strptime(detail["startTime"], _HEALTH_DATE).replace(tzinfo=UTC)
    ids = [entity["entityValue"] for entity in detail["affectedEntities"] if entity["entityValue"].startswith("i-")]
    return _notices(ids, "maintenance", str(detail["eventArn"]), starts_at)
