"""JSON calls to clouds with REST APIs, each with a time limit, a bearer token and an API rate limit.

Temporary failures raise TransientError here; the driver interprets every other answer, including refusals. There are
no retries here: the caller retries with the same name or token.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import msgspec

from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.providers.throttling import NotSent, RateLimit

ANSWER_BYTES_MAX = 64 * 2**20  # a page of 2,000 instances stays below 16 MB
ERROR_TEXT_LENGTH_MAX = 300
RETRY_AFTER_SECONDS_MAX = 600.0

Token = Callable[[], Awaitable[str]]  # returns a valid bearer token; raises TransientError


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The cloud's answer: a success, or a refusal that persists until something changes."""

    status: int
    body: Any  # decoded JSON; {} if empty; {"text": ...} if it is not JSON
    headers: Mapping[str, str]  # names in lower case

    @property
    def is_success(self) -> bool:
        """True if the cloud executed the request or began to."""
        return self.status < 300


def _by_status(answer: Answer) -> bool:
    return answer.status == 429


class RestClient:
    """One connection pool for one cloud. `is_throttled` recognizes the cloud's own forms of throttling."""

    def __init__(
        self, token: Token | None, *, call_seconds_max: float, is_throttled: Callable[[Answer], bool] = _by_status
    ) -> None:
        """Without `token` calls are anonymous, for public data."""
        self._token = token
        self._call_seconds_max = call_seconds_max
        self._is_throttled = is_throttled
        self._session: aiohttp.ClientSession | None = None
        self.cloud_ahead: timedelta | None = None  # of this machine's clock, by the last answer; precision 1 s

    async def call(
        self,
        operation: str,
        method: str,
        url: str,
        *,
        rate_limit: RateLimit,
        query: Mapping[str, str] | None = None,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Return an answer of any status below 500. Raises TransientError for no answer or a failing cloud; NotSent if
        nothing was executed: unreachable or throttled.

        `operation` names the call in errors. The time limit covers token, request and answer.
        """
        await rate_limit.take(operation)
        try:
            async with asyncio.timeout(self._call_seconds_max):
                answer = await self._exchange(method, url, query, body, headers or {})
        except aiohttp.ClientConnectorError as exc:
            raise NotSent(f"{operation}: {exc}; safe to retry") from exc
        except (aiohttp.ClientError, TimeoutError) as exc:
            why = str(exc) or f"no answer within {self._call_seconds_max:g} s"
            raise TransientError(f"{operation}: {why}; safe to retry") from exc
        if "date" in answer.headers:
            self.cloud_ahead = parsedate_to_datetime(answer.headers["date"]) - datetime.now(UTC)
        if self._is_throttled(answer):
            rate_limit.throttled()
            raise NotSent(f"{operation}: throttled: {error_text(answer)}", retry_after_seconds=_retry_after(answer))
        if answer.status >= 500:
            raise TransientError(
                f"{operation}: HTTP {answer.status}: {error_text(answer)}; safe to retry",
                retry_after_seconds=_retry_after(answer),
            )
        rate_limit.succeeded()
        return answer

    async def close(self) -> None:
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
            content_read = bytearray()
            async for chunk in answer.content.iter_any():
                content_read += chunk
                if len(content_read) > ANSWER_BYTES_MAX:
                    raise TransientError(f"{method} {url}: answer exceeds {ANSWER_BYTES_MAX} bytes; check the URL")
            names = {name.lower(): value for name, value in answer.headers.items()}
            return Answer(status=answer.status, body=_decoded(bytes(content_read), answer.status), headers=names)


def error_text(answer: Answer) -> str:
    """Return the cloud's own message where REST APIs put it, else the start of the body."""
    error = answer.body.get("error", answer.body) if isinstance(answer.body, dict) else answer.body
    message = error.get("message", error.get("text")) if isinstance(error, dict) else None
    text = str(message) if message else msgspec.json.encode(error).decode()
    return text[:ERROR_TEXT_LENGTH_MAX]


def _decoded(content: bytes, status: int) -> Any:  # noqa: ANN401 - each cloud has its own shapes
    if not content:
        return {}
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError as exc:
        if status >= 300:
            return {"text": content.decode("utf-8", errors="replace")}
        raise TransientError(f"answer cannot be decoded: {exc}; the next call shows what was executed") from exc


def _retry_after(answer: Answer) -> float | None:
    """Return the cloud's wait; dates, which HTTP allows too, are left to our own pace."""
    header = answer.headers.get("retry-after", "")
    return min(float(header), RETRY_AFTER_SECONDS_MAX) if header.isdigit() else None
