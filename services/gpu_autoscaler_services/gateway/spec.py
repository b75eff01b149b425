"""The declaration of the gateway. `server.py` serves HTTP, the handlers are in `api/`."""

from datetime import datetime, timedelta
from typing import ClassVar

from gpu_autoscaler.bus.streams import LEASES
from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.gpu import GpuNodeSampled
from gpu_autoscaler.events.job import JobCancelRequested, JobRequested
from gpu_autoscaler.events.policy import PolicyDirectiveGiven, PolicyDirectiveLifted
from gpu_autoscaler.events.shadow import ShadowPlanMade
from gpu_autoscaler.kube.client import KubeClient, read_only
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.process import Composed, ProcessContext
from gpu_autoscaler.runtime.publisher import Publisher
from gpu_autoscaler.runtime.runner import instance_name
from gpu_autoscaler.runtime.service import Outputs
from gpu_autoscaler.store.protocol import Store
from gpu_autoscaler_services import wiring
from gpu_autoscaler_services.gateway.api.logs import LogSource
from gpu_autoscaler_services.gateway.auth import Authenticator, SharedTokens, TokenReviews
from gpu_autoscaler_services.gateway.cost_history import CostHistory
from gpu_autoscaler_services.gateway.ledger import Ledger
from gpu_autoscaler_services.gateway.read_model import ReadModel
from gpu_autoscaler_services.gateway.recent_facts import Tail
from gpu_autoscaler_services.gateway.server import make_app, serving
from gpu_autoscaler_services.service_spec import CLUSTER_IDENTITY, Process, Right, ServiceSpec

# Not folded: the tail (`recent_facts.py`) reads them.
_NOT_FOLDED = frozenset({GpuNodeSampled, ShadowPlanMade})


class Gateway:
    """REST entry point: shows the recorded state, and publishes requests of people and programs."""

    name: ClassVar[str] = "gateway"
    consumes: ClassVar[tuple[type[Fact], ...]] = ()
    folds: ClassVar[tuple[type[Fact], ...]] = tuple(fact for fact in FACTS if fact not in _NOT_FOLDED)
    publishes: ClassVar[tuple[type[Fact], ...]] = (
        JobRequested,
        JobCancelRequested,
        DemandReported,
        PolicyDirectiveGiven,
        PolicyDirectiveLifted,
    )
    urgent: ClassVar[tuple[type[Fact], ...]] = ()
    tick_seconds: ClassVar[float | None] = 3600.0

    def __init__(self, store: Store, request_age_max: timedelta) -> None:
        self._store = store
        self._request_age_max = request_age_max

    async def on_tick(self, now: datetime) -> Outputs:
        """Delete expired Idempotency-Keys. Publishes nothing."""
        await self._store.delete_requests(now - self._request_age_max)
        return ()


async def compose(context: ProcessContext) -> Composed:
    """Compose the service with its HTTP server."""
    policies = wiring.policy_file(context)
    ledger, bus, store = Ledger(), await wiring.open_bus(context, Gateway), await wiring.open_process_store(context)
    await wiring.resumed_snapshots(context, Gateway, store, bus)
    model = ReadModel(
        view=context.view,
        tail=Tail(bus, context.clock, observers={"COST": ledger.observe}),
        cost_history=CostHistory(
            ledger,
            store,
            context.clock.now,
            span_days=context.settings.store.span_days,
            ledger_days=context.settings.store.ledger_days,
        ),
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
        are_pod_templates_allowed=context.settings.gateway.are_pod_templates_allowed,
        are_dangerous_fields_allowed=context.settings.gateway.are_dangerous_fields_allowed,
        are_env_values_shown=context.settings.gateway.are_env_values_shown,
    )
    await wiring.follow_policy(context, policies, model.use_policy)
    settings = context.settings.gateway
    authenticators: list[Authenticator] = [SharedTokens(settings.tokens)] if settings.tokens else []
    if settings.is_token_review_enabled:
        authenticators.append(TokenReviews((await wiring.open_kube(context))[0]))
    app = make_app(model, authenticators=authenticators, readiness=context.readiness, logs=_logs(context))
    await context.closing.enter_async_context(serving(app, context.settings.gateway))
    return Gateway(store, timedelta(days=context.settings.store.request_days)), bus


def _logs(context: ProcessContext) -> LogSource:
    """Return the cluster's logs; a gateway without a cluster serves everything else."""
    try:
        client = KubeClient(wiring.connection_of(context.settings.kube), now=context.clock.now, before_write=read_only)
    except ConfigError as error:
        return LogSource(None, str(error))
    context.closing.push_async_callback(client.close)
    return LogSource(client)


SPEC = ServiceSpec(
    service=Gateway,
    compose=compose,
    processes=(Process(name="gateway", uses=("store", "policy", "kube"), chart_replicas=1, is_observer=True),),
    rights=(
        CLUSTER_IDENTITY,  # these three only with token review
        Right(verbs=("create",), resource="tokenreviews", group="authentication.k8s.io"),
        Right(verbs=("create",), resource="subjectaccessreviews", group="authorization.k8s.io"),
        Right(verbs=("list",), resource="pods"),  # these two for logs of jobs
        Right(verbs=("get",), resource="pods/log"),
    ),
    # It serves the streams as events, and shows which scaler is active.
    reads=(*sorted({fact.stream() for fact in FACTS}), LEASES.stream),
)
