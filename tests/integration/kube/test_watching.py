"""List-then-watch against a real API server with faults: no change is missed, none is invented."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterable
from typing import Any

import aiohttp
import pytest
from tests.controlplane.fixtures import plane
from tests.controlplane.plane import ControlPlane
from tests.support.cluster import until
from tests.support.faulty_proxy import Fault, FaultKind, FaultyProxy, faulty_proxy
from tests.support.kube_http import KubeHttp
from tests.support.kube_objects import pod

from gpu_autoscaler.kube import watch
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import Connection, from_kubeconfig
from gpu_autoscaler.kube.protocol import BUDGETS, JOBS, NODES, PODS, Bookmark, Changed, Deleted, Kind, Listed, WatchItem
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.runtime.clock import Clock

__all__ = ["plane"]
pytestmark = [pytest.mark.slow, pytest.mark.integration]

PATH = "/api/v1/namespaces/default/pods"
SETTLE_SECONDS_MAX = 60.0  # an API server that starts again on a busy machine takes several seconds
_PAGE_COUNT = 4


class Writer:
    """Makes, changes and deletes pods, and knows every version that it made."""

    def __init__(self, kube: KubeHttp) -> None:
        self.kube = kube
        self.alive: dict[str, int] = {}  # name -> version
        self.written: set[tuple[str, int]] = set()
        self._count = 0

    async def make(self) -> str:
        """Make one."""
        self._count += 1
        name = f"p{self._count:04}"
        self._note(await self.kube.made(PATH, pod(name, schedulingGates=[{"name": "example.invalid/hold"}])))
        return name

    async def change(self, name: str) -> None:
        """Change the label of one."""
        self._count += 1
        self._note(await self.kube.patched(f"{PATH}/{name}", {"metadata": {"labels": {"step": str(self._count)}}}))

    async def delete(self, name: str) -> None:
        """Delete one: it runs nowhere, so it is removed at once."""
        answer = await self.kube.send("DELETE", f"{PATH}/{name}?gracePeriodSeconds=0")
        assert answer.status == 200, answer
        del self.alive[name]

    async def busy(self, steps_count: int, chance: random.Random) -> None:
        """Make `steps_count` random changes."""
        for _ in range(steps_count):
            names = sorted(self.alive)
            act = chance.choice(("make", "change", "delete")) if names else "make"
            if act == "make":
                await self.make()
            else:
                await (self.change if act == "change" else self.delete)(chance.choice(names))

    async def clear(self) -> None:
        """Delete all."""
        for name in sorted(self.alive):
            await self.delete(name)

    def _note(self, item: dict[str, dict[str, str]]) -> None:
        name, version = item["metadata"]["name"], int(item["metadata"]["resourceVersion"])
        self.alive[name] = version
        self.written.add((name, version))


class Watcher:
    """Reads one watch forever and keeps what it receives, like the pod watcher's state."""

    def __init__(self, kube: KubeClient) -> None:
        self.known: dict[str, int] = {}  # name -> version
        self.seen: set[tuple[str, int]] = set()  # every received version of an object
        self.lists_count = 0
        self.deleted: list[str] = []
        self.version = 0
        self._task = asyncio.create_task(self._read(kube.watch(PODS)))

    async def _read(self, items: AsyncIterator[WatchItem]) -> None:
        async for item in items:
            self._take(item)

    def _take(self, item: WatchItem) -> None:
        if isinstance(item, Listed):
            self.lists_count += 1
            self.known = {one.metadata.name: one.version for one in item.objects}
            self.seen |= set(self.known.items())
            self.version = item.version
            return
        version = item.version if isinstance(item, Bookmark) else item.object.version
        assert version > self.version or (isinstance(item, Bookmark) and version == self.version), "told twice"
        self.version = version
        if isinstance(item, Changed):
            self._changed(item.object)
        elif isinstance(item, Deleted):
            self.deleted.append(item.object.metadata.name)
            self.known.pop(item.object.metadata.name)

    def _changed(self, thing: core.Object) -> None:
        self.known[thing.metadata.name] = thing.version
        if thing.metadata.deletion_timestamp is None:  # the mark that comes before the end has a version of its own
            self.seen.add((thing.metadata.name, thing.version))

    async def until_knows(self, writer: Writer) -> None:
        """Wait until it knows what is true, and fail with what it takes to be true instead."""
        try:
            await until(lambda: self._task.done() or self.known == writer.alive, SETTLE_SECONDS_MAX)
        except TimeoutError:
            raise AssertionError(f"known {self.known}, true {writer.alive}") from None
        if self._task.done():
            await self._task

    async def close(self) -> None:
        """Stop reading."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class Bench(contextlib.AsyncExitStack):
    """A writer with a direct connection to the server, and a watcher behind a faulty proxy."""

    writer: Writer
    watcher: Watcher
    proxy: FaultyProxy

    @classmethod
    async def opened(cls, plane: ControlPlane, pods_count: int = 3) -> "Bench":
        """With some pods there, and the watcher knowing them."""
        bench = cls()
        try:
            await bench._open(plane, pods_count)
        except BaseException:
            await bench.aclose()  # the tests after this one find none of its pods
            raise
        return bench

    async def _open(self, plane: ControlPlane, pods_count: int) -> None:
        session = await self.enter_async_context(aiohttp.ClientSession())
        self.writer = Writer(KubeHttp(session, plane.url, plane.admin_token, plane.tls))
        self.push_async_callback(self.writer.clear)
        for _ in range(pods_count):
            await self.writer.make()
        url, self.proxy = await self.enter_async_context(faulty_proxy(plane.url, plane.admin_token, plane.tls))
        kube = KubeClient(Connection(base_url=url), now=Clock().now)
        self.push_async_callback(kube.close)
        self.watcher = Watcher(kube)
        self.push_async_callback(self.watcher.close)
        await self.watcher.until_knows(self.writer)
        await until(lambda: self.proxy.open_count)

    async def restart(self, plane: ControlPlane, *, is_compacted: bool = False) -> None:
        """SIGKILL the API server, forget history meanwhile if asked, and start it again."""

        def in_one_thread() -> None:  # which nothing cancels: a server that stays down fails the tests after this one
            plane.kill("kube-apiserver")
            if is_compacted:
                plane.compact()
            plane.start_api()
            plane.wait_ready()

        await asyncio.to_thread(in_one_thread)

    def check(self) -> None:
        """Compare the received versions with the written ones."""
        assert not self.watcher.seen - self.writer.written


async def test_a_server_that_is_killed_and_started_again(plane: ControlPlane) -> None:
    """Changes before, during and after the outage are all known in the end."""
    async with await Bench.opened(plane) as bench:
        chance = random.Random(1)  # noqa: S311 - a story that comes again
        await bench.writer.busy(10, chance)
        await bench.restart(plane)
        await bench.writer.busy(10, chance)
        await bench.watcher.until_knows(bench.writer)
        bench.check()


async def test_history_that_is_compacted_under_a_watch(plane: ControlPlane) -> None:
    """Too old (410) is a new list, and what was deleted meanwhile is not in it."""
    async with await Bench.opened(plane) as bench:
        bench.proxy.faults.extend([Fault(kind="refused", status=503)] * 1000)  # away until history is forgotten
        assert bench.proxy.cut() == 1
        await until(lambda: not bench.proxy.open_count)  # or it hears the deletion over a connection that is being cut
        gone, *_ = sorted(bench.writer.alive)
        await bench.writer.delete(gone)
        await bench.writer.make()
        await bench.restart(plane, is_compacted=True)
        bench.proxy.faults.clear()
        await bench.watcher.until_knows(bench.writer)
        assert bench.watcher.lists_count >= 2
        assert gone not in bench.watcher.deleted, "nobody was there to tell; the list alone says so"
        bench.check()


async def test_a_page_that_is_too_old(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list whose second page has expired begins again: what is yielded is one moment, never two halves."""
    monkeypatch.setattr("gpu_autoscaler.kube.client._LIST_PAGE_COUNT_MAX", _PAGE_COUNT)
    async with await Bench.opened(plane, pods_count=_PAGE_COUNT * 2) as bench:

        async def forget() -> None:
            """The rest of the list is changed, and its version forgotten."""
            await bench.writer.delete(max(bench.writer.alive))
            await bench.writer.make()
            await bench.restart(plane, is_compacted=True)
            forgotten.set()

        forgotten = asyncio.Event()  # before that the watcher is right about what it knows from before
        bench.proxy.between_pages = forget
        lists_count = bench.watcher.lists_count
        bench.proxy.faults.append(Fault(kind="refused", status=410))
        await until(lambda: bench.proxy.cut() or bench.watcher.lists_count > lists_count, SETTLE_SECONDS_MAX)
        await until(forgotten.is_set, SETTLE_SECONDS_MAX)
        await bench.watcher.until_knows(bench.writer)
        bench.check()


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(kind="refused", status=429, retry_after_seconds=1)],
        [Fault(kind="refused", status=429)],
        [Fault(kind="refused", status=500), Fault(kind="refused", status=502)],
        [Fault(kind="half_a_line")],
        [Fault(kind="half_a_line_in_good_order")],
        [Fault(kind="garbage")],
        [Fault(kind="closed_at_once")] * 3,
    ],
    ids=lambda faults: "-".join(f"{one.kind}{one.status or ''}" for one in faults),
)
async def test_a_broken_watch_goes_on_where_it_was(plane: ControlPlane, faults: Iterable[Fault]) -> None:
    """Every written version is received once across each kind of break, without another list."""
    async with await Bench.opened(plane) as bench:
        bench.proxy.faults.extend(faults)
        await until(lambda: bench.proxy.cut() == 1)
        await bench.writer.busy(12, random.Random(2))  # noqa: S311 - a story that comes again
        await bench.watcher.until_knows(bench.writer)
        assert not bench.proxy.faults
        assert bench.watcher.lists_count == 1
        assert bench.watcher.seen == bench.writer.written
        bench.check()


