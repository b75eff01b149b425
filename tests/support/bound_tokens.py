"""Nodes with a watcher's pod each, and the tokens that a kubelet would mount into it, on a real API server."""

import asyncio
import base64
import json
from collections.abc import Mapping
from typing import Any

from tests.controlplane.plane import ControlPlane
from tests.support.kube_objects import node, pod

from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.protocol import NotFound
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler_services.node_gateway.admission import AUDIENCE

NAMESPACE, ACCOUNT_NAME = "default", "node-watcher"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT_NAME}"
_CORE = f"/api/v1/namespaces/{NAMESPACE}"


def instance_of(name: str) -> ProviderId:
    """The instance of a node."""
    return ProviderId(f"aws:///eu-west-1a/i-{name}")


async def give_account(kube: KubeClient, name: str = ACCOUNT_NAME) -> None:
    """Make a service account if it is missing."""
    try:
        await kube.read(f"{_CORE}/serviceaccounts/{name}")
    except NotFound:
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}
        await kube.create(f"{_CORE}/serviceaccounts", account)


async def give_node(kube: KubeClient, name: str) -> None:
    """Register a node with its instance."""
    await kube.create("/api/v1/nodes", {**node(name), "spec": {"providerID": instance_of(name)}})


async def give_watcher(kube: KubeClient, node_name: str, *, account: str = ACCOUNT_NAME) -> Mapping[str, Any]:
    """Place a watcher's pod on a node; return its metadata."""
    placed = pod(f"watcher-{node_name}", nodeName=node_name, serviceAccountName=account)
    made = await kube.create(f"{_CORE}/pods", placed)
    metadata: Mapping[str, Any] = made["metadata"]
    return metadata


async def bound_token(
    kube: KubeClient,
    pod_metadata: Mapping[str, Any] | None,
    *,
    account: str = ACCOUNT_NAME,
    audience: str | None = AUDIENCE,
) -> str:
    """Return a token as the kubelet requests it; without `pod_metadata`, one of no pod."""
    spec: dict[str, Any] = {"expirationSeconds": 600}
    if audience is not None:
        spec["audiences"] = [audience]
    if pod_metadata is not None:
        spec["boundObjectRef"] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": pod_metadata["name"],
            "uid": pod_metadata["uid"],
        }
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    answer = await kube.create(f"{_CORE}/serviceaccounts/{account}/token", asked)
    return str(answer["status"]["token"])


async def watched_node(kube: KubeClient, name: str) -> str:
    """Register a node with a watcher; return the watcher's token."""
    await give_node(kube, name)
    return await bound_token(kube, await give_watcher(kube, name))


def remove_pod(plane: ControlPlane, name: str) -> None:
    """Remove a pod at once, as if its node was gone."""
    plane.kubectl("delete", "pod", name, "--namespace", NAMESPACE, "--force", "--grace-period=0")


async def remove_node(plane: ControlPlane, name: str) -> None:
    """Remove a node; its pods stay until somebody collects them."""
    await asyncio.to_thread(plane.kubectl, "delete", "node", name)


def claims_of(token: str) -> dict[str, Any]:
    """Return the claims of a token."""
    part = token.split(".")[1]
    claims: dict[str, Any] = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    return claims
