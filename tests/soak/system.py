"""The system under soak: three brokers, PostgreSQL, simcluster and every service, each a process of its own."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
from tests.soak.serve import MINUTES_ENVIRONMENT, PLANTED_ENVIRONMENT
from tests.support.nats_cluster import cluster_settings, until_formed
from tests.support.postgres import PostgresServer, programs

from gpu_autoscaler.bus.nats.migrate import Change
from gpu_autoscaler.bus.permissions import server_text
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.runtime import config
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.local.child import free_port
from gpu_autoscaler_services.local.system import ExternalSystems, LocalSystem
from gpu_autoscaler_services.migration import Part
from gpu_autoscaler_services.permissions import OPERATOR_USER, users
from gpu_autoscaler_services.service_spec import Role

BROKERS_COUNT = 3
SNAPSHOT_SECONDS = 30.0  # well within the shortened retention
BROKER_MEMORY_MIB_MAX = 384  # of Go's heap in each; without a limit it doubles before it is collected
SCRAPE_SECONDS = 60.0  # instead of 10: two cores carry no more of 1,000 exporters beside everything else

Populate = Callable[[str], Awaitable[None]]  # gets the address of simcluster


class Brokers(NatsServer):
    """Three servers that form one cluster, started and stopped as one."""

    def __init__(self, folder: Path, settings: Sequence[str], variables: Mapping[str, str]) -> None:
        ports = [free_port() for _ in range(BROKERS_COUNT)]
        self.members = [
            NatsServer(
                folder / f"server-{number}",
                port=free_port(),
                settings=(*settings, cluster_settings(port, ports)),
                variables={**variables, "GOMEMLIMIT": f"{BROKER_MEMORY_MIB_MAX}MiB"},
            )
            for number, port in enumerate(ports)
        ]
        super().__init__(folder, port=self.members[0].port)

    @property
    def url(self) -> str:
        """Addresses of all, as settings list them."""
        return ",".join(member.url for member in self.members)

    async def start(self) -> None:
        """Start all, and return when they have elected a leader."""
        for member in self.members:
            member.process_group = self.process_group
        await asyncio.gather(*(member.start() for member in self.members))
        await until_formed(self.url.split(","))

    async def stop(self) -> None:
        """Stop all."""
        await asyncio.gather(*(member.stop() for member in self.members))


class SoakSystem(LocalSystem):
    """Real processes at full size. `populate` fills the cluster before the first service starts."""

    serve_module: ClassVar[str] = "tests.soak.serve"

    def __init__(
        self, folder: Path, populate: Populate, *, minutes: float, policy: Path, offers: Path, planted: str = ""
    ) -> None:
        self._populate = populate
        self.postgres = PostgresServer(programs())
        super().__init__(
            folder,
            clock=Clock(),
            policy=policy,
            gateway_port=0,
            offers=offers,
            external=ExternalSystems(store_url=self.postgres.url()),
        )
        os.environ[MINUTES_ENVIRONMENT] = str(minutes)  # children inherit the environment
        os.environ[PLANTED_ENVIRONMENT] = planted
        self.brokers = Brokers(
            folder / "nats", (server_text(users()), f"no_auth_user: {OPERATOR_USER}"), self._passwords
        )
        self.nats = self.brokers

    async def migrate(self, part: Part = "all", *, to: str | None = None) -> tuple[Change, ...]:  # noqa: ARG002 - as there
        """Change nothing: services create streams with the shortened retention, and the database starts later."""
        return ()

    async def prepare(self, say: Callable[[str], None]) -> None:
        """Start PostgreSQL, and fill the cluster."""
        say("starting PostgreSQL")
        self.postgres.process_group = self._reaper.process_group
        await asyncio.to_thread(self.postgres.start)
        say("filling the cluster")
        await self._populate(self.simcluster_url)

    async def stop(self) -> None:
        """Stop everything, the database last."""
        await super().stop()
        await asyncio.to_thread(self.postgres.stop)

    def _settings(self, name: str, service: str, role: Role | None) -> config.Settings:
        settings = super()._settings(name, service, role)
        replace = msgspec.structs.replace
        return replace(
            settings,
            nats=replace(settings.nats, replicas_count=BROKERS_COUNT),
            store=replace(settings.store, snapshot_seconds=SNAPSHOT_SECONDS),
            sensing=replace(settings.sensing, dcgm_scrape_seconds=SCRAPE_SECONDS),
        )
