"""ProvisioningRequests and the PodTemplates that they name.

Facts of such a request carry the version up to which its templates were seen, as in `related_objects.py` for pods.
"""

from collections.abc import Sequence

from gpu_autoscaler.events.pod import PodProvisioningObserved
from gpu_autoscaler.kube.protocol import POD_TEMPLATES, Changed, Deleted, Listed, WatchItem
from gpu_autoscaler.kube.translate.provisioning import is_served, provisioning_observed
from gpu_autoscaler.kube.wire.provisioning import PodTemplate, ProvisioningRequest

_Key = tuple[str, str]  # namespace and name


class ProvisioningRequests:
    """The last observed PodTemplates, and the requests that name them."""

    def __init__(self) -> None:
        self._templates: dict[_Key, PodTemplate] = {}
        self._requests: dict[str, ProvisioningRequest] = {}  # by uid, of the classes that are served
        self._published: dict[str, int] = {}  # by uid -> version of its last fact
        self._version = 0
        self._are_templates_listed = False

    def is_about(self, item: WatchItem) -> bool:
        """Return True for PodTemplates."""
        return item.kind is POD_TEMPLATES

    def take(self, item: WatchItem) -> Sequence[ProvisioningRequest]:
        """Apply the item; return the requests that it may change."""
        changed: set[_Key] = set()
        match item:
            case Listed():
                known = [template for template in item.objects if isinstance(template, PodTemplate)]
                changed |= self._templates.keys()
                self._templates = {_key(template): template for template in known}
                changed |= self._templates.keys()
                self._version = max(self._version, item.version)
                if not self._are_templates_listed:
                    self._are_templates_listed = True
                    return tuple(self._requests.values())
            case Changed(object=PodTemplate() as template):
                self._templates[_key(template)] = template
                changed.add(_key(template))
                self._version = max(self._version, template.version)
            case Deleted(object=PodTemplate() as template):
                self._templates.pop(_key(template), None)
                changed.add(_key(template))
                self._version = max(self._version, template.version)
        return [request for request in self._requests.values() if not changed.isdisjoint(_templates_of(request))]

    def observed(self, request: ProvisioningRequest, *, epoch: int) -> PodProvisioningObserved | None:
        """Return the request as a fact; None for a class of others, and until the templates are listed."""
        if not is_served(request):
            return None
        self._requests[request.metadata.uid] = request
        if not self._are_templates_listed:
            return None
        version = self._published[request.metadata.uid] = max(request.version, self._version)
        return provisioning_observed(
            request, lambda namespace, name: self._templates.get((namespace, name)), epoch=epoch, version=version
        )

    def gone(self, uid: str) -> int:
        """Forget the request; return the version of its last fact, 0 if there is none."""
        self._requests.pop(uid, None)
        return self._published.pop(uid, 0)

    def absent_from(self, uids: frozenset[str]) -> list[ProvisioningRequest]:
        """Return the requests with facts at a version of their templates that are not among these."""
        return [request for uid, request in self._requests.items() if uid not in uids]


def _key(template: PodTemplate) -> _Key:
    return template.metadata.namespace, template.metadata.name


def _templates_of(request: ProvisioningRequest) -> frozenset[_Key]:
    namespace = request.metadata.namespace
    return frozenset((namespace, pods.pod_template_ref.name) for pods in request.spec.pod_sets)
