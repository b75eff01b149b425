"""Of two plans with one parent one is refused by the stream: always, on a real server."""

import asyncio

import pytest
from tests.support.nats import nats_store, server

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.protocol import Ack, Message
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.bus.streams import BusDeclaration, streams
from gpu_autoscaler.model.errors import StalePlan

__all__ = ["nats_store", "server"]  # fixtures

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

SUBJECT = "scaling.plan_made"


@pytest.mark.parametrize("races_count", [1_000, pytest.param(10_000, marks=pytest.mark.sweep)])
async def test_each_race_has_one_winner(server: NatsServer, races_count: int) -> None:
    """Two connections, one parent each time: one accepted, one refused, and the stream holds an unbroken chain."""
    declared = BusDeclaration(streams=streams())
    scalers = [await NatsBus.connect(server.url, name=name, declared=declared) for name in ("one", "other")]
    await scalers[0].ensure()
    parent, wins, refused_count = 0, [0, 0], 0
    for race in range(races_count):
        # Whoever is asked first has a head start; they take turns with it.
        order = (0, 1) if race % 2 else (1, 0)
        said = await asyncio.gather(
            *(
                scalers[number].publish(
                    SUBJECT, b"%d" % parent, message_id=f"{race}/{number}", expected_last_subject_sequence=parent
                )
                for number in order
            ),
            return_exceptions=True,
        )
        accepted = [(number, ack) for number, ack in zip(order, said, strict=True) if isinstance(ack, Ack)]
        refused_count += sum(isinstance(answer, StalePlan) for answer in said)
        assert len(accepted) == 1, (race, said)
        ((winner, ack),) = accepted
        assert not ack.is_duplicate
        assert ack.sequence == race + 1
        wins[winner] += 1
        parent = ack.sequence
    assert (sum(wins), refused_count) == (races_count, races_count)
    assert min(wins) > 0, "a race that one side always wins is none"
    parents = [int(message.payload) for message in await read_all(scalers[0], races_count)]
    assert parents == list(range(races_count))
    for bus in scalers:
        await bus.close()


async def read_all(bus: NatsBus, count: int) -> list[Message]:
    """The whole stream."""
    projection = await bus.projection("SCALING")
    messages: list[Message] = []
    async with asyncio.timeout(60):
        async for batch in projection:
            messages += batch
            if len(messages) >= count:
                break
    await projection.close()
    return messages
