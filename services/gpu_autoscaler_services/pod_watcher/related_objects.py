"""Volume and device claims, volumes, classes and pod groups that affect pods.

Facts of such a pod carry the version up to which its related objects were seen: a change of them is a new version.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpu_autoscaler.kube.protocol import (
    CLAIMS,
    CLASSES,
    DEVICE_CLAIMS,
    DEVICE_CLASSES,
    DEVICE_TEMPLATES,
    GROUPS,
    VOLCANO_GROUPS,
    VOLUMES,
    Bookmark,
    Changed,
    Deleted,
    Kind,
    Listed,
    ObjectT,
    WatchItem,
)
from gpu_autoscaler.kube.translate.common import group_name
from gpu_autoscaler.kube.translate.devices import POD_CLAIM_NAME, Claims, Key, claim_keys
from gpu_autoscaler.kube.translate.related_objects import (
    NO_RELATED_OBJECTS,
    RelatedObjects,
    Storage,
    claims_of,
    related_objects,
)
from gpu_autoscaler.kube.wire import core, storage

STORAGE_KINDS: tuple[Kind[Any], ...] = (CLAIMS, VOLUMES, CLASSES)
DEVICE_KINDS: tuple[Kind[Any], ...] = (DEVICE_CLAIMS, DEVICE_TEMPLATES, DEVICE_CLASSES)
RELATED_KINDS: tuple[Kind[Any], ...] = (*STORAGE_KINDS, *DEVICE_KINDS, GROUPS, VOLCANO_GROUPS)


class RelatedObjectsCache:
    """The objects that affect pods, and the affected pods."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[tuple[str, str], core.Object]] = {}  # by kind, namespace and name
        self._pods: dict[str, core.Pod] = {}  # by uid: pods with a claim or a group
        self._published: dict[str, int] = {}  # pod uid -> version of its last fact
        self._users: dict[Key, dict[str, core.Pod]] = {}  # by device claim and pod uid
        self._known: Claims | None = None  # None: must be recomputed
        self._version = 0

    def is_about(self, item: WatchItem) -> bool:
        """Return True for an item of these kinds."""
        return item.kind in RELATED_KINDS

    def take(self, item: WatchItem) -> Sequence[core.Pod]:
        """Apply the item; return the pods that it may change."""
        if isinstance(item, Bookmark):
            return ()
        known = self._objects.setdefault(item.kind.path(), {})
        self._known = None
        match item:
            case Listed():
                known.clear()
                known.update({_key(obj): obj for obj in item.objects})
                self._version = max(self._version, item.version)
            case Changed():
                known[_key(item.object)] = item.object
                self._version = max(self._version, item.object.version)
            case Deleted():
                known.pop(_key(item.object), None)
                self._version = max(self._version, item.object.version)
        if isinstance(item, Changed | Deleted) and item.kind is CLAIMS:
            key = _key(item.object)
            return [pod for pod in self._pods.values() if key in claims_of(pod)]
        if isinstance(item, Changed | Deleted) and item.kind is DEVICE_CLAIMS:
            named = set(self._users.get(_key(item.object), ()))
            named |= {owner.uid for owner in item.object.metadata.owner_references}
            return [pod for uid, pod in self._pods.items() if uid in named]
        return list(self._pods.values())

    def meet(self, pods: Iterable[core.Pod]) -> None:
        """Remember the device claims of the pods: the first pod of a shared claim requests its devices."""
        for pod in pods:
            for key in claim_keys(pod):
                self._users.setdefault(key, {})[pod.metadata.uid] = pod
                self._known = None
                self._version = max(self._version, pod.version)

    def sharing(self, pod: core.Pod) -> list[core.Pod]:
        """Return the other pods with a device claim of this one, which its start or end may change."""
        self._version = max(self._version, pod.version)
        users = {uid: user for key in claim_keys(pod) for uid, user in self._users.get(key, {}).items()}
        users.pop(pod.metadata.uid, None)
        return list(users.values())

    def of(self, pod: core.Pod) -> RelatedObjects | None:
        """Return the pod's related objects; None for an unscheduled pod while they are not all listed.

        Before, a node might be bought in another zone than the pod's volume.
        """
        kinds = (*(STORAGE_KINDS if any(claims_of(pod)) else ()), *(DEVICE_KINDS if pod.spec.resource_claims else ()))
        if not kinds and not group_name(pod.metadata):
            return NO_RELATED_OBJECTS
        self._pods[pod.metadata.uid] = pod
        self.meet((pod,))
        if any(kind.path() not in self._objects for kind in kinds):
            return RelatedObjects(version=self._version) if pod.spec.node_name else None
        least = self._group_count_min(pod)
        related = related_objects(pod, self._storage(), self._claims(), version=self._version, group_count_min=least)
        self._published[pod.metadata.uid] = max(self._version, pod.version)
        return related

    def gone(self, uid: str) -> int:
        """Forget the pod; return the version of its last fact, 0 if there is none."""
        pod = self._pods.pop(uid, None)
        for key in () if pod is None else claim_keys(pod):
            self._users.get(key, {}).pop(uid, None)
            self._known = None
        return self._published.pop(uid, 0)

    def absent_from(self, uids: frozenset[str]) -> list[core.Pod]:
        """Return the pods with facts at a version of their related objects that are not among these."""
        return [pod for uid, pod in self._pods.items() if uid not in uids]

    def _group_count_min(self, pod: core.Pod) -> int | None:
        key = (pod.metadata.namespace, group_name(pod.metadata))
        for kind in (GROUPS, VOLCANO_GROUPS):
            group = self._objects.get(kind.path(), {}).get(key)
            if isinstance(group, storage.Group):
                return group.spec.min_member
        return None

    def _known_of(self, kind: Kind[ObjectT]) -> dict[tuple[str, str], ObjectT]:
        """Return the known objects of the kind, by namespace and name."""
        return {key: obj for key, obj in self._objects.get(kind.path(), {}).items() if isinstance(obj, kind.type)}

    def _storage(self) -> Storage:
        return Storage(
            claims=self._known_of(CLAIMS),
            volumes={name: volume for (_, name), volume in self._known_of(VOLUMES).items()},
            classes={name: storage_class for (_, name), storage_class in self._known_of(CLASSES).items()},
        )

    def _claims(self) -> Claims:
        """Return all device claims; recomputed only after a change."""
        if self._known is None:
            claims = self._known_of(DEVICE_CLAIMS)
            self._known = Claims(
                claims=claims,
                templates=self._known_of(DEVICE_TEMPLATES),
                classes={name: device_class for (_, name), device_class in self._known_of(DEVICE_CLASSES).items()},
                made={
                    (owner.uid, name): claim
                    for claim in claims.values()
                    if (name := claim.metadata.annotations.get(POD_CLAIM_NAME)) is not None
                    for owner in claim.metadata.owner_references
                },
                first_users={
                    key: min(alive, key=_age) for key, users in self._users.items() if (alive := _alive(users))
                },
            )
        return self._known


def _alive(users: Mapping[str, core.Pod]) -> list[core.Pod]:
    return [pod for pod in users.values() if pod.status.phase not in ("Succeeded", "Failed")]


def _age(pod: core.Pod) -> tuple[str, str]:
    return str(pod.metadata.creation_timestamp), pod.metadata.uid


def _key(obj: core.Object) -> tuple[str, str]:
    return obj.metadata.namespace, obj.metadata.name
