"""The calls themselves: REST by the table of permissions, with google-auth's credentials, refreshed in a thread."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

from gpu_autoscaler.model.errors import ConfigError, PermanentError, TransientError
from gpu_autoscaler.providers.gcp.permissions import CALLS, Pace
from gpu_autoscaler.providers.gcp.translate import failure, is_throttled
from gpu_autoscaler.providers.pacing import BoundedCalls, RateLimit
from gpu_autoscaler.providers.rest import Answer, RestClient

PAGES_MAX = 1000
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
BASE_URLS = {
    "compute": "https://compute.googleapis.com",
    "cloudbilling": "https://cloudbilling.googleapis.com",
    "cloudresourcemanager": "https://cloudresourcemanager.googleapis.com",
}
PREFIXES = {"compute": "compute/v1", "cloudbilling": "v1", "cloudresourcemanager": "v3"}
# A part of what a project has, so that others get theirs: 1,500 reads and 750 changes a minute and region, which is
# 25 and 12 a second (Compute Engine, "API rate limits", not looked up again).
RATES: Mapping[Pace, tuple[float, int]] = {"reads": (12.0, 60), "launches": (5.0, 20), "ends": (5.0, 50)}


class GoogleToken:
    """A bearer token of the credentials that google-auth finds; renewed before it ends, and when it was refused."""

    def __init__(self, call_seconds_max: float) -> None:
        """Raises ConfigError where google-auth is not installed."""
        if find_spec("google") is None or find_spec("google.auth") is None:
            raise ConfigError("provider gcp", ["google-auth: is not installed; install gpu-autoscaler[gcp]"])
        self._threads = BoundedCalls("gcp-token", threads_count=1, call_seconds_max=call_seconds_max)
        self._credentials: Any = None
        self._turn = asyncio.Lock()

    async def __call__(self) -> str:
        """Return a token that is good now. Raises TransientError."""
        async with self._turn:
            if self._credentials is None or not self._credentials.valid:
                self._credentials = await self._threads.run("credentials", self._fresh)
            return str(self._credentials.token)

    def forget(self) -> None:
        """The cloud has refused it: the next call has another."""
        self._credentials = None

    def close(self) -> None:
        """Give back the thread."""
        self._threads.close()

    def _fresh(self) -> Any:  # noqa: ANN401 - google-auth ships no types for what it finds
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
                f"credentials: {exc}; give the pods Workload Identity, or set GOOGLE_APPLICATION_CREDENTIALS"
            ) from exc
        return credentials


async def _token_of_fakes() -> str:
    return "fake"  # a fake asks for none, and is not to be given a real one


class GcpClient:
    """One project. `url` leads all calls elsewhere, to a fake."""

    def __init__(self, project: str, *, url: str | None, call_seconds_max: float) -> None:
        """Raises ConfigError where google-auth is not installed."""
        self.project = project
        self._url = None if url is None else url.rstrip("/")
        self._token = GoogleToken(call_seconds_max) if url is None else None
        self._rest = RestClient(
            self._token or _token_of_fakes, call_seconds_max=call_seconds_max, is_throttled=is_throttled
        )
        self._budgets: dict[Pace, RateLimit] = {
            pace: RateLimit(per_second, burst, wait_seconds_max=call_seconds_max)
            for pace, (per_second, burst) in RATES.items()
        }

    @property
    def cloud_ahead(self) -> timedelta | None:
        """How far Google's clock is ahead of this machine's; None before the first answer."""
        return self._rest.cloud_ahead

    async def call(
        self,
        operation: str,
        /,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        **path: str,
    ) -> Mapping[str, Any]:
        """Return the answer. Raises LaunchRefused, PermanentError, TransientError, all in our words."""
        answer = await self._ask(operation, path, query, body)
        if not answer.is_success:
            raise failure(operation, answer)
        found: Mapping[str, Any] = answer.body
        return found

    async def find(self, operation: str, /, **path: str) -> Mapping[str, Any] | None:
        """Return the thing of that name, None where the cloud says that there is none."""
        answer = await self._ask(operation, path, None, None)
        if answer.status == 404:
            return None
        if not answer.is_success:
            raise failure(operation, answer)
        found: Mapping[str, Any] = answer.body
        return found

    async def pages(
        self, operation: str, /, *, query: Mapping[str, str] | None = None, **path: str
    ) -> AsyncIterator[Mapping[str, Any]]:
        """Yield every page, or raise: half a list proves nothing. Each page is a call with its own limit of time."""
        asked = dict(query or {})
        for _ in range(PAGES_MAX):
            page = await self.call(operation, query=asked, **path)
            yield page
            if not page.get("nextPageToken"):
                return
            asked["pageToken"] = page["nextPageToken"]
        raise PermanentError(f"{operation}: more than {PAGES_MAX} pages; is this the right project, {self.project}?")

    async def close(self) -> None:
        """Give back connections and the thread."""
        await self._rest.close()
        if self._token is not None:
            self._token.close()

    async def _ask(
        self, operation: str, path: Mapping[str, str], query: Mapping[str, str] | None, body: object
    ) -> Answer:
        allowed = CALLS[operation]
        base = self._url or BASE_URLS[allowed.api]
        url = f"{base}/{PREFIXES[allowed.api]}/{allowed.path.format(project=self.project, **path)}"
        answer = await self._rest.call(
            operation, allowed.method, url, budget=self._budgets[allowed.pace], query=query, body=body
        )
        if answer.status == 401 and self._token is not None:
            self._token.forget()
        return answer
