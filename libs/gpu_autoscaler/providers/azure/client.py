"""Azure Resource Manager calls by REST, each with a token, a time limit and an API rate limit.

There are no retries here: the caller retries with the same name.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from typing import Any, TypedDict, Unpack
from urllib.parse import urlsplit

from gpu_autoscaler.model.errors import ConfigError, PermanentError
from gpu_autoscaler.providers.azure.options import AzureOptions
from gpu_autoscaler.providers.azure.permissions import CALLS, PRICES_CALL, PRICES_PATH, RateLimitName
from gpu_autoscaler.providers.azure.translate import failure
from gpu_autoscaler.providers.rest import Answer, RestClient, error_text
from gpu_autoscaler.providers.throttling import BoundedCalls, NotSent, rate_limits

MANAGEMENT_URL = "https://management.azure.com"
PRICES_URL = "https://prices.azure.com"
PAGES_MAX = 1000
TOKEN_RENEWED_SECONDS_BEFORE = 300.0
# Wall time that a launch waits for its allocation result. Allocation normally fails within seconds; a machine without
# a result by then is considered booting, and has its boot deadline.
ALLOCATED_SECONDS_MAX = 20.0
POLL_SECONDS = 1.0
# Part of the subscription's limits, to leave capacity for others: reads refill at 25 per second, writes and deletes at
# 10 (Azure documentation, "Understand how Azure Resource Manager throttles requests", read 2026-11-22).
_RATES: Mapping[RateLimitName, tuple[float, int]] = {"reads": (10.0, 60), "writes": (4.0, 20), "ends": (4.0, 40)}


NOT_FOUND_CODES = frozenset({"ResourceNotFound", "NotFound", "InstanceIdNotFound", "PlatformImageNotFound"})  # of a 404


class Request(TypedDict, total=False):
    """What a call adds to its path and version."""

    body: object
    query: Mapping[str, str]
    headers: Mapping[str, str]
    scale_set: str  # names in the path
    name: str


class AzureClient:
    """Client of one resource group. `url` redirects all calls to a fake."""

    def __init__(self, options: AzureOptions, *, url: str | None, call_seconds_max: float) -> None:
        """Raises ConfigError if azure-identity is not installed."""
        self.region = str(options.region)
        self._names = {
            "subscription": str(options.subscription),
            "resource_group": str(options.resource_group),
            "region": self.region,
        }
        self._url = (url or MANAGEMENT_URL).rstrip("/")
        self._prices_url = (url or PRICES_URL).rstrip("/")
        self._threads = BoundedCalls("azure", threads_count=1, call_seconds_max=call_seconds_max)
        # A fake must not receive real credentials.
        self._credential = None if url is not None else _credential()
        self._token: tuple[str, float] = ("fake", float("inf")) if url is not None else ("", 0.0)
        self._token_lock = asyncio.Lock()
        self._rest = RestClient(self._bearer, call_seconds_max=call_seconds_max)
        self._prices = RestClient(None, call_seconds_max=call_seconds_max)
        self._rate_limits = rate_limits(_RATES, call_seconds_max)

    @property
    def group_id(self) -> str:
        """The id of the resource group: the prefix of the ids of its resources."""
        return f"/subscriptions/{self._names['subscription']}/resourceGroups/{self._names['resource_group']}"

    @property
    def cloud_ahead(self) -> timedelta | None:
        """How far Azure's clock is ahead of this machine's; None before the first answer."""
        return self._rest.cloud_ahead

    def id_of(self, kind: str, name: str) -> str:
        return f"{self.group_id}/providers/Microsoft.Compute/{kind}/{name}"

    async def call(self, operation: str, **request: Unpack[Request]) -> Answer:
        """Return the answer. Raises LaunchRefused, PermanentError, TransientError."""
        return self.checked(operation, await self.ask(operation, **request))

    async def find(self, operation: str, **request: Unpack[Request]) -> Mapping[str, Any] | None:
        """Return the described object, None if it does not exist. Raises as `call`."""
        answer = await self.ask(operation, **request)
        if answer.status == 404 and error_of(answer)[0] in NOT_FOUND_CODES:
            return None
        body: Mapping[str, Any] = self.checked(operation, answer).body
        return body

    async def pages(self, operation: str, **request: Unpack[Request]) -> AsyncIterator[Mapping[str, Any]]:
        """Yield each item of every page, or raise: part of a list proves nothing."""
        answer = await self.call(operation, **request)
        for _ in range(PAGES_MAX):
            for item in answer.body["value"]:
                yield item
            link = answer.body.get("nextLink")
            if not link:
                return
            answer = self.checked(operation, await self._follow(operation, link, self._rest, self._url))
        raise PermanentError(f"{operation}: more than {PAGES_MAX} pages; narrow the settings under [azure]")

    async def operation(self, accepted: Answer) -> Mapping[str, Any] | None:
        """Return `status` and `error` of an operation that a call began; None if there is no operation."""
        link = accepted.headers.get("azure-asyncoperation")
        if link is None:
            return None
        answer = self.checked("Operations_Get", await self._follow("Operations_Get", link, self._rest, self._url))
        body: Mapping[str, Any] = answer.body
        return body

    async def failure_of(self, accepted: Answer) -> tuple[str, str] | None:
        """Wait for the allocation result; return code and message of a failure."""
        waited_seconds = 0.0
        while waited_seconds < ALLOCATED_SECONDS_MAX:
            progress = await self.operation(accepted)
            if progress is None or progress["status"] not in ("InProgress", "Failed", "Canceled"):
                return None
            if progress["status"] != "InProgress":
                return error_words(progress.get("error", {}))
            await asyncio.sleep(POLL_SECONDS)
            waited_seconds += POLL_SECONDS
        return None

    async def prices(self, price_filter: str) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the items of the public price list that match the filter. Raises TransientError."""
        rate_limit, url = self._rate_limits["reads"], self._prices_url + PRICES_PATH
        query = {"api-version": "2023-01-01-preview", "$filter": price_filter}
        answer = await self._prices.call(PRICES_CALL, "GET", url, rate_limit=rate_limit, query=query)
        for _ in range(PAGES_MAX):
            for item in self.checked(PRICES_CALL, answer).body["Items"]:
                yield item
            link = answer.body.get("NextPageLink")
            if not link:
                return
            answer = await self._follow(PRICES_CALL, link, self._prices, self._prices_url)
        raise PermanentError(f"{PRICES_CALL}: more than {PAGES_MAX} pages; name fewer types in azure.instance_types")

    async def close(self) -> None:
        self._threads.close()
        await self._rest.close()
        await self._prices.close()

    async def ask(self, operation: str, **request: Unpack[Request]) -> Answer:
        """Return the answer, even a refusal. Raises TransientError for temporary failures."""
        permission = CALLS[operation]
        path = permission.path.format(
            **self._names, scale_set=request.get("scale_set", ""), name=request.get("name", "")
        )
        return await self._rest.call(
            operation,
            permission.method,
            self._url + path,
            rate_limit=self._rate_limits[permission.rate_limit],
            query={"api-version": permission.version, **request.get("query", {})},
            body=request.get("body"),
            headers=request.get("headers"),
        )

    async def _follow(self, operation: str, link: str, rest: RestClient, url: str) -> Answer:
        """Follow a link in an answer, but only to the same host, as it receives our token."""
        if urlsplit(link)[:2] != urlsplit(url)[:2]:
            raise PermanentError(f"{operation}: link to {link[:200]} leaves {url}: not followed")
        return await rest.call(operation, "GET", link, rate_limit=self._rate_limits["reads"])

    def checked(self, operation: str, answer: Answer) -> Answer:
        """Return the answer if it is a success. Raises the refusal."""
        # `Microsoft.Compute/HighCostGet;0`, or a bare number: the limit is used up, and the next call would be refused.
        remaining = (value for name, value in answer.headers.items() if name.startswith("x-ms-ratelimit-remaining"))
        if any(part.rpartition(";")[2].strip() == "0" for value in remaining for part in value.split(",")):
            rate_limit = CALLS[operation].rate_limit if operation in CALLS else "reads"
            self._rate_limits[rate_limit].throttled()
        if answer.is_success:
            return answer
        if answer.status == 401 and self._credential is not None:
            self._token = ("", 0.0)
        code, message = error_of(answer)
        is_launch = operation in CALLS and CALLS[operation].is_launch
        raise failure(operation, code, message, of_launch=is_launch)

    async def _bearer(self) -> str:
        async with self._token_lock:
            token, renewed_at = self._token
            if time.time() >= renewed_at and self._credential is not None:
                token, renewed_at = await self._threads.run("credentials", self._fetch_token)
                self._token = (token, renewed_at)
            return token

    def _fetch_token(self) -> tuple[str, float]:
        from azure.core.exceptions import AzureError  # noqa: PLC0415 - an extra

        credential: Any = self._credential
        try:
            token = credential.get_token(f"{MANAGEMENT_URL}/.default")
        except AzureError as exc:
            raise NotSent(
                f"Azure token request failed: {str(exc)[:300]}; check workload identity, or AZURE_CLIENT_ID,"
                " AZURE_TENANT_ID and AZURE_CLIENT_SECRET"
            ) from exc
        return token.token, token.expires_on - TOKEN_RENEWED_SECONDS_BEFORE


def error_of(answer: Answer) -> tuple[str, str]:
    """Return code and message of a refusal, from its most specific detail."""
    error = answer.body.get("error", {}) if isinstance(answer.body, dict) else {}
    return error_words(error) if error else (f"HTTP {answer.status}", error_text(answer))


def error_words(error: Mapping[str, Any]) -> tuple[str, str]:
    """Return code and message of an error, those of its first detail with a code if any."""
    detail = next((item for item in error.get("details") or () if item.get("code")), None)
    source = error if detail is None else detail
    return str(source.get("code", "")), str(source.get("message", ""))[:500]


def _credential() -> Any:  # noqa: ANN401 - an extra, loaded where it is needed
    try:
        from azure.identity import DefaultAzureCredential  # noqa: PLC0415 - an extra, and slow to load
    except ImportError as exc:
        raise ConfigError(
            "provider azure", ["azure-identity: is not installed; install gpu-autoscaler[azure]"]
        ) from exc
    return DefaultAzureCredential()
