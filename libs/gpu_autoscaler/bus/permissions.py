"""Minimal permissions of the broker's users, derived from what each service declares.

The server matches subjects, so these are the subjects that `bus/nats` sends on. Subjects cannot express two limits: a
reader of a stream may read all of it, and a creator of a missing stream chooses its configuration (differences are
found at the next start).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain

import msgspec

from gpu_autoscaler.bus.client_subjects import MAPPINGS, client_subjects
from gpu_autoscaler.bus.streams import ATTEMPT, BUCKETS, DEAD, LEASES, STREAMS, ConsumerSpec, subject_filter
from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.events.fact import Fact

_API = "$JS.API"
_FACT_STREAMS = frozenset(fact.stream() for fact in FACTS)
# Of one connection, whoever it is: ours have some dozens, and a stolen login fills no memory of the server.
SUBSCRIPTIONS_COUNT_MAX = 1000
CALLOUT_SECONDS_MAX = 5  # how long the server waits for the answer of an auth callout
STOCK_INBOXES = "_INBOX.>"  # the default inbox prefix of client libraries


class Permissions(msgspec.Struct, frozen=True, kw_only=True):
    """The subjects that a user may use; a denial overrides a permission."""

    publish: tuple[str, ...]
    publish_denied: tuple[str, ...] = ()
    subscribe: tuple[str, ...]
    may_answer: bool = False  # each received request once, wherever its reply is expected


def of_service(
    name: str,
    *,
    publishes: Iterable[type[Fact]],
    folds: Collection[type[Fact]],
    consumers: Collection[ConsumerSpec],
    others: Iterable[ConsumerSpec],
    reads: Collection[str] = (),
    answers: Iterable[str] = (),
    has_lease: bool = False,
) -> Permissions:
    """Return the permissions of a service's process.

    `consumers`: those of its process. `others`: those of all services; it must not use any that is not its own.
    `reads`: streams that it reads besides those of its facts. `answers`: subjects of requests that it answers.
    """
    own = tuple(consumers)
    read = {*_streams(folds), *reads, DEAD}
    foreign = [spec for spec in others if spec.stream in read and spec not in own]
    # A process that handles advisories reads undeliverable messages of any stream and stores letters for any service.
    inspected = _FACT_STREAMS if own else frozenset({*_streams(folds), *_streams(publishes)})
    written = [
        *map(subject_filter, publishes),
        *(("dead.*", f"attempt.{name}.>") if own else ("dead.readers",)),
        *((LEASES.subject(name),) if has_lease else ()),
    ]
    return Permissions(
        publish=_sorted(
            written,
            _create_streams(),
            _read_streams(read),
            (f"{_API}.STREAM.MSG.GET.{stream}" for stream in {*inspected, *reads, ATTEMPT, LEASES.stream}),
            chain.from_iterable(map(_use_consumer, own)),
            (f"$JS.ACK.{spec.stream}.{spec.durable}.>" for spec in own),
            (f"_INBOX_{name}.>",),  # to itself, to verify a connection
        ),
        publish_denied=_sorted(chain.from_iterable(map(_all_of_consumer, foreign)), map(_delete_consumer, own)),
        subscribe=(f"_INBOX_{name}.>", *answers),
        may_answer=bool(answers),
    )


def of_requester(subject: str, *, inbox: str) -> Permissions:
    """Return the permissions of a client that sends requests and receives their answers, nothing else."""
    return Permissions(publish=(subject,), subscribe=(f"{inbox}.>",))


def of_ingress(published: Iterable[type[Fact]]) -> Permissions:
    """Return the permissions of clients: publish these facts and receive their acknowledgments."""
    return Permissions(publish=_sorted(map(subject_filter, published)), subscribe=(STOCK_INBOXES,))


def of_client(client: str) -> Permissions:
    """Return the permissions of a client with a name of its own: its requests, their answers, nothing else."""
    return Permissions(publish=client_subjects(client), subscribe=(STOCK_INBOXES,))


def of_reader(durables: Iterable[ConsumerSpec], *, command: str) -> Permissions:
    """Return read-only permissions, for any client library and for the command line (`command`: its inbox prefix)."""
    readable = {*_FACT_STREAMS, DEAD}
    closed = [spec for spec in durables if spec.stream in readable]
    inboxes = (STOCK_INBOXES, f"_INBOX_{command}.>")
    return Permissions(
        publish=_sorted(
            (f"{_API}.INFO", f"{_API}.STREAM.INFO.*", f"{_API}.STREAM.NAMES"),
            _read_streams(readable),
            # Client libraries create consumers without a name, or with a name and a filter, and send flow control.
            (f"{_API}.CONSUMER.CREATE.{stream}" for stream in readable),
            (f"{_API}.CONSUMER.CREATE.{stream}.*.>" for stream in readable),
            ("$JS.FC.>",),
            (f"{_API}.STREAM.MSG.GET.{stream}" for stream in readable),
            (f"_INBOX_{command}.>",),
        ),
        publish_denied=_sorted(chain.from_iterable(map(_all_of_consumer, closed))),
        subscribe=(*sorted(f"{stream.lower()}.>" for stream in _FACT_STREAMS), *inboxes),
    )


def of_migrator(name: str, durables: Iterable[ConsumerSpec]) -> Permissions:
    """Return the permissions to change the declared streams, buckets and durable consumers, and to read no message.

    Creating a consumer and updating it are one subject.
    """
    names = [*(spec.name for spec in STREAMS), *(bucket.stream for bucket in BUCKETS)]
    return Permissions(
        publish=_sorted(
            (f"{_API}.INFO",),
            (f"{_API}.STREAM.{action}.{stream}" for action in ("INFO", "UPDATE") for stream in names),
            (
                f"{_API}.CONSUMER.{action}.{spec.stream}.{spec.durable}"
                for action in ("INFO", "CREATE")
                for spec in durables
            ),
            (f"_INBOX_{name}.>",),
        ),
        subscribe=(f"_INBOX_{name}.>",),
    )


OPERATOR = Permissions(publish=(">",), subscribe=(">",))


def _create_streams() -> Iterator[str]:
    """Inspect all streams and create missing ones; never change or delete."""
    yield from (f"{_API}.INFO", f"{_API}.STREAM.INFO.*", f"{_API}.STREAM.NAMES")
    yield from (f"{_API}.STREAM.CREATE.{name}" for name in (spec.name for spec in STREAMS))
    yield from (f"{_API}.STREAM.CREATE.{bucket.stream}" for bucket in BUCKETS)


def _read_streams(streams: Iterable[str]) -> Iterator[str]:
    """Read whole streams through ephemeral consumers with random names."""
    for stream in streams:
        yield from (f"{_API}.CONSUMER.{action}.{stream}.*" for action in ("CREATE", "INFO", "DELETE", "MSG.NEXT"))


def _use_consumer(spec: ConsumerSpec) -> Iterator[str]:
    """The owner's use of a durable consumer: create, inspect, fetch."""
    yield from (f"{_API}.CONSUMER.{action}.{spec.stream}.{spec.durable}" for action in ("CREATE", "INFO", "MSG.NEXT"))


