"""How to reach a cluster: address, trust, and credentials that may change while we run."""

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
    CertificateFiles,
    Credentials,
    ExecPlugin,
    FixedToken,
    Nobody,
    TokenFile,
    show_certificate,
)
from gpu_autoscaler.kube.kubeconfig import Chosen, ClusterEntry, UserEntry, refused

# What every pod finds. Source: Kubernetes documentation, "Accessing the Kubernetes API from a Pod" (read 2026-11-21).
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """Where the API server is and how it knows us."""

    base_url: str
    credentials: Credentials = Nobody()
    tls: ssl.SSLContext | None = None  # None: the system's trust, or no TLS at all
    tls_server_name: str | None = None  # the name in the server's certificate, where it is not that of the address
    source: str = "nobody's credentials"  # where these credentials come from, as said in messages


def from_kubeconfig(path: str | None = None, context: str | None = None) -> Connection:
    """Return the connection of a kubeconfig: `path`, else $KUBECONFIG, else ~/.kube/config. Raises ConfigError."""
    chosen = kubeconfig.read(kubeconfig.paths(path, os.environ), context)
    url = chosen.cluster.server.rstrip("/")
    tls = _trust(chosen.cluster) if url.startswith("https://") else None
    credentials = _credentials(chosen, tls)
    if tls is None and not isinstance(credentials, Nobody) and not _is_this_machine(url):
        raise refused(f"{url} would be shown {chosen.source} for everybody to read; use its https:// address")
    return Connection(
        base_url=url,
        credentials=credentials,
        tls=tls,
        tls_server_name=chosen.cluster.tls_server_name,
        source=chosen.source,
    )


def from_service_account(folder: Path = SERVICE_ACCOUNT) -> Connection:
    """Return the connection of the pod that we run in. Its token is read again as it changes. Raises ConfigError."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{what}", "") for what in ("HOST", "PORT"))
    if not host or not port:
        raise refused(
            "KUBERNETES_SERVICE_HOST and _PORT are not set: this is no pod; set kube.kubeconfig_path or kube.url"
        )
    token, authority = folder / "token", folder / "ca.crt"
    if not token.is_file():
        raise refused(f"{token} is missing; set automountServiceAccountToken: true on the pod, or kube.kubeconfig_path")
    return Connection(
        base_url=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        credentials=TokenFile(token),
        tls=_trust(ClusterEntry(certificate_authority=str(authority))),
        source=f"the service account in {folder}",
    )


def from_environment(path: str | None = None, context: str | None = None) -> Connection:
    """Return the connection of a kubeconfig that is named, else of the pod that we run in, else of the user's own
    kubeconfig. Raises ConfigError."""
    if path is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
        return from_service_account()
    return from_kubeconfig(path, context)


def _trust(cluster: ClusterEntry) -> ssl.SSLContext:
    """Trust in the cluster's own authority, or in the system's where it names none. It is always verified."""
    try:
        if cluster.certificate_authority_data:
            pem = base64.b64decode(cluster.certificate_authority_data, validate=True).decode("ascii")
            return ssl.create_default_context(cadata=pem)
        return ssl.create_default_context(cafile=cluster.certificate_authority)
    except (OSError, ssl.SSLError, binascii.Error, UnicodeDecodeError) as exc:
        named = cluster.certificate_authority or "certificate-authority-data"
        raise refused(f"{named} holds no certificates that can be read: {exc}; take them from the cluster") from exc


def _credentials(chosen: Chosen, tls: ssl.SSLContext | None) -> Credentials:
    """In kubectl's order: a certificate and a token may both be there, and a plugin is asked where there is neither."""
    user = chosen.user
    shown = _certificate(chosen, tls)
    if user.token_file:
        return TokenFile(Path(user.token_file))
    if user.token:
        return FixedToken(user.token)
    if user.exec is not None and shown is None:
        if not shutil.which(user.exec.command):
            hint = user.exec.install_hint.strip() or "install it, or choose another context"
            raise refused(f"{chosen.source}: the credential plugin {user.exec.command} is not here; {hint}")
        return ExecPlugin(user.exec, chosen.cluster, tls)
    return shown or Nobody()


def _certificate(chosen: Chosen, tls: ssl.SSLContext | None) -> Credentials | None:
    user = chosen.user
    if tls is None or not (user.client_certificate or user.client_certificate_data):
        return None
    try:
        if user.client_certificate and user.client_key and not user.client_certificate_data:
            return CertificateFiles(tls, Path(user.client_certificate), Path(user.client_key))
        show_certificate(tls, _pem(user, "client_certificate"), _pem(user, "client_key"))
    except (OSError, ssl.SSLError, binascii.Error) as exc:
        raise refused(f"{chosen.source}: client certificate and key cannot be used: {exc}; renew them") from exc
    return Nobody()


def _pem(user: UserEntry, name: str) -> bytes:
    inline: str | None = getattr(user, f"{name}_data")
    if inline:
        return base64.b64decode(inline, validate=True)
    path: str | None = getattr(user, name)
    return Path(path).read_bytes() if path else b""


def _is_this_machine(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
