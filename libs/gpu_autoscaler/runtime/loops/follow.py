"""Keeps a consumer that was split into lanes at the position of its lanes. Nothing is handled here.

The previous release handles facts by that consumer. After a step back it continues where the lanes have arrived: it
neither loses a fact that a lane has not finished, nor repeats those that the lanes have finished meanwhile.
"""

import structlog

from gpu_autoscaler.bus.protocol import Delivery, EffectConsumer
from gpu_autoscaler.bus.streams import ConsumerSpec
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.runtime.loop_context import LoopContext
from gpu_autoscaler.runtime.retry import pause

log = structlog.get_logger()

FOLLOW_COUNT_MAX = 100  # messages of one fetch
FETCH_SECONDS_MAX = 0.05  # what is there is enough


class FollowLoop:
    """Acknowledges each message of the former consumer once every lane is past it.

    A lane whose effect takes long keeps the position where that began; later facts are then handled again after a step
    back, which is harmless, as after any crash.
    """

    def __init__(self, context: LoopContext, spec: ConsumerSpec) -> None:
        self._context = context
        self._spec = spec

    async def run(self) -> None:
        """Run until `stop`. Raises TransientError, ConfigError."""
        context = self._context
        former = await context.bus.effect_consumer(self._spec.durable)
        lanes = [await context.bus.effect_consumer(durable) for durable in self._spec.lanes]
        try:
            if not await context.wait_until_caught_up():
                return
            while await context.wait_until_leading():
                await self._follow(former, lanes)
                context.readiness.clear(f"position {self._spec.durable}")
                if await pause(context.stop, context.limits.follow_seconds):
                    return
        finally:
            for consumer in (former, *lanes):
                await consumer.close()

    async def _follow(self, former: EffectConsumer, lanes: list[EffectConsumer]) -> None:
        """Acknowledge what all lanes are past; the rest comes again later, or to another release."""
        passed_sequence = min([await lane.acknowledged_sequence() for lane in lanes])
        is_behind = True
        while is_behind and self._context.is_leading and not self._context.stop.is_set():
            deliveries = await former.fetch(FOLLOW_COUNT_MAX, FETCH_SECONDS_MAX)
            for delivery in deliveries:
                await self._answer(delivery, is_passed=delivery.message.sequence <= passed_sequence)
            is_behind = any(delivery.message.sequence <= passed_sequence for delivery in deliveries)

    async def _answer(self, delivery: Delivery, *, is_passed: bool) -> None:
        try:
            await (delivery.ack() if is_passed else delivery.nak(self._context.limits.follow_nak_seconds))
        except TransientError as exc:
            log.debug("acknowledgment lost", durable=self._spec.durable, error=str(exc))
