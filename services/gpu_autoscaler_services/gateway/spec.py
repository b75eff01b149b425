"""The declaration of the gateway. `server.py` serves HTTP, the handlers are in `api/`."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import ClassVar

from gpu_autoscaler.bus.client_subjects import ALL_CLIENT_REQUESTS
from gpu_autoscaler.bus.nats.requests import answering
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
from gpu_autoscaler.runtime.config import GatewaySettings, Settings
from gpu_autoscaler.runtime.process import Composed, ProcessContext
from gpu_autoscaler.runtime.publisher import Publisher
from gpu_autoscaler.runtime.runner import instance_name
from gpu_autoscaler.runtime.service import Outputs
from gpu_autoscaler.store.protocol import Store
from gpu_autoscaler_services import wiring
from gpu_autoscaler_services.background import background
from gpu_autoscaler_services.gateway.access import (
    AccessReviews,
    AccessRules,
    CheckedNamespaces,
    KubernetesReviews,
    client_projects_of,
    namespaces_of,
)
from gpu_autoscaler_services.gateway.api.logs import LogSource
from gpu_autoscaler_services.gateway.audit_projection import AuditProjection, cut_expired, following
from gpu_autoscaler_services.gateway.auth import Authenticator, SharedTokens, TokenReviews
from gpu_autoscaler_services.gateway.client_requests import ClientRequests
from gpu_autoscaler_services.gateway.cost_history import CostHistory
from gpu_autoscaler_services.gateway.ledger import Ledger
from gpu_autoscaler_services.gateway.read_model import ReadModel
from gpu_autoscaler_services.gateway.recent_facts import Tail
from gpu_autoscaler_services.gateway.server import STATE_CONDITION, make_app, serving
from gpu_autoscaler_services.service_spec import CLUSTER_IDENTITY, Process, Right, ServiceSpec

# Not folded: the tail (`recent_facts.py`) reads them.
_NOT_FOLDED = frozenset({GpuNodeSampled, ShadowPlanMade})


def rules_of(settings: Settings, kubernetes: KubernetesReviews) -> AccessRules:
    """Return how the settings check rights."""
    gateway = settings.gateway
    return AccessRules(
        authorizer=AccessReviews(kubernetes, is_single_right_accepted=gateway.is_single_right_accepted),
        namespaces=CheckedNamespaces(
            namespace=gateway.namespace or settings.kube.namespace,
            by_project=namespaces_of(gateway.project_namespaces),
            role_prefix=gateway.role_prefix,
        ),
    )


def oidc_tokens(settings: GatewaySettings, issuer: str, audience: str) -> Authenticator:
    """Return what identifies the callers of an OpenID Connect provider. Raises ConfigError."""
    from gpu_autoscaler_services.gateway.oidc import OidcOptions, OidcTokens  # noqa: PLC0415 - loads cryptography

    options = OidcOptions(
        issuer=issuer,
        audience=audience,
        user_claim=settings.oidc_user_claim,
        user_prefix=settings.oidc_user_prefix,
        groups_claim=settings.oidc_groups_claim,
        groups_prefix=settings.oidc_groups_prefix,
        ca_path=settings.oidc_ca_path,
    )
    return OidcTokens(options)


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

    def __init__(self, store: Store, request_age_max: timedelta, audit_age_max: timedelta) -> None:
        self._store = store
        self._request_age_max = request_age_max
        self._audit_age_max = audit_age_max

    async def on_tick(self, now: datetime) -> Outputs:
        """Delete expired Idempotency-Keys and audit entries. Publishes nothing."""
        await self._store.delete_requests(now - self._request_age_max)
        await cut_expired(self._store, now, self._audit_age_max)
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
        settings=context.settings,
        are_pod_templates_allowed=context.settings.gateway.are_pod_templates_allowed,
        are_dangerous_fields_allowed=context.settings.gateway.are_dangerous_fields_allowed,
        are_env_values_shown=context.settings.gateway.are_env_values_shown,
    )
    await wiring.follow_policy(context, policies, model.use_policy)
    settings = context.settings.gateway
    authenticators: list[Authenticator] = [SharedTokens(settings.tokens)] if settings.tokens else []
    rules = AccessRules(client_projects=client_projects_of(settings.client_projects))
    if settings.oidc_issuer is not None and settings.oidc_audience is not None:
        authenticators.append(oidc_tokens(settings, settings.oidc_issuer, settings.oidc_audience))
    if settings.is_token_review_enabled or settings.oidc_issuer is not None:
        kube, _ = await wiring.open_kube(context)
        rules = rules_of(context.settings, kube)
        if settings.is_token_review_enabled:
            authenticators.append(TokenReviews(kube, is_cluster_token_accepted=settings.is_cluster_token_accepted))
    logs = _logs(context)
    app = make_app(model, authenticators=authenticators, rules=rules, readiness=context.readiness, logs=logs)
    await context.closing.enter_async_context(serving(app, context.settings.gateway))
    await _answer_clients(context, model, rules)
    await context.closing.enter_async_context(following(AuditProjection(store, bus, context.clock), model.audit))
    days = context.settings.store
    return Gateway(store, timedelta(days=days.request_days), timedelta(days=days.audit_days)), bus


def _logs(context: ProcessContext) -> LogSource:
    """Return the cluster's logs; a gateway without a cluster serves everything else."""
    try:
        client = KubeClient(wiring.connection_of(context.settings.kube), now=context.clock.now, before_write=read_only)
    except ConfigError as error:
        return LogSource(None, str(error))
    context.closing.push_async_callback(client.close)
    return LogSource(client)


async def _answer_clients(context: ProcessContext, model: ReadModel, rules: AccessRules) -> None:
    """Answer the clients that the broker identifies, for as long as the process runs."""
    readiness = context.readiness

    def is_ready() -> bool:
        return readiness.conditions.get(STATE_CONDITION, "not started") is None

    requests = ClientRequests(model, rules, is_ready=is_ready)
    await context.closing.enter_async_context(background(requests.run(), "client requests"))
    nats = context.settings.nats
    await context.closing.enter_async_context(
        answering(
            wiring.broker_addresses(nats),
            name=f"{Gateway.name}-answers",
            group=Gateway.name,
            receivers={ALL_CLIENT_REQUESTS: requests.receive},
            credentials=None if nats.credentials_path is None else Path(nats.credentials_path),
            tls=wiring.tls_of(nats),
            on_closed=context.lost.set,
        )
    )


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
    answers=(ALL_CLIENT_REQUESTS,),
    # It serves the streams as events, and shows which scaler is active.
    reads=(*sorted({fact.stream() for fact in FACTS}), LEASES.stream),
)
