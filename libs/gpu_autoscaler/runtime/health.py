"""`/healthz`, `/readyz` and `/metrics` of a process. Healthy: the event loop runs. Ready: every condition holds."""

import asyncio
from collections.abc import Mapping

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.config import HttpSettings
from gpu_autoscaler.runtime.metrics import Metrics


class Readiness:
    """The conditions of readiness, set by the runtime and by adapters, shown on `/readyz`."""

    def __init__(self) -> None:
        self._conditions: dict[str, str | None] = {}
        self._details: dict[str, str] = {}

    def block(self, condition: str, reason: str) -> None:
        """Record that a condition does not hold, and why."""
        self._conditions[condition] = reason

    def clear(self, condition: str) -> None:
        """Record that a condition holds."""
        self._conditions[condition] = None

    def note(self, condition: str, detail: str) -> None:
        """Record that a condition holds, with a detail for `/readyz?verbose`."""
        self._conditions[condition] = None
        self._details[condition] = detail

    @property
    def details(self) -> Mapping[str, str]:
        """Details by condition."""
        return dict(self._details)

    @property
    def conditions(self) -> Mapping[str, str | None]:
        """Reason by condition; None: it holds."""
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
        self._registry = metrics
        self._runner: web.AppRunner | None = None

    async def start(self) -> int:
        """Start listening and return the port. Raises ConfigError when the address is in use."""
        app = web.Application()
        app.add_routes(
            [web.get("/healthz", self._healthz), web.get("/readyz", self._readyz), web.get("/metrics", self._metrics)]
        )
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        host, port = self._settings.host, self._settings.port
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as exc:
            await runner.cleanup()
            raise ConfigError(
                "http", [f"cannot listen on {host}:{port} ({exc.strerror}); free the port or set http.port"]
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
        details = self._readiness.details
        lines = [
            f"[{'+' if reason is None else '-'}] {name}: {reason or details.get(name, 'ok')}" for name, reason in shown
        ]
        verdict = "ready" if self._readiness.is_ready else "not ready"
        return web.Response(text="\n".join([*lines, verdict, ""]), status=200 if self._readiness.is_ready else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        # Thousands of series take milliseconds to render: not on the event loop, which must react to notices.
        page = await asyncio.to_thread(generate_latest, self._registry.page())
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})


def _failing(conditions: Mapping[str, str | None]) -> list[tuple[str, str | None]]:
    return sorted((name, reason) for name, reason in conditions.items() if reason is not None)
