"""Instance events in an SQS queue, as EventBridge and lifecycle hooks write them, and waiting hooks.

Source: EC2 User Guide and EC2 Auto Scaling User Guide, examples of events (read 2026-11-22).
"""

import uuid
from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec

from gpu_autoscaler.simcloud.aws.machines import ACCOUNT


class Bridge:
    """Writes to one of moto's queues, whose times are wall time."""

    def __init__(self, region: str, now: Callable[[], datetime]) -> None:
        from moto.sqs.models import sqs_backends  # noqa: PLC0415 - moto loads slowly

        sqs_backends[ACCOUNT].pop(region, None)  # of an earlier fake in this process
        self._backend: Any = sqs_backends[ACCOUNT][region]
        self._region = region
        self._now = now
        self.waiting: set[str] = set()  # tokens of waiting hooks
        self.heartbeats_count = 0

    def open_queue(self, name: str = "gpu-autoscaler") -> str:
        """Create a queue; return its URL."""
        self._backend.create_queue(name, {})
        return f"https://sqs.{self._region}.amazonaws.com/{ACCOUNT}/{name}"

    def tell(self, detail_type: str, detail: object, *, source: str = "aws.ec2", name: str = "gpu-autoscaler") -> str:
        """Write an event dated now; return its id."""
        event_id = str(uuid.uuid4())
        event = {
            "version": "0",
            "id": event_id,
            "detail-type": detail_type,
            "source": source,
            "account": ACCOUNT,
            "time": self._now().strftime("%Y-%m-%dT%H:%M:%SZ"),
            "region": self._region,
            "resources": [],
            "detail": detail,
        }
        self.write(msgspec.json.encode(event).decode(), name=name)
        return event_id

    def write(self, body: str, *, name: str = "gpu-autoscaler") -> None:
        self._backend.send_message(name, body)

    def warn(self, instance_id: str, action: str = "terminate") -> str:
        """Issue a spot interruption warning; return the event's id."""
        detail = {"instance-id": instance_id, "instance-action": action}
        return self.tell("EC2 Spot Instance Interruption Warning", detail)

    def state_changed(self, instance_id: str, state: str) -> str:
        """Report the instance's state; return the event's id."""
        return self.tell("EC2 Instance State-change Notification", {"instance-id": instance_id, "state": state})

    def hook(self, instance_id: str, group: str, hook: str = "drain") -> str:
        """Start a lifecycle hook before the instance ends; return the token."""
        token = str(uuid.uuid4())
        self.waiting.add(token)
        detail = {
            "LifecycleActionToken": token,
            "AutoScalingGroupName": group,
            "LifecycleHookName": hook,
            "EC2InstanceId": instance_id,
            "LifecycleTransition": "autoscaling:EC2_INSTANCE_TERMINATING",
        }
        self.tell("EC2 Instance-terminate Lifecycle Action", detail, source="aws.autoscaling")
        return token

    def hook_told(self, token: str, *, is_done: bool) -> bool:
        """Record a heartbeat or the completion of a hook; False if no hook waits for it."""
        if token not in self.waiting:
            return False
        if is_done:
            self.waiting.discard(token)
        else:
            self.heartbeats_count += 1
        return True

    def has_news(self, queue_url: str) -> bool:
        """Return whether a message can be received now; True for an unknown queue, which is an error."""
        name = queue_url.rpartition("/")[2]
        return name not in self._backend.queues or bool(self._backend.get_queue(name).messages)

    def left_count(self, name: str = "gpu-autoscaler") -> int:
        """Return the number of messages in the queue, including hidden ones."""
        return len(self._backend.get_queue(name)._messages)  # noqa: SLF001 - moto's own count leaves hidden ones out
