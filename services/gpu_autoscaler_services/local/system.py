"""Every process of the system on this machine, started in order, waited for, ended in reverse."""

import asyncio
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from msgspec.json import decode

from gpu_autoscaler.bus.permissions import password_variable, server_text
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.providers.aws import AwsOptions
from gpu_autoscaler.providers.azure import AzureOptions
from gpu_autoscaler.providers.gcp import GcpOptions
from gpu_autoscaler.providers.karpenter import KarpenterOptions
from gpu_autoscaler.runtime.clock import CLOCK_ENVIRONMENT, Clock
from gpu_autoscaler.runtime.config import (
    GatewaySettings,
    HttpSettings,
    KubeSettings,
    NatsSettings,
    PolicySettings,
    ProviderSettings,
    SensingSettings,
    Settings,
    StoreSettings,
    to_environment,
)
from gpu_autoscaler_services.local.child import Child, free_port
from gpu_autoscaler_services.local.guard import Guard
from gpu_autoscaler_services.permissions import OPERATOR_USER, fresh_passwords, users

Role = Literal["nodes", "central"]
CloudName = Literal["sim", "aws", "azure", "gcp"]
OptionsT = TypeVar("OptionsT", AwsOptions, AzureOptions, GcpOptions)

SHADOW = "shadow"  # runs only where there is a policy for it
ANNOUNCER, POLICY_WATCHER = "announcer", "policy-watcher"
_ON_REAL_CLUSTERS = (ANNOUNCER, POLICY_WATCHER)  # nobody runs kubectl on the simulated one
# Process name -> (service, role of the spot watcher); one process each, as in deploy/ and docker-compose.yml.
PROCESSES: dict[str, tuple[str, Role | None]] = {
    "scaler": ("scaler", None),
    "scheduler": ("scheduler", None),
    "pod-watcher": ("pod_watcher", None),
    "spot-watcher-offers": ("spot_watcher", "central"),
    "spot-watcher-notices": ("spot_watcher", "nodes"),
    "dcgm-ingest": ("dcgm_ingest", None),
    SHADOW: ("shadow", None),
    ANNOUNCER: ("announcer", None),
    POLICY_WATCHER: ("policy_watcher", None),
    "cost-tracker": ("cost_tracker", None),
    "gateway": ("gateway", None),
}


WATCHERS = frozenset({"pod-watcher", "spot-watcher-offers", "gateway"})  # they change nothing in a cluster

CLOCK_FILE = "clock"


def kept_clock(folder: Path, factor: float) -> Clock:
    """The clock of the record in this folder, a new one where there is none.

    Cluster time goes on with its record: if it began anew, facts of the last run would lie in the future, and nodes
    bought now would seem to be missing from later lists. Raises ConfigError where the record has another factor.
    """
    path = folder / CLOCK_FILE
    if not path.exists():
        return Clock(factor)
    clock = Clock.of_text(path.read_text(encoding="utf-8"), str(path))
    if clock.factor != factor:
        told = (
            f"what is in {folder} ran with --clock-factor {clock.factor:g}; go on with that, or name another --folder"
        )
        raise ConfigError("clock", [told])
    return clock


class Elsewhere(msgspec.Struct, frozen=True, kw_only=True):
    """What of a system is not the simulated cluster's own, or not started here, but there already."""

    # Of a real cluster, or one for each service; it takes the simulated one's place, of which the cloud is left.
    kubeconfig: Path | Mapping[str, Path] | None = None
    store_url: str | None = None  # a store of record that is no file of the folder
    cloud: CloudName = "sim"  # whose API its nodes are bought by; another than its own is faked
    karpenter: KarpenterOptions | None = None  # its nodes are bought by the Karpenter of the real cluster
    is_only_watched: bool = False  # nothing of ours decides or acts; the kubeconfig may be the user's own


