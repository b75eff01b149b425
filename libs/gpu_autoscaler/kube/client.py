"""HTTP client of the Kubernetes API: reads and a few writes. No decisions, no cache, no retries."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

import aiohttp
import msgspec

from gpu_autoscaler.kube.api_errors import error_from_status, read_status, retry_after_seconds
from gpu_autoscaler.kube.connection import Connection
from gpu_autoscaler.kube.credentials import ended_at
from gpu_autoscaler.kube.protocol import (
    ATTACHMENTS,
    NAMESPACES,
    NODES,
    PODS,
    RESTORED_COMMAND,
    Cluster,
    Conflict,
    Eviction,
    Kind,
    NotFound,
    Now,
    ObjectT,
    Patch,
    WatchItem,
    decoded,
)
from gpu_autoscaler.kube.watch import list_and_watch, list_objects
from gpu_autoscaler.kube.wire import core, workloads
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import AutoscalerError, PermanentError, TransientError
from gpu_autoscaler.model.observed import aware_instant

CALL_SECONDS_MAX = 10.0  # wall time of one read or write
# The API server retries for ten seconds before it answers 409 to an eviction of a pod with another uid.
EVICTION_SECONDS_MAX = 20.0
CONNECTIONS_COUNT_MAX = 32
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"  # merges conditions by their type
_LIST_PAGE_COUNT_MAX = 500


def read_only() -> None:
    """The `before_write` of read-only clients. Raises PermanentError."""
    raise PermanentError("read-only process (kube.is_read_only): write not sent")


class KubeClient:
    """A `KubeApi` on one HTTP session. Use in one event loop; `close` at the end."""

    def __init__(self, connection: Connection, *, now: Now, before_write: Callable[[], None] = lambda: None) -> None:
        """`now` is the cluster time of observations; `before_write` may refuse a write by raising TransientError."""
        self._before_write = before_write
        self._connection = connection
        self._now = now
        self._session: aiohttp.ClientSession | None = None

    # ---- reading

    def watch(self, kind: Kind[Any], *, label_selector: str = "") -> AsyncIterator[WatchItem]:
        return list_and_watch(self, kind, label_selector=label_selector, now=self._now)

    async def list_page(self, kind: Kind[Any], query: Mapping[str, str]) -> core.Page:
        """Return one page of a list across all namespaces. Raises HistoryLost when the continuation expired."""
        page = {"limit": str(_LIST_PAGE_COUNT_MAX), **query}
        body = await self._call("GET", kind.path(), f"list {kind.plural}", query=page)
        return decoded(core.Page, body, f"list {kind.plural}")

    async def open_watch(
        self, kind: Kind[Any], query: Mapping[str, str], *, read_seconds_max: float
    ) -> aiohttp.ClientResponse:
        """Open a watch. It is dead after `read_seconds_max` of wall time without data."""
        return await self._stream(kind.path(), query, f"watch {kind.plural}", read_seconds_max)

    async def open_log(
        self, namespace: str, name: str, query: Mapping[str, str], *, read_seconds_max: float
    ) -> aiohttp.ClientResponse:
        """Open the log of a container. Raises Rejected (400) while it has not started, and for an unknown container."""
        return await self._stream(
            f"{PODS.path(namespace, name)}/log", query, f"log of {namespace}/{name}", read_seconds_max
        )

    async def _stream(
        self, path: str, query: Mapping[str, str], what: str, read_seconds_max: float
    ) -> aiohttp.ClientResponse:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CALL_SECONDS_MAX, sock_read=read_seconds_max)
        headers = await self._headers()
        try:
            response = await (await self._open()).get(
                self._connection.base_url + path,
                params=query,
                headers=headers,
                timeout=timeout,
                server_hostname=self._connection.tls_server_name,
            )
            if response.status == 200:
                return response
            async with response:
                self._check_authentication(response, headers, what)
                body = await asyncio.wait_for(response.read(), CALL_SECONDS_MAX)
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise self._connection_error(what, exc) from exc
        raise error_from_status(response.status, read_status(response.status, body), response.headers, what)

    async def cluster(self) -> Cluster:
        namespace = await self.get(NAMESPACES, "", "kube-system")
        created = namespace.metadata.creation_timestamp
        if created is None:
            raise PermanentError(
                "namespace kube-system has no creationTimestamp; check that kube.url is a Kubernetes API"
            )
        restored = _restored_at(namespace)
        epoch_at = created if restored is None else max(created, restored)
        return Cluster(installation=namespace.metadata.uid, epoch=int(epoch_at.timestamp()))

    async def get(self, kind: Kind[ObjectT], namespace: str, name: str) -> ObjectT:
        body = await self._call("GET", kind.path(namespace, name), f"get {kind.plural} {namespace}/{name}")
        return kind.decode(body, "get")

    async def serves(self, kind: Kind[Any]) -> bool:
        """True when the kind is installed, by API discovery."""
        try:
            answer = await self._call("GET", kind.api, f"discover {kind.plural}")
        except NotFound:
            return False
        served = decoded(workloads.Served, answer, kind.api)
        return any(resource.name == kind.plural for resource in served.resources)

    async def pods_on(self, node_name: str) -> Sequence[core.Pod]:
        return await self.list_all(PODS, {"fieldSelector": f"spec.nodeName={node_name}"})

    async def nodes_labeled(self, label_selector: str) -> Sequence[core.Node]:
        return await self.list_all(NODES, {"labelSelector": label_selector})

    async def list_all(self, kind: Kind[ObjectT], query: Mapping[str, str] = MappingProxyType({})) -> list[ObjectT]:
        """Return the objects of all pages. Raises NotFound when the kind is not installed."""
        return (await list_objects(self, kind, query))[0]

    async def volumes_on(self, node_name: str) -> Sequence[str]:
        """Return the volumes attached to this node. All are listed, as the server cannot filter by node."""
        try:
            attachments = await self.list_all(ATTACHMENTS)
        except NotFound:
            return []
        return [
            attachment.spec.source.persistent_volume_name or attachment.metadata.name
            for attachment in attachments
            if attachment.spec.node_name == node_name
        ]

    # ---- writing

    async def patch_node(self, name: str, patch: Mapping[str, Any]) -> core.Node:
        return await self.change(NODES, "", name, patch)

    async def delete_node(self, node: core.Node) -> bool:
        """Delete exactly this node in the observed version: a node that its kubelet updated since is kept."""
        preconditions = {"uid": node.metadata.uid, "resourceVersion": node.metadata.resource_version}
        return await self._delete(NODES, node, {"propagationPolicy": "Background", "preconditions": preconditions})

    async def annotate_pod(self, pod: core.Pod, annotations: Mapping[str, str]) -> bool:
        """Set annotations; False when exactly this pod no longer exists (the UID is a precondition)."""
        patch = {"metadata": {"uid": pod.metadata.uid, "annotations": dict(annotations)}}
        try:
            await self.change(PODS, pod.metadata.namespace, pod.metadata.name, patch)
        except (NotFound, Conflict):
            return False
        return True

    async def evict_pod(self, pod: core.Pod) -> Eviction:
        """Request the eviction of exactly this pod.

        Source: Kubernetes, "API-initiated Eviction" (read 2026-11-21), and recorded answers: the budget's 429 has a
        cause `DisruptionBudget`, several budgets on one pod are a 500 without a reason.
        """
        name, what = pod.metadata.name, f"evict pod {pod.metadata.namespace}/{pod.metadata.name}"
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": pod.metadata.namespace},
            "deleteOptions": {"preconditions": {"uid": pod.metadata.uid}},
        }
        path = f"{PODS.path(pod.metadata.namespace, name)}/eviction"
        code, headers, body = await self._request("POST", path, what, body=eviction, seconds_max=EVICTION_SECONDS_MAX)
        if code < 300:
            return Eviction(answer="accepted")
        if code in (404, 409):
            return Eviction(answer="gone")
        status = read_status(code, body)
        if code == 429 and any(cause.reason == "DisruptionBudget" for cause in status.details.causes):
            message = "; ".join(cause.message for cause in status.details.causes)
            return Eviction(answer="blocked", message=message, retry_after_seconds=retry_after_seconds(status, headers))
        if code == 500 and "more than one PodDisruptionBudget" in status.message:
            return Eviction(answer="refused", message=status.message)
        raise error_from_status(code, status, headers, what)

    async def delete_pod(self, pod: core.Pod, *, grace_seconds: int) -> bool:
        """Delete exactly this pod; a grace period of 0 would break the guarantee that a pod runs at most once.

        Unlike an eviction a deletion does not mark the pod as disrupted, and its Job would count a failure. So the pod
        is marked first, as by the node life-cycle controllers (Kubernetes, "Pod disruption conditions", read
        2026-11-21).
        """
        disruption = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "DeletionAtDeadline",
            "message": "gpu-autoscaler: the node is removed before the pod could be evicted",
            "lastTransitionTime": self._now(),
        }
        path = PODS.path(pod.metadata.namespace, pod.metadata.name)
        body = {"metadata": {"uid": pod.metadata.uid}, "status": {"conditions": [disruption]}}
        what = f"mark pod {pod.metadata.namespace}/{pod.metadata.name} as disrupted"
        try:
            await self._call("PATCH", f"{path}/status", what, body=body, content_type=STRATEGIC_PATCH)
        except (NotFound, Conflict):
            return False
        return await self._delete(PODS, pod, {"gracePeriodSeconds": max(1, grace_seconds)})

    async def make(self, kind: Kind[ObjectT], namespace: str, manifest: Mapping[str, Any]) -> ObjectT:
        what = f"create {kind.plural} {namespace}/{manifest['metadata']['name']}"
        return kind.decode(await self._call("POST", kind.path(namespace), what, body=manifest), "create")

    async def remove(self, kind: Kind[Any], thing: core.Object, *, is_last: bool = False) -> bool:
        """Delete exactly this object and its dependents (by default batch/v1 Jobs orphan their pods; recorded)."""
        return await self._delete(kind, thing, {"propagationPolicy": "Foreground" if is_last else "Background"})

    async def create(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Create an object of a kind without a struct (a TokenReview, an Event); return the answer."""
        kind = str(body.get("kind", "object"))
        return msgspec.json.decode(await self._call("POST", path, f"create {kind}", body=body), type=dict[str, Any])

    async def read(self, path: str) -> Mapping[str, Any]:
        """Return an object of a kind without a struct. Raises NotFound."""
        return msgspec.json.decode(await self._call("GET", path, f"read {path}"), type=dict[str, Any])

    async def patch(self, path: str, body: Mapping[str, Any]) -> None:
        """Apply a merge patch to an object of a kind without a struct. Raises NotFound, Conflict."""
        await self._call("PATCH", path, f"patch {path}", body=body, content_type=MERGE_PATCH)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # ---- one call

    async def change(
        self, kind: Kind[ObjectT], namespace: str, name: str, patch: Patch, *, subresource: str = ""
    ) -> ObjectT:
        what = f"patch {kind.plural} {namespace}/{name}"
        path = kind.path(namespace, name) + (f"/{subresource}" if subresource else "")
        content_type = MERGE_PATCH if isinstance(patch, Mapping) else JSON_PATCH
        body = await self._call("PATCH", path, what, body=patch, content_type=content_type)
        return kind.decode(body, "patch")

    async def _delete(self, kind: Kind[Any], thing: core.Object, options: Mapping[str, Any]) -> bool:
        namespace, name = thing.metadata.namespace, thing.metadata.name
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": thing.metadata.uid}, **options}
        try:
            await self._call(
                "DELETE", kind.path(namespace, name), f"delete {kind.plural} {namespace}/{name}", body=body
            )
        except (NotFound, Conflict):
            return False
        return True

    async def _call(
        self,
        method: str,
        path: str,
        what: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Patch | None = None,
        content_type: str = "application/json",
    ) -> bytes:
        code, headers, answer = await self._request(
            method, path, what, query=query, body=body, content_type=content_type
        )
        if code >= 300:
            raise error_from_status(code, read_status(code, answer), headers, what)
        return answer

    async def _request(
        self,
        method: str,
        path: str,
        what: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Patch | None = None,
        content_type: str = "application/json",
        seconds_max: float = CALL_SECONDS_MAX,
    ) -> tuple[int, Mapping[str, str], bytes]:
        headers = await self._headers()
        if method != "GET":
            self._before_write()  # as late as possible: a process may be paused at any await
        if body is not None:
            headers["Content-Type"] = content_type
        try:
            async with (await self._open()).request(
                method,
                self._connection.base_url + path,
                params=query,
                data=None if body is None else msgspec.json.encode(body),
                headers=headers,
                server_hostname=self._connection.tls_server_name,
                timeout=aiohttp.ClientTimeout(total=seconds_max),
            ) as response:
                self._check_authentication(response, headers, what)
                return response.status, response.headers, await response.read()
        except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError) as exc:
            raise self._connection_error(what, exc) from exc

    def _check_authentication(self, response: aiohttp.ClientResponse, headers: Mapping[str, str], what: str) -> None:
        """Raise TransientError for a 401, and drop cached credentials: tokens and certificates are rotated."""
        if response.status != 401:
            return
        response.close()  # closes the connection, which was opened with the rejected certificate
        self._connection.credentials.invalidate()
        expiry = ended_at(headers.get("Authorization"))
        reason = (
            "expired, revoked, or of another cluster"
            if expiry is None
            else f"token expired at {expiry:%Y-%m-%d %H:%M:%SZ}"
        )
        connection = self._connection
        raise TransientError(f"{what}: 401: {connection.base_url} rejects {connection.source}: {reason}; renew it")

    def _connection_error(self, what: str, exc: Exception) -> AutoscalerError:
        """Return PermanentError for an untrusted certificate, TransientError for everything else."""
        url = self._connection.base_url
        if isinstance(exc, aiohttp.ClientConnectorCertificateError):
            reason = getattr(exc.certificate_error, "verify_message", "") or exc.certificate_error
            return PermanentError(f"{what}: untrusted certificate of {url} ({reason}); configure its authority")
        return TransientError(f"{what}: {url} does not answer: {exc!r}")

    async def _headers(self) -> dict[str, str]:
        token = await self._connection.credentials.header()
        headers = {"Accept": "application/json"}
        return headers if token is None else {**headers, "Authorization": token}

    async def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            tls = self._connection.tls
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=CONNECTIONS_COUNT_MAX, ssl=True if tls is None else tls),
                timeout=aiohttp.ClientTimeout(total=CALL_SECONDS_MAX),
            )
        return self._session


def _restored_at(namespace: core.Object) -> datetime | None:
    """Return when etcd was restored from a backup, as an operator declared it; None: never. Raises PermanentError."""
    text = namespace.metadata.annotations.get(labels.RESTORED_AT)
    if text is None:
        return None
    restored_at = aware_instant(text)
    if restored_at is None:
        raise PermanentError(
            f"namespace kube-system: annotation {labels.RESTORED_AT} is {text!r}, not a time of RFC 3339; set it: "
            f"{RESTORED_COMMAND}"
        )
    return restored_at
