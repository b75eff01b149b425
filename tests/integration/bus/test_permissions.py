"""The broker's users (`deploy/nats/users.conf`) on a real server: permissions to publish and to manage streams."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import nats
import pytest
import pytest_asyncio

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.permissions import password_variable
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.bus.streams import BUCKETS, BusDeclaration, streams
from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobCancelRequested, JobRequested
from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.runtime.service import consumers_of
from gpu_autoscaler_services.permissions import (
    CLIENT,
    MIGRATOR,
    NODE_WATCHER,
    OPERATOR_USER,
    READER,
    fresh_passwords,
    users,
)
from gpu_autoscaler_services.registry import services

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

ROOT = Path(__file__).resolve().parents[3]
PASSWORDS = fresh_passwords()
LAST = "nobody.may"  # denied to all users: its error proves that all earlier errors have arrived
SUBJECTS = frozenset(
    fact.subject_root() + (".n1" if fact.subject_root().startswith("gpu.node_") else "") for fact in FACTS
)
OURS = {service.name: service for service in services()}


def subjects(facts: Iterable[type[Fact]]) -> set[str]:
    """Subjects of these facts, as they are published."""
    roots = {fact.subject_root() for fact in facts}
    return {subject for subject in SUBJECTS if ".".join(subject.split(".")[:2]) in roots}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NatsServer]:
    """A server with the users of the repository's file, and all that services declare."""
    text = (ROOT / "deploy/nats/users.conf").read_text(encoding="utf-8")
    server = NatsServer(tmp_path_factory.mktemp("nats"), settings=(text,), variables=PASSWORDS)
    await server.start()
    for service in services():  # each makes its own, as at its start
        bus = await NatsBus.connect(
            url(server, service.name),
            name=service.name,
            declared=BusDeclaration(streams=streams(), consumers=consumers_of(service), buckets=BUCKETS),
        )
        await bus.ensure()
        await bus.close()
    yield server
    await server.stop()


def url(server: NatsServer, user: str) -> str:
    """The server's address for a user."""
    return server.url.replace("://", f"://{user}:{PASSWORDS[password_variable(user)]}@")


async def refused(server: NatsServer, user: str, published: Iterable[str] = (), heard: Iterable[str] = ()) -> set[str]:
    """Of these subjects, those that the server does not let the user publish on, or subscribe to."""
    said: list[str] = []
    last = asyncio.Event()

    async def hear(error: Exception) -> None:
        said.append(str(error))
        if LAST.lower() in str(error).lower():
            last.set()

    tried = [*published, *heard]
    connection = await nats.connect(url(server, user), error_cb=hear)
    try:
        for subject in heard:
            await connection.subscribe(subject)
        for subject in (*published, LAST):
            await connection.publish(subject, b"{}")
        await connection.flush()
        if user != OPERATOR_USER:  # has all permissions; errors reach all others in order
            async with asyncio.timeout(60):
                await last.wait()
    finally:
        await connection.close()
    words = " ".join(said).lower()  # as the client library hands them on
    assert all("permissions violation" in each.lower() for each in said), said
    return {subject for subject in tried if f'"{subject.lower()}"' in words}


@pytest.mark.parametrize("name", OURS)
async def test_a_service_publishes_its_own_facts_and_no_others(server: NatsServer, name: str) -> None:
    """What it declares it may say; every other fact of the catalog is refused by the server."""
    assert await refused(server, name, SUBJECTS) == SUBJECTS - subjects(OURS[name].publishes)


async def test_notices_come_from_few_services_alone(server: NatsServer) -> None:
    """Those who watch the cloud, and the scaler for paid periods. Watchers on nodes report to the gateway."""
    subject = SpotNoticeReceived.subject_root()
    may = {user for user in users() if not await refused(server, user, [subject])}
    assert may == {"spot_watcher", "node_gateway", "scaler", OPERATOR_USER}


