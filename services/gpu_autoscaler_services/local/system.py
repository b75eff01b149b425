"""Runs the whole system on this machine: starts every process in order and stops them in reverse."""

import asyncio
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

import msgspec
from msgspec.json import decode

from gpu_autoscaler.bus.nats.migrate import Change
from gpu_autoscaler.bus.permissions import password_variable, server_text
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.providers.aws.options import AwsOptions
from gpu_autoscaler.providers.azure.options import AzureOptions
from gpu_autoscaler.providers.gcp.options import GcpOptions
from gpu_autoscaler.providers.karpenter.options import KarpenterOptions
from gpu_autoscaler.runtime import config
from gpu_autoscaler.runtime.clock import CLOCK_ENVIRONMENT, Clock
from gpu_autoscaler_services.local.child import Child, free_port
from gpu_autoscaler_services.local.reaper import Reaper
from gpu_autoscaler_services.migration import Part, migrate
from gpu_autoscaler_services.permissions import MIGRATOR, OPERATOR_USER, fresh_passwords, users
from gpu_autoscaler_services.registry import specs
from gpu_autoscaler_services.service_spec import Process, Role

CloudName = Literal["sim", "aws", "azure", "gcp"]
OptionsT = TypeVar("OptionsT", AwsOptions, AzureOptions, GcpOptions)

# Process name -> service and process.
PROCESSES: dict[str, tuple[str, Process]] = {
    process.name: (spec.name, process)
    for spec in specs()
    for process in spec.processes
    if process.condition != "node_watchers"
}
CLOCK_FILE = "clock"


def load_clock(folder: Path, factor: float) -> Clock:
    """Return the clock of the recorded system in this folder, else a new one: if cluster time restarted, facts of the
    last run would lie in the future. Raises ConfigError if the recorded factor differs."""
    path = folder / CLOCK_FILE
    if not path.exists():
        return Clock(factor)
    clock = Clock.from_text(path.read_text(encoding="utf-8"), str(path))
    if clock.factor != factor:
        error = f"{folder} was recorded with --clock-factor {clock.factor:g}; use that factor, or another --folder"
        raise ConfigError("clock", [error])
    return clock


class ExternalSystems(msgspec.Struct, frozen=True, kw_only=True):
    """External systems that replace parts of the simulated cluster."""

    kubeconfig: Path | Mapping[str, Path] | None = None  # of a real cluster, or one per service; the cloud is simulated
    store_url: str | None = None  # a store that is not a file in the folder
    cloud: CloudName = "sim"  # the cloud's API; clouds other than "sim" are faked
    karpenter: KarpenterOptions | None = None  # nodes are bought by the Karpenter of the real cluster
    # What clients that the broker identifies may do: on loopback everybody has all rights.
    client_projects: tuple[str, ...] = ("*=*",)
    is_observe_only: bool = False  # no process decides or acts; the kubeconfig may be the user's own


