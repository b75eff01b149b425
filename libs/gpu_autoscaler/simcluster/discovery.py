"""API discovery: /api, /apis, and the resource list of each group and version."""

from gpu_autoscaler.simcluster.kinds import Kind, Registry
from gpu_autoscaler.simcluster.objects import Json

KUBERNETES_MINOR = "36"  # the release whose recorded answers are imitated
_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
_STATUS_VERBS = ["get", "patch", "update"]


def version() -> Json:
    """Return the answer to /version."""
    return {
        "major": "1",
        "minor": KUBERNETES_MINOR,
        "emulationMajor": "1",
        "emulationMinor": KUBERNETES_MINOR,
        "minCompatibilityMajor": "1",
        "minCompatibilityMinor": str(int(KUBERNETES_MINOR) - 1),
        "gitVersion": f"v1.{KUBERNETES_MINOR}.0-simcluster",
        "gitCommit": "",
        "gitTreeState": "",
        "buildDate": "1970-01-01T00:00:00Z",
        "goVersion": "",
        "compiler": "",
        "platform": "",
    }


def describe(registry: Registry, parts: list[str]) -> Json | None:
    """Return the discovery document at a path, None for an unknown path."""
    if parts == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if parts == ["apis"]:
        groups = sorted({kind.group for kind in registry if kind.group})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(registry, name) for name in groups]}
    group_version = (parts[0] == "api" and len(parts) == 2) or (parts[0] == "apis" and len(parts) == 3)
    if parts[0] == "apis" and len(parts) == 2 and any(kind.group == parts[1] for kind in registry):
        return {"kind": "APIGroup", "apiVersion": "v1", **_group(registry, parts[1])}
    if not group_version:
        return None
    api_version = "/".join(parts[1:])
    kinds = [kind for kind in registry if kind.api_version == api_version]
    if not kinds:
        return None
    resources = [entry for kind in kinds for entry in _resources(kind)]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api_version, "resources": resources}


def _group(registry: Registry, name: str) -> Json:
    versions = sorted({kind.version for kind in registry if kind.group == name})
    entries = [{"groupVersion": f"{name}/{entry}", "version": entry} for entry in versions]
    return {"name": name, "versions": entries, "preferredVersion": entries[-1]}


def _resources(kind: Kind) -> list[Json]:
    row = {"name": kind.plural, "singularName": kind.kind.lower(), "namespaced": kind.namespaced, "kind": kind.kind}
    entries: list[Json] = [{**row, "verbs": _VERBS}]
    if kind.has_status:
        entries.append({**row, "name": f"{kind.plural}/status", "singularName": "", "verbs": _STATUS_VERBS})
    if kind.kind == "Pod":
        eviction = {"group": "policy", "version": "v1", "kind": "Eviction", "verbs": ["create"]}
        entries.append({**row, **eviction, "name": "pods/eviction", "singularName": ""})
        entries.append({**row, "kind": "Binding", "name": "pods/binding", "singularName": "", "verbs": ["create"]})
    return entries
