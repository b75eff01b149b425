"""Errors as `application/problem+json` documents.

Source: RFC 9457 "Problem Details for HTTP APIs", section 3 (read 2026-11-21). `type` is `about:blank`: status and
title are the class of the problem, `detail` is cause and next step, `violations` lists invalid fields.
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


class Problem(Exception):
    """A request that is answered with an error. `retry_after_seconds` is wall time."""

    def __init__(
        self,
        status: HTTPStatus,
        detail: str,
        *,
        violations: tuple[Violation, ...] = (),
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.violations = violations
        self.retry_after_seconds = retry_after_seconds


def invalid(detail: str, *violations: Violation) -> Problem:
    """Return the problem of a request with invalid fields."""
    return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, detail, violations=violations)


class ProblemDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of every error."""

    title: str
    status: int
    detail: str
    type: str = "about:blank"
    instance: str = ""  # path of the request
    violations: tuple[Violation, ...] = ()  # invalid fields with reasons


def problem_response(problem: Problem, path: str) -> web.Response:
    """Return the error as a response."""
    document = ProblemDocument(
        title=problem.status.phrase,
        status=problem.status.value,
        detail=problem.detail,
        instance=path,
        violations=problem.violations,
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
