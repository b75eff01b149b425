"""The bus of one process keeps the contract."""

from datetime import UTC, datetime

import pytest
from tests.contract.bus.contract import BusContract
from tests.contract.bus.dead_letters import DeadLetterContract
from tests.contract.bus.desk import Desk
from tests.contract.bus.leases import LeaseContract
from tests.support.memory_bus import MemoryBus

from gpu_autoscaler.bus.memory_broker import MemoryBroker
from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.bus.streams import BusDeclaration


class TestMemoryBus(BusContract, DeadLetterContract, LeaseContract):
    @pytest.fixture
    def desk(self) -> Desk:
        broker = MemoryBroker()

        async def connect(declared: BusDeclaration) -> Bus:
            return MemoryBus(broker, declared, now=lambda: datetime.now(UTC))

        return Desk(connect)
