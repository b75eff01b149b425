"""The migration of a running broker, by its own user with its own rights."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nats.aio.client import Client

from gpu_autoscaler.bus.differences import NANOSECONDS
from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.nats.link import NatsLink, RequestTimedOut
from gpu_autoscaler.bus.nats.migrate import PERMANENT, WOULD_DISCARD, Change
from gpu_autoscaler.bus.permissions import password_variable, server_text
from gpu_autoscaler.bus.protocol import Publication
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.bus.streams import MEBIBYTE, BusDeclaration
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.config import NatsSettings, Settings, StoreSettings
from gpu_autoscaler_services.migration import declaration, migrate
from gpu_autoscaler_services.permissions import MIGRATOR, fresh_passwords, users

pytestmark = pytest.mark.integration

SECOND = NANOSECONDS
# What an earlier release would have left: other values of each kind, one of which no server changes.
STREAMS: Mapping[str, Mapping[str, Any]] = {
    "JOB": {"max_age": 3600 * SECOND, "description": "Jobs"},
    "GPU": {"allow_msg_ttl": False, "max_msg_size": MEBIBYTE},
    "NODE": {"max_bytes": MEBIBYTE, "duplicate_window": 60 * SECOND},
    "DEMAND": {"deny_delete": True, "deny_purge": True},
    "SCALING": {"deny_delete": False, "deny_purge": False},
    "KV_leases": {"max_bytes": MEBIBYTE // 2},
}
CONSUMERS: Mapping[str, Mapping[str, Any]] = {
    "scheduler-job-act": {"ack_wait": 9 * SECOND, "max_deliver": 7},
    "scaler-scaling-plans-act": {"filter_subjects": ["scaling.plan_made"], "max_ack_pending": 5},
}


class Broker:
    """A server with the users of the project, and an operator's connection to it."""

    def __init__(self, server: NatsServer, client: Client, settings: Settings) -> None:
        self.server = server
        self.client = client
        self.settings = settings

    async def call(self, operation: str, body: object = None) -> dict[str, Any]:
        """Call the JetStream API with all permissions."""
        payload = b"" if body is None else msgspec.json.encode(body)
        answer: dict[str, Any] = msgspec.json.decode((await self.client.request(f"$JS.API.{operation}", payload)).data)
        assert "error" not in answer, (operation, answer)
        return answer

    async def configs(self) -> dict[str, dict[str, Any]]:
        """Return the properties of each stream and durable consumer."""
        declared, found = declaration(self.settings), {}
        for spec in declared.stores:
            name = spec.config()["name"]
            found[name] = (await self.call(f"STREAM.INFO.{name}"))["config"]
        for consumer in declared.consumers:
            info = await self.call(f"CONSUMER.INFO.{consumer.stream}.{consumer.durable}")
            found[consumer.durable] = info["config"]
        return found

    async def migrated(self, *, is_applied: bool = True, **more: Any) -> tuple[Change, ...]:  # noqa: ANN401
        """Migrate the broker as the migrator."""
        return await migrate(self.settings, is_applied=is_applied, **{"is_history_discarded": False, **more})


@asynccontextmanager
async def broker_with(folder: Path, settings: tuple[str, ...] = ()) -> AsyncIterator[Broker]:
    """A server without streams."""
    passwords = fresh_passwords()
    server = NatsServer(
        folder / "nats", settings=(server_text(users()), "no_auth_user: operator", *settings), variables=passwords
    )
    await server.start()
    client = Client()
    try:
        await client.connect(server.url)
        password = passwords[password_variable(MIGRATOR)]
        url = server.url.replace("://", f"://{MIGRATOR}:{password}@")
        store = StoreSettings(url=f"sqlite:///{folder / 'store.db'}")
        yield Broker(server, client, Settings(nats=NatsSettings(url=url), store=store))
        await client.close()
    finally:
        await server.stop()


async def plant(broker: Broker) -> None:
    """Create everything with the planted values."""
    declared = declaration(broker.settings)
    for spec in declared.stores:
        config = spec.config()
        planted = STREAMS.get(config["name"], {})
        await broker.call(f"STREAM.CREATE.{config['name']}", {**config, **planted})
    for consumer in declared.consumers:
        config = {**consumer.config(), **CONSUMERS.get(consumer.durable, {})}
        body = {"stream_name": consumer.stream, "action": "create", "config": config}
        await broker.call(f"CONSUMER.CREATE.{consumer.stream}.{consumer.durable}", body)


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    """A broker with the planted differences."""
    async with broker_with(tmp_path) as broker:
        await plant(broker)
        yield broker


