"""Differences between two plans of one state, by subject, each side with its reason.

Used by replay (the recorded plan and the one of this code) and by the shadow (the active policy and another).
"""

from collections import defaultdict
from collections.abc import Iterator

import msgspec

from gpu_autoscaler.core.deferred_groups import ungrouped
from gpu_autoscaler.core.explain.names import Namer, decision_sentence, deferred_sentence, names_in_state
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.decisions import (
    AnyDecision,
    AnyUpkeep,
    BuyNode,
    CancelDrain,
    Deferred,
    Difference,
    DrainNode,
    Plan,
    ReleaseInstance,
    Side,
    UpkeepDecision,
    upkeep_key,
)
from gpu_autoscaler.model.reasons.buy import BelowMinimum, ReplacesAtRiskNode, ReplacesNodes

CLUSTER = "cluster"
SENTENCES_COUNT_MAX = 3  # of one side: a gang of a hundred nodes is described by its first few


class _Outcome(msgspec.Struct):
    """Everything that a plan decides and defers for one subject."""

    decisions: list[AnyDecision | AnyUpkeep] = []
    deferred: list[Deferred] = []

    def compared(self) -> tuple[str, ...]:
        """What is compared. Amounts in reasons change every second and make no difference."""
        decided = tuple(
            sorted(f"{_tag(decision)}/{decision.reason.tag()}/{_choice(decision)}" for decision in self.decisions)
        )
        return decided or tuple(sorted(f"{deferred.step}/{deferred.reason.tag()}" for deferred in self.deferred))


_NOTHING = _Outcome()


def differences(made: Plan, other: Plan, state: ClusterState) -> tuple[Difference, ...]:
    """Return where the other plan of this state differs, sorted by subject. The subject of a purchase is the work it is
    for: plans that buy different offers for a job differ about the job. Plans of 0.2 have no record of upkeep: with
    one of them only the rest is compared."""
    if made.upkeep is None or other.upkeep is None:
        made, other = (msgspec.structs.replace(each, upkeep=None) for each in (made, other))
    ours, theirs = _by_subject(made, state), _by_subject(other, state)
    name_of = names_in_state(state)
    return tuple(
        Difference(
            subject=subject,
            name=name_of(subject),
            made=_side(ours.get(subject, _NOTHING), ours.get(CLUSTER, _NOTHING), name_of),
            other=_side(theirs.get(subject, _NOTHING), theirs.get(CLUSTER, _NOTHING), name_of),
        )
        for subject in sorted(ours.keys() | theirs.keys())
        if ours.get(subject, _NOTHING).compared() != theirs.get(subject, _NOTHING).compared()
    )


def _by_subject(plan: Plan, state: ClusterState) -> dict[str, _Outcome]:
    outcomes: defaultdict[str, _Outcome] = defaultdict(_Outcome)
    for decision in (*plan.decisions, *plan.upkeep_decisions):
        for subject in _subjects(decision):
            outcomes[subject].decisions.append(decision)
    for deferred in ungrouped(plan, state):
        outcomes[deferred.subject].deferred.append(deferred)
    for act in plan.upkeep_deferred:
        for deferred in act.each():
            outcomes[upkeep_key(act.decision, deferred.subject)].deferred.append(deferred)
    return dict(outcomes)


def _subjects(decision: AnyDecision | AnyUpkeep) -> Iterator[str]:
    match decision:
        case UpkeepDecision():
            yield upkeep_key(decision.tag(), decision.subject)  # apart from what is decided about the node or the job
        case BuyNode(reason=BelowMinimum()):
            yield CLUSTER
        case BuyNode(reason=ReplacesAtRiskNode() as reason):
            yield f"node/{reason.node_uid}"
        case BuyNode(reason=ReplacesNodes() as reason):
            yield from (f"node/{node_uid}" for node_uid in reason.node_uids)
        case BuyNode():
            yield from getattr(decision.reason, "demand", ())
        case DrainNode() | CancelDrain():
            yield f"node/{decision.node_uid}"
        case ReleaseInstance():
            yield f"order/{decision.order_action_id}"


def _choice(decision: AnyDecision | AnyUpkeep) -> str:
    match decision:
        case BuyNode():
            return f"{decision.pool}/{decision.offer.key}"
        case DrainNode():
            return "voluntary" if decision.is_voluntary else "forced"
        case _:
            return ""


def _side(outcome: _Outcome, of_cluster: _Outcome, name_of: Namer) -> Side:
    if outcome.decisions:
        first = outcome.decisions[0]
        sentences = [decision_sentence(decision, name_of) for decision in outcome.decisions]
        return Side(what=_tag(first), reason=first.reason.tag(), sentence=_shortened(sentences))
    # What defers the whole cluster defers this as well.
    for deferred in (outcome.deferred, of_cluster.deferred):
        if deferred:
            sentences = [deferred_sentence(entry, name_of) for entry in deferred]
            return Side(what="deferred", reason=deferred[0].reason.tag(), sentence=_shortened(sentences))
    return Side(what="nothing")


def _shortened(sentences: list[str]) -> str:
    more = len(sentences) - SENTENCES_COUNT_MAX
    return " ".join([*sentences[:SENTENCES_COUNT_MAX], *([f"And {more} more."] if more > 0 else [])])


def _tag(decision: AnyDecision | AnyUpkeep) -> str:
    return str(decision.__struct_config__.tag)
