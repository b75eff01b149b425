"""Logs of jobs, from a simulated cluster through the gateway to both clients and the command."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.cluster import RunningCluster, running_cluster
from tests.support.front import Front, front
from tests.support.kube_objects import pod
from tests.support.sdk_clients import ClientKind, cutting_proxy, sdk
from tests.support.stories import job

from gpu_autoscaler.model.labels import JOB_ID
from gpu_autoscaler.simcluster.kinds import PODS
from gpu_autoscaler.simcluster.objects import Json
from gpu_autoscaler.simcluster.pod_logs import OUTPUT
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.main import run
from gpu_autoscaler_services.gateway.api import logs
from gpu_autoscaler_services.gateway.api.logs import INDEX, LogSource
from gpu_manager_sdk import Retries, async_client, client
from gpu_manager_sdk.errors import (
    Conflict,
    ConnectionFailed,
    GPUManagerError,
    InvalidRequest,
    NotFound,
    TooManyRequests,
)
from gpu_manager_sdk.log_lines import CONNECTIONS_WITHOUT_LINES_MAX

ONCE = Retries(attempts_count_max=1)
WAIT_SECONDS_MAX = 60.0


@asynccontextmanager
async def _logging(folder: Path) -> AsyncIterator[tuple[Front, RunningCluster]]:
    async with running_cluster() as cluster, front(folder, logs=LogSource(cluster.kube)) as gate:
        await gate.tell(job("j1"))
        yield gate, cluster


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[tuple[Front, RunningCluster]]:
    """A gateway that knows the job j1, and its cluster."""
    async with _logging(tmp_path) as opened:
        yield opened


@pytest.fixture(params=["blocking", "asynchronous"])
def kind(request: pytest.FixtureRequest) -> ClientKind:
    """Either client."""
    chosen: ClientKind = request.param
    return chosen


def _add(cluster: RunningCluster, name: str, *, output: str = "", node: str | None = "n1", index: int = 0) -> None:
    annotations = {OUTPUT: output, INDEX: str(index)}
    item = pod(name, labels={JOB_ID: "j1"}, annotations=annotations, schedulerName="nobody")
    cluster.add("pods", {**item, "spec": {**item["spec"], **({"nodeName": node} if node else {})}})


async def _reached(cluster: RunningCluster, name: str, phase: str) -> None:
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        while cluster.item("pods", name).get("status", {}).get("phase") != phase:
            await asyncio.sleep(0.02)


def _ends(cluster: RunningCluster, name: str) -> None:
    def ended(item: Json) -> None:
        item["status"]["phase"] = "Succeeded"

    cluster.world.api.modify(PODS, f"default/{name}", ended)


async def test_a_members_log_is_read(both: tuple[Front, RunningCluster], kind: ClientKind) -> None:
    """Of the member that is asked for, and of its last pod; the last lines; with times."""
    gate, cluster = both
    cluster.add_node("n1")
    for name, output, index in (("j1-0-a", "lost", 0), ("j1-1", "one\ntwo\nthree", 1)):
        _add(cluster, name, output=output, index=index)
        await _reached(cluster, name, "Running")
    await asyncio.sleep(0.1)  # two seconds of cluster time: a later creation
    _add(cluster, "j1-0-b", output="kept")
    await _reached(cluster, "j1-0-b", "Running")

    async with sdk(kind, gate.url, retries=ONCE) as client:
        assert await client.take(None, "logs", "j1") == ["main started on n1", "kept"]
        assert await client.take(None, "logs", "j1", member=1, tail_lines=2) == ["two", "three"]
        stamped = await client.take(None, "logs", "j1", member=1, timestamps=True, container="main")
        assert [line.partition(" ")[2] for line in stamped] == ["main started on n1", "one", "two", "three"]


async def test_a_log_is_followed_to_its_end(both: tuple[Front, RunningCluster], kind: ClientKind) -> None:
    """It is open while the container runs, and ends with it."""
    gate, cluster = both
    cluster.add_node("n1")
    _add(cluster, "j1-0", output="step 1")
    await _reached(cluster, "j1-0", "Running")
    async with sdk(kind, gate.url, retries=ONCE) as client:
        followed = asyncio.create_task(client.take(None, "logs", "j1", follow=True))
        await asyncio.sleep(0.3)
        assert not followed.done()
        _ends(cluster, "j1-0")
        async with asyncio.timeout(WAIT_SECONDS_MAX):
            lines = await followed
    assert lines == ["main started on n1", "step 1", "main ended: Succeeded"]


@pytest.mark.parametrize("is_stamped", [False, True])
async def test_a_followed_log_goes_on_where_its_connection_broke(
    both: tuple[Front, RunningCluster], kind: ClientKind, monkeypatch: pytest.MonkeyPatch, *, is_stamped: bool
) -> None:
    """Each break in the middle of a line or between lines loses and repeats none, also of lines of one instant."""
    monkeypatch.setattr(client, "RESUME_SECONDS", 0.01)
    monkeypatch.setattr(async_client, "RESUME_SECONDS", 0.01)
    gate, cluster = both
    cluster.add_node("n1")
    _add(cluster, "j1-0", output="\n".join(f"step {number}" for number in range(2000)))
    await _reached(cluster, "j1-0", "Running")
    async with cutting_proxy(gate.url, sizes=(400, 3000, 20_000, 21_000)) as url, sdk(kind, url, retries=ONCE) as sdk_:
        followed = asyncio.create_task(sdk_.take(None, "logs", "j1", follow=True, timestamps=is_stamped))
        await asyncio.sleep(0.5)
        _ends(cluster, "j1-0")
        async with asyncio.timeout(WAIT_SECONDS_MAX):
            lines = await followed
    shown = [line.partition(" ")[2] for line in lines] if is_stamped else lines
    assert shown == ["main started on n1", *(f"step {number}" for number in range(2000)), "main ended: Succeeded"]


async def test_a_followed_log_without_lines_is_not_resumed_for_ever(
    both: tuple[Front, RunningCluster], kind: ClientKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some connections without a line the break is an error."""
    monkeypatch.setattr(client, "RESUME_SECONDS", 0.01)
    monkeypatch.setattr(async_client, "RESUME_SECONDS", 0.01)
    gate, cluster = both
    cluster.add_node("n1")
    _add(cluster, "j1-0")
    await _reached(cluster, "j1-0", "Running")
    sizes = (9,) * (CONNECTIONS_WITHOUT_LINES_MAX + 1)  # part of the first line
    async with cutting_proxy(gate.url, sizes=sizes) as url, sdk(kind, url, retries=ONCE) as sdk_:
        with pytest.raises(ConnectionFailed, match="broke while the log was read"):
            await sdk_.take(None, "logs", "j1", follow=True)


