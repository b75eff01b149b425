"""What a plan decides and what it defers.

A decision carries everything its executor needs: executors choose nothing.
"""

from abc import abstractmethod

import msgspec

from gpu_autoscaler.model.format import instant, price, subject_name
from gpu_autoscaler.model.ids import ActionId, NodeUid, PlanId, ProviderId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.reasons.buy import BuyReason
from gpu_autoscaler.model.reasons.defer import DeferReason
from gpu_autoscaler.model.reasons.defer_limits import BrakeTripped
from gpu_autoscaler.model.reasons.drain import DrainReason, KeepReason, ReleaseReason
from gpu_autoscaler.model.resources import Resources, Slices
from gpu_autoscaler.model.scheduling import Taint


class Decision(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag_field="decision"):
    """Base of all decisions. `action_id` is the token that makes a repeated execution harmless."""

    action_id: ActionId

    @abstractmethod
    def sentence(self) -> str:
        """Return what is decided and why."""


class BuyNode(Decision, frozen=True, kw_only=True, tag="buy_node"):
    """Order one node of this offer; it counts as capacity and against limits from now on."""

    pool: str
    offer: Offer
    labels: tuple[tuple[str, str], ...]  # sorted by key; what the node must carry when it registers, its project too
    taints: tuple[Taint, ...]
    deadline_at: Instant  # not usable by then: released
    reason: BuyReason
    gang: str | None = None  # purchases of one gang are completed or abandoned together
    slices: Slices = ()  # what the node's GPUs are to be cut into, all of them; none: they stay whole
    work_seconds_max: float | None = None  # how long the work it is for may take at most; None: unknown
    startup_taints: tuple[Taint, ...] = ()  # it registers with these as well; they are removed before it is usable
    # The first of the purchases of one shape that are launched together where the cloud can: all of them or none.
    # None: launched alone
    transaction: ActionId | None = None

    @property
    def promised(self) -> Resources:
        """What the node is to hold for pods."""
        return self.offer.cut_into(self.slices)

    def sentence(self) -> str:
        offer = self.offer
        node = f"{offer.instance_type} in {offer.zone} as {offer.capacity_type}"
        gang = f", together with the other nodes of {subject_name(self.gang)}" if self.gang else ""
        at = price(offer.price_micro_usd_per_hour)
        return f"Buy {node} for pool {self.pool} at {at}{gang}. {self.reason.sentence()}"


