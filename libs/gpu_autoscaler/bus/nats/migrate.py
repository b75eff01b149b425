"""Brings the streams, buckets and durable consumers of a running broker to their declaration.

Used by `gpu-autoscaler migrate`. Each change is one request that the server applies as a whole, and what is as declared
is left alone: a migration that was killed at any point ends in the same state when it is run again.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal

import msgspec

from gpu_autoscaler.bus.differences import NANOSECONDS, Difference
from gpu_autoscaler.bus.nats.consume import NO_CONSUMER
from gpu_autoscaler.bus.nats.link import ApiError, NatsLink, RequestTimedOut
from gpu_autoscaler.bus.nats.read import NO_STREAM
from gpu_autoscaler.bus.streams import BucketSpec, BusDeclaration, ConsumerSpec, StreamSpec
from gpu_autoscaler.model.errors import TransientError

COPIES_SECONDS_MAX = 300.0  # until every copy of a stream is up to date; 16 GiB at 60 MiB/s
LEADER_SECONDS_MAX = 30.0  # until the copies of a stream or consumer have chosen a leader; elections take seconds
LOOK_SECONDS = 0.25

# Source: nats-server 2.15, server/errors.json and server/stream.go, configUpdateCheck (read 2026-11-23).
NEXT_STEPS: Mapping[int, str] = {
    10023: "increase the store limit (max_file_store) of the servers, restart them one after another, and run again",
    10047: "increase the store limit (max_file_store) of the servers, restart them one after another, and run again",
    10005: "start as many servers as copies are declared, and run again",
    10074: "start as many servers as copies are declared, as one cluster, and run again",
}
RECREATE = (
    "a server sets it only when it creates a stream; stop the services, delete the stream and start them: they publish "
    "again what is alive, and its history is lost"
)
PERMANENT = "no server allows it again, and everything works with it; nothing to do"
WOULD_DISCARD = "would discard stored messages; wait until they expire, or confirm with --discard-history"
_FLAGS = ("deny_delete", "deny_purge", "allow_msg_ttl")

Outcome = Literal["pending", "applied", "permanent", "refused"]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A property that is not as declared, and what became of it."""

    thing: str
    property: str
    actual: str
    declared: str
    outcome: Outcome
    next_step: str = ""


class MigrationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What may be changed."""

    is_applied: bool = False  # otherwise changes are only listed
    is_required_only: bool = False  # only what processes refuse to start with
    is_history_discarded: bool = False  # a stream may be limited to less than it stores


async def migrate_broker(link: NatsLink, declared: BusDeclaration, options: MigrationOptions) -> tuple[Change, ...]:
    """Return each difference and what became of it. What is missing is left to the process that creates it at start.

    Waits until the copies of the streams are up to date. Raises TransientError while the broker does not work.
    """
    changes: list[Change] = []
    for spec in declared.stores:
        changes += await _migrate_stream(link, spec, options)
    if not options.is_required_only:  # each process updates the filters of its own consumers
        for consumer in declared.consumers:
            changes += await _migrate_consumer(link, consumer, options)
    return tuple(changes)


async def _migrate_stream(link: NatsLink, spec: StreamSpec | BucketSpec, options: MigrationOptions) -> list[Change]:
    name = spec.config()["name"]
    info = await _info(link, f"STREAM.INFO.{name}")
    if info is None:
        return []
    changes: list[Change] = []
    possible: list[Difference] = []
    for difference in spec.differences(info["config"]):
        if options.is_required_only and difference.is_tolerated:
            continue
        if difference.key == "storage" or (difference.key in _FLAGS and difference.actual):
            changes.append(_permanent(difference))
        elif _would_discard(difference, info) and not options.is_history_discarded:
            changes.append(_changed(difference, "refused", WOULD_DISCARD))
        else:
            possible.append(difference)
    changes += await _update(link, f"STREAM.UPDATE.{name}", info["config"], possible, options)
    if options.is_applied and not await _are_copies_current(link, name):
        changes.append(
            Change(
                thing=spec.thing,
                property="copies",
                actual="not up to date",
                declared="up to date",
                outcome="refused",
                next_step=f"check the servers ({COPIES_SECONDS_MAX:g} s were not enough), and run again",
            )
        )
    return changes


async def _migrate_consumer(link: NatsLink, spec: ConsumerSpec, options: MigrationOptions) -> list[Change]:
    path = f"{spec.stream}.{spec.durable}"
    info = await _info(link, f"CONSUMER.INFO.{path}")
    if info is None:
        return []
    # Without `action` the server would create a consumer that was deleted meanwhile, at the oldest message.
    body = {"stream_name": spec.stream, "action": "update"}
    differences = spec.differences(info["config"])
    return await _update(link, f"CONSUMER.CREATE.{path}", info["config"], differences, options, body)


async def _update(
    link: NatsLink,
    request: str,
    actual: Mapping[str, Any],
    differences: Sequence[Difference],
    options: MigrationOptions,
    body: Mapping[str, Any] | None = None,
) -> list[Change]:
    """Set the properties together, as some depend on others; where the server refuses that, one by one."""
    if not options.is_applied or not differences:
        return [_changed(difference, "pending") for difference in differences]
    config = {**actual, **{difference.key: difference.declared for difference in differences}}
    try:
        await link.call(request, config if body is None else {**body, "config": config})
    except ApiError as exc:
        if len(differences) == 1:
            step = NEXT_STEPS.get(exc.error_code, RECREATE)
            return [_changed(differences[0], "refused", f"refused by the broker: {exc}; {step}")]
        changes: list[Change] = []
        for difference in differences:
            changes += await _update(link, request, actual, [difference], options, body)
            if changes[-1].outcome == "applied":
                actual = {**actual, difference.key: difference.declared}
        return changes
    return [_changed(difference, "applied") for difference in differences]


async def _info(link: NatsLink, request: str) -> dict[str, Any] | None:
    """Return the answer; None for a missing stream or consumer. Nobody answers while its copies choose a leader, after
    servers were restarted: the request is repeated until LEADER_SECONDS_MAX."""
    until = asyncio.get_running_loop().time() + LEADER_SECONDS_MAX
    while True:
        try:
            return await link.call(request)
        except ApiError as exc:
            if exc.error_code in (NO_STREAM, NO_CONSUMER):
                return None
            raise
        except RequestTimedOut:
            if asyncio.get_running_loop().time() >= until:
                raise


def _would_discard(difference: Difference, info: Mapping[str, Any]) -> bool:
    """Return True if the declared limit is less than the stream stores."""
    state, limit = info["state"], difference.declared
    if difference.key == "max_bytes":
        return 0 <= int(limit) < int(state["bytes"])
    if difference.key != "max_age" or not limit or not state["messages"]:
        return False
    age = msgspec.convert(info["ts"], datetime) - msgspec.convert(state["first_ts"], datetime)
    return age > timedelta(seconds=limit / NANOSECONDS)


async def _are_copies_current(link: NatsLink, name: str) -> bool:
    """Wait until all copies of the stream are up to date; return False after COPIES_SECONDS_MAX."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(COPIES_SECONDS_MAX):
            while True:
                with contextlib.suppress(TransientError):  # while its copies choose a leader
                    info = await link.call(f"STREAM.INFO.{name}")
                    copies = (info.get("cluster") or {}).get("replicas") or ()
                    if len(copies) >= info["config"]["num_replicas"] - 1 and all(copy["current"] for copy in copies):
                        return True
                await asyncio.sleep(LOOK_SECONDS)
    return False


def _permanent(difference: Difference) -> Change:
    if difference.is_tolerated:
        return _changed(difference, "permanent", PERMANENT)
    return _changed(difference, "refused", RECREATE)


def _changed(difference: Difference, outcome: Outcome, next_step: str = "") -> Change:
    actual, declared = difference.shown()
    return Change(
        thing=difference.thing,
        property=difference.key,
        actual=actual,
        declared=declared,
        outcome=outcome,
        next_step=next_step,
    )
