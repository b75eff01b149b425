"""Authentication: who the caller is. Without an authenticator the gateway listens on loopback only."""

import asyncio
import hmac
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gpu_autoscaler.model.errors import ConfigError, PermanentError, TransientError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.config import is_loopback
from gpu_autoscaler_services.gateway.access import (
    ACCESS,
    REVIEWS_AT_ONCE_MAX,
    Access,
    AccessRules,
    Caller,
    KubernetesReviews,
)
from gpu_autoscaler_services.gateway.audit import rest_entry_point
from gpu_autoscaler_services.gateway.problems import Problem, unauthorized
from gpu_autoscaler_services.gateway.routes import is_text

REVIEW_SECONDS_MAX = 60.0  # cache time of a token review; Kubernetes' own webhook cache keeps 2 minutes
REVIEWS_COUNT_MAX = 1000
TOKEN_LENGTH_MIN = 16
TOKEN_AUDIENCE = "gpu-autoscaler.io"  # noqa: S105 - no secret; of projected tokens; one for the API server would be valid there as well
SHARED_NAME = "bearer of a token"


class Authenticator(Protocol):
    """Identifies the owner of a token."""

    async def caller(self, token: str) -> Caller | None:
        """Return the token's owner; None for an unknown token. Raises TransientError if the check fails now."""


class SharedTokens:
    """Tokens from the settings, compared in constant time. Their bearers have all rights."""

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
        return Caller(
            name=SHARED_NAME, has_all_rights=True, authentication="shared token", token_number=matches.index(True) + 1
        )


class _User(msgspec.Struct):
    username: str = ""
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: dict[str, tuple[str, ...]] = {}


class _Review(msgspec.Struct):
    authenticated: bool = False
    audiences: tuple[str, ...] = ()
    user: _User = msgspec.field(default_factory=_User)


class TokenReviews:
    """Asks Kubernetes who owns a token: one for our audience, or, if accepted, one for the API server.

    Source: Kubernetes API reference, "TokenReview v1" (read 2026-11-21).
    """

    def __init__(
        self, kubernetes: KubernetesReviews, *, audience: str = TOKEN_AUDIENCE, is_cluster_token_accepted: bool = True
    ) -> None:
        """`is_cluster_token_accepted`: also tokens for the API server, which whoever sees them can use there."""
        self._kubernetes = kubernetes
        self._audience = audience
        self._is_cluster_token_accepted = is_cluster_token_accepted
        self._known: OrderedDict[str, tuple[float, Caller | None]] = OrderedDict()
        self._turns = asyncio.Semaphore(REVIEWS_AT_ONCE_MAX)

    async def caller(self, token: str) -> Caller | None:
        """Return the token's owner, cached for a minute."""
        now = Clock.monotonic_seconds()
        reviewed_at, caller = self._known.get(token, (float("-inf"), None))
        if now - reviewed_at > REVIEW_SECONDS_MAX:
            async with self._turns:
                caller = await self._review(token)
            self._known[token] = (now, caller)
            self._known.move_to_end(token)
            if len(self._known) > REVIEWS_COUNT_MAX:
                self._known.popitem(last=False)
        return caller

    async def _review(self, token: str) -> Caller | None:
        review = await self._reviewed({"token": token, "audiences": [self._audience]})
        # A server that ignores audiences answers without them.
        is_ours = review.authenticated and self._audience in review.audiences
        if not is_ours and self._is_cluster_token_accepted:
            review = await self._reviewed({"token": token})
            is_ours = review.authenticated
        user = review.user
        if not is_ours or not user.username:
            return None
        return Caller(
            name=user.username, groups=user.groups, uid=user.uid, extra=user.extra, authentication="kubernetes"
        )

    async def _reviewed(self, spec: Mapping[str, Any]) -> _Review:
        answer = await self._kubernetes.create(
            "/apis/authentication.k8s.io/v1/tokenreviews",
            {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec},
        )
        try:
            return msgspec.convert(answer.get("status", {}), _Review)
        except msgspec.ValidationError as exc:
            raise TransientError(f"TokenReview of the API server is not readable: {exc}") from exc


def guard(authenticators: Sequence[Authenticator], rules: AccessRules, *, open_paths: frozenset[str]) -> Middleware:
    """Return a middleware that authenticates callers; `open_paths` need no token (the page itself).

    Without authenticators the gateway is reachable from this machine only, and requests for a foreign host name are
    refused, so that a web page elsewhere cannot reach it (DNS rebinding). What a caller may do, each route checks.
    """

    def access_of(request: web.Request, caller: Caller | None) -> Access:
        entry_point, agent = rest_entry_point(request)
        return Access(caller, rules, entry_point=entry_point, agent=agent)

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not authenticators:
            if not _is_own_name(request.host):
                detail = f"host {request.host!r} is not local; without tokens the gateway serves its own machine only"
                raise Problem(HTTPStatus.MISDIRECTED_REQUEST, detail)
            request[ACCESS] = access_of(request, None)
        elif request.path not in open_paths:
            request[ACCESS] = access_of(request, await _caller(request, authenticators))
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
        raise unauthorized("send the header `Authorization: Bearer <token>`")
    for authenticator in authenticators:
        try:
            caller = await authenticator.caller(token.strip())
        except PermanentError as error:  # the gateway's own rights, not the request
            detail = f"the token cannot be checked: {error}"
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, detail, retry_after_seconds=REVIEW_SECONDS_MAX) from error
        if caller is not None:
            return caller
    raise unauthorized("unknown or expired token")
