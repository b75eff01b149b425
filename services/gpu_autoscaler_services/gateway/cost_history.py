"""Spend of past days: what the gateway has read from the stream, and before that the charges in the store.

The stream holds days of charges, the store a year of them, old ones as one row an instance and UTC day. Such a day has
no times of day: its spend is spread evenly between its first and last charge.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime, timedelta

import msgspec

from gpu_autoscaler.core.state.ledger import period_start
from gpu_autoscaler.events.cost import CostAccrued
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.money import split_micro_usd
from gpu_autoscaler.store.protocol import Store
from gpu_autoscaler_services.gateway import schema
from gpu_autoscaler_services.gateway.ledger import Day, Ledger, cost_of, day_start, even_day, project_cost_of
from gpu_autoscaler_services.gateway.paging import bad_cursor, cursor_of, read_cursor

# Rows of one answer: 31 days of 3,000 instances, at most 100 MB while they are added up. Then fewer days are answered.
ROWS_COUNT_MAX = 100_000
DAYS_KEPT_COUNT_MAX = 62  # from the store; each takes up to 300 kB
KEPT_SECONDS_MAX = 3600.0  # cluster time; refunds and late spans change a day afterwards
_DAY = timedelta(days=1)
Now = Callable[[], datetime]  # cluster time
_EPOCH = date(1970, 1, 1)


class _Idle(msgspec.Struct):
    """The time and idle cost of the charges of one UTC day."""

    first_at: datetime
    last_at: datetime
    idle_micro_usd: int = 0


class CostHistory:
    """Spend by days, newest first in pages."""

    def __init__(self, ledger: Ledger, store: Store, now: Now, *, span_days: int, ledger_days: int) -> None:
        """`span_days`: age from which the store has a row an instance and day; `ledger_days`: retention of these."""
        self._ledger = ledger
        self._store = store
        self._now = now
        self._span_days = span_days
        self._ledger_days = ledger_days
        self._kept: dict[int, Day | None] = {}  # by day since 1970; None: no charge
        self._kept_since = now()

    async def cost(
        self, span_seconds: int, *, before: date | None, days_count: int, project_id: str | None = None
    ) -> schema.Cost:
        """Return the spend of this many days before the day, by default until now. Raises TransientError.

        `project_id`: only of this project, in spans of UTC days.
        """
        read, today = self._ledger.days, _number(self._now())
        end = max([today, *read]) + 1 if before is None else (before - _EPOCH).days
        # The oldest day of the stream is incomplete; what is not merged yet is too much to read.
        read_from = min(min(read, default=today) + 1, today - self._span_days)
        charged_at = await self._store.first_charged_at()
        oldest = min([*read, today if charged_at is None else max(_number(charged_at), today - self._ledger_days)])
        first, stored_end = max(end - days_count, oldest), min(end, read_from)
        stored = await self._stored(first, stored_end) if first < stored_end else {}
        if first < stored_end:
            first = min(stored, default=stored_end)
        if first >= end > oldest:
            raise TransientError(
                f"charges before {day_start(end):%Y-%m-%d} are not merged yet, and more than {ROWS_COUNT_MAX} rows; "
                "retry later, or ask for days before"
            )
        days = {number: day for number, day in read.items() if first <= number < end}
        daily = {number: day for number, day in stored.items() if day is not None}
        return msgspec.structs.replace(
            cost_of(days | daily, span_seconds) if project_id is None else project_cost_of(days | daily, project_id),
            daily_before=day_start(max(daily) + 1) if daily else None,
            next_cursor=cursor_of(f"{day_start(first):%Y-%m-%d}") if oldest < first < end else None,
        )

    async def _stored(self, first: int, end: int) -> Mapping[int, Day | None]:
        """Return the days; without the oldest ones if they have too many rows."""
        now = self._now()
        if (now - self._kept_since).total_seconds() > KEPT_SECONDS_MAX or len(self._kept) > DAYS_KEPT_COUNT_MAX:
            self._kept, self._kept_since = {}, now
        while missing := [number for number in range(first, end) if number not in self._kept]:
            since, until = min(missing), max(missing) + 1
            # A span that begins on the day before may end on the first one.
            rows = await self._store.charges_between(day_start(since - 1), day_start(until), count_max=ROWS_COUNT_MAX)
            if len(rows) < ROWS_COUNT_MAX:
                added = await asyncio.to_thread(_added_up, rows)
                self._kept |= {number: added.get(number) for number in range(since, until)}
            else:
                first = (since + until + 1) // 2
        return {number: self._kept[number] for number in range(first, end)}


def page_end(cursor: str) -> date:
    """Return the day that a page of costs ends before. Raises a 422."""
    try:
        return date.fromisoformat(read_cursor(cursor))
    except ValueError as error:
        raise bad_cursor() from error


def _number(at: datetime) -> int:
    """Return the UTC day since 1970."""
    return int(period_start("day", at).timestamp()) // 86_400


def _added_up(spans: Iterable[CostAccrued]) -> Mapping[int, Day]:
    """Return the sums by day; a span over midnight counts by its microseconds on either side."""
    found: dict[int, _Idle] = {}
    allocated: defaultdict[int, defaultdict[str | None, int]] = defaultdict(lambda: defaultdict(int))
    for span in spans:
        parts = _parts(span)
        weights = [max(1, (until - start) // timedelta(microseconds=1)) for start, until in parts]
        numbers = [_number(start) for start, _ in parts]
        for number, (start, until), idle in zip(
            numbers, parts, split_micro_usd(span.idle_micro_usd, weights), strict=True
        ):
            day = found.setdefault(number, _Idle(first_at=start, last_at=until))
            day.first_at, day.last_at = min(day.first_at, start), max(day.last_at, until)
            day.idle_micro_usd += idle
        for share in span.shares:
            for number, amount in zip(numbers, split_micro_usd(share.allocated_micro_usd, weights), strict=True):
                allocated[number][share.project_id] += amount
    return {
        number: even_day(day.first_at, day.last_at, day.idle_micro_usd, allocated[number])
        for number, day in found.items()
    }


def _parts(span: CostAccrued) -> list[tuple[datetime, datetime]]:
    """Return the span cut at midnights; a refund, which ends before it begins, is one instant."""
    start, parts = span.from_at.astimezone(UTC), []
    until = max(start, span.to_at.astimezone(UTC))
    while True:
        midnight = period_start("day", start) + _DAY
        parts.append((start, min(midnight, until)))
        if until <= midnight:
            return parts
        start = midnight
