"""Reads kubeconfig files as kubectl does: which cluster, as which user. Called by `connection`; asks nobody.

What we cannot do as the file says is refused by name: to leave it out would be to act as somebody else.
Source: Kubernetes documentation, "kubeconfig (v1)" and "Organizing Cluster Access Using kubeconfig Files"
(read 2026-11-21).
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from gpu_autoscaler.model.errors import ConfigError

EntryT = TypeVar("EntryT", bound="_Entry")


class _Entry(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """Base of what has a name in a kubeconfig: kebab-case keys, unknown ones ignored."""


class ClusterEntry(_Entry, frozen=True, kw_only=True):
    """Where a cluster is, and whom to trust that it is there."""

    server: str = ""
    certificate_authority: str | None = None
    certificate_authority_data: str | None = None
    tls_server_name: str | None = None
    insecure_skip_tls_verify: bool = False
    proxy_url: str | None = None


class ExecVariable(msgspec.Struct, frozen=True):
    """A variable of a plugin's environment."""

    name: str
    value: str


class ExecEntry(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A program that knows the credentials."""

    command: str
    api_version: str
    args: tuple[str, ...] | None = None
    env: tuple[ExecVariable, ...] | None = None
    install_hint: str = ""
    interactive_mode: str = "IfAvailable"
    provide_cluster_info: bool = False


class UserEntry(_Entry, frozen=True, kw_only=True):
    """How a user shows who they are."""

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
    """A user at a cluster."""

    cluster: str = ""
    user: str = ""


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """What a kubeconfig says of one context. Paths are absolute."""

    cluster: ClusterEntry
    user: UserEntry
    source: str  # as it is named in messages: the user and the file


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
    """Return the files to read: the one that is named, those of $KUBECONFIG, or the user's own, in this order."""
    if named:
        return (Path(named).expanduser(),)
    listed = [Path(one) for one in environment.get("KUBECONFIG", "").split(os.pathsep) if one]
    return tuple(listed) or (Path("~/.kube/config").expanduser(),)


def read(files: Sequence[Path], context: str | None) -> Chosen:
    """Return what these files say of a context, the current one where none is named. Raises ConfigError.

    Of several files the first that has a name has the last word on it, as with kubectl; files of a list may be missing.
    """
    there = [path for path in files if path.is_file()]
    told = ", ".join(map(str, files))
    if not there:
        raise refused(f"no kubeconfig at {told}; set kube.kubeconfig_path (or $KUBECONFIG) to one, or kube.url")
    documents = [(path, _document(path)) for path in there]
    wanted = context or next((one.current_context for _, one in documents if one.current_context), None)
    if not wanted:
        raise refused(f"{told} has no current-context; set kube.context to one of {_names(documents, 'contexts')}")
    chosen = _find(documents, "contexts", wanted, lambda named, _: named.context)
    cluster = _find(documents, "clusters", chosen.cluster, _cluster)
    # A context without a user is one of a server that asks for nobody, such as `kubectl proxy`.
    user = _find(documents, "users", chosen.user, _user) if chosen.user else UserEntry()
    source = f"user {chosen.user!r} of {told}"
    if mistakes := _mistakes(chosen.cluster, cluster, chosen.user, user):
        raise ConfigError(f"kubernetes ({told}, context {wanted!r})", mistakes)
    return Chosen(cluster=cluster, user=user, source=source)


def refused(mistake: str) -> ConfigError:
    """Return the error that stands for one mistake in what says how to reach Kubernetes."""
    return ConfigError("kubernetes", [mistake])


def _document(path: Path) -> _Document:
    try:
        return msgspec.convert(yaml.safe_load(path.read_bytes()) or {}, _Document)
    except (OSError, yaml.YAMLError, msgspec.ValidationError) as exc:
        told = " ".join(str(exc).split())
        raise refused(f"{path} is no kubeconfig that can be read: {told}; `kubectl config view` says more") from exc


def _find(documents: Any, section: str, name: str, of: Any) -> Any:  # noqa: ANN401 - one of three kinds of entry
    for path, document in documents:
        for named in getattr(document, section) or ():
            if named.name == name and (entry := of(named, path.parent)) is not None:
                return entry
    known = _names(documents, section)
    raise refused(f"{', '.join(str(path) for path, _ in documents)}: {section} has no {name!r}; there is {known}")


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
    """Paths in a kubeconfig begin where the file is."""
    found = {name: str((folder / value).absolute()) for name in fields if (value := getattr(entry, name))}
    return msgspec.structs.replace(entry, **found)


def _mistakes(cluster_name: str, cluster: ClusterEntry, user_name: str, user: UserEntry) -> list[str]:
    cluster_at, user_at = f"cluster {cluster_name!r}", f"user {user_name!r}"
    found = []
    if not cluster.server.startswith(("https://", "http://")):
        found.append(f"{cluster_at}: server {cluster.server!r} is no https:// address; correct it")
    if cluster.insecure_skip_tls_verify:
        found.append(
            f"{cluster_at}: insecure-skip-tls-verify would let anybody answer in the server's place; "
            "give certificate-authority-data instead"
        )
    if cluster.proxy_url:
        found.append(f"{cluster_at}: proxy-url is not supported; reach the server directly or through a tunnel")
    if user.as_:
        found.append(f"{user_at}: impersonation (as: {user.as_}) is not supported; give us a user of our own")
    if user.auth_provider is not None:
        kind = user.auth_provider.get("name", "without a name")
        found.append(f"{user_at}: auth-provider {kind} is not supported; use an exec plugin (kubelogin, gke-gcloud)")
    if user.username:
        found.append(f"{user_at}: Kubernetes has no passwords since 1.19; use a token, a certificate or a plugin")
    if user.exec is not None and user.exec.interactive_mode == "Always":
        found.append(
            f"{user_at}: the plugin {user.exec.command} wants to ask somebody, and nobody is here; use another"
        )
    return found
