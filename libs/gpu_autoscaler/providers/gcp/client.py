"""Google Cloud calls by REST, with google-auth's credentials, which are refreshed in a thread."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

from gpu_autoscaler.model.errors import ConfigError, PermanentError, TransientError
from gpu_autoscaler.providers.gcp.permissions import CALLS, RateLimitName
from gpu_autoscaler.providers.gcp.translate import failure, is_throttled
from gpu_autoscaler.providers.rest import Answer, RestClient
from gpu_autoscaler.providers.throttling import BoundedCalls, rate_limits

PAGES_MAX = 1000
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
BASE_URLS = {
    "compute": "https://compute.googleapis.com",
    "cloudbilling": "https://cloudbilling.googleapis.com",
    "cloudresourcemanager": "https://cloudresourcemanager.googleapis.com",
}
PREFIXES = {"compute": "compute/v1", "cloudbilling": "v1", "cloudresourcemanager": "v3"}
# Part of the project's limits, to leave capacity for others: 1,500 reads and 750 changes per minute and region (25 and
# 12 per second; Compute Engine, "API rate limits", not looked up again).
RATES: Mapping[RateLimitName, tuple[float, int]] = {"reads": (12.0, 60), "launches": (5.0, 20), "ends": (5.0, 50)}


class GoogleToken:
    """Bearer tokens of the credentials that google-auth finds; renewed before they expire and when refused."""

    def __init__(self, call_seconds_max: float) -> None:
        """Raises ConfigError if google-auth is not installed."""
        if find_spec("google") is None or find_spec("google.auth") is None:
            raise ConfigError("provider gcp", ["google-auth: is not installed; install gpu-autoscaler[gcp]"])
        self._threads = BoundedCalls("gcp-token", threads_count=1, call_seconds_max=call_seconds_max)
        self._credentials: Any = None
        self._lock = asyncio.Lock()

    async def __call__(self) -> str:
        """Return a valid token. Raises TransientError."""
        async with self._lock:
            if self._credentials is None or not self._credentials.valid:
                self._credentials = await self._threads.run("credentials", self._refresh)
            return str(self._credentials.token)

    def invalidate(self) -> None:
        self._credentials = None

    def close(self) -> None:
        self._threads.close()

    def _refresh(self) -> Any:  # noqa: ANN401 - google-auth ships no types for what it finds
        import google.auth  # noqa: PLC0415 - an extra, and slow to load
        from google.auth.exceptions import GoogleAuthError  # noqa: PLC0415 - as google.auth
        from google.auth.transport.requests import Request  # noqa: PLC0415 - as google.auth

        try:
            credentials = self._credentials
            if credentials is None:
                credentials, _ = google.auth.default(scopes=[SCOPE])
            credentials.refresh(Request())
        except GoogleAuthError as exc:
            raise TransientError(
                f"credential refresh failed: {exc}; use Workload Identity, or set GOOGLE_APPLICATION_CREDENTIALS"
            ) from exc
        return credentials


def _body(operation: str, answer: Answer) -> Mapping[str, Any]:
    """Return what the answer describes. Raises the refusal."""
    if not answer.is_success:
        raise failure(operation, answer)
    body: Mapping[str, Any] = answer.body
    return body


async def _fake_token() -> str:
    return "fake"  # a fake must not receive a real token


class GcpClient:
    """Client of one project. `url` redirects all calls to a fake."""

    def __init__(self, project: str, *, url: str | None, call_seconds_max: float) -> None:
        """Raises ConfigError if google-auth is not installed."""
        self.project = project
        self._url = None if url is None else url.rstrip("/")
        self._token = GoogleToken(call_seconds_max) if url is None else None
        self._rest = RestClient(
            self._token or _fake_token, call_seconds_max=call_seconds_max, is_throttled=is_throttled
        )
        self._rate_limits = rate_limits(RATES, call_seconds_max)

    @property
    def cloud_ahead(self) -> timedelta | None:
        """How far Google's clock is ahead of this machine's; None before the first answer."""
        return self._rest.cloud_ahead

    async def call(
        self, operation: str, /, *, query: Mapping[str, str] | None = None, body: object = None, **path: str
    ) -> Mapping[str, Any]:
        """Return the answer. Raises LaunchRefused, PermanentError, TransientError."""
        return _body(operation, await self._ask(operation, path, query, body))

    async def find(self, operation: str, /, **path: str) -> Mapping[str, Any] | None:
        """Return the described object, None if it does not exist."""
        answer = await self._ask(operation, path, None, None)
        return None if answer.status == 404 else _body(operation, answer)

    async def pages(
        self, operation: str, /, *, query: Mapping[str, str] | None = None, **path: str
    ) -> AsyncIterator[Mapping[str, Any]]:
        """Yield every page, or raise: part of a list proves nothing. Each page has its own time limit."""
        page_query = dict(query or {})
        for _ in range(PAGES_MAX):
            page = await self.call(operation, query=page_query, **path)
            yield page
            if not page.get("nextPageToken"):
                return
            page_query["pageToken"] = page["nextPageToken"]
        raise PermanentError(f"{operation}: more than {PAGES_MAX} pages; check gcp.project, {self.project}")

    async def close(self) -> None:
        await self._rest.close()
        if self._token is not None:
            self._token.close()

    async def _ask(
        self, operation: str, path: Mapping[str, str], query: Mapping[str, str] | None, body: object
    ) -> Answer:
        permission = CALLS[operation]
        base = self._url or BASE_URLS[permission.api]
        url = f"{base}/{PREFIXES[permission.api]}/{permission.path.format(project=self.project, **path)}"
        answer = await self._rest.call(
            operation,
            permission.method,
            url,
            rate_limit=self._rate_limits[permission.rate_limit],
            query=query,
            body=body,
        )
        if answer.status == 401 and self._token is not None:
            self._token.invalidate()
        return answer
