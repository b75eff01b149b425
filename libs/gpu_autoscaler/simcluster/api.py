"""The API server's treatment of objects: defaults, validation, versions, finalizers, graceful deletion. No HTTP.

Controllers use `modify`, which cannot conflict: everything runs on one event loop, and nothing here waits.
"""

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from gpu_autoscaler.simcluster import answers, defaults, patch, validation
from gpu_autoscaler.simcluster.kinds import BUDGETS, JOBS, NAMESPACES, NODES, PODS, PRIORITY_CLASSES, Kind, Registry
from gpu_autoscaler.simcluster.objects import (
    Json,
    clone,
    is_finished,
    is_terminating,
    key_of,
    moment_of,
    stamp,
    without_nulls,
)
from gpu_autoscaler.simcluster.shapes import require_types
from gpu_autoscaler.simcluster.store import Record, Store

ORPHAN = "orphan"
FOREGROUND = "foregroundDeletion"
_SUFFIX_LETTERS = "bcdfghjklmnpqrstvwxz2456789"  # without vowels, as the real generator
_WITH_SPEC = (PODS, JOBS, NODES, BUDGETS, NAMESPACES)
_CLIENT_METADATA = ("name", "generateName", "namespace", "labels", "annotations", "ownerReferences", "finalizers")
_SERVER_METADATA = ("name", "namespace", "uid", "creationTimestamp", "deletionTimestamp", "generation", "generateName")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteOptions:
    """The supported parts of `metav1.DeleteOptions`."""

    grace_seconds: int | None = None
    uid: str | None = None
    version: str | None = None
    propagation: str | None = None  # Background, Foreground or Orphan


