"""Logins of node watchers: a real broker asks the gateway, which asks a real API server about a real pod's token.

A watcher reports about the instance of its own node and can do nothing else.
"""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jwt
import nats
import pytest
from nats.aio.client import Client
from tests.controlplane.fixtures import kube, plane
from tests.controlplane.plane import ControlPlane
from tests.support.bound_tokens import (
    ACCOUNT,
    bound_token,
    claims_of,
    give_account,
    give_node,
    give_watcher,
    instance_of,
    remove_node,
    remove_pod,
    watched_node,
)
from tests.support.node_watchers import Broker, Metadata, gateway, notices, serving_broker, until, watcher

from gpu_autoscaler.bus.nats.link import abort
from gpu_autoscaler.bus.nats.requests import RequestLink
from gpu_autoscaler.cloudmeta.protocol import ReclaimNotice
from gpu_autoscaler.cloudmeta.reports import instance_token, report_subject, watcher_inbox
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.runtime.runner import Runner

__all__ = ["kube", "plane"]
TOKEN_CACHE_SECONDS_MAX = 20.0  # the API server remembers a token that it accepted for 10 s
pytestmark = [pytest.mark.slow, pytest.mark.integration]


def reclaim() -> ReclaimNotice:
    """A notice as EC2 shows it."""
    at = (datetime.now(UTC) + timedelta(seconds=120)).replace(microsecond=0)
    return ReclaimNotice("terminate", at.isoformat(), at)


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    """A broker with the auth callout."""
    async with serving_broker(tmp_path, with_callout=True) as broker:
        yield broker


@pytest.fixture
async def entry(broker: Broker, kube: KubeClient) -> AsyncIterator[Runner]:
    """The gateway that lets watchers in."""
    await give_account(kube)
    async with gateway(broker, kube, account=ACCOUNT) as runner:
        yield runner


async def is_let_in(broker: Broker, token: str | None = None, **options: str) -> bool:
    """Whether the broker accepts a connection with this token, or these other credentials."""
    client = Client()

    async def ignore(_: Exception) -> None:
        """The refusal arrives as an exception, too."""

    try:
        credentials: dict[str, Any] = options if token is None else {"token": token}
        await client.connect(
            servers=[broker.url()], allow_reconnect=False, max_reconnect_attempts=0, error_cb=ignore, **credentials
        )
        await client.flush()
    except (nats.errors.Error, OSError):
        return False
    else:
        return True
    finally:
        await client.close()
        abort(client)


@pytest.mark.usefixtures("entry")
async def test_a_watcher_speaks_for_its_own_instance_only(broker: Broker, kube: KubeClient) -> None:
    """Everything but its own reports and its own inbox is denied by the server."""
    token, _ = await watched_node(kube, "own"), await watched_node(kube, "other")
    own, other = instance_of("own"), instance_of("other")
    denied: list[str] = []

    async def on_error(error: Exception) -> None:
        denied.append(str(error).lower())

    client = await nats.connect(
        broker.url(), token=token, inbox_prefix=watcher_inbox(own), allow_reconnect=False, error_cb=on_error
    )
    answer = await client.request(report_subject(own), b"{}", timeout=5)
    assert json.loads(answer.data)["is_settled"] is True
    published = [
        report_subject(other),
        "node_report.anything",
        "spot.notice_received",
        "spot.notice_withdrawn",
        f"spot.notice_received.{instance_token(own)}",
        "scaling.plan_made",
        "$JS.API.INFO",
        "$JS.API.STREAM.INFO.SPOT",
        "$JS.API.STREAM.NAMES",
        "$JS.API.STREAM.MSG.GET.SPOT",
        "$JS.API.STREAM.CREATE.MINE",
        "$JS.API.STREAM.PURGE.SPOT",
        "$JS.API.CONSUMER.CREATE.SPOT",
        "$JS.API.CONSUMER.MSG.NEXT.SCALING.scaler-scaling-act",
        "$JS.API.DIRECT.GET.SPOT",
        "$SYS.REQ.USER.AUTH",
        "$SYS.REQ.SERVER.PING",
        "_INBOX_scaler.1",
        f"{watcher_inbox(other)}.1",
    ]
    subscribed = [
        "spot.>",
        ">",
        "node_report.*",
        report_subject(own),
        "$SYS.REQ.USER.AUTH",
        "_INBOX.>",
        "_INBOX_node_watcher.>",
        f"{watcher_inbox(other)}.>",
    ]
    for subject in published:
        await client.publish(subject, b"{}")
    await client.flush()
    for subject in subscribed:
        await client.subscribe(subject)
        await client.flush()
    await until(lambda: len(denied) >= len(published) + len(subscribed))
    missed = [
        subject for subject in (*published, *subscribed) if not any(f'"{subject.lower()}"' in text for text in denied)
    ]
    assert missed == []
    await client.close()


@pytest.mark.usefixtures("entry")
async def test_a_report_is_about_the_instance_of_its_subject(broker: Broker, kube: KubeClient, entry: Runner) -> None:
    """A body that names another instance changes nothing: the fact names that of the credentials."""
    token, own, other = await watched_node(kube, "honest"), instance_of("honest"), instance_of("victim")
    notice = {"kind": "terminate", "provider_event": "e", "reclaim_at": "2030-01-01T00:00:00Z", "provider_id": other}
    body = json.dumps({"shown": [notice], "provider_id": other, "node_name": "victim"}).encode()
    client = await nats.connect(broker.url(), token=token, inbox_prefix=watcher_inbox(own), allow_reconnect=False)
    await client.request(report_subject(own), body, timeout=5)
    await until(lambda: notices(entry))
    assert {record.notice.provider_id for record in notices(entry).values()} == {own}
    assert {record.notice.node_name for record in notices(entry).values()} == {None}
    await client.close()


