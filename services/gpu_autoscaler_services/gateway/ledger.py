"""Spend by time and by project, summed from `cost.accrued`. Exact: whole micro-dollars throughout."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from gpu_autoscaler.events.cost import CostAccrued
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.money import split_micro_usd
from gpu_autoscaler_services.gateway import schema

SLOT_SECONDS = 60  # finest resolution
DAY_SECONDS = 24 * 3600
SLOTS_PER_DAY = DAY_SECONDS // SLOT_SECONDS
DAYS_COUNT_MAX = 31  # a month; a gateway that starts reads what the stream still holds

Sums = defaultdict[int, int]  # slot number since 1970 -> micro-dollars


class Day:
    """The charges of one day of UTC. Days are dropped whole, so that all sums cover the same time."""

    def __init__(self) -> None:
        self.allocated: Sums = defaultdict(int)
        self.idle: Sums = defaultdict(int)
        self.projects: defaultdict[str | None, int] = defaultdict(int)


class Ledger:
    """Charges by minute, of the day of the newest one and the days before it. A repeated charge is ignored."""

    def __init__(self) -> None:
        self._days: defaultdict[int, Day] = defaultdict(Day)  # by day since 1970
        self._charged_until: dict[ProviderId, datetime] = {}  # spans of an instance follow each other without a gap

    @property
    def days(self) -> Mapping[int, Day]:
        """The charges by day since 1970."""
        return self._days

    def add(self, fact: CostAccrued) -> None:
        """Add a charge, spread evenly over its minutes."""
        known_until = self._charged_until.get(fact.provider_id)
        if known_until is not None and fact.from_at < known_until:
            return
        self._charged_until[fact.provider_id] = fact.to_at
        slots = _slots(fact.from_at, fact.to_at)
        for slot, idle in _split(fact.idle_micro_usd, slots):
            day = self._days[slot // SLOTS_PER_DAY]
            day.idle[slot] += idle
            day.allocated[slot] += 0  # every charged minute has both sums
        for share in fact.shares:
            for slot, allocated in _split(share.allocated_micro_usd, slots):
                day = self._days[slot // SLOTS_PER_DAY]
                day.allocated[slot] += allocated
                day.projects[share.project_id] += allocated
        if min(self._days) <= max(self._days) - DAYS_COUNT_MAX:
            self._drop_old_days()

    def _drop_old_days(self) -> None:
        first = max(self._days) - DAYS_COUNT_MAX + 1
        for number in [number for number in self._days if number < first]:
            del self._days[number]
        from_at = day_start(first)
        self._charged_until = {name: until for name, until in self._charged_until.items() if until >= from_at}

    def observe(self, recorded: Recorded) -> None:
        if isinstance(recorded.fact, CostAccrued):
            self.add(recorded.fact)


def even_day(from_at: datetime, to_at: datetime, idle_micro_usd: int, projects: Mapping[str | None, int]) -> Day:
    """Return a day with these sums, spread evenly over the time, which is within the day. `projects`: allocated."""
    day, slots = Day(), _slots(from_at, to_at)
    day.idle.update(_split(idle_micro_usd, slots))
    day.allocated.update(_split(sum(projects.values()), slots))
    day.projects.update(projects)
    return day


def cost_of(days: Mapping[int, Day], span_seconds: int) -> schema.Cost:
    """Return the spend in spans of this width, a multiple of a minute. Spans, total and projects cover the same
    charges: spans add up to the total, projects to what is allocated of it."""
    slots_per_span = span_seconds // SLOT_SECONDS
    allocated: Sums = defaultdict(int)
    idle: Sums = defaultdict(int)
    projects: defaultdict[str | None, int] = defaultdict(int)
    for day in days.values():
        for slot, amount in day.allocated.items():
            allocated[slot // slots_per_span] += amount
        for slot, amount in day.idle.items():
            idle[slot // slots_per_span] += amount
        for project_id, amount in day.projects.items():
            projects[project_id] += amount
    first = min((min(day.allocated) for day in days.values()), default=None)
    numbers = range(min(allocated), max(allocated) + 1) if allocated else ()  # include spans without spend
    return schema.Cost(
        span_seconds=span_seconds,
        from_at=None if first is None else _start(first, SLOT_SECONDS),
        allocated_micro_usd=sum(allocated.values()),
        idle_micro_usd=sum(idle.values()),
        spans=tuple(
            schema.CostSpan(
                from_at=_start(number, span_seconds), allocated_micro_usd=allocated[number], idle_micro_usd=idle[number]
            )
            for number in numbers
        ),
        projects=tuple(
            schema.ProjectCost(project_id=project_id, allocated_micro_usd=amount)
            for project_id, amount in sorted(projects.items(), key=lambda entry: (-entry[1], entry[0] or ""))
        ),
    )


def project_cost_of(days: Mapping[int, Day], project_id: str) -> schema.Cost:
    """Return what was allocated to one project, in spans of UTC days; idle capacity belongs to no project."""
    sums = {number: day.projects[project_id] for number, day in sorted(days.items()) if project_id in day.projects}
    numbers = range(min(sums), max(sums) + 1) if sums else ()  # include days without spend
    return schema.Cost(
        span_seconds=DAY_SECONDS,
        from_at=day_start(min(sums)) if sums else None,
        allocated_micro_usd=sum(sums.values()),
        idle_micro_usd=0,
        spans=tuple(
            schema.CostSpan(from_at=day_start(number), allocated_micro_usd=sums.get(number, 0), idle_micro_usd=0)
            for number in numbers
        ),
        projects=(schema.ProjectCost(project_id=project_id, allocated_micro_usd=sum(sums.values())),),
    )


def day_start(number: int) -> datetime:
    """Return the start of the day since 1970."""
    return _start(number * SLOTS_PER_DAY, SLOT_SECONDS)


def _start(number: int, width_seconds: int) -> datetime:
    return datetime.fromtimestamp(number * width_seconds, tz=UTC)


def _slots(from_at: datetime, to_at: datetime) -> list[tuple[int, int]]:
    """Return the slots of a span with its microseconds in each; an empty span has one slot."""
    start, end = (int(instant.timestamp() * 1_000_000) for instant in (from_at, to_at))
    width = SLOT_SECONDS * 1_000_000
    first, last = start // width, max(start, end - 1) // width
    slots = [(slot, min(end, (slot + 1) * width) - max(start, slot * width)) for slot in range(first, last + 1)]
    return slots if end > start else [(first, 1)]


def _split(amount_micro_usd: int, slots: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield each slot with its part of the amount."""
    parts = split_micro_usd(amount_micro_usd, [weight for _, weight in slots])
    return zip((slot for slot, _ in slots), parts, strict=True)
