"""Node watchers and the gateway that they report to, on a real broker."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_autoscaler.bus.nats.auth_callout import CALLOUT_SUBJECT, Issuer, new_issuer_seed
from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.nats.requests import Reconnects, RequestLink, answering
from gpu_autoscaler.bus.permissions import password_variable, server_text
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.bus.streams import BUCKETS, BusDeclaration, streams
from gpu_autoscaler.cloudmeta.protocol import ReclaimNotice
from gpu_autoscaler.cloudmeta.reports import ALL_REPORTS, watcher_inbox
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.runner import Runner
from gpu_autoscaler_services.node_gateway.admission import Admission, Callout, KubernetesApi
from gpu_autoscaler_services.node_gateway.service import NodeGateway, ReportInbox
from gpu_autoscaler_services.permissions import NODE_WATCHER, OPERATOR_USER, fresh_passwords, users
from gpu_autoscaler_services.spot_watcher.metadata_poller import Unreadable
from gpu_autoscaler_services.spot_watcher.node_reporter import NodeReporter

PASSWORDS = fresh_passwords()
QUICK = Reconnects(first_seconds_max=0.2, seconds_max=0.5, hurried_seconds_max=0.1)


class Broker:
    """A server with the project's users, and the auth callout if asked for."""

    def __init__(self, folder: Path, *, with_callout: bool, monitor: bool = False) -> None:
        self.seed = new_issuer_seed()
        self.issuer = Issuer(self.seed)
        text = server_text(users(), callout_issuer=self.issuer.public_key if with_callout else None)
        self.server = NatsServer(folder, settings=(text,), variables=PASSWORDS, monitor=monitor)

    def url(self, user: str | None = None) -> str:
        """The address for a user; None: for one that connects with a token."""
        if user is None:
            return self.server.url
        return self.server.url.replace("://", f"://{user}:{PASSWORDS[password_variable(user)]}@")

    def bus(self, user: str) -> "asyncio.Future[NatsBus]":
        """Connect as this user."""
        declared = BusDeclaration(streams=streams(), buckets=BUCKETS)
        return asyncio.ensure_future(NatsBus.connect(self.url(user), name=user, declared=declared))


@asynccontextmanager
async def serving_broker(folder: Path, *, with_callout: bool, monitor: bool = False) -> AsyncIterator[Broker]:
    """A broker with its streams."""
    broker = Broker(folder, with_callout=with_callout, monitor=monitor)
    await broker.server.start()
    try:
        bus = await broker.bus(OPERATOR_USER)
        await bus.ensure()
        await bus.close()
        yield broker
    finally:
        await broker.server.stop()


@asynccontextmanager
async def gateway(
    broker: Broker, kubernetes: KubernetesApi | None = None, *, account: str = "", life_share: float = 1.0
) -> AsyncIterator[Runner]:
    """A node gateway; with the API server also its auth callout."""
    name, view, clock = NodeGateway.name, StateView(), Clock()
    async with AsyncExitStack() as closing:
        bus = await broker.bus(name)
        closing.push_async_callback(bus.close)
        inbox = ReportInbox(clock.now)
        receivers = {ALL_REPORTS: inbox.receive}
        if kubernetes is not None:
            callout = Callout(
                Admission(kubernetes, account=account),
                broker.issuer,
                wall_now=lambda: datetime.now(UTC),
                life_share=lambda: life_share,
            )
            receivers[CALLOUT_SUBJECT] = callout.receive
            await closing.enter_async_context(_running(callout.run()))
        await closing.enter_async_context(
            answering([broker.url(name)], name=f"{name}-answers", group=name, receivers=receivers)
        )
        runner = Runner(NodeGateway(view, inbox), bus, view=view, clock=clock)
        running = asyncio.create_task(runner.run())
        try:
            yield runner
        finally:
            runner.stop()
            await running


class Metadata:
    """The metadata of one instance."""

    def __init__(self, provider_id: ProviderId) -> None:
        self._provider_id = provider_id
        self.notices: tuple[ReclaimNotice, ...] = ()
        self.rebalance_at: datetime | None = None
        self.is_unreachable = False

    async def reclaim_notices(self) -> Sequence[ReclaimNotice]:
        """Return the notices, or fail."""
        if self.is_unreachable:
            raise TransientError("no answer")
        return self.notices

    async def rebalance_recommended_at(self) -> datetime | None:
        """Return the recommendation."""
        return self.rebalance_at

    async def provider_id(self) -> ProviderId:
        """Return the instance."""
        return self._provider_id


@asynccontextmanager
async def watcher(
    metadata: Metadata,
    url: str,
    *,
    token: Callable[[], str] | None = None,
    reconnects: Reconnects = QUICK,
    links: list[RequestLink] | None = None,
    refusals: list[str | None] | None = None,
) -> AsyncIterator[NodeReporter]:
    """The watcher of one node. Its connection is added to `links`."""

    def open_link(provider_id: ProviderId, on_change: Callable[[], None]) -> RequestLink:
        link = RequestLink(
            [url],
            name=NODE_WATCHER,
            inbox=watcher_inbox(provider_id),
            token=token,
            on_change=on_change,
            reconnects=reconnects,
        )
        if links is not None:
            links.append(link)
        return link

    reporter = NodeReporter(
        metadata,
        open_link,
        Unreadable(lambda _: None),
        node_name="n1",
        now=Clock().now,
        on_refused=lambda reason: None if refusals is None else refusals.append(reason),
    )
    running = asyncio.create_task(reporter.run())
    try:
        yield reporter
    finally:
        reporter.stop()
        await running


@asynccontextmanager
async def _running(work: Any) -> AsyncIterator[None]:  # noqa: ANN401 - any coroutine
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    """Wait until this holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def notices(runner: Runner) -> Mapping[str, Any]:
    """The notices that the gateway's state holds, by id."""
    return runner.view.state.notices
