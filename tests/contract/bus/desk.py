"""A test's own corner of whatever broker it is given."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from uuid import uuid4

from gpu_autoscaler.bus.protocol import Bus, Delivery, Message
from gpu_autoscaler.bus.streams import MEBIBYTE, BusDeclaration, ConsumerSpec, MessageTtl, StreamSpec

Connect = Callable[[BusDeclaration], Awaitable[Bus]]

SOON_SECONDS = 60.0
ACK_WAIT_SECONDS = 1.5  # an acknowledgment comes well within, also on a busy machine


class Desk:
    """One test's corner of a broker: a stream and a consumer of its own name."""

    def __init__(self, connect: Connect) -> None:
        self.connect = connect
        self.root = f"t{uuid4().hex[:10]}"
        self.stream = StreamSpec(
            name=self.root.upper(),
            subjects=(f"{self.root}.>",),
            description="of a test",
            max_age_seconds=3600,
            max_bytes=64 * MEBIBYTE,
            message_ttls=(MessageTtl(subject_root=f"{self.root}.sampled", ttl_seconds=1),),
        )
        self.consumer = ConsumerSpec(
            durable=f"service-{self.root}-act",
            stream=self.stream.name,
            subjects=(f"{self.root}.asked",),
            ack_wait_seconds=ACK_WAIT_SECONDS,
            max_ack_pending=3,
            max_deliver=50,
        )

    def subject(self, word: str = "asked") -> str:
        return f"{self.root}.{word}"

    def declared(self, *, stream: StreamSpec | None = None, consumer: ConsumerSpec | None = None) -> BusDeclaration:
        return BusDeclaration(streams=(stream or self.stream,), consumers=(consumer or self.consumer,))

    async def bus(self, declared: BusDeclaration | None = None) -> Bus:
        bus = await self.connect(declared or self.declared())
        await bus.ensure()
        return bus


async def read(bus: Bus, stream: str, count: int, subjects: Sequence[str] = (), after: int = 0) -> list[Message]:
    """The next `count` messages, or a failure when they do not come soon."""
    projection = await bus.projection(stream, subjects=subjects, after_sequence=after)
    messages: list[Message] = []
    async with asyncio.timeout(SOON_SECONDS):
        async for batch in projection:
            messages += batch
            if len(messages) >= count:
                break
    await projection.close()
    return messages


def only(deliveries: Sequence[Delivery]) -> Delivery:
    """The one delivery that there is."""
    assert len(deliveries) == 1, [delivery.message for delivery in deliveries]
    return deliveries[0]


def patient(desk: Desk) -> ConsumerSpec:
    """The desk's consumer with the ack wait of production."""
    return ConsumerSpec(
        durable=desk.consumer.durable, stream=desk.stream.name, subjects=desk.consumer.subjects,
        max_ack_pending=desk.consumer.max_ack_pending, max_deliver=desk.consumer.max_deliver,
    )  # fmt: skip
