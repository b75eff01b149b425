"""Looks at a real cluster before anything is started for it: whether it answers, and which rights are missing.

Asked of the cluster itself (SelfSubjectAccessReview), so that nothing is tried out. Source: Kubernetes API reference,
"SelfSubjectAccessReview v1", "SelfSubjectReview v1" (read 2026-11-21).
"""

import asyncio
from collections.abc import Iterable
from pathlib import Path

from gpu_autoscaler.kube.api_errors import granting
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import from_kubeconfig
from gpu_autoscaler.kube.protocol import NotFound
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.rights import Right

_SOMEBODY = "<you>"  # where the cluster is too old to say who asks


async def check_access(path: Path, rights: Iterable[Right], jobs_namespace: str) -> str:
    """Return the cluster's address, if it can be used.

    Raises ConfigError for a kubeconfig that cannot be read, and with every right that is missing, each with the command
    that grants it; TransientError where nobody answers, or the credentials are not accepted (any more).
    """
    connection = from_kubeconfig(str(path))
    kube = KubeClient(connection, now=Clock().now)
    try:
        missing = await _missing(kube, await _served(kube, _together(rights)), jobs_namespace)
        if missing:
            user = await _who_asks(kube)
            raise ConfigError(f"kubeconfig {path}", [_told(user, right) for right in missing])
    finally:
        await kube.close()
    return connection.base_url


def _together(rights: Iterable[Right]) -> list[Right]:
    """What all services need, each resource once: whoever runs them all under one name needs all of it."""
    verbs: dict[tuple[str, str, str, bool], dict[str, None]] = {}
    for right in rights:
        known = verbs.setdefault((right.group, right.resource, right.name, right.is_for_jobs), {})
        known.update(dict.fromkeys(right.verbs))
    return [
        Right(verbs=tuple(each), group=group, resource=resource, name=name, is_for_jobs=is_for_jobs)
        for (group, resource, name, is_for_jobs), each in verbs.items()
    ]


async def _served(kube: KubeClient, rights: list[Right]) -> list[Right]:
    """Those on kinds that are installed: nobody can be given a right on what is not there, and nobody needs it."""
    groups = {group["name"] for group in (await kube.read("/apis")).get("groups", ())}
    return [right for right in rights if not right.group or right.group in groups]


async def _missing(kube: KubeClient, rights: list[Right], jobs_namespace: str) -> list[Right]:
    """The rights with the verbs that are not allowed."""
    asked = [(right, verb) for right in rights for verb in right.verbs]
    answers = await asyncio.gather(*(_may(kube, right, verb, jobs_namespace) for right, verb in asked))
    refused: dict[Right, tuple[str, ...]] = {}
    for (right, verb), is_allowed in zip(asked, answers, strict=True):
        if not is_allowed:
            refused[right] = (*refused.get(right, ()), verb)
    return [
        Right(verbs=verbs, group=right.group, resource=right.resource, name=right.name, is_for_jobs=right.is_for_jobs)
        for right, verbs in refused.items()
    ]


async def _may(kube: KubeClient, right: Right, verb: str, jobs_namespace: str) -> bool:
    resource, _, subresource = right.resource.partition("/")
    wanted = {"verb": verb, "group": right.group, "resource": resource, "subresource": subresource, "name": right.name}
    if right.is_for_jobs:
        wanted["namespace"] = jobs_namespace
    review = await kube.create(
        "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": wanted},
        },
    )
    return bool(review.get("status", {}).get("allowed", False))


async def _who_asks(kube: KubeClient) -> str:
    path = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
    try:
        told = await kube.create(path, {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"})
    except NotFound:
        return _SOMEBODY
    return str(told.get("status", {}).get("userInfo", {}).get("username", _SOMEBODY))


def _told(user: str, right: Right) -> str:
    verbs = ", ".join(right.verbs)
    command = granting(user, right.verbs, right.resource, right.group)
    return f"{user} may not {verbs} {right.resource}; grant it: {command}"
