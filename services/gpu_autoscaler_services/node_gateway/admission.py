"""Who a node watcher is: the instance of the node that its pod runs on, as the API server says."""

import asyncio
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, Protocol

import msgspec
import structlog

from gpu_autoscaler.bus.nats.auth_callout import Issuer, Login, read_login
from gpu_autoscaler.bus.nats.requests import Request
from gpu_autoscaler.bus.permissions import CALLOUT_SECONDS_MAX, of_requester
from gpu_autoscaler.cloudmeta.reports import instance_token, report_subject, watcher_inbox
from gpu_autoscaler.kube.protocol import NODES, Kind, NotFound, ObjectT
from gpu_autoscaler.model.errors import AutoscalerError, InvalidFact, PermanentError, TransientError
from gpu_autoscaler.model.ids import ProviderId

AUDIENCE = "nats.gpu-autoscaler.io"  # of the projected token: one for the API server, or for others, is refused
TOKEN_LENGTH_MAX = 16 * 1024
# Each login ends within this time, and the next one asks the API server again. Shortened at random, so that watchers
# that came together do not return together.
LOGIN_LIFE = timedelta(minutes=30)
LOGIN_LIFE_SHARE_MIN = 0.5
LOGINS_AT_ONCE_MAX = 16  # calls of the API server
LOGINS_WAITING_MAX = 4096
_EXTRA = "authentication.kubernetes.io/"

log = structlog.get_logger()


class KubernetesApi(Protocol):
    """The Kubernetes calls that a login needs."""

    async def create(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """POST an object and return the answer. Raises TransientError, PermanentError."""

    async def get(self, kind: Kind[ObjectT], namespace: str, name: str) -> ObjectT:
        """Return an object. Raises NotFound, TransientError, PermanentError."""


class _User(msgspec.Struct):
    username: str = ""
    extra: dict[str, list[str]] = {}


class _Review(msgspec.Struct):
    authenticated: bool = False
    error: str = ""
    audiences: list[str] = []
    user: _User = msgspec.field(default_factory=_User)


class Admission:
    """Finds the instance of a watcher by its service-account token, which is bound to its pod.

    Source: Kubernetes documentation, "Managing Service Accounts", section "Bound service account tokens", and API
    reference, "TokenReview v1" (read 2026-11-23).
    """

    def __init__(self, kubernetes: KubernetesApi, *, account: str) -> None:
        """`account`: the user name of the watchers' service account, system:serviceaccount:<namespace>:<name>."""
        self._kubernetes = kubernetes
        self._account = account

    async def instance_of(self, token: str) -> ProviderId:
        """Return the instance that the bearer may report about.

        Raises PermanentError for anybody who is no watcher, TransientError if the API server does not answer.
        """
        if not 0 < len(token) <= TOKEN_LENGTH_MAX:
            raise PermanentError("no service-account token was sent; mount a projected one and set nats.token_path")
        user = await self._reviewed(token)
        name, uid = (_one(user.extra, f"{_EXTRA}{key}") for key in ("node-name", "node-uid"))
        if name is None or _one(user.extra, f"{_EXTRA}pod-uid") is None:
            raise PermanentError("the token is not bound to a pod on a node; Kubernetes 1.32 or later is required")
        try:
            node = await self._kubernetes.get(NODES, "", name)
        except NotFound as exc:
            raise PermanentError(f"node {name} of the token's pod does not exist") from exc
        if uid is not None and uid != node.metadata.uid:
            raise PermanentError(f"the token's pod ran on an earlier node of the name {name}")
        if not node.spec.provider_id:
            raise TransientError(f"node {name} has no providerID yet; its cloud controller sets it")
        return ProviderId(node.spec.provider_id)

    async def _reviewed(self, token: str) -> _User:
        answer = await self._kubernetes.create(
            "/apis/authentication.k8s.io/v1/tokenreviews",
            {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenReview",
                "spec": {"token": token, "audiences": [AUDIENCE]},
            },
        )
        try:
            review = msgspec.convert(answer.get("status", {}), _Review)
        except msgspec.ValidationError as exc:
            raise TransientError(f"TokenReview of the API server is not readable: {exc}") from exc
        # A server that ignores audiences answers without them.
        if not review.authenticated or AUDIENCE not in review.audiences:
            raise PermanentError(f"token refused by the API server: {review.error or 'not for this audience'}")
        if review.user.username != self._account:
            raise PermanentError(f"{review.user.username} is not the watchers' account {self._account}")
        return review.user


def _one(extra: Mapping[str, list[str]], key: str) -> str | None:
    values = extra.get(key, [])
    return values[0] if len(values) == 1 else None


class Callout:
    """Answers the broker's questions about logins, a few at a time. What waits longer than the broker does is dropped:
    the watcher tries again."""

    def __init__(
        self,
        admission: Admission,
        issuer: Issuer,
        *,
        wall_now: Callable[[], datetime],
        life_share: Callable[[], float],
        on_outcome: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`life_share`: the share of LOGIN_LIFE that the next login gets. `on_outcome`: accepted, refused, failed."""
        self._admission = admission
        self._issuer = issuer
        self._wall_now = wall_now
        self._life_share = life_share
        self._on_outcome = on_outcome
        self._waiting: asyncio.Queue[tuple[float, Request]] = asyncio.Queue(LOGINS_WAITING_MAX)

    def receive(self, request: Request) -> None:
        """Store a question; drop it if too many wait."""
        try:
            self._waiting.put_nowait((asyncio.get_running_loop().time(), request))
        except asyncio.QueueFull:
            self._on_outcome("dropped")

    async def run(self) -> None:
        """Answer until canceled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(LOGINS_AT_ONCE_MAX):
                group.create_task(self._answer_all())

    async def _answer_all(self) -> None:
        while True:
            received_at, request = await self._waiting.get()
            if asyncio.get_running_loop().time() - received_at >= CALLOUT_SECONDS_MAX:
                self._on_outcome("dropped")
                continue
            try:
                await request.answer(await self._answer(read_login(request.payload)))
            except InvalidFact as exc:
                log.error("login not answered", error=str(exc))  # noqa: TRY400 - a broker that asks otherwise, no bug
                self._on_outcome("failed")
            except Exception:  # the next login may work
                log.exception("login failed")
                self._on_outcome("failed")

    async def _answer(self, login: Login) -> bytes:
        try:
            provider_id = await self._admission.instance_of(login.token)
        except AutoscalerError as exc:
            is_failure = isinstance(exc, TransientError)
            log.warning("login refused", host=login.host, user=login.user, reason=str(exc), is_temporary=is_failure)
            self._on_outcome("failed" if is_failure else "refused")
            return self._issuer.refuse(login, reason=str(exc), at=self._wall_now())
        self._on_outcome("accepted")
        now = self._wall_now()
        return self._issuer.accept(
            login,
            name=instance_token(provider_id),
            permissions=of_requester(report_subject(provider_id), inbox=watcher_inbox(provider_id)),
            at=now,
            ends_at=now + LOGIN_LIFE * self._life_share(),
        )
