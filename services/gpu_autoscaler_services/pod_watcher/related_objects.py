"""Volume and device claims, volumes, classes and pod groups that affect pods, and pods of ProvisioningRequests.

Facts of such a pod carry the version up to which its related objects were seen: a change of them is a new version.
Pods are indexed by the objects that were read for them, so that an event looks only at the pods that it may change.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import msgspec

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
    Kind,
    Listed,
    WatchItem,
)
from gpu_autoscaler.kube.translate.common import group_name
from gpu_autoscaler.kube.translate.devices import POD_CLAIM_NAME, Claims, Key, claim_keys
from gpu_autoscaler.kube.translate.related_objects import (
    NO_RELATED_OBJECTS,
    RelatedObjects,
    Storage,
    claims_of,
    has_claims,
    related_objects,
)
from gpu_autoscaler.kube.wire import core, devices, storage

STORAGE_KINDS: tuple[Kind[Any], ...] = (CLAIMS, VOLUMES, CLASSES)
DEVICE_KINDS: tuple[Kind[Any], ...] = (DEVICE_CLAIMS, DEVICE_TEMPLATES, DEVICE_CLASSES)
GROUP_KINDS: tuple[Kind[Any], ...] = (GROUPS, VOLCANO_GROUPS)
RELATED_KINDS: tuple[Kind[Any], ...] = (*STORAGE_KINDS, *DEVICE_KINDS, *GROUP_KINDS)

# What a pod depends on: the plural of a kind, which both kinds of pod groups share, and the name of an object, with its
# namespace if it has any.
_Dependency = tuple[str, Key | str]
_CLUSTER_SCOPED = frozenset(kind.plural for kind in (VOLUMES, CLASSES, DEVICE_CLASSES))
_AVAILABLE = "available volumes"  # of a class: a kind of dependency
_DEFAULT_CLASS: _Dependency = (CLASSES.plural, "")  # whichever class is the default


class RelatedObjectsCache:
    """The objects that affect pods, and the affected pods."""

    def __init__(self) -> None:
        self._storage = Storage()
        self._devices = Claims()
        self._groups: dict[str, dict[Key, storage.Group]] = {kind.path(): {} for kind in GROUP_KINDS}
        self._objects: Mapping[str, dict[Any, Any]] = {  # by kind; volumes and classes by name alone
            CLAIMS.path(): self._storage.claims,
            VOLUMES.path(): self._storage.volumes,
            CLASSES.path(): self._storage.classes,
            DEVICE_CLAIMS.path(): self._devices.claims,
            DEVICE_TEMPLATES.path(): self._devices.templates,
            DEVICE_CLASSES.path(): self._devices.classes,
            **self._groups,
        }
        self._listed: set[str] = set()  # kinds that were observed
        self._pods: dict[str, core.Pod] = {}  # by uid: pods with a claim or a group
        self._to_come: dict[str, Sequence[core.Pod]] = {}  # by uid of a request: its pods, if any has a claim
        self._order: dict[str, int] = {}  # pod uid -> position among them: facts keep it
        self._positions = count()
        self._published: dict[str, int] = {}  # pod uid -> version of its last fact
        # Tuples and dicts of strings, not sets: the garbage collector would visit each of 70,000 sets.
        self._dependencies: dict[str, tuple[_Dependency, ...]] = {}  # by pod uid
        self._dependents: dict[_Dependency, dict[str, None]] = {}  # pod uids
        self._users: dict[Key, dict[str, core.Pod]] = {}  # by device claim and pod uid
        self._reassigned: set[Key] = set()  # shared device claims whose first user changed
        self._version = 0

    def is_about(self, item: WatchItem) -> bool:
        """Return True for an item of these kinds."""
        return item.kind in RELATED_KINDS

    def take(self, item: WatchItem) -> tuple[Sequence[core.Pod], Sequence[str]]:
        """Apply the item; return the pods, those known longest first, and the uids of requests that it may change."""
        if isinstance(item, Bookmark):
            return (), ()
        kind, known = item.kind, self._objects[item.kind.path()]
        is_first = kind.path() not in self._listed
        self._listed.add(kind.path())
        if isinstance(item, Listed):
            objects: dict[Any, core.Object | None] = dict.fromkeys(known)
            objects |= {_key(kind, obj): obj for obj in item.objects}
            self._version = max(self._version, item.version)
        else:
            objects = {_key(kind, item.object): item.object if isinstance(item, Changed) else None}
            self._version = max(self._version, item.object.version)
        # Removals first: an object may have replaced another one of its owner.
        changes = sorted(
            ((key, known.get(key), obj) for key, obj in objects.items()), key=lambda change: change[2] is not None
        )
        uids = self._apply(kind, changes)
        if is_first:
            uids |= {uid for uid, pod in self._pods.items() if kind in _kinds_of(pod)}
            uids |= {uid for uid, pods in self._to_come.items() if any(kind in _kinds_of(pod) for pod in pods)}
        return self._in_order(uids), sorted(self._to_come.keys() & uids)

    def _apply(self, kind: Kind[Any], changes: Iterable[tuple[Any, Any, Any]]) -> set[str]:
        """Replace objects, given as key, old and new; return the uids of the pods that depend on what changed."""
        known, uids, classes = self._objects[kind.path()], set[str](), set[str]()
        for key, old, new in changes:
            if new is None:
                known.pop(key, None)
            else:
                known[key] = new
            if _is_equal(old, new):
                continue
            uids.update(self._dependents.get((kind.plural, key), ()))
            if kind is VOLUMES:
                classes |= {volume.spec.storage_class_name for volume in (old, new) if volume is not None}
            elif kind is CLASSES:
                uids.update(self._dependents.get(_DEFAULT_CLASS, ()))
            elif kind is DEVICE_CLAIMS:
                uids |= self._assign(old, new)
        return uids | self._waiting_for_volumes(classes)

    def _assign(self, old: devices.ResourceClaim | None, new: devices.ResourceClaim | None) -> set[str]:
        """Assign a claim created from a template to its pod; return the uids of its owners."""
        for claim in (old, new):
            name = None if claim is None else claim.metadata.annotations.get(POD_CLAIM_NAME)
            if claim is None or name is None:
                continue
            for owner in claim.metadata.owner_references:
                made = self._devices.made.get((owner.uid, name))
                if claim is new:
                    self._devices.made[owner.uid, name] = claim
                elif made is not None and made.metadata.name == claim.metadata.name:  # maybe an earlier version of it
                    del self._devices.made[owner.uid, name]
        return {owner.uid for claim in (old, new) if claim is not None for owner in claim.metadata.owner_references}

    def _waiting_for_volumes(self, classes: Iterable[str]) -> set[str]:
        """Return the uids of pods without a volume of these classes, where other nodes reach the available ones now."""
        uids = set[str]()
        for name in classes:
            before = self._storage.available.pop(name, "unknown")
            waiting = self._dependents.get((_AVAILABLE, name))
            if waiting and self._storage.reach_available(name) != before:
                uids.update(waiting)
        return uids

    def _in_order(self, uids: Iterable[str]) -> list[core.Pod]:
        return [self._pods[uid] for uid in sorted(self._order.keys() & uids, key=self._order.__getitem__)]

    def meet(self, pod: core.Pod) -> None:
        """Remember the device claims of a listed pod: the first pod of a shared claim requests its devices."""
        self._use(pod)
        self._reassigned.clear()  # all listed pods are observed after the last is met

    def sharing(self, pod: core.Pod) -> list[core.Pod]:
        """Return the other pods of shared device claims that got another first pod by the start or end of this one."""
        self._version = max(self._version, pod.version)
        uids = {uid for key in self._reassigned for uid in self._users.get(key, ())}
        self._reassigned.clear()
        return self._in_order(uids - {pod.metadata.uid})

    def of(self, pod: core.Pod) -> RelatedObjects | None:
        """Return the pod's related objects; None for an unscheduled pod while they are not all listed.

        Before, a node might be bought in another zone than the pod's volume.
        """
        kinds = _kinds_of(pod)
        if not kinds and not group_name(pod.metadata):
            return NO_RELATED_OBJECTS
        uid = pod.metadata.uid
        if uid not in self._order:
            self._order[uid] = next(self._positions)
        self._pods[uid] = pod
        self._use(pod)
        if any(kind.path() not in self._listed for kind in kinds):
            if not pod.spec.node_name:
                return None
            related = RelatedObjects(version=self._version)
        else:
            self._index(uid, tuple(self._dependencies_of(pod)))
            least = self._group_count_min(pod)
            related = related_objects(pod, self._storage, self._devices, version=self._version, group_count_min=least)
        self._published[uid] = max(self._version, pod.version)
        return related

    def of_request(self, uid: str, pods: Sequence[core.Pod]) -> Sequence[RelatedObjects] | None:
        """Return the related objects of each pod of a request, none of which exists; None while they are not all
        listed. As first users of shared device claims such pods do not count."""
        self._to_come.pop(uid, None)
        if any(map(_kinds_of, pods)):
            self._to_come[uid] = pods
        if any(kind.path() not in self._listed for pod in pods for kind in _kinds_of(pod)):
            return None
        self._index(uid, tuple(dict.fromkeys(needed for pod in pods for needed in self._dependencies_of(pod))))
        return [
            related_objects(pod, self._storage, self._devices, version=self._version, group_count_min=None)
            if _kinds_of(pod)
            else NO_RELATED_OBJECTS
            for pod in pods
        ]

    def gone(self, uid: str) -> int:
        """Forget the pod, or the pods of the request; return the version of its last fact, 0 if there is none."""
        self._to_come.pop(uid, None)
        pod = self._pods.pop(uid, None)
        self._order.pop(uid, None)
        self._index(uid, ())
        for key in () if pod is None else claim_keys(pod):
            self._users[key].pop(uid)
            first = self._devices.first_users.get(key)
            if first is not None and first.metadata.uid == uid:
                self._choose_first_user(key)
            if not self._users[key]:
                del self._users[key]
        return self._published.pop(uid, 0)

    def absent_from(self, uids: frozenset[str]) -> list[core.Pod]:
        """Return the pods with facts at a version of their related objects that are not among these."""
        return [pod for uid, pod in self._pods.items() if uid not in uids]

    # ---- device claims that pods share

    def _use(self, pod: core.Pod) -> None:
        """Remember the device claims that the pod names."""
        for key in claim_keys(pod):
            users = self._users.setdefault(key, {})
            if users.get(pod.metadata.uid) is pod:
                continue
            users[pod.metadata.uid] = pod
            first = self._devices.first_users.get(key)
            if first is None or first.metadata.uid == pod.metadata.uid or _age(pod) < _age(first):
                self._choose_first_user(key, pod if _is_alive(pod) else None)
            self._version = max(self._version, pod.version)

    def _choose_first_user(self, key: Key, pod: core.Pod | None = None) -> None:
        """Choose the oldest pod of the claim that has not ended; `pod` if it is known to be that one."""
        before = self._devices.first_users.pop(key, None)
        first = pod or min(filter(_is_alive, self._users.get(key, {}).values()), key=_age, default=None)
        if first is not None:
            self._devices.first_users[key] = first
        if (before and before.metadata.uid) != (first and first.metadata.uid):
            self._reassigned.add(key)

    # ---- index

    def _index(self, uid: str, dependencies: tuple[_Dependency, ...]) -> None:
        """Remember what the pod depends on; empty: nothing."""
        before = self._dependencies.get(uid, ())
        if before == dependencies:
            return
        for dependency in before:
            dependents = self._dependents.get(dependency, {})
            dependents.pop(uid, None)
            if not dependents:
                self._dependents.pop(dependency, None)
        for dependency in dependencies:
            self._dependents.setdefault(dependency, {})[uid] = None
        self._dependencies[uid] = dependencies
        if not dependencies:
            del self._dependencies[uid]

    def _dependencies_of(self, pod: core.Pod) -> Iterator[_Dependency]:
        """Yield all that `related_objects` reads for the pod, objects that do not exist included."""
        namespace = pod.metadata.namespace
        if name := group_name(pod.metadata):
            yield GROUPS.plural, (namespace, name)
        for key, volume_claim in claims_of(pod, self._storage):
            yield CLAIMS.plural, key
            if volume_claim is None:
                continue
            if volume_claim.spec.volume_name:
                yield VOLUMES.plural, volume_claim.spec.volume_name
                continue
            if volume_claim.spec.storage_class_name is None:
                yield _DEFAULT_CLASS
            if class_name := self._storage.class_of(volume_claim):
                yield CLASSES.plural, class_name
                yield _AVAILABLE, class_name
        for named in pod.spec.resource_claims:
            spec: devices.ResourceClaimSpec | None
            if template_name := named.get("resourceClaimTemplateName"):
                yield DEVICE_TEMPLATES.plural, (namespace, template_name)
                claim = self._devices.made.get((pod.metadata.uid, named.get("name", "")))
                template = self._devices.templates.get((namespace, template_name))
                spec = claim.spec if claim is not None else template.spec.spec if template is not None else None
            else:
                yield DEVICE_CLAIMS.plural, (namespace, named.get("resourceClaimName", ""))
                claim = self._devices.claims.get((namespace, named.get("resourceClaimName", "")))
                spec = None if claim is None else claim.spec
            for request in () if spec is None else spec.devices.requests:
                for exact in (request.exactly, *request.first_available):
                    if exact is not None:
                        yield DEVICE_CLASSES.plural, exact.device_class_name

    def _group_count_min(self, pod: core.Pod) -> int | None:
        key = (pod.metadata.namespace, group_name(pod.metadata))
        groups = (self._groups[kind.path()].get(key) for kind in GROUP_KINDS)
        return next((group.spec.min_member for group in groups if group is not None), None)


def _kinds_of(pod: core.Pod) -> tuple[Kind[Any], ...]:
    """Return the kinds that must be listed before the pod can be published."""
    return (*(STORAGE_KINDS if has_claims(pod) else ()), *(DEVICE_KINDS if pod.spec.resource_claims else ()))


def _is_equal(old: core.Object | None, new: core.Object | None) -> bool:
    """Return True if nothing changed that is read: of metadata only annotations and owners are."""
    if old is None or new is None:
        return old is new
    return (
        old.metadata.annotations == new.metadata.annotations
        and old.metadata.owner_references == new.metadata.owner_references
        and msgspec.structs.replace(new, metadata=old.metadata) == old
    )


def _is_alive(pod: core.Pod) -> bool:
    return pod.status.phase not in ("Succeeded", "Failed")


def _age(pod: core.Pod) -> tuple[str, str]:
    return str(pod.metadata.creation_timestamp), pod.metadata.uid


def _key(kind: Kind[Any], obj: core.Object) -> Key | str:
    name = obj.metadata.name
    return name if kind.plural in _CLUSTER_SCOPED else (obj.metadata.namespace, name)
