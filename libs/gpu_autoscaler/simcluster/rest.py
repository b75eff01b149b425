"""The Kubernetes REST API: paths and verbs to the rules behind it, and API discovery.

Paths: Kubernetes documentation, "Kubernetes API Concepts: Resource URIs" (read 2026-11-21).
"""

from dataclasses import dataclass, replace

import msgspec
from aiohttp import web

from gpu_autoscaler.simcluster import answers
from gpu_autoscaler.simcluster.api import Api, DeleteOptions
from gpu_autoscaler.simcluster.faults import Faults
from gpu_autoscaler.simcluster.kinds import PODS, Kind, Registry
from gpu_autoscaler.simcluster.listing import Page, list_page, positive_integer
from gpu_autoscaler.simcluster.objects import Json
from gpu_autoscaler.simcluster.pod_logs import serve_log
from gpu_autoscaler.simcluster.shapes import DeleteBody, read_as
from gpu_autoscaler.simcluster.store import Record
from gpu_autoscaler.simcluster.subresources import bind, delete_options, evict
from gpu_autoscaler.simcluster.watch import Watch, encoded

BODY_BYTES_MAX = 3 * 1024 * 1024  # the real server's limit on a resource request body
_ORPHAN_WARNING = (
    '299 - "child pods are preserved by default when jobs are deleted; set propagationPolicy=Background to remove '
    'them or set propagationPolicy=Orphan to suppress this warning"'
)
KUBERNETES_MINOR = "36"  # the release whose recorded answers are imitated
_RESOURCE_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
_STATUS_VERBS = ["get", "patch", "update"]
_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass(frozen=True, slots=True)
class Target:
    """What a path names: a collection, an object, or an object's subresource."""

    kind: Kind
    namespace: str | None
    name: str
    subresource: str

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


@dataclass(frozen=True, slots=True)
class RestApi:
    """Answers everything under /api and /apis."""

    _api: Api
    _faults: Faults
    _token: str | None  # the one bearer token that may do everything; None lets everybody in

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request; refusals become Status bodies."""
        try:
            self._require_known(request)
            parts = [part for part in request.path.split("/") if part]
            described = describe(self._api.registry, parts) if request.method == "GET" else None
            if described is not None:
                return json_answer(described)
            target = self._target(parts)
            if target is None:
                return web.Response(status=404, text="404 page not found\n", content_type="text/plain")
            self._require_allowed(request, target)
            if target.subresource:
                return await self._subresource(request, target)
            return await (self._object if target.name else self._collection)(request, target)
        except answers.ApiRefusal as refusal:
            return refused(refusal)

    def _require_known(self, request: web.Request) -> None:
        """Raise ApiRefusal 401 for a token that is not ours."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if self._token and scheme.lower() == "bearer" and token != self._token:
            raise answers.unauthorized()

    def _require_allowed(self, request: web.Request, target: Target) -> None:
        """Raise ApiRefusal 403 for a caller without a token where one is asked for."""
        if not self._token or "Authorization" in request.headers:
            return
        verb = _VERBS.get(request.method, "get") if target.name or request.method != "GET" else "list"
        where = f' in the namespace "{target.namespace}"' if target.namespace else " at the cluster scope"
        resource, group = target.kind.plural, target.kind.group
        why = f'User "system:anonymous" cannot {verb} resource "{resource}" in API group "{group}"{where}'
        raise answers.forbidden(target.kind, target.name, why)

    def _target(self, parts: list[str]) -> Target | None:
        """Return what the path names, None where nothing is served."""
        if parts[0] == "api":
            group, version, rest = "", parts[1] if len(parts) > 1 else "", parts[2:]
        else:
            group, version, rest = (*parts[1:3], "", "")[0], (*parts[1:3], "", "")[1], parts[3:]
        namespace = None
        if len(rest) > 2 and rest[0] == "namespaces" and rest[2] not in ("status", "finalize"):
            namespace, rest = rest[1], rest[2:]
        kind = self._api.registry.find(group, version, rest[0]) if rest else None
        if kind is None or len(rest) > 3 or (namespace and not kind.namespaced):
            return None
        if kind.namespaced and namespace is None and len(rest) > 1:
            return None
        name, subresource = (*rest[1:], "", "")[:2]
        return Target(kind, namespace, name, subresource)

    async def _collection(self, request: web.Request, target: Target) -> web.StreamResponse:
        if request.method == "GET":
            if _is_watch(request):
                watch = Watch(self._api.store, target.kind, target.namespace, request.query)
                return await watch.run(request, self._faults)
            page = list_page(self._api.store, target.kind, target.namespace, request.query)
            return web.Response(body=_list_body(target.kind, page), content_type="application/json")
        if request.method == "POST":
            if target.kind.namespaced and target.namespace is None:
                raise answers.method_not_allowed()
            record = self._api.create(target.kind, target.namespace, await _body(request))
            return object_answer(target.kind, record, status=201)
        if request.method == "DELETE":
            page = list_page(self._api.store, target.kind, target.namespace, request.query)
            options = await _delete_options(request)
            for record in page.records:
                self._api.delete(target.kind, record.key, options)
            return web.Response(body=_list_body(target.kind, page), content_type="application/json")
        raise answers.method_not_allowed()

    async def _object(self, request: web.Request, target: Target) -> web.StreamResponse:
        kind, key = target.kind, target.key
        if request.method == "GET" and _is_watch(request):
            raise answers.bad_request("watch one object by its collection and fieldSelector=metadata.name")
        if request.method == "PUT" and kind.create_on_update and self._api.find(kind, key) is None:
            return object_answer(kind, self._api.create(kind, target.namespace, await _body(request)), status=201)
        if request.method == "DELETE":
            return self._deleted(target, await _delete_options(request))
        return await self._read_or_write(request, target)

    def _deleted(self, target: Target, options: DeleteOptions) -> web.Response:
        record, is_gone = self._api.delete(target.kind, target.key, options)
        if is_gone and not target.kind.returns_deleted:
            details = answers.details_of(target.kind, target.name)
            return json_answer(answers.success(200, {**details, "uid": record.object["metadata"]["uid"]}))
        answer = object_answer(target.kind, record)
        if target.kind.orphans_by_default and options.propagation is None:
            answer.headers["Warning"] = _ORPHAN_WARNING
        return answer

    async def _subresource(self, request: web.Request, target: Target) -> web.StreamResponse:
        kind, key, verb = target.kind, target.key, (request.method, target.subresource)
        if kind is PODS and verb == ("POST", "eviction"):
            return json_answer(evict(self._api, key, await _body(request)), status=201)
        if kind is PODS and verb == ("GET", "log"):
            return await serve_log(self._api, key, request)
        if kind is PODS and verb == ("POST", "binding"):
            return json_answer(bind(self._api, key, await _body(request)), status=201)
        if target.subresource != "status" or not kind.has_status:
            raise answers.failure(404, "NotFound", "the server could not find the requested resource", {})
        return await self._read_or_write(request, target, status=True)

    async def _read_or_write(self, request: web.Request, target: Target, *, status: bool = False) -> web.Response:
        kind, key = target.kind, target.key
        if request.method == "GET":
            return object_answer(kind, self._api.record(kind, key))
        if request.method == "PUT":
            return object_answer(kind, self._api.replace(kind, key, await _body(request), status=status))
        if request.method == "PATCH":
            body = await _body(request)
            return object_answer(kind, self._api.patch(kind, key, body, request.content_type, status=status))
        raise answers.method_not_allowed()


