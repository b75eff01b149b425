"""The resources that the server serves: one row each. A custom resource is one more row.

Rows hold what generic code cannot derive, such as which kinds have a generation or may be updated without a version.
Source: the `strategy.go` files of Kubernetes 1.36, `pkg/registry` (read 2026-11-21).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from gpu_autoscaler.simcluster.objects import Json

POD_FIELDS = (
    "spec.nodeName",
    "spec.restartPolicy",
    "spec.schedulerName",
    "spec.serviceAccountName",
    "status.phase",
    "status.podIP",
    "status.nominatedNodeName",
)
EVENT_FIELDS = (
    "involvedObject.kind",
    "involvedObject.namespace",
    "involvedObject.name",
    "involvedObject.uid",
    "reason",
    "reportingComponent",
    "type",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A resource of the API: its names and behavior."""

    group: str  # "" is the core group
    version: str = "v1"
    kind: str
    plural: str
    namespaced: bool = True
    has_status: bool = False  # has a /status subresource; a plain update leaves the status alone
    has_generation: bool = False
    unconditional_update: bool = True  # PUT without resourceVersion is accepted
    create_on_update: bool = False  # PUT of an unknown name creates it
    returns_deleted: bool = False  # DELETE returns the object; others return a Status
    orphans_by_default: bool = False  # DELETE without a propagation policy leaves the dependents
    custom: bool = False  # its list items carry apiVersion and kind; no strategic merge
    fields: tuple[str, ...] = ()  # supported fieldSelectors beyond name and namespace
    storage: str = ""  # set if two API groups show the same stored objects
    view: Callable[[Json], Json] | None = None  # this group's view of the stored object

    @property
    def api_version(self) -> str:
        """`v1` or `group/version`, as objects carry it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def table(self) -> str:
        """Name of the table that holds the objects."""
        return self.storage or self.resource

    @property
    def resource(self) -> str:
        """The resource in messages: `pods`, `jobs.batch`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def qualified(self) -> str:
        """The kind in messages: `Pod`, `Job.batch`."""
        return f"{self.kind}.{self.group}" if self.group else self.kind

    def controller_reference(self, item: Json) -> Json:
        """Return the reference with which dependents name an object of this kind as their controller."""
        metadata = item["metadata"]
        reference = {
            "apiVersion": self.api_version,
            "kind": self.kind,
            "name": metadata["name"],
            "uid": metadata["uid"],
        }
        return {**reference, "controller": True, "blockOwnerDeletion": True}


def event_as_new_group(event: Json) -> Json:
    """Return a core Event as events.k8s.io/v1 shows it (Kubernetes API reference, "Event", read 2026-11-21)."""
    shown = {key: value for key, value in event.items() if key in ("metadata", "eventTime", "action", "reason", "type")}
    shown["note"] = event.get("message", "")
    shown["regarding"] = event.get("involvedObject", {})
    shown["reportingController"] = event.get("reportingComponent", "")
    shown["reportingInstance"] = event.get("reportingInstance", "")
    shown["deprecatedSource"] = event.get("source") or {}
    shown["deprecatedFirstTimestamp"] = event.get("firstTimestamp")
    shown["deprecatedLastTimestamp"] = event.get("lastTimestamp")
    if event.get("count"):
        shown["deprecatedCount"] = event["count"]
    return shown


NAMESPACES = Kind(group="", kind="Namespace", plural="namespaces", namespaced=False, has_status=True)
NODES = Kind(group="", kind="Node", plural="nodes", namespaced=False, has_status=True, fields=("spec.unschedulable",))
PODS = Kind(
    group="", kind="Pod", plural="pods", has_status=True, has_generation=True, returns_deleted=True, fields=POD_FIELDS
)
SERVICES = Kind(group="", kind="Service", plural="services", has_status=True, returns_deleted=True)
EVENTS = Kind(group="", kind="Event", plural="events", fields=EVENT_FIELDS)
NEW_EVENTS = Kind(group="events.k8s.io", kind="Event", plural="events", storage="events", view=event_as_new_group)
JOBS = Kind(
    group="batch",
    kind="Job",
    plural="jobs",
    has_status=True,
    has_generation=True,
    orphans_by_default=True,
    fields=("status.successful",),
)
BUDGETS = Kind(
    group="policy",
    kind="PodDisruptionBudget",
    plural="poddisruptionbudgets",
    has_status=True,
    has_generation=True,
    unconditional_update=False,
)
LEASES = Kind(
    group="coordination.k8s.io", kind="Lease", plural="leases", unconditional_update=False, create_on_update=True
)
PRIORITY_CLASSES = Kind(
    group="scheduling.k8s.io", kind="PriorityClass", plural="priorityclasses", namespaced=False, has_generation=True
)

CLAIMS = Kind(group="", kind="PersistentVolumeClaim", plural="persistentvolumeclaims", has_status=True)
VOLUMES = Kind(group="", kind="PersistentVolume", plural="persistentvolumes", namespaced=False, has_status=True)
CLASSES = Kind(group="storage.k8s.io", kind="StorageClass", plural="storageclasses", namespaced=False)
ATTACHMENTS = Kind(
    group="storage.k8s.io", kind="VolumeAttachment", plural="volumeattachments", namespaced=False, has_status=True
)
GROUPS = Kind(
    group="scheduling.x-k8s.io", version="v1alpha1", kind="PodGroup", plural="podgroups", has_status=True, custom=True
)
_DEVICES = "resource.k8s.io"
DEVICE_CLAIMS = Kind(group=_DEVICES, kind="ResourceClaim", plural="resourceclaims", has_status=True)
DEVICE_TEMPLATES = Kind(group=_DEVICES, kind="ResourceClaimTemplate", plural="resourceclaimtemplates")
DEVICE_SLICES = Kind(
    group=_DEVICES, kind="ResourceSlice", plural="resourceslices", namespaced=False, has_generation=True
)
DEVICE_CLASSES = Kind(group=_DEVICES, kind="DeviceClass", plural="deviceclasses", namespaced=False, has_generation=True)

KINDS = (
    NAMESPACES,
    NODES,
    PODS,
    SERVICES,
    EVENTS,
    NEW_EVENTS,
    JOBS,
    BUDGETS,
    LEASES,
    PRIORITY_CLASSES,
    CLAIMS,
    VOLUMES,
    CLASSES,
    ATTACHMENTS,
    GROUPS,
    DEVICE_CLAIMS,
    DEVICE_TEMPLATES,
    DEVICE_SLICES,
    DEVICE_CLASSES,
)


class Registry:
    """The kinds being served, found by path and by object."""

    def __init__(self, kinds: Iterable[Kind] = KINDS) -> None:
        self._by_path: dict[tuple[str, str, str], Kind] = {}
        for kind in kinds:
            self.add(kind)

    def add(self, kind: Kind) -> None:
        self._by_path[kind.group, kind.version, kind.plural] = kind

    def find(self, group: str, version: str, plural: str) -> Kind | None:
        return self._by_path.get((group, version, plural))

    def __iter__(self) -> Iterator[Kind]:
        return iter(self._by_path.values())
