"""Device claims: created from templates for each pod, allocated on the pod's node, released when unused.

Without constraints between devices, partitionable devices, shared capacity and priorities of taints. Source:
Kubernetes, "Dynamic Resource Allocation"; `pkg/controller/resourceclaim` and `plugins/dynamicresources` of 1.36 (read
2026-11-22).
"""

from collections.abc import Iterator
from datetime import datetime

from gpu_autoscaler.model import cel
from gpu_autoscaler.model.cel_values import Device, Value, amount, version
from gpu_autoscaler.simcluster.api import Api
from gpu_autoscaler.simcluster.kinds import DEVICE_CLAIMS, DEVICE_CLASSES, DEVICE_SLICES, DEVICE_TEMPLATES, PODS
from gpu_autoscaler.simcluster.objects import Json, is_finished, key_of
from gpu_autoscaler.simcluster.store import Change

DEVICE_TABLES = frozenset({DEVICE_CLAIMS.table, DEVICE_SLICES.table, DEVICE_CLASSES.table})
_OWN_NAME = "resource.kubernetes.io/pod-claim-name"
_Place = tuple[str, str, str]  # driver, pool, device


class DeviceClaims:
    """Creates the claims of templates, and releases those of finished pods."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._pods: dict[str, None] = {}  # pods that may need claims
        self._over: dict[str, Json] = {}  # finished pods with claims, by uid

    def on_change(self, change: Change) -> None:
        if change.table == DEVICE_TEMPLATES.table and change.type != "DELETED":
            self._pods.update((key_of(pod), None) for pod in self._api.objects(PODS) if _claims_in(pod))
        elif change.table == PODS.table and _claims_in(change.record.object):
            pod = change.record.object
            if change.type == "DELETED" or is_finished(pod):
                self._over[pod["metadata"]["uid"]] = pod
            elif change.type == "ADDED":
                self._pods[change.record.key] = None

    def step(self, _now: datetime) -> None:
        pods, self._pods = self._pods, {}
        for key in pods:
            pod = self._api.find(PODS, key)
            if pod is not None:
                self._make(key, pod)
        over, self._over = self._over, {}
        for uid, pod in over.items():
            self._release(uid, pod)

    def _make(self, key: str, pod: Json) -> None:
        metadata, statuses = pod["metadata"], []
        known = created_claims(pod)
        for named in _claims_in(pod):
            name = named.get("resourceClaimTemplateName")
            template = self._api.find(DEVICE_TEMPLATES, f"{metadata['namespace']}/{name}") if name else None
            if template is None or named["name"] in known:
                continue
            claim = {
                "metadata": {
                    "generateName": f"{metadata['name']}-{named['name']}-",
                    "annotations": {_OWN_NAME: named["name"]},
                    "ownerReferences": [PODS.controller_reference(pod)],
                },
                "spec": template["spec"]["spec"],
            }
            record = self._api.create(DEVICE_CLAIMS, metadata["namespace"], claim)
            statuses.append({"name": named["name"], "resourceClaimName": record.object["metadata"]["name"]})
        if statuses:
            self._api.modify(
                PODS,
                key,
                lambda new: new["status"].update(
                    resourceClaimStatuses=[*(new["status"].get("resourceClaimStatuses") or ()), *statuses]
                ),
            )

    def _release(self, uid: str, pod: Json) -> None:
        for claim_key in _keys(pod).values():
            claim = self._api.find(DEVICE_CLAIMS, claim_key or "")
            if claim is None:
                continue
            left = [user for user in (claim.get("status") or {}).get("reservedFor") or () if user["uid"] != uid]
            if any(owner["uid"] == uid for owner in claim["metadata"].get("ownerReferences") or ()):
                self._api.delete(DEVICE_CLAIMS, claim_key or "")
            else:
                allocation = claim["status"].get("allocation") if left and claim.get("status") else None
                status = {"allocation": allocation, "reservedFor": left} if allocation else {}

                def write(new: Json, status: Json = status) -> None:
                    new["status"] = status

                self._api.modify(DEVICE_CLAIMS, claim_key or "", write)


# ---- for the scheduler


def device_reach(api: Api, pod: Json) -> tuple[frozenset[str] | None, str]:
    """Return the nodes on which the pod's claims can be allocated (None: it has none), and why no node is possible for
    now; empty: some are."""
    if not _claims_in(pod):
        return None, ""
    for named, key in _keys(pod).items():
        if key is None:
            return frozenset(), f"waiting for the ResourceClaim of {named}"
        if api.find(DEVICE_CLAIMS, key) is None:
            return frozenset(), f'resourceclaim "{key.partition("/")[2]}" not found'
    names = {resource_slice["spec"].get("nodeName", "") for resource_slice in api.objects(DEVICE_SLICES)}
    return frozenset(name for name in names if _picks(api, pod, name) is not None), ""


def created_claims(pod: Json) -> dict[str, str]:
    """Return the claims created for the pod, by the names that it has for them."""
    statuses = pod["status"].get("resourceClaimStatuses") or ()
    return {status["name"]: status.get("resourceClaimName", "") for status in statuses}


def allocate(api: Api, pod: Json, node_name: str) -> bool:
    """Allocate and reserve the pod's claims on the node; False if that is no longer possible."""
    picks = _picks(api, pod, node_name)
    if picks is None:
        return False
    user = {"resource": "pods", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
    here = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node_name]}]}
    for key, results in picks.items():

        def write(claim: Json, results: list[Json] = results) -> None:
            status = claim.get("status") or {}
            users = status.get("reservedFor") or []
            allocation = status.get("allocation") or {
                "devices": {"results": results},
                "nodeSelector": {"nodeSelectorTerms": [here]},
            }
            claim["status"] = {"allocation": allocation, "reservedFor": [*users, user]}

        api.modify(DEVICE_CLAIMS, key, write)
    return True


