"""An etcd that is restored from a backup gives old versions again: what was seen since is found out to be no more.

kube-apiserver accepts a watch from a version that its history has not reached yet, and sends nothing until it has:
recorded with 1.36.3, and kubernetes/kubernetes issue 107457.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta

import pytest
from tests.controlplane.fixtures import kube, outside, plane
from tests.controlplane.plane import ControlPlane
from tests.support.kube_http import KubeHttp
from tests.support.kube_objects import pod

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.envelope import Envelope, Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.kube import watch
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.protocol import PODS, Bookmark, Listed
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.ids import FactId
from gpu_autoscaler_services.pod_watcher.service import PodWatcher

__all__ = ["kube", "outside", "plane"]
pytestmark = [pytest.mark.slow, pytest.mark.integration]

PATH = "/api/v1/namespaces/default/pods"
SYSTEM = "/api/v1/namespaces/kube-system"
LISTED_SECONDS_MAX = 30.0
LATER_COUNT = 60  # versions that the restored history does not reach by itself within the test


async def made(outside: KubeHttp, *names: str) -> None:
    """Make pods that no scheduler sees."""
    for name in names:
        await outside.made(PATH, pod(name, schedulingGates=[{"name": "example.invalid/hold"}]))


class Lists:
    """Reads one watch of the pods for ever, and keeps its lists."""

    def __init__(self, kube: KubeClient) -> None:
        self._lists: asyncio.Queue[Listed] = asyncio.Queue()
        self._task = asyncio.create_task(self._read(kube))

    async def _read(self, kube: KubeClient) -> None:
        async for item in kube.watch(PODS):
            if isinstance(item, Listed):
                self._lists.put_nowait(item)

    async def next(self) -> Listed:
        """The next list."""
        async with asyncio.timeout(LISTED_SECONDS_MAX):
            return await self._lists.get()

    async def close(self) -> None:
        """Stop reading."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def names(item: Listed) -> set[str]:
    """Who is listed."""
    return {one.metadata.name for one in item.objects}


def folded(state: ClusterState, facts: Sequence[Fact]) -> ClusterState:
    """The state after these facts of a watcher."""
    now = datetime.now(UTC)
    return fold(
        state,
        [
            Recorded(
                envelope=Envelope(id=FactId(f"{now}/{number}"), source="test", time=now, fact=fact),
                stream="POD",
                sequence=1,
            )
            for number, fact in enumerate(facts)
        ],
    )


def known(state: ClusterState) -> set[str]:
    """The pods that the state has."""
    return {one.name for one in state.pods.values()}


@contextlib.asynccontextmanager
async def restored(plane: ControlPlane, outside: KubeHttp, kube: KubeClient) -> AsyncIterator[tuple[Listed, Listed]]:
    """The last list before a restore, with pods that the backup lacks, and the first one after it."""
    await made(outside, "stays", "comes-back")
    backup = await asyncio.to_thread(plane.back_up)
    await outside.send("DELETE", f"{PATH}/comes-back?gracePeriodSeconds=0")
    await made(outside, *(f"later-{number}" for number in range(LATER_COUNT)))
    lists = Lists(kube)
    try:
        before = await lists.next()
        assert len(before.objects) == 1 + LATER_COUNT
        await asyncio.to_thread(plane.restore, backup)
        yield before, await lists.next()
    finally:
        await lists.close()
        for name in ("stays", "comes-back"):
            await outside.send("DELETE", f"{PATH}/{name}?gracePeriodSeconds=0")


async def test_what_a_backup_lacks_is_gone(plane: ControlPlane, outside: KubeHttp, kube: KubeClient) -> None:
    """The watch lists again instead of waiting for versions; once the restore is declared, the state follows."""
    watcher = PodWatcher(kube, await kube.cluster())
    async with restored(plane, outside, kube) as (before, after):
        assert names(after) == {"stays", "comes-back"}
        assert after.version < before.version
        state = folded(EMPTY_STATE, await watcher.on_item(before))
        # Its version is older than that of the state, which therefore drops nothing, and becomes stale.
        alive = Bookmark(kind=PODS, version=after.version, seen_at=after.seen_at + timedelta(minutes=1))
        mixed = folded(state, [*await watcher.on_item(after), *await watcher.on_item(alive)])
        assert known(mixed) == names(before) | names(after)
        assert mixed.pods_synced == state.pods_synced
        await outside.patched(SYSTEM, {"metadata": {"annotations": {labels.RESTORED_AT: "2099-01-01T00:00:00Z"}}})
        declared = PodWatcher(kube, await kube.cluster())
        assert known(folded(mixed, await declared.on_item(after))) == {"stays", "comes-back"}


async def test_a_watch_that_the_server_keeps_quiet_is_no_proof(
    plane: ControlPlane, outside: KubeHttp, kube: KubeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch from a version of the future ends in good order, without a change: the newest version gives it away."""
    monkeypatch.setattr(watch, "WATCH_SECONDS", 3)
    await made(outside, "stays")
    backup = await asyncio.to_thread(plane.back_up)
    await made(outside, *(f"later-{number}" for number in range(LATER_COUNT)))
    items = kube.watch(PODS)
    try:
        before = await anext(items)
        await asyncio.to_thread(plane.restore, backup)
        async with asyncio.timeout(LISTED_SECONDS_MAX):
            after = await anext(items)  # a bookmark would say that nothing has changed
        assert isinstance(before, Listed)
        assert isinstance(after, Listed)
        assert names(before) - names(after) == {f"later-{number}" for number in range(LATER_COUNT)}
    finally:
        await items.aclose()  # type: ignore[attr-defined]  # it is a generator
        await outside.send("DELETE", f"{PATH}/stays?gracePeriodSeconds=0")


@pytest.mark.parametrize("text", ["yesterday", "2099-01-01", ""])
async def test_an_unreadable_time_of_a_restore_is_refused(outside: KubeHttp, kube: KubeClient, text: str) -> None:
    """The error names the annotation and a value that would do."""
    await outside.patched(SYSTEM, {"metadata": {"annotations": {labels.RESTORED_AT: text}}})
    with pytest.raises(PermanentError, match=rf"kube-system.*{labels.RESTORED_AT}.*{text}.*date -u"):
        await kube.cluster()
