"""The doors of simcluster that no service knows: what the launcher does to the world, and what is true of it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from gpu_autoscaler.model.errors import PermanentError, TransientError

_CALL_SECONDS_MAX = 10.0


class GroundTruth(msgspec.Struct, frozen=True, kw_only=True):
    """What the simulated world knows of itself and no service can read."""

    launches_by_token: Mapping[str, int]  # instances made under each action id
    instances_left: Sequence[str]  # provider ids of instances of ours that still run
    bill_micro_usd: Mapping[str, int]  # provider id -> what the provider charges for it


class SimulatedWorld:
    """Speaks with simcluster's `/admin` and, as a user would, with its Kubernetes API."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_CALL_SECONDS_MAX))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def refuse_next(self, offer: str) -> None:
        """The next launch of an offer like this (a pattern of type/zone/capacity type) finds no capacity."""
        await self._call("POST", "/admin/refusals", {"offer": offer, "times": 1})

    async def refuse(self, offer: str, *, times: int) -> None:
        """The next launches of offers like this (a pattern of type/zone/capacity type) find no capacity."""
        await self._call("POST", "/admin/refusals", {"offer": offer, "times": times})

    async def reprice(self, offer: str, ratio: float) -> None:
        """Offers like this cost so many times their usual price."""
        await self._call("POST", "/admin/prices", {"offer": offer, "ratio": ratio})

    async def take(self, node: str, *, seconds: float, after_seconds: float = 0.0) -> None:
        """Give notice to a node after so much cluster time: it is taken `seconds` of wall time later."""
        body = {"node": node, "seconds": seconds, "after_seconds": after_seconds}
        await self._call("POST", "/admin/notices", body)

    async def end_work(self) -> None:
        """Let all that runs come to its end now, as when its run time is over."""
        await self._call("POST", "/admin/programs/end")

    async def slow_down(self, path: str, *, seconds: float) -> None:
        """Every answer below this path takes so much longer, in wall time; 0 switches it off."""
        await self._call("POST", "/admin/latency", {"path": path, "seconds": seconds})

    async def send_notice(self, seconds: float) -> str | None:
        """Take back a busy spot node after `seconds` of wall time; returns its name, None if there is none."""
        try:
            answer = await self._call("POST", "/admin/notices", {"seconds": seconds})
        except PermanentError:
            return None
        name: str = answer["node"]
        return name

    async def truth(self) -> GroundTruth:
        """What the cloud knows of itself."""
        instances = await self._call("GET", "/admin/instances")
        bill = await self._call("GET", "/admin/invoice")
        shown = [item["instance"] for item in instances]
        return GroundTruth(
            launches_by_token=Counter(item["action_id"] for item in shown if item["action_id"]),
            instances_left=[item["provider_id"] for item in shown if item["state"] != "terminated"],
            bill_micro_usd={line["provider_id"]: line["cost_micro_usd"] for line in bill["lines"]},
        )

    async def _call(self, method: str, path: str, body: object = None) -> Any:  # noqa: ANN401 - JSON
        try:
            async with self._session.request(method, self._url + path, json=body) as answer:
                content = await answer.read()
                if answer.status >= 400:
                    raise PermanentError(f"{method} {path}: {answer.status} {content[:300].decode(errors='replace')}")
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise TransientError(f"{method} {self._url}{path}: {exc!r}; is simcluster running?") from exc
        return msgspec.json.decode(content)
