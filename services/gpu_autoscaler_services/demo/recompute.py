"""Recompute every plan of a run from the facts of its cut, in one pass.

`gpu-autoscaler recompute` does the same for one plan, from the start of the streams.
"""

from collections import defaultdict

import msgspec

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import Cut
from gpu_autoscaler.runtime.digests import core_digest, policy_digest
from gpu_autoscaler_services.demo.record import Record


class _Reader:
    """Folds a record up to increasing cuts."""

    def __init__(self, record: Record) -> None:
        self._streams: defaultdict[str, list[Recorded]] = defaultdict(list)
        for seen in record.seen:
            self._streams[seen.recorded.stream].append(seen.recorded)
        self._state = EMPTY_STATE
        self._read: defaultdict[str, int] = defaultdict(int)  # stream -> facts folded
        self._cut: dict[str, int] = {}

    def state_at(self, cut: Cut) -> ClusterState:
        """Return the state of exactly these facts."""
        cut_sequences, aside = dict(cut.last_sequences), frozenset(cut.set_aside)
        if any(last < self._cut.get(stream, 0) for stream, last in cut_sequences.items()):
            # Another scaler lagged behind: start over.
            self._state, self._read, self._cut = EMPTY_STATE, defaultdict(int), {}
        for stream, last in cut_sequences.items():
            facts, start = self._streams[stream], self._read[stream]
            end = start
            while end < len(facts) and facts[end].sequence <= last:
                end += 1
            self._state = fold(self._state, [fact for fact in facts[start:end] if (stream, fact.sequence) not in aside])
            self._read[stream] = end
        self._cut = cut_sequences
        return self._state


def differing_plans(record: Record, policy: ScalingPolicy) -> tuple[str, ...]:
    """Return a sentence for each recorded plan that this code and policy do not reproduce byte for byte."""
    reader, core, own_policy = _Reader(record), core_digest(), policy_digest(policy)
    differing = []
    for fact, _ in record.of(ScalingPlanMade):
        if (fact.core_digest, fact.policy_digest) != (core, own_policy):
            differing.append(f"plan {fact.plan_id} was made by another core or another policy")
            continue
        recomputed = plan(reader.state_at(fact.cut), policy, fact.plan.as_of)
        if msgspec.json.encode(recomputed) != msgspec.json.encode(fact.plan):
            differing.append(
                f"plan {fact.plan_id} differs when recomputed; see: gpu-autoscaler recompute {fact.plan_id}"
            )
    return tuple(differing)
