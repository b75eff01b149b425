"""Streams of a broker as lines of JSON, and back into another broker under the same sequences.

A backup of files would age: brokers drop what is older than a stream's limit. Here each message is stored anew.
"""

from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from nats.aio.client import Client
from nats.js.errors import NotFoundError

# Raw samples live for an hour, and no decision reads them.
LEFT_OUT = "gpu.node_sampled."
FILLER = "gpu.node_sampled.left-out"
# What a broker reads on arrival, and is none of its business when a message comes back.
_OF_THE_WAY = ("Nats-TTL", "Nats-Expected-")
_CALL_SECONDS_MAX = 60.0


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One message."""

    stream: str
    sequence: int
    subject: str
    headers: dict[str, str]
    payload: str  # base 64


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a broker kept."""

    configs: dict[str, dict[str, Any]]  # by stream, as the broker shows them
    lines: tuple[Line, ...]


async def exported(connection: Client, names: Iterable[str]) -> Exported:
    """Read these streams from their first to their last message."""
    js, lines, configs = connection.jetstream(), [], {}
    for name in names:
        told = await _asked(connection, f"STREAM.INFO.{name}", {})
        configs[name] = told["config"]
        for sequence in range(max(1, told["state"]["first_seq"]), told["state"]["last_seq"] + 1):
            try:
                message = await js.get_msg(name, sequence)
            except NotFoundError:
                continue
            if not (message.subject or "").startswith(LEFT_OUT):
                headers = {
                    key: value for key, value in (message.headers or {}).items() if not key.startswith(_OF_THE_WAY)
                }
                payload = b64encode(message.data or b"").decode()
                lines.append(
                    Line(
                        stream=name, sequence=sequence, subject=message.subject or "", headers=headers, payload=payload
                    )
                )
    return Exported(configs=configs, lines=tuple(lines))


async def restored(connection: Client, kept: Exported) -> None:
    """Make the streams as they were; each message has its place again, and what was left out has none."""
    js = connection.jetstream()
    for name, config in kept.configs.items():
        lines = [line for line in kept.lines if line.stream == name]
        first = lines[0].sequence if lines else 1
        await _asked(connection, f"STREAM.CREATE.{name}", {**config, "first_seq": first})
        next_sequence = first
        for line in lines:
            for _ in range(next_sequence, line.sequence):
                await js.publish(FILLER, b"")
            ack = await js.publish(line.subject, b64decode(line.payload), headers=line.headers or None)
            assert (ack.stream, ack.seq, ack.duplicate) == (name, line.sequence, None), (ack, line)
            next_sequence = line.sequence + 1
        if name == "GPU":
            await _asked(connection, f"STREAM.PURGE.{name}", {"filter": FILLER})


async def _asked(connection: Client, subject: str, body: Mapping[str, Any]) -> dict[str, Any]:
    answer = await connection.request(f"$JS.API.{subject}", msgspec.json.encode(body), timeout=_CALL_SECONDS_MAX)
    told: dict[str, Any] = msgspec.json.decode(answer.data)
    assert "error" not in told, (subject, told)
    return told
