"""The bus on NATS JetStream keeps the contract, on a real server."""

from collections.abc import AsyncIterator

import nats
import pytest
from tests.contract.bus.contract import BusContract
from tests.contract.bus.dead_letters import DeadLetterContract
from tests.contract.bus.desk import Desk
from tests.contract.bus.leases import LeaseContract
from tests.support.nats import nats_url

from gpu_autoscaler.bus.nats import clients
from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.nats.link import Timeouts
from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.bus.streams import ADVISORY, DEAD, LEASES, BusDeclaration

__all__ = ["nats_url"]  # a fixture

pytestmark = pytest.mark.integration


class TestNatsBus(BusContract, DeadLetterContract, LeaseContract):
    @pytest.fixture
    async def desk(self, nats_url: str, request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
        """A desk whose streams are gone afterwards; a broker's own dead letters are left alone."""
        client = await nats.connect(nats_url)
        manager = client.jsm()
        there = {info.config.name for info in await manager.streams_info()}
        if "mortuary" in request.fixturenames and there & {DEAD, ADVISORY}:
            pytest.skip(f"the broker at {nats_url} keeps dead letters of its own")
        buses: list[NatsBus] = []

        async def connect(declared: BusDeclaration) -> Bus:
            bus = await NatsBus.connect(
                nats_url, name="contract", declared=declared, timeouts=Timeouts(no_stream_seconds_max=0.2)
            )
            buses.append(bus)
            return bus

        desk = Desk(connect)
        yield desk
        for bus in buses:
            await bus.close()
        for name in (desk.stream.name, DEAD, ADVISORY, LEASES.stream):
            if name not in there and name in {info.config.name for info in await manager.streams_info()}:
                await manager.delete_stream(name)
        await client.close()


class TestStockNatsBus(TestNatsBus):
    """The same with the parser of nats-py itself, as with a version that ours does not fit."""

    @pytest.fixture(autouse=True)
    def another_version(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Our parser lacks a name."""
        monkeypatch.setattr(clients, "missing_names", lambda: ("Client._ps",))

    async def test_it_is_reported(self, desk: Desk) -> None:
        """The metric `bus_stock_parser` is set by it."""
        bus = await desk.bus()
        assert isinstance(bus, NatsBus)
        assert bus.is_parser_stock
