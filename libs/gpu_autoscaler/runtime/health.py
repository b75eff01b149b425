"""`/healthz`, `/readyz` and `/metrics` of a process. Healthy: the loop turns. Ready: every condition holds."""

import asyncio
from collections.abc import Mapping

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.config import HttpSettings
from gpu_autoscaler.runtime.metrics import Metrics


class Readiness:
    """What keeps this process from its work, by condition. Parts of the runtime and adapters write, `/readyz` reads."""

    def __init__(self) -> None:
        self._conditions: dict[str, str | None] = {}
        self._words: dict[str, str] = {}

    def hold(self, condition: str, reason: str) -> None:
        """Say that a condition does not hold, and why."""
        self._conditions[condition] = reason

    def clear(self, condition: str) -> None:
        """Say that a condition holds."""
        self._conditions[condition] = None

    def say(self, condition: str, words: str) -> None:
        """Say that a condition holds, and what else is to be known of it; shown where all conditions are."""
        self._conditions[condition] = None
        self._words[condition] = words

    @property
    def words(self) -> Mapping[str, str]:
        """Condition that holds to what else was said of it."""
        return dict(self._words)

    @property
    def conditions(self) -> Mapping[str, str | None]:
        """Condition to reason; None: it holds."""
        return dict(self._conditions)

    @property
    def is_ready(self) -> bool:
        """True when there is at least one condition and all hold."""
        return bool(self._conditions) and all(reason is None for reason in self._conditions.values())


class HealthServer:
    """Serves the three paths until it is closed."""

    def __init__(self, settings: HttpSettings, readiness: Readiness, metrics: Metrics) -> None:
        self._settings = settings
        self._readiness = readiness
        self._figures = metrics
        self._runner: web.AppRunner | None = None

    async def start(self) -> int:
        """Listen, and return the port. Raises ConfigError when the address is in use."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics),
            ]
        )
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        host, port = self._settings.host, self._settings.port
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as exc:
            await runner.cleanup()
            raise ConfigError(
                "http", [f"{host}:{port} cannot be listened on ({exc.strerror}); free it or set http.port"]
            ) from exc
        self._runner = runner
        return int(runner.addresses[0][1])

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        conditions = self._readiness.conditions
        shown = sorted(conditions.items()) if "verbose" in request.query else _failing(conditions)
        words = self._readiness.words
        lines = [
            f"[{'+' if reason is None else '-'}] {name}: {reason or words.get(name, 'ok')}" for name, reason in shown
        ]
        verdict = "ready" if self._readiness.is_ready else "not ready"
        return web.Response(text="\n".join([*lines, verdict, ""]), status=200 if self._readiness.is_ready else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        # Thousands of series take milliseconds to write: not on the loop that answers notices.
        page = await asyncio.to_thread(generate_latest, self._figures.page())
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})


def _failing(conditions: Mapping[str, str | None]) -> list[tuple[str, str | None]]:
    return sorted((name, reason) for name, reason in conditions.items() if reason is not None)
