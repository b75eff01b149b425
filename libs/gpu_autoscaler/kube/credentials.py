"""Credentials for an API server, and their renewal at run time: tokens, files, plugins, certificates.

A credential is queried before every call, and invalidated when the server rejects it. Used by `client` through a
`Connection`.
"""

import asyncio
import base64
import binascii
import json
import os
import ssl
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import msgspec

from gpu_autoscaler.kube.kubeconfig import ClusterEntry, ExecEntry
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.observed import Instant

# Kubelets rotate a pod's token after 80 % of its hour, so rereading it within a minute suffices; client-go does the
# same. Source: Kubernetes documentation, "Managing Service Accounts" (read 2026-11-21).
TOKEN_FILE_SECONDS_MAX = 60.0
PLUGIN_SECONDS_MAX = 60.0  # wall time of one run, which may call a cloud
EXPIRY_MARGIN_SECONDS = 30.0  # a token must not expire during a call; less for short-lived tokens


class Credentials(Protocol):
    """Credentials for one server."""

    async def header(self) -> str | None:
        """Return the Authorization header, None without one. Raises TransientError while it is unavailable."""

    def invalidate(self) -> None:
        """Drop cached credentials after a 401."""


class Anonymous:
    """No credentials, for servers without authentication."""

    async def header(self) -> str | None:
        return None

    def invalidate(self) -> None:
        """Do nothing."""


class StaticToken:
    """A fixed token."""

    def __init__(self, token: str) -> None:
        self._header = f"Bearer {token}"

    async def header(self) -> str | None:
        return self._header

    def invalidate(self) -> None:
        """Do nothing: there is no other token."""


