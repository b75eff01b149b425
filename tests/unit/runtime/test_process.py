"""A process tells how it is, says what it does in one form, and ends with an exit code that means something."""

import asyncio
import io
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from secrets import token_hex
from typing import ClassVar

import aiohttp
import pytest
import structlog
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from tests.support.runners import Place, Probe

from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.model.errors import ConfigError, TransientError
from gpu_autoscaler.model.reasons.buy import BuyReason
from gpu_autoscaler.model.reasons.defer import DeferReason
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.config import HttpSettings, LogSettings, Settings
from gpu_autoscaler.runtime.health import HealthServer, Readiness
from gpu_autoscaler.runtime.metric_families import LABELS, PREFIX
from gpu_autoscaler.runtime.metrics import Metrics, reason_tags
from gpu_autoscaler.runtime.process import (
    EXIT_FAILED,
    EXIT_MISCONFIGURED,
    EXIT_STOPPED,
    ProcessContext,
    configure_logs,
    serve,
)
from gpu_autoscaler.runtime.retry import Backoff
from gpu_autoscaler.runtime.service import Service
from gpu_autoscaler_services.registry import NAMES


class Quiet(Probe):
    """Ticks and says nothing."""

    name = "quiet"
    tick_seconds: ClassVar[float | None] = 0.05

    def __init__(self, place: ProcessContext) -> None:
        super().__init__()
        self.view = place.view


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def page(port: int, path: str) -> tuple[int, str]:
    """Return status and text of a page; status 0 without an answer."""
    try:
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as response:
            return response.status, await response.text()
    except aiohttp.ClientConnectionError:
        return 0, ""


async def until_page(port: int, path: str, status: int, words: str = "") -> str:
    """Wait for a page with this status and these words in it."""
    async with asyncio.timeout(60):
        while True:
            seen, text = await page(port, path)
            if seen == status and words in text:
                return text
            await asyncio.sleep(0.01)


@pytest.fixture
def logs() -> io.StringIO:
    """What is logged in JSON from here on."""
    stream = io.StringIO()
    configure_logs(LogSettings(level="debug"), service="quiet", instance="test", stream=stream)
    return stream


@pytest.fixture(autouse=True)
async def _logs_as_before() -> AsyncIterator[None]:
    yield
    structlog.reset_defaults()


async def test_a_service_lives_and_ends_cleanly(logs: io.StringIO) -> None:
    """Not ready while something outside is missing, ready then, and SIGTERM ends it with 0."""
    port, broker, tries = free_port(), Place(), 0

    async def compose(place: ProcessContext) -> tuple[Service, Bus]:
        nonlocal tries
        tries += 1
        if tries < 4:
            raise TransientError("the broker is not there yet", retry_after_seconds=0.1)
        return Quiet(place), await broker.bus(Quiet)

    served = asyncio.create_task(serve("quiet", Settings(http=HttpSettings(port=port)), compose))
    await until_page(port, "/readyz", 503, "starting: the broker is not there yet")
    assert await page(port, "/healthz") == (200, "ok\n")
    verbose = await until_page(port, "/readyz?verbose", 200, "[+] ticks: ok")
    assert "[+] bus: ok" in verbose
    metrics = await until_page(port, "/metrics", 200, "gpu_autoscaler_ready 1.0")
    assert "gpu_autoscaler_build_info{" in metrics
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(60):
        assert await served == EXIT_STOPPED
    lines = [json.loads(line) for line in logs.getvalue().splitlines()]
    assert [line["event"] for line in lines][-2:] == ["stop requested", "service stopped"]
    assert all(line["service"] == "quiet" and line["instance"] == "test" for line in lines)


async def test_a_start_that_hangs_can_be_stopped(logs: io.StringIO) -> None:
    """SIGTERM while something outside does not answer: what was opened is closed, and the process ends with 0."""
    closed: list[str] = []
    hangs = asyncio.Event()

    async def compose(place: ProcessContext) -> tuple[Service, Bus]:
        place.closing.callback(closed.append, "store")
        hangs.set()
        await asyncio.sleep(3600)
        raise AssertionError("never reached")

    served = asyncio.create_task(serve("quiet", Settings(http=HttpSettings(port=0)), compose))
    await hangs.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(60):
        assert await served == EXIT_STOPPED
    assert closed == ["store"]
    assert "service stopped" in logs.getvalue()


async def test_an_invalid_setting_is_reported_and_ends_the_process(logs: io.StringIO) -> None:
    """All errors at once, no traceback, exit code 2; opened adapters are closed."""
    closed: list[str] = []

    async def compose(place: ProcessContext) -> tuple[Service, Bus]:
        place.closing.callback(closed.append, "store")
        raise ConfigError("store", ["url: wrong", "folder: missing"])

    assert await serve("quiet", Settings(http=HttpSettings(port=0)), compose) == EXIT_MISCONFIGURED
    assert closed == ["store"]
    assert "url: wrong\\n  - folder: missing" in logs.getvalue()
    assert "Traceback" not in logs.getvalue()


async def test_a_bug_at_the_start_ends_it_loudly(logs: io.StringIO) -> None:
    """Exit code 1 and the traceback."""

    async def compose(_: ProcessContext) -> tuple[Service, Bus]:
        raise ZeroDivisionError("the author's")

    assert await serve("quiet", Settings(http=HttpSettings(port=0)), compose) == EXIT_FAILED
    assert "Traceback" in logs.getvalue()


