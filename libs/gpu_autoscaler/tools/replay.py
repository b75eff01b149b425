"""Makes a recorded plan again: the facts up to its cut, folded; the policy; `plan`; compared byte for byte.

Where the first facts have aged out, the nearest snapshot below the cut stands for them. Called by `gpu-autoscaler
recompute`. Reads streams and store, and writes nothing.
"""

import difflib
import enum
from collections.abc import Mapping

import msgspec

from gpu_autoscaler.bus.protocol import Bus, StreamSpan
from gpu_autoscaler.core.documents import effective_policy
from gpu_autoscaler.core.fold import fold
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.catalogue import FACTS
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.gpu import GpuNodeSampled
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import Cut, Plan
from gpu_autoscaler.model.ids import PlanId
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.digests import core_digest, policy_digest
from gpu_autoscaler.runtime.snapshot_codec import Label, Refusal, decode_label
from gpu_autoscaler.runtime.snapshots import refused, rewritten, state_of
from gpu_autoscaler.store.protocol import SnapshotRow, Store
from gpu_autoscaler.tools.history import History

DIFFERENCE_LINES_MAX = 80
_NOT_FOLDED = frozenset({GpuNodeSampled})  # raw samples, by far most of their stream; decisions use the summaries


class Verdict(enum.IntEnum):
    """How a recomputation ended; the value is the exit code."""

    EQUAL = 0
    DIFFERS = 1
    UNKNOWN_PLAN = 3
    FACTS_GONE = 5
    OTHER_CORE = 6
    OTHER_POLICY = 7