async def test_a_server_that_closes_every_watch_at_once_is_not_stormed(plane: ControlPlane) -> None:
    """Each empty answer doubles the wait before the next question, as an outage does."""
    async with await Bench.opened(plane) as bench:
        bench.proxy.faults.extend([Fault(kind="closed_at_once")] * 1000)
        await until(lambda: bench.proxy.cut() == 1)
        before = len(bench.proxy.watches_at)
        await asyncio.sleep(2.0)
        assert len(bench.proxy.watches_at) - before < 12
        bench.proxy.faults.clear()
        await bench.writer.make()
        await bench.watcher.until_knows(bench.writer)


async def test_watches_that_never_say_a_word_are_no_proof(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a proxy closes each watch early, periodic lists give the state."""
    monkeypatch.setattr(watch, "SILENCE_SECONDS_MAX", 1.0)
    async with await Bench.opened(plane) as bench:
        bench.proxy.faults.extend([Fault(kind="closed_at_once")] * 1000)
        await until(lambda: bench.proxy.cut() == 1)
        await bench.writer.make()
        await bench.watcher.until_knows(bench.writer)
        assert bench.watcher.lists_count >= 2


async def test_a_throttled_watch_waits_for_retry_after(plane: ControlPlane) -> None:
    """After 429 with Retry-After there is no request before that time."""
    async with await Bench.opened(plane) as bench:
        bench.proxy.faults.append(Fault(kind="refused", status=429, retry_after_seconds=3))
        before = len(bench.proxy.watches_at)
        await until(lambda: bench.proxy.cut() == 1)
        await until(lambda: not bench.proxy.faults)
        await bench.writer.make()
        await bench.watcher.until_knows(bench.writer)
        asked_at, again_at = bench.proxy.watches_at[before : before + 2]
        assert again_at - asked_at >= 3.0


@pytest.mark.parametrize("kind", [PODS, NODES, BUDGETS, JOBS], ids=lambda kind: kind.plural)
async def test_a_quiet_watch_gives_signs_of_life(
    plane: ControlPlane, kind: Kind[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of kinds on which nothing ever happened, which a real server sends no bookmarks for."""
    monkeypatch.setattr(watch, "WATCH_SECONDS", 5)
    kube = KubeClient(from_kubeconfig(str(plane.kubeconfig())), now=Clock().now)
    try:
        await _until_bookmark(kube, kind)
    finally:
        await kube.close()


async def test_a_bookmark_is_read(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds before its time a watch on which something happened gets one, an object whose parts are null."""
    monkeypatch.setattr(watch, "WATCH_SECONDS", 6)
    async with await Bench.opened(plane) as bench:
        await bench.writer.make()
        await bench.watcher.until_knows(bench.writer)
        version = bench.watcher.version
        other = f"{PATH.removesuffix('pods')}configmaps"
        await bench.writer.kube.made(other, {"metadata": {"name": "moves-on"}})  # no pod, and a newer version
        await bench.writer.kube.read(PATH)  # a list that is to show the newest moves the cache of pods on
        await until(lambda: bench.watcher.version > version, SETTLE_SECONDS_MAX)
        assert bench.proxy.lists_count == 1
        await bench.writer.kube.send("DELETE", f"{other}/moves-on")


async def _until_bookmark(kube: KubeClient, kind: Kind[Any]) -> None:
    async with asyncio.timeout(SETTLE_SECONDS_MAX), contextlib.aclosing(kube.watch(kind)) as items:  # type: ignore[type-var]  # it is a generator
        assert isinstance(listed := await anext(items), Listed)
        async for item in items:
            if isinstance(item, Bookmark):
                assert item.version >= listed.version
                return


@pytest.mark.parametrize("seed", [1, 2])
async def test_everything_at_once(plane: ControlPlane, seed: int) -> None:
    """Cuts, refusals, half lines and a killed server in any order, while somebody writes without a pause."""
    chance = random.Random(seed)  # noqa: S311 - a story that comes again
    kinds: tuple[FaultKind, ...] = ("half_a_line", "half_a_line_in_good_order", "closed_at_once", "garbage")
    async with await Bench.opened(plane) as bench:
        for step in range(12):
            fault = Fault(kind=chance.choice(kinds))
            refused = Fault(kind="refused", status=chance.choice((410, 429, 500)), is_watch=chance.random() < 0.7)
            bench.proxy.faults.append(chance.choice((fault, refused)))
            bench.proxy.cut()
            await bench.writer.busy(5, chance)
            if step == 6:
                await bench.restart(plane, is_compacted=chance.random() < 0.5)
        bench.proxy.faults.clear()
        bench.proxy.cut()
        await bench.watcher.until_knows(bench.writer)
        bench.check()
