"""Declaration of routes, from which router and OpenAPI document are generated."""

import re
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec
from aiohttp import web

from gpu_autoscaler.model.document_errors import remedy
from gpu_autoscaler.model.ids import derive_id
from gpu_autoscaler.model.jobs import Violation
from gpu_autoscaler_services.api_rights import ApiRight
from gpu_autoscaler_services.gateway.access import ACCESS
from gpu_autoscaler_services.gateway.problems import invalid

BODY_BYTES_MAX = 1 << 20
INVALID = (HTTPStatus.UNPROCESSABLE_ENTITY,)
MISSING = (HTTPStatus.NOT_FOUND,)
# Errors of every operation, before its handler runs: of the caller, and of a gateway that cannot answer yet.
COMMON = (
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.MISDIRECTED_REQUEST,
    HTTPStatus.INTERNAL_SERVER_ERROR,
    HTTPStatus.SERVICE_UNAVAILABLE,
)
JSON, EVENT_STREAM = "application/json", "text/event-stream"
EXAMPLE_END = "2026-12-01T12:00:00Z"  # of requests that are shown; a request needs a time that is ahead

# JSON numbers and booleans that a parameter may spell.
_PLAIN_VALUE = re.compile(r"true|false|-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?")

T = TypeVar("T", bound=msgspec.Struct)


class Route(msgspec.Struct, frozen=True):
    """One operation with its input and output. Its name is the handler's, its summary the docstring's first line."""

    method: str
    path: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    tag: str
    answer: type  # body of a success
    # A single right of the release's namespace is checked before the handler runs; others the handler checks itself,
    # since the request decides which, or for which project.
    rights: tuple[ApiRight, ...]
    problems: tuple[HTTPStatus, ...] = ()  # errors besides those of every operation
    body: type | None = None
    example: Mapping[str, Any] | None = None  # of the body
    query: type | None = None  # struct of the query parameters
    headers: Mapping[str, str] = {}  # request headers with their description
    header_limits: Mapping[str, int] = {}  # of their values, as in JSON Schema
    aliases: tuple[str, ...] = ()
    media_type: str = JSON
    changes_nothing: bool = False  # also of a POST

    @property
    def operation_id(self) -> str:
        return str(getattr(self.handler, "__name__", "")).removesuffix("_handler")

    @property
    def status(self) -> HTTPStatus:
        """Return the status of a success: a write is accepted, and takes effect later."""
        return HTTPStatus.OK if self.method == "GET" or self.changes_nothing else HTTPStatus.ACCEPTED

    @property
    def errors(self) -> tuple[HTTPStatus, ...]:
        """Return all errors that the operation can answer."""
        return tuple(sorted({*self.problems, *COMMON}))

    async def answered(self, request: web.Request) -> web.StreamResponse:
        """Check the right, and run the handler. Raises a 403."""
        if len(self.rights) == 1 and not self.rights[0].is_by_project:
            await request[ACCESS].require(self.rights[0])
        return await self.handler(request)

    @property
    def summary(self) -> str:
        return (self.handler.__doc__ or "").partition("\n")[0].removesuffix(".")


def read_query(request: web.Request, query: type[T]) -> T:
    """Return the query parameters as the struct. Raises a 422 that names each invalid one."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(query)}
    values: dict[str, Any] = {}
    violations = []
    for name in request.query:
        field = fields.get(name)
        if field is None:
            known = f"known: {', '.join(fields)}" if fields else "this path has none"
            violations.append(Violation(name, f"unknown parameter; {known}"))
            continue
        try:
            texts = request.query.getall(name)
            values[name] = _converted(texts if _is_repeatable(field.type) else texts[-1], field.type)
        except msgspec.ValidationError as error:
            what = str(error).partition(" - at ")[0]
            violations.append(Violation(name, f"{what}; {remedy(error, field.type)}"))
    if violations:
        raise invalid("invalid query: correct the parameters listed in violations", *violations)
    return query(**values)


def _converted(raw: list[str] | str, declared: Any) -> Any:  # noqa: ANN401 - of any field
    """Return the value of a parameter: a text, or the number or boolean that it spells. Raises ValidationError.

    msgspec's conversion that is not strict would take a number for an instant too.
    """
    try:
        return msgspec.convert(raw, declared)
    except msgspec.ValidationError:
        if isinstance(raw, list) or not _PLAIN_VALUE.fullmatch(raw):
            raise
        return msgspec.convert(msgspec.json.decode(raw), declared)


def _is_repeatable(declared: Any) -> bool:  # noqa: ANN401 - any annotation
    bare = get_args(declared)[0] if get_origin(declared) is Annotated else declared
    return get_origin(bare) is tuple


def is_text(header: str) -> bool:
    """Return False if the header is not UTF-8: aiohttp decodes such bytes as lone surrogates (PEP 383)."""
    return not any("\ud800" <= character <= "\udfff" for character in header)


def answer(
    request: web.Request, body: object, *, status: HTTPStatus = HTTPStatus.OK, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return a JSON response with an ETag; 304 if the client has the same body (RFC 9110, section 13.1.2)."""
    payload = msgspec.json.encode(body)
    etag = f'"{derive_id(payload.hex())[:16]}"'
    common = {"ETag": etag, "Cache-Control": "no-cache", **(headers or {})}
    known_etags = request.headers.get("If-None-Match", "")
    if request.method in {"GET", "HEAD"} and etag in {
        part.strip().removeprefix("W/") for part in known_etags.split(",")
    }:
        return web.Response(status=HTTPStatus.NOT_MODIFIED, headers=common)
    return web.Response(status=status, body=payload, content_type=JSON, headers=common)
