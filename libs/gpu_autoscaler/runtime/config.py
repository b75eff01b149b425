"""The settings of a process: one schema, read from a TOML file and the environment; the environment takes precedence.

`[nats] url` is `GPU_AUTOSCALER_NATS_URL`; lists are comma-separated. Thresholds of decisions belong to the policy, not
to the settings (`runtime/policies.py`).
"""

import ipaddress
import re
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from gpu_autoscaler.bus.stream_limits import stream_limits
from gpu_autoscaler.model.document_errors import struct_of, unknown_name, validation_errors
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.providers.aws.options import AwsOptions
from gpu_autoscaler.providers.azure.options import AzureOptions
from gpu_autoscaler.providers.gcp.options import GcpOptions
from gpu_autoscaler.providers.karpenter.options import KarpenterOptions
from gpu_autoscaler.runtime.documents import load_toml
from gpu_autoscaler.store.opening import store_url_error

PREFIX = "GPU_AUTOSCALER_"
HIDDEN = "(hidden)"
_SECRETS = frozenset({"token", "tokens"})  # settings whose values are never shown
# Variables with our prefix that are not settings: the clock (runtime/clock.py), the settings file, the demo's traces,
# the gateway of the command line, and parameters of tests.
_OTHER_VARIABLES = frozenset(
    {"CLOCK", "CONFIG", "TRACES", "CASES", "GATEWAY", "TOKEN", "CAPTURES", "CONTROLPLANE", "NATS_SERVER"}
)
# Kubernetes sets variables for each Service of the namespace; those of gpu-autoscaler-gateway have our prefix. Source:
# Kubernetes documentation, "Service", section "Environment variables" (read 2026-11-21).
_SERVICE_LINK_WORDS = ("_SERVICE_HOST", "_SERVICE_PORT", "_TCP", "_UDP")
_SERVICE_LINK_VALUES = ("tcp://", "udp://")

Port = Annotated[int, Meta(ge=0, le=65535)]  # 0: any free port
Seconds = Annotated[float, Meta(gt=0)]


NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # Kubernetes documentation, "Namespaces"
REPLICAS_COUNTS = (1, 3, 5)  # an even number has the majority of the next odd one, and one more server to lose


class NatsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The broker."""

    url: str = "nats://127.0.0.1:4222"  # comma-separated for a cluster
    credentials_path: str | None = None  # a .creds file; None: no authentication
    # Of the spot watcher in role node: the service-account token to connect with; None: the password in `url`.
    token_path: str | None = None
    # Of the node gateway: the seed of the key that signs logins of node watchers, and the Kubernetes user name of their
    # account. None: no auth callout, node watchers share a password.
    issuer_seed_path: str | None = None
    node_account: str | None = None
    replicas_count: Annotated[int, Meta(ge=1, le=5)] = 1  # copies of each stream and bucket; 3 on a cluster of three
    # Sizes and ages of streams other than the declared ones (docs/operations.md): "NODE=1GiB/14d". The same in every
    # process; on a broker that has the streams already, `gpu-autoscaler migrate` applies them.
    stream_limits: tuple[str, ...] = ()
    # TLS. With any of these every connection is encrypted, and a server without TLS is refused.
    tls_ca_path: str | None = None  # PEM; the authority of the server's certificate. None: those of the system
    tls_certificate_path: str | None = None  # PEM; our own certificate, for a server that verifies its clients
    tls_key_path: str | None = None  # PEM; its key
    tls_server_name: str | None = None  # in the server's certificate; None: the host of the address


class KubeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Kubernetes API. At most one of `url`, `kubeconfig_path`, `is_in_cluster`; default: the user's kubeconfig."""

    url: str | None = None
    token: str | None = None
    kubeconfig_path: str | None = None
    context: str | None = None
    is_in_cluster: bool = False
    is_read_only: bool = False  # never write to the cluster, whatever RBAC allows
    namespace: str = "default"  # of the Kubernetes Jobs that the scheduler creates
    # Watch ResourceQuotas, so that nothing is bought for pods that they refuse. Off by default: releases up to 0.2 set
    # facts about them aside (docs/designs/012-resource-quotas.md).
    are_quotas_watched: bool = False
    # Serve ProvisioningRequests (docs/beside-kueue.md). Off by default: releases up to 0.2 set facts about them aside,
    # and a cluster-autoscaler that serves them as well would answer the same requests.
    are_provisioning_requests_served: bool = False
    # Mirror the leader as a coordination.k8s.io Lease in that namespace. The lease on the bus remains authoritative.
    is_lease_mirrored: bool = False


class ProviderSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cloud that nodes are launched in."""

    name: str = "sim"
    url: str | None = None  # None: the cloud's public endpoints
    token: str | None = None
    call_seconds_max: Seconds = 30.0  # wall time of one call


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The store of record."""

    # sqlite:/// and a file path, for one machine: three slashes are relative to the working directory, four absolute.
    # postgresql://user@host:port/database, for several machines; the password in PGPASSWORD.
    url: str = "sqlite:///gpu-autoscaler.db"
    # Wall time between two snapshots of the state; a start reads only the facts since the last one. Source: our own.
    snapshot_seconds: Annotated[float, Meta(ge=1, le=3600)] = 180.0
    # Retention, in days. Spans of minutes become one row an instance and day; with the defaults, 30 days of 1,000
    # nodes take less than 5 GiB (docs/operations.md). Source: our own.
    span_days: Annotated[int, Meta(ge=1, le=400)] = 1
    ledger_days: Annotated[int, Meta(ge=63, le=36_500)] = 400  # of these rows; sums of spend use the last 62 days
    plan_days: Annotated[int, Meta(ge=1, le=400)] = 7
    job_days: Annotated[int, Meta(ge=63, le=36_500)] = 400  # since their end; longer than the stream JOB
    snapshot_days: Annotated[int, Meta(ge=1, le=20)] = 7  # one an hour; recomputing older plans reads the streams
    audit_days: Annotated[int, Meta(ge=1, le=36_500)] = 400  # of entries of the audit trail
    request_days: Annotated[int, Meta(ge=1, le=400)] = 1  # of Idempotency-Keys and their answers


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """REST, event stream and dashboard. Listens beyond loopback only with tokens or TokenReview."""

    host: str = "127.0.0.1"
    port: Port = 8000
    tokens: tuple[str, ...] = ()  # accepted bearer tokens
    is_token_review_enabled: bool = False  # authenticate bearer tokens with the TokenReview API of Kubernetes
    # Whether callers may submit pod templates, which may use all Secrets and service accounts of the jobs' namespace.
    are_pod_templates_allowed: bool = True
    # Whether callers may submit pod templates that reach beyond their pod: hostPath, privileged, hostNetwork ...
    are_dangerous_fields_allowed: bool = False
    are_env_values_shown: bool = False  # whether events show the values of environment variables of jobs
    # With TokenReview: accept tokens for the API server besides those with the audience gpu-autoscaler.io. Whoever sees
    # such a token can use it at the API server.
    is_cluster_token_accepted: bool = True
    # Rights (docs/rights.md). Namespace in which rights that belong to no project are checked; empty: kube.namespace.
    namespace: str = ""
    # Namespaces in which the rights of projects are checked: "research=team-r"; "*=jobs": of all other projects. A
    # project without an entry: the namespace of its name.
    project_namespaces: tuple[str, ...] = ()
    # Without Kubernetes: projects in which clients that the broker identifies may submit jobs: "anna=research", in all:
    # "anna=*"; "*=research": of all other clients. A client without an entry: in none.
    client_projects: tuple[str, ...] = ()
    # The right of 0.2, get and create on jobs.gpu-autoscaler.io in all namespaces, grants everything.
    is_single_right_accepted: bool = True
    role_prefix: str = "gpu-autoscaler"  # of the chart's ClusterRoles, which refusals name
    # OpenID Connect: accept tokens of this issuer (its URL, https) for this audience. Claims name user and groups; the
    # prefixes keep them apart from names of Kubernetes. Rights are checked by Kubernetes.
    oidc_issuer: str | None = None
    oidc_audience: str | None = None
    oidc_user_claim: str = "sub"
    oidc_user_prefix: str = "oidc:"
    oidc_groups_claim: str = "groups"
    oidc_groups_prefix: str = "oidc:"
    oidc_ca_path: str | None = None  # PEM; the authority of the issuer's certificate. None: those of the system
    # TLS: PEM files, read again when they change. None: HTTP.
    tls_certificate_path: str | None = None
    tls_key_path: str | None = None

    @property
    def requires_token(self) -> bool:
        """True when callers must present a token."""
        return bool(self.tokens) or self.is_token_review_enabled or self.oidc_issuer is not None


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`/healthz`, `/readyz` and `/metrics` of this process."""

    host: str = "127.0.0.1"
    port: Port = 8081


class SensingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sources of telemetry and interruption notices. URLs may use the placeholders `{node_name}`, `{node_uid}`,
    `{internal_ip}` and `{provider_id}`."""

    # Of the spot watcher: the metadata of its own node, of every managed node by URL template, or the central queues.
    role: Literal["node", "nodes", "central"] = "central"
    node_name: str | None = None  # role "node": the node that this process runs on
    dcgm_url: str = "http://{internal_ip}:9400/metrics"
    metadata_url: str | None = None  # None: the cloud's link-local address
    dcgm_scrape_seconds: Annotated[float, Meta(ge=1, le=60)] = 10.0  # docs/decisions.md#intervals-and-retention


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files of scaling policies."""

    path: str | None = None  # None: the default policy
    shadow_path: str | None = None  # policy of the service `shadow`; None: no shadow policy


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Logs on stderr."""

    format: Literal["auto", "json", "text"] = "auto"  # auto: text on a terminal, otherwise JSON
    level: Literal["debug", "info", "warning", "error"] = "info"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a process."""

    nats: NatsSettings = NatsSettings()
    kube: KubeSettings = KubeSettings()
    provider: ProviderSettings = ProviderSettings()
    aws: AwsOptions = AwsOptions()  # of provider.name = "aws"
    azure: AzureOptions = AzureOptions()  # of provider.name = "azure"
    gcp: GcpOptions = GcpOptions()  # of provider.name = "gcp"
    karpenter: KarpenterOptions = KarpenterOptions()  # of provider.name = "karpenter"
    store: StoreSettings = StoreSettings()
    gateway: GatewaySettings = GatewaySettings()
    http: HttpSettings = HttpSettings()
    sensing: SensingSettings = SensingSettings()
    policy: PolicySettings = PolicySettings()
    log: LogSettings = LogSettings()
    instance: str = ""  # identifies a replica in sources and logs; empty: host name and process id


def load_settings(path: Path | None, environment: Mapping[str, str]) -> Settings:
    """Return the settings of file and environment combined. Raises ConfigError listing every error of both."""
    document = {} if path is None else load_toml(path)
    errors = list(validation_errors(document, Settings))
    from_environment, environment_errors = _read_environment(environment)
    errors += environment_errors
    source = "environment" if path is None else f"{path} and environment"
    if errors:
        raise ConfigError(source, errors)
    settings = msgspec.convert(_merged(document, from_environment), Settings)
    if contradictions := _contradictions(settings):
        raise ConfigError(source, contradictions)
    return settings


def to_environment(settings: Settings) -> dict[str, str]:
    """Return the environment variables that give another process these settings, without those at their default."""
    variables = {}
    for name, (path, _) in _variables().items():
        value: Any = settings
        default: Any = Settings()
        for key in path:
            value, default = getattr(value, key), getattr(default, key)
        if value != default and value is not None:
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            variables[PREFIX + name] = text.lower() if isinstance(value, bool) else text
    return variables


def shown(settings: Settings) -> Iterator[tuple[str, Any, bool]]:
    """Yield key, value and whether it is the default of each setting, for people: without tokens and passwords."""
    defaults = Settings()
    for path, _ in _variables().values():
        value, default = attrgetter(".".join(path))(settings), attrgetter(".".join(path))(defaults)
        yield ".".join(path), _without_secrets(path[-1], msgspec.to_builtins(value)), value == default


def _without_secrets(name: str, value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, list | tuple):
        return [_without_secrets(name, item) for item in value]
    if name in _SECRETS:
        return None if value is None else HIDDEN
    # A name and a password before the host of an address.
    return re.sub(r"(?<=://)[^/@\s]*@", f"{HIDDEN}@", value) if isinstance(value, str) else value


def _variables() -> dict[str, tuple[tuple[str, ...], Any]]:
    """Return path and type of each setting by its variable name without prefix."""
    variables: dict[str, tuple[tuple[str, ...], Any]] = {}
    for section in msgspec.structs.fields(Settings):
        schema = struct_of(section.type)
        if schema is None:
            variables[section.name.upper()] = ((section.name,), section.type)
            continue
        for field in msgspec.structs.fields(schema):
            variables[f"{section.name}_{field.name}".upper()] = ((section.name, field.name), field.type)
    return variables


def _read_environment(environment: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    known, document, errors = _variables(), dict[str, Any](), list[str]()
    for variable, text in sorted(environment.items()):
        name = variable.removeprefix(PREFIX)
        if name == variable or name in _OTHER_VARIABLES or any(word in name for word in _SERVICE_LINK_WORDS):
            continue
        if text.startswith(_SERVICE_LINK_VALUES):
            errors.append(f"{variable}: set by Kubernetes for a Service; set enableServiceLinks: false on the pod")
            continue
        if name not in known:
            errors.append(unknown_name(variable, name, known))
            continue
        path, annotation = known[name]
        try:
            value = msgspec.convert(_split(text, annotation), annotation, strict=False)
        except msgspec.ValidationError as exc:
            errors.append(f"{variable}: {exc}")
            continue
        table = document
        for key in path[:-1]:
            table = table.setdefault(key, {})
        table[path[-1]] = value
    return document, errors


def _split(text: str, annotation: Any) -> str | list[str]:  # noqa: ANN401 - a type expression has no type
    if get_origin(annotation) is tuple:
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        merged[key] = _merged(merged.get(key, {}), value) if isinstance(value, dict) else value
    return merged


def _contradictions(settings: Settings) -> list[str]:
    errors = []
    if not settings.gateway.requires_token and not is_loopback(settings.gateway.host):
        errors.append(
            f"gateway.host: {settings.gateway.host} is reachable from other machines without authentication; "
            "set gateway.tokens, gateway.is_token_review_enabled or gateway.oidc_issuer, or listen on 127.0.0.1"
        )
    errors += _gateway_contradictions(settings.gateway)
    errors += _nats_contradictions(settings.nats)
    kube = settings.kube
    ways = [
        name
        for name, is_set in (
            ("url", kube.url),
            ("kubeconfig_path", kube.kubeconfig_path),
            ("is_in_cluster", kube.is_in_cluster),
        )
        if is_set
    ]
    if len(ways) > 1:
        errors.append(f"kube: {' and '.join(ways)} exclude each other; keep one")
    for key, url in (("kube.url", kube.url), ("provider.url", settings.provider.url)):
        if url is not None and not url.startswith(("http://", "https://")):
            errors.append(f"{key}: {url!r} must start with http:// or https://")
    if (error := store_url_error(settings.store.url)) is not None:
        errors.append(f"store.url: {error}")
    if settings.sensing.role == "node" and settings.sensing.node_name is None:
        errors.append("sensing.node_name: required by sensing.role = 'node'; set it to the node this process runs on")
    return errors


def _gateway_contradictions(gateway: GatewaySettings) -> list[str]:
    errors = []
    for entry in gateway.project_namespaces:
        project, _, namespace = entry.rpartition("=")
        if not project or not NAMESPACE.fullmatch(namespace):
            errors.append(f"gateway.project_namespaces: {entry!r} is not project=namespace; example: research=team-r")
    for entry in gateway.client_projects:
        client, _, project = entry.rpartition("=")
        if not client or not project:
            errors.append(f"gateway.client_projects: {entry!r} is not client=project; example: anna=research")
    if (gateway.tls_certificate_path is None) is not (gateway.tls_key_path is None):
        errors.append("gateway.tls_certificate_path, gateway.tls_key_path: set both, or neither for HTTP")
    if (gateway.oidc_issuer is None) is not (gateway.oidc_audience is None):
        errors.append("gateway.oidc_issuer, gateway.oidc_audience: set both; a token for others must not be accepted")
    issuer = urlsplit(gateway.oidc_issuer or "https://unset")
    if issuer.scheme != "https" and not (issuer.scheme == "http" and is_loopback(issuer.hostname or "")):
        errors.append(f"gateway.oidc_issuer: {gateway.oidc_issuer!r} must start with https://; its keys are trusted")
    return errors


def _nats_contradictions(nats: NatsSettings) -> list[str]:
    errors = []
    if nats.replicas_count not in REPLICAS_COUNTS:
        errors.append(
            f"nats.replicas_count: {nats.replicas_count} copies tolerate no more lost servers than "
            f"{nats.replicas_count - 1}; set {', '.join(map(str, REPLICAS_COUNTS[:-1]))} or {REPLICAS_COUNTS[-1]}"
        )
    if (nats.tls_certificate_path is None) is not (nats.tls_key_path is None):
        given, missing = ("certificate", "key") if nats.tls_key_path is None else ("key", "certificate")
        errors.append(
            f"nats.tls_{missing}_path: required by nats.tls_{given}_path; set both, or neither for a server that does "
            "not verify its clients"
        )
    try:
        stream_limits(nats.stream_limits)
    except ValueError as exc:
        errors += [f"nats.stream_limits: {error}" for error in str(exc).split("\n")]
    return errors


def is_loopback(host: str) -> bool:
    """True when only this machine can reach the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
