"""An SQS queue that an EventBridge rule, or a group's lifecycle hook, writes to.

What was received comes again after VISIBLE_AGAIN_SECONDS, unless it is deleted. So the queue itself remembers what is
not done yet, over any restart. Source: SQS Developer Guide, "Amazon SQS visibility timeout" (read 2026-11-22).
"""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from gpu_autoscaler.cloudmeta.protocol import QueuedEvent
from gpu_autoscaler.model.errors import ConfigError, TransientError
from gpu_autoscaler.providers.aws.calls import AwsClient
from gpu_autoscaler.providers.aws.options import AwsOptions

VISIBLE_AGAIN_SECONDS = 10
# SQS takes twelve hours in all since the message was received; less than that, so that it never is too much.
HIDDEN_SECONDS_MAX = 42_000
WAIT_SECONDS_MAX = 20  # the longest poll that SQS takes
MESSAGES_COUNT = 10  # the most that SQS gives at once


class AwsQueue:
    """One queue of one installation: two that read the same one would take each other's messages."""

    def __init__(
        self,
        options: AwsOptions,
        *,
        url: str | None,
        call_seconds_max: float,
        now: Callable[[], datetime],
        visible_again_seconds: int = VISIBLE_AGAIN_SECONDS,
    ) -> None:
        """Raises ConfigError where no queue or no region is named."""
        if not options.queue_url or not options.region:
            raise ConfigError("provider aws", ["aws.queue_url: is needed to read events, and aws.region with it"])
        self._queue_url = options.queue_url
        self._now = now
        self._visible_again_seconds = visible_again_seconds
        self._wait_seconds = min(WAIT_SECONDS_MAX, int(call_seconds_max / 2))
        self._calls = AwsClient(options.region, url=url, call_seconds_max=call_seconds_max)

    async def receive(self) -> Sequence[QueuedEvent]:
        """Return what waits; waits some seconds for the first. Raises TransientError."""
        answer = await self._calls.call(
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
                receipt=told["ReceiptHandle"],
                body=told["Body"],
                sent_at=datetime.fromtimestamp(int(told["Attributes"]["SentTimestamp"]) / 1000, UTC),
                received_at=now,
            )
            for told in answer.get("Messages", ())
        ]

    async def delete(self, event: QueuedEvent) -> None:
        """It is done with. Raises TransientError; then it comes again."""
        await self._calls.call("DeleteMessage", QueueUrl=self._queue_url, ReceiptHandle=event.receipt)

    async def hide(self, event: QueuedEvent, seconds: float) -> None:
        """Let it not come again for so long, at most twelve hours. Raises TransientError."""
        timeout = max(0, min(int(seconds), HIDDEN_SECONDS_MAX))
        await self._calls.call(
            "ChangeMessageVisibility",
            QueueUrl=self._queue_url,
            ReceiptHandle=event.receipt,
            VisibilityTimeout=timeout,
        )

    async def let_go(self, group: str, hook: str, token: str) -> None:
        """Complete the lifecycle action. Raises TransientError."""
        await self._hooked("CompleteLifecycleAction", group, hook, token, LifecycleActionResult="CONTINUE")

    async def keep_waiting(self, group: str, hook: str, token: str) -> None:
        """Have the hook's time begin again. Raises TransientError."""
        await self._hooked("RecordLifecycleActionHeartbeat", group, hook, token)

    async def _hooked(self, operation: str, group: str, hook: str, token: str, **more: object) -> None:
        try:
            await self._calls.call(
                operation,
                AutoScalingGroupName=group,
                LifecycleHookName=hook,
                LifecycleActionToken=token,
                **more,
            )
        except TransientError as exc:
            code = getattr(exc.__cause__, "response", {}).get("Error", {}).get("Code", "")
            if code != "ValidationError":  # "No active Lifecycle Action found": its time has passed, or it was told
                raise

    async def close(self) -> None:
        """Give back threads and connections."""
        self._calls.close()
