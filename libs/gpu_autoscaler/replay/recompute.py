"""Does this code make the same plan from the same facts? Recomputes a recorded plan and compares byte for byte.

Folds the facts up to the plan's cut and calls `plan` with the policy. If the first facts have expired, or another
version folded them, the nearest snapshot below the cut replaces them. Called by `gpu-autoscaler recompute`. Reads
streams and store, writes nothing.
"""

import difflib
import enum
from collections.abc import Mapping

import msgspec

from gpu_autoscaler.bus.protocol import Bus, StreamSpan
from gpu_autoscaler.core.checked_plan import recomputed_plan
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.policy.documents import effective_policy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.gpu import GpuNodeSampled
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import Cut, Plan
from gpu_autoscaler.model.ids import PlanId
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.digests import core_digest, policy_digest
from gpu_autoscaler.runtime.history import History
from gpu_autoscaler.runtime.snapshot_codec import Label, Refusal, decode_label
from gpu_autoscaler.runtime.snapshots import added_facts, refused, rewritten, state_of
from gpu_autoscaler.store.protocol import SnapshotRow, Store

DIFFERENCE_LINES_MAX = 80
_NOT_FOLDED = frozenset({GpuNodeSampled})  # raw samples, most of their stream; decisions use the summaries


class Verdict(enum.IntEnum):
    """Result of a recomputation; the value is the exit code."""

    EQUAL = 0
    DIFFERS = 1
    UNKNOWN_PLAN = 3
    FACTS_EXPIRED = 5
    CORE_CHANGED = 6
    POLICY_CHANGED = 7


