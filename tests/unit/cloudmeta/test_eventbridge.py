"""EventBridge's messages in our words: what each detail-type means, and what is left alone."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from gpu_autoscaler.cloudmeta.eventbridge import (
    Ending,
    Irrelevant,
    LifecycleHook,
    Notices,
    RebalanceRecommendation,
    Unparsed,
    read_event,
)
from gpu_autoscaler.cloudmeta.protocol import ReclaimNotice

AT = datetime(2026, 11, 22, 10, tzinfo=UTC)
HEALTH_ARN = "arn:aws:health:eu-west-1::event/EC2/AWS_EC2_INSTANCE_REBOOT/1"


def event(detail_type: str, detail: object) -> str:
    """A message as EventBridge writes it."""
    return json.dumps({"id": "e-1", "detail-type": detail_type, "time": "2026-11-22T10:00:00Z", "detail": detail})


@pytest.mark.parametrize(("action", "seconds"), [("terminate", 120), ("stop", 120), ("hibernate", 0)])
def test_spot_s_warning_leaves_two_minutes(action: str, seconds: float) -> None:
    """From its own time on, as it names no deadline; hibernation starts at once."""
    read = read_event(
        event("EC2 Spot Instance Interruption Warning", {"instance-id": "i-1", "instance-action": action})
    )
    deadline = AT + timedelta(seconds=seconds)
    assert read == Notices(("i-1",), ReclaimNotice(action, "e-1", deadline))  # type: ignore[arg-type]


def test_a_reservation_s_warning_carries_its_own_deadline() -> None:
    """Of an interruptible capacity reservation."""
    detail = {"instance-id": "i-1", "instance-action": "terminate", "instance-termination-time": "2026-11-22T10:01:30Z"}
    read = read_event(event("EC2 Capacity Reservation Instance Interruption Warning", detail))
    assert read == Notices(("i-1",), ReclaimNotice("terminate", "e-1", AT + timedelta(seconds=90)))


def test_a_recommendation_is_a_hint() -> None:
    """With the event's instant."""
    assert read_event(
        event("EC2 Instance Rebalance Recommendation", {"instance-id": "i-1"})
    ) == RebalanceRecommendation("i-1", AT)


@pytest.mark.parametrize(
    ("state", "kind"),
    [("shutting-down", "terminate"), ("terminated", "terminate"), ("stopping", "stop"), ("stopped", "stop")],
)
def test_an_instance_that_ends_leaves_no_time(state: str, kind: str) -> None:
    """Its deadline is the event's own time."""
    read = read_event(event("EC2 Instance State-change Notification", {"instance-id": "i-1", "state": state}))
    assert read == Ending("i-1", ReclaimNotice(kind, "e-1", AT))  # type: ignore[arg-type]


def test_planned_maintenance_is_of_every_instance_that_it_names() -> None:
    """Of EC2's scheduled changes; named by the event of AWS Health, which several messages may carry."""
    detail = {
        "service": "EC2",
        "eventTypeCategory": "scheduledChange",
        "eventTypeCode": "AWS_EC2_INSTANCE_REBOOT_MAINTENANCE_SCHEDULED",
        "eventArn": HEALTH_ARN,
        "startTime": "Sat, 05 Dec 2026 15:10:09 GMT",
        "affectedEntities": [{"entityValue": "i-1"}, {"entityValue": "vol-1"}, {"entityValue": "i-2"}],
    }
    starts_at = datetime(2026, 12, 5, 15, 10, 9, tzinfo=UTC)
    read = read_event(event("AWS Health Event", detail))
    assert read == Notices(("i-1", "i-2"), ReclaimNotice("maintenance", HEALTH_ARN, starts_at))


HOOK = {
    "LifecycleActionToken": "t-1",
    "AutoScalingGroupName": "gpu",
    "LifecycleHookName": "drain",
    "EC2InstanceId": "i-1",
    "LifecycleTransition": "autoscaling:EC2_INSTANCE_TERMINATING",
}


@pytest.mark.parametrize(
    "body",
    [event("EC2 Instance-terminate Lifecycle Action", HOOK), json.dumps({**HOOK, "Time": "2026-11-22T10:00:00Z"})],
    ids=["by EventBridge", "by the hook itself"],
)
def test_a_hook_waits_for_us(body: str) -> None:
    """However it writes to the queue."""
    read = read_event(body)
    assert isinstance(read, LifecycleHook)
    assert (read.instance_id, read.group, read.hook, read.token) == ("i-1", "gpu", "drain", "t-1")
    assert (read.notice.kind, read.notice.provider_event) == ("terminate", "lifecycle/t-1")


@pytest.mark.parametrize(
    "body",
    [
        event("EC2 Instance State-change Notification", {"instance-id": "i-1", "state": "running"}),
        event("EC2 Instance-launch Lifecycle Action", {**HOOK, "LifecycleTransition": "autoscaling:EC2_..."}),
        event("AWS Health Event", {"service": "EC2", "eventTypeCategory": "issue"}),
        event("Capacity Block Reservation Expiration Warning", {"capacity-reservation-id": "cr-1"}),
        event("Capacity Block Expiration Warning", {"capacity-reservation-id": "cr-1"}),
        json.dumps({"Event": "autoscaling:TEST_NOTIFICATION"}),
    ],
)
def test_what_takes_no_instance_is_of_no_concern(body: str) -> None:
    """Understood, and nothing comes of it."""
    assert isinstance(read_event(body), Irrelevant)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "no json",
        "[1, 2]",
        "{}",
        json.dumps({"detail-type": "EC2 Spot Instance Interruption Warning", "detail": {}}),
        event("EC2 Spot Instance Interruption Warning", {"instance-id": "i-1"}),
        event("EC2 Spot Instance Interruption Warning", {"instance-id": "i-1", "instance-action": "explode"}),
        event("EC2 Capacity Reservation Instance Interruption Warning", {"instance-id": "i-1"}),
        event("AWS Health Event", {"service": "EC2", "eventTypeCategory": "scheduledChange", "startTime": "soon"}),
        event("EC2 Something New", {"instance-id": "i-1"}),
    ],
)
def test_what_cannot_be_read_is_left(body: str) -> None:
    """Never an exception, never a guess: it says what was not understood."""
    read = read_event(body)
    assert isinstance(read, Unparsed)
    assert read.detail