async def test_who_asks_may_ask_and_who_looks_may_look(server: NatsServer) -> None:
    """People and programs publish requests alone; readers publish no fact."""
    asked = subjects((JobRequested, JobCancelRequested, DemandReported))
    assert await refused(server, CLIENT, SUBJECTS) == SUBJECTS - asked
    assert await refused(server, READER, SUBJECTS) == SUBJECTS
    assert await refused(server, MIGRATOR, SUBJECTS) == SUBJECTS
    assert await refused(server, NODE_WATCHER, SUBJECTS) == SUBJECTS
    assert await refused(server, OPERATOR_USER, SUBJECTS) == set()


@pytest.mark.parametrize("name", [*OURS, NODE_WATCHER, CLIENT, READER])
async def test_no_user_touches_the_streams_of_another(server: NatsServer, name: str) -> None:
    """Streams are neither changed nor emptied; deliveries of another service are neither taken nor acknowledged."""
    tried = {f"$JS.API.STREAM.{action}.{spec.name}" for action in ("UPDATE", "DELETE", "PURGE") for spec in streams()}
    tried |= {f"$JS.API.STREAM.MSG.DELETE.{spec.name}" for spec in streams()}
    for service in services():
        for spec in consumers_of(service):
            place = f"{spec.stream}.{spec.durable}"
            tried.add(f"$JS.API.CONSUMER.DELETE.{place}")
            if name not in OURS or spec not in consumers_of(OURS[name]):
                tried |= {f"$JS.API.CONSUMER.{action}.{place}" for action in ("CREATE", "MSG.NEXT")}
                tried.add(f"$JS.ACK.{place}.1.1.1.1.0")
    assert await refused(server, name, tried) == tried


async def test_the_migrator_changes_streams_and_consumers_and_reads_none(server: NatsServer) -> None:
    """It deletes and empties nothing, takes no message, and changes streams of nobody else."""
    names = [spec.name for spec in streams()]
    durables = [spec for service in services() for spec in consumers_of(service)]
    paths = {f"{spec.stream}.{spec.durable}" for spec in durables}
    allowed = {f"$JS.API.STREAM.UPDATE.{name}" for name in names}
    allowed |= {f"$JS.API.CONSUMER.{action}.{path}" for action in ("INFO", "CREATE") for path in paths}
    tried = {f"$JS.API.STREAM.{action}.{name}" for action in ("CREATE", "DELETE", "PURGE") for name in names}
    tried |= {f"$JS.API.STREAM.MSG.{action}.{name}" for action in ("GET", "DELETE") for name in names}
    tried |= {f"$JS.API.CONSUMER.{action}.{path}" for action in ("DELETE", "MSG.NEXT") for path in paths}
    tried |= {f"$JS.API.CONSUMER.CREATE.{name}.reader" for name in names}
    tried |= {f"$JS.ACK.{path}.1.1.1.1.0" for path in paths} | {"$JS.API.STREAM.UPDATE.OTHER"}
    assert await refused(server, MIGRATOR, tried | allowed) == tried


async def test_no_user_receives_the_replies_of_another(server: NatsServer) -> None:
    """A service is subscribed to its own inbox alone; readers hear facts, and no answers to services."""
    wanted = ["_INBOX_scaler.>", "_INBOX.>", "scaling.>", ">"]
    assert await refused(server, "dcgm_ingest", heard=wanted) == set(wanted)
    assert await refused(server, READER, heard=wanted) == {"_INBOX_scaler.>", ">"}
    assert await refused(server, CLIENT, heard=wanted) == {"_INBOX_scaler.>", "scaling.>", ">"}
    assert await refused(server, MIGRATOR, heard=wanted) == set(wanted)
    wanted += ["node_report.*", "$SYS.REQ.USER.AUTH"]
    assert await refused(server, NODE_WATCHER, heard=wanted) == set(wanted)
    assert await refused(server, "spot_watcher", heard=wanted) == set(wanted)
