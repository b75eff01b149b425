"""The OpenAPI 3.1 document, generated from the routes and their types. Written to `schemas/openapi.yaml` as well.

Source: OpenAPI Specification 3.1.1, "Operation Object", "Parameter Object" (read 2026-11-21).
"""

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from gpu_autoscaler.contracts.descriptions import described
from gpu_autoscaler_services.gateway.api import ROUTES
from gpu_autoscaler_services.gateway.forms import limited
from gpu_autoscaler_services.gateway.problems import ProblemDocument
from gpu_autoscaler_services.gateway.routes import EVENT_STREAM, JSON, Route
from gpu_autoscaler_services.gateway.schema import EXPLAINED_KINDS

_REF = "#/components/schemas/{name}"
_PATH_PARAMETER = re.compile(r"{(\w+)}")
_RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait", "schema": {"type": "integer", "minimum": 1}}}
_DESCRIPTION = (
    "GPU jobs, cluster state and decisions of gpu-autoscaler. Every error is an `application/problem+json` document. "
    "Every operation requires a bearer token, unless the gateway has neither tokens nor token review: it then listens "
    "on loopback only, and ignores tokens."
)
_BEARER = (
    "A token from the gateway's settings, which has all rights; or, if enabled, a Kubernetes token. Each operation "
    "lists the rights that it checks, verbs on virtual resources, which Kubernetes RBAC grants: those of jobs in the "
    "namespace of the project, all others in that of the release. Where it lists several, the request decides which."
)
_TEXT = {"type": "string"}
_PATHS = {
    "job_id": "Id of the job.",
    "key": "Key of the directive: `freeze`, `pause/<pool>` or `override/<scope>`.",
    "kind": "Kind of the object.",
    "name": "Name or id of the object.",
    "plan_id": "Id of the plan.",
}
_NAME = {"type": "string", "minLength": 1}
_PATH_SCHEMAS = dict.fromkeys(_PATHS, _NAME) | {"kind": {"type": "string", "enum": list(EXPLAINED_KINDS)}}
# Response headers by status (RFC 9110, sections 10.2.3, 11.6.1).
_HEADERS = {
    HTTPStatus.UNAUTHORIZED: {"WWW-Authenticate": {"description": "How to authenticate", "schema": _TEXT}},
    HTTPStatus.TOO_MANY_REQUESTS: _RETRY_AFTER,
    HTTPStatus.SERVICE_UNAVAILABLE: _RETRY_AFTER,
}


def document(routes: Sequence[Route] = ROUTES) -> dict[str, Any]:
    """Return the document as plain data, in a stable order."""
    types = {declared for route in routes for declared in (route.answer, route.body) if declared is not None}
    ordered = sorted(types | {ProblemDocument}, key=lambda declared: declared.__name__)
    _, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    bodies = [route.body.__name__ for route in routes if route.body is not None]
    paths: dict[str, Any] = {}
    for route in routes:
        for path in (route.path, *route.aliases):
            paths.setdefault(path, {})[route.method.lower()] = _operation(route, is_alias=path != route.path)
    openapi = {
        "openapi": "3.1.1",
        "info": {
            "title": "gpu-autoscaler",
            "version": "1.0.0",
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/", "description": "The gateway that serves this document"}],
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(limited(described(components, ordered), bodies).items())),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer", "description": _BEARER}},
        },
    }
    # Convert Python defaults (tuples, enumerations) to JSON.
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(openapi))
    return plain


def _operation(route: Route, *, is_alias: bool) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.operation_id + ("_alias" if is_alias else ""),
        "summary": route.summary,
        "tags": [route.tag],
        "security": [{"bearer": [right.qualified]} for right in route.rights],
        "responses": _responses(route),
    }
    if is_alias:
        operation["description"] = f"Alias of `{route.path}`."
    if parameters := _parameters(route):
        operation["parameters"] = parameters
    if route.body is not None:
        content: dict[str, Any] = {"schema": _ref(route.body)}
        if route.example is not None:
            content["example"] = route.example
        operation["requestBody"] = {"required": True, "content": {JSON: content}}
    return operation


# The HTTP server answers it, before any operation.
_UNREADABLE = "the request line or a header has more than 8190 bytes, or is no HTTP"


def _responses(route: Route) -> dict[str, Any]:
    # OpenAPI 3.1 has no schema for the events of a stream, only for a whole body.
    shown = {} if route.media_type == EVENT_STREAM else {"schema": _ref(route.answer)}
    content = {route.media_type: shown}
    responses: dict[str, Any] = {str(route.status.value): {"description": route.status.phrase, "content": content}}
    if route.method == "GET" and route.media_type == JSON:
        not_modified = HTTPStatus.NOT_MODIFIED
        responses[str(not_modified.value)] = {"description": f"{not_modified.phrase}: the ETag of If-None-Match"}
    for status in route.errors:
        headers = {"headers": _HEADERS[status]} if status in _HEADERS else {}
        responses[str(status.value)] = {
            "description": status.phrase,
            "content": {"application/problem+json": {"schema": _ref(ProblemDocument)}},
        } | headers
    unreadable = responses.setdefault(str(HTTPStatus.BAD_REQUEST.value), {"content": {}})
    unreadable["description"] = f"{HTTPStatus.BAD_REQUEST.phrase}; as plain text: {_UNREADABLE}"
    unreadable["content"]["text/plain"] = {"schema": {"type": "string"}}
    return responses


def _parameters(route: Route) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "description": _PATHS[name], "required": True, "schema": _PATH_SCHEMAS[name]}
        for name in _PATH_PARAMETER.findall(route.path)
    ]
    if route.query is not None:
        (_,), components = msgspec.json.schema_components([route.query], ref_template=_REF)
        properties = described(components, [route.query])[route.query.__name__]["properties"]
        for name, schema in properties.items():
            shown = dict(schema)
            description = shown.pop("description", "")
            parameters.append({"name": name, "in": "query", "description": description, "schema": shown})
    parameters.extend(
        {"name": name, "in": "header", "description": purpose, "schema": {"type": "string", **route.header_limits}}
        for name, purpose in route.headers.items()
    )
    return parameters


def _ref(declared: type) -> dict[str, Any]:
    if issubclass(declared, msgspec.Struct):
        return {"$ref": _REF.format(name=declared.__name__)}
    return {"type": "string"}