class Recomputation(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict with a sentence and, if the plans differ, the differing lines."""

    verdict: Verdict
    sentence: str
    difference: tuple[str, ...] = ()
    facts_count: int = 0


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """State onto which the facts are folded."""

    name: str = ""  # of the snapshot, as the start of a phrase; empty: the beginning
    state: ClusterState = EMPTY_STATE
    sequences: dict[str, int] = {}
    missing: str = ""  # which facts have expired, and why no snapshot replaces them


async def recompute(
    bus: Bus, plan_id: str, policy: ScalingPolicy, clock: Clock, store: Store | None = None
) -> Recomputation:
    """Recompute the plan of this id. Raises TransientError if broker or store are unreachable.

    The digests are compared first: with other code or another policy an equal plan proves nothing. Expired facts
    without a snapshot in `store` are a verdict only if the plans differ; otherwise they did not matter.
    """
    history = History(bus, clock)
    recorded = await history.first_plan(lambda fact, _: fact.plan_id == plan_id)
    if recorded is None:
        return await _missing_plan(bus, plan_id, store)
    core = core_digest()
    if recorded.core_digest != core:
        return Recomputation(
            verdict=Verdict.CORE_CHANGED,
            sentence=f"made by core {recorded.core_digest} (version {recorded.service_version or 'unknown'}), "
            f"but this is core {core}; recompute with the version that made the plan",
        )
    start = await find_start(history, recorded, store)
    return await _compare(history, start, recorded, policy)


async def _missing_plan(bus: Bus, plan_id: str, store: Store | None) -> Recomputation:
    """Distinguish a wrong id from a plan that the stream no longer holds, by the store."""
    row = None if store is None else await store.plan(PlanId(plan_id))
    if row is None:
        return Recomputation(
            verdict=Verdict.UNKNOWN_PLAN,
            sentence=f"no plan {plan_id!r} in the stream SCALING; list plans with: gpu-autoscaler plans -o name",
        )
    span = await bus.span(ScalingPlanMade.stream())
    return Recomputation(
        verdict=Verdict.FACTS_EXPIRED,
        sentence=f"the store has this plan of {row.made_at:%Y-%m-%d %H:%M:%S} UTC, but its facts are gone: "
        f"they expired, or the stream SCALING was recreated at {span.created_at:%Y-%m-%d %H:%M:%S} UTC",
    )


async def _compare(history: History, start: Start, recorded: ScalingPlanMade, policy: ScalingPolicy) -> Recomputation:
    state, facts_count = await _state_at(history, start, recorded.cut)
    effective = effective_policy(policy, state.policy_documents)
    if recorded.policy_digest != (digest := policy_digest(effective)):
        return Recomputation(
            verdict=Verdict.POLICY_CHANGED,
            sentence=f"made with policy {recorded.policy_digest}, but this is policy {digest}; "
            "give the file that was used with --policy",
        )
    recomputed = recomputed_plan(recorded.plan, state, effective)
    source = f"{start.name}{facts_count} facts"
    if msgspec.json.encode(recomputed) == msgspec.json.encode(recorded.plan):
        return Recomputation(
            verdict=Verdict.EQUAL, sentence=f"equal byte for byte, from {source}", facts_count=facts_count
        )
    return Recomputation(
        verdict=Verdict.FACTS_EXPIRED if start.missing else Verdict.DIFFERS,
        sentence=f"cannot be recomputed: {start.missing}"
        if start.missing
        else f"different, from {source} (- recorded, + recomputed)",
        difference=tuple(_difference(recorded.plan, recomputed)),
        facts_count=facts_count,
    )


async def find_start(history: History, recorded: ScalingPlanMade, store: Store | None) -> Start:
    """Return the beginning if no fact has expired and one version folded all of them; else the nearest usable snapshot
    below the plan's cut, of the same descent."""
    spans = {stream: await history.span(stream) for stream, _ in recorded.cut.last_sequences}
    expired = [
        f"{stream}: the first sequence kept is {span.first_sequence}"
        if span.first_sequence <= span.last_sequence
        else f"{stream}: empty"
        for stream, span in spans.items()
        if not await history.is_from_the_beginning(stream)
    ]
    causes = [f"facts have expired ({'; '.join(expired)})"] if expired else []
    if recorded.cut.base:
        causes.append(f"the state continued snapshot {recorded.cut.base} of another version")
    if not causes:
        return Start()
    cause = " and ".join(causes)
    if store is None:
        return Start(missing=f"{cause}, and no store is configured to read a snapshot from; set store.url")
    rows, below_count, refusal = await store.snapshots(), 0, None
    for row in rows:
        label = decode_label(row.label)
        if isinstance(label, Label) and not (is_contained_in(label.cut, recorded.cut) and _leads_to(label, recorded)):
            continue
        below_count += 1
        start = await from_snapshot(history, store, row, label, spans)
        if isinstance(start, Start):
            return start
        refusal = refusal or start
    reason = (
        f"the nearest of {below_count} below the plan's cut is unusable: {refusal.detail}"
        if refusal
        else f"none of {len(rows)} is below the plan's cut and leads to it"
    )
    return Start(missing=f"{cause}, and no snapshot replaces them: {reason}")


def _leads_to(label: Label, recorded: ScalingPlanMade) -> bool:
    """True for a snapshot of the same version and base as the plan, and for its base."""
    base = recorded.cut.base
    is_base = bool(base) and label.checksum == base
    return is_base or (label.core_digest, label.base) == (recorded.core_digest, base)


async def from_snapshot(
    history: History, store: Store, row: SnapshotRow, label: Label | Refusal, spans: Mapping[str, StreamSpan]
) -> Start | Refusal:
    """Return the state of the snapshot if it fits the streams, with the facts of types that this version has added;
    else the refusal."""
    if isinstance(label, Refusal):
        return label
    folds = [fact for stream in spans for fact in folded_facts(stream)]
    refusal = refused(label, folds, spans) or await rewritten(history, label.marks)
    if refusal is not None:
        return refusal
    state = await state_of(store, row)
    if isinstance(state, Refusal):
        return state
    state = fold(state, await added_facts(history, label, folds))
    name = f"the snapshot of {row.saved_at:%Y-%m-%d %H:%M:%S} UTC and "
    return Start(name=name, state=state, sequences=dict(label.cut.last_sequences))


def is_contained_in(cut: Cut, other: Cut) -> bool:
    """Return True if the first cut is contained in the other one."""
    last = dict(other.last_sequences)
    return all(sequence <= last.get(stream, 0) for stream, sequence in cut.last_sequences)


def folded_facts(stream: str) -> list[type[Fact]]:
    """Return the fact types of a stream that are folded into the state."""
    return [fact for fact in FACTS if fact.stream() == stream and fact not in _NOT_FOLDED]


async def _state_at(history: History, start: Start, cut: Cut) -> tuple[ClusterState, int]:
    """Return the state at the cut, and the number of facts folded onto the start."""
    state, facts_count = start.state, 0
    aside = frozenset(cut.set_aside)
    for stream, last in cut.last_sequences:
        after = start.sequences.get(stream, 0)
        async for batch in history.read(stream, folded_facts(stream), after=after, last=last, aside=aside):
            state = fold(state, [stored.recorded for stored in batch])
            facts_count += len(batch)
    return state, facts_count


def _difference(recorded: Plan, recomputed: Plan) -> list[str]:
    before, after = (
        msgspec.json.format(msgspec.json.encode(version), indent=2).decode().splitlines()
        for version in (recorded, recomputed)
    )
    lines = list(difflib.unified_diff(before, after, "recorded", "recomputed", lineterm=""))
    if len(lines) > DIFFERENCE_LINES_MAX:
        lines = [*lines[:DIFFERENCE_LINES_MAX], f"... and {len(lines) - DIFFERENCE_LINES_MAX} more lines"]
    return lines
