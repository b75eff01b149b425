"""JSON calls of clouds that are spoken to by REST: a time limit, a bearer token and a place in a budget for each.

What stands in the way for a while is a TransientError here; every other answer, a refusal too, is the driver's to read.
Retries are not made here: whoever asks asks again, under the same name or token.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import msgspec

from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.providers.pacing import NotSent, RateLimit

ANSWER_BYTES_MAX = 64 * 2**20  # a page of two thousand instances stays below 16 MB
SAID_LENGTH_MAX = 300
RETRY_AFTER_SECONDS_MAX = 600.0

Token = Callable[[], Awaitable[str]]  # a bearer token that is still good; raises TransientError


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the cloud said: success, or a refusal that it will repeat until something is changed."""

    status: int
    body: Any  # decoded JSON; {} for an empty answer, and for text that is no JSON {"text": ...}
    headers: Mapping[str, str]  # names in lower case

    @property
    def is_success(self) -> bool:
        """True when it did what it was asked for, or has begun to."""
        return self.status < 300


def _by_status(answer: Answer) -> bool:
    return answer.status == 429


class RestClient:
    """One connection pool for one cloud. `is_throttled` knows the cloud's own ways of saying "too often"."""

    def __init__(
        self,
        token: Token | None,
        *,
        call_seconds_max: float,
        is_throttled: Callable[[Answer], bool] = _by_status,
    ) -> None:
        """Without `token` it asks as nobody, of what anybody may read."""
        self._token = token
        self._call_seconds_max = call_seconds_max
        self._is_throttled = is_throttled
        self._session: aiohttp.ClientSession | None = None
        self.cloud_ahead: timedelta | None = None  # of this machine's clock, by the last answer; to a second

    async def call(
        self,
        operation: str,
        method: str,
        url: str,
        *,
        budget: RateLimit,
        query: Mapping[str, str] | None = None,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Return the answer of any status below 500. Raises TransientError: no answer, or a broken cloud; of these
        NotSent where nothing can have been done: nobody there, or throttled.

        `operation` is what the call is called in errors. The limit of time holds for token, request and answer.
        """
        await budget.take(operation)
        try:
            async with asyncio.timeout(self._call_seconds_max):
                answer = await self._exchange(method, url, query, body, headers or {})
        except aiohttp.ClientConnectorError as exc:
            raise NotSent(f"{operation}: {exc}; the same call may be made again") from exc
        except (aiohttp.ClientError, TimeoutError) as exc:
            why = str(exc) or f"no answer within {self._call_seconds_max:g} s"
            raise TransientError(f"{operation}: {why}; the same call may be made again") from exc
        if "date" in answer.headers:
            self.cloud_ahead = parsedate_to_datetime(answer.headers["date"]) - datetime.now(UTC)
        if self._is_throttled(answer):
            budget.throttled()
            raise NotSent(f"{operation}: too often: {said(answer)}", retry_after_seconds=_retry_after(answer))
        if answer.status >= 500:
            raise TransientError(
                f"{operation}: HTTP {answer.status}: {said(answer)}; the same call may be made again",
                retry_after_seconds=_retry_after(answer),
            )
        budget.succeeded()
        return answer

    async def close(self) -> None:
        """Give back connections."""
        if self._session is not None:
            await self._session.close()

    async def _exchange(
        self, method: str, url: str, query: Mapping[str, str] | None, body: object, headers: Mapping[str, str]
    ) -> Answer:
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession()
        sent = {"Accept": "application/json", **headers}
        if self._token is not None:
            sent["Authorization"] = f"Bearer {await self._token()}"
        content = None
        if body is not None:
            content = msgspec.json.encode(body)
            sent["Content-Type"] = "application/json"
        async with self._session.request(
            method, url, params=query, data=content, headers=sent, allow_redirects=False
        ) as answer:
            read = bytearray()
            async for chunk in answer.content.iter_any():
                read += chunk
                if len(read) > ANSWER_BYTES_MAX:
                    raise TransientError(f"{method} {url}: more than {ANSWER_BYTES_MAX} bytes; is it the cloud's API?")
            names = {name.lower(): value for name, value in answer.headers.items()}
            return Answer(status=answer.status, body=_decoded(bytes(read), answer.status), headers=names)


def said(answer: Answer) -> str:
    """Return the cloud's own message where REST APIs put one, else the start of the body, for people."""
    error = answer.body.get("error", answer.body) if isinstance(answer.body, dict) else answer.body
    message = error.get("message", error.get("text")) if isinstance(error, dict) else None
    text = str(message) if message else msgspec.json.encode(error).decode()
    return text[:SAID_LENGTH_MAX]


def _decoded(content: bytes, status: int) -> Any:  # noqa: ANN401 - each cloud's own shapes
    if not content:
        return {}
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError as exc:
        if status >= 300:
            return {"text": content.decode("utf-8", errors="replace")}
        raise TransientError(f"the answer cannot be read: {exc}; what was done is seen with the next call") from exc


def _retry_after(answer: Answer) -> float | None:
    """Return what the cloud asks for; a date, which HTTP allows as well, is left to our own pace."""
    told = answer.headers.get("retry-after", "")
    return min(float(told), RETRY_AFTER_SECONDS_MAX) if told.isdigit() else None
