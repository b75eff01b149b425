"""Settings become real adapters, adapters become a service. The only file that names NatsBus, KubeClient and the like.

A service's parts are imported where it is composed, so that a process loads only what it is.
"""
# ruff: noqa: PLC0415 - see above

from collections.abc import Callable, Mapping
from pathlib import Path

from gpu_autoscaler.bus.nats import NatsBus
from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.bus.streams import BUCKETS, ConsumerSpec, Declared, consumers_of_process, streams
from gpu_autoscaler.kube.client import KubeClient, read_only
from gpu_autoscaler.kube.connection import Connection, from_environment, from_service_account
from gpu_autoscaler.kube.credentials import FixedToken
from gpu_autoscaler.kube.hooks import Hooks
from gpu_autoscaler.kube.protocol import Cluster
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.providers.protocol import CapacityProvider
from gpu_autoscaler.runtime.config import KubeSettings, NatsSettings, Settings
from gpu_autoscaler.runtime.digests import core_digest, policy_digest
from gpu_autoscaler.runtime.following import PolicyFile, Use, following
from gpu_autoscaler.runtime.lease import Lease
from gpu_autoscaler.runtime.process import Compose, ProcessContext
from gpu_autoscaler.runtime.runner import instance_name
from gpu_autoscaler.runtime.service import Service
from gpu_autoscaler.runtime.snapshots import Snapshots, keeping
from gpu_autoscaler.store.opening import is_missing, open_store
from gpu_autoscaler.store.protocol import Store
from gpu_autoscaler_services.gateway.auth import Authenticator
from gpu_autoscaler_services.spot_watcher.events import CloudEvents


async def pod_watcher(place: ProcessContext) -> tuple[Service, Bus]:
    """Kubernetes -> facts."""
    from gpu_autoscaler_services.pod_watcher.service import PodWatcher

    kube, cluster = await _kube(place)
    return PodWatcher(kube, cluster), await _bus(place, PodWatcher)


async def dcgm_ingest(place: ProcessContext) -> tuple[Service, Bus]:
    """Exporters -> facts."""
    from gpu_autoscaler.dcgm.scrape import Scraper
    from gpu_autoscaler_services.dcgm_ingest.service import DcgmIngest

    sensing = place.settings.sensing
    scraper = Scraper()
    place.closing.push_async_callback(scraper.close)
    service = DcgmIngest(
        place.view,
        scraper,
        dcgm_url=sensing.dcgm_url,
        scrape_seconds=sensing.dcgm_scrape_seconds,
        tell_up=place.metrics.dcgm_up.set,
    )
    return service, await _bus(place, DcgmIngest)


async def spot_watcher(place: ProcessContext) -> tuple[Service, Bus]:
    """Metadata or provider -> facts, by role."""
    from gpu_autoscaler.cloudmeta.opening import metadata_opener
    from gpu_autoscaler_services.spot_watcher.offers import CentralOffers
    from gpu_autoscaler_services.spot_watcher.polls import NodeNotices, NodesNotices, metadata_session
    from gpu_autoscaler_services.spot_watcher.service import SpotWatcher, Watch

    def tell_deaf(deaf: Mapping[str, str]) -> None:
        place.metrics.metadata_unreachable_nodes.set(len(deaf))
        if not deaf:
            place.readiness.clear("notices")
        elif sensing.role == "node":  # a pod that is not ready shows on which node notices are missed
            place.readiness.block("notices", "; ".join(deaf.values()))

    sensing = place.settings.sensing
    watch: Watch
    events: CloudEvents | None = None
    if sensing.role == "central":
        policies = PolicyFile(_path(place.settings))
        watch = offers = CentralOffers(place.view, (await _provider(place))[0], policies.now)
        await _follow(place, policies, offers.use_policy)
        events = _cloud_events(place)
    else:
        session = await place.closing.enter_async_context(metadata_session())
        name, is_waiting = place.settings.provider.name, sensing.role == "node"
        opened, link_local_url = metadata_opener(name, session, place.clock, is_waiting=is_waiting)
        url = sensing.metadata_url or link_local_url
        if sensing.role == "node":
            watch = NodeNotices(place.view, opened(url), node_name=sensing.node_name, tell_deaf=tell_deaf)
        else:
            watch = NodesNotices(place.view, opened, metadata_url=url, tell_deaf=tell_deaf)
    return SpotWatcher(watch, events), await _bus(place, SpotWatcher)