async def test_a_log_that_there_is_not_is_refused(both: tuple[Front, RunningCluster], kind: ClientKind) -> None:
    """No pod, no node, no such container, no previous container, no such job: each with its reason."""
    gate, cluster = both
    async with sdk(kind, gate.url, retries=ONCE) as client:

        async def refused(error: type[GPUManagerError], phrase: str, job_id: str = "j1", **options: object) -> None:
            with pytest.raises(error, match=phrase):
                await client.take(None, "logs", job_id, **options)

        await refused(NotFound, "job 'j1' is queued and it has no pod")
        await refused(NotFound, "'nobody' not found", "nobody")
        _add(cluster, "j1-0", node=None)
        await refused(Conflict, "has no node yet")
        cluster.add_node("n1")
        _add(cluster, "j1-1", index=1)
        await _reached(cluster, "j1-1", "Running")
        await refused(NotFound, "members with a pod: 0, 1", member=2)
        await refused(Conflict, "container nope is not valid", member=1, container="nope")
        await refused(Conflict, "previous terminated container", member=1, previous=True)
        await refused(InvalidRequest, "invalid query", tail_lines=-1)


async def test_a_gateway_without_a_cluster_says_so(tmp_path: Path, kind: ClientKind) -> None:
    """501, which is not repeated."""
    async with front(tmp_path) as gate, sdk(kind, gate.url) as client:
        await gate.tell(job("j1"))
        with pytest.raises(GPUManagerError, match="no access to Kubernetes") as refused:
            await client.take(None, "logs", "j1")
    assert refused.value.status == 501


async def test_logs_at_once_are_limited(both: tuple[Front, RunningCluster], monkeypatch: pytest.MonkeyPatch) -> None:
    """429 above the limit, and room again when one ends."""
    monkeypatch.setattr(logs, "STREAMS_COUNT_MAX", 1)
    gate, cluster = both
    cluster.add_node("n1")
    _add(cluster, "j1-0")
    await _reached(cluster, "j1-0", "Running")
    async with sdk("asynchronous", gate.url, retries=ONCE) as client:
        followed = asyncio.create_task(client.take(None, "logs", "j1", follow=True))
        await asyncio.sleep(0.3)
        with pytest.raises(TooManyRequests, match="at most 1 logs at once"):
            await client.take(None, "logs", "j1")
        _ends(cluster, "j1-0")
        async with asyncio.timeout(WAIT_SECONDS_MAX):
            await followed
        assert await client.take(1, "logs", "j1") == ["main started on n1"]


async def test_the_command_prints_a_log(both: tuple[Front, RunningCluster], capsys: pytest.CaptureFixture[str]) -> None:
    """Lines on stdout, reasons on stderr."""
    gate, cluster = both
    assert await asyncio.to_thread(run, ["jobs", "logs", "j1", "--gateway", gate.url]) == Exit.NOT_FOUND
    assert "it has no pod" in capsys.readouterr().err
    cluster.add_node("n1")
    _add(cluster, "j1-0", output="one\ntwo")
    await _reached(cluster, "j1-0", "Running")
    assert await asyncio.to_thread(run, ["jobs", "logs", "j1", "--tail", "1", "--gateway", gate.url]) == Exit.OK
    assert capsys.readouterr().out == "two\n"
