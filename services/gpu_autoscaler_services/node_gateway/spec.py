"""The declaration of the node gateway."""

import random
from pathlib import Path

from gpu_autoscaler.bus.nats.auth_callout import CALLOUT_SUBJECT, Issuer
from gpu_autoscaler.bus.nats.requests import answering
from gpu_autoscaler.cloudmeta.reports import ALL_REPORTS
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.process import Composed, ProcessContext
from gpu_autoscaler_services.background import background
from gpu_autoscaler_services.node_gateway.admission import LOGIN_LIFE_SHARE_MIN, Admission, Callout
from gpu_autoscaler_services.node_gateway.service import NodeGateway, ReportInbox
from gpu_autoscaler_services.service_spec import Process, Right, ServiceSpec
from gpu_autoscaler_services.wiring import broker_addresses, connection_of, open_bus, resume_state, tls_of


async def compose(context: ProcessContext) -> Composed:
    """Compose the service, with the auth callout if the settings name the issuer's seed."""
    bus = await open_bus(context, NodeGateway)
    await resume_state(context, NodeGateway, bus)
    metrics = context.metrics
    inbox = ReportInbox(context.clock.now, lambda outcome: metrics.node_reports.labels(outcome).inc())
    receivers = {ALL_REPORTS: inbox.receive}
    callout = _callout(context)
    if callout is not None:
        receivers[CALLOUT_SUBJECT] = callout.receive
        await context.closing.enter_async_context(background(callout.run(), "logins"))
    nats, name = context.settings.nats, NodeGateway.name
    await context.closing.enter_async_context(
        answering(
            broker_addresses(nats),
            name=f"{name}-answers",
            group=name,
            receivers=receivers,
            tls=tls_of(nats),
            on_closed=context.lost.set,
        )
    )
    return NodeGateway(context.view, inbox, lambda outcome: metrics.node_reports.labels(outcome).inc()), bus


def _callout(context: ProcessContext) -> Callout | None:
    nats = context.settings.nats
    if nats.issuer_seed_path is None:
        return None
    if nats.node_account is None:
        error = "nats.node_account: required with nats.issuer_seed_path; set the user name of the watchers' account"
        raise ConfigError("auth callout", [error])
    kube = KubeClient(connection_of(context.settings.kube), now=context.clock.now)
    context.closing.push_async_callback(kube.close)
    return Callout(
        Admission(kube, account=nats.node_account),
        Issuer.from_file(Path(nats.issuer_seed_path)),
        wall_now=context.clock.wall_now,
        life_share=lambda: random.uniform(LOGIN_LIFE_SHARE_MIN, 1.0),  # noqa: S311 - spreads load, no security
        on_outcome=lambda outcome: context.metrics.node_logins.labels(outcome).inc(),
    )


SPEC = ServiceSpec(
    service=NodeGateway,
    compose=compose,
    processes=(Process(name="node-gateway", uses=("snapshots", "kube"), chart_replicas=2, condition="node_watchers"),),
    rights=(  # used only with the auth callout
        Right(verbs=("create",), resource="tokenreviews", group="authentication.k8s.io"),
        Right(verbs=("get",), resource="nodes"),
    ),
    answers=(ALL_REPORTS, CALLOUT_SUBJECT),
)
