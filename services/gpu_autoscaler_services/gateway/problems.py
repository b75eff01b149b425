"""Errors as `application/problem+json` documents.

Source: RFC 9457 "Problem Details for HTTP APIs", section 3 (read 2026-11-21). `type` is the URI of one of TYPES;
`detail` is cause and next step, `violations` lists invalid fields, `required` is a missing right.
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
log = structlog.get_logger()


class ProblemType(msgspec.Struct, frozen=True):
    """A kind of error: programs decide by its URI, people read the page that the URI leads to."""

    name: str
    statuses: tuple[HTTPStatus, ...]
    meaning: str
    remedy: str

    @property
    def uri(self) -> str:
        """A reference relative to the gateway, which serves the page (RFC 9457, section 3.1.1)."""
        return f"{PROBLEMS_PATH}/{self.name}"


PROBLEMS_PATH = "/problems"
# The first type of a status is that of a problem that names none. docs/reference/problems.md is made from it.
TYPES = (
    ProblemType(
        "malformed-request",
        (HTTPStatus.BAD_REQUEST,),
        "the body is no JSON, or a header cannot be read",
        "send what `/openapi.json` describes",
    ),
    ProblemType(
        "caller-unknown",
        (HTTPStatus.UNAUTHORIZED,),
        "no token, or none that is accepted",
        "send `Authorization: Bearer <token>`",
    ),
    ProblemType(
        "right-missing",
        (HTTPStatus.FORBIDDEN,),
        "the caller is known and may not do this",
        "have the right granted: `required.grant` is the command",
    ),
    ProblemType(
        "not-found", (HTTPStatus.NOT_FOUND,), "no such path or object", "`detail` says where the objects are listed"
    ),
    ProblemType(
        "method-not-allowed",
        (HTTPStatus.METHOD_NOT_ALLOWED,),
        "the path does not support the method",
        "see the `Allow` header",
    ),
    ProblemType(
        "conflict",
        (HTTPStatus.CONFLICT,),
        "the id or key belongs to another request, or the object has ended",
        "read the object; use another id or key",
    ),
    ProblemType(
        "body-too-large",
        (HTTPStatus.REQUEST_ENTITY_TOO_LARGE,),
        "the body exceeds 1 MiB",
        "put large parts into a ConfigMap or volume",
    ),
    ProblemType(
        "media-type-unsupported",
        (HTTPStatus.UNSUPPORTED_MEDIA_TYPE,),
        "the body is not declared as JSON",
        "send `Content-Type: application/json`",
    ),
    ProblemType(
        "host-unknown",
        (HTTPStatus.MISDIRECTED_REQUEST,),
        "the Host header is not one of the gateway's",
        "use its address, or add the name to its settings",
    ),
    ProblemType(
        "invalid-request",
        (HTTPStatus.UNPROCESSABLE_ENTITY,),
        "fields or parameters are unknown, missing or of another form than `/openapi.json` describes",
        "correct what `violations` lists",
    ),
    ProblemType(
        "rule-violated",
        (HTTPStatus.UNPROCESSABLE_ENTITY,),
        "the form is right, and a value breaks a rule: of the policy, the settings or the time",
        "correct what `violations` lists",
    ),
    ProblemType(
        "quota-exceeded",
        (HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.TOO_MANY_REQUESTS),
        "a quota of the project or user does not allow it",
        "ask for less, or have the quota raised; 429: retry when a job has started",
    ),
    ProblemType(
        "too-many-requests",
        (HTTPStatus.TOO_MANY_REQUESTS,),
        "a limit of waiting requests, streams or jobs is reached",
        "retry after `Retry-After` seconds",
    ),
    ProblemType(
        "internal-error",
        (HTTPStatus.INTERNAL_SERVER_ERROR,),
        "a defect of the gateway",
        "its log has the traceback; please report it",
    ),
    ProblemType(
        "not-supported-here",
        (HTTPStatus.NOT_IMPLEMENTED,),
        "this gateway is not set up for it",
        "`detail` names the setting",
    ),
    ProblemType(
        "unavailable",
        (HTTPStatus.SERVICE_UNAVAILABLE,),
        "the broker, the store or Kubernetes is away",
        "retry after `Retry-After` seconds",
    ),
)
_URIS = {kind.name: kind.uri for kind in TYPES}
FORBIDDEN_TYPE, QUOTA_TYPE, RULE_TYPE = (_URIS[name] for name in ("right-missing", "quota-exceeded", "rule-violated"))
_TYPES_BY_STATUS = {status: kind.uri for kind in reversed(TYPES) for status in kind.statuses if kind.uri != QUOTA_TYPE}
_OTHER_TYPE = "about:blank"  # of a status that the HTTP server chose: its phrase says all


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
    """Return the problem of a request with fields of another form than the API describes."""
    return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, detail, violations=violations)


def rule_violated(detail: str, *violations: Violation) -> Problem:
    """Return the problem of a request of the right form whose values break a rule."""
    return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, detail, violations=violations, kind=RULE_TYPE)


def unauthorized(detail: str) -> Problem:
    """Return the problem of a request whose caller is not known."""
    return Problem(HTTPStatus.UNAUTHORIZED, detail)


class ProblemDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of every error."""

    title: str
    status: int  # HTTP status of the response
    detail: str
    type: str = _OTHER_TYPE  # /problems/<name>, where the gateway explains it; docs/reference/problems.md has all
    instance: str = ""  # path of the request
    violations: tuple[Violation, ...] = ()  # invalid fields with reasons
    required: RequiredRight | None = None  # the missing right


def problem_document(problem: Problem, path: str = "") -> ProblemDocument:
    """Return the error as a document; `path` is that of the request, empty outside of HTTP."""
    return ProblemDocument(
        title=problem.status.phrase,
        status=problem.status.value,
        detail=problem.detail,
        type=problem.kind,
        instance=path,
        violations=problem.violations,
        required=problem.required,
    )


def problem_response(problem: Problem, path: str) -> web.Response:
    """Return the error as a response."""
    body = msgspec.json.encode(problem_document(problem, path))
    response = web.Response(status=problem.status.value, body=body, content_type="application/problem+json")
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
        return problem_response(rule_violated(str(error)), request.path)
    except Exception:
        log.exception("request failed", method=request.method, path=request.path)
        detail = "internal error; the gateway's log has the traceback"
        return problem_response(Problem(HTTPStatus.INTERNAL_SERVER_ERROR, detail), request.path)
