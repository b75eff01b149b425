"""How we show a server who we are, and how that is renewed while we run: tokens, files, plugins, certificates.

Each way is asked before every call and told when the server no longer believes it; then it looks again. Used by
`client` through a `Connection`.
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

# Kubelets exchange a pod's token when four fifths of its hour are over, so a minute late is in time; client-go does the
# same. Source: Kubernetes documentation, "Managing Service Accounts" (read 2026-11-21).
TOKEN_FILE_SECONDS_MAX = 60.0
PLUGIN_SECONDS_MAX = 60.0  # wall time of one run: it may speak with a cloud
EXPIRY_MARGIN_SECONDS = 30.0  # a token that ends within a call is of no use; less where it lives shorter


class Credentials(Protocol):
    """Who we are, for one server."""

    async def header(self) -> str | None:
        """The value of the Authorization header; None: there is none. Raises TransientError if it is not known now."""
        ...

    def refused(self) -> None:
        """The server answered 401: what is remembered is of no use any more."""
        ...


class Nobody:
    """For servers that do not ask."""

    async def header(self) -> str | None:
        """Nothing."""
        return None

    def refused(self) -> None:
        """There is nothing else to show."""


class FixedToken:
    """A token that is what it is."""

    def __init__(self, token: str) -> None:
        self._header = f"Bearer {token}"

    async def header(self) -> str | None:
        """The token."""
        return self._header

    def refused(self) -> None:
        """There is no other one."""


class TokenFile:
    """A token in a file that somebody keeps fresh, such as the kubelet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._token: str | None = None
        self._read_at = float("-inf")

    async def header(self) -> str | None:
        """The token, at most a minute old."""
        if time.monotonic() - self._read_at > TOKEN_FILE_SECONDS_MAX:
            try:
                token = self._path.read_text(encoding="utf-8").strip()
            except OSError as exc:
                raise TransientError(f"the token in {self._path} cannot be read: {exc.strerror}") from exc
            if not token:
                raise TransientError(f"the token in {self._path} is empty; it may be in exchange just now")
            self._token, self._read_at = token, time.monotonic()
        return f"Bearer {self._token}"

    def refused(self) -> None:
        """Read it again: it may have been exchanged."""
        self._read_at = float("-inf")


class CertificateFiles:
    """A client certificate in files, or in the kubeconfig itself."""

    def __init__(self, tls: ssl.SSLContext, certificate: Path, key: Path) -> None:
        """Raises OSError, ssl.SSLError where the files cannot be read or do not belong together."""
        self._tls, self._certificate, self._key = tls, certificate, key
        tls.load_cert_chain(certificate, key)

    async def header(self) -> str | None:
        """The certificate speaks for itself."""
        return None

    def refused(self) -> None:
        """Show what the files hold now, on connections that are opened from here on."""
        try:
            self._tls.load_cert_chain(self._certificate, self._key)
        except (OSError, ssl.SSLError):
            return  # in exchange just now: the old one is refused once more, and it is looked at again


def show_certificate(tls: ssl.SSLContext, certificate_pem: bytes, key_pem: bytes) -> None:
    """Show this certificate from here on. Raises ssl.SSLError where the two do not belong together."""
    # The ssl module takes files alone; both are there for this moment, readable by us only.
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
    """A program that says who we are for a while, run again before that is over.

    Source: Kubernetes documentation, "Authenticating", section "client-go credential plugins" (read 2026-11-21).
    """

    def __init__(self, entry: ExecEntry, cluster: ClusterEntry, tls: ssl.SSLContext | None) -> None:
        self._entry = entry
        self._cluster = cluster
        self._tls = tls
        self._one_at_a_time = asyncio.Lock()
        self._status: _ExecStatus | None = None
        self._ends_at = float("inf")  # Unix seconds

    async def header(self) -> str | None:
        """The token that the plugin gave, or nothing where it gave a certificate. Raises TransientError."""
        async with self._one_at_a_time:
            if self._status is None or time.time() >= self._ends_at:
                self._take(await self._run())
            assert self._status is not None, "just taken"  # noqa: S101 - our own promise
            return None if self._status.token is None else f"Bearer {self._status.token}"

    def refused(self) -> None:
        """Ask the plugin again."""
        self._status = None

    def _take(self, status: _ExecStatus) -> None:
        if status.client_certificate_data and status.client_key_data:
            if self._tls is None:
                raise self._failed("gives a certificate, and the server does not speak TLS")
            try:
                show_certificate(self._tls, status.client_certificate_data.encode(), status.client_key_data.encode())
            except ssl.SSLError as exc:
                raise self._failed(f"gave a certificate that cannot be used: {exc}") from exc
        elif not status.token:
            raise self._failed("gave neither a token nor a certificate with its key")
        self._status, self._ends_at = status, float("inf")
        if status.expiration_timestamp is not None:
            left_seconds = status.expiration_timestamp.timestamp() - time.time()
            self._ends_at = time.time() + left_seconds - min(EXPIRY_MARGIN_SECONDS, max(0.0, left_seconds) / 5)

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
            said, complaint = await asyncio.wait_for(process.communicate(), PLUGIN_SECONDS_MAX)
        except TimeoutError as exc:
            raise self._failed(f"said nothing for {PLUGIN_SECONDS_MAX:g} s") from exc
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            raise self._failed(f"ended with {process.returncode}: {complaint.decode(errors='replace').strip()[-500:]}")
        try:
            answer = msgspec.json.decode(said, type=_ExecCredential)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise self._failed(f"did not say an ExecCredential: {exc}") from exc
        if answer.api_version != self._entry.api_version:
            raise self._failed(f"speaks {answer.api_version}, and the kubeconfig asks for {self._entry.api_version}")
        return answer.status

    def _environment(self) -> Mapping[str, str]:
        spec: dict[str, object] = {"interactive": False}
        if self._entry.provide_cluster_info:
            told = msgspec.to_builtins(self._cluster)
            known = {key: told[key] for key in ("server", "tls-server-name", "certificate-authority-data") if told[key]}
            if path := self._cluster.certificate_authority:
                known["certificate-authority-data"] = base64.b64encode(Path(path).read_bytes()).decode()
            spec["cluster"] = known
        asked = {"apiVersion": self._entry.api_version, "kind": "ExecCredential", "spec": spec}
        own = {one.name: one.value for one in self._entry.env or ()}
        return {**os.environ, **own, "KUBERNETES_EXEC_INFO": json.dumps(asked)}

    def _failed(self, what: str) -> TransientError:
        hint = f"; {self._entry.install_hint.strip()}" if self._entry.install_hint else ""
        return TransientError(f"the credential plugin {self._entry.command} {what}{hint}")


def ended_at(header: str | None) -> datetime | None:
    """Return when the token in this header ended, if it says so (a JWT) and if that is past; else None."""
    parts: Sequence[str] = (header or "").removeprefix("Bearer ").split(".")
    if len(parts) != 3:
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        end = datetime.fromtimestamp(claims["exp"], UTC)
    except (binascii.Error, ValueError, KeyError, TypeError, OverflowError):
        return None
    return end if end.timestamp() < time.time() else None
