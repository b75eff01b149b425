"""Walks a recorded history with today's code: at each recorded plan, and at each tick between two of them, what would
be decided now? Answers with the differences, each with both reasons. Called by `gpu-autoscaler replay` and by the tests
that keep recorded days.

The state follows the record, so a difference is about one decision at a time; what another decision would have led to
is asked of `tools/whatif.py`.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.core.differences import differences
from gpu_autoscaler.core.documents import effective_policy
from gpu_autoscaler.core.fold import fold
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.node import NodeInstanceListed
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import Cut, Difference, Plan
from gpu_autoscaler.model.ids import PlanId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.sim.glances import plan_inputs
from gpu_autoscaler.tools.history import Stored
from gpu_autoscaler.tools.recording import Head, Recording

TICK_SECONDS = 5.0  # the scaler's own
# What the scaler would decide between two recorded plans counts once it would have decided it for so long: the real one
# ticks at other instants, and reads facts a little later than they were stored. Two ticks: more would hide a lot.
STANDING_SECONDS = 10.0
# Its list of instances is the scaler's sign of life, every ten seconds. Without one nobody knows whether it ticked.
SILENT_SECONDS = 30.0


class Found(msgspec.Struct, kw_only=True):
    """A difference, from the first time that it showed to the last."""

    difference: Difference
    at: Instant
    until: Instant
    plan_id: PlanId | None  # of the recorded plan where it showed first; None: at a tick between two plans
    plans_count: int = 0  # recorded plans at which it showed
    is_certain: bool = False


class Retraced(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a walk."""

    found: tuple[Found, ...]
    plans_count: int
    equal_count: int  # of the plans, byte for byte
    ticks_count: int
    silent_seconds: float  # without a sign of life of the scaler: ticks of that time were not asked about
    facts_count: int
    other_policy_count: int  # plans that were recorded under another policy than the one given

    @property
    def decisions(self) -> list[Found]:
        """The differences in what is done."""
        return [each for each in self.found if each.difference.is_decision]


def retrace(recording: Recording, policy: ScalingPolicy | None = None) -> Retraced:
    """Return where this code, with this policy (None: the recorded one), decides otherwise than was recorded."""
    return _Walk(recording, policy or recording.head.policy).walk()


class _Fold:
    """The state of the record, moved on by cut or by time."""

    def __init__(self, head: Head, facts: Iterable[Stored]) -> None:
        self._head = head
        by_stream: defaultdict[str, list[Stored]] = defaultdict(list)
        for each in facts:
            by_stream[each.recorded.stream].append(each)
        self._facts: Mapping[str, list[Stored]] = by_stream
        for stream in by_stream.values():
            stream.sort(key=lambda each: each.recorded.sequence)
        self._begin()

    def _begin(self) -> None:
        self.state: ClusterState = self._head.state
        self._reached = dict.fromkeys(self._facts, 0)

    def to_cut(self, cut: Cut) -> None:
        """Hold exactly what the plan of this cut was made from."""
        last, aside = dict(cut.last_sequences), frozenset(cut.set_aside)
        if any(self._last(stream) > last.get(stream, 0) for stream in self._facts):
            self._begin()  # of two scalers one is behind the other
        for stream, facts in self._facts.items():
            end = bisect_right(facts, last.get(stream, 0), key=lambda each: each.recorded.sequence)
            self._take([one for one in self._news(stream, end) if (one.stream, one.sequence) not in aside])

    def to_time(self, at: datetime, cut: Cut | None) -> None:
        """Hold what was stored by then, and nothing that the next recorded plan did not know."""
        last = None if cut is None else dict(cut.last_sequences)
        for stream, facts in self._facts.items():
            end = bisect_right(facts, at, key=lambda each: each.at)
            if last is not None:
                end = min(end, bisect_right(facts, last.get(stream, 0), key=lambda each: each.recorded.sequence))
            self._take(self._news(stream, end))

    def _last(self, stream: str) -> int:
        reached = self._reached[stream]
        return self._facts[stream][reached - 1].recorded.sequence if reached else 0

    def _news(self, stream: str, end: int) -> list[Recorded]:
        begin = self._reached[stream]
        self._reached[stream] = max(begin, end)
        return [each.recorded for each in self._facts[stream][begin:end]]

    def _take(self, news: Sequence[Recorded]) -> None:
        if news:
            self.state = fold(self.state, news)