class Recomputation(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it: a sentence, and where the plans differ the lines that do."""

    verdict: Verdict
    sentence: str
    difference: tuple[str, ...] = ()
    facts_count: int = 0


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What the facts are folded onto."""

    name: str = ""  # of the snapshot, with the words that lead to it; empty: the beginning
    state: ClusterState = EMPTY_STATE
    sequences: dict[str, int] = {}
    missing: str = ""  # what is not known any more, and why no snapshot stands for it


async def recompute(
    bus: Bus, plan_id: str, policy: ScalingPolicy, clock: Clock, store: Store | None = None
) -> Recomputation:
    """Recompute the plan of this id. Raises TransientError when broker or store are away.

    The digests are compared first: by other code or another policy an equal plan would prove nothing. That the oldest
    facts have aged out, and no snapshot in `store` stands for them, is a verdict only where the plans differ; else they
    did not matter.
    """
    history = History(bus, clock)
    recorded = await _recorded_plan(history, PlanId(plan_id))
    if recorded is None:
        return await _not_in_the_stream(bus, plan_id, store)
    core = core_digest()
    if recorded.core_digest != core:
        return Recomputation(
            verdict=Verdict.OTHER_CORE,
            sentence=f"made by core {recorded.core_digest} (version {recorded.service_version or 'unknown'}), "
            f"this one is {core}; recompute with the version that made it",
        )
    start = await start_of(bus, history, recorded, store)
    return await _compare(history, start, recorded, policy)


async def _not_in_the_stream(bus: Bus, plan_id: str, store: Store | None) -> Recomputation:
    """The stream may have begun anew since: what the store of record says of the plan tells that from a wrong id."""
    row = None if store is None else await store.plan(PlanId(plan_id))
    if row is None:
        return Recomputation(
            verdict=Verdict.UNKNOWN_PLAN,
            sentence=f"no plan {plan_id!r} in the stream SCALING; `gpu-autoscaler plans -o name` lists the last ones",
        )
    span = await bus.span(ScalingPlanMade.stream())
    return Recomputation(
        verdict=Verdict.FACTS_GONE,
        sentence=f"the store of record has this plan of {row.made_at:%Y-%m-%d %H:%M:%S} UTC, but its facts are gone: "
        f"the stream SCALING was made at {span.created_at:%Y-%m-%d %H:%M:%S} UTC, or has forgotten them",
    )


async def _compare(history: History, start: Start, recorded: ScalingPlanMade, policy: ScalingPolicy) -> Recomputation:
    state, facts_count = await _state_at(history, start, recorded.cut)
    in_force = effective_policy(policy, state.policy_documents)
    if recorded.policy_digest != (own_policy := policy_digest(in_force)):
        return Recomputation(
            verdict=Verdict.OTHER_POLICY,
            sentence=f"made with policy {recorded.policy_digest}, this one is {own_policy}; "
            "name the file that was used with --policy",
        )
    again = plan(state, in_force, recorded.plan.as_of)
    source = f"{start.name}{facts_count} facts"
    if msgspec.json.encode(again) == msgspec.json.encode(recorded.plan):
        return Recomputation(
            verdict=Verdict.EQUAL, sentence=f"equal, byte for byte, from {source}", facts_count=facts_count
        )
    return Recomputation(
        verdict=Verdict.FACTS_GONE if start.missing else Verdict.DIFFERS,
        sentence=f"cannot be told: {start.missing}"
        if start.missing
        else f"differs, from {source} (- recorded, + recomputed)",
        difference=tuple(_difference(recorded.plan, again)),
        facts_count=facts_count,
    )


async def _recorded_plan(history: History, plan_id: PlanId) -> ScalingPlanMade | None:
    async for batch in history.read(ScalingPlanMade.stream(), [ScalingPlanMade]):
        for recorded in batch:
            if isinstance(recorded.fact, ScalingPlanMade) and recorded.fact.plan_id == plan_id:
                return recorded.fact
    return None


async def start_of(bus: Bus, history: History, recorded: ScalingPlanMade, store: Store | None) -> Start:
    """The beginning, while all of it is kept; else the nearest snapshot below the plan's cut, if one serves."""
    spans = {stream: await bus.span(stream) for stream, _ in recorded.cut.last_sequences}
    aged = [
        f"{stream}: the first one kept is {span.first_sequence}"
        if span.first_sequence <= span.last_sequence
        else f"{stream}: nothing is kept"
        for stream, span in spans.items()
        if not await history.is_from_the_beginning(stream)
    ]
    if not aged:
        return Start()
    facts_gone = f"facts have aged out ({'; '.join(aged)})"
    if store is None:
        return Start(missing=f"{facts_gone}, and there is no store here to take a snapshot from; set store.url")
    rows, below_count, refusal = await store.snapshots(), 0, None
    for row in rows:
        label = decode_label(row.label)
        if isinstance(label, Label) and not is_below(label.cut, recorded.cut):
            continue
        below_count += 1
        found = await from_snapshot(bus, store, row, label, recorded.core_digest, spans)
        if isinstance(found, Start):
            return found
        refusal = refusal or found
    reason = (
        f"the nearest of {below_count} below the plan's cut does not serve: {refusal.detail}"
        if refusal
        else (f"none of {len(rows)} kept is below the plan's cut")
    )
    return Start(missing=f"{facts_gone}, and there is no snapshot: {reason}")


async def from_snapshot(
    bus: Bus, store: Store, row: SnapshotRow, label: Label | Refusal, core: str, spans: Mapping[str, StreamSpan]
) -> Start | Refusal:
    """Return the state that was kept, if core and streams are those that it stands for, else why not."""
    if isinstance(label, Refusal):
        return label
    folds = [fact for stream in spans for fact in folded_of(stream)]
    refusal = refused(label, core, folds, spans) or await rewritten(bus, label.marks)
    if refusal is not None:
        return refusal
    state = await state_of(store, row, label)
    if isinstance(state, Refusal):
        return state
    name = f"the snapshot of {row.kept_at:%Y-%m-%d %H:%M:%S} UTC and "
    return Start(name=name, state=state, sequences=dict(label.cut.last_sequences))


def is_below(cut: Cut, other: Cut) -> bool:
    """True when all that is in the first cut is in the other one too."""
    last = dict(other.last_sequences)
    return all(sequence <= last.get(stream, 0) for stream, sequence in cut.last_sequences)


def folded_of(stream: str) -> list[type[Fact]]:
    """Return the facts of a stream that a state is folded from."""
    return [fact for fact in FACTS if fact.stream() == stream and fact not in _NOT_FOLDED]


async def _state_at(history: History, start: Start, cut: Cut) -> tuple[ClusterState, int]:
    """The state at the cut, and how many facts were folded onto the start."""
    state, facts_count = start.state, 0
    aside = frozenset(cut.set_aside)
    for stream, last in cut.last_sequences:
        after = start.sequences.get(stream, 0)
        async for batch in history.read(stream, folded_of(stream), after=after, last=last, aside=aside):
            state = fold(state, batch)
            facts_count += len(batch)
    return state, facts_count


def _difference(recorded: Plan, again: Plan) -> list[str]:
    before, after = (
        msgspec.json.format(msgspec.json.encode(each), indent=2).decode().splitlines() for each in (recorded, again)
    )
    lines = list(difflib.unified_diff(before, after, "recorded", "recomputed", lineterm=""))
    if len(lines) > DIFFERENCE_LINES_MAX:
        lines = [*lines[:DIFFERENCE_LINES_MAX], f"... and {len(lines) - DIFFERENCE_LINES_MAX} more lines"]
    return lines
