"""The bus on NATS JetStream. Composes the `nats_*` modules behind `bus/protocol.py`; services see only that."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from gpu_autoscaler.bus.nats_consume import CONSUMER_EXISTS, NatsEffectConsumer
from gpu_autoscaler.bus.nats_link import ApiError, NatsLink, Waits
from gpu_autoscaler.bus.nats_open import open_link
from gpu_autoscaler.bus.nats_projection import NatsProjection
from gpu_autoscaler.bus.nats_publish import NatsPublisher
from gpu_autoscaler.bus.nats_read import NO_STREAM, stored_message
from gpu_autoscaler.bus.protocol import Ack, Bus, EffectConsumer, Message, Projection, Publication, StreamSpan
from gpu_autoscaler.bus.streams import ConsumerSpec, Declared, differences
from gpu_autoscaler.model.errors import ConfigError, PermanentError

STREAM_EXISTS = 10058


class NatsBus(Bus):
    """One process's connection. Make one with `connect`; `ensure` before anything is bound."""

    def __init__(self, link: NatsLink, declared: Declared) -> None:
        self._link = link
        self._declared = declared
        self._publisher = NatsPublisher(link, declared)
        self._consumers: list[NatsEffectConsumer] = []
        self._projections: list[NatsProjection] = []

    @classmethod
    async def connect(
        cls,
        servers: str | Sequence[str],
        *,
        name: str,
        declared: Declared,
        credentials: Path | None = None,
        on_closed: Callable[[], None] | None = None,
        waits: Waits | None = None,
    ) -> "NatsBus":
        """Connect as `name` (letters, digits, `-`, `_`); `on_closed` is called when the client gives up for good.

        Raises TransientError when nothing answers within the limit, ConfigError when what answers cannot be used.
        """
        addresses = [servers] if isinstance(servers, str) else list(servers)
        link = await open_link(
            addresses, name=name, waits=waits or Waits(), credentials=credentials, on_closed=on_closed
        )  # fmt: skip
        return cls(link, declared)

    @property
    def is_connected(self) -> bool:
        """True while the broker answers, as far as is known."""
        return self._link.is_up

    @property
    def trouble(self) -> str | None:
        """Why the broker does not do its work now: away, without a leader, full; None while it does."""
        return self._link.trouble

    async def publish_many(self, publications: Sequence[Publication]) -> Sequence[Ack]:
        """Store messages without waiting for each; see `Bus.publish_many`."""
        return await self._publisher.store(publications)

    async def effect_consumer(self, durable: str) -> EffectConsumer:
        """Bind to a declared durable consumer. Raises ConfigError when it is missing or drifted."""
        spec = self._declared.consumer(durable)
        if spec is None:
            raise ConfigError("broker", [f"consumer {durable} is not among those declared for this process"])
        consumer = NatsEffectConsumer(self._link, spec)
        await consumer.bind()
        self._consumers = [one for one in self._consumers if not one.is_closed] + [consumer]
        return consumer

    async def projection(self, stream: str, *, subjects: Sequence[str] = (), after_sequence: int = 0) -> Projection:
        """Read a stream from the message after `after_sequence`. Raises ConfigError when there is no such stream."""
        projection = NatsProjection(self._link, stream, subjects, after_sequence)
        await projection.open()
        # Readers come and go (every page of dead letters is one); only the open ones are closed with the bus.
        self._projections = [one for one in self._projections if not one.is_closed] + [projection]
        return projection

    async def span(self, stream: str) -> StreamSpan:
        """Return which stream this is and what it has. Raises PermanentError when there is none of this name."""
        try:
            info = await self._link.call(f"STREAM.INFO.{stream}")
        except ApiError as exc:
            if exc.error_code == NO_STREAM:
                raise PermanentError(f"there is no stream {stream}; make it with `ensure`") from exc
            raise
        state = info["state"]
        return StreamSpan(
            created_at=msgspec.convert(info["created"], datetime),
            first_sequence=int(state["first_seq"]) or 1,  # 0 before the first message
            last_sequence=int(state["last_seq"]),
        )

    async def message_at(self, stream: str, sequence: int) -> Message | None:
        """Return the message at this sequence; None when it has aged out or never was."""
        return await stored_message(self._link, stream, sequence=sequence)

    async def last_message(self, stream: str, subject: str) -> Message | None:
        """Return the stream's last message on the subject, None where it has none."""
        return await stored_message(self._link, stream, last_on=subject)

    async def ensure(self) -> None:
        """Make what is declared and missing. Raises ConfigError with both values of each drift, which it leaves."""
        mistakes: list[str] = []
        for spec in self._declared.streams:
            mistakes += await self._ensure_stream(f"stream {spec.name}", spec.config())
        for bucket in self._declared.buckets:
            mistakes += await self._ensure_stream(f"bucket {bucket.name}", bucket.config())
        for consumer in self._declared.consumers:
            mistakes += await self._ensure_consumer(consumer)
        if mistakes:
            raise ConfigError(
                "broker",
                [*mistakes, "make both equal: change the settings, or edit it on the broker with the `nats` tool"],
            )

    async def _ensure_stream(self, thing: str, config: Mapping[str, Any]) -> list[str]:
        # Asked first: creating with other values is refused without saying which.
        question = f"STREAM.INFO.{config['name']}"
        try:
            info = await self._link.call(question)
        except ApiError as exc:
            if exc.error_code != NO_STREAM:
                raise
            mistakes = await self._create(thing, f"STREAM.CREATE.{config['name']}", config, STREAM_EXISTS)
            if mistakes:
                return mistakes
            info = await self._link.call(question)
        return differences(thing, config, info["config"])

    async def _ensure_consumer(self, spec: ConsumerSpec) -> list[str]:
        place = f"{spec.stream}.{spec.durable}"
        # Without the action the server would silently change an existing consumer.
        body = {"stream_name": spec.stream, "action": "create", "config": spec.config()}
        thing = f"consumer {spec.durable} of {spec.stream}"
        mistakes = await self._create(thing, f"CONSUMER.CREATE.{place}", body, CONSUMER_EXISTS)
        if mistakes:
            return mistakes
        return spec.differences((await self._link.call(f"CONSUMER.INFO.{place}"))["config"])

    async def _create(self, thing: str, operation: str, body: Mapping[str, Any], exists: int) -> list[str]:
        try:
            await self._link.call(operation, body)
        except ApiError as exc:
            # Another process may have made it a moment ago; whether it is the same is looked at next.
            return [] if exc.error_code == exists else [f"{thing}: the broker refuses to make it: {exc}"]
        return []

    async def close(self) -> None:
        """Give back what was not handled, flush and leave. Bounded in time."""
        for projection in self._projections:
            await projection.close()
        for consumer in self._consumers:
            await consumer.close()
        await self._link.close()
