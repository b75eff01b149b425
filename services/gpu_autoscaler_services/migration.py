"""Brings broker and store to this release, or the broker back to an earlier one. Used by the command, by the launcher
and by the chart's jobs.

Services create what is missing, work with limits that differ, and never change what exists.
"""

from importlib.resources import files
from typing import Literal, TypeAlias

import msgspec

from gpu_autoscaler.bus.nats.migrate import Change, MigrationOptions, migrate_broker
from gpu_autoscaler.bus.streams import BucketSpec, BusDeclaration, ConsumerSpec, StreamSpec, buckets
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.config import Settings
from gpu_autoscaler.runtime.service import consumers_of
from gpu_autoscaler.store.opening import open_store, schema_of
from gpu_autoscaler_services.permissions import MIGRATOR
from gpu_autoscaler_services.registry import services
from gpu_autoscaler_services.wiring import declared_streams, migrator_link

# store: the schema of the store. required: that, and what services of this release refuse to start with.
Part: TypeAlias = Literal["store", "required", "all"]
_RELEASES = files(__package__) / "releases"


class _Release(msgspec.Struct, frozen=True):
    """The `streams.json` of an earlier release."""

    streams: tuple[StreamSpec, ...]
    consumers: tuple[ConsumerSpec, ...]
    buckets: tuple[BucketSpec, ...]


async def migrate(
    settings: Settings, part: Part = "all", *, to: str | None = None, is_applied: bool, is_history_discarded: bool
) -> tuple[Change, ...]:
    """Return each difference and what became of it. `to`: an earlier release, which reads the store as it is.

    Raises ConfigError for what an operator must correct, TransientError while broker or store do not work.
    """
    declared = declaration(settings, to)
    changes: list[Change] = []
    if to is None:
        changes += await _migrate_store(settings.store.url, is_applied=is_applied)
    if part != "store":
        options = MigrationOptions(
            is_applied=is_applied, is_required_only=part == "required", is_history_discarded=is_history_discarded
        )
        async with migrator_link(settings, MIGRATOR) as link:
            changes += await migrate_broker(link, declared, options)
    return tuple(changes)


def declaration(settings: Settings, release: str | None = None) -> BusDeclaration:
    """Return what this release declares for all services, or an earlier one. Raises ConfigError for another one."""
    if release is None:
        consumers = {spec.durable: spec for service in services() for spec in consumers_of(service)}
        return BusDeclaration(
            streams=declared_streams(settings.nats),
            consumers=tuple(consumers.values()),
            buckets=buckets(settings.nats.replicas_count),
        )
    known = sorted(entry.name.removesuffix(".json") for entry in _RELEASES.iterdir() if entry.name.endswith(".json"))
    if release not in known:
        raise ConfigError("migrate", [f"--to: release {release} is unknown; choose {', '.join(known)}"])
    recorded = msgspec.json.decode((_RELEASES / f"{release}.json").read_bytes(), type=_Release)
    copies = settings.nats.replicas_count
    return BusDeclaration(
        streams=tuple(msgspec.structs.replace(spec, replicas_count=copies) for spec in recorded.streams),
        consumers=recorded.consumers,
        buckets=recorded.buckets,
    )


async def _migrate_store(url: str, *, is_applied: bool) -> list[Change]:
    """Migrate an older schema. An empty database is left to the service that creates its schema."""
    version = await schema_of(url)
    if version.current and is_applied:
        await (await open_store(url, is_migrating=True)).close()
    elif version.current:
        version.refuse_newer()
    return [
        Change(
            thing=f"store {version.place}",
            property="schema",
            actual=str(version.current),
            declared=str(version.newest),
            outcome="applied" if is_applied else "pending",
        )
        for _ in version.missing()[-1:]
        if version.current
    ]