class TokenFile:
    """A token in a file that is rotated, for example by the kubelet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._token: str | None = None
        self._read_at = float("-inf")

    async def header(self) -> str | None:
        """Return the token, read at most a minute ago."""
        if time.monotonic() - self._read_at > TOKEN_FILE_SECONDS_MAX:
            try:
                token = self._path.read_text(encoding="utf-8").strip()
            except OSError as exc:
                raise TransientError(f"token file {self._path} cannot be read: {exc.strerror}") from exc
            if not token:
                raise TransientError(f"token file {self._path} is empty, possibly during rotation")
            self._token, self._read_at = token, time.monotonic()
        return f"Bearer {self._token}"

    def invalidate(self) -> None:
        """Reread the file before the next call: the token may have been rotated."""
        self._read_at = float("-inf")


class CertificateFiles:
    """A client certificate in files, or in the kubeconfig itself."""

    def __init__(self, tls: ssl.SSLContext, certificate: Path, key: Path) -> None:
        """Raises OSError, ssl.SSLError when the files cannot be read or do not match."""
        self._tls, self._certificate, self._key = tls, certificate, key
        tls.load_cert_chain(certificate, key)

    async def header(self) -> str | None:
        """Return None: the certificate authenticates the connection."""
        return None

    def invalidate(self) -> None:
        """Reload the files, for new connections."""
        try:
            self._tls.load_cert_chain(self._certificate, self._key)
        except (OSError, ssl.SSLError):
            return  # during rotation: the old certificate is rejected once more, and the files are reloaded


def load_certificate(tls: ssl.SSLContext, certificate_pem: bytes, key_pem: bytes) -> None:
    """Use this certificate for new connections. Raises ssl.SSLError when certificate and key do not match."""
    # The ssl module reads only files: temporary ones, readable only by this user.
    with tempfile.NamedTemporaryFile() as certificate, tempfile.NamedTemporaryFile() as key:
        for file, pem in ((certificate, certificate_pem), (key, key_pem)):
            file.write(pem)
            file.flush()
        tls.load_cert_chain(certificate.name, key.name)


class _ExecStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    token: str | None = None
    client_certificate_data: str | None = None
    client_key_data: str | None = None
    expiration_timestamp: Instant | None = None


class _ExecCredential(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    api_version: str
    status: _ExecStatus


class ExecPlugin:
    """A program that returns expiring credentials, run again before they expire. Source: Kubernetes documentation,
    "Authenticating", section "client-go credential plugins" (read 2026-11-21)."""

    def __init__(self, entry: ExecEntry, cluster: ClusterEntry, tls: ssl.SSLContext | None) -> None:
        self._entry = entry
        self._cluster = cluster
        self._tls = tls
        self._lock = asyncio.Lock()
        self._status: _ExecStatus | None = None
        self._expires_at = float("inf")  # Unix seconds

    async def header(self) -> str | None:
        """Return the plugin's token, None when it returned a certificate. Raises TransientError."""
        async with self._lock:
            if self._status is None or time.time() >= self._expires_at:
                self._apply(await self._run())
            assert self._status is not None, "just applied"  # noqa: S101 - a bug
            return None if self._status.token is None else f"Bearer {self._status.token}"

    def invalidate(self) -> None:
        self._status = None

    def _apply(self, status: _ExecStatus) -> None:
        if status.client_certificate_data and status.client_key_data:
            if self._tls is None:
                raise self._failed("returned a certificate, but the server does not use TLS")
            try:
                load_certificate(self._tls, status.client_certificate_data.encode(), status.client_key_data.encode())
            except ssl.SSLError as exc:
                raise self._failed(f"returned an invalid certificate: {exc}") from exc
        elif not status.token:
            raise self._failed("returned neither a token nor a certificate with its key")
        self._status, self._expires_at = status, float("inf")
        if status.expiration_timestamp is not None:
            left_seconds = status.expiration_timestamp.timestamp() - time.time()
            self._expires_at = time.time() + left_seconds - min(EXPIRY_MARGIN_SECONDS, max(0.0, left_seconds) / 5)

    async def _run(self) -> _ExecStatus:
        command = [self._entry.command, *(self._entry.args or ())]
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=self._environment(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as exc:
            raise self._failed(f"cannot be run: {exc.strerror}") from exc
        try:
            output, error_output = await asyncio.wait_for(process.communicate(), PLUGIN_SECONDS_MAX)
        except TimeoutError as exc:
            raise self._failed(f"did not finish within {PLUGIN_SECONDS_MAX:g} s") from exc
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            raise self._failed(
                f"exited with {process.returncode}: {error_output.decode(errors='replace').strip()[-500:]}"
            )
        try:
            answer = msgspec.json.decode(output, type=_ExecCredential)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise self._failed(f"did not return an ExecCredential: {exc}") from exc
        if answer.api_version != self._entry.api_version:
            raise self._failed(f"returned {answer.api_version}, but the kubeconfig requires {self._entry.api_version}")
        return answer.status

    def _environment(self) -> Mapping[str, str]:
        spec: dict[str, object] = {"interactive": False}
        if self._entry.provide_cluster_info:
            fields = msgspec.to_builtins(self._cluster)
            info = {
                key: fields[key] for key in ("server", "tls-server-name", "certificate-authority-data") if fields[key]
            }
            if path := self._cluster.certificate_authority:
                info["certificate-authority-data"] = base64.b64encode(Path(path).read_bytes()).decode()
            spec["cluster"] = info
        request = {"apiVersion": self._entry.api_version, "kind": "ExecCredential", "spec": spec}
        own = {variable.name: variable.value for variable in self._entry.env or ()}
        return {**os.environ, **own, "KUBERNETES_EXEC_INFO": json.dumps(request)}

    def _failed(self, what: str) -> TransientError:
        hint = f"; {self._entry.install_hint.strip()}" if self._entry.install_hint else ""
        return TransientError(f"credential plugin {self._entry.command} {what}{hint}")


def ended_at(header: str | None) -> datetime | None:
    """Return when the token in this header expired; None when it did not, or is no JWT with an expiry."""
    parts: Sequence[str] = (header or "").removeprefix("Bearer ").split(".")
    if len(parts) != 3:
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        end = datetime.fromtimestamp(claims["exp"], UTC)
    except (binascii.Error, ValueError, KeyError, TypeError, OverflowError):
        return None
    return end if end.timestamp() < time.time() else None
