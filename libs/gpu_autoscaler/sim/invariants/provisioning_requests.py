"""Invariants of ProvisioningRequests: capacity is bought for all pods of a request or for none, each condition is true
and was decided, in time, and booked capacity stays.

What processes may not know yet excuses them, so a violation is certain.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

from gpu_autoscaler.core.deferred_groups import DeferredLookup
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.kube.protocol import NODES, POD_TEMPLATES, PODS, PROVISIONING_REQUESTS
from gpu_autoscaler.kube.translate.common import condition
from gpu_autoscaler.kube.translate.pod import pod_requests
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.kube.wire.provisioning import ProvisioningRequest
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import AnswerProvisioningRequest, BuyNode, DrainNode, Plan
from gpu_autoscaler.model.demands import CHECK_CAPACITY
from gpu_autoscaler.model.ids import ActionId, PodUid
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.defer_waits import CapacityExpected
from gpu_autoscaler.model.reasons.drain import NodeIdle, NodeUnderused
from gpu_autoscaler.sim.actors.kueue import CLOSED, is_unserved, pods_count
from gpu_autoscaler.sim.actors.policies import Policies
from gpu_autoscaler.sim.cluster.cloud import Cloud
from gpu_autoscaler.sim.cluster.controllers import Workloads
from gpu_autoscaler.sim.cluster.objects import Entry, is_true
from gpu_autoscaler.sim.cluster.scheduler import FINISHED, accepts, free_capacity, is_open
from gpu_autoscaler.sim.invariants import ANSWERS_TRUE, GANGS_WHOLE, NO_VOLUNTARY_REMOVAL, UPKEEP_DECIDED
from gpu_autoscaler.sim.invariants.placement import fit_count
from gpu_autoscaler.sim.virtual_time import VirtualLoop

# Stated here again: a bug may change those of the core.
BOOKED = timedelta(minutes=10)
VALID = timedelta(days=7)
TEMPLATES = timedelta(minutes=1)
CHECK_SECONDS = 60.0
LATE = timedelta(seconds=120)  # from the instant at which an answer is due
KNOWN = timedelta(seconds=60)  # a state that has lasted this long without faults is known to every process
_PREFIX = "provisioning/"


class ProvisioningRequestsInvariant:
    """Compares plans and conditions with what nodes, pods and machines are."""

    def __init__(
        self,
        workloads: Workloads,
        cloud: Cloud,
        policies: Policies,
        report: Callable[[str, str], None],
        *,
        disturbed_until: Callable[[], float],
    ) -> None:
        """`disturbed_until`: when the last fault ended, in seconds of the loop."""
        self._loop: VirtualLoop = workloads.loop
        self._cluster = workloads.cluster
        self._cloud, self._policies, self._report = cloud, policies, report
        self._disturbed_until = disturbed_until
        self._requests: dict[str, ProvisioningRequest] = {}  # by uid, with those that were deleted
        self._decided: set[tuple[str, str, str, str]] = set()  # uid, condition, status and reason
        self._bought_for: dict[ActionId, str] = {}  # the uid of the request
        self._cluster.listen(self._on_change)
        self._loop.call_later(CHECK_SECONDS, self._check_due)

    def on_fact(self, recorded: Recorded) -> None:
        """A fact was stored."""
        if not isinstance(recorded.fact, ScalingPlanMade):
            return
        plan = recorded.fact.plan
        for decision in plan.decisions:
            if isinstance(decision, BuyNode):
                self._check_purchase(decision, DeferredLookup(plan))
        answers = [act for act in plan.upkeep_decisions if isinstance(act, AnswerProvisioningRequest)]
        for answer in answers:
            self._check_answer(answer)
            self._decided.add(
                (answer.request_uid, answer.condition, "True" if answer.is_true else "False", answer.code)
            )
        if self._is_undisturbed():
            self._check_capacity(plan, [answer for answer in answers if answer.condition == "Provisioned"])
            self._check_removals(plan)

    # ---- purchases

    def _check_purchase(self, decision: BuyNode, lookup: DeferredLookup) -> None:
        """Nothing is bought for a check, for its pods, or for a part of a gang."""
        keys = set(decision.reason.demand) if isinstance(decision.reason, UnmetDemand) else set()
        for key in sorted(keys | {decision.gang or ""}):
            request = self._requests.get(key.removeprefix(_PREFIX).partition("/")[0])
            if key.startswith(_PREFIX) and request is not None:
                self._bought_for[decision.action_id] = request.metadata.uid
                if request.spec.provisioning_class_name == CHECK_CAPACITY:
                    self._report(ANSWERS_TRUE, f"{decision.action_id} is bought for {key}, which is only checked")
                self._check_whole(decision, request, lookup)
            elif key.startswith("pod/") and self._is_checked(PodUid(key.removeprefix("pod/"))):
                self._report(ANSWERS_TRUE, f"{decision.action_id} is bought for {key}, whose capacity was only checked")

    def _check_whole(self, decision: BuyNode, request: ProvisioningRequest, lookup: DeferredLookup) -> None:
        key = f"{_PREFIX}{request.metadata.uid}"
        for subject in (key, *(f"{key}/{number}" for number in range(len(request.spec.pod_sets)))):
            for deferral in lookup.of(subject):
                if not isinstance(deferral.reason, CapacityExpected):
                    what = f"{decision.action_id} is bought for {key}, but {deferral.reason.tag()} defers {subject}"
                    self._report(GANGS_WHOLE, what)
                    return

    def _is_checked(self, uid: PodUid) -> bool:
        pods = (pod for pod in self._cluster.all(PODS) if pod.metadata.uid == uid)
        return any(pod.metadata.annotations.get(labels.PROVISIONING_CLASS[0]) == CHECK_CAPACITY for pod in pods)

    # ---- conditions

    def _check_answer(self, answer: AnswerProvisioningRequest) -> None:
        """Compare an answer with the clock, the templates and the machines."""
        request = self._requests.get(answer.request_uid)
        if request is None:
            self._report(ANSWERS_TRUE, f"{answer.sentence()} There is no such request.")
            return
        since, wrong = _booked_since(request), ""
        if answer.condition == "BookingExpired" and (since is None or answer.at < since + BOOKED):
            wrong = f"its capacity is booked since {since}"
        elif answer.condition == "CapacityRevoked" and not self._has_lost_machine(request, since):
            wrong = "no machine has ended that was bought for it"
        elif answer.condition == "Failed":
            wrong = self._wrong_failure(answer, request)
        if wrong:
            self._report(ANSWERS_TRUE, f"{answer.sentence()} But {wrong}.")

    def _has_lost_machine(self, request: ProvisioningRequest, since: datetime | None) -> bool:
        machines = self._cloud.machines
        bought = (of for of in machines if self._bought_for.get(of.order.action_id) == request.metadata.uid)
        return any(since and of.terminated_at and of.terminated_at >= since for of in bought)

    def _wrong_failure(self, answer: AnswerProvisioningRequest, request: ProvisioningRequest) -> str:
        """Return why the request has not failed; empty: it has."""
        match answer.code:
            case "Expired" if answer.at < _valid_until(request):
                return f"it is valid until {_valid_until(request)}"
            case "FailedToCreatePods" if answer.at < _created_at(request) + TEMPLATES:
                return "its templates may still come"
            case "FailedToCreatePods" if self._is_undisturbed() and self._has_templates(request, answer.at - KNOWN / 6):
                return "its templates exist"
            case "CapacityIsNotFound" if not _is_tried_once(request):
                return "it is to be tried again"
            case _:
                return ""

    def _check_capacity(self, plan: Plan, answers: list[AnswerProvisioningRequest]) -> None:
        """Capacity that was found is there: for all pods of a request, and not twice."""
        found = [self._requests[answer.request_uid] for answer in answers if answer.is_true]
        for request in found:
            for number, pod in enumerate(self._pods_of(request)):
                count, places = request.spec.pod_sets[number].count, self._places(pod, ())
                if places < count:
                    name = f"{request.metadata.namespace}/{request.metadata.name}"
                    self._report(ANSWERS_TRUE, f"{name} has capacity, but {places} of {count} pods fit on ready nodes")
        booked = list(self._booked(plan.as_of))
        members = [pod for request in (*found, *booked) for pod in self._pods_of(request)]
        if found and all(pod_requests(pod).gpu_count == 1 for pod in members):
            # Pods of one GPU fit wherever one is free, so that no order of placing them needs more.
            missing_count = sum(map(self._missing_count, booked))
            count, places = sum(map(pods_count, found)), self._places(members[0], ())
            are_booked_served = missing_count <= self._places(members[0], (), is_strict=True)
            if are_booked_served and places < count + missing_count:
                names = ", ".join(request.metadata.name for request in found)
                what = f"{names} has capacity for {count} pods, but {missing_count} of {places} places are booked"
                self._report(ANSWERS_TRUE, what)

    def _check_removals(self, plan: Plan) -> None:
        """No node is removed for idleness that booked capacity needs."""
        drained = {
            decision.node_name
            for decision in plan.decisions
            if isinstance(decision, DrainNode) and isinstance(decision.reason, NodeIdle | NodeUnderused)
        }
        booked = list(self._booked(plan.as_of)) if drained else []
        members = [pod for request in booked for pod in self._pods_of(request)]
        if members and all(pod_requests(pod).gpu_count == 1 for pod in members):
            missing_count = sum(map(self._missing_count, booked))
            if self._places(members[0], drained) < missing_count <= self._places(members[0], (), is_strict=True):
                what = f"{', '.join(sorted(drained))} are drained, {missing_count} pods have booked capacity there"
                self._report(NO_VOLUNTARY_REMOVAL, what)

    def _check_due(self) -> None:
        """Every minute without faults: an answer that is due has been given."""
        self._loop.call_later(CHECK_SECONDS, self._check_due)
        if not self._is_undisturbed() or self._policies.now.is_frozen:
            return
        calm_since = self._loop.now() - timedelta(seconds=self._loop.time() - self._disturbed_until())
        for request in self._cluster.all(PROVISIONING_REQUESTS):
            due = _due(request, has_templates=self._has_templates(request, self._loop.now()))
            for name, at in due.items():
                is_given = is_true(request.status.conditions, name)
                if not is_given and self._loop.now() > max(at, calm_since) + LATE:
                    self._report(ANSWERS_TRUE, f"{request.metadata.name} is not {name}, which was due at {at}")

    def _on_change(self, plural: str, entry: Entry) -> None:
        """Every condition that is new was decided, and none is lost."""
        request = entry.object
        if plural != PROVISIONING_REQUESTS.plural or not isinstance(request, ProvisioningRequest):
            return
        uid = request.metadata.uid
        before = self._requests.get(uid)
        self._requests[uid] = request
        former = () if before is None else before.status.conditions
        if lost := {of.type for of in former} - {of.type for of in request.status.conditions}:
            self._report(ANSWERS_TRUE, f"{request.metadata.name} has lost {', '.join(sorted(lost))}")
        known = {(uid, of.type, of.status, of.reason) for of in former}
        shown = {(uid, of.type, of.status, of.reason) for of in request.status.conditions}
        for _, name, status, _ in sorted(shown - known - self._decided):
            self._report(UPKEEP_DECIDED, f"{request.metadata.name}: no plan has decided {name}={status}")

    # ---- what is true

    def _is_undisturbed(self) -> bool:
        return self._disturbed_until() < self._loop.time() - KNOWN.total_seconds()

    def _booked(self, as_of: datetime) -> Iterator[ProvisioningRequest]:
        """Yield the requests whose capacity every process knows to be kept."""
        for request in self._cluster.all(PROVISIONING_REQUESTS):
            since = _booked_since(request)
            is_closed = any(is_true(request.status.conditions, closed) for closed in CLOSED)
            if since is not None and not is_closed and KNOWN / 6 < as_of - since < BOOKED - KNOWN / 6:
                yield request

    def _missing_count(self, request: ProvisioningRequest) -> int:
        """Return how many pods are to come."""
        name = request.metadata.name
        here = Counter(pod.metadata.annotations.get(labels.CONSUME_PROVISIONING_REQUEST[0]) for pod in self._pods())
        return max(0, pods_count(request) - here[name])

    def _pods(self) -> Iterator[core.Pod]:
        return (pod for pod in self._cluster.all(PODS) if pod.status.phase != "Failed")

    def _pods_of(self, request: ProvisioningRequest) -> list[core.Pod]:
        """Return a pod of each pod set; none, unless all templates exist."""
        names = [pods.pod_template_ref.name for pods in request.spec.pod_sets]
        templates = [self._cluster.find(POD_TEMPLATES, request.metadata.namespace, name) for name in names]
        pods = [core.Pod(metadata=of.metadata, spec=of.template.spec) for of in templates if of is not None]
        return pods if len(pods) == len(names) else []

    def _has_templates(self, request: ProvisioningRequest, by: datetime) -> bool:
        pods = self._pods_of(request)
        return bool(pods) and all((pod.metadata.creation_timestamp or by) <= by for pod in pods)

    def _places(self, pod: core.Pod, without: set[str] | tuple[()], *, is_strict: bool = False) -> int:
        """Return how many of these pods fit on ready nodes: beside pods that every process knows, or beside all."""
        nodes = [
            node
            for node in self._cluster.all(NODES)
            if is_open(node) and node.metadata.name not in without and accepts(pod.spec, node)
        ]
        seen_by = self._cluster.now() - KNOWN
        pods = [
            known
            for known in self._cluster.all(PODS)
            if known.status.phase not in FINISHED
            and (is_strict or (known.status.start_time is not None and known.status.start_time <= seen_by))
        ]
        return sum(fit_count(pod_requests(pod), free) for free in free_capacity(nodes, pods).values())


def _booked_since(request: ProvisioningRequest) -> datetime | None:
    known = condition(request.status.conditions, "Provisioned")
    return None if known is None or known.status != "True" else known.last_transition_time


def _valid_until(request: ProvisioningRequest) -> datetime:
    seconds = request.spec.parameters.get("ValidUntilSeconds")
    return _created_at(request) + (VALID if seconds is None else timedelta(seconds=float(seconds)))


def _created_at(request: ProvisioningRequest) -> datetime:
    created_at = request.metadata.creation_timestamp
    assert created_at is not None  # noqa: S101 - the API server sets it
    return created_at


def _is_tried_once(request: ProvisioningRequest) -> bool:
    is_check = request.spec.provisioning_class_name == CHECK_CAPACITY
    return is_check and request.spec.parameters.get("noRetry") == "true"


def _due(request: ProvisioningRequest, *, has_templates: bool) -> dict[str, datetime]:
    """Return by condition when it has to be true."""
    created_at, since = _created_at(request), _booked_since(request)
    if since is not None:
        is_revoked = is_true(request.status.conditions, "CapacityRevoked")
        return {} if is_revoked else {"BookingExpired": since + BOOKED}
    if not is_unserved(request):
        return {}
    if not has_templates:
        return {"Failed": created_at + TEMPLATES}
    return {"Failed": _valid_until(request), "Accepted": created_at + TEMPLATES}