@pytest.mark.usefixtures("entry")
async def test_only_tokens_of_watchers_are_accepted(broker: Broker, kube: KubeClient, plane: ControlPlane) -> None:
    """Not a forged, expired or foreign one, none for another audience, of another account or of no pod."""
    await give_account(kube, "somebody")
    await give_node(kube, "n1")
    bound = await give_watcher(kube, "n1")
    good = await bound_token(kube, bound)
    head, _, signature = good.split(".")
    stolen = claims_of(good)
    stolen["kubernetes.io"]["node"] = {"name": "n2", "uid": "u2"}
    forged = base64.urlsafe_b64encode(json.dumps(stolen).encode()).decode().rstrip("=")
    key = plane.authority.accounts_key.read_text(encoding="utf-8")
    header = jwt.get_unverified_header(good)
    an_hour_ago = int(datetime.now(UTC).timestamp()) - 3600
    old = {**claims_of(good), "iat": an_hour_ago - 600, "nbf": an_hour_ago - 600, "exp": an_hour_ago}
    await give_node(kube, "n3")
    foreign = await give_watcher(kube, "n3", account="somebody")
    refused = {
        "none": None,
        "no token": "hello",
        "forged": f"{head}.{forged}.{signature}",
        "expired": jwt.encode(old, key, algorithm=header["alg"], headers={"kid": header["kid"]}),
        "for the API server": await bound_token(kube, bound, audience=None),
        "for another audience": await bound_token(kube, bound, audience="vault"),
        "of another account": await bound_token(kube, foreign, account="somebody"),
        "of no pod": await bound_token(kube, None),
        "too long": "x" * 20_000,
    }
    assert await is_let_in(broker, good)
    assert {name for name, token in refused.items() if await is_let_in(broker, token)} == set()


@pytest.mark.usefixtures("entry")
async def test_a_token_ends_with_its_pod_and_its_node(broker: Broker, kube: KubeClient, plane: ControlPlane) -> None:
    """Deleted pod, deleted node, and another machine under the old node's name: refused."""
    removed = await watched_node(kube, "removed")
    assert await is_let_in(broker, removed)
    await asyncio.to_thread(remove_pod, plane, "watcher-removed")
    async with asyncio.timeout(TOKEN_CACHE_SECONDS_MAX):
        while await is_let_in(broker, removed):
            await asyncio.sleep(0.5)
    replaced = await watched_node(kube, "replaced")
    await remove_node(plane, "replaced")
    assert not await is_let_in(broker, replaced)
    await give_node(kube, "replaced")
    assert not await is_let_in(broker, replaced), "another machine of the same name"


@pytest.mark.usefixtures("entry")
async def test_a_password_opens_the_broker_only_to_its_user(broker: Broker) -> None:
    """The callout lets nobody in by password."""
    assert not await is_let_in(broker, user="node_watcher", password="wrong")
    assert not await is_let_in(broker, user="unknown", password="word")


async def test_a_login_is_renewed_when_it_expires(broker: Broker, kube: KubeClient) -> None:
    """The watcher comes back by itself, with the token that is mounted then."""
    await give_account(kube)
    token, links, reads = await watched_node(kube, "renewed"), list[RequestLink](), 0

    def read() -> str:
        nonlocal reads
        reads += 1
        return token

    async with (
        gateway(broker, kube, account=ACCOUNT, life_share=2.0 / 1800.0) as runner,
        watcher(metadata := Metadata(instance_of("renewed")), broker.url(), token=read, links=links),
    ):
        await until(lambda: links and links[0].connections_count >= 3)
        metadata.notices = (reclaim(),)
        await until(lambda: notices(runner))
    assert reads >= 3


async def test_open_connections_outlive_api_server_and_gateway(
    broker: Broker, kube: KubeClient, plane: ControlPlane
) -> None:
    """Known watchers report while the API server is away; new ones wait, and come in when it is back."""
    await give_account(kube)
    first, second = await watched_node(kube, "first"), await watched_node(kube, "second")
    known, new = Metadata(instance_of("first")), Metadata(instance_of("second"))
    links, later = list[RequestLink](), list[RequestLink]()
    async with watcher(known, broker.url(), token=lambda: first, links=links):
        async with gateway(broker, kube, account=ACCOUNT) as runner:
            await until(lambda: links and links[0].is_up)
            await asyncio.to_thread(plane.kill, "kube-apiserver")
            try:
                async with watcher(new, broker.url(), token=lambda: second, links=later):
                    known.notices = (reclaim(),)
                    await until(lambda: notices(runner))
                    await until(lambda: later and later[0].failure)
                    assert not later[0].is_up
                    await asyncio.to_thread(restart_api, plane)
                    await until(lambda: later[0].is_up, 60.0)
            finally:
                if plane.ask("/readyz")[0] != 200:
                    await asyncio.to_thread(restart_api, plane)
        assert links[0].is_up, "it waits for another gateway on its open connection"
        known.notices = ()
        async with gateway(broker, kube, account=ACCOUNT) as runner:
            await until(lambda: any(not record.is_active for record in notices(runner).values()))
    assert links[0].connections_count == 1


def restart_api(plane: ControlPlane) -> None:
    """Start the API server again."""
    plane.start_api()
    plane.wait_ready()
