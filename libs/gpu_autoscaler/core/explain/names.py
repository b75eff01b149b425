"""Object names in place of uids and action ids, for texts that people read."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.node import NodeGone, NodeObserved
from gpu_autoscaler.events.pod import PodGone, PodObserved, PodProvisioningGone, PodProvisioningObserved
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import AnyDecision, AnyUpkeep, BuyNode, Deferred
from gpu_autoscaler.model.ids import ActionId, NodeUid, PodUid
from gpu_autoscaler.model.reasons.base import Reason
from gpu_autoscaler.model.reasons.defer_waits import CapacityExpected

# Returns `pod/<namespace>/<name>` for `pod/<uid>`, and the key itself where no name is known.
Namer = Callable[[str], str]

_AnyReason = TypeVar("_AnyReason", bound=Reason)


def names_in_state(state: ClusterState) -> Namer:
    """The names that the state knows."""

    def name_of(key: str) -> str:
        kind, _, uid = key.partition("/")
        if kind == "pod" and (pod := state.pods.get(PodUid(uid))) is not None:
            return f"pod/{pod.namespace}/{pod.name}"
        if kind == "node" and (node := state.nodes.get(NodeUid(uid))) is not None:
            return f"node/{node.name}"
        if kind == "provisioning" and (request := state.provisioning.get(uid.partition("/")[0])) is not None:
            return f"provisioning/{request.namespace}/{request.name}"
        order = state.orders.get(ActionId(uid)) if kind in ("order", "action") else None
        if kind == "order" and order is not None and order.launched is not None:
            return f"instance/{order.launched.provider_id}"
        if kind == "action" and order is not None and order.decision is not None:
            return f"action/{ordered_node(order.decision)}"
        return key

    return name_of


def names_in_history(history: Iterable[Recorded]) -> Namer:
    """The names that recorded facts use, also of objects that no longer exist."""
    names: dict[str, str] = {}
    for recorded in history:
        fact = recorded.fact
        if isinstance(fact, PodObserved | PodGone):
            names[f"pod/{fact.pod_uid}"] = f"pod/{fact.namespace}/{fact.name}"
        elif isinstance(fact, NodeObserved | NodeGone):
            names[f"node/{fact.node_uid}"] = f"node/{fact.name}"
        elif isinstance(fact, PodProvisioningObserved | PodProvisioningGone):
            names[f"provisioning/{fact.request_uid}"] = f"provisioning/{fact.namespace}/{fact.name}"
        elif isinstance(fact, ScalingPlanMade):
            orders = fact.plan.purchases
            names.update((f"action/{order.action_id}", f"action/{ordered_node(order)}") for order in orders)
    # Pod sets of a request, and answers to it, have its name.
    return lambda key: names.get("/".join(key.split("/")[:2]) if key.startswith("provisioning/") else key, key)


def ordered_node(order: BuyNode) -> str:
    """How texts name a node that has no name yet: `p4d.24xlarge in zone-a (ordered)`."""
    return f"{order.offer.instance_type} in {order.offer.zone} (ordered)"


def named_reason(reason: _AnyReason, name_of: Namer) -> _AnyReason:
    """Return the reason with names in place of uids."""
    changes: dict[str, object] = {}
    if demand := getattr(reason, "demand", ()):
        changes["demand"] = tuple(name_of(key) for key in demand)
    if isinstance(reason, CapacityExpected):
        changes["node"] = name_of(f"action/{reason.node}").partition("/")[2]
    return msgspec.structs.replace(reason, **changes) if changes else reason


def reason_sentence(reason: Reason, name_of: Namer) -> str:
    """Return the reason's sentence with names in place of uids."""
    return named_reason(reason, name_of).sentence()


def decision_sentence(decision: AnyDecision | AnyUpkeep, name_of: Namer) -> str:
    """Return what is decided and why, with names in place of uids."""
    return msgspec.structs.replace(decision, reason=named_reason(decision.reason, name_of)).sentence()


def deferred_sentence(deferred: Deferred, name_of: Namer) -> str:
    """Return what is deferred and why, with names in place of uids."""
    reason = named_reason(deferred.reason, name_of)
    return msgspec.structs.replace(deferred, subject=name_of(deferred.subject), reason=reason).sentence()
