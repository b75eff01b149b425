"""Adds recorded facts to the audit trail whose act has no entry yet.

That is what trusted clients publish on the broker themselves, and what the gateway has passed on while the store was
away. The store moves the position in a stream with the entries, so that each fact is added once, whatever restarts; of
several gateways one is first. While no gateway runs, facts wait on the stream, for as long as it keeps them.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta

import msgspec
import structlog

from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.core.intake.reported_demand import violations_of
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.events.envelope import Envelope
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobCancelRequested, JobRejected, JobRequested
from gpu_autoscaler.events.policy import PolicyDirectiveGiven, PolicyDirectiveLifted
from gpu_autoscaler.model.audit import AuditEntry, instant_text
from gpu_autoscaler.model.errors import ConfigError, PermanentError, TransientError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.history import History, Stored
from gpu_autoscaler.store.protocol import Store, StreamPosition
from gpu_autoscaler_services.background import background
from gpu_autoscaler_services.gateway.audit import NAME_LENGTH_MAX, REASON_LENGTH_MAX, AuditTrail, act_of

ACTS: tuple[type[Fact], ...] = (
    JobRequested,
    JobCancelRequested,
    JobRejected,
    DemandReported,
    PolicyDirectiveGiven,
    PolicyDirectiveLifted,
)
STREAMS = tuple(sorted({fact.stream() for fact in ACTS}))
INTERVAL_SECONDS = 1.0  # wall time between two looks at the ends of the streams
CUT_STEPS_MAX = 500  # of 200 entries, an hour

log = structlog.get_logger()


class AuditProjection:
    """Follows the streams of acts."""

    def __init__(self, store: Store, bus: Bus, clock: Clock) -> None:
        self._store = store
        self._bus = bus
        self._history = History(bus, clock, keeps_refused=True)
        self._done = dict.fromkeys(STREAMS, -1)  # the end of the stream that this process has seen added

    async def advance(self) -> None:
        """Add what the streams have stored since. Raises TransientError; what is added stays added."""
        for stream in STREAMS:
            last = await self._bus.last_sequence(stream)
            if last != self._done[stream] and await self._advance(stream, last):
                self._done[stream] = last

    async def _advance(self, stream: str, last: int) -> bool:
        after = await self._store.audit_position(stream)
        if after > last:  # another stream of the same name, after a loss of the broker's disk
            return await self._project((), stream, after, 0) and await self._advance(stream, last)
        facts = [fact for fact in ACTS if fact.stream() == stream]
        async for batch in self._history.read(stream, facts, after=after, last=last):
            if batch:
                until = batch[-1].recorded.sequence
                if not await self._project(tuple(map(entry_of, batch)), stream, after, until):
                    return False
                after = until
        return after == last or await self._project((), stream, after, last)

    async def _project(self, entries: tuple[AuditEntry, ...], stream: str, after: int, until: int) -> bool:
        return await self._store.project_audit(entries, StreamPosition(stream=stream, after=after, until=until))


def entry_of(stored: Stored) -> AuditEntry:
    """Return the entry of a recorded fact: the name is the one that it has, which nobody has checked."""
    envelope = stored.recorded.envelope
    act = act_of(envelope.fact, envelope.id)
    assert act is not None, f"{envelope.type} is an act"  # noqa: S101 - a bug of ours
    refused = _why_refused(envelope)
    is_refused = isinstance(envelope.fact, JobRejected) or refused
    entry = AuditEntry(
        entry_id="",
        at=instant_text(stored.at),
        who=act.claimed_who[:NAME_LENGTH_MAX],
        authentication="recorded",
        entry_point="stream",
        verb=act.verb,
        object=act.object[:NAME_LENGTH_MAX],
        project_id=None if act.project_id is None else act.project_id[:NAME_LENGTH_MAX],
        outcome="refused" if is_refused else "allowed",
        reason=(refused or act.reason)[:REASON_LENGTH_MAX],
        fact_id=envelope.id,
    )
    return msgspec.structs.replace(entry, entry_id=f"fact/{entry.act_key}")


def _why_refused(envelope: Envelope) -> str:
    """Return why every reader ignores the demand report; empty: it counts, or it is another act."""
    if not isinstance(envelope.fact, DemandReported):
        return ""
    violations = (f"{violation.field}: {violation.reason}" for violation in violations_of(envelope.fact, envelope.time))
    return "; ".join((*envelope.unknown_fields, *violations))


@asynccontextmanager
async def following(projection: AuditProjection, trail: AuditTrail) -> AsyncIterator[None]:
    """Add recorded facts, and counted refusals, until the context ends."""

    async def run() -> None:
        while True:
            try:
                await projection.advance()
                await trail.flush()
            except (TransientError, PermanentError, ConfigError) as error:
                log.warning("recorded facts not in the audit trail yet, retried", error=str(error))
            except Exception:  # the next ones may be added
                log.exception("audit trail failed, retried")
            await asyncio.sleep(INTERVAL_SECONDS)

    async with background(run(), "audit trail"):
        yield


async def cut_expired(store: Store, now: datetime, age_max: timedelta) -> None:
    """Remove entries that are older. A broken chain is logged, and nothing of it is removed."""
    try:
        for _ in range(CUT_STEPS_MAX):
            if not await store.cut_audit(before=now - age_max, at=now):
                return
    except PermanentError as error:
        log.error("audit trail is broken, nothing removed", error=str(error))  # noqa: TRY400 - no bug of ours