async def test_a_port_in_use_is_reported_with_the_remedy(logs: io.StringIO) -> None:
    """The error names the address and the setting."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]

        async def compose(_: ProcessContext) -> tuple[Service, Bus]:
            raise AssertionError("nothing is composed")

        assert await serve("quiet", Settings(http=HttpSettings(port=port)), compose) == EXIT_MISCONFIGURED
    assert f"cannot listen on 127.0.0.1:{port}" in logs.getvalue()
    assert "set http.port" in logs.getvalue()


async def test_readiness_names_what_is_missing() -> None:
    """Only failing conditions by default; nothing known yet is not ready."""
    readiness, metrics = Readiness(), Metrics("x")
    server = HealthServer(HttpSettings(port=0), readiness, metrics)
    port = await server.start()
    assert (await page(port, "/readyz"))[0] == 503
    readiness.clear("bus")
    readiness.block("state", "reading POD up to now")
    assert await page(port, "/readyz") == (503, "[-] state: reading POD up to now\nnot ready\n")
    readiness.clear("state")
    assert await page(port, "/readyz") == (200, "ready\n")
    await server.close()


def active(service: str) -> Metrics:
    """Return the metrics of the active process of a service, after its first tick."""
    metrics = Metrics(service)
    metrics.is_leading = metrics.has_ticked = lambda: True
    return metrics


def test_every_reason_and_outcome_starts_at_zero() -> None:
    """A dashboard of why, and rates that work from the first event on."""
    text = generate_latest(active("scaler").registry).decode()
    for tag in reason_tags(BuyReason):
        assert f'gpu_autoscaler_decisions_total{{reason="{tag}"}} 0.0' in text
    for tag in reason_tags(DeferReason):
        assert f'gpu_autoscaler_deferred{{reason="{tag}"}} 0.0' in text
    assert "gpu_autoscaler_plans_refused_total 0.0" in text


def test_what_is_not_known_is_not_zero() -> None:
    """An unmeasured utilization is NaN."""
    text = generate_latest(active("scaler").registry).decode()
    for name in ("cluster_utilization", "predicted_utilization", "spot_savings_percentage"):
        assert f"gpu_autoscaler_{name} NaN" in text


def test_names_and_labels_are_those_that_dashboards_know() -> None:
    """The contract's names with the alias, one prefix, labels from the closed list."""
    families: dict[str, Metric] = {}
    for service in NAMES:
        metrics = active(service)
        metrics.declare_domain("job")
        page = generate_latest(metrics.registry).decode()
        families |= {family.name: family for family in text_string_to_metric_families(page)}
    wanted = """scaling_actions scaling_duration_seconds node_count nodes desired_node_count cluster_utilization
        pending_pods underutilized_nodes spot_interruptions spot_termination_warnings spot_savings_percentage
        estimated_monthly_cost_usd estimated_monthly_savings_usd predicted_utilization prediction_confidence
        scale_up_cooldown_remaining_seconds scale_down_cooldown_remaining_seconds reconcile_errors
        queue_wait_seconds time_to_gpu_seconds node_ready_seconds decision_seconds"""
    assert {f"{PREFIX}_{name}" for name in wanted.split()} <= families.keys()
    labels = {
        label for family in families.values() for sample in family.samples for label in sample.labels if label != "le"
    }
    assert labels <= LABELS | {"version", "python"}


def test_logs_are_text_where_people_look() -> None:
    """A terminal gets text, a file gets JSON, unless told."""
    stream = io.StringIO()
    configure_logs(LogSettings(format="text", level="warning"), service="x", instance="y", stream=stream)
    structlog.get_logger().info("below the level")
    structlog.get_logger().warning("disk is full", free_bytes=0)
    assert "disk is full" in stream.getvalue()
    assert "free_bytes" in stream.getvalue()
    assert "below the level" not in stream.getvalue()
    with pytest.raises(json.JSONDecodeError):
        json.loads(stream.getvalue())


def test_a_traceback_shows_no_secrets() -> None:
    """Local variables may hold tokens, so no form of log prints them; the traceback itself is there."""
    for form in ("text", "json"):
        stream = io.StringIO()
        configure_logs(LogSettings(format=form), service="x", instance="y", stream=stream)
        token = token_hex()
        try:
            int(f"not a number{token[:0]}")
        except ValueError:
            structlog.get_logger().exception("request failed")
        assert "not a number" in stream.getvalue()
        assert token not in stream.getvalue()


def test_waits_grow_to_their_limit_and_honour_what_is_asked() -> None:
    """Doubling, never beyond the longest; a server that says when is believed, within reason."""
    backoff = Backoff(first_seconds=1.0, seconds_max=8.0)
    assert 0.75 <= backoff.wait_seconds(1) <= 1.0
    assert 3.0 <= backoff.wait_seconds(3) <= 4.0
    assert 6.0 <= backoff.wait_seconds(1000) <= 8.0
    assert backoff.wait_seconds(1, TransientError("busy", retry_after_seconds=30.0)) == 30.0
    assert backoff.wait_seconds(1, TransientError("busy", retry_after_seconds=86_400.0)) == 300.0


def test_broker_stamps_become_cluster_time() -> None:
    """With a faster clock, an arrival in wall time is converted to cluster time."""
    clock = Clock(10.0)
    wall = clock.origin + (clock.wall_now() - clock.origin)
    assert clock.at(wall) - clock.origin == (wall - clock.origin) * 10
    assert Clock().at(wall) == wall
