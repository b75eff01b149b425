"""A real NATS server for tests: the one named in the environment, the binary of this machine, or a container.

If none is available, tests that need one are skipped with the package to install.
"""

import asyncio
import gc
import json
import os
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gpu_autoscaler.bus.server import NatsServer, find_binary
from gpu_autoscaler.bus.streams import SERVER_PAYLOAD_BYTES_MAX
from gpu_autoscaler.model.errors import ConfigError

URL_ENVIRONMENT = "GPU_AUTOSCALER_NATS_URL"
IMAGE = "nats:2.15-alpine"
COMMAND = ["sh", "-c", "printf 'max_payload: 8388608\njetstream {}\n' > /tmp/n.conf && exec nats-server -c /tmp/n.conf"]


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a broker that tests share: each makes streams of its own name and removes them."""
    given = os.environ.get(URL_ENVIRONMENT)
    if given:
        yield given
        return
    try:
        find_binary()
    except ConfigError as exc:
        yield from _container(str(exc))
        return
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    asyncio.run(server.start())
    yield server.url
    asyncio.run(server.stop())


def _container(why_not_local: str) -> Iterator[str]:
    containers = pytest.importorskip("testcontainers.core.container", reason=f"no NATS server: {why_not_local}")
    waiting = pytest.importorskip("testcontainers.core.waiting_utils")
    container, why_not = None, ""
    with warnings.catch_warnings():
        # Without an engine the client leaves its socket to the collector.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            container = containers.DockerContainer(IMAGE).with_command(COMMAND).with_exposed_ports(4222).start()
        except Exception as exc:  # noqa: BLE001 - whatever keeps the engine from starting it, the test cannot run
            why_not = str(exc)
        gc.collect()
    if container is None:
        pytest.skip(f"no NATS server: {why_not_local}; and no container engine: {why_not}")
    try:
        waiting.wait_for_logs(container, "Server is ready")
        yield f"nats://{container.get_container_host_ip()}:{container.get_exposed_port(4222)}"
    finally:
        container.stop()


@pytest.fixture
async def server(nats_store: Path) -> AsyncIterator[NatsServer]:
    """A server of the test's own, which it may kill."""
    server = NatsServer(nats_store)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
def nats_store(tmp_path: Path) -> Path:
    """An empty store folder for a server of the test's own, which it may kill."""
    return tmp_path / "nats"


@pytest.fixture
async def old_nats() -> AsyncIterator[str]:
    """The address of something that greets like a NATS server of years ago."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        about = {"version": "2.9.10", "max_payload": SERVER_PAYLOAD_BYTES_MAX, "headers": True, "jetstream": True}
        writer.write(b"INFO " + json.dumps(about).encode() + b"\r\n")
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
        writer.close()

    listener = await asyncio.start_server(greet, "127.0.0.1", 0)
    yield f"nats://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    listener.close()