class LocalSystem:
    """A NATS server, a simulated cluster and all services, below one folder."""

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
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """Ports that are 0 are free ones. `shadow`: a second policy that runs and acts on nothing."""
        self.folder = folder
        self.clock = clock
        self._passwords = fresh_passwords()
        # On this machine whoever gives no name may do everything; a service has a name, and no more than it needs.
        self.nats = NatsServer(
            folder / "nats",
            port=nats_port or free_port(),
            settings=(server_text(users()), f"no_auth_user: {OPERATOR_USER}"),
            variables=self._passwords,
        )
        self._guard = Guard()
        self.simcluster_url = f"http://127.0.0.1:{free_port()}"
        elsewhere = elsewhere or Elsewhere()
        self.cloud = elsewhere.cloud
        self._cloud_url = self.simcluster_url if self.cloud == "sim" else f"http://127.0.0.1:{free_port()}"
        self.gateway_url = f"http://127.0.0.1:{gateway_port or free_port()}"
        self.children: dict[str, Child] = {}
        self.code: dict[str, Path] = {}  # process -> folder of another version that it runs; not there: this one
        self._policy = policy
        self._offers = offers
        self._shadow = shadow
        self._store_url = elsewhere.store_url or f"sqlite:///{(folder / 'store.db').absolute()}"
        self._kubeconfig = elsewhere.kubeconfig
        self._karpenter = elsewhere.karpenter
        self._is_only_watched = elsewhere.is_only_watched

    @property
    def nats_url(self) -> str:
        """Where the NATS server listens."""
        return self.nats.url

    @property
    def cloud_url(self) -> str:
        """Where the cloud's own API answers that nodes are bought by."""
        return self._cloud_url

    def nats_url_of(self, user: str) -> str:
        """The server's address with the name and password of one of its users (`permissions.py`)."""
        return self.nats.url.replace("://", f"://{user}:{self._passwords[password_variable(user)]}@")

    async def start(self, say: Callable[[str], None]) -> None:
        """Start everything; returns when all of it is ready. What was started is ended again if anything fails.

        Raises ConfigError naming what is to be changed, TransientError with the log of what did not get ready.
        """
        # The ports that people choose: say at once when one is taken, not when everything else runs.
        _check_port("gateway", int(self.gateway_url.rsplit(":", 1)[1]))
        _check_port("nats", self.nats.port)
        for folder in (self.folder / "nats", self.folder / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
        (self.folder / CLOCK_FILE).write_text(self.clock.to_text(), encoding="utf-8")
        try:
            self.nats.process_group = self._guard.start()
            say("starting the NATS server")
            await self.nats.start()
            say(f"starting the simulated cluster at {self.simcluster_url}")
            await self._start_child(self._simcluster())
            services = list(self._services())
            say(f"starting {len(services)} services, each a process of its own")
            await asyncio.gather(*(self._start_child(child) for child in services))
        except BaseException:
            await self.stop()
            raise

    async def _start_child(self, child: Child) -> None:
        self.children[child.name] = child
        await child.start()
        await child.wait_ready()

    async def stop(self) -> None:
        """End everything: services first, so that they can still publish what they have in hand."""
        services = [child for name, child in self.children.items() if name != "simcluster"]
        await asyncio.gather(*(child.stop() for child in services))
        if (world := self.children.get("simcluster")) is not None:
            await world.stop()
        await self.nats.stop()
        self._guard.stop()
        self.children.clear()

    def _simcluster(self) -> Child:
        port = self.simcluster_url.rsplit(":", 1)[1]
        command = [sys.executable, "-m", "gpu_autoscaler.simcluster", "--port", port]
        if self.cloud != "sim":
            command[2] = "gpu_autoscaler.simcloud"
            command += [
                "--cloud",
                self.cloud,
                "--cloud-port",
                self._cloud_url.rsplit(":", 1)[1],
                "--settings",
                str(self._cloud_settings),
            ]
        if self._offers is not None:
            command += ["--offers", str(self._offers)]
        return Child(
            "simcluster",
            command,
            environment={CLOCK_ENVIRONMENT: self.clock.to_text()},
            log=self.folder / "logs" / "simcluster.log",
            ready_url=f"{self.simcluster_url}/readyz",
            process_group=self._guard.process_group,
        )

    def _services(self) -> Iterator[Child]:
        for name, (service, role) in PROCESSES.items():
            if self._is_only_watched and name not in WATCHERS:
                continue
            if (name == SHADOW and self._shadow is None) or (name in _ON_REAL_CLUSTERS and self._kubeconfig is None):
                continue
            yield self._process(name, service, role)

    async def start_another(self, name: str, service: str) -> Child:
        """Start one more process of a service under a name of its own; it is ended with the others."""
        await self._start_child(child := self._process(name, service, None))
        return child

    async def start_anew(self, name: str) -> None:
        """End one process and start it again, from the code that `code` names by now."""
        await self.children[name].stop()
        await self._start_child(self._process(name, *PROCESSES[name]))

    def _process(self, name: str, service: str, role: Role | None) -> Child:
        settings = self._settings(name, service, role)
        other = {"PYTHONPATH": str(self.code[name])} if name in self.code else {}
        return Child(
            name,
            [sys.executable, "-m", "gpu_autoscaler_services.serve", service],
            environment={CLOCK_ENVIRONMENT: self.clock.to_text(), **other, **to_environment(settings)},
            log=self.folder / "logs" / f"{name}.log",
            ready_url=f"http://127.0.0.1:{settings.http.port}/readyz",
            process_group=self._guard.process_group,
        )

    def _kube(self, service: str) -> KubeSettings:
        config = self._kubeconfig[service] if isinstance(self._kubeconfig, Mapping) else self._kubeconfig
        if config is None and not self._is_only_watched:
            return KubeSettings(url=self.simcluster_url)
        return KubeSettings(kubeconfig_path=None if config is None else str(config), is_read_only=self._is_only_watched)

    @property
    def _cloud_settings(self) -> Path:
        return (self.folder / "cloud.json").absolute()

    def _options_of(self, cloud: CloudName, wanted: type[OptionsT]) -> OptionsT:
        """What the fake says of itself: it makes up the names of what it has when it starts."""
        return decode(self._cloud_settings.read_bytes(), type=wanted) if self.cloud == cloud else wanted()

    def _settings(self, name: str, service: str, role: Role | None) -> Settings:
        sensing = SensingSettings(
            dcgm_url=self.simcluster_url + "/nodes/{node_name}/metrics",
            metadata_url=self.simcluster_url + "/nodes/{node_name}",
            role=role or "central",
        )
        return Settings(
            nats=NatsSettings(url=self.nats_url_of(service)),
            kube=self._kube(service),
            provider=ProviderSettings(name="karpenter" if self._karpenter else self.cloud, url=self._cloud_url),
            aws=self._options_of("aws", AwsOptions),
            azure=self._options_of("azure", AzureOptions),
            gcp=self._options_of("gcp", GcpOptions),
            karpenter=self._karpenter or KarpenterOptions(),
            store=StoreSettings(url=self._store_url),
            gateway=GatewaySettings(port=int(self.gateway_url.rsplit(":", 1)[1])),
            http=HttpSettings(port=free_port()),
            sensing=sensing,
            policy=PolicySettings(
                path=None if self._policy is None else str(self._policy),
                shadow_path=None if self._shadow is None else str(self._shadow),
            ),
            instance=name,
        )


def _check_port(name: str, port: int) -> None:
    with socket.socket() as probe:
        # As servers do: connections of the one before may linger.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as exc:
            told = f"port {port} of 127.0.0.1: {exc.strerror}; name another with --{name}-port, 0 takes a free one"
            raise ConfigError(name, [told]) from exc
