"""The chart's own accounts and rights on a control plane, and what the API server saw them do."""

import json
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import yaml
from tests.chart.charting import NAMESPACE, RELEASE, of_kind, rendered
from tests.controlplane.plane import ControlPlane
from tests.support.kube_policies import served

from gpu_autoscaler_services.registry import services, spec_of

# (verb, resource with its subresource, group)
Call = tuple[str, str, str]
_KINDS = ("CustomResourceDefinition", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
KNOWN_SECONDS_MAX = 60.0
_PREFIX = f"system:serviceaccount:{NAMESPACE}:{RELEASE}-"


def account(service: str) -> str:
    """The name of a service's account."""
    return f"{RELEASE}-{'controller' if service == 'scaler' else service.replace('_', '-')}"


def audit_settings(folder: Path) -> list[str]:
    """What makes an API server write down who called what, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    policy = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"]}
    (folder / "policy.json").write_text(json.dumps(policy | {"rules": [{"level": "Metadata"}]}))
    return [f"--audit-policy-file={folder / 'policy.json'}", f"--audit-log-path={folder / 'audit.log'}"]


def give_accounts(plane: ControlPlane, values: str = "cluster", *sets: str) -> Mapping[str, Path]:
    """Make the accounts and roles that the chart renders; return a kubeconfig for each service."""
    found = rendered(values, "jobs.namespace=default", *sets)
    plane.kubectl("create", "namespace", NAMESPACE)
    # The node gateway runs beside watchers on nodes, which a simulated cloud has not.
    entry = f"{RELEASE}-node-gateway"
    on_nodes = [one for one in rendered("aws", "jobs.namespace=default") if one["metadata"]["name"] == entry]
    chosen = [one for kind in _KINDS for one in (*of_kind(found, kind).values(), *of_kind(on_nodes, kind).values())]
    plane.kubectl("apply", "--filename", "-", text=yaml.safe_dump_all(chosen))
    served(plane)
    deadline = time.monotonic() + KNOWN_SECONDS_MAX
    for service in services():  # the server hears of new roles a moment later
        while not _may(plane, service.name):
            assert time.monotonic() < deadline, f"{service.name} is not given the rights of the chart"
            time.sleep(0.1)
    return {service.name: _kubeconfig(plane, account(service.name)) for service in services()}


def _may(plane: ControlPlane, service: str) -> bool:
    """Whether the server knows of a right of this service; one without any has nothing to wait for."""
    right = next((one for one in spec_of(service).rights if "/" not in one.resource), None)
    if right is None:
        return True
    resource = right.resource + (f".{right.group}" if right.group else "") + (f"/{right.name}" if right.name else "")
    asked = ("auth", "can-i", right.verbs[0], resource, "--namespace=default", "--quiet")
    try:
        plane.kubectl(*asked, f"--as={_PREFIX}{account(service).removeprefix(f'{RELEASE}-')}")
    except AssertionError:
        return False
    return True


def _kubeconfig(plane: ControlPlane, name: str) -> Path:
    token = plane.kubectl("create", "token", name, "--namespace", NAMESPACE).strip()
    return plane.kubeconfig(name, {"token": token})


class Seen(msgspec.Struct, frozen=True):
    """What an account called, and what it was refused."""

    calls: frozenset[Call]
    refused: frozenset[Call]


def seen(folder: Path, service: str) -> Seen:
    """What the server wrote down of a service's account."""
    calls: set[Call] = set()
    refused: set[Call] = set()
    for line in (folder / "audit.log").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["user"]["username"] != _PREFIX + account(service).removeprefix(f"{RELEASE}-"):
            continue
        thing = event.get("objectRef", {})
        sub = f"/{thing['subresource']}" if "subresource" in thing else ""
        call = (event["verb"], thing.get("resource", "") + sub, thing.get("apiGroup", ""))
        (refused if event.get("responseStatus", {}).get("code") == 403 else calls).add(call)
    return Seen(frozenset(calls), frozenset(refused))


def granted(service: str) -> frozenset[Call]:
    """What the table gives it."""
    return frozenset((verb, right.resource, right.group) for right in spec_of(service).rights for verb in right.verbs)
