"""Makes a recorded plan again: the facts up to its cut, folded; the policy; `plan`; compared byte for byte.

Called by `gpu-autoscaler recompute`. Reads the streams and writes nothing.
"""

import difflib
import enum

import msgspec

from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.core.fold import fold
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.catalogue import FACTS
from gpu_autoscaler.events.gpu import GpuNodeSampled
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import Cut, Plan
from gpu_autoscaler.model.ids import PlanId
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.digests import core_digest, policy_digest
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


class _Gap(msgspec.Struct, frozen=True):
    """The beginning of a stream that is no longer kept."""

    stream: str
    first_kept: int | None  # None: nothing is

    def __str__(self) -> str:
        kept = "nothing is kept" if self.first_kept is None else f"the first one kept is {self.first_kept}"
        return f"{self.stream}: {kept}"


async def recompute(bus: Bus, plan_id: str, policy: ScalingPolicy, clock: Clock) -> Recomputation:
    """Recompute the plan of this id. Raises TransientError when the broker is away.

    The digests are compared first: by other code or another policy an equal plan would prove nothing. That the oldest
    facts have aged out is a verdict only where the plans differ; else they did not matter.
    """
    history = History(bus, clock)
    recorded = await _recorded_plan(history, PlanId(plan_id))
    if recorded is None:
        return Recomputation(
            verdict=Verdict.UNKNOWN_PLAN,
            sentence=f"no plan {plan_id!r} in the stream SCALING; `gpu-autoscaler plans -o name` lists the last ones",
        )
    core, own_policy = core_digest(), policy_digest(policy)
    if recorded.core_digest != core:
        return Recomputation(
            verdict=Verdict.OTHER_CORE,
            sentence=f"made by core {recorded.core_digest} (version {recorded.service_version or 'unknown'}), "
            f"this one is {core}; recompute with the version that made it",
        )
    if recorded.policy_digest != own_policy:
        return Recomputation(
            verdict=Verdict.OTHER_POLICY,
            sentence=f"made with policy {recorded.policy_digest}, this one is {own_policy}; "
            "name the file that was used with --policy",
        )
    return await _compare(history, recorded, policy)


async def _compare(history: History, recorded: ScalingPlanMade, policy: ScalingPolicy) -> Recomputation:
    state, gaps, facts_count = await _state_at(history, recorded.cut)
    again = plan(state, policy, recorded.plan.as_of)
    if msgspec.json.encode(again) == msgspec.json.encode(recorded.plan):
        return Recomputation(
            verdict=Verdict.EQUAL, sentence=f"equal, byte for byte, from {facts_count} facts", facts_count=facts_count
        )
    difference = tuple(_difference(recorded.plan, again))
    if gaps:
        return Recomputation(
            verdict=Verdict.FACTS_GONE,
            sentence="cannot be told: facts have aged out (" + "; ".join(map(str, gaps)) + ")",
            difference=difference,
            facts_count=facts_count,
        )
    return Recomputation(
        verdict=Verdict.DIFFERS,
        sentence=f"differs, from {facts_count} facts (- recorded, + recomputed)",
        difference=difference,
        facts_count=facts_count,
    )


async def _recorded_plan(history: History, plan_id: PlanId) -> ScalingPlanMade | None:
    async for batch in history.read(ScalingPlanMade.stream(), [ScalingPlanMade]):
        for recorded in batch:
            if isinstance(recorded.fact, ScalingPlanMade) and recorded.fact.plan_id == plan_id:
                return recorded.fact
    return None


async def _state_at(history: History, cut: Cut) -> tuple[ClusterState, tuple[_Gap, ...], int]:
    """The state at the cut, the streams that no longer begin at their beginning, and how many facts were folded."""
    state, facts_count, gaps = EMPTY_STATE, 0, []
    aside = frozenset(cut.set_aside)
    for stream, last in cut.last_sequences:
        folded = [fact for fact in FACTS if fact.stream() == stream and fact not in _NOT_FOLDED]
        first_kept = None
        async for batch in history.read(stream, folded, last=last, aside=aside):
            if batch and first_kept is None:
                first_kept = batch[0].sequence
            state = fold(state, batch)
            facts_count += len(batch)
        if first_kept is None or not await history.is_from_the_beginning(stream):
            gaps.append(_Gap(stream, first_kept))
    return state, tuple(gaps), facts_count


def _difference(recorded: Plan, again: Plan) -> list[str]:
    before, after = (
        msgspec.json.format(msgspec.json.encode(each), indent=2).decode().splitlines() for each in (recorded, again)
    )
    lines = list(difflib.unified_diff(before, after, "recorded", "recomputed", lineterm=""))
    if len(lines) > DIFFERENCE_LINES_MAX:
        lines = [*lines[:DIFFERENCE_LINES_MAX], f"... and {len(lines) - DIFFERENCE_LINES_MAX} more lines"]
    return lines
