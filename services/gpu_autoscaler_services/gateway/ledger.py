"""Spend by time and by project, summed from `cost.accrued`. Exact: whole micro-dollars throughout."""

from collections import defaultdict
from datetime import UTC, datetime

from gpu_autoscaler.events.cost import CostAccrued
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.money import split_micro_usd
from gpu_autoscaler_services.gateway import schema

SLOT_SECONDS = 60  # finest resolution
SLOTS_COUNT_MAX = 31 * 24 * 60  # retention of the stream plus a day


class Ledger:
    """Charges by minute. A repeated charge is ignored."""

    def __init__(self) -> None:
        self._allocated: defaultdict[int, int] = defaultdict(int)  # slot number since 1970 -> micro-dollars
        self._idle: defaultdict[int, int] = defaultdict(int)
        self._projects: defaultdict[str | None, int] = defaultdict(int)
        self._charged_until: dict[ProviderId, datetime] = {}  # spans of an instance follow each other without a gap

    def add(self, fact: CostAccrued) -> None:
        """Add a charge, spread evenly over its minutes."""
        known_until = self._charged_until.get(fact.provider_id)
        if known_until is not None and fact.from_at < known_until:
            return
        self._charged_until[fact.provider_id] = fact.to_at
        slots = _slots(fact.from_at, fact.to_at)
        weights = [weight for _, weight in slots]
        allocated = fact.total_micro_usd - fact.idle_micro_usd
        for slot_totals, amount in ((self._allocated, allocated), (self._idle, fact.idle_micro_usd)):
            for (slot, _), share in zip(slots, split_micro_usd(amount, weights), strict=True):
                slot_totals[slot] += share
        for cost_share in fact.shares:
            self._projects[cost_share.project_id] += cost_share.allocated_micro_usd
        while len(self._allocated) > SLOTS_COUNT_MAX:
            oldest = min(self._allocated)
            del self._allocated[oldest]
            self._idle.pop(oldest, None)

    def observe(self, recorded: Recorded) -> None:
        if isinstance(recorded.fact, CostAccrued):
            self.add(recorded.fact)

    def cost(self, span_seconds: int) -> schema.Cost:
        """Return the spend in spans of this width, a multiple of a minute."""
        slots_per_span = span_seconds // SLOT_SECONDS
        numbers = {slot // slots_per_span for slot in self._allocated}
        numbers = set(range(min(numbers), max(numbers) + 1)) if numbers else numbers  # include spans without spend
        allocated, idle = _by_span(self._allocated, slots_per_span), _by_span(self._idle, slots_per_span)
        return schema.Cost(
            span_seconds=span_seconds,
            allocated_micro_usd=sum(allocated.values()),
            idle_micro_usd=sum(idle.values()),
            spans=tuple(
                schema.CostSpan(
                    from_at=datetime.fromtimestamp(number * span_seconds, tz=UTC),
                    allocated_micro_usd=allocated[number],
                    idle_micro_usd=idle[number],
                )
                for number in sorted(numbers)
            ),
            projects=tuple(
                schema.ProjectCost(project_id=project_id, allocated_micro_usd=amount)
                for project_id, amount in sorted(self._projects.items(), key=lambda entry: (-entry[1], entry[0] or ""))
            ),
        )


def _slots(from_at: datetime, to_at: datetime) -> list[tuple[int, int]]:
    """Return the slots of a span with its microseconds in each; an empty span has one slot."""
    start, end = (int(instant.timestamp() * 1_000_000) for instant in (from_at, to_at))
    width = SLOT_SECONDS * 1_000_000
    first, last = start // width, max(start, end - 1) // width
    slots = [(slot, min(end, (slot + 1) * width) - max(start, slot * width)) for slot in range(first, last + 1)]
    return slots if end > start else [(first, 1)]


def _by_span(slot_totals: dict[int, int], slots_per_span: int) -> defaultdict[int, int]:
    sums: defaultdict[int, int] = defaultdict(int)
    for slot, amount in slot_totals.items():
        sums[slot // slots_per_span] += amount
    return sums
