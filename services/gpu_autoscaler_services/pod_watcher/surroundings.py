"""Claims of volumes and devices, volumes, classes and pod groups as last seen, for the pods that they matter to.

What is said of such a pod carries the version up to which its surroundings were seen, so that a change of theirs is
news of the pod: the server counts one version for all of its objects.
"""

from collections.abc import Iterable, Mapping, Sequence
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
from gpu_autoscaler.kube.translate.devices import POD_CLAIM_NAME, Claims, Key, claim_keys

STORAGE_KINDS: tuple[Kind[Any], ...] = (CLAIMS, VOLUMES, CLASSES)
DEVICE_KINDS: tuple[Kind[Any], ...] = (DEVICE_CLAIMS, DEVICE_TEMPLATES, DEVICE_CLASSES)
AROUND_KINDS: tuple[Kind[Any], ...] = (*STORAGE_KINDS, *DEVICE_KINDS, GROUPS, VOLCANO_GROUPS)


class Surroundings:
    """What decides about pods besides themselves, and which pods that is."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[tuple[str, str], wire.Object]] = {}  # by kind, namespace and name
        self._pods: dict[str, wire.Pod] = {}  # by uid: those with a claim or a group
        self._told: dict[str, int] = {}  # versions under which something was said of them
        self._users: dict[Key, dict[str, wire.Pod]] = {}  # by claim of devices and uid: pods that name it
        self._known: Claims | None = None  # None: what is claimed has changed
        self._version = 0

    def is_about(self, item: WatchItem) -> bool:
        """True for an item of one of these kinds."""
        return item.kind in AROUND_KINDS

    def take(self, item: WatchItem) -> Sequence[wire.Pod]:
        """Remember what the item shows; return the pods for which it may mean something."""
        if isinstance(item, Bookmark):
            return ()
        known = self._objects.setdefault(item.kind.path(), {})
        self._known = None
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
        if isinstance(item, Changed | Deleted) and item.kind is DEVICE_CLAIMS:
            named = set(self._users.get(_key(item.object), ()))
            named |= {owner.uid for owner in item.object.metadata.owner_references}
            return [pod for uid, pod in self._pods.items() if uid in named]
        return list(self._pods.values())

    def meet(self, pods: Iterable[wire.Pod]) -> None:
        """Remember who names which claims of devices: the first of those that share one asks for all."""
        for pod in pods:
            for key in claim_keys(pod):
                self._users.setdefault(key, {})[pod.metadata.uid] = pod
                self._known = None
                self._version = max(self._version, pod.version)

    def sharing(self, pod: wire.Pod) -> list[wire.Pod]:
        """The other pods that name a claim of this one's: that it came, ended or went may mean something for them."""
        self._version = max(self._version, pod.version)
        found = {uid: one for key in claim_keys(pod) for uid, one in self._users.get(key, {}).items()}
        found.pop(pod.metadata.uid, None)
        return list(found.values())

    def of(self, pod: wire.Pod) -> Around | None:
        """What is around the pod; None for a pod without a node as long as its volumes are not known.

        A node that is bought meanwhile might stand where its volume is not.
        """
        kinds = (*(STORAGE_KINDS if any(claims_of(pod)) else ()), *(DEVICE_KINDS if pod.spec.resource_claims else ()))
        if not kinds and not group_name(pod.metadata):
            return NOTHING_AROUND
        self._pods[pod.metadata.uid] = pod
        self.meet((pod,))
        if any(kind.path() not in self._objects for kind in kinds):
            return Around(version=self._version) if pod.spec.node_name else None
        least = self._group_count_min(pod)
        found = around(pod, self._storage(), self._claims(), version=self._version, group_count_min=least)
        self._told[pod.metadata.uid] = max(self._version, pod.version)
        return found

    def gone(self, uid: str) -> int:
        """Forget the pod; return the version under which something was said of it last, zero where nothing was."""
        pod = self._pods.pop(uid, None)
        for key in () if pod is None else claim_keys(pod):
            self._users.get(key, {}).pop(uid, None)
            self._known = None
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
        """What is claimed, put together anew only where something of it has changed."""
        if self._known is None:
            claims, templates, classes = (self._objects.get(kind.path(), {}) for kind in DEVICE_KINDS)
            all_claims = {key: one for key, one in claims.items() if isinstance(one, wire_devices.ResourceClaim)}
            self._known = Claims(
                claims=all_claims,
                templates={
                    key: one for key, one in templates.items() if isinstance(one, wire_devices.ResourceClaimTemplate)
                },
                classes={key[1]: one for key, one in classes.items() if isinstance(one, wire_devices.DeviceClass)},
                made={
                    (owner.uid, called): one
                    for one in all_claims.values()
                    if (called := one.metadata.annotations.get(POD_CLAIM_NAME)) is not None
                    for owner in one.metadata.owner_references
                },
                first_users={
                    key: min(alive, key=_age) for key, users in self._users.items() if (alive := _alive(users))
                },
            )
        return self._known


def _alive(users: Mapping[str, wire.Pod]) -> list[wire.Pod]:
    return [pod for pod in users.values() if pod.status.phase not in ("Succeeded", "Failed")]


def _age(pod: wire.Pod) -> tuple[str, str]:
    return str(pod.metadata.creation_timestamp), pod.metadata.uid


def _key(thing: wire.Object) -> tuple[str, str]:
    return thing.metadata.namespace, thing.metadata.name
