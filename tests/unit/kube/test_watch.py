"""List-then-watch goes on through everything that servers and connections do."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from tests.support.cluster import RunningCluster, running_cluster
from tests.support.kube_objects import pod

from gpu_autoscaler.kube import watch
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import Connection
from gpu_autoscaler.kube.protocol import PODS, Bookmark, Changed, Deleted, Kind, Listed, WatchItem
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.simcluster.faults import Refusal
from gpu_autoscaler.simcluster.kinds import PODS as SERVED_PODS


class Watched:
    """Reads one watch, with a time limit for each item."""

    def __init__(self, kube: KubeClient, kind: Kind[Any] = PODS) -> None:
        self._items = kube.watch(kind)

    async def next(self) -> WatchItem:
        """The next item that is no bookmark."""
        while True:
            item = await self.any()
            if not isinstance(item, Bookmark):
                return item

    async def any(self) -> WatchItem:
        """The next item."""
        async with asyncio.timeout(60):
            return await anext(self._items)

    async def close(self) -> None:
        """Stop reading."""
        await self._items.aclose()  # type: ignore[attr-defined]


@contextlib.asynccontextmanager
async def watching(here: RunningCluster) -> AsyncIterator[Watched]:
    """A watch over the pods of the cluster."""
    watched = Watched(here.kube)
    try:
        yield watched
    finally:
        await watched.close()


@pytest.fixture
async def here() -> AsyncIterator[RunningCluster]:
    """A fresh cluster without nodes: pods stay as they are made."""
    async with running_cluster(clock_factor=1.0) as cluster:
        yield cluster


def names(item: WatchItem) -> list[str]:
    """Who is listed."""
    assert isinstance(item, Listed)
    return [one.metadata.name for one in item.objects]


async def test_first_everything_then_every_change(here: RunningCluster) -> None:
    """The list has a version, and what follows happened after it; the deletion comes with a newer version."""
    here.add("pods", pod("a"))
    async with watching(here) as watched:
        listed = await watched.next()
        assert names(listed) == ["a"]
        here.add("pods", pod("b"))
        while True:
            changed = await watched.next()
            assert isinstance(changed, Changed)
            if changed.object.metadata.name == "b":
                break
        assert isinstance(listed, Listed)
        assert changed.object.version > listed.version
        here.world.api.delete(SERVED_PODS, "default/b")
        while not isinstance(gone := await watched.next(), Deleted):
            pass
        assert gone.object.metadata.name == "b"
        assert gone.object.version > changed.object.version


async def test_a_cut_connection_goes_on_where_it_was(here: RunningCluster) -> None:
    """No second list: changes during the outage arrive as events."""
    async with watching(here) as watched:
        assert names(await watched.next()) == []
        waiting = asyncio.create_task(watched.next())
        async with asyncio.timeout(60):
            while here.world.faults.drop_watches() == 0:
                await asyncio.sleep(0.01)
        here.add("pods", pod("a"))
        assert isinstance(changed := await waiting, Changed)
        assert changed.object.metadata.name == "a"


async def test_lost_history_is_listed_again() -> None:
    """A watch that receives 410, as a status or as an ERROR line, starts with a new list."""
    async with running_cluster(clock_factor=1.0, history_changes_max=8) as here, watching(here) as watched:
        assert names(await watched.next()) == []
        here.world.faults.refuse(Refusal(method="GET", path_prefix="/api/v1/pods", status=410, left_count=1))
        here.add("pods", pod("a"))
        assert names(await watched.next()) == ["a"]

        waiting = asyncio.create_task(watched.next())
        async with asyncio.timeout(60):
            while here.world.faults.drop_watches() == 0:
                await asyncio.sleep(0.01)
        for number in range(12):
            here.add("pods", pod(f"b{number}"))
        here.world.faults.compact()
        item = await waiting
        while isinstance(item, Changed):  # what was under way when the connection was cut
            item = await watched.next()
        assert len(names(item)) == 13


async def test_a_long_list_comes_in_pages(here: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pages are one list at one version."""
    monkeypatch.setattr("gpu_autoscaler.kube.client._LIST_PAGE_COUNT_MAX", 3)
    for number in range(10):
        here.add("pods", pod(f"p{number}"))
    async with watching(here) as watched:
        assert len(names(await watched.next())) == 10


async def test_a_quiet_watch_gives_signs_of_life(here: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bookmarks, and the reconnection at the end of a watch's time does not list again."""
    monkeypatch.setattr(watch, "WATCH_SECONDS", 1)
    async with watching(here) as watched:
        assert isinstance(await watched.any(), Listed)
        assert isinstance(await watched.any(), Bookmark)
        assert isinstance(await watched.any(), Bookmark)


async def test_a_silent_connection_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts the watch and never says a word is left; the next connection is asked again."""
    monkeypatch.setattr(watch, "SILENCE_SECONDS_MAX", 0.2)
    asked = asyncio.Semaphore(0)

    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "5"}, "items": []})
        response = web.StreamResponse()
        await response.prepare(request)
        asked.release()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(5)
        return response

    app = web.Application()
    app.router.add_get("/api/v1/pods", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    kube = KubeClient(Connection(base_url=f"http://127.0.0.1:{runner.addresses[0][1]}"), now=Clock().now)
    watched = Watched(kube)
    try:
        assert isinstance(await watched.any(), Listed)
        # Nobody can know what it kept to itself, so a list says how things are; then the next watch is opened.
        assert isinstance(await watched.any(), Listed)
        reading = asyncio.create_task(watched.any())
        async with asyncio.timeout(60):
            await asked.acquire()
            await asked.acquire()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    finally:
        await watched.close()
        await kube.close()
        await runner.cleanup()
