"""Compares a stream, bucket or durable consumer on the broker with its declaration, property by property.

A process works with some differences until `gpu-autoscaler migrate` has applied the declared values; the others change
what is stored or delivered, and it refuses to start.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import structlog

from gpu_autoscaler.model.errors import MIGRATE_COMMAND, ConfigError

NANOSECONDS = 1_000_000_000

Kind = Literal["stream", "bucket", "consumer"]

# The server changes these on a running stream or consumer, and either value has the same meaning. Source: nats-server
# 2.15, server/stream.go, configUpdateCheck, and server/consumer.go, checkNewConsumerConfig (read 2026-11-23).
TOLERATED: Mapping[Kind, frozenset[str]] = {
    "stream": frozenset(
        {"description", "max_age", "max_bytes", "max_msg_size", "num_replicas", "duplicate_window", "allow_msg_ttl"}
    ),
    # Not the age: holders of a lease compute with it.
    "bucket": frozenset({"description", "max_bytes", "num_replicas", "duplicate_window"}),
    "consumer": frozenset({"description", "num_replicas", "ack_wait", "max_deliver", "max_ack_pending"}),
}
# A stream that also denies these stores and delivers as declared; the server never allows them again.
_DENIALS = ("deny_delete", "deny_purge")
_DURATIONS = ("max_age", "duplicate_window", "ack_wait")

log = structlog.get_logger(__name__)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A property whose value on the broker is not the declared one."""

    kind: Kind
    thing: str  # for people: "stream JOB"
    key: str  # the server's name of the property
    actual: Any
    declared: Any

    @property
    def is_tolerated(self) -> bool:
        """True if a process works with either value."""
        return self.key in TOLERATED[self.kind] or (
            self.kind == "stream" and self.key in _DENIALS and bool(self.actual) and not self.declared
        )

    def shown(self) -> tuple[str, str]:
        """Return both values for people: on the broker, and declared."""
        return _shown(self.key, self.actual), _shown(self.key, self.declared)

    def sentence(self) -> str:
        """Return a sentence with both values."""
        actual, declared = self.shown()
        return f"{self.thing}: {self.key} is {actual} on the broker, {declared} is declared"


def differences(kind: Kind, thing: str, declared: Mapping[str, Any], actual: Mapping[str, Any]) -> list[Difference]:
    """Return each declared property that differs on the broker.

    Properties missing in the server's answer are zero, empty or false.
    """
    return [
        Difference(kind=kind, thing=thing, key=key, actual=actual.get(key), declared=value)
        for key, value in declared.items()
        if (value or None) != (actual.get(key) or None)
    ]


def refuse_differences(found: Sequence[Difference], errors: Sequence[str] = ()) -> None:
    """Raise ConfigError with `errors` and all differences, unless all are tolerated; then warn once about them."""
    sentences = [difference.sentence() for difference in found]
    if errors or not all(difference.is_tolerated for difference in found):
        step = [f"`{MIGRATE_COMMAND}` changes what the broker can change, and names the step for the rest"]
        raise ConfigError("broker", [*errors, *sentences, *(step if found else ())])
    if found:
        log.warning("broker runs with other values than declared", differences=sentences, step=MIGRATE_COMMAND)


def _shown(key: str, value: object) -> str:
    if key in _DURATIONS and isinstance(value, int):
        return f"{value / NANOSECONDS:g} s"
    return "not set" if value is None else repr(value)
