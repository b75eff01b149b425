"""The declaration of the spot watcher and its roles."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import aiohttp

from gpu_autoscaler.bus.nats.requests import RequestLink
from gpu_autoscaler.cloudmeta import aws, azure, gcp
from gpu_autoscaler.cloudmeta.protocol import InstanceMetadata
from gpu_autoscaler.cloudmeta.reports import watcher_inbox
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.process import Composed, ProcessContext
from gpu_autoscaler_services.service_spec import CLUSTER_IDENTITY, Process, Right, ServiceSpec
from gpu_autoscaler_services.spot_watcher.interruption_queue import InterruptionQueue
from gpu_autoscaler_services.spot_watcher.metadata_poller import ManagedNodesPoller, Unreadable, metadata_session
from gpu_autoscaler_services.spot_watcher.node_reporter import NodeReporter
from gpu_autoscaler_services.spot_watcher.offers import OffersPoller
from gpu_autoscaler_services.spot_watcher.service import SpotWatcher
from gpu_autoscaler_services.wiring import (
    broker_addresses,
    follow_policy,
    open_bus,
    open_provider_of,
    policy_file,
    resume_state,
    tls_of,
)

NODE_WATCHER = "node_watcher"  # the name of a node's connection


def metadata_opener(
    provider: str, session: aiohttp.ClientSession, clock: Clock, *, is_waiting: bool = True
) -> tuple[Callable[[str], InstanceMetadata], str]:
    """Return a function that opens the metadata at a URL, and the cloud's link-local URL.

    Without `is_waiting` a read returns at once: for a caller that polls many instances in turn.
    """
    match provider:
        case "azure":
            return partial(azure.AzureMetadata, session), azure.LINK_LOCAL_URL
        case "gcp":
            wait_seconds = gcp.WAIT_SECONDS if is_waiting else 0
            opened = partial(
                gcp.GcpMetadata, session, now=clock.now, clock_factor=clock.factor, wait_seconds=wait_seconds
            )
            return opened, gcp.LINK_LOCAL_URL
        case _:  # an unknown provider uses EC2's format
            return partial(aws.AwsMetadata, session), aws.LINK_LOCAL_URL


async def compose(context: ProcessContext) -> Composed:
    """Compose the service for the role in `sensing.role`."""
    if context.settings.sensing.role == "node":
        return await _node_reporter(context)
    bus = await open_bus(context, SpotWatcher)
    await resume_state(context, SpotWatcher, bus)
    if context.settings.sensing.role == "nodes":
        return SpotWatcher(await _metadata_poller(context)), bus
    policies = policy_file(context)
    offers = OffersPoller(context.view, (await open_provider_of(context))[0], policies.now)
    await follow_policy(context, policies, offers.use_policy)
    return SpotWatcher(offers, _interruption_queue(context)), bus


async def _metadata_poller(context: ProcessContext) -> ManagedNodesPoller:
    """Role `nodes`."""

    def on_unreadable(unreadable: Mapping[str, str]) -> None:
        context.metrics.metadata_unreachable_nodes.set(len(unreadable))

    sensing = context.settings.sensing
    open_metadata, url = await _open_metadata(context, is_waiting=False)
    return ManagedNodesPoller(
        context.view, open_metadata, metadata_url=sensing.metadata_url or url, on_unreadable=on_unreadable
    )


async def _node_reporter(context: ProcessContext) -> NodeReporter:
    """Role `node`: an unready pod shows the node whose notices are missed."""
    nats, sensing = context.settings.nats, context.settings.sensing
    metrics, readiness = context.metrics, context.readiness

    def show(condition: str, reason: str | None) -> None:
        if reason is None:
            readiness.clear(condition)
        else:
            readiness.block(condition, reason)
        metrics.is_ready.set(readiness.is_ready)

    def on_unreadable(unreadable: Mapping[str, str]) -> None:
        metrics.metadata_unreachable_nodes.set(len(unreadable))
        show("notices", "; ".join(unreadable.values()) or None)

    def on_broker(failure: str | None) -> None:
        metrics.is_bus_connected.set(failure is None)
        show("bus", failure)

    def open_link(provider_id: ProviderId, on_change: Callable[[], None]) -> RequestLink:
        return RequestLink(
            broker_addresses(nats),
            name=NODE_WATCHER,
            inbox=watcher_inbox(provider_id),
            token=None if nats.token_path is None else Path(nats.token_path).read_text,
            tls=tls_of(nats),
            on_change=on_change,
        )

    open_metadata, url = await _open_metadata(context, is_waiting=True)
    on_broker("not connected yet")
    return NodeReporter(
        open_metadata(sensing.metadata_url or url),
        open_link,
        Unreadable(on_unreadable),
        node_name=sensing.node_name,
        now=context.clock.now,
        on_broker=on_broker,
        on_refused=lambda reason: show("reports", reason),
    )


async def _open_metadata(context: ProcessContext, *, is_waiting: bool) -> tuple[Callable[[str], InstanceMetadata], str]:
    session = await context.closing.enter_async_context(metadata_session())
    return metadata_opener(context.settings.provider.name, session, context.clock, is_waiting=is_waiting)


def _interruption_queue(context: ProcessContext) -> InterruptionQueue | None:
    """Open the cloud's queue of events, if the settings name one."""
    from gpu_autoscaler.providers.aws.queue import AwsQueue  # noqa: PLC0415 - the SDK is loaded only where it is used

    provider, aws = context.settings.provider, context.settings.aws
    if provider.name != "aws" or aws.queue_url is None:
        return None
    queue = AwsQueue(aws, url=provider.url, call_seconds_max=provider.call_seconds_max, now=context.clock.now)
    context.closing.push_async_callback(queue.close)
    return InterruptionQueue(context.view, queue, context.metrics.unparsed_queue_messages.inc)


SPEC = ServiceSpec(
    service=SpotWatcher,
    compose=compose,
    processes=(
        Process(
            name="spot-watcher-offers",
            chart_name="spot-watcher",
            role="central",
            uses=("snapshots", "policy", "kube", "cloud"),
            is_observer=True,
        ),
        Process(name="spot-watcher-notices", role="nodes", uses=("snapshots", "cloud")),
    ),
    rights=(CLUSTER_IDENTITY,),  # role central: whose instances are listed
    rights_with_karpenter=(Right(verbs=("list",), resource="nodeoverlays", group="karpenter.sh"),),  # price overrides
    rights_with_limits=(Right(verbs=("get",), resource="nodepools", group="karpenter.sh"),),
)
