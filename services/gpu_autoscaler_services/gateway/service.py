"""The gateway's declarations. Its doors are HTTP: `server.py` opens them, the handlers stand in `api_*.py`."""

from datetime import datetime, timedelta
from typing import ClassVar

from gpu_autoscaler.events.catalogue import FACTS
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.gpu import GpuNodeSampled
from gpu_autoscaler.events.job import JobCancelRequested, JobRequested
from gpu_autoscaler.events.policy import PolicyDirectiveGiven, PolicyDirectiveLifted
from gpu_autoscaler.events.shadow import ShadowPlanMade
from gpu_autoscaler.runtime.service import Outputs
from gpu_autoscaler.store.protocol import Store

# No part of the folded state: the tail (`tail.py`) reads them.
_NOT_FOLDED = frozenset({GpuNodeSampled, ShadowPlanMade})


# How long an Idempotency-Key stands for its request: a client that has not asked again within a day has given up.
KEY_AGE_MAX = timedelta(days=1)


class Gateway:
    """The door for people and programs. Shows what the record says; asks for jobs on behalf of those who cannot."""

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
    starts_from_snapshot: ClassVar[bool] = True  # the tail and the ledger read for themselves

    def __init__(self, store: Store) -> None:
        self._store = store

    async def on_tick(self, now: datetime) -> Outputs:
        """Forget which keys were used long ago; nothing is said about it."""
        await self._store.forget_requests(now - KEY_AGE_MAX)
        return ()
