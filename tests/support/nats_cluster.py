"""Three real servers on the loopback address that keep three copies of every stream, to be killed one by one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.nats.link import Timeouts
from gpu_autoscaler.bus.server import LOOPBACK, NatsServer
from gpu_autoscaler.bus.streams import BusDeclaration
from gpu_autoscaler.model.errors import ConfigError, TransientError
from gpu_autoscaler_services.local.child import free_port

SERVERS_COUNT = 3
_FORMING_SECONDS_MAX = 60.0


class NatsCluster:
    """Its servers, and who of them leads what."""

    def __init__(self, servers: list[NatsServer]) -> None:
        self.servers = servers

    @property
    def urls(self) -> list[str]:
        """Addresses of all, as settings list them."""
        return [server.url for server in self.servers]

    async def leader_of(self, bus: NatsBus, stream: str) -> NatsServer:
        """The server that leads the stream now."""
        async with asyncio.timeout(_FORMING_SECONDS_MAX):
            while True:
                with contextlib.suppress(TransientError):
                    leader = (await bus._link.call(f"STREAM.INFO.{stream}"))["cluster"].get("leader")
                    found = [server for server in self.servers if server.name == leader and server.pid is not None]
                    if found:
                        return found[0]
                await asyncio.sleep(0.1)

    async def until_whole(self, bus: NatsBus, stream: str) -> None:
        """Wait until every copy of the stream is up to date."""
        async with asyncio.timeout(_FORMING_SECONDS_MAX):
            while True:
                with contextlib.suppress(TransientError):
                    copies = (await bus._link.call(f"STREAM.INFO.{stream}"))["cluster"].get("replicas", ())
                    if len(copies) == SERVERS_COUNT - 1 and all(copy["current"] for copy in copies):
                        return
                await asyncio.sleep(0.1)


def servers_of(
    folder: Path, settings: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> list[NatsServer]:
    """Return the servers of a cluster, not started; each has further lines of configuration and their variables."""
    ports = [free_port() for _ in range(SERVERS_COUNT)]
    return [
        NatsServer(
            folder / f"server-{number}",
            port=free_port(),
            settings=[cluster_settings(port, ports), *settings],
            variables=variables,
        )
        for number, port in enumerate(ports)
    ]


@contextlib.asynccontextmanager
async def running_cluster(folder: Path) -> AsyncIterator[NatsCluster]:
    """A cluster that has elected its leader and answers; all of it is ended afterwards."""
    servers = servers_of(folder)
    cluster = NatsCluster(servers)
    try:
        await asyncio.gather(*(server.start() for server in servers))
        await until_formed(cluster.urls)
        yield cluster
    finally:
        await asyncio.gather(*(server.kill() for server in servers))


def cluster_settings(port: int, ports: Sequence[int]) -> str:
    """Return the configuration of the member that listens for the others on `port`, one of `ports`."""
    routes = ", ".join(f'"nats-route://{LOOPBACK}:{other}"' for other in ports)
    return f'cluster {{ name: gpu, listen: "{LOOPBACK}:{port}", routes: [{routes}] }}'


async def until_formed(urls: Sequence[str]) -> None:
    """Wait until the cluster has a leader and answers."""
    async with asyncio.timeout(_FORMING_SECONDS_MAX):
        while True:
            try:
                bus = await NatsBus.connect(
                    urls,
                    name="forming",
                    declared=BusDeclaration(streams=()),
                    timeouts=Timeouts(connect_seconds_max=10.0),
                )
            except (TransientError, ConfigError):
                await asyncio.sleep(0.2)
                continue
            await bus.close()
            return
