"""Which decisions of a recorded history would this code make differently, and why?

Plans again at each recorded plan and at each tick between two of them. The state follows the recording, so a difference
concerns one decision at a time; `replay/counterfactual.py` answers what another decision would have led to.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.core.checked_plan import recomputed_plan
from gpu_autoscaler.core.explain.differences import differences
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.next_change import TrackedInstant
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.documents import effective_policy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.node import NodeInstanceListed, NodeWatched
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import Cut, Difference, Plan
from gpu_autoscaler.model.format import counted, duration, instant
from gpu_autoscaler.model.ids import PlanId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.replay.recording import Recording
from gpu_autoscaler.runtime.history import Stored
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.sim.tick_inputs import plan_inputs

TICK_SECONDS = 5.0  # as the scaler
# A decision between two recorded plans counts as different once it persists this long: the real scaler ticks at other
# instants and reads facts a little later than they were stored. More than two ticks would hide differences.
PERSISTENCE_SECONDS = 10.0
# node.instance_listed, every 10 s, is the scaler's heartbeat. Without it, whether the scaler ticked is unknown.
HEARTBEAT_GAP_SECONDS_MAX = 30.0


class Deviation(msgspec.Struct, kw_only=True):
    """A difference, from its first to its last occurrence."""

    difference: Difference
    at: Instant
    until: Instant
    plan_id: PlanId | None  # the first recorded plan with the difference; None: a tick between plans
    plans_count: int = 0  # recorded plans with the difference
    is_certain: bool = False


class RetraceResult(msgspec.Struct, frozen=True, kw_only=True):
    """All differences of a history."""

    deviations: tuple[Deviation, ...]
    plans_count: int
    equal_count: int  # plans that are equal byte for byte
    ticks_count: int
    silent_seconds: float  # without a heartbeat of the scaler: ticks in it were skipped
    facts_count: int
    other_policy_count: int  # plans recorded under another policy than the given one

    @property
    def decisions(self) -> list[Deviation]:
        """Return the differences in decisions, without those in deferred actions."""
        return [deviation for deviation in self.deviations if deviation.difference.is_decision]


def retrace(recording: Recording, policy: ScalingPolicy | None = None) -> RetraceResult:
    """Return the differences of this code under this policy (None: the recorded one) from the recording."""
    return _Retracer(recording, policy or recording.head.policy).run()


class RecordedState:
    """The state of recorded facts at a cut or at a time; `first` is the state ahead of the first fact."""

    def __init__(self, facts: Iterable[Stored], first: ClusterState = EMPTY_STATE) -> None:
        self._first = first
        by_stream: defaultdict[str, list[Stored]] = defaultdict(list)
        for stored in facts:
            by_stream[stored.recorded.stream].append(stored)
        self._facts: Mapping[str, list[Stored]] = by_stream
        for stream in by_stream.values():
            stream.sort(key=lambda stored: stored.recorded.sequence)
        self._reset()

    def _reset(self) -> None:
        self.state = self._first
        self._reached = dict.fromkeys(self._facts, 0)

    def to_cut(self, cut: Cut) -> None:
        """Set the state to the cut of a plan."""
        last, aside = dict(cut.last_sequences), frozenset(cut.set_aside)
        if any(self._last(stream) > last.get(stream, 0) for stream in self._facts):
            self._reset()  # with two scalers, one lags behind the other
        for stream, facts in self._facts.items():
            end = bisect_right(facts, last.get(stream, 0), key=_sequence)
            self._add([fact for fact in self._until(stream, end) if (fact.stream, fact.sequence) not in aside])

    def to_time(self, at: datetime, cut: Cut | None) -> None:
        """Set the state to the facts stored by `at`, without those unknown to the next recorded plan, of this cut."""
        last = None if cut is None else dict(cut.last_sequences)
        for stream, facts in self._facts.items():
            end = bisect_right(facts, at, key=lambda stored: stored.at)
            if last is not None:
                end = min(end, bisect_right(facts, last.get(stream, 0), key=_sequence))
            self._add(self._until(stream, end))

    def _last(self, stream: str) -> int:
        reached = self._reached[stream]
        return self._facts[stream][reached - 1].recorded.sequence if reached else 0

    def _until(self, stream: str, end: int) -> list[Recorded]:
        begin = self._reached[stream]
        self._reached[stream] = max(begin, end)
        return [stored.recorded for stored in self._facts[stream][begin:end]]

    def _add(self, facts: Sequence[Recorded]) -> None:
        if facts:
            self.state = fold(self.state, facts)


def _without_decisions(last: Plan) -> Plan:
    """Return what a tick that published no plan stood for: the deferrals of the last plan."""
    upkeep = None if last.upkeep is None else msgspec.structs.replace(last.upkeep, decisions=())
    return msgspec.structs.replace(last, decisions=(), upkeep=upkeep)


def _sequence(stored: Stored) -> int:
    return stored.recorded.sequence


class _Retracer:
    def __init__(self, recording: Recording, policy: ScalingPolicy) -> None:
        self._recording = recording
        self._policy = policy
        self._recorded = RecordedState(recording.facts, recording.head.state)
        self._heartbeats = [stored.at for stored in recording.facts if _is_instance_list(stored.recorded.fact)]
        self._open_deviations: dict[tuple[str, str], Deviation] = {}  # by subject and kind
        self._deviations: list[Deviation] = []
        self._last_inputs: object = None
        self._next_change_at: datetime | None = None  # when time alone may change the last plan
        self._equal_count = self._ticks_count = self._other_policy_count = 0
        self._silent_seconds = 0.0

    def run(self) -> RetraceResult:
        recorded = [stored.recorded.fact for stored in self._recording.plans()]
        plans = [fact for fact in recorded if isinstance(fact, ScalingPlanMade)]
        last: ScalingPlanMade | None = None
        for fact in plans:
            if last is not None:
                self._between(last, fact.plan.as_of, fact.cut)
            self._at_plan(fact)
            self._other_policy_count += self._is_other_policy(fact)
            last = fact
        if last is not None:
            self._between(last, self._recording.head.to_at, None)
        for key in tuple(self._open_deviations):
            self._close(key)
        return RetraceResult(
            deviations=tuple(
                sorted(self._deviations, key=lambda deviation: (deviation.at, deviation.difference.subject))
            ),
            plans_count=len(plans),
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
        self._recorded.to_cut(fact.cut)
        state, as_of = self._recorded.state, fact.plan.as_of
        replanned = recomputed_plan(fact.plan, state, effective_policy(self._policy, state.policy_documents))
        self._equal_count += msgspec.json.encode(replanned) == msgspec.json.encode(fact.plan)
        self._last_inputs = None
        by_key = _by_key(differences(fact.plan, replanned, state))
        for key in [key for key in self._open_deviations if key not in by_key]:
            self._close(key)
        for key, difference in by_key.items():
            deviation = self._open(key, difference, as_of, fact.plan_id)
            deviation.plans_count += 1
            deviation.is_certain = True

    def _between(self, last: ScalingPlanMade, end: datetime, cut: Cut | None) -> None:
        """Plan at each tick after the last recorded plan."""
        for at in self._ticks(last.plan.as_of, end):
            self._recorded.to_time(at, cut)
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
        """Return True if `at` lies between two heartbeats of the scaler that are close together."""
        number = bisect_right(self._heartbeats, at)
        if not 0 < number < len(self._heartbeats):
            return False
        return (self._heartbeats[number] - self._heartbeats[number - 1]).total_seconds() <= HEARTBEAT_GAP_SECONDS_MAX

    def _at_tick(self, at: datetime, last: Plan) -> None:
        state = self._recorded.state
        policy = effective_policy(self._policy, state.policy_documents)
        inputs = plan_inputs(StateView(state), policy, at)
        if inputs != self._last_inputs or (self._next_change_at is not None and at >= self._next_change_at):
            self._last_inputs = inputs
            nothing = _without_decisions(last)
            as_of = TrackedInstant.of(at)
            replanned = plan(state, policy, as_of)
            self._next_change_at = as_of.next_change_at
            by_key = _by_key(entry for entry in differences(nothing, replanned, state) if entry.is_decision)
            for key, deviation in tuple(self._open_deviations.items()):
                if deviation.difference.is_decision and key not in by_key:
                    self._close(key)
            for key, difference in by_key.items():
                self._open(key, difference, at, None)
        for deviation in self._open_deviations.values():
            if deviation.difference.is_decision:
                deviation.until = at
                deviation.is_certain |= (at - deviation.at).total_seconds() >= PERSISTENCE_SECONDS

    def _open(self, key: tuple[str, str], difference: Difference, at: datetime, plan_id: PlanId | None) -> Deviation:
        deviation = self._open_deviations.setdefault(
            key, Deviation(difference=difference, at=at, until=at, plan_id=plan_id)
        )
        deviation.until = at
        return deviation

    def _close(self, key: tuple[str, str]) -> None:
        deviation = self._open_deviations.pop(key)
        if deviation.is_certain:
            self._deviations.append(deviation)


def _by_key(compared: Iterable[Difference]) -> dict[tuple[str, str], Difference]:
    return {(difference.subject, difference.kind): difference for difference in compared}


EXAMPLES_COUNT_MAX = 5  # per kind of difference


def report_lines(result: RetraceResult, examples_count_max: int = EXAMPLES_COUNT_MAX) -> Iterator[str]:
    """Yield the summary, then each kind of difference with examples: decisions first, then deferred actions."""
    yield summary(result)
    by_kind: defaultdict[tuple[bool, str], list[Deviation]] = defaultdict(list)
    for deviation in result.deviations:
        by_kind[not deviation.difference.is_decision, deviation.difference.kind].append(deviation)
    for (_, kind), deviations in sorted(by_kind.items()):
        yield ""
        yield f"{len(deviations)} x {kind}"
        for deviation in deviations[:examples_count_max]:
            yield from _example(deviation)
        if (more := len(deviations) - examples_count_max) > 0:
            yield f"  and {more} more"


def summary(result: RetraceResult) -> str:
    """Return the figures in one sentence."""
    decided = len(result.decisions)
    deferred = len(result.deviations) - decided
    return (
        f"{counted(result.plans_count, 'recorded plan')} and "
        f"{counted(result.ticks_count, 'tick')} between them, from {counted(result.facts_count, 'fact')}: "
        f"{counted(decided, 'different decision')}, {deferred} deferred for another reason"
    )


def notes(result: RetraceResult) -> Iterator[str]:
    """Yield caveats about the differences."""
    yield f"{result.equal_count} of {counted(result.plans_count, 'plan')} equal byte for byte"
    if result.silent_seconds:
        yield f"no heartbeat of the scaler for {duration(result.silent_seconds)}; ticks in that time were skipped"
    if result.other_policy_count:
        others = f"{result.other_policy_count} of {counted(result.plans_count, 'plan')}"
        yield f"{others} recorded under another policy than this one, which may explain differences"


def _example(deviation: Deviation) -> Iterator[str]:
    where = f"plan {deviation.plan_id}" if deviation.plan_id else "between two plans"
    more = f", at {deviation.plans_count} plans" if deviation.plans_count > 1 else ""
    seconds = (deviation.until - deviation.at).total_seconds()
    lasting = f", for {duration(seconds)}" if seconds >= 1 else ""
    yield f"  {instant(deviation.at)}  {deviation.difference.name}  ({where}{more}{lasting})"
    yield f"    recorded: {deviation.difference.made.sentence or 'nothing'}"
    yield f"    now:      {deviation.difference.other.sentence or 'nothing'}"


def _is_instance_list(fact: Fact) -> bool:
    return isinstance(fact, NodeInstanceListed) or (isinstance(fact, NodeWatched) and fact.instances is not None)
