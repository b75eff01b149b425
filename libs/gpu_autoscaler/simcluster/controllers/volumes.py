"""PersistentVolumeClaims: bound immediately in some zone, or with their first pod; and their effect on scheduling.

One zone per volume, as cloud disks. Source: Kubernetes documentation, "Storage Classes", volume binding mode; wording
of the refusals: kube-scheduler's volumebinding plugin (read 2026-11-21).
"""

from collections.abc import Iterator
from datetime import datetime

from gpu_autoscaler.model import labels
from gpu_autoscaler.simcluster.api import Api
from gpu_autoscaler.simcluster.kinds import CLAIMS, CLASSES, NODES, PODS, VOLUMES
from gpu_autoscaler.simcluster.objects import Json, labels_of
from gpu_autoscaler.simcluster.store import Change

STORAGE_TABLES = frozenset({CLAIMS.table, VOLUMES.table, CLASSES.table})


class Volumes:
    """Creates a volume for each claim that may have one, and binds the claim to it."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._pods: dict[str, None] = {}  # bound to a node
        self._claims: dict[str, None] = {}  # new or changed

    def on_change(self, change: Change) -> None:
        key, item = change.record.key, change.record.object
        if change.type == "DELETED":
            return
        if change.table == CLAIMS.table:
            self._claims[key] = None
        elif change.table == PODS.table and item["spec"].get("nodeName") and any(claims_of(item)):
            self._pods[key] = None

    def step(self, _now: datetime) -> None:
        claims, self._claims = self._claims, {}
        for key in claims:
            claim = self._api.find(CLAIMS, key)
            if claim is not None and _mode(self._api, claim) == "Immediate":
                self._bind(key, _first_zone(self._api, claim))
        pods, self._pods = self._pods, {}
        for key in pods:
            pod = self._api.find(PODS, key)
            node = None if pod is None else self._api.find(NODES, pod["spec"]["nodeName"])
            for claim_key in claims_of(pod) if pod is not None and node is not None else ():
                self._bind(claim_key, labels_of(node or {}).get(labels.ZONE, ""))

    def _bind(self, key: str, zone: str) -> None:
        claim = self._api.find(CLAIMS, key)
        if claim is None or claim["spec"].get("volumeName") or not zone:
            return
        name = f"pvc-{claim['metadata']['uid']}"
        here = {"matchExpressions": [{"key": labels.ZONE, "operator": "In", "values": [zone]}]}
        spec = {
            "storageClassName": claim["spec"].get("storageClassName") or "",
            "nodeAffinity": {"required": {"nodeSelectorTerms": [here]}},
        }
        if self._api.find(VOLUMES, name) is None:
            self._api.create(VOLUMES, None, {"metadata": {"name": name}, "spec": spec, "status": {"phase": "Bound"}})

        def bind(new: Json) -> None:
            new["spec"]["volumeName"] = name
            new["status"] = {**(new.get("status") or {}), "phase": "Bound"}

        self._api.modify(CLAIMS, key, bind)


def claims_of(pod: Json) -> Iterator[str]:
    """Yield the keys of the claims of the pod's volumes."""
    metadata = pod["metadata"]
    for volume in pod["spec"].get("volumes") or ():
        if source := volume.get("persistentVolumeClaim"):
            yield f"{metadata['namespace']}/{source['claimName']}"
        elif volume.get("ephemeral"):
            yield f"{metadata['namespace']}/{metadata['name']}-{volume['name']}"


def reach(api: Api, pod: Json) -> tuple[tuple[Json, ...], str]:
    """Return required node labels, where the pod's volumes are or may be created, and why no node is possible for now;
    empty: some are."""
    conditions: list[Json] = []
    for key in claims_of(pod):
        claim = api.find(CLAIMS, key)
        if claim is None:
            return (), f'persistentvolumeclaim "{key.partition("/")[2]}" not found'
        volume_name = claim["spec"].get("volumeName")
        if not volume_name:
            if _mode(api, claim) != "WaitForFirstConsumer":
                return (), "pod has unbound immediate PersistentVolumeClaims"
            allowed = _allowed_topologies(api, claim)
            conditions += [{"key": term["key"], "operator": "In", "values": term["values"]} for term in allowed]
            continue
        volume = api.find(VOLUMES, volume_name)
        if volume is None:
            return (), f'persistentvolume "{volume_name}" not found'
        required = ((volume["spec"].get("nodeAffinity") or {}).get("required") or {}).get("nodeSelectorTerms") or ()
        for term in required:
            conditions += term.get("matchExpressions") or ()
    return tuple(conditions), ""


def _class_of(api: Api, claim: Json) -> Json | None:
    return api.find(CLASSES, claim["spec"].get("storageClassName") or "")


def _allowed_topologies(api: Api, claim: Json) -> list[Json]:
    terms = (_class_of(api, claim) or {}).get("allowedTopologies") or ()
    return [expression for term in terms for expression in term.get("matchLabelExpressions") or ()]


def _mode(api: Api, claim: Json) -> str:
    """Return the claim's binding mode; empty: nobody provisions it."""
    storage_class = _class_of(api, claim)
    return "" if storage_class is None else storage_class.get("volumeBindingMode") or "Immediate"


def _first_zone(api: Api, claim: Json) -> str:
    """Return the zone of a volume without a pod: the first that its class allows, else of any node."""
    for term in _allowed_topologies(api, claim):
        return str(term["values"][0])
    zones = (labels_of(node).get(labels.ZONE, "") for node in api.objects(NODES))
    return min(filter(None, zones), default="")