def _cloud_events(place: ProcessContext) -> CloudEvents | None:
    """The cloud's queue of events, where the settings name one."""
    from gpu_autoscaler.providers.aws.queue import AwsQueue

    provider, aws = place.settings.provider, place.settings.aws
    if provider.name != "aws" or aws.queue_url is None:
        return None
    queue = AwsQueue(aws, url=provider.url, call_seconds_max=provider.call_seconds_max, now=place.clock.now)
    place.closing.push_async_callback(queue.close)
    return CloudEvents(place.view, queue, place.metrics.unparsed_queue_messages.inc)


async def scaler(place: ProcessContext) -> tuple[Service, Bus]:
    """State -> plan -> effect. It folds all that is decided by, so it is the one that keeps snapshots."""
    from gpu_autoscaler.kube.leases import ShownLease, showing
    from gpu_autoscaler_services.scaler.drains import Drains
    from gpu_autoscaler_services.scaler.executor import Executor
    from gpu_autoscaler_services.scaler.farewells import Farewells
    from gpu_autoscaler_services.scaler.guards import Guards
    from gpu_autoscaler_services.scaler.inventory import InstanceWatch
    from gpu_autoscaler_services.scaler.leftovers import Leftovers
    from gpu_autoscaler_services.scaler.past import Past
    from gpu_autoscaler_services.scaler.purchases import Purchases
    from gpu_autoscaler_services.scaler.service import Digests, Scaler

    policies = PolicyFile(_path(place.settings))
    bus, store = await _bus(place, Scaler), await _store(place)
    lease = Lease(bus, Scaler.name, instance_name(place.settings.instance), place.clock.monotonic_seconds)
    kube, _ = await _kube(place, before_write=lease.guard)
    if place.settings.kube.is_lease_shown:
        shown = ShownLease(kube, place.settings.kube.namespace, f"gpu-autoscaler-{Scaler.name}")
        await place.closing.enter_async_context(showing(shown, lease, place.clock.now))
    provider, installation = await _provider(place)
    snapshots = await _resumed(place, Scaler, store, bus)
    await place.closing.enter_async_context(keeping(snapshots, place.settings.store.snapshot_seconds))
    hooks = _hooks(place)
    executor = Executor(
        Purchases(place.view, provider, installation, place.clock.now),
        Drains(place.view, kube, place.clock, hooks),
        store,
        Guards(kube),
        Farewells(kube, hooks),
        Leftovers(kube, provider),
    )
    service = Scaler(
        place.view,
        policies.now,
        executor,
        Past(store, policies.now),
        InstanceWatch(provider, installation, place.clock),
        digests=Digests(policy=policy_digest(policies.now), core=core_digest()),
        figures=place.metrics,
        lease=lease,
    )
    await _follow(place, policies, lambda policy: service.use_policy(policy, str(policies.path)))
    return service, bus


async def scheduler(place: ProcessContext) -> tuple[Service, Bus]:
    """Requests -> queue -> placements -> Kubernetes Jobs."""
    from gpu_autoscaler_services.scheduler.binder import Binder
    from gpu_autoscaler_services.scheduler.service import Scheduler

    policies = PolicyFile(_path(place.settings))
    kube, _ = await _kube(place)
    binder = Binder(kube, place.settings.kube.namespace, _hooks(place))
    bus, store = await _bus(place, Scheduler), await _store(place)
    snapshots = await _resumed(place, Scheduler, store, bus)
    service = Scheduler(place.view, policies.now, store, binder, place.clock.now, snapshots.seed)
    await _follow(place, policies, service.use_policy)
    return service, bus


