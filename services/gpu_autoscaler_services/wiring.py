"""Opens adapters by the settings: the only module that names NatsBus, KubeClient and the like.

Each is closed when the process ends.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import structlog

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.nats.link import NatsLink, Timeouts
from gpu_autoscaler.bus.nats.open import Tls, open_link
from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.bus.stream_limits import stream_limits
from gpu_autoscaler.bus.streams import BusDeclaration, ConsumerSpec, StreamSpec, buckets, streams
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.kube.checkpoint_hooks import CheckpointHooks
from gpu_autoscaler.kube.client import KubeClient, read_only
from gpu_autoscaler.kube.connection import Connection, from_environment, from_service_account
from gpu_autoscaler.kube.credentials import StaticToken
from gpu_autoscaler.kube.protocol import Cluster
from gpu_autoscaler.model.errors import ConfigError, TransientError
from gpu_autoscaler.providers.protocol import CapacityProvider
from gpu_autoscaler.runtime.config import KubeSettings, NatsSettings, Settings
from gpu_autoscaler.runtime.digests import core_digest
from gpu_autoscaler.runtime.history import History
from gpu_autoscaler.runtime.policy_reload import PolicyFile, Use, following_policy_file
from gpu_autoscaler.runtime.process import ProcessContext
from gpu_autoscaler.runtime.service import MemoryInput, Service, consumers_of
from gpu_autoscaler.runtime.snapshots import Snapshots
from gpu_autoscaler.store.opening import is_missing, open_store
from gpu_autoscaler.store.protocol import Store

log = structlog.get_logger()


async def open_bus(context: ProcessContext, service: type[Service]) -> NatsBus:
    """Connect to the broker, and create or check the streams, consumers and buckets that this service needs."""
    bus = await _connected(
        context.settings.nats, name=service.name, consumers=consumers_of(service), on_closed=context.lost.set
    )
    context.closing.push_async_callback(bus.close)
    context.metrics.is_bus_parser_stock.set(bus.is_parser_stock)
    await bus.ensure()
    return bus


async def command_bus(settings: Settings, name: str) -> Bus:
    """Connect to the broker for a command that only reads it. The caller closes the connection."""
    return await _connected(settings.nats, name=name, consumers=())


async def command_store(settings: Settings) -> Store | None:
    """Open the store read-only for a command; None if its file does not exist. The caller closes it."""
    url = settings.store.url
    return None if is_missing(url) else await open_store(url, is_read_only=True)


@asynccontextmanager
async def migrator_link(settings: Settings, name: str) -> AsyncIterator[NatsLink]:
    """Connect to the broker to change its streams and consumers."""
    nats = settings.nats
    credentials = _path(nats.credentials_path)
    link = await open_link(
        broker_addresses(nats), name=name, timeouts=Timeouts(), credentials=credentials, tls=tls_of(nats)
    )
    try:
        yield link
    finally:
        await link.close()


def declared_streams(nats: NatsSettings) -> tuple[StreamSpec, ...]:
    """Return the streams as the settings declare them."""
    return streams(stream_limits(nats.stream_limits), nats.replicas_count)


def broker_addresses(nats: NatsSettings) -> list[str]:
    """Return the addresses of the broker's servers."""
    return [url.strip() for url in nats.url.split(",")]


async def _connected(
    nats: NatsSettings, *, name: str, consumers: tuple[ConsumerSpec, ...], on_closed: Callable[[], None] | None = None
) -> NatsBus:
    return await NatsBus.connect(
        broker_addresses(nats),
        name=name,
        declared=BusDeclaration(
            streams=declared_streams(nats), consumers=consumers, buckets=buckets(nats.replicas_count)
        ),
        credentials=_path(nats.credentials_path),
        tls=tls_of(nats),
        on_closed=on_closed,
    )


def tls_of(nats: NatsSettings) -> Tls | None:
    """Return how connections to the broker are encrypted; None: not, unless its address begins with tls://."""
    parts = (nats.tls_ca_path, nats.tls_certificate_path, nats.tls_server_name)
    if all(part is None for part in parts):
        return None
    return Tls(
        ca=_path(nats.tls_ca_path),
        certificate=_path(nats.tls_certificate_path),
        key=_path(nats.tls_key_path),
        server_name=nats.tls_server_name,
    )


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)