def summary(changes: tuple[Change, ...], outcome: str) -> set[tuple[str, str]]:
    """Return thing and property of the changes with this outcome."""
    return {(change.thing, change.property) for change in changes if change.outcome == outcome}


PLANTED = {
    *((f"stream {name}", key) for name in ("JOB", "GPU", "NODE", "SCALING") for key in STREAMS[name]),
    ("bucket leases", "max_bytes"),
    ("consumer scheduler-job-act of JOB", "ack_wait"),
    ("consumer scheduler-job-act of JOB", "max_deliver"),
    ("consumer scaler-scaling-plans-act of SCALING", "filter_subjects"),
    ("consumer scaler-scaling-plans-act of SCALING", "max_ack_pending"),
}


async def test_every_difference_is_listed_then_applied_then_gone(broker: Broker) -> None:
    """Listing changes nothing; applying twice changes nothing more. Flags that no server clears remain, harmless."""
    before = await broker.configs()
    listed = await broker.migrated(is_applied=False)
    assert summary(listed, "pending") == PLANTED
    assert await broker.configs() == before

    assert summary(await broker.migrated(), "applied") == PLANTED

    assert {(change.thing, change.next_step) for change in await broker.migrated()} == {("stream DEMAND", PERMANENT)}
    declared, found = declaration(broker.settings), await broker.configs()
    differences = [key for spec in declared.stores for key in spec.differences(found[spec.config()["name"]])]
    assert {difference.key for difference in differences} == {"deny_delete", "deny_purge"}
    assert not [key for spec in declared.consumers for key in spec.differences(found[spec.durable])]