async def shadow(place: ProcessContext) -> tuple[Service, Bus]:
    """State -> what another policy would decide. No executor, no provider, no Kubernetes."""
    from gpu_autoscaler_services.shadow.service import Digests, Shadow

    path = place.settings.policy.shadow_path
    if path is None:
        raise ConfigError(
            "settings", ["policy.shadow_path: names no file; set it to the policy that is to run in shadow"]
        )
    real, other = PolicyFile(_path(place.settings)), PolicyFile(Path(path))
    digests = Digests(shadow=policy_digest(other.now), real=policy_digest(real.now), core=core_digest())
    service = Shadow(place.view, real.now, other.now, digests)
    await _follow(place, real, service.use_real)
    await _follow(place, other, service.use_shadow, condition="shadow policy")
    return service, await _bus(place, Shadow)


async def announcer(place: ProcessContext) -> tuple[Service, Bus]:
    """State -> Kubernetes Events."""
    from gpu_autoscaler.kube.announcing import EventWriter
    from gpu_autoscaler_services.announcer.service import Announcer

    policies = PolicyFile(_path(place.settings))
    kube, _ = await _kube(place)
    service = Announcer(place.view, policies.now, EventWriter(kube))
    await _follow(place, policies, service.use_policy)
    return service, await _bus(place, Announcer)


async def policy_watcher(place: ProcessContext) -> tuple[Service, Bus]:
    """Policies as objects -> what is in force of them."""
    from gpu_autoscaler.kube.announcing import EventWriter
    from gpu_autoscaler_services.policy_watcher.service import PolicyWatcher

    policies = PolicyFile(_path(place.settings))
    kube, _ = await _kube(place)
    service = PolicyWatcher(
        place.view,
        policies.now,
        kube,
        EventWriter(kube),
        provider=place.settings.provider.name,
        say=lambda words: place.readiness.note("policies", words),
    )
    await _follow(place, policies, service.use_policy)
    return service, await _bus(place, PolicyWatcher)


async def cost_tracker(place: ProcessContext) -> tuple[Service, Bus]:
    """Instances and pods -> money."""
    from gpu_autoscaler_services.cost_tracker.service import CostTracker

    service = CostTracker(
        place.view, await _store(place), instances_without_price=place.metrics.instances_without_price
    )
    return service, await _bus(place, CostTracker)


async def gateway(place: ProcessContext) -> tuple[Service, Bus]:
    """The record -> people and programs, and their wishes -> facts."""
    from gpu_autoscaler.runtime.publisher import Publisher
    from gpu_autoscaler_services.gateway.ledger import Ledger
    from gpu_autoscaler_services.gateway.reading import ReadModel
    from gpu_autoscaler_services.gateway.server import make_app, serving
    from gpu_autoscaler_services.gateway.service import Gateway
    from gpu_autoscaler_services.gateway.tail import Tail

    policies = PolicyFile(_path(place.settings))
    ledger, bus, store = Ledger(), await _bus(place, Gateway), await _store(place)
    await _resumed(place, Gateway, store, bus)
    model = ReadModel(
        view=place.view,
        tail=Tail(bus, place.clock, observers={"COST": ledger.observe}),
        ledger=ledger,
        store=store,
        bus=bus,
        publisher=Publisher(
            bus,
            place.clock,
            place.metrics,
            service=Gateway.name,
            instance=instance_name(place.settings.instance),
            publishes=Gateway.publishes,
        ),
        policy_file=policies.now,
        clock=place.clock,
    )
    await _follow(place, policies, model.use_policy)
    app = make_app(model, authenticators=await _authenticators(place), readiness=place.readiness)
    await place.closing.enter_async_context(serving(app, place.settings.gateway))
    return Gateway(store), bus


async def _authenticators(place: ProcessContext) -> list[Authenticator]:
    from gpu_autoscaler_services.gateway.auth import SharedTokens, TokenReviews

    found: list[Authenticator] = []
    if place.settings.gateway.tokens:
        found.append(SharedTokens(place.settings.gateway.tokens))
    if place.settings.gateway.is_token_review_on:
        found.append(TokenReviews((await _kube(place))[0]))
    return found


COMPOSE: Mapping[str, Compose] = {
    "pod_watcher": pod_watcher,
    "dcgm_ingest": dcgm_ingest,
    "spot_watcher": spot_watcher,
    "scaler": scaler,
    "scheduler": scheduler,
    "shadow": shadow,
    "announcer": announcer,
    "policy_watcher": policy_watcher,
    "cost_tracker": cost_tracker,
    "gateway": gateway,
}


