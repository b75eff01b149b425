"""What a user of the broker may do there, from what its service declares: nothing that it does not need.

The server matches subjects, so what `nats*.py` send is what stands here. Two things subjects cannot tell apart: who
reads a stream may read all of it, and whoever may make a stream that is missing chooses how (drift is found at start).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain

import msgspec

from gpu_autoscaler.bus.streams import (
    BUCKETS,
    DEAD,
    LEASES,
    STREAMS,
    ATTEMPT,
    ConsumerSpec,
    consumers_of_process,
    subject_filter,
)
from gpu_autoscaler.events.catalogue import FACTS
from gpu_autoscaler.events.fact import Fact

_API = "$JS.API"
_FACT_STREAMS = frozenset(fact.stream() for fact in FACTS)
STOCK_INBOXES = "_INBOX.>"  # where client libraries have answers sent that were told nothing else


class Permissions(msgspec.Struct, frozen=True, kw_only=True):
    """Subjects that a user may use; what is denied is denied although it is allowed as well."""

    publish: tuple[str, ...]
    publish_denied: tuple[str, ...] = ()
    subscribe: tuple[str, ...]


def of_service(
    name: str,
    *,
    publishes: Iterable[type[Fact]],
    folds: Collection[type[Fact]],
    consumes: Collection[type[Fact]],
    others: Iterable[ConsumerSpec],
    reads: Collection[str] = (),
    has_lease: bool = False,
) -> Permissions:
    """What the process of a service may do.

    `others`: durable consumers of other services, which it may not touch. `reads`: streams that it reads besides those
    of its facts.
    """
    own = consumers_of_process(name, consumes)
    read = {*_streams(folds), *reads, DEAD}
    foreign = [spec for spec in others if spec.stream in read and spec not in own]
    # Whoever handles words of messages that are given up looks at these, on any stream, and writes letters in any name.
    looked_at = _FACT_STREAMS if own else frozenset({*_streams(folds), *_streams(publishes)})
    written = [
        *map(subject_filter, publishes),
        *(("dead.*", f"trial.{name}.>") if own else ("dead.readers",)),
        *((LEASES.subject(name),) if has_lease else ()),
    ]
    return Permissions(
        publish=_in_order(
            written,
            _making(),
            _reading(read),
            (f"{_API}.STREAM.MSG.GET.{stream}" for stream in {*looked_at, *reads, ATTEMPT, LEASES.stream}),
            chain.from_iterable(map(_working, own)),
            (f"$JS.ACK.{spec.stream}.{spec.durable}.>" for spec in own),
            (f"_INBOX_{name}.>",),  # to itself, to prove that a connection carries something
        ),
        publish_denied=_in_order(chain.from_iterable(map(_consumer, foreign)), map(_deleting, own)),
        subscribe=(f"_INBOX_{name}.>",),
    )


def of_door(published: Iterable[type[Fact]]) -> Permissions:
    """What everybody may do who asks for something: publish these facts, and be told that they are stored."""
    return Permissions(publish=_in_order(map(subject_filter, published)), subscribe=(STOCK_INBOXES,))


def of_reader(durables: Iterable[ConsumerSpec], *, command: str) -> Permissions:
    """What those may do who only look, with any client library or the command line (`command`: its inboxes)."""
    readable = {*_FACT_STREAMS, DEAD}
    closed = [spec for spec in durables if spec.stream in readable]
    inboxes = (STOCK_INBOXES, f"_INBOX_{command}.>")
    return Permissions(
        publish=_in_order(
            (f"{_API}.INFO", f"{_API}.STREAM.INFO.*", f"{_API}.STREAM.NAMES"),
            _reading(readable),
            # As client libraries ask: without a name, or with one and a filter. And what they say to steady a flow.
            (f"{_API}.CONSUMER.CREATE.{stream}" for stream in readable),
            (f"{_API}.CONSUMER.CREATE.{stream}.*.>" for stream in readable),
            ("$JS.FC.>",),
            (f"{_API}.STREAM.MSG.GET.{stream}" for stream in readable),
            (f"_INBOX_{command}.>",),
        ),
        publish_denied=_in_order(chain.from_iterable(map(_consumer, closed))),
        subscribe=(*sorted(f"{stream.lower()}.>" for stream in _FACT_STREAMS), *inboxes),
    )


OPERATOR = Permissions(publish=(">",), subscribe=(">",))


def _making() -> Iterator[str]:
    """Look at everything, and make what is missing; never change or delete."""
    yield from (f"{_API}.INFO", f"{_API}.STREAM.INFO.*", f"{_API}.STREAM.NAMES")
    yield from (f"{_API}.STREAM.CREATE.{name}" for name in (spec.name for spec in STREAMS))
    yield from (f"{_API}.STREAM.CREATE.{bucket.stream}" for bucket in BUCKETS)


def _reading(streams: Iterable[str]) -> Iterator[str]:
    """Read whole streams, by consumers that are made for it under names by chance."""
    for stream in streams:
        yield from (f"{_API}.CONSUMER.{action}.{stream}.*" for action in ("CREATE", "INFO", "DELETE", "MSG.NEXT"))


def _working(spec: ConsumerSpec) -> Iterator[str]:
    """What the owner of a durable consumer does with it: make it where it is missing, look at it, take from it."""
    yield from (f"{_API}.CONSUMER.{action}.{spec.stream}.{spec.durable}" for action in ("CREATE", "INFO", "MSG.NEXT"))


def _deleting(spec: ConsumerSpec) -> str:
    return f"{_API}.CONSUMER.DELETE.{spec.stream}.{spec.durable}"


def _consumer(spec: ConsumerSpec) -> Iterator[str]:
    """All that could be done with a consumer."""
    yield from (*_working(spec), _deleting(spec), f"{_API}.CONSUMER.CREATE.{spec.stream}.{spec.durable}.>")


def _streams(facts: Iterable[type[Fact]]) -> set[str]:
    return {fact.stream() for fact in facts}


def _in_order(*parts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(chain.from_iterable(parts))))


def password_variable(user: str) -> str:
    """The environment variable from which the server takes a user's password."""
    return f"NATS_PASSWORD_{user.upper()}"


def server_text(users: Mapping[str, Permissions]) -> str:
    """The server's configuration for these users; passwords come from its environment.

    Source: NATS documentation, "Authorization" and "Server Config", section "Variables" (read 2026-11-21).
    """
    lines = ["authorization {", "  users = ["]
    for user, permissions in users.items():
        lines += [
            "    {",
            f"      user: {user}",
            f"      password: ${password_variable(user)}",
            "      permissions: {",
            f"        publish: {{allow: {_listed(permissions.publish)}{_denied(permissions.publish_denied)}}}",
            f"        subscribe: {{allow: {_listed(permissions.subscribe)}}}",
            "      }",
            "    }",
        ]
    return "\n".join([*lines, "  ]", "}"]) + "\n"


def _listed(subjects: Iterable[str]) -> str:
    inner = "".join(f'\n          "{subject}"' for subject in subjects)
    return f"[{inner}\n        ]"


def _denied(subjects: tuple[str, ...]) -> str:
    return f", deny: {_listed(subjects)}" if subjects else ""
