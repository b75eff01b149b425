"""Reads kubeconfig files like kubectl: which cluster, as which user. Used by `connection`; makes no calls.

Unsupported settings are errors: to ignore one could mean acting as another user. Source: Kubernetes documentation,
"kubeconfig (v1)" and "Organizing Cluster Access Using kubeconfig Files" (read 2026-11-21).
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gpu_autoscaler.model.errors import ConfigError

EntryT = TypeVar("EntryT", bound="_Entry")


class _Entry(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """Base of the entries of a kubeconfig: kebab-case keys, unknown ones ignored."""


class ClusterEntry(_Entry, frozen=True, kw_only=True):
    """Address and certificate authority of a cluster."""

    server: str = ""
    certificate_authority: str | None = None
    certificate_authority_data: str | None = None
    tls_server_name: str | None = None
    insecure_skip_tls_verify: bool = False
    proxy_url: str | None = None


class ExecVariable(msgspec.Struct, frozen=True):
    """An environment variable of a plugin."""

    name: str
    value: str


class ExecEntry(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A credential plugin."""

    command: str
    api_version: str
    args: tuple[str, ...] | None = None
    env: tuple[ExecVariable, ...] | None = None
    install_hint: str = ""
    interactive_mode: str = "IfAvailable"
    provide_cluster_info: bool = False


class UserEntry(_Entry, frozen=True, kw_only=True):
    """Credentials of a user."""

    token: str | None = None
    token_file: str | None = msgspec.field(default=None, name="tokenFile")
    client_certificate: str | None = None
    client_certificate_data: str | None = None
    client_key: str | None = None
    client_key_data: str | None = None
    exec: ExecEntry | None = None
    username: str | None = None
    auth_provider: dict[str, Any] | None = None
    as_: str | None = msgspec.field(default=None, name="as")


class ContextEntry(_Entry, frozen=True, kw_only=True):
    """A cluster and a user."""

    cluster: str = ""
    user: str = ""


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster and user of one context. Paths are absolute."""

    cluster: ClusterEntry
    user: UserEntry
    source: str  # user and file, as shown in messages


class _Named(msgspec.Struct, frozen=True):
    name: str
    cluster: ClusterEntry | None = None
    user: UserEntry | None = None
    context: ContextEntry | None = None


class _Document(_Entry, frozen=True, kw_only=True):
    clusters: tuple[_Named, ...] | None = None
    users: tuple[_Named, ...] | None = None
    contexts: tuple[_Named, ...] | None = None
    current_context: str | None = None


def paths(named: str | None, environment: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the files to read: the named one, otherwise those of $KUBECONFIG, otherwise ~/.kube/config."""
    if named:
        return (Path(named).expanduser(),)
    listed = [Path(path) for path in environment.get("KUBECONFIG", "").split(os.pathsep) if path]
    return tuple(listed) or (Path("~/.kube/config").expanduser(),)


def read(files: Sequence[Path], context: str | None) -> Chosen:
    """Return a context of these files, by default the current one. Raises ConfigError. As in kubectl, the first file
    that defines a name takes precedence, and files of a list may be missing."""
    existing = [path for path in files if path.is_file()]
    names = ", ".join(map(str, files))
    if not existing:
        raise config_error(f"no kubeconfig at {names}; set kube.kubeconfig_path (or $KUBECONFIG) to one, or kube.url")
    documents = [(path, _document(path)) for path in existing]
    context_name = context or next(
        (document.current_context for _, document in documents if document.current_context), None
    )
    if not context_name:
        raise config_error(
            f"{names} has no current-context; set kube.context to one of {_names(documents, 'contexts')}"
        )
    chosen = _find(documents, "contexts", context_name, lambda named, _: named.context)
    cluster = _find(documents, "clusters", chosen.cluster, _cluster)
    # A context without a user is for a server without authentication, such as `kubectl proxy`.
    user = _find(documents, "users", chosen.user, _user) if chosen.user else UserEntry()
    source = f"user {chosen.user!r} of {names}"
    if errors := _unsupported(chosen.cluster, cluster, chosen.user, user):
        raise ConfigError(f"kubernetes ({names}, context {context_name!r})", errors)
    return Chosen(cluster=cluster, user=user, source=source)