class Api:
    """The objects of one cluster and the rules by which they change."""

    def __init__(
        self, store: Store, registry: Registry, now: Callable[[], datetime], *, seed: int | None = None
    ) -> None:
        self.store = store
        self.registry = registry
        self.now = now
        self._random = random.Random(seed)  # noqa: S311 - names and uids that repeat with the seed, no secrets
        store.table(PODS.table).add_index("node", lambda pod: filter(None, [pod["spec"].get("nodeName")]))

    def find(self, kind: Kind, key: str) -> Json | None:
        record = self.store.table(kind.table).records.get(key)
        return record.object if record else None

    def record(self, kind: Kind, key: str) -> Record:
        """Return the stored record. Raises ApiRefusal 404."""
        record = self.store.table(kind.table).records.get(key)
        if record is None:
            raise answers.not_found(kind, key.rpartition("/")[2])
        return record

    def objects(self, kind: Kind, namespace: str | None = None) -> list[Json]:
        """Return all objects of a kind, in key order. Read-only."""
        table = self.store.table(kind.table)
        return [table.records[key].object for key in table.keys(namespace)]

    def pods_on(self, node_name: str) -> list[Json]:
        """Return the pods bound to a node, including finished ones."""
        return [record.object for record in self.store.table(PODS.table).indexed("node", node_name)]

    def owned_by(self, kind: Kind, uid: str) -> list[Json]:
        """Return the objects that name this uid as an owner."""
        return [record.object for record in self.store.table(kind.table).indexed("owner", uid)]

    def create(self, kind: Kind, namespace: str | None, body: object) -> Record:
        """Store a new object. Raises ApiRefusal 400, 403, 404 (namespace), 409, 422."""
        item = self._readable(kind, namespace, body)
        metadata = {key: item["metadata"][key] for key in _CLIENT_METADATA if item["metadata"].get(key)}
        if not metadata.get("name"):
            if not metadata.get("generateName"):
                required = "Required value: name or generateName is required"
                raise answers.invalid(kind, "", [("metadata.name", "FieldValueRequired", required)])
            metadata["name"] = metadata["generateName"] + "".join(self._random.choices(_SUFFIX_LETTERS, k=5))
        if namespace:
            metadata["namespace"] = namespace
            self._require_live_namespace(kind, namespace, metadata["name"])
        now = self.now()
        metadata["uid"] = str(uuid.UUID(int=self._random.getrandbits(128), version=4))
        metadata["creationTimestamp"] = stamp(now)
        if kind.has_generation:
            metadata["generation"] = 1
        item["metadata"] = metadata
        if kind.custom and kind.has_status:
            item.pop("status", None)
        defaults.fill_in(kind, item, now)
        validation.require_valid_new(kind, item)
        key = key_of(item)
        if key in self.store.table(kind.table).records:
            raise answers.already_exists(kind, metadata["name"])
        if kind is PODS:
            self._admit_priority(item)
        return self.store.put(kind.table, key, item)

    def replace(self, kind: Kind, key: str, body: object, *, status: bool = False) -> Record:
        """Store the object of a PUT. Raises ApiRefusal 400, 404, 409, 422."""
        record = self.record(kind, key)
        name = key.rpartition("/")[2]
        new = self._readable(kind, key.rpartition("/")[0] or None, body)
        if new["metadata"].get("name") != name:
            given = new["metadata"].get("name", "")
            raise answers.bad_request(f"the name of the object ({given}) does not match the name on the URL ({name})")
        if not new["metadata"].get("resourceVersion") and not kind.unconditional_update:
            rule = "Invalid value: 0: must be specified for an update"
            raise answers.invalid(kind, name, [("metadata.resourceVersion", "FieldValueInvalid", rule)])
        return self._update(kind, record, new, status=status)

    def patch(self, kind: Kind, key: str, body: object, media_type: str, *, status: bool = False) -> Record:
        """Store the object under a patch. Raises ApiRefusal 400, 404, 409, 415, 422."""
        formats = {patch.MERGE: patch.merge, patch.JSON_PATCH: patch.json_patch}
        if not kind.custom:
            formats[patch.STRATEGIC] = patch.strategic_merge
        if media_type not in formats:
            raise answers.unsupported_media_type()
        record = self.record(kind, key)
        new = formats[media_type](record.object, body)
        if not isinstance(new, dict) or not isinstance(new.get("metadata"), dict):
            raise answers.bad_request("the patch does not leave an object with metadata")
        new.pop("apiVersion", None)
        new.pop("kind", None)
        uid, given = record.object["metadata"]["uid"], new["metadata"].get("uid")
        if given != uid:  # a patch would change the field, a PUT states a precondition
            rule = f'Invalid value: "{given}": field is immutable'
            raise answers.invalid(
                kind, record.object["metadata"]["name"], [("metadata.uid", "FieldValueInvalid", rule)]
            )
        return self._update(kind, record, _typed(kind, new), status=status)

    def modify(self, kind: Kind, key: str, change: Callable[[Json], None]) -> Record | None:
        """Let `change` edit a copy and store it; None where the object is gone. For controllers: no validation."""
        record = self.store.table(kind.table).records.get(key)
        if record is None:
            return None
        new = clone(record.object)
        change(new)
        return self._commit(kind, record, new)

    def delete(self, kind: Kind, key: str, options: DeleteOptions | None = None) -> tuple[Record, bool]:
        """Begin or finish the deletion; return the last record and whether it is gone. Raises ApiRefusal 404, 409."""
        options = options or DeleteOptions()
        record = self.record(kind, key)
        name = record.object["metadata"]["name"]
        if options.uid and options.uid != record.object["metadata"]["uid"]:
            raise answers.other_uid(kind, name, options.uid, record.object["metadata"]["uid"])
        if options.version and options.version != str(record.version):
            raise answers.conflict(kind, name)
        new = clone(record.object)
        propagation = options.propagation or (ORPHAN if kind.orphans_by_default else "Background")
        finalizer = {"orphan": ORPHAN, "foreground": FOREGROUND}.get(propagation.lower())
        if finalizer and finalizer not in new["metadata"].setdefault("finalizers", []):
            new["metadata"]["finalizers"].append(finalizer)
        grace = _grace_seconds(kind, new, options.grace_seconds)
        _begin_deletion(kind, new, grace, self.now())
        if kind is PODS and not grace and new != record.object:
            record = self.store.put(kind.table, key, new)  # published as a change first: pods are deleted in two steps
            new = clone(new)
        last = self._commit(kind, record, new)
        return last, key not in self.store.table(kind.table).records

    def finish_deletion(self, kind: Kind, key: str) -> None:
        """Remove a terminating object once nothing runs any more, unless finalizers hold it."""
        if key in self.store.table(kind.table).records:
            self.delete(kind, key, DeleteOptions(grace_seconds=0, propagation="Background"))

    def _readable(self, kind: Kind, namespace: str | None, body: object) -> Json:
        """Return a copy of the body without apiVersion and kind. Raises ApiRefusal 400."""
        if not isinstance(body, dict):
            raise answers.bad_request(
                f"couldn't get version/kind; json: cannot unmarshal into Go value: {type(body).__name__}"
            )
        item: Json = dict(body)
        given = item.pop("apiVersion", kind.api_version), item.pop("kind", kind.kind)
        if given != (kind.api_version, kind.kind):
            raise answers.bad_request(
                f"the API version or kind in the data ({given[0]}, {given[1]}) does not match the expected "
                f"({kind.api_version}, {kind.kind})"
            )
        item.setdefault("metadata", {})
        item = _typed(kind, item)
        if namespace and item["metadata"].get("namespace", namespace) != namespace:
            raise answers.bad_request(
                "the namespace of the provided object does not match the namespace sent on the request"
            )
        return item

    def _require_live_namespace(self, kind: Kind, namespace: str, name: str) -> None:
        existing = self.find(NAMESPACES, namespace)
        if existing is None:
            raise answers.not_found(NAMESPACES, namespace)
        if is_terminating(existing):
            why = f"unable to create new content in namespace {namespace} because it is being terminated"
            raise answers.forbidden(kind, name, why)

    def _admit_priority(self, pod: Json) -> None:
        """Write the priority that the pod's class stands for (admission plugin Priority)."""
        wanted = pod["spec"].get("priorityClassName")
        classes = self.objects(PRIORITY_CLASSES)
        chosen = [
            item for item in classes if (item["metadata"]["name"] == wanted if wanted else item.get("globalDefault"))
        ]
        if wanted and not chosen:
            why = f"no PriorityClass with name {wanted} was found"
            raise answers.forbidden(PODS, pod["metadata"]["name"], why)
        pod["spec"]["priority"] = int(chosen[0].get("value", 0)) if chosen else 0
        if chosen:
            pod["spec"]["priorityClassName"] = chosen[0]["metadata"]["name"]

    def _update(self, kind: Kind, record: Record, new: Json, *, status: bool) -> Record:
        old, metadata = record.object, new["metadata"]
        name = old["metadata"]["name"]
        if metadata.get("resourceVersion") not in (None, "", old["metadata"]["resourceVersion"]):
            raise answers.conflict(kind, name)
        uid = old["metadata"]["uid"]
        if metadata.get("uid", uid) != uid:
            why = f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object meta: {uid}"
            raise answers.conflict(kind, name, why)
        if status:
            new = {**clone(old), "status": new.get("status") or {}}
            validation.require_valid_status(kind, new)
        else:
            for field in (*_SERVER_METADATA, "deletionGracePeriodSeconds", "resourceVersion"):
                metadata.pop(field, None)
                if field in old["metadata"]:
                    metadata[field] = old["metadata"][field]
            if kind.has_status and "status" in old:
                new["status"] = clone(old["status"])
            if kind is PODS:
                defaults.pod_template(new["spec"])
            elif kind is JOBS:
                defaults.pod_template(new["spec"]["template"]["spec"])
            validation.require_valid_update(kind, old, new)
            if kind.has_generation and new.get("spec") != old.get("spec"):
                metadata["generation"] = metadata.get("generation", 1) + 1
        return self._commit(kind, record, new)

    def _commit(self, kind: Kind, record: Record, new: Json) -> Record:
        """Store `new` if it differs; remove the object if its deletion waits for nothing."""
        old, metadata = record.object, new["metadata"]
        for field in ("labels", "annotations", "finalizers", "ownerReferences", "managedFields"):
            if field in metadata and (not metadata[field] or field == "managedFields"):
                del metadata[field]
        if is_terminating(new) and not metadata.get("deletionGracePeriodSeconds") and not _held(kind, new):
            return self.store.remove(kind.table, record.key)
        if new == old:
            return record
        return self.store.put(kind.table, record.key, new)


