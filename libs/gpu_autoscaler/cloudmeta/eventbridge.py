"""What EventBridge's messages about EC2 instances say, in our words. No IO; the queue is read elsewhere.

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

# The warning comes two minutes ahead; its time is that of the warning, and it names no deadline.
SPOT_WARNING = timedelta(seconds=120)
# A hook's own time limit is not told. Heartbeats keep it open for at least 100 times its limit, of 30 s at the least
# (EC2 Auto Scaling API Reference, "RecordLifecycleActionHeartbeat"); ours is that of a drain by choice.
HOOK_DRAIN = timedelta(seconds=600)
_HEALTH_DATE = "%a, %d %b %Y %H:%M:%S %Z"  # Sat, 05 Jun 2021 15:10:09 GMT
# Said under both names in AWS's own documents.
_CAPACITY_BLOCK_ENDS = frozenset({"Capacity Block Expiration Warning", "Capacity Block Reservation Expiration Warning"})


class Notices(msgspec.Struct, frozen=True):
    """Instances that will be taken, or are being taken."""

    instance_ids: tuple[str, ...]
    notice: ReclaimNotice


class Hint(msgspec.Struct, frozen=True):
    """An instance that is likelier to be taken."""

    instance_id: str
    noticed_at: Instant


class Ending(msgspec.Struct, frozen=True):
    """An instance that ends or stops already, whoever wants it."""

    instance_id: str
    notice: ReclaimNotice  # without any time left


class HookWaits(msgspec.Struct, frozen=True):
    """A group ends an instance, and waits to be told that it may."""

    instance_id: str
    group: str
    hook: str
    token: str
    notice: ReclaimNotice


class Beside(msgspec.Struct, frozen=True):
    """Understood, and of no concern: an instance that starts, a test message, a group that grows."""

    said: str


class Unread(msgspec.Struct, frozen=True):
    """Not understood: left to whoever does."""

    said: str


Event = Notices | Hint | Ending | HookWaits | Beside | Unread


class _Envelope(msgspec.Struct, frozen=True, rename={"detail_type": "detail-type"}):
    id: str = ""
    detail_type: str = ""
    time: Instant | None = None
    detail: dict[str, Any] = {}


def read_event(body: str) -> Event:
    """Return what a message says. Never raises: what cannot be read is Unread, with the reason."""
    try:
        raw = msgspec.json.decode(body)
        if isinstance(raw, dict) and "LifecycleTransition" in raw:  # a hook that writes to the queue itself
            at = msgspec.convert(raw.get("Time"), Instant)
            return _hook(raw, at)
        if isinstance(raw, dict) and raw.get("Event") == "autoscaling:TEST_NOTIFICATION":
            return Beside("a hook was set up")
        event = msgspec.convert(raw, _Envelope)
        if event.time is None:
            return Unread(f"{event.detail_type or 'a message without detail-type'}: it carries no time")
        return _read(event, event.time)
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as exc:
        return Unread(f"{body[:200]!r}: {type(exc).__name__}: {exc}")


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
            return Hint(detail["instance-id"], at)
        case "EC2 Instance State-change Notification":
            return _state_change(event, at)
        case "EC2 Instance-terminate Lifecycle Action":
            return _hook(detail, at)
        case "EC2 Instance-launch Lifecycle Action":
            return Beside("an instance of a group starts")
        case "AWS Health Event":
            return _health(event)
        case name if name in _CAPACITY_BLOCK_ENDS:
            # Its end is known from the reservation since it began, and work moves before it (offers' paid_until).
            return Beside(f"{detail.get('capacity-reservation-id')} ends {detail.get('end-date')}")
    return Unread(f"detail-type {event.detail_type!r} is none of those that we know")


def _notices(instance_ids: list[str], kind: Any, event: str, deadline: datetime) -> Notices:  # noqa: ANN401 - as it came
    notice = msgspec.convert({"kind": kind, "provider_event": event, "reclaim_at": deadline}, ReclaimNotice)
    return Notices(tuple(instance_ids), notice)


def _state_change(event: _Envelope, at: datetime) -> Event:
    instance_id, state = event.detail["instance-id"], event.detail["state"]
    if state in ("shutting-down", "terminated"):
        return Ending(instance_id, ReclaimNotice("terminate", event.id, at))
    if state in ("stopping", "stopped"):
        return Ending(instance_id, ReclaimNotice("stop", event.id, at))
    return Beside(f"{instance_id} is {state}")


def _hook(detail: dict[str, Any], at: datetime) -> Event:
    if detail["LifecycleTransition"] != "autoscaling:EC2_INSTANCE_TERMINATING":
        return Beside("an instance of a group starts")
    token = str(detail["LifecycleActionToken"])
    notice = ReclaimNotice("terminate", f"lifecycle/{token}", at + HOOK_DRAIN)
    return HookWaits(
        str(detail["EC2InstanceId"]),
        str(detail["AutoScalingGroupName"]),
        str(detail["LifecycleHookName"]),
        token,
        notice,
    )


def _health(event: _Envelope) -> Event:
    detail = event.detail
    if detail.get("service") != "EC2" or detail.get("eventTypeCategory") != "scheduledChange":
        return Beside(f"{detail.get('eventTypeCode')} changes no instance")
    starts_at = datetime.strptime(detail["startTime"], _HEALTH_DATE).replace(tzinfo=UTC)
    ids = [one["entityValue"] for one in detail["affectedEntities"] if one["entityValue"].startswith("i-")]
    return _notices(ids, "maintenance", str(detail["eventArn"]), starts_at)
