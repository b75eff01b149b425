"""ProvisioningRequests, the PodTemplates that they name, and the PriorityClasses of these.

Facts of such a request carry the version up to which these objects were seen, and those that `related_objects.py` knows
of its pods.
"""

from collections.abc import Sequence
from typing import Any

from gpu_autoscaler.events.pod import PodProvisioningObserved
from gpu_autoscaler.kube.protocol import POD_TEMPLATES, PRIORITY_CLASSES, Changed, Deleted, Kind, Listed, WatchItem
from gpu_autoscaler.kube.translate.provisioning import is_served, pods_to_come, provisioning_observed
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.kube.wire.provisioning import PodTemplate, PriorityClass, ProvisioningRequest
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler_services.pod_watcher.related_objects import RelatedObjectsCache

TEMPLATE_KINDS: tuple[Kind[Any], ...] = (POD_TEMPLATES, PRIORITY_CLASSES)

_Key = tuple[str, str]  # namespace and name; PriorityClasses have none


class ProvisioningRequests:
    """The last observed PodTemplates and PriorityClasses, and the requests that name them."""

    def __init__(self, related: RelatedObjectsCache) -> None:
        self._related = related
        self._templates: dict[_Key, PodTemplate] = {}
        self._classes: dict[_Key, PriorityClass] = {}
        self._requests: dict[str, ProvisioningRequest] = {}  # by uid, of the classes that are served
        self._published: dict[str, int] = {}  # by uid -> version of its last fact
        self._version = 0
        self._listed: set[str] = set()  # kinds that were observed

    def is_about(self, item: WatchItem) -> bool:
        """Return True for PodTemplates and PriorityClasses."""
        return item.kind in TEMPLATE_KINDS

    def take(self, item: WatchItem) -> Sequence[ProvisioningRequest]:
        """Apply the item; return the requests that it may change: all of them, if PriorityClasses change."""
        known: dict[_Key, Any] = self._templates if item.kind is POD_TEMPLATES else self._classes
        changed: set[_Key] = set()
        is_first = item.kind.path() not in self._listed
        match item:
            case Listed():
                changed |= known.keys()
                known.clear()
                known.update((_key(found), found) for found in item.objects)
                changed |= known.keys()
                self._listed.add(item.kind.path())
                self._version = max(self._version, item.version)
            case Changed():
                known[_key(item.object)] = item.object
                changed.add(_key(item.object))
                self._version = max(self._version, item.object.version)
            case Deleted():
                known.pop(_key(item.object), None)
                changed.add(_key(item.object))
                self._version = max(self._version, item.object.version)
        if (changed and item.kind is PRIORITY_CLASSES) or is_first:
            return tuple(self._requests.values())
        return [request for request in self._requests.values() if not changed.isdisjoint(_templates_of(request))]

    def observed(self, request: ProvisioningRequest, *, epoch: int) -> PodProvisioningObserved | None:
        """Return the request as a fact; None for a class of others, and until all that it names is listed."""
        if not is_served(request):
            return None
        uid = request.metadata.uid
        self._requests[uid] = request
        if len(self._listed) < len(TEMPLATE_KINDS):
            return None
        pods: tuple[core.Pod, ...] = ()
        trouble = ""
        try:
            pods = pods_to_come(request, self._templates, self._classes.values())
        except PermanentError as exc:
            trouble = str(exc)
        related = self._related.of_request(uid, pods)
        if related is None:
            return None
        version = max(request.version, self._version, *(found.version for found in related))
        self._published[uid] = version
        return provisioning_observed(request, pods, related, trouble, epoch=epoch, version=version)

    def named(self, uids: Sequence[str]) -> Sequence[ProvisioningRequest]:
        """Return the requests with these uids."""
        return [self._requests[uid] for uid in uids]

    def gone(self, uid: str) -> int:
        """Forget the request; return the version of its last fact, 0 if there is none."""
        self._related.gone(uid)
        self._requests.pop(uid, None)
        return self._published.pop(uid, 0)

    def absent_from(self, uids: frozenset[str]) -> list[ProvisioningRequest]:
        """Return the requests with facts at a version of their templates that are not among these."""
        return [request for uid, request in self._requests.items() if uid not in uids]


def _key(found: core.Object) -> _Key:
    return found.metadata.namespace, found.metadata.name


def _templates_of(request: ProvisioningRequest) -> frozenset[_Key]:
    namespace = request.metadata.namespace
    return frozenset((namespace, pods.pod_template_ref.name) for pods in request.spec.pod_sets)
