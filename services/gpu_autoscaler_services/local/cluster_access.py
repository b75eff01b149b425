"""Checks before the start that a real cluster answers and grants the services' rights.

Source: Kubernetes API reference, "SelfSubjectAccessReview v1", "SelfSubjectReview v1" (read 2026-11-21).
"""

import asyncio
from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from gpu_autoscaler.kube.api_errors import granting
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import from_kubeconfig
from gpu_autoscaler.kube.protocol import NotFound
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.service_spec import Right

_UNKNOWN_USER = "<you>"  # of clusters without SelfSubjectReview


async def check_access(path: Path, rights: Iterable[Right], jobs_namespace: str) -> str:
    """Return the cluster's address.

    Raises ConfigError for an unreadable kubeconfig, or with each missing right and the command that grants it;
    TransientError if the cluster does not answer or does not accept the credentials.
    """
    connection = from_kubeconfig(str(path))
    kube = KubeClient(connection, now=Clock().now)
    try:
        missing = await _missing(kube, await _served(kube, _merged(rights)), jobs_namespace)
        if missing:
            user = await _user(kube)
            raise ConfigError(f"kubeconfig {path}", [_description(user, right) for right in missing])
    finally:
        await kube.close()
    return connection.base_url


def _merged(rights: Iterable[Right]) -> list[Right]:
    """Return the rights of all services, each resource once: here one user runs them all."""
    verbs: dict[Right, dict[str, None]] = {}  # by the right without its verbs
    for right in rights:
        verbs.setdefault(replace(right, verbs=()), {}).update(dict.fromkeys(right.verbs))
    return [replace(right, verbs=tuple(merged)) for right, merged in verbs.items()]


async def _served(kube: KubeClient, rights: list[Right]) -> list[Right]:
    """Return the rights on API groups that are installed; the others are not needed."""
    groups = {group["name"] for group in (await kube.read("/apis")).get("groups", ())}
    return [right for right in rights if not right.group or right.group in groups]


async def _missing(kube: KubeClient, rights: list[Right], jobs_namespace: str) -> list[Right]:
    """Return the rights that are not granted, with the refused verbs."""
    checks = [(right, verb) for right in rights for verb in right.verbs]
    answers = await asyncio.gather(*(_is_allowed(kube, right, verb, jobs_namespace) for right, verb in checks))
    refused: dict[Right, tuple[str, ...]] = {}
    for (right, verb), is_allowed in zip(checks, answers, strict=True):
        if not is_allowed:
            refused[right] = (*refused.get(right, ()), verb)
    return [replace(right, verbs=verbs) for right, verbs in refused.items()]


async def _is_allowed(kube: KubeClient, right: Right, verb: str, jobs_namespace: str) -> bool:
    resource, _, subresource = right.resource.partition("/")
    attributes = {"verb": verb, "group": right.group, "resource": resource, "subresource": subresource}
    attributes["name"] = right.name
    if right.is_for_jobs:
        attributes["namespace"] = jobs_namespace
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
    spec = {"resourceAttributes": attributes}
    review = await kube.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", {**body, "spec": spec})
    return bool(review.get("status", {}).get("allowed", False))


async def _user(kube: KubeClient) -> str:
    path = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
    try:
        review = await kube.create(path, {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"})
    except NotFound:
        return _UNKNOWN_USER
    return str(review.get("status", {}).get("userInfo", {}).get("username", _UNKNOWN_USER))


def _description(user: str, right: Right) -> str:
    verbs = ", ".join(right.verbs)
    command = granting(user, right.verbs, right.resource, right.group)
    return f"{user} may not {verbs} {right.resource}; grant it: {command}"
