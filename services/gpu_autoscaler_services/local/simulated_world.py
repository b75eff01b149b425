"""Client of simcluster for what no service does: injects events and reads the ground truth (`/admin`)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from gpu_autoscaler.model.errors import PermanentError, TransientError

_CALL_SECONDS_MAX = 10.0


class GroundTruth(msgspec.Struct, frozen=True, kw_only=True):
    """The simulation's own records, which no service can read."""

    launches_by_token: Mapping[str, int]  # action id -> launched instances
    instances_left: Sequence[str]  # provider ids of our running instances
    bill_micro_usd: Mapping[str, int]  # provider id -> charge of the provider


class SimulatedWorld:
    """Calls simcluster's `/admin` API."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_CALL_SECONDS_MAX))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def create_namespace(self, name: str) -> None:
        """Create a namespace, as the cluster's admin does."""
        await self._call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})

    async def refuse(self, offer: str, *, times: int = 1) -> None:
        """Refuse the next launches of offers that match (a pattern of type/zone/capacity type): no capacity."""
        await self._call("POST", "/admin/refusals", {"offer": offer, "times": times})

    async def reprice(self, offer: str, ratio: float) -> None:
        """Multiply the list price of matching offers by `ratio`."""
        await self._call("POST", "/admin/prices", {"offer": offer, "ratio": ratio})

    async def take(self, node: str, *, seconds: float, after_seconds: float = 0.0) -> None:
        """Interrupt a node: notice after `after_seconds` of cluster time, end `seconds` of wall time later."""
        body = {"node": node, "seconds": seconds, "after_seconds": after_seconds}
        await self._call("POST", "/admin/notices", body)

    async def end_work(self) -> None:
        """Complete all running work now."""
        await self._call("POST", "/admin/programs/end")

    async def slow_down(self, path: str, *, seconds: float) -> None:
        """Delay every response below this path by `seconds` of wall time; 0 disables it."""
        await self._call("POST", "/admin/latency", {"path": path, "seconds": seconds})

    async def send_notice(self, seconds: float) -> str | None:
        """Interrupt a busy spot node, ending in `seconds` of wall time; return its name, None if there is none."""
        try:
            answer = await self._call("POST", "/admin/notices", {"seconds": seconds})
        except PermanentError:
            return None
        name: str = answer["node"]
        return name

    async def truth(self) -> GroundTruth:
        instances = await self._call("GET", "/admin/instances")
        bill = await self._call("GET", "/admin/invoice")
        instances = [item["instance"] for item in instances]
        return GroundTruth(
            launches_by_token=Counter(item["action_id"] for item in instances if item["action_id"]),
            instances_left=[item["provider_id"] for item in instances if item["state"] != "terminated"],
            bill_micro_usd={line["provider_id"]: line["cost_micro_usd"] for line in bill["lines"]},
        )

    async def _call(self, method: str, path: str, body: object = None) -> Any:  # noqa: ANN401 - JSON
        try:
            async with self._session.request(method, self._url + path, json=body) as response:
                content = await response.read()
                if response.status >= 400:
                    raise PermanentError(f"{method} {path}: {response.status} {content[:300].decode(errors='replace')}")
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise TransientError(f"{method} {self._url}{path}: {exc!r}; is simcluster running?") from exc
        return msgspec.json.decode(content)
