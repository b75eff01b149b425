"""The simulator's store keeps the contract of the real one."""

import pytest
from tests.contract.store.audit_contract import AuditContract
from tests.contract.store.contract import Open, StoreContract

from gpu_autoscaler.sim.adapters.store import MemoryStore, Tables


@pytest.fixture
def open_store() -> Open:
    """Opens the same tables each time."""
    tables = Tables()

    async def open_it() -> MemoryStore:
        return MemoryStore(tables)

    return open_it


class TestMemoryStore(StoreContract, AuditContract):
    """Everything that every store does."""
