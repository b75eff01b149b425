"""Connections to a cluster: address, certificate authority, and credentials that may change at run time."""

import base64
import binascii
import ipaddress
import os
import shutil
import ssl
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from gpu_autoscaler.kube import kubeconfig
from gpu_autoscaler.kube.credentials import (
    Anonymous,
    CertificateFiles,
    Credentials,
    ExecPlugin,
    StaticToken,
    TokenFile,
    load_certificate,
)
from gpu_autoscaler.kube.kubeconfig import Chosen, ClusterEntry, UserEntry, config_error

# Mounted into every pod. Source: Kubernetes documentation, "Accessing the Kubernetes API from a Pod" (read 2026-11-21).
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """Address of the API server, and our credentials."""

    base_url: str
    credentials: Credentials = Anonymous()
    tls: ssl.SSLContext | None = None  # None: the system's trust store, or no TLS
    tls_server_name: str | None = None  # the name in the server's certificate, if it differs from the address
    source: str = "no credentials"  # origin of the credentials, as shown in messages


def from_kubeconfig(path: str | None = None, context: str | None = None) -> Connection:
    """Return the connection of a kubeconfig: `path`, otherwise $KUBECONFIG or ~/.kube/config. Raises ConfigError."""
    chosen = kubeconfig.read(kubeconfig.paths(path, os.environ), context)
    url = chosen.cluster.server.rstrip("/")
    tls = _trust(chosen.cluster) if url.startswith("https://") else None
    credentials = _credentials(chosen, tls)
    if tls is None and not isinstance(credentials, Anonymous) and not _is_loopback(url):
        raise config_error(
            f"{url} would receive the credentials of {chosen.source} unencrypted; use its https:// address"
        )
    return Connection(
        base_url=url,
        credentials=credentials,
        tls=tls,
        tls_server_name=chosen.cluster.tls_server_name,
        source=chosen.source,
    )


def from_service_account(folder: Path = SERVICE_ACCOUNT) -> Connection:
    """Return the connection of this pod's service account. Its token is reread. Raises ConfigError."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
    if not host or not port:
        raise config_error(
            "KUBERNETES_SERVICE_HOST and _PORT are not set: not running in a pod; set kube.kubeconfig_path or kube.url"
        )
    token, authority = folder / "token", folder / "ca.crt"
    if not token.is_file():
        raise config_error(
            f"{token} is missing; set automountServiceAccountToken: true on the pod, or kube.kubeconfig_path"
        )
    return Connection(
        base_url=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        credentials=TokenFile(token),
        tls=_trust(ClusterEntry(certificate_authority=str(authority))),
        source=f"the service account in {folder}",
    )


def from_environment(path: str | None = None, context: str | None = None) -> Connection:
    """Return the connection of a named kubeconfig, otherwise of this pod, otherwise of the user's kubeconfig. Raises
    ConfigError."""
    if path is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
        return from_service_account()
    return from_kubeconfig(path, context)


def _trust(cluster: ClusterEntry) -> ssl.SSLContext:
    """Trust the cluster's certificate authority, or the system's without one. Certificates are always verified."""
    try:
        if cluster.certificate_authority_data:
            pem = base64.b64decode(cluster.certificate_authority_data, validate=True).decode("ascii")
            return ssl.create_default_context(cadata=pem)
        return ssl.create_default_context(cafile=cluster.certificate_authority)
    except (OSError, ssl.SSLError, binascii.Error, UnicodeDecodeError) as exc:
        source = cluster.certificate_authority or "certificate-authority-data"
        raise config_error(f"{source} contains no readable certificates: {exc}; take them from the cluster") from exc


def _credentials(chosen: Chosen, tls: ssl.SSLContext | None) -> Credentials:
    """In kubectl's order: certificate and token may be combined; a plugin is used without either."""
    user = chosen.user
    certificate = _certificate(chosen, tls)
    if user.token_file:
        return TokenFile(Path(user.token_file))
    if user.token:
        return StaticToken(user.token)
    if user.exec is not None and certificate is None:
        if not shutil.which(user.exec.command):
            hint = user.exec.install_hint.strip() or "install it, or choose another context"
            raise config_error(f"{chosen.source}: credential plugin {user.exec.command} not found; {hint}")
        return ExecPlugin(user.exec, chosen.cluster, tls)
    return certificate or Anonymous()


def _certificate(chosen: Chosen, tls: ssl.SSLContext | None) -> Credentials | None:
    user = chosen.user
    if tls is None or not (user.client_certificate or user.client_certificate_data):
        return None
    try:
        if user.client_certificate and user.client_key and not user.client_certificate_data:
            return CertificateFiles(tls, Path(user.client_certificate), Path(user.client_key))
        load_certificate(tls, _pem(user, "client_certificate"), _pem(user, "client_key"))
    except (OSError, ssl.SSLError, binascii.Error) as exc:
        raise config_error(f"{chosen.source}: client certificate or key is invalid: {exc}; renew them") from exc
    return Anonymous()


def _pem(user: UserEntry, name: str) -> bytes:
    inline: str | None = getattr(user, f"{name}_data")
    if inline:
        return base64.b64decode(inline, validate=True)
    path: str | None = getattr(user, name)
    return Path(path).read_bytes() if path else b""


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
