"""ProvisioningRequests: which are open or booked, which can never be served, and which of their pods exist already.

A request is open until its status says Provisioned, then booked until its pods use the capacity or the booking ends.
All of that follows from the status that Kubernetes shows. `core/provisioning/request_answers.py` decides the answers.

Source: kubernetes/autoscaler, cluster-autoscaler/processors/provreq (times) and provisioningrequest/pods (annotations),
read 2026-11-27.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime

from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.next_change import has_lasted
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.pod import PodObserved, PodProvisioningGone, PodProvisioningObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.demands import CHECK_CAPACITY
from gpu_autoscaler.model.ids import PodUid

BOOKED_SECONDS = 600.0
VALID_SECONDS = 7 * 86_400.0
# Project defaults. Kueue makes the templates right after the request. Anybody may create requests: as of reported
# demand, every member is placed in every plan.
TEMPLATE_SECONDS_MAX = 60.0
OPEN_COUNT_MAX = 256
MEMBERS_COUNT_MAX = 1000

_Name = tuple[str, str]  # namespace and name


def request_key(request: PodProvisioningObserved) -> str:
    """Return the key of the request, which is also that of its gang."""
    return f"provisioning/{request.request_uid}"


def request_names(request: PodProvisioningObserved | PodProvisioningGone) -> tuple[str, ...]:
    """Return how people name the request."""
    return request.request_uid, request.name, f"{request.namespace}/{request.name}"


def is_check(request: PodProvisioningObserved) -> bool:
    """True if nothing is bought for the request."""
    return request.class_name == CHECK_CAPACITY


def open_requests(state: ClusterState, as_of: datetime) -> tuple[PodProvisioningObserved, ...]:
    """Return the requests that wait for capacity and can be served, the oldest first."""
    known = (
        request
        for request in state.provisioning.values()
        if request.closed_by is None
        and not request.is_true("Provisioned")
        and not request.trouble
        and why_invalid(request, as_of) is None
        and not is_expired(request, as_of)
    )
    return tuple(sorted(known, key=lambda request: (request.created_at, request.request_uid)))


def booked_requests(state: ClusterState, as_of: datetime) -> Iterator[PodProvisioningObserved]:
    """Yield the requests whose capacity is kept for pods to come."""
    for request in state.provisioning.values():
        since = booked_since(request) if request.closed_by is None else None
        if since is not None and not has_lasted(since, BOOKED_SECONDS, as_of):
            yield request


def booked_since(request: PodProvisioningObserved) -> datetime | None:
    """Return when the capacity was found; None: it was not."""
    known = request.status("Provisioned")
    return known.since if known is not None and known.is_true else None


def why_invalid(request: PodProvisioningObserved, as_of: datetime) -> str | None:
    """Return why the request can never be served; None: it can, or its templates may still come."""
    if request.members_count > MEMBERS_COUNT_MAX:
        return f"it asks for {request.members_count} pods, more than {MEMBERS_COUNT_MAX}; split it"
    if request.trouble and has_lasted(request.created_at, TEMPLATE_SECONDS_MAX, as_of):
        return request.trouble
    return None


def is_expired(request: PodProvisioningObserved, as_of: datetime) -> bool:
    """True once the request has waited for as long as it is valid."""
    return has_lasted(request.created_at, request.valid_seconds or VALID_SECONDS, as_of)


def missing_counts(request: PodProvisioningObserved, state: ClusterState) -> tuple[int, ...]:
    """Return how many pods of each pod set do not exist yet. A pod counts once: as a pod, not as a member as well."""
    counts = [pods.count for pods in request.pod_sets]
    for pod in _consumers(state.pods).get((request.namespace, request.name), ()):
        left = [number for number, count in enumerate(counts) if count]
        alike = [number for number in left if request.pod_sets[number].requests == pod.requests]
        for number in (alike or left)[:1]:
            counts[number] -= 1
    return tuple(counts)


def consumed_request(pod: PodObserved) -> _Name | None:
    """Return namespace and name of the request whose capacity the pod uses; None: it names none."""
    annotations = dict(pod.annotations)
    name = next((annotations[key] for key in labels.CONSUME_PROVISIONING_REQUEST if annotations.get(key)), None)
    return None if name is None else (pod.namespace, name)


def is_only_checked(pod: PodObserved) -> bool:
    """True for a pod whose capacity was found by a check: nothing is bought for it either."""
    annotations = dict(pod.annotations)
    is_of_class = any(annotations.get(key) == CHECK_CAPACITY for key in labels.PROVISIONING_CLASS)
    return is_of_class and consumed_request(pod) is not None


@cached_by_identity(4)
def _consumers(pods: Mapping[PodUid, PodObserved]) -> Mapping[_Name, tuple[PodObserved, ...]]:
    """Return the pods that use capacity of a request, by its name; one that failed is replaced by another."""
    consumers: dict[_Name, list[PodObserved]] = {}
    for pod in pods.values():
        name = consumed_request(pod) if pod.annotations else None
        if name is not None and pod.phase != "failed" and pod.deleting_since is None:
            consumers.setdefault(name, []).append(pod)
    return {name: tuple(sorted(found, key=lambda pod: pod.pod_uid)) for name, found in consumers.items()}
