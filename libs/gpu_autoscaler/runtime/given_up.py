"""Makes dead letters of messages that the broker no longer delivers, so that nothing leaves the line unseen.

Run by every service that consumes. All of them share one durable consumer: each word of the broker is handled once.
"""

import structlog

from gpu_autoscaler.runtime.plumbing import LoopContext
from gpu_autoscaler.runtime.retry import pause

log = structlog.get_logger()


class MaxDeliveriesLoop:
    """Looks every `Limits.max_deliveries_poll_seconds`, and again at once while there is more."""

    def __init__(self, context: LoopContext) -> None:
        self._context = context

    async def run(self) -> None:
        """Look until it is time to stop. Raises TransientError, ConfigError."""
        context = self._context
        while not await pause(context.stop, context.limits.max_deliveries_poll_seconds):
            while not context.stop.is_set() and await self._collect():
                pass
            context.readiness.clear("given up")

    async def _collect(self) -> bool:
        """Set aside what the broker gave up now; False when there was nothing."""
        context = self._context
        given_up = await context.dead_letters.collect_max_deliveries(
            at=context.clock.now(), wait_seconds_max=context.limits.fetch_seconds_max
        )
        for one in given_up:
            context.metrics.dead_letters.labels(one.stream.lower(), "given_up").inc()
            log.warning(
                "message set aside: the broker gave it up; see `gpu-autoscaler dead-letters`",
                stream=one.stream, sequence=one.stream_seq, durable=one.consumer, delivered_count=one.deliveries,
            )  # fmt: skip
        return bool(given_up)