def _claims_in(pod: Json) -> list[Json]:
    return pod["spec"].get("resourceClaims") or []


def _keys(pod: Json) -> dict[str, str | None]:
    """Return the claim of each of the pod's names; None: not created yet."""
    created = created_claims(pod)
    names = {claim["name"]: claim.get("resourceClaimName") or created.get(claim["name"]) for claim in _claims_in(pod)}
    return {own: f"{pod['metadata']['namespace']}/{name}" if name else None for own, name in names.items()}


def _picks(api: Api, pod: Json, node_name: str) -> dict[str, list[Json]] | None:
    """Return each claim's devices on the node (none if it has some already); None: impossible."""
    taken, picks = set(_taken(api)), dict[str, list[Json]]()
    devices = list(_devices_on(api, node_name))
    for key in _keys(pod).values():
        claim = api.find(DEVICE_CLAIMS, key or "")
        if claim is None or key is None:
            return None
        allocation = (claim.get("status") or {}).get("allocation")
        if allocation is not None:
            terms = allocation["nodeSelector"]["nodeSelectorTerms"]
            if node_name not in terms[0]["matchFields"][0]["values"]:
                return None
            picks[key] = []
            continue
        results = _of_claim(api, claim, devices, taken)
        if results is None:
            return None
        picks[key] = results
    return picks


def _of_claim(api: Api, claim: Json, devices: list[tuple[_Place, Device]], taken: set[_Place]) -> list[Json] | None:
    devices_spec = claim["spec"].get("devices") or {}
    if devices_spec.get("constraints"):
        return None
    results: list[Json] = []
    for request in devices_spec.get("requests") or ():
        name = request["name"]
        exact = [(name, request["exactly"])] if "exactly" in request else []
        options = exact or [(f"{name}/{option['name']}", option) for option in request.get("firstAvailable") or ()]
        attempts = ((name_in_claim, _devices_for(api, spec, devices, taken)) for name_in_claim, spec in options)
        name_in_claim, places = next((attempt for attempt in attempts if attempt[1] is not None), ("", None))
        if places is None:
            return None
        taken.update(places)
        results += [
            {"request": name_in_claim, "driver": place[0], "pool": place[1], "device": place[2]} for place in places
        ]
    return results


def _devices_for(
    api: Api, option: Json, devices: list[tuple[_Place, Device]], taken: set[_Place]
) -> list[_Place] | None:
    device_class = api.find(DEVICE_CLASSES, option["deviceClassName"])
    if device_class is None:
        return None
    selectors = [*(device_class["spec"].get("selectors") or ()), *(option.get("selectors") or ())]
    conditions = [cel.condition(selector["cel"]["expression"]) for selector in selectors]
    right = [place for place, device in devices if all(condition.judge(device) is True for condition in conditions)]
    free = [place for place in right if place not in taken]
    if option.get("allocationMode") == "All":
        return right if right and free == right else None
    count = option.get("count", 1)
    return free[:count] if len(free) >= count else None


def _taken(api: Api) -> Iterator[_Place]:
    for claim in api.objects(DEVICE_CLAIMS):
        allocation = (claim.get("status") or {}).get("allocation") or {}
        for result in (allocation.get("devices") or {}).get("results") or ():
            yield result["driver"], result["pool"], result["device"]


def _devices_on(api: Api, node_name: str) -> Iterator[tuple[_Place, Device]]:
    """Yield the devices of the newest slices of each pool, in order."""
    slices = [device["spec"] for device in api.objects(DEVICE_SLICES) if device["spec"].get("nodeName") == node_name]
    newest: dict[tuple[str, str], int] = {}
    for spec in slices:
        pool = (spec["driver"], spec["pool"]["name"])
        newest[pool] = max(newest.get(pool, 0), spec["pool"].get("generation", 0))
    for spec in slices:
        driver, pool_name = spec["driver"], spec["pool"]["name"]
        if spec["pool"].get("generation", 0) == newest[driver, pool_name]:
            for device in spec.get("devices") or ():
                yield (driver, pool_name, device["name"]), _described(device, driver)


def _described(device: Json, driver: str) -> Device:
    attributes: dict[str, dict[str, Value]] = {}
    for name, value_spec in (device.get("attributes") or {}).items():
        domain, _, own = name.rpartition("/")
        value = version(value_spec["version"]) if "version" in value_spec else next(iter(value_spec.values()), None)
        attributes.setdefault(domain or driver, {})[own] = value
    capacity: dict[str, dict[str, Value]] = {}
    for name, value_spec in (device.get("capacity") or {}).items():
        domain, _, own = name.rpartition("/")
        capacity.setdefault(domain or driver, {})[own] = amount(value_spec["value"])
    return Device(driver=driver, attributes=attributes, capacity=capacity, is_all=True)
