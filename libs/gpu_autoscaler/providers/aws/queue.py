"""SQS queue of interruption events, written by EventBridge rules and lifecycle hooks.

A received message reappears after VISIBLE_AGAIN_SECONDS unless it is deleted, so the queue itself remembers unfinished
work across restarts. Source: SQS Developer Guide, "Amazon SQS visibility timeout" (read 2026-11-22).
"""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from gpu_autoscaler.cloudmeta.protocol import QueuedEvent
from gpu_autoscaler.model.errors import ConfigError, TransientError
from gpu_autoscaler.providers.aws.client import AwsClient
from gpu_autoscaler.providers.aws.options import AwsOptions
from gpu_autoscaler.providers.aws.translate import code_of

VISIBLE_AGAIN_SECONDS = 10
# SQS allows twelve hours in all since the message was received; stay below that.
HIDDEN_SECONDS_MAX = 42_000
WAIT_SECONDS_MAX = 20  # longest poll that SQS allows
MESSAGES_COUNT = 10  # maximum per call


class AwsQueue:
    """One queue of one installation: two readers would take each other's messages."""

    def __init__(
        self,
        options: AwsOptions,
        *,
        url: str | None,
        call_seconds_max: float,
        now: Callable[[], datetime],
        visible_again_seconds: int = VISIBLE_AGAIN_SECONDS,
    ) -> None:
        """Raises ConfigError if queue or region is not set."""
        if not options.queue_url or not options.region:
            raise ConfigError("provider aws", ["aws.queue_url: is required to read events, and aws.region with it"])
        self._queue_url = options.queue_url
        self._now = now
        self._visible_again_seconds = visible_again_seconds
        self._wait_seconds = min(WAIT_SECONDS_MAX, int(call_seconds_max / 2))
        self._client = AwsClient(options.region, url=url, call_seconds_max=call_seconds_max)

    async def receive(self) -> Sequence[QueuedEvent]:
        answer = await self._client.call(
            "ReceiveMessage",
            QueueUrl=self._queue_url,
            MaxNumberOfMessages=MESSAGES_COUNT,
            WaitTimeSeconds=self._wait_seconds,
            VisibilityTimeout=self._visible_again_seconds,
            AttributeNames=["SentTimestamp"],
        )
        now = self._now()
        return [
            QueuedEvent(
                receipt=message["ReceiptHandle"],
                body=message["Body"],
                sent_at=datetime.fromtimestamp(int(message["Attributes"]["SentTimestamp"]) / 1000, UTC),
                received_at=now,
            )
            for message in answer.get("Messages", ())
        ]

    async def delete(self, event: QueuedEvent) -> None:
        await self._client.call("DeleteMessage", QueueUrl=self._queue_url, ReceiptHandle=event.receipt)

    async def hide(self, event: QueuedEvent, seconds: float) -> None:
        timeout = max(0, min(int(seconds), HIDDEN_SECONDS_MAX))
        await self._client.call(
            "ChangeMessageVisibility", QueueUrl=self._queue_url, ReceiptHandle=event.receipt, VisibilityTimeout=timeout
        )

    async def complete_hook(self, group: str, hook: str, token: str) -> None:
        await self._hooked("CompleteLifecycleAction", group, hook, token, LifecycleActionResult="CONTINUE")

    async def extend_hook(self, group: str, hook: str, token: str) -> None:
        await self._hooked("RecordLifecycleActionHeartbeat", group, hook, token)

    async def _hooked(self, operation: str, group: str, hook: str, token: str, **more: object) -> None:
        try:
            await self._client.call(
                operation, AutoScalingGroupName=group, LifecycleHookName=hook, LifecycleActionToken=token, **more
            )
        except TransientError as exc:
            if code_of(exc) != "ValidationError":  # "No active Lifecycle Action found": expired or already completed
                raise

    async def close(self) -> None:
        self._client.close()
