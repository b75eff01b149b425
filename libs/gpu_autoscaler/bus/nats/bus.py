"""The bus on NATS JetStream: implements `bus/protocol.py` with the modules of this package."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import structlog

from gpu_autoscaler.bus.differences import Difference, refuse_differences
from gpu_autoscaler.bus.nats.clients import StockWire
from gpu_autoscaler.bus.nats.consume import CONSUMER_EXISTS, NO_CONSUMER, ConsumerPosition, NatsEffectConsumer
from gpu_autoscaler.bus.nats.link import ApiError, NatsLink, Timeouts
from gpu_autoscaler.bus.nats.open import Tls, open_link
from gpu_autoscaler.bus.nats.projection import NatsProjection
from gpu_autoscaler.bus.nats.publish import NatsPublisher
from gpu_autoscaler.bus.nats.read import NO_STREAM, stored_message
from gpu_autoscaler.bus.protocol import Ack, Bus, EffectConsumer, Message, Projection, Publication, StreamSpan
from gpu_autoscaler.bus.streams import BucketSpec, BusDeclaration, ConsumerSpec, StreamSpec
from gpu_autoscaler.model.errors import ConfigError, PermanentError

STREAM_EXISTS = 10058
NO_STORAGE = 10047  # the server reserves the maximum size of each stream
_STORAGE_STEP = "raise max_file_store of the server (nats.storage in the chart), or set smaller nats.stream_limits"

log = structlog.get_logger(__name__)


class NatsBus(Bus):
    """One process's connection. Create with `connect`; call `ensure` before anything else."""

    def __init__(self, link: NatsLink, declared: BusDeclaration) -> None:
        self._link = link
        self._declared = declared
        self._publisher = NatsPublisher(link, declared)
        self._consumers: list[NatsEffectConsumer] = []
        self._positions: dict[str, ConsumerPosition] = {}  # by durable
        self._projections: list[NatsProjection] = []

    @classmethod
    async def connect(
        cls,
        servers: str | Sequence[str],
        *,
        name: str,
        declared: BusDeclaration,
        credentials: Path | None = None,
        tls: Tls | None = None,
        on_closed: Callable[[], None] | None = None,
        timeouts: Timeouts | None = None,
    ) -> "NatsBus":
        """Connect as `name` (letters, digits, `-`, `_`); `on_closed` is called when the connection is closed for good.

        Raises TransientError when no server answers within the limit, ConfigError when the server is unusable.
        """
        addresses = [servers] if isinstance(servers, str) else list(servers)
        link = await open_link(
            addresses, name=name, timeouts=timeouts or Timeouts(), credentials=credentials, tls=tls, on_closed=on_closed
        )  # fmt: skip
        return cls(link, declared)

    @property
    def is_connected(self) -> bool:
        return self._link.is_up

    @property
    def is_parser_stock(self) -> bool:
        """True if this version of nats-py does not let our parser replace its own."""
        return isinstance(self._link.wire, StockWire)

    @property
    def failure(self) -> str | None:
        """Why the broker does not work now: away, without a leader, full; None while it works."""
        return self._link.failure

    async def publish_many(self, publications: Sequence[Publication]) -> Sequence[Ack]:
        """Store messages without waiting for each; see `Bus.publish_many`."""
        return await self._publisher.store(publications)

    async def effect_consumer(self, durable: str) -> EffectConsumer:
        spec = self._declared.consumer(durable)
        if spec is None:
            raise ConfigError("broker", [f"consumer {durable} is not declared for this process"])
        consumer = NatsEffectConsumer(self._link, spec, self._positions.setdefault(durable, ConsumerPosition()))
        await consumer.bind()
        self._consumers = [reader for reader in self._consumers if not reader.is_closed] + [consumer]
        return consumer

    async def projection(self, stream: str, *, subjects: Sequence[str] = (), after_sequence: int = 0) -> Projection:
        """Read a stream from the message after `after_sequence`. Raises ConfigError when there is no such stream."""
        projection = NatsProjection(self._link, stream, subjects, after_sequence)
        await projection.open()
        # Projections may be short-lived (each page of dead letters is one); only the open ones are closed with the bus.
        self._projections = [reader for reader in self._projections if not reader.is_closed] + [projection]
        return projection

    async def span(self, stream: str) -> StreamSpan:
        try:
            info = await self._link.call(f"STREAM.INFO.{stream}")
        except ApiError as exc:
            if exc.error_code == NO_STREAM:
                raise PermanentError(f"stream {stream} does not exist; create it with `ensure`") from exc
            raise
        state, config = info["state"], info["config"]
        stored_count = int(state["messages"])
        return StreamSpan(
            created_at=msgspec.convert(info["created"], datetime),
            first_sequence=int(state["first_seq"]) or 1,  # 0 before the first message
            last_sequence=int(state["last_seq"]),
            first_stored_at=msgspec.convert(state["first_ts"], datetime) if stored_count else None,
            bytes_count=int(state["bytes"]),
            bytes_max=int(config["max_bytes"]),
            age_max=timedelta(microseconds=int(config["max_age"]) // 1000) if config.get("max_age") else timedelta.max,
        )

    async def message_at(self, stream: str, sequence: int) -> Message | None:
        return await stored_message(self._link, stream, sequence=sequence)

    async def last_message(self, stream: str, subject: str) -> Message | None:
        """Return the stream's last message on the subject, None without one."""
        return await stored_message(self._link, stream, last_on=subject)

    async def ensure(self) -> None:
        """Create what is declared and missing. Raises ConfigError with both values of each refused difference."""
        found: list[Difference] = []
        errors: list[str] = []
        specs: list[StreamSpec | BucketSpec | ConsumerSpec] = [*self._declared.stores, *self._declared.consumers]
        for spec in specs:
            try:
                found += await self._ensure(spec)
            except ApiError as exc:
                step = f"; {_STORAGE_STEP}" if exc.error_code == NO_STORAGE else ""
                errors.append(f"{spec.thing}: creation refused by the broker: {exc}{step}")
        refuse_differences(found, errors)

    async def _ensure(self, spec: StreamSpec | BucketSpec | ConsumerSpec) -> list[Difference]:
        return await (self._ensure_consumer(spec) if isinstance(spec, ConsumerSpec) else self._ensure_stream(spec))

    async def _ensure_stream(self, spec: StreamSpec | BucketSpec) -> list[Difference]:
        # Read first: a creation with other values is refused without naming them.
        config = spec.config()
        request = f"STREAM.INFO.{config['name']}"
        try:
            info = await self._link.call(request)
        except ApiError as exc:
            if exc.error_code != NO_STREAM:
                raise
            await self._create(f"STREAM.CREATE.{config['name']}", config, STREAM_EXISTS)
            info = await self._link.call(request)
        return spec.differences(info["config"])

    async def _ensure_consumer(self, spec: ConsumerSpec) -> list[Difference]:
        path = f"{spec.stream}.{spec.durable}"
        config = spec.config_from(await self._split_sequence(spec))
        # Without `action` the server would silently change an existing consumer.
        body = {"stream_name": spec.stream, "action": "create", "config": config}
        await self._create(f"CONSUMER.CREATE.{path}", body, CONSUMER_EXISTS)
        actual = (await self._link.call(f"CONSUMER.INFO.{path}"))["config"]
        found = spec.differences(actual)
        others = [difference for difference in found if difference.key != "filter_subjects"]
        if others == found or not all(difference.is_tolerated for difference in others):
            return found
        # Another release consumes other facts. The position stays, so nothing is lost or repeated.
        body = {**body, "action": "update", "config": {**actual, "filter_subjects": list(spec.subjects)}}
        actual = (await self._link.call(f"CONSUMER.CREATE.{path}", body))["config"]
        log.warning("consumer filter updated", durable=spec.durable, stream=spec.stream, subjects=spec.subjects)
        return spec.differences(actual)

    async def _split_sequence(self, spec: ConsumerSpec) -> int:
        """Return the sequence after which a lane starts: where the consumer that it was split from has arrived."""
        if spec.split_from is None:
            return 0
        try:
            info = await self._link.call(f"CONSUMER.INFO.{spec.stream}.{spec.split_from}")
        except ApiError as exc:
            if exc.error_code not in (NO_CONSUMER, NO_STREAM):
                raise
            return 0
        return int(info["ack_floor"]["stream_seq"])

    async def _create(self, operation: str, body: Mapping[str, Any], exists: int) -> None:
        try:
            await self._link.call(operation, body)
        except ApiError as exc:
            if exc.error_code != exists:  # another process created it a moment ago; the caller compares it
                raise

    async def close(self) -> None:
        """Return unhandled messages, flush and disconnect. Bounded in time."""
        for projection in self._projections:
            await projection.close()
        for consumer in self._consumers:
            await consumer.close()
        await self._link.close()
