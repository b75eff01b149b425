"""Pods with a hook get the checkpoint notice by HTTP as well. A real server acts as the pod."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog
from aiohttp import web
from tests.support.cluster import running_cluster
from tests.support.kube_objects import Json, pod
from tests.support.stories import T0

from gpu_autoscaler.kube import checkpoint_hooks
from gpu_autoscaler.kube.checkpoint_hooks import SECONDS_MAX, CheckpointHooks, hook_of
from gpu_autoscaler.kube.protocol import PODS
from gpu_autoscaler.kube.wire.core import Pod
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.simcluster.kinds import PODS as SERVED_PODS
from gpu_autoscaler_services.scheduler.binder import Binder

HOOK = "gpu-autoscaler.io/checkpoint-hook"
ANSWERED_SECONDS = 30.0  # by a slow hook: longer than anybody waits, also on a busy machine


def hooked(hook: str, address: str | None = "127.0.0.1") -> Pod:
    """A pod with this hook."""
    item = pod("a", labels={"gpu-autoscaler.io/job-id": "train"})
    item["metadata"] |= {"namespace": "default", "annotations": {HOOK: hook}}
    status = {"status": {"phase": "Running", **({} if address is None else {"podIP": address})}}
    return PODS.decode(json.dumps({**item, **status}).encode(), "read")


@contextlib.asynccontextmanager
async def listening(seconds: float = 0.0) -> AsyncIterator[tuple[int, list[Any]]]:
    """Run a pod's server; yield its port and the received notices."""
    heard: list[Any] = []

    async def save(request: web.Request) -> web.Response:
        await asyncio.sleep(seconds)
        heard.append((request.path, await request.json()))
        return web.Response()

    app = web.Application()
    app.router.add_post("/save", save)
    runner = web.AppRunner(app, shutdown_timeout=0.1)  # nobody waits for a hook that is silent
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1], heard
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("hook", "address", "url"),
    [
        (":8080/save", "10.0.0.7", "http://10.0.0.7:8080/save"),
        (":8080", "fd00::7", "http://[fd00::7]:8080/"),
        (":8080/save", None, None),
        ("http://169.254.169.254/latest", "10.0.0.7", None),
        (":8080@elsewhere/save", "10.0.0.7", None),
        (":0/save", "10.0.0.7", None),
        (":70000/save", "10.0.0.7", None),
    ],
)
def test_a_hook_is_a_port_and_a_path_of_the_pod_itself(hook: str, address: str | None, url: str | None) -> None:
    """Nobody is sent elsewhere by an annotation."""
    assert hook_of(hooked(hook, address)) == url


async def test_a_job_is_notified_by_its_hook_and_by_its_annotation() -> None:
    """By when, and which pod is meant."""
    hooks = CheckpointHooks()
    async with listening() as (port, heard), running_cluster(clock_factor=1.0) as here:
        item = pod("a", labels={"gpu-autoscaler.io/job-id": "train"}, nodeName="n1")
        item["metadata"]["annotations"] = {HOOK: f":{port}/save"}
        here.add_node("n1")
        here.add("pods", item)

        def runs(thing: Json) -> None:
            thing["status"] |= {"phase": "Running", "podIP": "127.0.0.1"}

        here.world.api.modify(SERVED_PODS, "default/a", runs)
        await Binder(here.kube, "default", hooks).request_checkpoints(JobId("train"), ["n1"], T0, T0)
        await hooks.flush()
        told = here.item("pods", "a")["metadata"]["annotations"]
    await hooks.close()

    assert heard == [("/save", {"pod": "default/a", "deadline_at": T0.isoformat()})]
    assert told["gpu-autoscaler.io/checkpoint-requested"] == T0.isoformat()


async def test_a_pod_that_does_not_listen_takes_no_time() -> None:
    """A hook that never answers, one that refuses and one that is not there: nobody waits, and a second ends all."""
    hooks = CheckpointHooks()
    async with listening(seconds=ANSWERED_SECONDS) as (port, heard):
        began = time.monotonic()
        silent, absent, closed = hooked(f":{port}/save"), hooked(f":{port}/nothing"), hooked(":1/save")
        hooks.notify([silent, silent, absent, closed], T0)
        waited = time.monotonic() - began
        await hooks.flush()
        took = time.monotonic() - began
        await hooks.close()
    assert heard == []
    assert waited < SECONDS_MAX
    assert took < ANSWERED_SECONDS / 2


async def test_notifications_are_bounded_over_all_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time and four in all: of six silent pods two are skipped, and the rest take two rounds."""
    monkeypatch.setattr(checkpoint_hooks, "CONCURRENT_MAX", 2)
    monkeypatch.setattr(checkpoint_hooks, "PENDING_MAX", 4)
    hooks = CheckpointHooks()
    async with listening(seconds=ANSWERED_SECONDS) as (port, _):
        with structlog.testing.capture_logs() as logs:
            began = time.monotonic()
            hooks.notify([hooked(f":{port}/save")] * 6, T0)
            await hooks.flush()
            took = time.monotonic() - began
        await hooks.close()
    assert [line["event"] for line in logs].count(
        "checkpoint hook skipped, too many pending; annotation still set"
    ) == 2
    assert 2 * SECONDS_MAX <= took < ANSWERED_SECONDS / 2
