"""Declaration of the gateway. `server.py` serves HTTP, the handlers are in `api/`."""

from datetime import datetime, timedelta
from typing import ClassVar

from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.gpu import GpuNodeSampled
from gpu_autoscaler.events.job import JobCancelRequested, JobRequested
from gpu_autoscaler.events.policy import PolicyDirectiveGiven, PolicyDirectiveLifted
from gpu_autoscaler.events.shadow import ShadowPlanMade
from gpu_autoscaler.runtime.service import Outputs
from gpu_autoscaler.store.protocol import Store

# Not folded: the tail (`recent_facts.py`) reads them.
_NOT_FOLDED = frozenset({GpuNodeSampled, ShadowPlanMade})


# Validity of an Idempotency-Key: clients do not retry after a day.
KEY_AGE_MAX = timedelta(days=1)


class Gateway:
    """REST entry point: shows the recorded state, and publishes requests of people and programs."""

    name: ClassVar[str] = "gateway"
    consumes: ClassVar[tuple[type[Fact], ...]] = ()
    folds: ClassVar[tuple[type[Fact], ...]] = tuple(fact for fact in FACTS if fact not in _NOT_FOLDED)
    publishes: ClassVar[tuple[type[Fact], ...]] = (
        JobRequested,
        JobCancelRequested,
        DemandReported,
        PolicyDirectiveGiven,
        PolicyDirectiveLifted,
    )
    urgent: ClassVar[tuple[type[Fact], ...]] = ()
    tick_seconds: ClassVar[float | None] = 3600.0
    starts_from_snapshot: ClassVar[bool] = True  # tail and ledger read their streams separately

    def __init__(self, store: Store) -> None:
        self._store = store

    async def on_tick(self, now: datetime) -> Outputs:
        """Delete expired Idempotency-Keys. Publishes nothing."""
        await self._store.delete_requests(now - KEY_AGE_MAX)
        return ()
