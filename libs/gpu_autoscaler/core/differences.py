"""Where two plans of one state say different things, subject by subject, each with its reason.

Used by replay (what was recorded, and what this code decides) and by the shadow (the policy in force, and another).
"""

from collections import defaultdict
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.core.words.sentences import decision_sentence, held_back_sentence
from gpu_autoscaler.model.decisions import (
    AnyDecision,
    BuyNode,
    CancelDrain,
    Difference,
    DrainNode,
    Deferred,
    Plan,
    ReleaseInstance,
    Side,
)
from gpu_autoscaler.model.ids import ActionId, NodeUid
from gpu_autoscaler.model.reasons import BelowMinimum, ReplacesAtRiskNode, ReplacesNodes

CLUSTER = "cluster"
SENTENCES_COUNT_MAX = 3  # of one side; a gang of a hundred nodes is told by its first few


class _Said(msgspec.Struct):
    """Everything that a plan says about one subject."""

    decisions: list[AnyDecision] = []
    deferred: list[Deferred] = []

    def weight(self) -> tuple[str, ...]:
        """What is compared. Amounts in reasons move with every second and are no difference."""
        decided = tuple(sorted(f"{_tag(one)}/{one.reason.tag()}/{_choice(one)}" for one in self.decisions))
        return decided or tuple(sorted(f"{one.step}/{one.reason.tag()}" for one in self.deferred))


def differences(made: Plan, other: Plan, state: ClusterState) -> tuple[Difference, ...]:
    """Return what the other plan says otherwise, sorted by subject. Both are plans of this state.

    A purchase is about the work that it is for: two plans that buy different offers for a job differ about the job.
    """
    ours, theirs = _by_subject(made), _by_subject(other)
    return tuple(
        Difference(
            subject=subject,
            name=_named(subject, state),
            made=_side(ours.get(subject), ours.get(CLUSTER), state),
            other=_side(theirs.get(subject), theirs.get(CLUSTER), state),
        )
        for subject in sorted(ours.keys() | theirs.keys())
        if _weight(ours.get(subject)) != _weight(theirs.get(subject))
    )


def _by_subject(plan: Plan) -> dict[str, _Said]:
    found: defaultdict[str, _Said] = defaultdict(_Said)
    for decision in plan.decisions:
        for subject in _subjects(decision):
            found[subject].decisions.append(decision)
    for held in plan.deferred:
        found[held.subject].deferred.append(held)
    return dict(found)


def _subjects(decision: AnyDecision) -> Iterator[str]:
    match decision:
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


def _choice(decision: AnyDecision) -> str:
    match decision:
        case BuyNode():
            return f"{decision.pool}/{decision.offer.key}"
        case DrainNode():
            return "by choice" if decision.is_voluntary else "without a choice"
        case _:
            return ""


def _weight(said: _Said | None) -> tuple[str, ...]:
    return () if said is None else said.weight()


def _side(said: _Said | None, about_cluster: _Said | None, state: ClusterState) -> Side:
    if said is not None and said.decisions:
        first = said.decisions[0]
        return Side(
            what=_tag(first),
            reason=first.reason.tag(),
            sentence=_told([decision_sentence(one) for one in said.decisions]),
        )
    # What holds the whole cluster back holds this back too.
    for held in (said, about_cluster):
        if held is not None and held.deferred:
            return Side(
                what="deferred",
                reason=held.deferred[0].reason.tag(),
                sentence=_told([held_back_sentence(_readable(one, state)) for one in held.deferred]),
            )
    return Side(what="nothing")


def _told(sentences: list[str]) -> str:
    more = len(sentences) - SENTENCES_COUNT_MAX
    return " ".join([*sentences[:SENTENCES_COUNT_MAX], *([f"And {more} more."] if more > 0 else [])])


def _tag(decision: AnyDecision) -> str:
    return str(decision.__struct_config__.tag)


def _readable(held: Deferred, state: ClusterState) -> Deferred:
    return replace(held, subject=_named(held.subject, state))


def _named(subject: str, state: ClusterState) -> str:
    kind, _, key = subject.partition("/")
    if kind == "node" and (node := state.nodes.get(NodeUid(key))) is not None:
        return f"node/{node.name}"
    if kind == "order" and (order := state.orders.get(ActionId(key))) is not None and order.launched is not None:
        return f"instance/{order.launched.provider_id}"
    return subject
