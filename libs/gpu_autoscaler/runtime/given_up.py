"""Makes dead letters of messages that the broker no longer delivers, so that nothing leaves the line unseen.

Run by every service that consumes. All of them share one durable consumer: each word of the broker is handled once.
"""

import structlog

from gpu_autoscaler.runtime.plumbing import Plumbing
from gpu_autoscaler.runtime.retry import pause

log = structlog.get_logger()


class GivenUpLoop:
    """Looks every `Limits.given_up_seconds`, and again at once while there is more."""

    def __init__(self, plumbing: Plumbing) -> None:
        self._plumbing = plumbing

    async def run(self) -> None:
        """Look until it is time to stop. Raises TransientError, ConfigError."""
        plumbing = self._plumbing
        while not await pause(plumbing.stop, plumbing.limits.given_up_seconds):
            while not plumbing.stop.is_set() and await self._collect():
                pass
            plumbing.readiness.clear("given up")

    async def _collect(self) -> bool:
        """Set aside what the broker gave up now; False when there was nothing."""
        plumbing = self._plumbing
        given_up = await plumbing.dead_letters.collect_given_up(
            at=plumbing.clock.now(), wait_seconds_max=plumbing.limits.fetch_seconds_max
        )
        for one in given_up:
            plumbing.metrics.dead_letters.labels(one.stream.lower(), "given_up").inc()
            log.warning(
                "message set aside: the broker gave it up; see `gpu-autoscaler dead-letters`",
                stream=one.stream, sequence=one.stream_seq, durable=one.consumer, delivered_count=one.deliveries,
            )  # fmt: skip
        return bool(given_up)
