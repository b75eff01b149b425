"""What a plan decides, and what it holds back.

A decision holds all that its executor needs: executors choose nothing.
"""

import msgspec

from gpu_autoscaler.model.ids import ActionId, NodeUid, PlanId, ProviderId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.reasons import BuyReason, DrainReason, DeferReason, KeepReason, ReleaseReason
from gpu_autoscaler.model.resources import Resources, Slices
from gpu_autoscaler.model.scheduling import Taint


class Decision(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag_field="decision"):
    """Base of all decisions. `action_id` is the token that makes a second try harmless."""

    action_id: ActionId


class BuyNode(Decision, frozen=True, kw_only=True, tag="buy_node"):
    """Order one node of this offer; it counts as room and against limits from now on."""

    pool: str
    offer: Offer
    labels: tuple[tuple[str, str], ...]  # sorted by key; what the node must carry when it registers, its project too
    taints: tuple[Taint, ...]
    deadline_at: Instant  # not usable by then: given back
    reason: BuyReason
    gang: str | None = None  # purchases with one gang stand or fall together
    slices: Slices = ()  # what the node's GPUs are to be cut into, all of them; none: they stay whole
    work_seconds_max: float | None = None  # how long the work it is for may take at most; None: nobody knows
    startup_taints: tuple[Taint, ...] = ()  # it registers with these as well, and they vanish before it is of use
    # The first of the purchases that are alike, and made all at once or not at all where the cloud can. None: by itself
    transaction: ActionId | None = None

    @property
    def promised(self) -> Resources:
        """What the node is to hold for pods."""
        return self.offer.cut_into(self.slices)


class DrainNode(Decision, frozen=True, kw_only=True, tag="drain_node"):
    """Cordon the node, evict its pods, then terminate its instance."""

    node_uid: NodeUid
    node_name: str
    provider_id: ProviderId | None  # None: not ours to terminate
    is_voluntary: bool  # voluntary drains stop at budgets and protections; others force at the deadline
    deadline_at: Instant
    reason: DrainReason


class CancelDrain(Decision, frozen=True, kw_only=True, tag="cancel_drain"):
    """Uncordon the node and leave its pods alone."""

    drain_action_id: ActionId
    node_uid: NodeUid
    node_name: str
    reason: KeepReason


class ReleaseInstance(Decision, frozen=True, kw_only=True, tag="release_instance"):
    """Terminate an instance that never became a usable node, or that nobody stands behind."""

    provider_id: ProviderId | None  # None: find it by its order
    order_action_id: ActionId
    reason: ReleaseReason


AnyDecision = BuyNode | DrainNode | CancelDrain | ReleaseInstance


class PastDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A decision of a plan that the stream does not have any more."""

    decision: AnyDecision
    plan_id: PlanId
    planned_at: Instant
    # A purchase that may have become an instance or not: it counts until it shows or is late, and is not begun again.
    is_only_counted: bool = False


class Deferred(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Something the plan did not do, with the step that held it back and why."""

    step: str  # name of the step of `plan`, e.g. cover_demand
    subject: str  # job/<id>, pod/<uid>, node/<uid>, or cluster
    reason: DeferReason


class Plan(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What the cluster should become, and why. Equal facts and policy give an equal plan, byte for byte."""

    as_of: Instant
    parent_sequence: int  # stream sequence of the last plan that this one was made after; 0: none
    decisions: tuple[AnyDecision, ...] = ()
    deferred: tuple[Deferred, ...] = ()


class Side(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What one of two plans says about a subject."""

    what: str  # tag of the decision, `deferred`, or `nothing`
    reason: str = ""  # tag of its reason; empty: none was given
    sentence: str = ""  # the whole of it, for people


class Difference(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One subject about which two plans of one state say different things: the one that was made, and another."""

    subject: str  # job/<id>, pod/<uid>, node/<uid>, order/<action id>, or cluster
    name: str  # the same with the node's name, where that is known
    made: Side
    other: Side

    @property
    def is_decision(self) -> bool:
        """False where both do nothing, for different reasons."""
        return not {self.made.what, self.other.what} <= NO_DECISION

    @property
    def kind(self) -> str:
        """What is alike in many differences: `buy_node (unmet_demand) -> deferred (nodes_limit)`."""
        return " -> ".join(
            f"{side.what} ({side.reason})" if side.reason else side.what for side in (self.made, self.other)
        )


NO_DECISION = frozenset({"deferred", "nothing"})


class Cut(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The facts a state was folded from: the last sequence of each stream, and those set aside as dead letters."""

    last_sequences: tuple[tuple[str, int], ...] = ()  # (stream, sequence), sorted by stream
    set_aside: tuple[tuple[str, int], ...] = ()  # (stream, sequence) of messages that were no valid facts
