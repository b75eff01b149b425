"""A Kubernetes API seen over HTTP alone: what the contract suite speaks, to simcluster or to a real server."""

import asyncio
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

Json = dict[str, Any]

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"


@dataclass(frozen=True)
class Answer:
    """One HTTP answer, its body decoded where it is JSON."""

    status: int
    body: Any
    headers: dict[str, str]


class KubeHttp:
    """Sends requests to one API server."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, token: str | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self._session = session
        self._url = url
        self._token = token
        self._tls: ssl.SSLContext | bool = True if tls is None else tls

    async def send(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        content_type: str = "application/json",
        token: str | None = None,
    ) -> Answer:
        """Send one request; `token` overrides the client's own, "" sends none."""
        async with self._request(method, path, body, content_type, token) as response:
            raw = await response.read()
            try:
                parsed: Any = json.loads(raw)
            except ValueError:
                parsed = raw.decode()
            headers = {name.lower(): value for name, value in response.headers.items()}
            return Answer(response.status, parsed, headers)

    def _request(
        self, method: str, path: str, body: object, content_type: str, token: str | None
    ) -> "aiohttp.client._RequestContextManager":
        headers = {"Content-Type": content_type}
        bearer = self._token if token is None else token
        if bearer:
            headers["Authorization"] = f"Bearer {bearer}"
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._session.request(method, self._url + path, data=data, headers=headers, ssl=self._tls)

    async def made(self, path: str, body: object) -> Json:
        """Create an object; it must succeed."""
        answer = await self.send("POST", path, body)
        assert answer.status == 201, answer
        return dict(answer.body)

    async def read(self, path: str) -> Json:
        """Read something; it must be there."""
        answer = await self.send("GET", path)
        assert answer.status == 200, answer
        return dict(answer.body)

    async def patched(self, path: str, body: object, content_type: str = MERGE) -> Json:
        """Patch an object; it must succeed."""
        answer = await self.send("PATCH", path, body, content_type=content_type)
        assert answer.status == 200, answer
        return dict(answer.body)

    async def watch(self, path: str, *, lines: int = 1000) -> list[Json]:
        """Return up to `lines` lines of a watch, fewer if the server ends it."""
        seen: list[Json] = []
        async with self._request("GET", path, None, "application/json", None) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                seen.append(json.loads(line))
                if len(seen) >= lines:
                    # Dropped, not closed: under TLS a goodbye would be under way when the test is over.
                    if response.connection is not None and response.connection.transport is not None:
                        response.connection.transport.abort()
                    await asyncio.sleep(0.01)
                    break
        return seen

    async def until(self, path: str, holds: Callable[[Json], object], seconds: float = 60.0) -> Json:
        """Read until it holds, and return what was read; a missing object reads as {}. Waits `seconds` in all,
        in pauses that grow: a server and its clients share the machine with what is waited for."""
        last: Json = {}
        waited_seconds, pause_seconds = 0.0, 0.05
        while waited_seconds < seconds:
            answer = await self.send("GET", path)
            last = dict(answer.body) if answer.status == 200 else {}
            if holds(last):
                return last
            await asyncio.sleep(pause_seconds)
            waited_seconds += pause_seconds
            pause_seconds = min(1.1 * pause_seconds, 0.25)
        raise AssertionError(f"{path} never came to hold; last seen: {last}")