async def open_kube(
    context: ProcessContext, before_write: Callable[[], None] = lambda: None
) -> tuple[KubeClient, Cluster]:
    """Connect to Kubernetes and identify the cluster. `before_write` is called before each write and may raise."""
    kube = context.settings.kube
    check = read_only if kube.is_read_only else before_write
    client = KubeClient(connection_of(kube), now=context.clock.now, before_write=check)
    context.closing.push_async_callback(client.close)
    return client, await client.cluster()


def open_hooks(context: ProcessContext) -> CheckpointHooks:
    """Open the client of checkpoint hooks."""
    hooks = CheckpointHooks()
    context.closing.push_async_callback(hooks.close)
    return hooks


def connection_of(kube: KubeSettings) -> Connection:
    """Return the connection to the cluster of these settings. Raises ConfigError."""
    if kube.is_in_cluster:
        return from_service_account()
    if kube.url is None:
        return from_environment(kube.kubeconfig_path, kube.context)
    if kube.token is None:
        return Connection(base_url=kube.url.rstrip("/"))
    return Connection(base_url=kube.url.rstrip("/"), credentials=StaticToken(kube.token), source="kube.token")


async def open_provider_of(context: ProcessContext) -> tuple[CapacityProvider, str]:
    """Open the provider; return it with the installation id that tags its instances."""
    from gpu_autoscaler.providers.registry import ProviderOptions, open_provider  # noqa: PLC0415 - loads cloud SDKs

    _, cluster = await open_kube(context)
    provider = context.settings.provider
    opened = open_provider(
        provider.name,
        ProviderOptions(
            installation=cluster.installation,
            url=provider.url,
            call_seconds_max=provider.call_seconds_max,
            now=context.clock.now,
            aws=context.settings.aws,
            azure=context.settings.azure,
            gcp=context.settings.gcp,
            karpenter=context.settings.karpenter,
            kube=lambda: connection_of(context.settings.kube),
        ),
    )
    context.closing.push_async_callback(opened.close)
    return opened, cluster.installation


async def open_process_store(context: ProcessContext) -> Store:
    """Open the store of the settings."""
    store = await open_store(context.settings.store.url)
    context.closing.push_async_callback(store.close)
    return store


async def resumed_snapshots(
    context: ProcessContext, service: type[Service], store: Store, bus: Bus, memory: MemoryInput | None = None
) -> Snapshots:
    """Restore the view, and the service's own memory, from the last usable snapshot; the runner continues reading from
    there."""
    snapshots = _snapshots(context, service, store, bus, memory)
    snapshots.age_max = timedelta(days=context.settings.store.snapshot_days)
    await snapshots.resume()
    return snapshots


async def resume_state(
    context: ProcessContext, service: type[Service], bus: Bus, age_min: timedelta = timedelta()
) -> None:
    """Restore the view from the last usable snapshot, for a service that needs the store for nothing else.

    The store is open during the call, read-only. While it is missing or away, the whole streams are read. `age_min`:
    see Snapshots.
    """
    try:
        store = await command_store(context.settings)
        if store is None:
            log.info("no store found, whole streams are read")
            return
        try:
            snapshots = _snapshots(context, service, store, bus)
            snapshots.age_min = age_min
            await snapshots.resume()
        finally:
            await store.close()
    except (TransientError, ConfigError) as exc:
        log.warning("snapshot not read, whole streams are read, which takes longer", error=str(exc))


async def last_facts(context: ProcessContext, bus: Bus, facts: Sequence[type[Fact]]) -> list[Recorded]:
    """Return the last stored fact of each type, without types that have none."""
    history = History(bus, context.clock)
    return [last for fact in facts if (last := await history.last(fact)) is not None]


def _snapshots(
    context: ProcessContext, service: type[Service], store: Store, bus: Bus, memory: MemoryInput | None = None
) -> Snapshots:
    return Snapshots(
        service,
        context.view,
        store,
        History(bus, context.clock),
        clock=context.clock,
        metrics=context.metrics,
        core_digest=core_digest(),
        memory=memory,
    )


def policy_file(context: ProcessContext) -> PolicyFile:
    """Load the policy file of the settings; the default policy without one. Raises ConfigError."""
    path = context.settings.policy.path
    return PolicyFile(None if path is None else Path(path))


async def follow_policy(context: ProcessContext, policies: PolicyFile, use: Use, *, condition: str = "policy") -> None:
    """Pass every new version of the policy file to the service, for as long as the process runs."""
    follows = following_policy_file(policies, use, context.readiness, context.metrics, condition=condition)
    await context.closing.enter_async_context(follows)
