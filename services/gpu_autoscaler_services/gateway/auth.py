"""Authentication and authorization. Without an authenticator the gateway listens on loopback only."""

import hmac
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gpu_autoscaler.model.errors import ConfigError, PermanentError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.config import is_loopback
from gpu_autoscaler_services.gateway.problems import Problem
from gpu_autoscaler_services.gateway.routes import is_text

REVIEW_SECONDS_MAX = 60.0  # cache time of a token review; Kubernetes' own webhook cache keeps 2 minutes
REVIEWS_COUNT_MAX = 1000
READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
TOKEN_LENGTH_MIN = 16
CALLER: web.RequestKey[str] = web.RequestKey("caller", str)  # name of the authenticated caller
# The user, or the shared token: bearers of several shared tokens have one name.
CALLER_ID: web.RequestKey[str] = web.RequestKey("caller_id", str)


class Caller(msgspec.Struct, frozen=True):
    """An authenticated caller."""

    name: str
    may_write: bool
    token_number: int = 0  # of a shared token, from 1; 0: the caller has a name of its own


class Authenticator(Protocol):
    """Identifies the owner of a token."""

    async def caller(self, token: str) -> Caller | None:
        """Return the token's owner; None for an unknown token. Raises TransientError if the check fails now."""
        ...


class SharedTokens:
    """Tokens from the settings, compared in constant time. Their bearers may read and write."""

    def __init__(self, tokens: Sequence[str]) -> None:
        short = sum(len(token) < TOKEN_LENGTH_MIN for token in tokens)
        if short:
            raise ConfigError(
                "gateway", [f"tokens: {short} token(s) shorter than {TOKEN_LENGTH_MIN} characters; use longer ones"]
            )
        self._tokens = tuple(token.encode() for token in tokens)

    async def caller(self, token: str) -> Caller | None:
        """Return the bearer. Every token is compared, so that timing reveals nothing."""
        matches = [hmac.compare_digest(known, token.encode()) for known in self._tokens]
        if not any(matches):
            return None
        return Caller("bearer of a token", may_write=True, token_number=matches.index(True) + 1)


class KubernetesReviews(Protocol):
    """The Kubernetes client call that token reviews need."""

    async def create(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """POST an object and return the answer. Raises TransientError if the API server is unreachable."""
        ...


class TokenReviews:
    """Asks Kubernetes who owns a token, and whether the owner may get and create `jobs.gpu-autoscaler.io`.

    Source: Kubernetes API reference, "TokenReview v1" and "SubjectAccessReview v1" (read 2026-11-21).
    """

    def __init__(self, kubernetes: KubernetesReviews) -> None:
        self._kubernetes = kubernetes
        self._known: OrderedDict[str, tuple[float, Caller | None]] = OrderedDict()

    async def caller(self, token: str) -> Caller | None:
        """Return the token's owner, cached for a minute."""
        now = Clock.monotonic_seconds()
        reviewed_at, caller = self._known.get(token, (float("-inf"), None))
        if now - reviewed_at > REVIEW_SECONDS_MAX:
            caller = await self._review(token)
            self._known[token] = (now, caller)
            self._known.move_to_end(token)
            if len(self._known) > REVIEWS_COUNT_MAX:
                self._known.popitem(last=False)
        return caller

    async def _review(self, token: str) -> Caller | None:
        review = await self._kubernetes.create(
            "/apis/authentication.k8s.io/v1/tokenreviews",
            {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}},
        )
        status = review.get("status", {})
        if not status.get("authenticated", False):
            return None
        user = status.get("user", {})
        if not await self._may(user, "get"):
            return None
        return Caller(str(user.get("username", "")), may_write=await self._may(user, "create"))

    async def _may(self, user: Mapping[str, Any], verb: str) -> bool:
        review = await self._kubernetes.create(
            "/apis/authorization.k8s.io/v1/subjectaccessreviews",
            {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "spec": {
                    "user": user.get("username", ""),
                    "groups": user.get("groups", []),
                    "resourceAttributes": {"group": "gpu-autoscaler.io", "resource": "jobs", "verb": verb},
                },
            },
        )
        return bool(review.get("status", {}).get("allowed", False))


def guard(authenticators: Sequence[Authenticator], *, open_paths: frozenset[str]) -> Middleware:
    """Return a middleware that authenticates callers; `open_paths` need no token (the page itself).

    Without authenticators the gateway is reachable from this machine only, and requests for a foreign host name are
    refused, so that a web page elsewhere cannot reach it (DNS rebinding).
    """

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not authenticators:
            if not _is_own_name(request.host):
                detail = f"host {request.host!r} is not local; without tokens the gateway serves its own machine only"
                raise Problem(HTTPStatus.MISDIRECTED_REQUEST, detail)
            return await handler(request)
        if request.path in open_paths:
            return await handler(request)
        caller = await _caller(request, authenticators)
        if request.method not in READING_METHODS and not caller.may_write:
            raise Problem(
                HTTPStatus.FORBIDDEN,
                f"{caller.name} has read access only; grant the verb create on jobs.gpu-autoscaler.io",
            )
        request[CALLER] = caller.name
        request[CALLER_ID] = f"{caller.name} {caller.token_number}" if caller.token_number else caller.name
        return await handler(request)

    return guarded


def _is_own_name(host: str) -> bool:
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:  # brackets that do not close
        return False


async def _caller(request: web.Request, authenticators: Sequence[Authenticator]) -> Caller:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip() or not is_text(token):
        raise Problem(HTTPStatus.UNAUTHORIZED, "send the header `Authorization: Bearer <token>`")
    for authenticator in authenticators:
        try:
            caller = await authenticator.caller(token.strip())
        except PermanentError as error:  # the gateway's own rights, not the request
            detail = f"the token cannot be checked: {error}"
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, detail, retry_after_seconds=REVIEW_SECONDS_MAX) from error
        if caller is not None:
            return caller
    raise Problem(
        HTTPStatus.UNAUTHORIZED, "unknown or expired token, or its owner lacks the verb get on jobs.gpu-autoscaler.io"
    )
