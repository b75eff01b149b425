"""Rules of the plan check on ProvisioningRequests.

Shares no code with the plan: status, nodes and pods are read again.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta

from gpu_autoscaler.core.check.violation import Violation
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.pod import PodProvisioningObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import AnswerProvisioningRequest, Plan
from gpu_autoscaler.model.reasons.drain import NodeIdle, NodeUnderused
from gpu_autoscaler.model.reasons.upkeep import BookedNodeLost, RequestExpired, RequestInvalid
from gpu_autoscaler.model.resources import Resources

_BOOKED = timedelta(minutes=10)
_VALID = timedelta(days=7)
_TEMPLATES = timedelta(minutes=1)
_MEMBERS_MAX = 1000
_CHECK = "check-capacity.autoscaling.x-k8s.io"
_FINAL = ("Failed", "BookingExpired", "CapacityRevoked")


def provisioning_violations(plan: Plan, state: ClusterState, _: ScalingPolicy) -> Iterator[Violation]:
    """Yield purchases for requests that want none, removals of booked nodes, and answers that the state refutes."""
    if not state.provisioning:
        return
    for decision in plan.purchases:
        for key in {*getattr(decision.reason, "demand", ()), decision.gang or ""}:
            kind, _, rest = key.partition("/")
            what = _unwanted(rest.partition("/")[0], plan.as_of, state) if kind == "provisioning" else None
            if what is not None:
                yield Violation(f"{decision.offer.key} is bought for {key}: {what}", decision, demand=(key,))
    yield from _removals(plan, state)


def _unwanted(uid: str, as_of: datetime, state: ClusterState) -> str | None:
    """Return why nothing may be bought for the request; None: it waits for nodes."""
    request = state.provisioning.get(uid)
    if request is None or _has(request, *_FINAL):
        return "no such request is open"
    if _has(request, "Provisioned"):
        return "it has its capacity already"
    if request.class_name == _CHECK:
        return "it only checks capacity"
    if request.members_count > _MEMBERS_MAX or request.trouble or as_of >= request.created_at + _valid(request):
        return "it is invalid, or too old"
    return next(filter(None, (pods.volume_trouble or pods.device_trouble for pods in request.pod_sets)), None)


def unjustified_answer(decision: AnswerProvisioningRequest, as_of: datetime, state: ClusterState) -> str | None:
    """Return what the state shows against the answer; None: nothing."""
    request = state.provisioning.get(decision.request_uid)
    if request is None or (request.namespace, request.name) != (decision.namespace, decision.name):
        return "no such request is known"
    if decision.at != as_of or _has(request, *_FINAL):
        return "the request is closed, or the answer has another time"
    since = next((known.since for known in request.conditions if known.type == "Provisioned" and known.is_true), None)
    match decision.condition:
        case "BookingExpired":
            return None if since is not None and as_of >= since + _BOOKED else "its booking has not ended"
        case "CapacityRevoked":
            return _nothing_lost(decision, request, since, state)
        case _ if since is not None:
            return "it has its capacity already"
        case "Failed":
            return _may_be_served(decision, request, as_of)
        case "Provisioned" if decision.is_true:
            fitting = zip(request.pod_sets, _members_that_fit(request, state, frozenset()), strict=True)
            short = [pods for pods, fit in fitting if fit < pods.count or pods.volume_trouble or pods.device_trouble]
            return "ready nodes do not have the capacity" if short or request.trouble else None
        case _:
            return None


def _nothing_lost(
    decision: AnswerProvisioningRequest, request: PodProvisioningObserved, since: datetime | None, state: ClusterState
) -> str | None:
    lost = decision.reason.provider_id if isinstance(decision.reason, BookedNodeLost) else None
    gang = f"provisioning/{request.request_uid}"
    orders = (order for order in state.orders.values() if order.decision is not None and order.decision.gang == gang)
    ends = [order.terminated for order in orders if order.terminated is not None]
    if any(fact.provider_id == lost and since is not None and fact.terminated_at >= since for fact in ends):
        return None
    return "no node that was bought for it has ended since it was booked"


def _may_be_served(
    decision: AnswerProvisioningRequest, request: PodProvisioningObserved, as_of: datetime
) -> str | None:
    match decision.reason:
        case RequestInvalid():
            is_late = request.trouble and as_of >= request.created_at + _TEMPLATES
            return None if is_late or request.members_count > _MEMBERS_MAX else "it is valid"
        case RequestExpired():
            return None if as_of >= request.created_at + _valid(request) else "it is still valid"
        case _:
            return None if request.class_name == _CHECK and request.is_tried_once else "it is tried again"


def _removals(plan: Plan, state: ClusterState) -> Iterator[Violation]:
    """Yield removals by choice that leave less capacity than is booked, where there is enough without them."""
    drains = [decision for decision in plan.drains if isinstance(decision.reason, NodeIdle | NodeUnderused)]
    if not drains:
        return
    removed = frozenset(drain.node_name for drain in drains)
    for request in state.provisioning.values():
        since = next(
            (known.since for known in request.conditions if known.type == "Provisioned" and known.is_true), None
        )
        if since is None or plan.as_of >= since + _BOOKED or _has(request, *_FINAL):
            continue
        there, left = _members_that_fit(request, state, frozenset()), _members_that_fit(request, state, removed)
        existing = sum(_uses(pod.annotations, request.name) for pod in state.pods.values() if _is_here(pod, request))
        missing = request.members_count - existing
        if sum(left) < missing <= sum(there):
            yield Violation(
                f"{len(drains)} nodes are removed, and ProvisioningRequest {request.namespace}/{request.name} has "
                f"booked capacity for {missing} more pods",
                *drains,
            )


def _is_here(pod: object, request: PodProvisioningObserved) -> bool:
    return getattr(pod, "namespace", "") == request.namespace and getattr(pod, "phase", "") != "failed"


def _uses(annotations: tuple[tuple[str, str], ...], name: str) -> bool:
    return any(key in labels.CONSUME_PROVISIONING_REQUEST and value == name for key, value in annotations)


def _members_that_fit(request: PodProvisioningObserved, state: ClusterState, without: frozenset[str]) -> list[int]:
    """Return how many pods of each pod set ready nodes could hold at most, each pod set alone, by amounts."""
    requested: dict[str, Resources] = {}
    for pod in state.pods.values():
        if pod.node_name is not None and pod.phase not in ("succeeded", "failed"):
            requested[pod.node_name] = requested.get(pod.node_name, Resources()) + pod.requests
    counts = [0] * len(request.pod_sets)
    for node in state.nodes.values():
        if not node.is_ready or node.is_cordoned or node.name in without:
            continue
        free = node.allocatable - requested.get(node.name, Resources())
        for number, pods in enumerate(request.pod_sets):
            if pods.gpu_models and node.gpu_model not in pods.gpu_models:
                continue
            counts[number] += _places(pods.requests, free)
    return counts


def _places(member: Resources, free: Resources) -> int:
    amounts = (
        (member.gpu_count, free.gpu_count),
        (member.cpu_milli, free.cpu_milli),
        (member.memory_bytes, free.memory_bytes),
        *((count, dict(free.slices).get(name, 0)) for name, count in member.slices),
    )
    return max(0, min((have // need for need, have in amounts if need > 0), default=free.pod_count))


def _has(request: PodProvisioningObserved, *types: str) -> bool:
    return any(known.type in types and known.is_true for known in request.conditions)


def _valid(request: PodProvisioningObserved) -> timedelta:
    return _VALID if request.valid_seconds is None else timedelta(seconds=request.valid_seconds)
