"""Claims of volumes and devices, volumes, classes and pod groups as last seen, for the pods that they matter to.

What is said of such a pod carries the version up to which its surroundings were seen, so that a change of theirs is
news of the pod: the server counts one version for all of its objects.
"""

from collections.abc import Sequence
from typing import Any

from gpu_autoscaler.kube import wire, wire_devices, wire_storage
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
    WatchItem,
)
from gpu_autoscaler.kube.translate.around import NOTHING_AROUND, Around, Storage, around, claims_of
from gpu_autoscaler.kube.translate.common import group_name
from gpu_autoscaler.kube.translate.devices import Claims

STORAGE_KINDS: tuple[Kind[Any], ...] = (CLAIMS, VOLUMES, CLASSES)
DEVICE_KINDS: tuple[Kind[Any], ...] = (DEVICE_CLAIMS, DEVICE_TEMPLATES, DEVICE_CLASSES)
AROUND_KINDS: tuple[Kind[Any], ...] = (*STORAGE_KINDS, *DEVICE_KINDS, GROUPS, VOLCANO_GROUPS)


class Surroundings:
    """What decides about pods besides themselves, and which pods that is."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[tuple[str, str], wire.Object]] = {}  # by kind, namespace and name
        self._pods: dict[str, wire.Pod] = {}  # by uid: those with a claim or a group
        self._told: dict[str, int] = {}  # versions under which something was said of them
        self._version = 0

    def is_about(self, item: WatchItem) -> bool:
        """True for an item of one of these kinds."""
        return item.kind in AROUND_KINDS

    def take(self, item: WatchItem) -> Sequence[wire.Pod]:
        """Remember what the item shows; return the pods for which it may mean something."""
        if isinstance(item, Bookmark):
            return ()
        known = self._objects.setdefault(item.kind.path(), {})
        match item:
            case Listed():
                known.clear()
                known.update({_key(one): one for one in item.objects})
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
        return list(self._pods.values())

    def of(self, pod: wire.Pod) -> Around | None:
        """What is around the pod; None for a pod without a node as long as its volumes are not known.

        A node that is bought meanwhile might stand where its volume is not.
        """
        kinds = (*(STORAGE_KINDS if any(claims_of(pod)) else ()), *(DEVICE_KINDS if pod.spec.resource_claims else ()))
        if not kinds and not group_name(pod.metadata):
            return NOTHING_AROUND
        self._pods[pod.metadata.uid] = pod
        if any(kind.path() not in self._objects for kind in kinds):
            return Around(version=self._version) if pod.spec.node_name else None
        least = self._group_count_min(pod)
        found = around(pod, self._storage(), self._claims(), version=self._version, group_count_min=least)
        self._told[pod.metadata.uid] = max(self._version, pod.version)
        return found

    def gone(self, uid: str) -> int:
        """Forget the pod; return the version under which something was said of it last, zero where nothing was."""
        self._pods.pop(uid, None)
        return self._told.pop(uid, 0)

    def absent_from(self, uids: frozenset[str]) -> list[wire.Pod]:
        """The pods of which something was said under a version of their surroundings, that are not among these."""
        return [pod for uid, pod in self._pods.items() if uid not in uids]

    def _group_count_min(self, pod: wire.Pod) -> int | None:
        key = (pod.metadata.namespace, group_name(pod.metadata))
        for kind in (GROUPS, VOLCANO_GROUPS):
            found = self._objects.get(kind.path(), {}).get(key)
            if isinstance(found, wire_storage.Group):
                return found.spec.min_member
        return None

    def _storage(self) -> Storage:
        claims, volumes, classes = (self._objects.get(kind.path(), {}) for kind in STORAGE_KINDS)
        return Storage(
            claims={key: one for key, one in claims.items() if isinstance(one, wire_storage.Claim)},
            volumes={key[1]: one for key, one in volumes.items() if isinstance(one, wire_storage.PersistentVolume)},
            classes={key[1]: one for key, one in classes.items() if isinstance(one, wire_storage.StorageClass)},
        )

    def _claims(self) -> Claims:
        claims, templates, classes = (self._objects.get(kind.path(), {}) for kind in DEVICE_KINDS)
        return Claims(
            claims={key: one for key, one in claims.items() if isinstance(one, wire_devices.ResourceClaim)},
            templates={
                key: one for key, one in templates.items() if isinstance(one, wire_devices.ResourceClaimTemplate)
            },
            classes=frozenset(name for _, name in classes),
        )


def _key(thing: wire.Object) -> tuple[str, str]:
    return thing.metadata.namespace, thing.metadata.name
