"""Programs that report demand, change it and stop; some never withdraw it."""

import random
from datetime import timedelta

from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.events.envelope import Envelope
from gpu_autoscaler.model.demands import DemandShape
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import FactId, derive_id
from gpu_autoscaler.sim.record import Record
from gpu_autoscaler.sim.timeline import VirtualLoop

SOURCES_COUNTS = (0, 0, 1, 2)
SAID_SECONDS = (600.0, 5400.0)  # between two reports of a source
HOLDS_SECONDS = (300.0, 2400.0)
WANTED_COUNTS = (0, 1, 1, 2, None)


class Askers:
    """All programs that report demand in a run."""

    def __init__(self, loop: VirtualLoop, record: Record, chance: random.Random) -> None:
        self._loop = loop
        self._record = record
        self._chance = chance
        self._sources = [f"program-{number}" for number in range(chance.choice(SOURCES_COUNTS))]
        self._said_count = 0
        self._is_over = False

    def begin(self) -> None:
        """Start reporting."""
        for source in self._sources:
            self._next(source)

    def leave(self) -> None:
        """Withdraw all demand."""
        self._is_over = True
        for source in self._sources:
            self._say(source, 0)

    def _next(self, source: str) -> None:
        self._loop.call_later(self._chance.uniform(*SAID_SECONDS), self._ask, source)

    def _ask(self, source: str) -> None:
        if not self._is_over:
            self._say(source, self._chance.choice(WANTED_COUNTS))
            self._next(source)

    def _say(self, source: str, count: int | None) -> None:
        """Report once; the report is lost while the broker is unavailable, as programs do not retry."""
        self._said_count += 1
        now = self._loop.now()
        wish = DemandReported(
            source=source,
            shape=DemandShape(gpu_count=self._chance.choice((1, 2))),
            count=count,
            until=now + timedelta(seconds=self._chance.uniform(*HOLDS_SECONDS)),
        )
        fact_id = FactId(derive_id("asker", source, self._said_count))
        try:
            self._record.publish(Envelope(id=fact_id, source=f"/{source}", time=now, fact=wish))
        except TransientError:
            return