def config_error(error: str) -> ConfigError:
    """Return a ConfigError about the connection to Kubernetes."""
    return ConfigError("kubernetes", [error])


def _document(path: Path) -> _Document:
    import yaml  # noqa: PLC0415 - slow to load, and pods have no kubeconfig

    try:
        return msgspec.convert(yaml.safe_load(path.read_bytes()) or {}, _Document)
    except (OSError, yaml.YAMLError, msgspec.ValidationError) as exc:
        detail = " ".join(str(exc).split())
        raise config_error(f"{path} is not a valid kubeconfig: {detail}; check it with `kubectl config view`") from exc


def _find(documents: Any, section: str, name: str, of: Any) -> Any:  # noqa: ANN401 - one of three entry types
    for path, document in documents:
        for named in getattr(document, section) or ():
            if named.name == name and (entry := of(named, path.parent)) is not None:
                return entry
    known = _names(documents, section)
    raise config_error(f"{', '.join(str(path) for path, _ in documents)}: {section} has no {name!r}; defined: {known}")


def _names(documents: Iterable[tuple[Path, _Document]], section: str) -> str:
    names = dict.fromkeys(named.name for _, document in documents for named in getattr(document, section) or ())
    return ", ".join(map(repr, names)) or "none"


def _cluster(named: _Named, folder: Path) -> ClusterEntry | None:
    return None if named.cluster is None else _absolute(named.cluster, folder, ("certificate_authority",))


def _user(named: _Named, folder: Path) -> UserEntry | None:
    if named.user is None:
        return None
    user = _absolute(named.user, folder, ("token_file", "client_certificate", "client_key"))
    if user.exec is not None and os.sep in user.exec.command:
        command = str((folder / user.exec.command).absolute())
        user = msgspec.structs.replace(user, exec=msgspec.structs.replace(user.exec, command=command))
    return user


def _absolute(entry: EntryT, folder: Path, fields: Iterable[str]) -> EntryT:
    """Resolve paths, which are relative to the kubeconfig's folder."""
    resolved = {name: str((folder / value).absolute()) for name in fields if (value := getattr(entry, name))}
    return msgspec.structs.replace(entry, **resolved)


def _unsupported(cluster_name: str, cluster: ClusterEntry, user_name: str, user: UserEntry) -> list[str]:
    cluster_at, user_at = f"cluster {cluster_name!r}", f"user {user_name!r}"
    errors = []
    if not cluster.server.startswith(("https://", "http://")):
        errors.append(f"{cluster_at}: server {cluster.server!r} is not an https:// address; correct it")
    if cluster.insecure_skip_tls_verify:
        errors.append(
            f"{cluster_at}: insecure-skip-tls-verify would accept any server; set certificate-authority-data instead"
        )
    if cluster.proxy_url:
        errors.append(f"{cluster_at}: proxy-url is not supported; reach the server directly or through a tunnel")
    if user.as_:
        errors.append(f"{user_at}: impersonation (as: {user.as_}) is not supported; create a user for gpu-autoscaler")
    if user.auth_provider is not None:
        kind = user.auth_provider.get("name", "without a name")
        errors.append(f"{user_at}: auth-provider {kind} is not supported; use an exec plugin (kubelogin, gke-gcloud)")
    if user.username:
        errors.append(f"{user_at}: Kubernetes has no passwords since 1.19; use a token, a certificate or a plugin")
    if user.exec is not None and user.exec.interactive_mode == "Always":
        errors.append(
            f"{user_at}: plugin {user.exec.command} needs interactive input, which is unavailable; use another"
        )
    return errors
