"""The settings of a process: one schema, read from a TOML file and the environment; the environment wins.

`[nats] url` is `GPU_AUTOSCALER_NATS_URL`; a list is written with commas. Thresholds of decisions are no settings:
they stand in the policy (`runtime/policies.py`).
"""

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

import msgspec
from msgspec import Meta

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.providers.aws import AwsOptions
from gpu_autoscaler.providers.azure import AzureOptions
from gpu_autoscaler.providers.gcp import GcpOptions
from gpu_autoscaler.providers.karpenter import KarpenterOptions
from gpu_autoscaler.runtime.documents import load_toml, validation_errors, struct_of, unknown_name
from gpu_autoscaler.store.opening import store_url_error

PREFIX = "GPU_AUTOSCALER_"
# Names under our prefix that are no settings: the clock (runtime/clock.py), the file itself, the traces of the demo,
# where the command line finds the gateway, and what tests are told.
_OTHER_VARIABLES = frozenset(
    {"CLOCK", "CONFIG", "TRACES", "CASES", "GATEWAY", "TOKEN", "CAPTURES", "CONTROLPLANE", "NATS_SERVER"}
)
# Kubernetes describes each Service of the namespace to its pods; one called gpu-autoscaler-gateway lands under our
# prefix. Source: Kubernetes documentation, "Service", section "Environment variables" (read 2026-11-21).
_SERVICE_LINK_WORDS = ("_SERVICE_HOST", "_SERVICE_PORT", "_TCP", "_UDP")
_SERVICE_LINK_VALUES = ("tcp://", "udp://")

Port = Annotated[int, Meta(ge=0, le=65535)]  # 0: any free one
Seconds = Annotated[float, Meta(gt=0)]


class NatsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The broker."""

    url: str = "nats://127.0.0.1:4222"  # several, with commas, for a cluster
    credentials_path: str | None = None  # a .creds file; None: the server asks for none
    replicas_count: Annotated[int, Meta(ge=1, le=5)] = 1  # copies of each stream; 3 on a cluster of three


class KubeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Kubernetes API. One of `url`, `kubeconfig_path`, `is_in_cluster`; none of them: the user's kubeconfig."""

    url: str | None = None
    token: str | None = None
    kubeconfig_path: str | None = None
    context: str | None = None
    is_in_cluster: bool = False
    is_read_only: bool = False  # nothing is written to the cluster, whatever its rights would allow
    namespace: str = "default"  # where jobs are made
    # Show who leads as a Lease of coordination.k8s.io in that namespace. The lease on the bus decides all the same.
    is_lease_shown: bool = False


class ProviderSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cloud that nodes are bought from."""

    name: str = "sim"
    url: str | None = None  # None: the cloud's own addresses
    token: str | None = None
    call_seconds_max: Seconds = 30.0  # wall time of one call


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The store of record."""

    # sqlite:/// and a file: three slashes are relative to the working folder, four absolute; for one machine.
    # postgresql://user@host:port/database: for several; the password in PGPASSWORD.
    url: str = "sqlite:///gpu-autoscaler.db"
    # Wall time between two snapshots of the state; a start reads what came since the last one. Source: our own.
    snapshot_seconds: Annotated[float, Meta(ge=1, le=3600)] = 180.0


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """REST, events and the live page. Beyond loopback only with tokens or TokenReview."""

    host: str = "127.0.0.1"
    port: Port = 8000
    tokens: tuple[str, ...] = ()  # bearer tokens that are let in
    is_token_review_on: bool = False  # ask Kubernetes whose token it is

    @property
    def requires_token(self) -> bool:
        """True when callers must show a token."""
        return bool(self.tokens) or self.is_token_review_on


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`/healthz`, `/readyz` and `/metrics` of this process."""

    host: str = "127.0.0.1"
    port: Port = 8081


class SensingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where telemetry and notices are read. In templates `{node_name}`, `{node_uid}`, `{internal_ip}`,
    `{provider_id}` stand for the node's own."""

    # Of the spot watcher: metadata of its own node, of every managed node by template, or what is read centrally.
    role: Literal["node", "nodes", "central"] = "central"
    node_name: str | None = None  # role node: which node this process runs on
    dcgm_url: str = "http://{internal_ip}:9400/metrics"
    metadata_url: str | None = None  # None: the cloud's own link-local address
    dcgm_scrape_seconds: Annotated[float, Meta(ge=1, le=60)] = 10.0  # CHECKLIST, Decisions, "intervals, retention"


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the scaling policy stands."""

    path: str | None = None  # None: the defaults of core/policy.py
    shadow_path: str | None = None  # of another policy that runs in shadow (service `shadow`); None: none does


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How this process speaks on stderr."""

    format: Literal["auto", "json", "text"] = "auto"  # auto: text on a terminal, else JSON
    level: Literal["debug", "info", "warning", "error"] = "info"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a process is told from outside."""

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
    instance: str = ""  # tells replicas apart in sources and logs; empty: host name and process id


def load_settings(path: Path | None, environment: Mapping[str, str]) -> Settings:
    """Return the settings of file and environment together. Raises ConfigError listing every mistake of both."""
    document = {} if path is None else load_toml(path)
    mistakes = validation_errors(document, Settings)
    from_environment, mistakes_of_environment = _read_environment(environment)
    mistakes += mistakes_of_environment
    source = "environment" if path is None else f"{path} and environment"
    if mistakes:
        raise ConfigError(source, mistakes)
    settings = msgspec.convert(_merged(document, from_environment), Settings)
    if contradictions := _contradictions(settings):
        raise ConfigError(source, contradictions)
    return settings


def to_environment(settings: Settings) -> dict[str, str]:
    """Return the variables that give another process these settings; what equals the default is left out."""
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


def _variables() -> dict[str, tuple[tuple[str, ...], Any]]:
    """Name without prefix -> path in the schema and type."""
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
    known, document, mistakes = _variables(), dict[str, Any](), list[str]()
    for variable, text in sorted(environment.items()):
        name = variable.removeprefix(PREFIX)
        if name == variable or name in _OTHER_VARIABLES or any(word in name for word in _SERVICE_LINK_WORDS):
            continue
        if text.startswith(_SERVICE_LINK_VALUES):
            mistakes.append(f"{variable}: set by Kubernetes for a Service; set enableServiceLinks: false on the pod")
            continue
        if name not in known:
            mistakes.append(unknown_name(variable, name, known))
            continue
        path, annotation = known[name]
        try:
            value = msgspec.convert(_split(text, annotation), annotation, strict=False)
        except msgspec.ValidationError as exc:
            mistakes.append(f"{variable}: {exc}")
            continue
        place = document
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
    return document, mistakes


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
    found = []
    if not settings.gateway.requires_token and not is_loopback(settings.gateway.host):
        found.append(
            f"gateway.host: {settings.gateway.host} is reachable from outside, and nobody is asked who they are; "
            "set gateway.tokens or gateway.is_token_review_on, or listen on 127.0.0.1"
        )
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
        found.append(f"kube: {' and '.join(ways)} are set; keep one")
    for key, url in (("kube.url", kube.url), ("provider.url", settings.provider.url)):
        if url is not None and not url.startswith(("http://", "https://")):
            found.append(f"{key}: {url!r} must start with http:// or https://")
    if (wrong := store_url_error(settings.store.url)) is not None:
        found.append(f"store.url: {wrong}")
    if settings.sensing.role == "node" and settings.sensing.node_name is None:
        found.append("sensing.node_name: is needed by sensing.role = 'node'; set it to the node this runs on")
    return found


def is_loopback(host: str) -> bool:
    """True when only this machine can reach the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