# ---- adapters, each closed when the process ends


async def _bus(place: ProcessContext, service: type[Service]) -> NatsBus:
    """The broker, with everything that this service needs made or found to be as declared."""
    bus = await _connected(
        place.settings.nats,
        name=service.name,
        consumers=consumers_of_process(service.name, service.consumes),
        on_closed=place.lost.set,
    )
    place.closing.push_async_callback(bus.close)
    await bus.ensure()
    return bus


async def command_bus(settings: Settings, name: str) -> Bus:
    """The broker for a command that reads the record: nothing is made on it. The caller closes it."""
    return await _connected(settings.nats, name=name, consumers=())


async def command_store(settings: Settings) -> Store | None:
    """The store for a command that reads it; None where there is no file of it here. The caller closes it."""
    url = settings.store.url
    return None if is_missing(url) else await open_store(url, is_read_only=True)


async def _connected(
    nats: NatsSettings,
    *,
    name: str,
    consumers: tuple[ConsumerSpec, ...],
    on_closed: Callable[[], None] | None = None,
) -> NatsBus:
    return await NatsBus.connect(
        [url.strip() for url in nats.url.split(",")],
        name=name,
        declared=Declared(streams=streams(replicas_count=nats.replicas_count), consumers=consumers, buckets=BUCKETS),
        credentials=None if nats.credentials_path is None else Path(nats.credentials_path),
        on_closed=on_closed,
    )


async def _kube(place: ProcessContext, before_write: Callable[[], None] = lambda: None) -> tuple[KubeClient, Cluster]:
    kube = place.settings.kube
    guard = read_only if kube.is_read_only else before_write
    client = KubeClient(connection_of(kube), now=place.clock.now, before_write=guard)
    place.closing.push_async_callback(client.close)
    return client, await client.cluster()


def _hooks(place: ProcessContext) -> Hooks:
    hooks = Hooks()
    place.closing.push_async_callback(hooks.close)
    return hooks


def connection_of(kube: KubeSettings) -> Connection:
    """The cluster that these settings name. Raises ConfigError."""
    if kube.is_in_cluster:
        return from_service_account()
    if kube.url is None:
        return from_environment(kube.kubeconfig_path, kube.context)
    if kube.token is None:
        return Connection(base_url=kube.url.rstrip("/"))
    return Connection(base_url=kube.url.rstrip("/"), credentials=FixedToken(kube.token), source="kube.token")


async def _provider(place: ProcessContext) -> tuple[CapacityProvider, str]:
    """The provider, and the installation whose instances it makes."""
    from gpu_autoscaler.providers.registry import ProviderOptions, open_provider

    _, cluster = await _kube(place)
    provider = place.settings.provider
    opened = open_provider(
        provider.name,
        ProviderOptions(
            installation=cluster.installation,
            url=provider.url,
            call_seconds_max=provider.call_seconds_max,
            now=place.clock.now,
            aws=place.settings.aws,
            azure=place.settings.azure,
            gcp=place.settings.gcp,
            karpenter=place.settings.karpenter,
            kube=lambda: connection_of(place.settings.kube),
        ),
    )
    place.closing.push_async_callback(opened.close)
    return opened, cluster.installation


async def _store(place: ProcessContext) -> Store:
    store = await open_store(place.settings.store.url)
    place.closing.push_async_callback(store.close)
    return store


async def _resumed(place: ProcessContext, service: type[Service], store: Store, bus: Bus) -> Snapshots:
    """The view begins where the last snapshot ends, if one can be used; the runner reads on from there."""
    snapshots = Snapshots(
        service, place.view, store, bus, clock=place.clock, metrics=place.metrics, core_digest=core_digest()
    )
    await snapshots.resume()
    return snapshots


def _path(settings: Settings) -> Path | None:
    return None if settings.policy.path is None else Path(settings.policy.path)


async def _follow(place: ProcessContext, policies: PolicyFile, use: Use, *, condition: str = "policy") -> None:
    """Give the service every policy that the file comes to hold, for as long as it runs."""
    follows = following(policies, use, place.readiness, place.metrics, condition=condition)
    await place.closing.enter_async_context(follows)
