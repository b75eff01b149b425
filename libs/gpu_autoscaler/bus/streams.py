"""What the broker holds, in one list: streams, durable consumers, buckets. Everything else is derived from it.

Both adapters make what is declared here and refuse to start where the broker has something else. Sizes are for one
machine; `streams()` takes other limits from settings.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from gpu_autoscaler.events.fact import Fact

MEBIBYTE = 1024 * 1024
DAY_SECONDS = 24 * 3600
NANOSECONDS = 1_000_000_000

# A list of 10,000 uids or a plan of a large cluster is about one megabyte. The server takes more than a stream does,
# so that every stored message still fits when its dead letter adds headers.
SERVER_PAYLOAD_BYTES_MAX = 8 * MEBIBYTE
MESSAGE_BYTES_MAX = SERVER_PAYLOAD_BYTES_MAX - 64 * 1024

DEAD = "DEAD"  # what was set aside, and what was sent again
ATTEMPT = "ATTEMPT"  # messages that may end the process which handles them
ADVISORY = "ADVISORY"  # the server's own word on messages that it no longer delivers
ADVISORY_ROOT = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES"  # then .<stream>.<consumer>


def covers(pattern: str, subject: str) -> bool:
    """True when the pattern (`*` one token, `>` one or more at the end) takes the subject."""
    wanted, given = pattern.split("."), subject.split(".")
    for position, word in enumerate(wanted):
        if word == ">":
            return len(given) > position
        if position >= len(given) or word not in ("*", given[position]):
            return False
    return len(wanted) == len(given)


class MessageTtl(msgspec.Struct, frozen=True, kw_only=True):
    """Messages of this subject root, alone or with further tokens, leave the stream early."""

    subject_root: str
    ttl_seconds: int


class StreamSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A stream as it is to be."""

    name: str
    subjects: tuple[str, ...]
    description: str
    max_age_seconds: int
    max_bytes: int
    is_append_only: bool = False  # nobody can delete or purge single messages
    # Longer than any restart of a service takes; the server keeps each id in memory for as long.
    duplicate_window_seconds: int = 300
    replicas_count: int = 1
    message_bytes_max: int = MESSAGE_BYTES_MAX
    message_ttls: tuple[MessageTtl, ...] = ()

    def ttl_seconds(self, subject: str) -> int | None:
        """How long a message on this subject is kept, where that is shorter than the stream keeps others."""
        for ttl in self.message_ttls:
            if subject == ttl.subject_root or subject.startswith(f"{ttl.subject_root}."):
                return ttl.ttl_seconds
        return None

    def config(self) -> dict[str, Any]:
        """The server's name for each declared property.

        Source: NATS documentation, "JetStream / Streams / Configuration" (read 2026-11-21).
        """
        return {
            "name": self.name,
            "description": self.description,
            "subjects": list(self.subjects),
            "retention": "limits",  # interest drops what nobody listens to yet, workqueue allows one reader only
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


class ConsumerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A durable effect consumer as it is to be; shared by all replicas of its service."""

    durable: str
    stream: str
    subjects: tuple[str, ...]
    # What a killed process had in hand comes again after this. A notice may leave 30 seconds for everything, so it is
    # short; a process that works longer says so by its heartbeat.
    ack_wait_seconds: float = 4.0
    max_ack_pending: int = 256
    # Waiting counts as well: a drain that is looked at every second may take hours. The runner gives up on errors
    # long before; beyond this the server's advisory makes the dead letter.
    max_deliver: int = 20_000

    def config(self) -> dict[str, Any]:
        """The server's name for each declared property.

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

    def differences(self, actual: Mapping[str, Any]) -> list[str]:
        """As `differences`; one that was deleted and made again began at a sequence, and that is as good."""
        if actual.get("deliver_policy") == "by_start_sequence":
            actual = {**actual, "deliver_policy": "all"}
        return differences(f"consumer {self.durable} of {self.stream}", self.config(), actual)


class BucketSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A key-value bucket whose entries vanish `ttl_seconds` after their last write."""

    name: str
    description: str
    ttl_seconds: int
    max_bytes: int = MEBIBYTE
    replicas_count: int = 1

    @property
    def stream(self) -> str:
        """The stream that a bucket is."""
        return f"KV_{self.name}"

    def subject(self, key: str) -> str:
        """Where the entry of this key is written."""
        return f"$KV.{self.name}.{key}"

    def config(self) -> dict[str, Any]:
        """A bucket is a stream of this shape. Source: NATS ADR-8, "JetStream based Key-Value Stores" (read 2026-11-21).

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


class StreamLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one stream, from settings."""

    max_age_seconds: int
    max_bytes: int


class BusDeclaration(msgspec.Struct, frozen=True, kw_only=True):
    """What one process expects on the broker: all streams and buckets, and its own durable consumers."""

    streams: tuple[StreamSpec, ...]
    consumers: tuple[ConsumerSpec, ...] = ()
    buckets: tuple[BucketSpec, ...] = ()

    def consumer(self, durable: str) -> ConsumerSpec | None:
        """The declared consumer of this name."""
        return next((spec for spec in self.consumers if spec.durable == durable), None)

    def stream_of(self, subject: str) -> StreamSpec | None:
        """The declared stream that takes messages on this subject."""
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
    _domain("JOB", "Work that people asked for, and what became of it", days=30, mebibytes=256, is_append_only=True),
    _domain("POD", "Pods as Kubernetes tells of them", days=7, mebibytes=512),
    _domain("NODE", "Nodes and instances as Kubernetes and the cloud tell of them", days=7, mebibytes=256),
    _domain(
        "GPU",
        "Telemetry: summaries for decisions, raw samples for screens",
        days=7,
        mebibytes=512,
        message_ttls=(MessageTtl(subject_root="gpu.node_sampled", ttl_seconds=3600),),
    ),
    _domain("SPOT", "Notices, rebalance hints, prices and capacity of the clouds", days=7, mebibytes=128),
    _domain("SCALING", "Plans, and the effect they had", days=30, mebibytes=512, is_append_only=True),
    _domain("DEMAND", "Room that somebody wants to be free for work to come", days=7, mebibytes=64),
    _domain("POLICY", "What people overrule for a while, and which policy is in force", days=60, mebibytes=64),
    _domain("COST", "Money that accrued", days=30, mebibytes=128),
    _domain("SHADOW", "What a policy in shadow would decide; nobody acts on it", days=7, mebibytes=128),
    _domain(
        DEAD,
        "Messages that were set aside, with the reason; kept until somebody has looked",
        days=30,
        mebibytes=256,
        message_bytes_max=-1,  # a message at its limit, and the headers that say why it is here
    ),
    StreamSpec(
        name=ATTEMPT,
        subjects=("trial.>",),
        description="How often a message was begun by a process that did not survive it",
        max_age_seconds=6 * 3600,  # a supervisor may wait minutes before it starts a process again
        max_bytes=16 * MEBIBYTE,
    ),
    StreamSpec(
        name=ADVISORY,
        subjects=(f"{ADVISORY_ROOT}.>",),
        description="Messages that the server no longer delivers; read into dead letters",
        max_age_seconds=7 * DAY_SECONDS,
        max_bytes=16 * MEBIBYTE,
        message_bytes_max=-1,
    ),
)

# Short, so that whoever stands by decides within three seconds of a death; a flap costs nothing but a log line.
LEASES = BucketSpec(name="leases", description="Which replica is the active one of its service", ttl_seconds=2)
BUCKETS: tuple[BucketSpec, ...] = (LEASES,)


def streams(limits: Mapping[str, StreamLimits] | None = None, replicas_count: int = 1) -> tuple[StreamSpec, ...]:
    """STREAMS with other limits for the streams named, and `replicas_count` copies of each."""
    changed = []
    for spec in STREAMS:
        own = (limits or {}).get(spec.name)
        changed.append(
            msgspec.structs.replace(
                spec,
                replicas_count=replicas_count,
                max_age_seconds=own.max_age_seconds if own else spec.max_age_seconds,
                max_bytes=own.max_bytes if own else spec.max_bytes,
            )
        )
    return tuple(changed)


def subject_filter(fact_type: type[Fact]) -> str:
    """The subject, or family of subjects, that facts of this type are published on."""
    root = fact_type.subject_root()
    return root if fact_type.subject is Fact.subject else f"{root}.>"


def consumers_for(service_name: str, consumed: Iterable[type[Fact]]) -> tuple[ConsumerSpec, ...]:
    """The durable consumers of a service: one for each domain it consumes, named `<service>-<domain>-act`."""
    subjects: dict[type[Fact], str] = {fact_type: subject_filter(fact_type) for fact_type in consumed}
    return tuple(
        ConsumerSpec(
            durable=f"{service_name}-{domain}-act",
            stream=domain.upper(),
            subjects=tuple(sorted(subject for fact_type, subject in subjects.items() if fact_type.domain() == domain)),
        )
        for domain in sorted({fact_type.domain() for fact_type in subjects})
    )


# Reads ADVISORY into DEAD. Shared by all services that consume, so that each word of the server is handled once.
MAX_DELIVERIES_CONSUMER = ConsumerSpec(
    durable="dead_letters-advisory-act", stream=ADVISORY, subjects=(f"{ADVISORY_ROOT}.>",)
)


def consumers_of_process(service_name: str, consumed: Iterable[type[Fact]]) -> tuple[ConsumerSpec, ...]:
    """What the process of a service declares: its own consumers and, where it has any, MAX_DELIVERIES_CONSUMER."""
    own = consumers_for(service_name, consumed)
    return (*own, MAX_DELIVERIES_CONSUMER) if own else ()


def differences(thing: str, declared: Mapping[str, Any], actual: Mapping[str, Any]) -> list[str]:
    """A sentence with both values for each declared property that the broker has otherwise.

    What the server leaves out of its answer is zero, empty or false.
    """
    return [
        f"{thing}: {key} is {_shown(key, actual.get(key))} on the broker, {_shown(key, value)} is declared"
        for key, value in declared.items()
        if (value or None) != (actual.get(key) or None)
    ]


_DURATIONS = {"max_age", "duplicate_window", "ack_wait"}


def _shown(key: str, value: object) -> str:
    if key in _DURATIONS and isinstance(value, int):
        return f"{value / NANOSECONDS:g} s"
    return "not set" if value is None else repr(value)


def streams_document(services: Mapping[str, Iterable[type[Fact]]]) -> dict[str, Any]:
    """What `schemas/streams.json` says; `services` maps each service's name to the facts it consumes."""
    consumers = [spec for name in sorted(services) for spec in consumers_for(name, services[name])]
    return {
        "streams": msgspec.to_builtins(STREAMS),
        "consumers": msgspec.to_builtins([*consumers, MAX_DELIVERIES_CONSUMER]),
        "buckets": msgspec.to_builtins(BUCKETS),
        "server": {"max_payload": SERVER_PAYLOAD_BYTES_MAX, "version_min": "2.15"},
    }
