"""What a route declares, once: the router and the OpenAPI document are both made from it."""

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec
from aiohttp import web

from gpu_autoscaler.model.ids import derive_id
from gpu_autoscaler.model.jobs import Mistake
from gpu_autoscaler_services.gateway.problems import Problem

BODY_BYTES_MAX = 1 << 20
READ = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.MISDIRECTED_REQUEST)
JSON = "application/json"

T = TypeVar("T", bound=msgspec.Struct)


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One operation: where it is, what goes in, what comes out."""

    method: str
    path: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    summary: str
    tag: str
    answers: Mapping[HTTPStatus, type | None]  # body of each success; None: no body
    problems: tuple[HTTPStatus, ...] = ()  # refusals besides those of every route
    body: type | None = None
    query: type | None = None  # a struct whose fields are the query's parameters
    headers: Mapping[str, str] = {}  # request headers that are read, with what they are for
    aliases: tuple[str, ...] = ()
    media_type: str = JSON

    @property
    def operation_id(self) -> str:
        """Name of the operation in the OpenAPI document: its handler's."""
        return str(getattr(self.handler, "__name__", "")).removesuffix("_handler")


def read_query(request: web.Request, query: type[T]) -> T:
    """The query's parameters as the declared struct. Raises a 422 that names each wrong one."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(query)}
    values: dict[str, Any] = {}
    mistakes = []
    for name in request.query:
        field = fields.get(name)
        if field is None:
            known = ", ".join(fields)
            mistakes.append(Mistake(name, f"no such parameter; there are: {known}" if known else "takes no parameters"))
            continue
        try:
            many = request.query.getall(name)
            raw: Any = many if _is_repeatable(field.type) else many[-1]
            values[name] = msgspec.convert(raw, field.type, strict=False)
        except msgspec.ValidationError as error:
            mistakes.append(Mistake(name, str(error).partition(" - at ")[0]))
    if mistakes:
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "the query cannot be read", mistakes=tuple(mistakes))
    return query(**values)


def _is_repeatable(declared: Any) -> bool:  # noqa: ANN401 - any annotation
    bare = get_args(declared)[0] if get_origin(declared) is Annotated else declared
    return get_origin(bare) is tuple


def is_text(header: str) -> bool:
    """False for a header whose bytes are no UTF-8: aiohttp shows such bytes as lone surrogates (PEP 383)."""
    return not any("\ud800" <= character <= "\udfff" for character in header)


def answer(
    request: web.Request, body: object, *, status: HTTPStatus = HTTPStatus.OK, headers: Mapping[str, str] | None = None
) -> web.Response:
    """A JSON response with an ETag; 304 where the client has this very body already (RFC 9110, section 13.1.2)."""
    payload = msgspec.json.encode(body)
    etag = f'"{derive_id(payload.hex())[:16]}"'
    common = {"ETag": etag, "Cache-Control": "no-cache", **(headers or {})}
    asked = request.headers.get("If-None-Match", "")
    if request.method in {"GET", "HEAD"} and etag in {part.strip().removeprefix("W/") for part in asked.split(",")}:
        return web.Response(status=HTTPStatus.NOT_MODIFIED, headers=common)
    return web.Response(status=status, body=payload, content_type=JSON, headers=common)
