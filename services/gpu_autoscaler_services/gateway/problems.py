"""Errors as `application/problem+json` documents.

Source: RFC 9457 "Problem Details for HTTP APIs", section 3 (read 2026-11-21). `type` is a URN of PROBLEM_TYPES, all of
which are in docs/reference/problems.md; `detail` is cause and next step, `violations` lists invalid fields, `required`
is a missing right.
"""

from http import HTTPStatus
from math import ceil

import msgspec
import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.jobs import Violation

RETRY_AFTER_SECONDS_DEFAULT = 5.0  # a broker restart takes seconds
_URN = "urn:gpu-autoscaler:problem:"
FORBIDDEN_TYPE = f"{_URN}right-missing"
QUOTA_TYPE = f"{_URN}quota-exceeded"
# The type of a problem that names none.
_TYPES_BY_STATUS = {
    HTTPStatus.BAD_REQUEST: f"{_URN}malformed-request",
    HTTPStatus.UNAUTHORIZED: f"{_URN}caller-unknown",
    HTTPStatus.FORBIDDEN: FORBIDDEN_TYPE,
    HTTPStatus.NOT_FOUND: f"{_URN}not-found",
    HTTPStatus.METHOD_NOT_ALLOWED: f"{_URN}method-not-allowed",
    HTTPStatus.CONFLICT: f"{_URN}conflict",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: f"{_URN}body-too-large",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: f"{_URN}media-type-unsupported",
    HTTPStatus.MISDIRECTED_REQUEST: f"{_URN}host-unknown",
    HTTPStatus.UNPROCESSABLE_ENTITY: f"{_URN}invalid-request",
    HTTPStatus.TOO_MANY_REQUESTS: f"{_URN}too-many-requests",
    HTTPStatus.INTERNAL_SERVER_ERROR: f"{_URN}internal-error",
    HTTPStatus.NOT_IMPLEMENTED: f"{_URN}not-supported-here",
    HTTPStatus.SERVICE_UNAVAILABLE: f"{_URN}unavailable",
}
_OTHER_TYPE = "about:blank"  # of a status that the HTTP server chose: its phrase says all
PROBLEM_TYPES = frozenset({*_TYPES_BY_STATUS.values(), QUOTA_TYPE, _OTHER_TYPE})

log = structlog.get_logger()


class RequiredRight(msgspec.Struct, frozen=True, kw_only=True):
    """The right that a caller lacks, as Kubernetes RBAC grants it."""

    verb: str  # of Kubernetes RBAC
    resource: str  # with its subresource, as in directives/freeze
    group: str
    namespace: str  # of the project, or of the release
    grant: str  # the command that grants it


class Problem(Exception):
    """A request that is answered with an error. `kind` is its type; empty: the one of the status.

    `retry_after_seconds` is wall time.
    """

    def __init__(
        self,
        status: HTTPStatus,
        detail: str,
        *,
        violations: tuple[Violation, ...] = (),
        retry_after_seconds: float | None = None,
        kind: str = "",
        required: RequiredRight | None = None,
    ) -> None:
        super().__init__(detail)
        self.kind = kind or _TYPES_BY_STATUS.get(status, _OTHER_TYPE)
        self.required = required
        self.status = status
        self.detail = detail
        self.violations = violations
        self.retry_after_seconds = retry_after_seconds

    @property
    def sentence(self) -> str:
        """The detail with every violation."""
        return "; ".join((self.detail, *(f"{violation.field}: {violation.reason}" for violation in self.violations)))


def invalid(detail: str, *violations: Violation) -> Problem:
    """Return the problem of a request with invalid fields."""
    return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, detail, violations=violations)


def unauthorized(detail: str) -> Problem:
    """Return the problem of a request whose caller is not known."""
    return Problem(HTTPStatus.UNAUTHORIZED, detail)


class ProblemDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of every error."""

    title: str
    status: int  # HTTP status of the response
    detail: str
    type: str = _OTHER_TYPE  # urn:gpu-autoscaler:problem:<name>, see docs/reference/problems.md
    instance: str = ""  # path of the request
    violations: tuple[Violation, ...] = ()  # invalid fields with reasons
    required: RequiredRight | None = None  # the missing right


def problem_response(problem: Problem, path: str) -> web.Response:
    """Return the error as a response."""
    document = ProblemDocument(
        title=problem.status.phrase,
        status=problem.status.value,
        detail=problem.detail,
        type=problem.kind,
        instance=path,
        violations=problem.violations,
        required=problem.required,
    )
    response = web.Response(
        status=problem.status.value, body=msgspec.json.encode(document), content_type="application/problem+json"
    )
    if problem.retry_after_seconds is not None:
        response.headers["Retry-After"] = str(max(1, ceil(problem.retry_after_seconds)))
    if problem.status is HTTPStatus.UNAUTHORIZED:
        response.headers["WWW-Authenticate"] = 'Bearer realm="gpu-autoscaler"'
    return response


def _from_http(error: web.HTTPException) -> Problem:
    details = {
        HTTPStatus.NOT_FOUND: "no such path; /openapi.json lists all paths",
        HTTPStatus.METHOD_NOT_ALLOWED: "this path does not support this method; see the Allow header",
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "the body is larger than 1 MiB",
    }
    status = HTTPStatus(error.status)
    return Problem(status, details.get(status, error.reason))


@web.middleware
async def problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn exceptions into problem documents; a bug becomes a 500 and one logged traceback."""
    try:
        return await handler(request)
    except Problem as problem:
        return problem_response(problem, request.path)
    except web.HTTPException as error:
        if error.status < HTTPStatus.BAD_REQUEST:
            raise
        response = problem_response(_from_http(error), request.path)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except TransientError as error:
        wait = error.retry_after_seconds or RETRY_AFTER_SECONDS_DEFAULT
        return problem_response(
            Problem(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}; retry", retry_after_seconds=wait), request.path
        )
    except PermanentError as error:
        return problem_response(Problem(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)), request.path)
    except Exception:
        log.exception("request failed", method=request.method, path=request.path)
        detail = "internal error; the gateway's log has the traceback"
        return problem_response(Problem(HTTPStatus.INTERNAL_SERVER_ERROR, detail), request.path)