def _delete_consumer(spec: ConsumerSpec) -> str:
    return f"{_API}.CONSUMER.DELETE.{spec.stream}.{spec.durable}"


def _all_of_consumer(spec: ConsumerSpec) -> Iterator[str]:
    """All operations on a consumer."""
    yield from (*_use_consumer(spec), _delete_consumer(spec), f"{_API}.CONSUMER.CREATE.{spec.stream}.{spec.durable}.>")


def _streams(facts: Iterable[type[Fact]]) -> set[str]:
    return {fact.stream() for fact in facts}


def _sorted(*parts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(chain.from_iterable(parts))))


def password_variable(user: str) -> str:
    """Return the environment variable from which the server reads a user's password."""
    return f"NATS_PASSWORD_{user.upper()}"


def server_text(users: Mapping[str, Permissions], *, callout_issuer: str | None = None) -> str:
    """Return the server's configuration of these users; passwords come from its environment.

    `callout_issuer`: whoever is none of these users is let in, or not, by the auth callout that signs with this key.
    Source: NATS documentation, "Authorization", "Subject Mapping and Partitioning", and "Server Config", section
    "Variables" (read 2026-11-21).
    """
    lines = [
        f"max_subscriptions: {SUBSCRIPTIONS_COUNT_MAX}",
        "mappings {",
        *(f'  "{source}": "{target}"' for source, target in MAPPINGS.items()),
        "}",
        "authorization {",
    ]
    if callout_issuer is not None:
        lines.append(f"  timeout: {CALLOUT_SECONDS_MAX}")
        lines.append(f"  auth_callout {{issuer: {callout_issuer}, auth_users: [{', '.join(sorted(users))}]}}")
    lines.append("  users = [")
    for user, permissions in users.items():
        lines += user_lines(user, password_variable(user), permissions)
    return "\n".join([*lines, "  ]", "}"]) + "\n"


def user_lines(user: str, password: str, permissions: Permissions) -> list[str]:
    """Return the lines of a user; `password`: the environment variable that holds it."""
    return [
        "    {",
        f"      user: {user}",
        f"      password: ${password}",
        "      permissions: {",
        f"        publish: {{allow: {_listed(permissions.publish)}{_denied(permissions.publish_denied)}}}",
        f"        subscribe: {{allow: {_listed(permissions.subscribe)}}}",
        *(["        allow_responses: true"] if permissions.may_answer else []),
        "      }",
        "    }",
    ]


def _listed(subjects: Iterable[str]) -> str:
    inner = "".join(f'\n          "{subject}"' for subject in subjects)
    return f"[{inner}\n        ]"


def _denied(subjects: tuple[str, ...]) -> str:
    return f", deny: {_listed(subjects)}" if subjects else ""
