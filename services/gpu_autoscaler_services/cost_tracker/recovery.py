"""Completes a ledger that is older than the stream: a backup of the database, or a new one, beside streams that are
whole. Runs once, before the first charge."""

from collections.abc import Sequence

import structlog

from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.events.cost import CostAccrued
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.decode import decode_message
from gpu_autoscaler.runtime.history import History
from gpu_autoscaler.store.protocol import Store

# Spans are published in order of time, except for those of one failed call (service.py: PUBLISHED_COUNT_MAX). They are
# committed in that order, as the last one says up to when its instance is charged.
SORTED_COUNT = 5_000
_KEPT_COUNT = 1_000

log = structlog.get_logger()


async def complete_ledger(store: Store, bus: Bus, clock: Clock) -> int:
    """Commit the published spans that the ledger lacks, and return their number.

    A span is committed before it is published, so a ledger that has the last published one has all of them. Raises
    TransientError while broker or store are away.
    """
    last = await bus.last_message(CostAccrued.stream(), CostAccrued.subject_root())
    if last is None or await _has(store, decode_message(last, clock)):
        return 0
    added_count, spans = 0, list[CostAccrued]()
    async for batch in History(bus, clock).read(CostAccrued.stream(), [CostAccrued], last=last.sequence):
        spans += [stored.recorded.fact for stored in batch if isinstance(stored.recorded.fact, CostAccrued)]
        if len(spans) >= SORTED_COUNT:
            spans.sort(key=lambda span: span.from_at)
            added_count += await _commit(store, spans[:-_KEPT_COUNT])
            spans = spans[-_KEPT_COUNT:]
    added_count += await _commit(store, sorted(spans, key=lambda span: span.from_at))
    log.warning(
        "ledger completed from the stream", spans_count=added_count, step="compare its sums with the cloud's bill"
    )
    return added_count


async def _has(store: Store, recorded: Recorded) -> bool:
    """Return True if the ledger has this span, or a later one of its instance."""
    span = recorded.fact
    assert isinstance(span, CostAccrued)  # noqa: S101 - a bug: the subject has no other facts
    charge = (await store.last_charges([span.provider_id])).get(span.provider_id)
    return charge is not None and charge.last.from_at >= span.from_at


async def _commit(store: Store, spans: Sequence[CostAccrued]) -> int:
    """Commit the spans, and that the stream has them; return how many the ledger lacked."""
    added_count = await store.charge(spans)
    if added_count:
        for span in spans:
            await store.confirm_charge(span)
    return added_count
