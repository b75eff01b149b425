"""The declaration of the gateway."""

from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.bus.streams import LEASES
from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.runtime.process import ProcessContext
from gpu_autoscaler.runtime.publisher import Publisher
from gpu_autoscaler.runtime.runner import instance_name
from gpu_autoscaler.runtime.service import Service
from gpu_autoscaler_services.gateway.auth import Authenticator, SharedTokens, TokenReviews
from gpu_autoscaler_services.gateway.ledger import Ledger
from gpu_autoscaler_services.gateway.read_model import ReadModel
from gpu_autoscaler_services.gateway.recent_facts import Tail
from gpu_autoscaler_services.gateway.server import make_app, serving
from gpu_autoscaler_services.gateway.service import Gateway
from gpu_autoscaler_services.service_spec import CLUSTER_IDENTITY, Process, Right, ServiceSpec
from gpu_autoscaler_services.wiring import (
    follow_policy,
    open_bus,
    open_kube,
    open_process_store,
    policy_file,
    resumed_snapshots,
)


async def compose(context: ProcessContext) -> tuple[Service, Bus]:
    """Compose the service with its HTTP server."""
    policies = policy_file(context)
    ledger, bus, store = Ledger(), await open_bus(context, Gateway), await open_process_store(context)
    await resumed_snapshots(context, Gateway, store, bus)
    model = ReadModel(
        view=context.view,
        tail=Tail(bus, context.clock, observers={"COST": ledger.observe}),
        ledger=ledger,
        store=store,
        bus=bus,
        publisher=Publisher(
            bus,
            context.clock,
            context.metrics,
            service=Gateway.name,
            instance=instance_name(context.settings.instance),
            publishes=Gateway.publishes,
        ),
        policy_file=policies.now,
        clock=context.clock,
    )
    await follow_policy(context, policies, model.use_policy)
    app = make_app(model, authenticators=await _authenticators(context), readiness=context.readiness)
    await context.closing.enter_async_context(serving(app, context.settings.gateway))
    return Gateway(store), bus


async def _authenticators(context: ProcessContext) -> list[Authenticator]:
    settings = context.settings.gateway
    authenticators: list[Authenticator] = [SharedTokens(settings.tokens)] if settings.tokens else []
    if settings.is_token_review_enabled:
        authenticators.append(TokenReviews((await open_kube(context))[0]))
    return authenticators


SPEC = ServiceSpec(
    service=Gateway,
    compose=compose,
    processes=(Process(name="gateway", uses=("store", "policy", "kube"), chart_replicas=1, is_observer=True),),
    rights=(  # used only with token review
        CLUSTER_IDENTITY,
        Right(verbs=("create",), resource="tokenreviews", group="authentication.k8s.io"),
        Right(verbs=("create",), resource="subjectaccessreviews", group="authorization.k8s.io"),
    ),
    # It serves the streams as events, and shows which scaler is active.
    reads=(*sorted({fact.stream() for fact in FACTS}), LEASES.stream),
)