def _is_watch(request: web.Request) -> bool:
    return request.query.get("watch", "").lower() in ("1", "true")


def json_answer(body: Json, *, status: int = 200) -> web.Response:
    """Return an answer with a JSON body."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


def object_answer(kind: Kind, record: Record, *, status: int = 200) -> web.Response:
    """Return an answer that shows one object."""
    return web.Response(body=encoded(kind, record), status=status, content_type="application/json")


def refused(refusal: answers.ApiRefusal) -> web.Response:
    """Return the Status answer of a refusal."""
    answer = json_answer(refusal.status, status=refusal.code)
    if refusal.retry_after_seconds:
        answer.headers["Retry-After"] = str(refusal.retry_after_seconds)
    return answer


def _list_body(kind: Kind, page: Page) -> bytes:
    metadata: Json = {"resourceVersion": str(page.version)}
    if page.token:
        metadata["continue"] = page.token
    if page.left_count:
        metadata["remainingItemCount"] = page.left_count
    head = {"kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": metadata}
    items = b",".join(encoded(kind, record, with_kind=kind.custom) for record in page.records)
    return msgspec.json.encode(head)[:-1] + b',"items":[' + items + b"]}"


async def _body(request: web.Request) -> object:
    """Return the decoded body. Raises ApiRefusal 400."""
    raw = await request.read()
    try:
        body: object = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise answers.bad_request(f"error decoding request body: {exc}") from exc
    return body


async def _delete_options(request: web.Request) -> DeleteOptions:
    """Return the options from the body and the query, which wins. Raises ApiRefusal 400."""
    body = await _body(request) if request.can_read_body else {}
    options = delete_options(read_as(body, DeleteBody, "v1 DeleteOptions"))
    if grace := request.query.get("gracePeriodSeconds"):
        options = replace(options, grace_seconds=positive_integer(grace, "gracePeriodSeconds"))
    if policy := request.query.get("propagationPolicy"):
        options = replace(options, propagation=policy)
    return options


# ---- API discovery


def describe_version() -> Json:
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
    entries: list[Json] = [{**row, "verbs": _RESOURCE_VERBS}]
    if kind.has_status:
        entries.append({**row, "name": f"{kind.plural}/status", "singularName": "", "verbs": _STATUS_VERBS})
    if kind.kind == "Pod":
        eviction = {"group": "policy", "version": "v1", "kind": "Eviction", "verbs": ["create"]}
        entries.append({**row, **eviction, "name": "pods/eviction", "singularName": ""})
        entries.append({**row, "kind": "Binding", "name": "pods/binding", "singularName": "", "verbs": ["create"]})
        entries.append({**row, "name": "pods/log", "singularName": "", "verbs": ["get"]})
    return entries