def _begin_deletion(kind: Kind, new: Json, grace_seconds: int, now: datetime) -> None:
    """Write the deletion; a later call can only shorten the grace period."""
    metadata = new["metadata"]
    old_seconds = metadata.get("deletionGracePeriodSeconds", 0)
    if is_terminating(new):
        if grace_seconds < old_seconds:
            sooner = timedelta(seconds=old_seconds - grace_seconds)
            metadata["deletionTimestamp"] = stamp(moment_of(metadata["deletionTimestamp"]) - sooner)
            metadata["deletionGracePeriodSeconds"] = grace_seconds
        return
    metadata["deletionTimestamp"] = stamp(now + timedelta(seconds=grace_seconds))
    metadata["deletionGracePeriodSeconds"] = grace_seconds
    if kind is NAMESPACES:
        new["status"]["phase"] = "Terminating"
    if "generation" in metadata:
        metadata["generation"] += 1


def _typed(kind: Kind, item: Json) -> Json:
    """Return a copy whose fields have the types they must have, with a spec where the kind has one. Raises 400."""
    # A null field is an omitted field; but a pod's status shows some, and keeps them.
    typed: Json = {key: clone(value) if key == "status" else without_nulls(value) for key, value in item.items()}
    typed = {key: value for key, value in typed.items() if value is not None}
    require_types(kind, typed)
    if kind in _WITH_SPEC:
        typed.setdefault("spec", {})
    if kind is JOBS:
        typed["spec"].setdefault("template", {}).setdefault("spec", {})
    return typed


def _held(kind: Kind, item: Json) -> bool:
    """Return whether finalizers keep a terminating object."""
    own = kind is NAMESPACES and item.get("spec", {}).get("finalizers")
    return bool(item["metadata"].get("finalizers") or own)


def _grace_seconds(kind: Kind, item: Json, wanted: int | None) -> int:
    """Return the grace period: only a pod that runs on a node has one."""
    if kind is not PODS or not item["spec"].get("nodeName") or is_finished(item):
        return 0
    return int(item["spec"]["terminationGracePeriodSeconds"]) if wanted is None else max(0, wanted)
