"""Who may ask the gateway what. Without a way to know its callers the gateway listens on loopback only."""

import hmac
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.config import is_loopback
from gpu_autoscaler_services.gateway.problems import Problem
from gpu_autoscaler_services.gateway.routes import is_text

REVIEW_SECONDS_MAX = 60.0  # a token's review is believed this long; Kubernetes' own webhook cache keeps 2 minutes
REVIEWS_COUNT_MAX = 1000
READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
TOKEN_LENGTH_MIN = 16
CALLER: web.RequestKey[str] = web.RequestKey("caller", str)  # who asks


class Caller(msgspec.Struct, frozen=True):
    """Somebody who was let in."""

    name: str
    may_write: bool


class Authenticator(Protocol):
    """Tells who a token belongs to."""

    async def caller(self, token: str) -> Caller | None:
        """The token's owner; None for a token that nobody knows. Raises TransientError when it cannot be told now."""
        ...


class SharedTokens:
    """Tokens from the settings, compared in constant time. Their bearers may do everything."""

    def __init__(self, tokens: Sequence[str]) -> None:
        short = sum(len(token) < TOKEN_LENGTH_MIN for token in tokens)
        if short:
            raise ConfigError(
                "gateway", [f"tokens: {short} of them shorter than {TOKEN_LENGTH_MIN} characters; make longer ones"]
            )
        self._tokens = tuple(token.encode() for token in tokens)

    async def caller(self, token: str) -> Caller | None:
        """The bearer. Every token is compared, so that time says nothing about which one was near."""
        found = [hmac.compare_digest(known, token.encode()) for known in self._tokens]
        return Caller("bearer of a token", may_write=True) if any(found) else None


class KubernetesReviews(Protocol):
    """The one call that reviewing needs of a Kubernetes client."""

    async def create(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """POST an object and return the server's answer. Raises TransientError when the server is away."""
        ...


class TokenReviews:
    """Asks Kubernetes whose token it is, and whether its owner may create `jobs.gpu-autoscaler.io`.

    Source: Kubernetes API reference, "TokenReview v1" and "SubjectAccessReview v1" (read 2026-11-21).
    """

    def __init__(self, kubernetes: KubernetesReviews) -> None:
        self._kubernetes = kubernetes
        self._known: OrderedDict[str, tuple[float, Caller | None]] = OrderedDict()

    async def caller(self, token: str) -> Caller | None:
        """The token's owner, from memory for a minute, then from Kubernetes again."""
        now = Clock.monotonic_seconds()
        asked_at, caller = self._known.get(token, (float("-inf"), None))
        if now - asked_at > REVIEW_SECONDS_MAX:
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
    """A middleware that lets callers in by their token; `open_paths` hold nothing of the cluster (the page itself).

    Without authenticators only this machine reaches the gateway; then a name that is not this machine's is refused, so
    that a web page elsewhere cannot reach it through a name of its own (DNS rebinding).
    """

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not authenticators:
            if not _is_own_name(request.host):
                detail = f"this gateway serves its own machine only; {request.host!r} is not one of its names"
                raise Problem(HTTPStatus.MISDIRECTED_REQUEST, detail)
            return await handler(request)
        if request.path in open_paths:
            return await handler(request)
        caller = await _caller(request, authenticators)
        if request.method not in READING_METHODS and not caller.may_write:
            raise Problem(HTTPStatus.FORBIDDEN, f"{caller.name} may read, but not submit or cancel jobs")
        request[CALLER] = caller.name
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
        if (caller := await authenticator.caller(token.strip())) is not None:
            return caller
    raise Problem(HTTPStatus.UNAUTHORIZED, "this token is not known here, or no longer")