class LocalSystem:
    """A NATS server, a simulated cluster and all services, in one folder."""

    serve_module: ClassVar[str] = "gpu_autoscaler_services.serve"  # runs one service

    def __init__(
        self,
        folder: Path,
        *,
        clock: Clock,
        policy: Path | None,
        gateway_port: int,
        nats_port: int = 0,
        offers: Path | None = None,
        shadow: Path | None = None,
        external: ExternalSystems | None = None,
    ) -> None:
        """A port of 0 means a free port. `shadow`: the shadow policy."""
        self.folder = folder
        self.clock = clock
        self._passwords = fresh_passwords()
        # Local connections without a user name have all permissions; services connect as their users.
        self.nats = NatsServer(
            folder / "nats",
            port=nats_port or free_port(),
            settings=(server_text(users()), f"no_auth_user: {OPERATOR_USER}"),
            variables=self._passwords,
        )
        self._reaper = Reaper()
        self.simcluster_url = f"http://127.0.0.1:{free_port()}"
        external = external or ExternalSystems()
        self.cloud = external.cloud
        self.cloud_url = self.simcluster_url if self.cloud == "sim" else f"http://127.0.0.1:{free_port()}"
        self.gateway_url = f"http://127.0.0.1:{gateway_port or free_port()}"
        self.children: dict[str, Child] = {}
        self.code: dict[str, Path] = {}  # process -> folder of another version to run instead of this one
        self._policy = policy
        self._offers = offers
        self._shadow = shadow
        self._store_url = external.store_url or f"sqlite:///{(folder / 'store.db').absolute()}"
        self._kubeconfig = external.kubeconfig
        self._karpenter = external.karpenter
        self._client_projects = external.client_projects
        self._is_observe_only = external.is_observe_only

    @property
    def nats_url(self) -> str:
        return self.nats.url

    def nats_url_of(self, user: str) -> str:
        """Return the server's address with the credentials of one of its users (`permissions.py`)."""
        return self.nats.url.replace("://", f"://{user}:{self._passwords[password_variable(user)]}@")

    async def start(self, say: Callable[[str], None]) -> None:
        """Start everything and return when all is ready; after a failure stop it. `say` gets progress messages. Raises
        ConfigError naming the setting to change, TransientError with the log of a process that did not become ready."""
        # Checked first, so that a taken port is reported at once.
        _check_port("gateway", int(self.gateway_url.rsplit(":", 1)[1]))
        _check_port("nats", self.nats.port)
        for folder in (self.folder / "nats", self.folder / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
        (self.folder / CLOCK_FILE).write_text(self.clock.to_text(), encoding="utf-8")
        try:
            self.nats.process_group = self._reaper.start()
            say("starting the NATS server")
            await self.nats.start()
            if not self.code:  # another version runs on broker and store as they are
                for change in await self.migrate():
                    say(f"{change.thing}: {change.property} {change.actual} -> {change.declared}, {change.outcome}")
            say(f"starting the simulated cluster at {self.simcluster_url}")
            await self._start_child(self._simcluster())
            await self.prepare(say)
            services = list(self._services())
            say(f"starting {len(services)} services, each a process of its own")
            await asyncio.gather(*(self._start_child(child) for child in services))
        except BaseException:
            await self.stop()
            raise

    async def migrate(self, part: Part = "all", *, to: str | None = None) -> tuple[Change, ...]:
        """Bring broker and store to this release, or the broker to the release `to`, as `gpu-autoscaler migrate`."""
        settings = config.Settings(
            nats=config.NatsSettings(url=self.nats_url_of(MIGRATOR)), store=config.StoreSettings(url=self._store_url)
        )
        return await migrate(settings, part, to=to, is_applied=True, is_history_discarded=False)

    async def prepare(self, say: Callable[[str], None]) -> None:
        """Do what must be done before the first service starts: nothing."""

    async def _start_child(self, child: Child) -> None:
        self.children[child.name] = child
        await child.start()
        await child.wait_ready()

    async def stop(self) -> None:
        """Stop everything, services first, so that they can still publish."""
        services = [child for name, child in self.children.items() if name != "simcluster"]
        await asyncio.gather(*(child.stop() for child in services))
        if (world := self.children.get("simcluster")) is not None:
            await world.stop()
        await self.nats.stop()
        self._reaper.stop()
        self.children.clear()

    def _simcluster(self) -> Child:
        port = self.simcluster_url.rsplit(":", 1)[1]
        command = [sys.executable, "-m", "gpu_autoscaler.simcluster", "--port", port]
        if self.cloud != "sim":
            command[2] = "gpu_autoscaler.simcloud"
            cloud_port = self.cloud_url.rsplit(":", 1)[1]
            command += ["--cloud", self.cloud, "--cloud-port", cloud_port, "--settings", str(self._cloud_settings)]
        if self._offers is not None:
            command += ["--offers", str(self._offers)]
        return Child(
            "simcluster",
            command,
            environment={CLOCK_ENVIRONMENT: self.clock.to_text()},
            log=self.folder / "logs" / "simcluster.log",
            ready_url=f"{self.simcluster_url}/readyz",
            process_group=self._reaper.process_group,
        )

    def _services(self) -> Iterator[Child]:
        conditions = {"shadow_policy": self._shadow, "real_cluster": self._kubeconfig}
        missing = {condition for condition, value in conditions.items() if value is None}
        for name, (service, process) in PROCESSES.items():
            if process.condition not in missing and (process.is_observer or not self._is_observe_only):
                yield self._process(name, service, process.role)

    async def start_replica(self, name: str, service: str) -> Child:
        """Start another process of a service under this name; it is stopped with the others."""
        await self._start_child(child := self._process(name, service, None))
        return child

    async def restart_process(self, name: str) -> None:
        """Stop one process and start it again, from the code that `code` names now."""
        service, process = PROCESSES[name]
        await self.children[name].stop()
        await self._start_child(self._process(name, service, process.role))

    def _process(self, name: str, service: str, role: Role | None) -> Child:
        settings = self._settings(name, service, role)
        other_code = {"PYTHONPATH": str(self.code[name])} if name in self.code else {}
        return Child(
            name,
            [sys.executable, "-m", self.serve_module, service],
            environment={CLOCK_ENVIRONMENT: self.clock.to_text(), **other_code, **config.to_environment(settings)},
            log=self.folder / "logs" / f"{name}.log",
            ready_url=f"http://127.0.0.1:{settings.http.port}/readyz",
            process_group=self._reaper.process_group,
        )

    def _kube(self, service: str) -> config.KubeSettings:
        path = self._kubeconfig[service] if isinstance(self._kubeconfig, Mapping) else self._kubeconfig
        if path is None and not self._is_observe_only:
            return config.KubeSettings(url=self.simcluster_url)
        return config.KubeSettings(
            kubeconfig_path=None if path is None else str(path), is_read_only=self._is_observe_only
        )

    @property
    def _cloud_settings(self) -> Path:
        return (self.folder / "cloud.json").absolute()

    def _options_of(self, cloud: CloudName, wanted: type[OptionsT]) -> OptionsT:
        """Return the options of the faked cloud, which chooses its resource names when it starts."""
        return decode(self._cloud_settings.read_bytes(), type=wanted) if self.cloud == cloud else wanted()

    def _settings(self, name: str, service: str, role: Role | None) -> config.Settings:
        sensing = config.SensingSettings(
            dcgm_url=self.simcluster_url + "/nodes/{node_name}/metrics",
            metadata_url=self.simcluster_url + "/nodes/{node_name}",
            role=role or "central",
        )
        return config.Settings(
            nats=config.NatsSettings(url=self.nats_url_of(service)),
            kube=self._kube(service),
            provider=config.ProviderSettings(name="karpenter" if self._karpenter else self.cloud, url=self.cloud_url),
            aws=self._options_of("aws", AwsOptions),
            azure=self._options_of("azure", AzureOptions),
            gcp=self._options_of("gcp", GcpOptions),
            karpenter=self._karpenter or KarpenterOptions(),
            store=config.StoreSettings(url=self._store_url),
            # Earlier versions do not know the setting.
            gateway=config.GatewaySettings(
                port=int(self.gateway_url.rsplit(":", 1)[1]),
                client_projects=() if name in self.code else self._client_projects,
            ),
            http=config.HttpSettings(port=free_port()),
            sensing=sensing,
            policy=config.PolicySettings(
                path=None if self._policy is None else str(self._policy),
                shadow_path=None if self._shadow is None else str(self._shadow),
            ),
            instance=name,
        )


def _check_port(name: str, port: int) -> None:
    with socket.socket() as probe:
        # As servers do: connections of the previous one may linger.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as exc:
            error = f"port {port} of 127.0.0.1: {exc.strerror}; choose another with --{name}-port (0: a free one)"
            raise ConfigError(name, [error]) from exc
