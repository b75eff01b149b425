"""Declares the streams, durable consumers and buckets of the broker. Everything else is derived from it.

Both adapters create what is declared here and compare what exists (`differences.py`). Ages and sizes are those that
1,000 nodes with 8 GPUs and 10,000 pods need, on any cloud (`make bench CASE=STREAMS`); all sizes together are at most
16 GiB. `streams()` takes other limits.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from gpu_autoscaler.bus.differences import NANOSECONDS, Difference, differences
from gpu_autoscaler.events.fact import Fact

MEBIBYTE = 1024 * 1024
DAY_SECONDS = 24 * 3600

# A list of 10,000 uids or a plan of a large cluster is about one megabyte. The server accepts larger messages than a
# stream, so that every stored message still fits when its dead letter adds headers.
SERVER_PAYLOAD_BYTES_MAX = 8 * MEBIBYTE
MESSAGE_BYTES_MAX = SERVER_PAYLOAD_BYTES_MAX - 64 * 1024

DEAD = "DEAD"  # dead letters, and marks of their resubmission
ATTEMPT = "ATTEMPT"  # attempts at messages that may end the process that handles them
ADVISORY = "ADVISORY"  # the server's advisories about messages that it no longer delivers
ADVISORY_ROOT = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES"  # then .<stream>.<consumer>


@functools.lru_cache(maxsize=32_768)  # of every message that a process handles, for few patterns
def covers(pattern: str, subject: str) -> bool:
    """True when the pattern (`*` one token, `>` one or more at the end) matches the subject."""
    expected, actual = pattern.split("."), subject.split(".")
    for position, part in enumerate(expected):
        if part == ">":
            return len(actual) > position
        if position >= len(actual) or part not in ("*", actual[position]):
            return False
    return len(expected) == len(actual)


class MessageTtl(msgspec.Struct, frozen=True, kw_only=True):
    """Messages of this subject root, with or without further tokens, expire before the stream's age limit."""

    subject_root: str
    ttl_seconds: int


class StreamSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The declaration of a stream."""

    name: str
    subjects: tuple[str, ...]
    description: str
    max_age_seconds: int
    max_bytes: int
    is_append_only: bool = False  # deleting and purging messages is denied
    # Longer than any restart of a service; the server keeps each id in memory for this long.
    duplicate_window_seconds: int = 300
    replicas_count: int = 1
    message_bytes_max: int = MESSAGE_BYTES_MAX
    message_ttls: tuple[MessageTtl, ...] = ()

    def ttl_seconds(self, subject: str) -> int | None:
        """Return the time to live of messages on this subject; None: the stream's age limit."""
        for ttl in self.message_ttls:
            if subject == ttl.subject_root or subject.startswith(f"{ttl.subject_root}."):
                return ttl.ttl_seconds
        return None

    def config(self) -> dict[str, Any]:
        """Return the declared properties under the server's names.

        Source: NATS documentation, "JetStream / Streams / Configuration" (read 2026-11-21).
        """
        return {
            "name": self.name,
            "description": self.description,
            "subjects": list(self.subjects),
            "retention": "limits",  # `interest` drops messages without consumers, `workqueue` allows one reader only
            "storage": "file",
            "discard": "old",
            "max_age": self.max_age_seconds * NANOSECONDS,
            "max_bytes": self.max_bytes,
            "max_msgs": -1,
            "max_msgs_per_subject": -1,
            "max_msg_size": self.message_bytes_max,
            "num_replicas": self.replicas_count,
            "duplicate_window": self.duplicate_window_seconds * NANOSECONDS,
            "deny_delete": self.is_append_only,
            "deny_purge": self.is_append_only,
            "allow_msg_ttl": bool(self.message_ttls),
        }

    def differences(self, actual: Mapping[str, Any]) -> list[Difference]:
        """Return the differences to the server's stream."""
        return differences("stream", self.thing, self.config(), actual)

    @property
    def thing(self) -> str:
        """The stream, in sentences."""
        return f"stream {self.name}"


class ConsumerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The declaration of a durable effect consumer, shared by all replicas of its service."""

    durable: str
    stream: str
    subjects: tuple[str, ...]
    # Messages in hand of a killed process are redelivered after this. Short, as an interruption notice may leave only
    # 30 seconds; a process that works longer sends heartbeats.
    ack_wait_seconds: float = 4.0
    max_ack_pending: int = 256
    # Requested redeliveries count too: a drain checked every second may take hours. The runner sets messages aside
    # after far fewer errors; at this limit the server's advisory leads to a dead letter.
    max_deliver: int = 20_000
    # Of a lane: the durable that delivered its facts before the split. The lane starts where that one has arrived.
    split_from: str | None = None
    # The lanes that deliver its facts now. It is kept at their position for a version without lanes
    # (`runtime/loops/follow.py`), and delivers nothing to the service.
    lanes: tuple[str, ...] = ()

    def config(self) -> dict[str, Any]:
        """Return the declared properties under the server's names.

        Source: NATS documentation, "JetStream / Consumers / Configuration" (read 2026-11-21).
        """
        return {
            "name": self.durable,
            "durable_name": self.durable,
            "filter_subjects": list(self.subjects),
            "deliver_policy": "all",
            "replay_policy": "instant",
            "ack_policy": "explicit",
            "ack_wait": int(self.ack_wait_seconds * NANOSECONDS),
            "max_deliver": self.max_deliver,
            "max_ack_pending": self.max_ack_pending,
        }

    def config_from(self, acknowledged_sequence: int) -> dict[str, Any]:
        """Return `config` of a consumer that starts after this sequence; 0: from the oldest message."""
        if not acknowledged_sequence:
            return self.config()
        start = {"deliver_policy": "by_start_sequence", "opt_start_seq": acknowledged_sequence + 1}
        return {**self.config(), **start}

    def differences(self, actual: Mapping[str, Any]) -> list[Difference]:
        """Return the differences to the server's consumer; a recreated one may start at a sequence."""
        if actual.get("deliver_policy") == "by_start_sequence":
            actual = {**actual, "deliver_policy": "all"}
        return differences("consumer", self.thing, self.config(), actual)

    @property
    def thing(self) -> str:
        """The consumer, in sentences."""
        return f"consumer {self.durable} of {self.stream}"


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of one domain that a service handles by a durable consumer and slots of their own.

    Whatever the facts of one lane wait for, those of the others do not wait for it.
    """

    name: str
    facts: tuple[type[Fact], ...]
    concurrency_max: int
    # Facts that wait for a requested redelivery count too: beyond this many, later ones of the lane wait as well.
    max_ack_pending: int


class BucketSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The declaration of a key-value bucket whose entries expire `ttl_seconds` after their last write."""

    name: str
    description: str
    ttl_seconds: int
    max_bytes: int = MEBIBYTE
    replicas_count: int = 1

    @property
    def stream(self) -> str:
        """The stream of the bucket."""
        return f"KV_{self.name}"

    def subject(self, key: str) -> str:
        """Return the subject of this key's entry."""
        return f"$KV.{self.name}.{key}"

    def config(self) -> dict[str, Any]:
        """Return the properties of the bucket's stream.

        Source: NATS ADR-8, "JetStream based Key-Value Stores" (read 2026-11-21).

        History 1 and no limit markers: a lease that expired can be created again at once.
        """
        return {
            "name": self.stream,
            "description": self.description,
            "subjects": [self.subject(">")],
            "retention": "limits",
            "storage": "file",
            "discard": "new",
            "max_age": self.ttl_seconds * NANOSECONDS,
            "max_bytes": self.max_bytes,
            "max_msgs": -1,
            "max_msgs_per_subject": 1,
            "num_replicas": self.replicas_count,
            "duplicate_window": min(self.ttl_seconds, 120) * NANOSECONDS,
            "deny_delete": True,
            "deny_purge": False,
            "allow_rollup_hdrs": True,
        }

    def differences(self, actual: Mapping[str, Any]) -> list[Difference]:
        """Return the differences to the server's bucket."""
        return differences("bucket", self.thing, self.config(), actual)

    @property
    def thing(self) -> str:
        """The bucket, in sentences."""
        return f"bucket {self.name}"


class StreamLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one stream."""

    max_age_seconds: int
    max_bytes: int


class BusDeclaration(msgspec.Struct, frozen=True, kw_only=True):
    """What one process requires on the broker: all streams and buckets, and its own durable consumers."""

    streams: tuple[StreamSpec, ...]
    consumers: tuple[ConsumerSpec, ...] = ()
    buckets: tuple[BucketSpec, ...] = ()

    @property
    def stores(self) -> tuple[StreamSpec | BucketSpec, ...]:
        """All streams, those of buckets included."""
        streams: tuple[StreamSpec | BucketSpec, ...] = self.streams
        return streams + self.buckets

    def consumer(self, durable: str) -> ConsumerSpec | None:
        """Return the declared consumer of this name, None without one."""
        return next((spec for spec in self.consumers if spec.durable == durable), None)

    def stream_of(self, subject: str) -> StreamSpec | None:
        """Return the declared stream of this subject, None without one."""
        for spec in self.streams:
            if any(covers(pattern, subject) for pattern in spec.subjects):
                return spec
        return None


def _domain(name: str, description: str, *, days: int, mebibytes: int, **more: Any) -> StreamSpec:  # noqa: ANN401
    return StreamSpec(
        name=name,
        subjects=(f"{name.lower()}.>",),
        description=description,
        max_age_seconds=days * DAY_SECONDS,
        max_bytes=mebibytes * MEBIBYTE,
        **more,
    )


STREAMS: tuple[StreamSpec, ...] = (
    _domain("JOB", "Requested jobs and their progress", days=30, mebibytes=1328, is_append_only=True),
    _domain("POD", "Pods as observed in Kubernetes", days=7, mebibytes=2688),
    _domain("NODE", "Nodes and instances as observed in Kubernetes and the cloud", days=7, mebibytes=512),
    _domain(
        "GPU",
        "GPU telemetry: summaries for decisions, raw samples for the dashboard",
        days=1,
        mebibytes=7136,
        message_ttls=(MessageTtl(subject_root="gpu.node_sampled", ttl_seconds=3600),),
    ),
    _domain(
        "SPOT",
        "Interruption notices, rebalance recommendations, prices and capacity of the clouds",
        days=7,
        mebibytes=640,
    ),
    _domain("SCALING", "Plans and their effects", days=30, mebibytes=2048, is_append_only=True),
    _domain("DEMAND", "Reported demand: capacity to keep free for future work", days=7, mebibytes=32),
    _domain("POLICY", "Directives of operators, and the active policy", days=60, mebibytes=32),
    _domain("COST", "Accrued cost", days=7, mebibytes=1472),
    _domain("SHADOW", "Plans of a shadow policy, which are never executed", days=7, mebibytes=328),
    _domain(
        DEAD,
        "Dead letters: messages that were set aside, with the reason",
        days=30,
        mebibytes=128,
        message_bytes_max=-1,  # a message of maximum size and the headers of its dead letter
    ),
    StreamSpec(
        name=ATTEMPT,
        subjects=("attempt.>",),
        description="Attempts at messages that may end the process that handles them",
        max_age_seconds=6 * 3600,  # a supervisor may wait minutes before it restarts a process
        max_bytes=16 * MEBIBYTE,
    ),
    StreamSpec(
        name=ADVISORY,
        subjects=(f"{ADVISORY_ROOT}.>",),
        description="The server's advisories about messages it no longer delivers; they become dead letters",
        max_age_seconds=7 * DAY_SECONDS,
        max_bytes=16 * MEBIBYTE,
        message_bytes_max=-1,
    ),
)

# Short, so that a standby takes over within three seconds; a short loss of the lease costs only a log line.
LEASES = BucketSpec(name="leases", description="Active replica of each service", ttl_seconds=2)
BUCKETS: tuple[BucketSpec, ...] = (LEASES,)


def streams(limits: Mapping[str, StreamLimits] | None = None, replicas_count: int = 1) -> tuple[StreamSpec, ...]:
    """Return STREAMS with other limits for the named streams, and `replicas_count` copies of each."""
    changed = []
    for spec in STREAMS:
        limit = (limits or {}).get(spec.name)
        changed.append(
            msgspec.structs.replace(
                spec,
                replicas_count=replicas_count,
                max_age_seconds=limit.max_age_seconds if limit else spec.max_age_seconds,
                max_bytes=limit.max_bytes if limit else spec.max_bytes,
            )
        )
    return tuple(changed)


def buckets(replicas_count: int = 1) -> tuple[BucketSpec, ...]:
    """Return BUCKETS with `replicas_count` copies of each."""
    return tuple(msgspec.structs.replace(spec, replicas_count=replicas_count) for spec in BUCKETS)


def subject_filter(fact_type: type[Fact]) -> str:
    """Return the subject, or subject pattern, that facts of this type are published on."""
    root = fact_type.subject_root()
    return root if fact_type.subject is Fact.subject else f"{root}.>"


def lane_durable(service_name: str, lane: Lane) -> str:
    """Return the name of the durable consumer of a lane: `<service>-<domain>-<lane>-act`."""
    return f"{service_name}-{lane.facts[0].domain()}-{lane.name}-act"


def consumers_for(
    service_name: str, consumed: Iterable[type[Fact]], lanes: Iterable[Lane] = ()
) -> tuple[ConsumerSpec, ...]:
    """Return the durable consumers of a service: one per consumed domain, named `<service>-<domain>-act`.

    A domain with lanes has one per lane besides, named `<service>-<domain>-<lane>-act`; they deliver all its facts.
    """
    subjects: dict[type[Fact], str] = {fact_type: subject_filter(fact_type) for fact_type in consumed}
    specs: list[ConsumerSpec] = []
    for domain in sorted({fact_type.domain() for fact_type in subjects}):
        durable, stream = f"{service_name}-{domain}-act", domain.upper()
        of_domain = [fact_type for fact_type in subjects if fact_type.domain() == domain]
        split = [
            ConsumerSpec(
                durable=lane_durable(service_name, lane),
                stream=stream,
                subjects=tuple(sorted(subjects[fact_type] for fact_type in lane.facts)),
                max_ack_pending=lane.max_ack_pending,
                split_from=durable,
            )
            for lane in lanes
            if lane.facts[0].domain() == domain
        ]
        everything = tuple(sorted(subjects[fact_type] for fact_type in of_domain))
        assert not split or everything == tuple(sorted(subject for spec in split for subject in spec.subjects)), (  # noqa: S101 - a bug
            f"{service_name}: each consumed fact of {domain} belongs to exactly one lane"
        )
        followed = tuple(spec.durable for spec in split)
        specs += [ConsumerSpec(durable=durable, stream=stream, subjects=everything, lanes=followed), *split]
    return tuple(specs)


# Turns ADVISORY into DEAD. Shared by all services that consume, so that each advisory is handled once.
MAX_DELIVERIES_CONSUMER = ConsumerSpec(
    durable="dead_letters-advisory-act", stream=ADVISORY, subjects=(f"{ADVISORY_ROOT}.>",)
)


def consumers_of_process(
    service_name: str, consumed: Iterable[type[Fact]], lanes: Iterable[Lane] = ()
) -> tuple[ConsumerSpec, ...]:
    """Return the consumers of a service's process: its own and, if it has any, MAX_DELIVERIES_CONSUMER."""
    own = consumers_for(service_name, consumed, lanes)
    return (*own, MAX_DELIVERIES_CONSUMER) if own else ()


def streams_document(consumers: Iterable[ConsumerSpec]) -> dict[str, Any]:
    """Return the content of `schemas/streams.json`; `consumers` are those of all services."""
    return {
        "streams": msgspec.to_builtins(STREAMS),
        "consumers": msgspec.to_builtins([*consumers, MAX_DELIVERIES_CONSUMER]),
        "buckets": msgspec.to_builtins(BUCKETS),
        "server": {"max_payload": SERVER_PAYLOAD_BYTES_MAX, "version_min": "2.15"},
    }