async def test_a_migration_killed_at_any_point_ends_alike_when_it_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops before or after each of its requests."""
    call = NatsLink.call
    ends: list[dict[str, dict[str, Any]]] = []
    for requests_count in itertools.chain([None], itertools.count(1, 4)):
        async with broker_with(tmp_path / str(requests_count)) as broker:
            await plant(broker)
            left = itertools.count(requests_count or 10**6, -1)

            async def stopped(link: NatsLink, *args: Any, **more: Any) -> dict[str, Any]:  # noqa: ANN401
                answer = await call(link, *args, **more)
                if next(left) == 0:  # noqa: B023 - used within the turn
                    raise asyncio.CancelledError
                return answer

            monkeypatch.setattr(NatsLink, "call", stopped)
            is_killed = False
            try:
                await broker.migrated()
            except asyncio.CancelledError:
                is_killed = True
            monkeypatch.setattr(NatsLink, "call", call)
            await broker.migrated()
            ends.append(await broker.configs())
            if requests_count is not None and not is_killed:
                break
    assert len(ends) > 10
    assert all(end == ends[0] for end in ends)


@pytest.mark.parametrize(("unanswered_count", "is_migrated"), [(2, True), (1000, False)])
async def test_a_migration_waits_while_copies_choose_a_leader(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, unanswered_count: int, *, is_migrated: bool
) -> None:
    """Servers that were restarted leave a consumer without a leader for a while; not for ever."""
    call, asked = NatsLink.call, itertools.count()

    async def electing(link: NatsLink, operation: str, *args: Any, **more: Any) -> dict[str, Any]:  # noqa: ANN401
        if operation == "CONSUMER.INFO.JOB.scheduler-job-act" and next(asked) < unanswered_count:
            await asyncio.sleep(0.05)
            raise RequestTimedOut("no leader answers")
        return await call(link, operation, *args, **more)

    monkeypatch.setattr(NatsLink, "call", electing)
    monkeypatch.setattr("gpu_autoscaler.bus.nats.migrate.LEADER_SECONDS_MAX", 0.5)
    with contextlib.nullcontext() if is_migrated else pytest.raises(RequestTimedOut, match="no leader"):
        changes = await broker.migrated()
        assert ("consumer scheduler-job-act of JOB", "max_deliver") in summary(changes, "applied")


async def test_history_is_discarded_only_when_it_is_confirmed(broker: Broker) -> None:
    """A limit below what a stream stores is refused; one above it is applied."""
    bus = await NatsBus.connect(broker.server.url, name="load", declared=BusDeclaration(streams=()))
    await bus.publish_many(
        [Publication(subject="cost.x", payload=bytes(MEBIBYTE // 2), message_id=str(number)) for number in range(6)]
    )
    await broker.migrated()
    config = (await broker.call("STREAM.INFO.COST"))["config"]
    larger = {**config, "max_bytes": 4 * config["max_bytes"], "max_age": 2 * config["max_age"]}
    await broker.call("STREAM.UPDATE.COST", larger)
    assert summary(await broker.migrated(), "applied") == {("stream COST", "max_bytes"), ("stream COST", "max_age")}

    declared = declaration(broker.settings).streams
    shorter = tuple(
        msgspec.structs.replace(spec, max_bytes=2 * MEBIBYTE) if spec.name == "COST" else spec for spec in declared
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpu_autoscaler_services.migration.declared_streams", lambda _: shorter)
        refused = [change for change in await broker.migrated() if change.thing == "stream COST"]
        assert [(change.outcome, change.next_step) for change in refused] == [("refused", WOULD_DISCARD)]
        assert (await bus.span("COST")).first_sequence == 1
        assert ("stream COST", "max_bytes") in summary(await broker.migrated(is_history_discarded=True), "applied")
    assert (await bus.span("COST")).first_sequence > 1
    await bus.close()


async def test_the_last_release_finds_its_limits_before_a_rollback(broker: Broker) -> None:
    """Its services refuse every difference; consumers that it does not know are left alone."""
    await broker.migrated()
    await broker.call(
        "STREAM.UPDATE.POD", {**(await broker.configs())["POD"], "max_age": 9 * 24 * 3600 * SECOND, "max_bytes": -1}
    )
    plans = (await broker.configs())["scaler-scaling-plans-act"]

    changes = await broker.migrated(to="0.2")

    last, now = declaration(broker.settings, "0.2"), declaration(broker.settings)
    differing = {
        (f"stream {spec.name}", key)
        for spec, other in zip(last.streams, now.streams, strict=True)
        for key in ("max_age", "max_bytes")
        if spec.config()[key] != other.config()[key]
    }
    assert ("stream GPU", "max_age") in differing
    differing |= {
        (f"consumer {spec.durable} of {spec.stream}", "filter_subjects")
        for spec in last.consumers
        for other in now.consumers
        if spec.durable == other.durable and set(spec.subjects) != set(other.subjects)
    }
    assert summary(changes, "applied") == differing | {("stream POD", "max_age"), ("stream POD", "max_bytes")}
    found = await broker.configs()
    assert [change.key for spec in last.stores for change in spec.differences(found[spec.config()["name"]])] == [
        "deny_delete",
        "deny_purge",
    ], "of the planted DEMAND alone"
    assert {spec.durable for spec in last.consumers} < set(found)
    assert found["scaler-scaling-plans-act"] == plans
    with pytest.raises(ConfigError, match=r"release 0\.1 is unknown; choose 0\.2"):
        await broker.migrated(to="0.1")


async def test_services_that_wait_for_a_change_get_only_that(broker: Broker) -> None:
    """Before the new release starts, limits are still those of the running one, which refuses others at its start."""
    changes = await broker.migrated(part="required")

    assert {change.thing for change in changes} == {"stream SCALING"}
    assert (await broker.configs())["JOB"]["max_age"] == 3600 * SECOND


async def test_a_broker_without_streams_is_left_to_the_services(tmp_path: Path) -> None:
    """They create what is missing, as declared."""
    async with broker_with(tmp_path) as broker:
        assert await broker.migrated() == ()


async def test_copies_need_as_many_servers(broker: Broker) -> None:
    """One server keeps one copy; the other changes are applied."""
    await broker.migrated()
    nats = msgspec.structs.replace(broker.settings.nats, replicas_count=3)
    settings = msgspec.structs.replace(broker.settings, nats=nats)
    changes = await migrate(settings, is_applied=True, is_history_discarded=False)
    (pod,) = [change for change in changes if change.thing == "stream POD"]
    assert (pod.property, pod.outcome) == ("num_replicas", "refused")
    assert "start as many servers as copies are declared, as one cluster" in pod.next_step