class _Walk:
    def __init__(self, recording: Recording, policy: ScalingPolicy) -> None:
        self._recording = recording
        self._policy = policy
        self._fold = _Fold(recording.head, recording.facts)
        self._alive = [each.at for each in recording.facts if isinstance(each.recorded.fact, NodeInstanceListed)]
        self._standing: dict[tuple[str, str], Found] = {}  # by subject and kind
        self._found: list[Found] = []
        self._seen: object = None
        self._equal_count = self._ticks_count = self._other_policy_count = 0
        self._silent_seconds = 0.0

    def walk(self) -> Retraced:
        plans = [each.recorded.fact for each in self._recording.plans()]
        made = [fact for fact in plans if isinstance(fact, ScalingPlanMade)]
        last: ScalingPlanMade | None = None
        for fact in made:
            if last is not None:
                self._between(last, fact.plan.as_of, fact.cut)
            self._at_plan(fact)
            self._other_policy_count += self._is_other_policy(fact)
            last = fact
        if last is not None:
            self._between(last, self._recording.head.to_at, None)
        for standing in tuple(self._standing):
            self._close(standing)
        return Retraced(
            found=tuple(sorted(self._found, key=lambda each: (each.at, each.difference.subject))),
            plans_count=len(made),
            equal_count=self._equal_count,
            ticks_count=self._ticks_count,
            silent_seconds=self._silent_seconds,
            facts_count=len(self._recording.facts),
            other_policy_count=self._other_policy_count,
        )

    def _is_other_policy(self, fact: ScalingPlanMade) -> bool:
        head = self._recording.head
        return self._policy != head.policy or (bool(head.policy_digest) and fact.policy_digest != head.policy_digest)

    def _at_plan(self, fact: ScalingPlanMade) -> None:
        self._fold.to_cut(fact.cut)
        state, as_of = self._fold.state, fact.plan.as_of
        again = plan(state, effective_policy(self._policy, state.policy_documents), as_of)
        self._equal_count += msgspec.json.encode(again) == msgspec.json.encode(fact.plan)
        self._seen = None
        found = {(one.subject, one.kind): one for one in differences(fact.plan, again, state)}
        for key in [key for key in self._standing if key not in found]:
            self._close(key)
        for key, difference in found.items():
            standing = self._open(key, difference, as_of, fact.plan_id)
            standing.plans_count += 1
            standing.is_certain = True

    def _between(self, last: ScalingPlanMade, end: datetime, cut: Cut | None) -> None:
        """Ask at each tick from the last recorded plan on."""
        for at in self._ticks(last.plan.as_of, end):
            self._fold.to_time(at, cut)
            self._ticks_count += 1
            self._at_tick(at, last.plan)

    def _ticks(self, begin: datetime, end: datetime) -> Iterator[datetime]:
        step = timedelta(seconds=TICK_SECONDS)
        at = begin + step
        while at < end:
            if self._is_alive(at):
                yield at
            else:
                self._silent_seconds += TICK_SECONDS
            at += step

    def _is_alive(self, at: datetime) -> bool:
        """True when the scaler gave a sign of life before and after, and not too far apart."""
        number = bisect_right(self._alive, at)
        if not 0 < number < len(self._alive):
            return False
        return (self._alive[number] - self._alive[number - 1]).total_seconds() <= SILENT_SECONDS

    def _at_tick(self, at: datetime, last: Plan) -> None:
        state = self._fold.state
        policy = effective_policy(self._policy, state.policy_documents)
        seen = plan_inputs(StateView(state), policy, at)
        if seen != self._seen:
            self._seen = seen
            nothing = msgspec.structs.replace(last, decisions=())
            again = plan(state, policy, at)
            found = {(one.subject, one.kind): one for one in differences(nothing, again, state) if one.is_decision}
            for key, standing in tuple(self._standing.items()):
                if standing.difference.is_decision and key not in found:
                    self._close(key)
            for key, difference in found.items():
                self._open(key, difference, at, None)
        for standing in self._standing.values():
            if standing.difference.is_decision:
                standing.until = at
                standing.is_certain |= (at - standing.at).total_seconds() >= STANDING_SECONDS

    def _open(self, key: tuple[str, str], difference: Difference, at: datetime, plan_id: PlanId | None) -> Found:
        standing = self._standing.setdefault(key, Found(difference=difference, at=at, until=at, plan_id=plan_id))
        standing.until = at
        return standing

    def _close(self, key: tuple[str, str]) -> None:
        standing = self._standing.pop(key)
        if standing.is_certain:
            self._found.append(standing)