class ForcedRemoval(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Marks a removal that ends work against its will, and that neither the cloud nor a user caused."""

    price_micro_usd_per_hour: int | None  # of the node; the highest known one if unknown; None: none is known


class DrainNode(Decision, frozen=True, kw_only=True, tag="drain_node"):
    """Cordon the node, evict its pods, then terminate its instance."""

    node_uid: NodeUid
    node_name: str
    provider_id: ProviderId | None  # None: not ours to terminate
    is_voluntary: bool  # voluntary drains stop at budgets and protections; others force at the deadline
    deadline_at: Instant
    reason: DrainReason
    forced: ForcedRemoval | None = None  # None: the brake does not count it

    def sentence(self) -> str:
        kind = "Voluntary" if self.is_voluntary else "Forced"
        deadline = instant(self.deadline_at)
        return f"{kind} drain of node {self.node_name} by {deadline}. {self.reason.sentence()}"


class CancelDrain(Decision, frozen=True, kw_only=True, tag="cancel_drain"):
    """Uncordon the node and leave its pods alone."""

    drain_action_id: ActionId
    node_uid: NodeUid
    node_name: str
    reason: KeepReason

    def sentence(self) -> str:
        return f"Cancel the drain of node {self.node_name}. {self.reason.sentence()}"


class ReleaseInstance(Decision, frozen=True, kw_only=True, tag="release_instance"):
    """Terminate an instance that never became a usable node, or that no decision accounts for."""

    provider_id: ProviderId | None  # None: find it by its order
    order_action_id: ActionId
    reason: ReleaseReason
    forced: ForcedRemoval | None = None  # None: the brake does not count it

    def sentence(self) -> str:
        order = f"order {self.order_action_id}"
        instance = order if self.provider_id is None else f"instance {self.provider_id} ({order})"
        return f"Release {instance}. {self.reason.sentence()}"


AnyDecision = BuyNode | DrainNode | CancelDrain | ReleaseInstance


class PastDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A decision of a plan that the stream no longer has."""

    decision: AnyDecision
    plan_id: PlanId
    planned_at: Instant
    # A purchase that may have become an instance or not: it counts until it shows or is late, and is not restarted.
    is_only_counted: bool = False


class Deferred(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Something the plan does not do now, with the step that deferred it and why."""

    step: str  # name of the step of `plan`, e.g. cover_demand
    subject: str  # job/<id>, pod/<uid>, node/<uid>, or cluster
    reason: DeferReason

    def sentence(self) -> str:
        """Return what is deferred, in which step, and why."""
        return f"Deferred for {subject_name(self.subject)} (step {self.step}): {self.reason.sentence()}"


class Rejection(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What the plan check refused while the plan was made, and until when it is set aside: it is not decided again."""

    violation: str
    subjects: tuple[str, ...]  # as `rejection_subjects` names them
    retry_at: Instant


# Before the subject of a drain that a notice or a deletion forces: it is set aside for one plan only.
FORCED = "forced/"


def rejection_subjects(decision: AnyDecision) -> tuple[str, ...]:
    """Return under which names a decision is set aside: its demand and gang, else its pool; its node, or its order."""
    match decision:
        case BuyNode():
            work = getattr(decision.reason, "demand", ()) or (f"pool/{decision.pool}",)
            return work if decision.gang is None or decision.gang in work else (*work, decision.gang)
        case ReleaseInstance():
            return (f"action/{decision.order_action_id}",)
        case _:
            return (f"node/{decision.node_uid}",)


class DeferredGroup(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Objects of one kind and shape that a step of the plan deferred for one reason (`core/deferred_groups.py`)."""

    step: str
    kind: str  # of the subjects: job, pod, member, node, ...
    reason: DeferReason
    objects_count: int
    gpu_count: int = 0  # of all objects: requested by work, of nodes
    shape: str = ""  # in words: "8 GPUs (A100), 96 CPUs, 512 GiB"; empty: none, or different ones
    subjects: tuple[str, ...] = ()  # the first three, sorted; all of them if the state does not have such objects
    # Digests of the other members, base64. Empty also for the largest group of a shape, which has what no other has.
    members: str = ""
    reasons_count: int = 1  # reasons that differ in their values alone; `reason` is that of the first object


class Plan(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What the cluster should become, and why. Equal facts and policy give an equal plan, byte for byte."""

    as_of: Instant
    parent_sequence: int  # stream sequence of the previous plan; 0: none
    decisions: tuple[AnyDecision, ...] = ()
    deferred: tuple[Deferred, ...] = ()  # as planned, and in plans of 0.2; a published plan has groups instead
    deferred_groups: tuple[DeferredGroup, ...] = ()
    deferred_unlisted: tuple[tuple[str, int], ...] = ()  # reason tag -> objects in no group, sorted
    rejected: tuple[Rejection, ...] = ()  # set aside by this plan; earlier rejections are in the state
    brake: BrakeTripped | None = None  # as long as it holds, in each plan; None: it has not tripped, or was resumed


class Side(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What one of two plans decides about a subject."""

    what: str  # tag of the decision, `deferred`, or `nothing`
    reason: str = ""  # tag of its reason; empty: none was given
    sentence: str = ""  # decision and reason for people


class Difference(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One subject about which two plans of one state decide differently."""

    subject: str  # job/<id>, pod/<uid>, node/<uid>, order/<action id>, or cluster
    name: str  # the same with the object's name, where it is known
    made: Side
    other: Side

    @property
    def is_decision(self) -> bool:
        """False where both do nothing, for different reasons."""
        return not {self.made.what, self.other.what} <= NO_DECISION

    @property
    def kind(self) -> str:
        """What many differences share: `buy_node (unmet_demand) -> deferred (nodes_limit)`."""
        return " -> ".join(
            f"{side.what} ({side.reason})" if side.reason else side.what for side in (self.made, self.other)
        )


NO_DECISION = frozenset({"deferred", "nothing"})


class Cut(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The facts a state was folded from: the last sequence of each stream, and the dead letters among them."""

    last_sequences: tuple[tuple[str, int], ...] = ()  # (stream, sequence), sorted by stream
    set_aside: tuple[tuple[str, int], ...] = ()  # (stream, sequence) of dead letters
    # Checksum of the snapshot of another version that the state continues; empty: one version folded all of it.
    base: str = ""
