"""The calls themselves: Azure Resource Manager by REST, with a token, a time limit and a place in a budget for each.

Retries are not made here: whoever asks asks again, under the same name.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from gpu_autoscaler.model.errors import ConfigError, PermanentError
from gpu_autoscaler.providers.azure.options import AzureOptions
from gpu_autoscaler.providers.azure.permissions import CALLS, PRICES_CALL, PRICES_PATH, Budget
from gpu_autoscaler.providers.azure.translate import failure
from gpu_autoscaler.providers.pacing import BoundedCalls, NotSent, RateLimit
from gpu_autoscaler.providers.rest import Answer, RestClient, said

MANAGEMENT_URL = "https://management.azure.com"
PRICES_URL = "https://prices.azure.com"
PAGES_MAX = 1000
TOKEN_RENEWED_SECONDS_BEFORE = 300.0
# How long a launch waits to hear whether the machine is allocated, wall time. Allocation fails within seconds as a
# rule; a machine of which nothing is heard by then is booting as far as we know, and has its boot deadline.
ALLOCATED_SECONDS_MAX = 20.0
ASKED_AGAIN_SECONDS = 1.0
# A part of what a subscription has, so that others get theirs: reads refill by 25 a second, writes and deletes by 10
# (Azure documentation, "Understand how Azure Resource Manager throttles requests", read 2026-11-22).
_RATES: Mapping[Budget, tuple[float, int]] = {"reads": (10.0, 60), "writes": (4.0, 20), "ends": (4.0, 40)}


GONE = frozenset({"ResourceNotFound", "NotFound", "InstanceIdNotFound", "PlatformImageNotFound"})  # where it is a 404


class AzureClient:
    """One resource group of one subscription. `url` leads all calls elsewhere, to a fake."""

    def __init__(self, options: AzureOptions, *, url: str | None, call_seconds_max: float) -> None:
        """Raises ConfigError where azure-identity is not installed."""
        self.region = str(options.region)
        self._names = {
            "subscription": str(options.subscription),
            "resource_group": str(options.resource_group),
            "region": self.region,
        }
        self._url = (url or MANAGEMENT_URL).rstrip("/")
        self._prices_url = (url or PRICES_URL).rstrip("/")
        self._threads = BoundedCalls("azure", threads_count=1, call_seconds_max=call_seconds_max)
        # A fake asks for no credentials, and is not to be given real ones.
        self._credential = None if url is not None else _credential()
        self._token: tuple[str, float] = ("fake", float("inf")) if url is not None else ("", 0.0)
        self._token_turn = asyncio.Lock()
        self._rest = RestClient(self._bearer, call_seconds_max=call_seconds_max)
        self._prices = RestClient(None, call_seconds_max=call_seconds_max)
        self._budgets = {
            name: RateLimit(per_second, burst, wait_seconds_max=call_seconds_max)
            for name, (per_second, burst) in _RATES.items()
        }

    @property
    def group_id(self) -> str:
        """The id of the resource group, as ids of what is in it begin."""
        return f"/subscriptions/{self._names['subscription']}/resourceGroups/{self._names['resource_group']}"

    @property
    def cloud_ahead(self) -> timedelta | None:
        """How far Azure's clock is ahead of this machine's; None before the first answer."""
        return self._rest.cloud_ahead

    def id_of(self, kind: str, name: str) -> str:
        """Return the id of a resource of Compute in the group."""
        return f"{self.group_id}/providers/Microsoft.Compute/{kind}/{name}"

    async def call(
        self,
        operation: str,
        *,
        body: object = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        scale_set: str = "",
        name: str = "",
    ) -> Answer:
        """Return the answer. Raises LaunchRefused, PermanentError, TransientError, all in our words."""
        return self.seen(
            operation,
            await self.ask(operation, body=body, query=query, headers=headers, scale_set=scale_set, name=name),
        )

    async def find(
        self, operation: str, *, query: Mapping[str, str] | None = None, scale_set: str = "", name: str = ""
    ) -> Mapping[str, Any] | None:
        """Return what is told of one thing, None where there is none. Raises as `call` does."""
        answer = await self.ask(operation, query=query, scale_set=scale_set, name=name)
        if answer.status == 404 and error_of(answer)[0] in GONE:
            return None
        found: Mapping[str, Any] = self.seen(operation, answer).body
        return found

    async def pages(
        self, operation: str, *, query: Mapping[str, str] | None = None, scale_set: str = ""
    ) -> AsyncIterator[Mapping[str, Any]]:
        """Yield each thing of every page, or raise: half a list proves nothing."""
        answer = await self.call(operation, query=query, scale_set=scale_set)
        for _ in range(PAGES_MAX):
            for one in answer.body["value"]:
                yield one
            link = answer.body.get("nextLink")
            if not link:
                return
            answer = self.seen(operation, await self._follow(operation, link, self._rest, self._url))
        raise PermanentError(f"{operation}: more than {PAGES_MAX} pages; ask for less by the settings under [azure]")

    async def operation(self, began: Answer) -> Mapping[str, Any] | None:
        """Return how it stands with what a call has begun: `status`, `error`; None where there is nothing to follow."""
        link = began.headers.get("azure-asyncoperation")
        if link is None:
            return None
        answer = self.seen("Operations_Get", await self._follow("Operations_Get", link, self._rest, self._url))
        found: Mapping[str, Any] = answer.body
        return found

    async def failure_of(self, began: Answer) -> tuple[str, str] | None:
        """Wait for word of the allocation; return code and message of a failure."""
        waited_seconds = 0.0
        while waited_seconds < ALLOCATED_SECONDS_MAX:
            standing = await self.operation(began)
            if standing is None or standing["status"] not in ("InProgress", "Failed", "Canceled"):
                return None
            if standing["status"] != "InProgress":
                return error_words(standing.get("error", {}))
            await asyncio.sleep(ASKED_AGAIN_SECONDS)
            waited_seconds += ASKED_AGAIN_SECONDS
        return None

    async def prices(self, wanted: str) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the items of the public price list that match a filter. Raises TransientError."""
        budget = self._budgets["reads"]
        query = {"api-version": "2023-01-01-preview", "$filter": wanted}
        answer = await self._prices.call(PRICES_CALL, "GET", self._prices_url + PRICES_PATH, budget=budget, query=query)
        for _ in range(PAGES_MAX):
            for one in self.seen(PRICES_CALL, answer).body["Items"]:
                yield one
            link = answer.body.get("NextPageLink")
            if not link:
                return
            answer = await self._follow(PRICES_CALL, link, self._prices, self._prices_url)
        raise PermanentError(f"{PRICES_CALL}: more than {PAGES_MAX} pages; name fewer types in azure.instance_types")

    async def close(self) -> None:
        """Give back connections."""
        self._threads.close()
        await self._rest.close()
        await self._prices.close()

    async def ask(
        self,
        operation: str,
        *,
        body: object = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        scale_set: str = "",
        name: str = "",
    ) -> Answer:
        """Return the answer, a refusal too. Raises TransientError for what stands in the way for a while."""
        how = CALLS[operation]
        return await self._rest.call(
            operation,
            how.method,
            self._url + how.path.format(**self._names, scale_set=scale_set, name=name),
            budget=self._budgets[how.budget],
            query={"api-version": how.version, **(query or {})},
            body=body,
            headers=headers,
        )

    async def _follow(self, operation: str, link: str, rest: RestClient, url: str) -> Answer:
        """Ask an address that the cloud has given; only its own, as our token goes with it."""
        if urlsplit(link)[:2] != urlsplit(url)[:2]:
            raise PermanentError(f"{operation}: is led to {link[:200]}, which is not {url}: not asked")
        return await rest.call(operation, "GET", link, budget=self._budgets["reads"])

    def seen(self, operation: str, answer: Answer) -> Answer:
        """Return the answer of a call that went well. Raises what the refusal is."""
        # `Microsoft.Compute/HighCostGet;0`, or a bare number: nothing is left, and the next call would be refused.
        remaining = (value for name, value in answer.headers.items() if name.startswith("x-ms-ratelimit-remaining"))
        if any(one.rpartition(";")[2].strip() == "0" for value in remaining for one in value.split(",")):
            budget = CALLS[operation].budget if operation in CALLS else "reads"
            self._budgets[budget].throttled()
        if answer.is_success:
            return answer
        if answer.status == 401 and self._credential is not None:
            self._token = ("", 0.0)
        code, message = error_of(answer)
        is_launch = operation in CALLS and CALLS[operation].is_launch
        raise failure(operation, code, message, of_launch=is_launch)

    async def _bearer(self) -> str:
        async with self._token_turn:
            token, renewed_at = self._token
            if time.time() >= renewed_at and self._credential is not None:
                token, renewed_at = await self._threads.run("credentials", self._fetched)
                self._token = (token, renewed_at)
            return token

    def _fetched(self) -> tuple[str, float]:
        from azure.core.exceptions import AzureError  # noqa: PLC0415 - an extra

        credential: Any = self._credential
        try:
            made = credential.get_token(f"{MANAGEMENT_URL}/.default")
        except AzureError as exc:
            raise NotSent(
                f"no token of Azure: {str(exc)[:300]}; see workload identity, or AZURE_CLIENT_ID, AZURE_TENANT_ID and"
                " AZURE_CLIENT_SECRET"
            ) from exc
        return made.token, made.expires_on - TOKEN_RENEWED_SECONDS_BEFORE


def error_of(answer: Answer) -> tuple[str, str]:
    """Return code and message of a refusal; its details know more than a wrapper does."""
    error = answer.body.get("error", {}) if isinstance(answer.body, dict) else {}
    return error_words(error) if error else (f"HTTP {answer.status}", said(answer))


def error_words(error: Mapping[str, Any]) -> tuple[str, str]:
    """Return code and message of an error, those of its first detail where that has a code."""
    detail = next((one for one in error.get("details") or () if one.get("code")), None)
    told = error if detail is None else detail
    return str(told.get("code", "")), str(told.get("message", ""))[:500]


def _credential() -> Any:  # noqa: ANN401 - an extra, loaded where it is needed
    try:
        from azure.identity import DefaultAzureCredential  # noqa: PLC0415 - an extra, and slow to load
    except ImportError as exc:
        raise ConfigError(
            "provider azure", ["azure-identity: is not installed; install gpu-autoscaler[azure]"]
        ) from exc
    return DefaultAzureCredential()
