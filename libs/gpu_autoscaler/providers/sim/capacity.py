"""Driver of the simulated cluster's capacity API over HTTP."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, TypeVar

import aiohttp
import msgspec
from msgspec import Meta

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.providers.protocol import Instance, LaunchRefused, Order, RefusalKind, RefusalScope

PROVIDER_ID_PREFIX = "sim:///"
CALL_SECONDS_MAX = 30.0
ANSWER_BYTES_MAX = 64 * 2**20  # a thousand instance types in three zones stay below 1 MB

T = TypeVar("T")


class GroupOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Orders that are launched all or none."""

    transaction: ActionId
    orders: Annotated[tuple[Order, ...], Meta(min_length=1)]


class _Error(msgspec.Struct, frozen=True):
    code: str
    message: str
    scope: RefusalScope = "offer"
    kind: RefusalKind = "capacity"
    retry_after_seconds: float = 180.0


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Error


class SimCapacity:
    """The capacity API at `url`, for `installation` only: the cloud refuses instances of others."""

    name = "sim"

    def __init__(self, url: str, *, installation: str, call_seconds_max: float = CALL_SECONDS_MAX) -> None:
        self._url = url.rstrip("/")
        self._installation = installation
        self._timeout = aiohttp.ClientTimeout(total=call_seconds_max)
        self._session: aiohttp.ClientSession | None = None

    async def offers(self) -> Sequence[Offer]:
        return _decoded(await self._call("GET", "/cloud/offers"), tuple[Offer, ...])

    async def launch(self, order: Order) -> Instance:
        return _decoded(await self._call("POST", "/cloud/instances", body=msgspec.json.encode(order)), Instance)

    def can_launch_group(self, pool: str, offer: Offer) -> bool:  # noqa: ARG002 - the same for all
        return True

    async def launch_group(self, transaction: ActionId, orders: Sequence[Order]) -> Sequence[Instance]:
        body = msgspec.json.encode(GroupOrder(transaction=transaction, orders=tuple(orders)))
        return _decoded(await self._call("POST", "/cloud/instances/together", body=body), tuple[Instance, ...])

    async def terminate(self, provider_id: ProviderId, *, now: datetime) -> Instance | None:  # noqa: ARG002 - the cloud dates it
        return await self._one("DELETE", provider_id)

    async def instance(self, provider_id: ProviderId) -> Instance | None:
        """Return the instance; None if it never existed. Raises PermanentError if it is not ours, TransientError."""
        return await self._one("GET", provider_id)

    async def _one(self, method: str, provider_id: ProviderId) -> Instance | None:
        if not provider_id.startswith(PROVIDER_ID_PREFIX):
            raise PermanentError(f"{provider_id} is not an instance of {PROVIDER_ID_PREFIX}...: left untouched")
        path = f"/cloud/instances/{provider_id.rpartition('/')[2]}"
        answer = await self._call(method, path, query={"installation": self._installation}, missing_is_answer=True)
        return None if answer is None else _decoded(answer, Instance)

    async def instances(self, installation: str) -> Sequence[Instance]:
        answer = await self._call("GET", "/cloud/instances", query={"installation": installation})
        return _decoded(answer, tuple[Instance, ...])

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        query: Mapping[str, str] | None = None,
        missing_is_answer: bool = False,
    ) -> bytes | None:
        """Return the answer's body; None for 404 if that is an answer. Raises what the protocol allows."""
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(timeout=self._timeout)
        try:
            async with self._session.request(method, self._url + path, data=body, params=query) as answer:
                content = await answer.read()
                retry_after = answer.headers.get("Retry-After", "")
        except (aiohttp.ClientError, TimeoutError) as exc:
            why = str(exc) or f"no answer within {self._timeout.total:g} s"
            raise TransientError(f"{method} {self._url}{path}: {why}; safe to retry") from exc
        if answer.status == 200:
            return content
        if answer.status == 404 and missing_is_answer:
            return None
        raise _error(f"{method} {path}", answer.status, content, retry_after)


def _decoded(content: bytes | None, wanted: type[T]) -> T:
    try:
        return msgspec.json.decode(content or b"", type=wanted)
    except msgspec.DecodeError as exc:
        raise TransientError(f"answer cannot be decoded: {exc}; the next call shows what was executed") from exc


def _error(call: str, status: int, content: bytes, retry_after: str) -> Exception:
    if status == 429 or status >= 500:
        wait_seconds = float(retry_after) if retry_after.isdigit() else None
        return TransientError(f"{call}: HTTP {status}, retried", retry_after_seconds=wait_seconds)
    try:
        error = msgspec.json.decode(content, type=_ErrorBody).error
    except msgspec.DecodeError:
        return PermanentError(f"{call}: HTTP {status} {content[:200]!r}; check the URL of simcluster")
    if status == 409:
        return LaunchRefused(
            error.message,
            code=error.code,
            kind=error.kind,
            scope=error.scope,
            retry_after_seconds=error.retry_after_seconds,
        )
    return PermanentError(f"{call}: {error.code}: {error.message}")
