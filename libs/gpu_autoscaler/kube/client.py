"""Kubernetes over HTTP: reads and the few writes. Decides nothing, remembers nothing, retries nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from gpu_autoscaler.kube.api_errors import read_status, refusal, retry_after_seconds
from gpu_autoscaler.kube.connection import Connection
from gpu_autoscaler.kube.credentials import ended_at
from gpu_autoscaler.kube.protocol import (
    ATTACHMENTS,
    NAMESPACES,
    NODES,
    PODS,
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
from gpu_autoscaler.kube.watch import read_for_ever
from gpu_autoscaler.kube.wire import core, workloads
from gpu_autoscaler.model.errors import AutoscalerError, PermanentError, TransientError

CALL_SECONDS_MAX = 10.0  # wall time of one read or write
# A real API server tries for ten seconds by itself before it says 409 to an eviction of a pod with another uid.
EVICTION_SECONDS_MAX = 20.0
CONNECTIONS_COUNT_MAX = 32
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"  # merges conditions by their type
_LIST_PAGE_COUNT_MAX = 500


def read_only() -> None:
    """A `before_write` of clients that only look on. Raises PermanentError."""
    raise PermanentError("this process only reads (kube.is_read_only): the write was not sent")


class KubeClient:
    """A `KubeApi` on one HTTP session. Use it inside one event loop; `close` it at the end."""

    def __init__(self, connection: Connection, *, now: Now, before_write: Callable[[], None] = lambda: None) -> None:
        """`now` stamps what is seen with cluster time; `before_write` may refuse a write by raising TransientError."""
        self._before_write = before_write
        self._connection = connection
        self._now = now
        self._session: aiohttp.ClientSession | None = None

    # ---- reading

    def watch(self, kind: Kind[Any], *, label_selector: str = "") -> AsyncIterator[WatchItem]:
        """List, then watch, for ever."""
        return read_for_ever(self, kind, label_selector=label_selector, now=self._now)

    async def list_page(self, kind: Kind[Any], query: Mapping[str, str]) -> core.Page:
        """Return one page of a list across all namespaces. Raises HistoryLost where its continuation is too old."""
        page = {"limit": str(_LIST_PAGE_COUNT_MAX), **query}
        body = await self._call("GET", kind.path(), f"list {kind.plural}", query=page)
        return decoded(core.Page, body, f"list {kind.plural}")

    async def open_watch(
        self, kind: Kind[Any], query: Mapping[str, str], *, read_seconds_max: float
    ) -> aiohttp.ClientResponse:
        """Open a watch. No bytes for `read_seconds_max` of wall time means the connection is dead."""
        what = f"watch {kind.plural}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CALL_SECONDS_MAX, sock_read=read_seconds_max)
        headers = await self._headers()
        try:
            response = await (await self._open()).get(
                self._connection.base_url + kind.path(),
                params=query,
                headers=headers,
                timeout=timeout,
                server_hostname=self._connection.tls_server_name,
            )
            if response.status == 200:
                return response
            async with response:
                self._check_who_we_are(response, headers, what)
                body = await asyncio.wait_for(response.read(), CALL_SECONDS_MAX)
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise self._no_answer(what, exc) from exc
        raise refusal(response.status, read_status(response.status, body), response.headers, what)

    async def cluster(self) -> Cluster:
        """Return which cluster this is."""
        namespace = await self.get(NAMESPACES, "", "kube-system")
        created = namespace.metadata.creation_timestamp
        if created is None:
            raise PermanentError("namespace kube-system carries no creationTimestamp: is this a Kubernetes API?")
        return Cluster(installation=namespace.metadata.uid, epoch=int(created.timestamp()))

    async def get(self, kind: Kind[ObjectT], namespace: str, name: str) -> ObjectT:
        """Return the object. Raises NotFound."""
        body = await self._call("GET", kind.path(namespace, name), f"get {kind.plural} {namespace}/{name}")
        return kind.decode(body, "get")

    async def serves(self, kind: Kind[Any]) -> bool:
        """True where the kind is installed, by what the server says that it serves."""
        try:
            answer = await self._call("GET", kind.api, f"ask for {kind.plural}")
        except NotFound:
            return False
        served = decoded(workloads.Served, answer, kind.api)
        return any(one.name == kind.plural for one in served.resources)

    async def pods_on(self, node_name: str) -> Sequence[core.Pod]:
        """Return the pods bound to this node."""
        return await self._selected(PODS, {"fieldSelector": f"spec.nodeName={node_name}"})

    async def nodes_labelled(self, label_selector: str) -> Sequence[core.Node]:
        """Return the nodes with these labels."""
        return await self._selected(NODES, {"labelSelector": label_selector})

    async def _selected(self, kind: Kind[ObjectT], query: Mapping[str, str]) -> Sequence[ObjectT]:
        found: list[ObjectT] = []
        asked = dict(query)
        while True:
            page = await self.list_page(kind, asked)
            found += [kind.decode(item, "list") for item in page.items or ()]
            if not page.metadata.continue_:
                return found
            asked["continue"] = page.metadata.continue_

    async def volumes_on(self, node_name: str) -> Sequence[str]:
        """Return the volumes that are attached to this node. The server cannot select by node: all are listed."""
        names: list[str] = []
        query: dict[str, str] = {}
        while True:
            try:
                page = await self.list_page(ATTACHMENTS, query)
            except NotFound:
                return names
            found = (ATTACHMENTS.decode(item, "list") for item in page.items or ())
            own = (each for each in found if each.spec.node_name == node_name)
            names += [each.spec.source.persistent_volume_name or each.metadata.name for each in own]
            if not page.metadata.continue_:
                return names
            query = {"continue": page.metadata.continue_}

    # ---- writing

    async def patch_node(self, name: str, patch: Mapping[str, Any]) -> core.Node:
        """Apply a merge patch to the node."""
        return await self._patch(NODES, "", name, patch)

    async def delete_node(self, node: core.Node) -> bool:
        """Delete that very node in the version that was seen: one that its kubelet has spoken for since stays."""
        seen = {"uid": node.metadata.uid, "resourceVersion": node.metadata.resource_version}
        return await self._delete(NODES, node, {"propagationPolicy": "Background", "preconditions": seen})

    async def annotate_pod(self, pod: core.Pod, annotations: Mapping[str, str]) -> bool:
        """Set annotations; False where that very pod is gone (the UID in the patch is a precondition)."""
        patch = {"metadata": {"uid": pod.metadata.uid, "annotations": dict(annotations)}}
        try:
            await self._patch(PODS, pod.metadata.namespace, pod.metadata.name, patch)
        except (NotFound, Conflict):
            return False
        return True

    async def evict_pod(self, pod: core.Pod) -> Eviction:
        """Ask for that very pod's eviction.

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
        code, headers, body = await self._ask("POST", path, what, body=eviction, seconds_max=EVICTION_SECONDS_MAX)
        if code < 300:
            return Eviction(answer="accepted")
        if code in (404, 409):
            return Eviction(answer="gone")
        status = read_status(code, body)
        if code == 429 and any(cause.reason == "DisruptionBudget" for cause in status.details.causes):
            why = "; ".join(cause.message for cause in status.details.causes)
            return Eviction(answer="blocked", message=why, retry_after_seconds=retry_after_seconds(status, headers))
        if code == 500 and "more than one PodDisruptionBudget" in status.message:
            return Eviction(answer="refused", message=status.message)
        raise refusal(code, status, headers, what)

    async def delete_pod(self, pod: core.Pod, *, grace_seconds: int) -> bool:
        """Delete that very pod; a grace of 0 would break the promise that a pod runs at most once.

        Unlike an eviction a deletion does not mark the pod as disrupted, and its Job would count it as a failure; so
        it is marked first, as the node life-cycle controllers do (Kubernetes, "Pod disruption conditions", read
        2026-11-21).
        """
        mark = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "DeletionAtDeadline",
            "message": "gpu-autoscaler: the node goes before the pod could be evicted",
            "lastTransitionTime": self._now(),
        }
        path = PODS.path(pod.metadata.namespace, pod.metadata.name)
        body = {"metadata": {"uid": pod.metadata.uid}, "status": {"conditions": [mark]}}
        what = f"mark pod {pod.metadata.namespace}/{pod.metadata.name} as disrupted"
        try:
            await self._call("PATCH", f"{path}/status", what, body=body, content_type=STRATEGIC_PATCH)
        except (NotFound, Conflict):
            return False
        return await self._delete(PODS, pod, {"gracePeriodSeconds": max(1, grace_seconds)})

    async def make(self, kind: Kind[ObjectT], namespace: str, manifest: Mapping[str, Any]) -> ObjectT:
        """Create the object."""
        what = f"create {kind.plural} {namespace}/{manifest['metadata']['name']}"
        return kind.decode(await self._call("POST", kind.path(namespace), what, body=manifest), "create")

    async def change(self, kind: Kind[ObjectT], namespace: str, name: str, patch: Patch) -> ObjectT:
        """Apply a patch to the object."""
        return await self._patch(kind, namespace, name, patch)

    async def remove(self, kind: Kind[Any], thing: core.Object, *, is_last: bool = False) -> bool:
        """Delete that very object; without a policy its pods would stay (recorded: batch/v1 Jobs orphan by default)."""
        return await self._delete(kind, thing, {"propagationPolicy": "Foreground" if is_last else "Background"})

    async def create(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Create an object of a kind that has no struct of its own (a TokenReview, an Event); return the answer."""
        kind = str(body.get("kind", "object"))
        return msgspec.json.decode(await self._call("POST", path, f"create {kind}", body=body), type=dict[str, Any])

    async def read(self, path: str) -> Mapping[str, Any]:
        """Return an object of a kind that has no struct of its own. Raises NotFound."""
        return msgspec.json.decode(await self._call("GET", path, f"read {path}"), type=dict[str, Any])

    async def patch(self, path: str, body: Mapping[str, Any]) -> None:
        """Apply a merge patch to an object of a kind that has no struct of its own. Raises NotFound, Conflict."""
        await self._call("PATCH", path, f"patch {path}", body=body, content_type=MERGE_PATCH)

    async def close(self) -> None:
        """Give back connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    # ---- one call

    async def _patch(self, kind: Kind[ObjectT], namespace: str, name: str, patch: Patch) -> ObjectT:
        what = f"patch {kind.plural} {namespace}/{name}"
        content_type = MERGE_PATCH if isinstance(patch, Mapping) else JSON_PATCH
        body = await self._call("PATCH", kind.path(namespace, name), what, body=patch, content_type=content_type)
        return kind.decode(body, "patch")

    async def _delete(self, kind: Kind[Any], thing: core.Object, options: Mapping[str, Any]) -> bool:
        namespace, name = thing.metadata.namespace, thing.metadata.name
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": thing.metadata.uid},
            **options,
        }
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
        code, headers, answer = await self._ask(method, path, what, query=query, body=body, content_type=content_type)
        if code >= 300:
            raise refusal(code, read_status(code, answer), headers, what)
        return answer

    async def _ask(
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
            self._before_write()  # as late as can be: a process may be paused at any await
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
                self._check_who_we_are(response, headers, what)
                return response.status, response.headers, await response.read()
        except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError) as exc:
            raise self._no_answer(what, exc) from exc

    def _check_who_we_are(self, response: aiohttp.ClientResponse, headers: Mapping[str, str], what: str) -> None:
        """401 is worth another try: tokens and certificates change under way, and what is remembered is given up."""
        if response.status != 401:
            return
        response.close()  # the connection goes with the certificate that it was opened with
        self._connection.credentials.refused()
        end = ended_at(headers.get("Authorization"))
        why = (
            "expired, revoked, or of another cluster" if end is None else f"the token ended at {end:%Y-%m-%d %H:%M:%SZ}"
        )
        here = self._connection
        raise TransientError(f"{what}: 401: {here.base_url} does not accept {here.source}: {why}; renew it")

    def _no_answer(self, what: str, exc: Exception) -> AutoscalerError:
        """A certificate that is not to be trusted stays so; all else may pass."""
        url = self._connection.base_url
        if isinstance(exc, aiohttp.ClientConnectorCertificateError):
            why = getattr(exc.certificate_error, "verify_message", "") or exc.certificate_error
            return PermanentError(f"{what}: the certificate of {url} is not to be trusted ({why}); give its authority")
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
