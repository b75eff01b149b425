"""The policy watcher on a real API server: what comes into force, what stays, and what the objects then say."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.controlplane.fixtures import plane
from tests.controlplane.plane import ControlPlane
from tests.support.kube_policies import defined, policy
from tests.support.stories import TimedFact, node, record
from tests.support.stories import policy as policy_file

from gpu_autoscaler.core.explain.kube_events import Announcement
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.policy.documents import effective_policy
from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.state.state import EMPTY_STATE
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import from_kubeconfig
from gpu_autoscaler.kube.event_recorder import EventRecorder
from gpu_autoscaler.kube.protocol import POLICIES, Changed
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outcome
from gpu_autoscaler_services.policy_watcher.service import PolicyWatcher

__all__ = ["plane"]
pytestmark = [pytest.mark.slow, pytest.mark.integration]

FILE = policy_file(nodes_count_max=40, pools=(NodePool(name="of-the-file"),))


class Events:
    """Writes Events to the API server, unless a test delays them."""

    def __init__(self, kube: KubeClient) -> None:
        self._recorder = EventRecorder(kube)
        self.allowed = asyncio.Event()
        self.allowed.set()

    async def record(self, announcement: Announcement, now: datetime) -> None:
        """Write the Event once it may be written."""
        await self.allowed.wait()
        await self._recorder.record(announcement, now)


class Running:
    """The service on its watch, ticking; its facts are folded, as if the broker delivered them."""

    def __init__(self, kube: KubeClient, told: list[str]) -> None:
        self.view = StateView()
        self.facts: list[TimedFact] = []  # all facts, ours and those of others
        self.events = Events(kube)
        self.changed: set[str] = set()  # names of policies that the service was given
        self.service = PolicyWatcher(self.view, FILE, kube, self.events, provider="sim", report=told.append)
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            group.create_task(self._tick())

    async def stop(self) -> None:
        """Stop watching and ticking. Raises what ended them before."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        (source,) = self.service.sources()
        async for item in source:
            while True:  # as the runtime does, until the API server answers
                with contextlib.suppress(TransientError):
                    await self.service.on_item(item)
                    break
                await asyncio.sleep(0.1)
            if isinstance(item, Changed):
                self.changed.add(item.object.metadata.name)

    async def _tick(self) -> None:
        while True:
            now = datetime.now(UTC)
            with contextlib.suppress(TransientError):
                said = await self.service.on_tick(now)
                assert not isinstance(said, Outcome)
                self.facts += [TimedFact(fact, now) for fact in said]
                self.view.advance(fold(EMPTY_STATE, record(self.facts)), {})
            await asyncio.sleep(0.1)

    @property
    def active_policy(self) -> ScalingPolicy:
        """What a scaler would decide by now."""
        return effective_policy(FILE, self.view.state.policy_documents)

    async def until(self, holds: Callable[[], Any], seconds: float = 60.0) -> None:
        """Wait until it holds. Raises what ended the service meanwhile."""
        async with asyncio.timeout(seconds):
            while not await asyncio.to_thread(holds):
                if self._task.done():
                    self._task.result()
                await asyncio.sleep(0.1)

    def pools(self) -> list[str]:
        """Names of the pools that may be bought in."""
        return [pool.name for pool in self.active_policy.pools]


@pytest.fixture
def told() -> list[str]:
    """Messages about the definition."""
    return []


@pytest.fixture
async def running(plane: ControlPlane, told: list[str]) -> AsyncIterator[Running]:
    """The service, with the definition installed and no policy yet."""
    defined(plane)
    plane.kubectl("delete", "asp", "--all")
    kube = KubeClient(from_kubeconfig(str(plane.kubeconfig())), now=Clock().now)
    one = Running(kube, told)
    yield one
    try:
        await one.stop()
    finally:
        await kube.close()


def apply(plane: ControlPlane, body: dict[str, Any]) -> None:
    """As people do."""
    plane.kubectl("apply", "-f", "-", text=json.dumps(body))


def seen(plane: ControlPlane, name: str) -> dict[str, Any]:
    """The object's status, its conditions by type."""
    code, body = plane.ask(POLICIES.path("", name))  # asked often: kubectl takes as long as many reads
    assert code == 200, body
    status: dict[str, Any] = json.loads(body).get("status", {})
    return status | {"conditions": {each["type"]: each for each in status.get("conditions", ())}}


def condition(plane: ControlPlane, name: str, kind: str = "Accepted") -> dict[str, Any]:
    """Return one condition; empty while it is not set."""
    found: dict[str, Any] = seen(plane, name)["conditions"].get(kind, {})
    return found


async def test_a_policy_takes_effect_and_its_status_shows_it(plane: ControlPlane, running: Running) -> None:
    """Applied, changed and deleted policies take effect within seconds; the status shows the generation."""
    apply(plane, policy("vision", maxNodes=3, nodePools=[{"name": "a100", "gpuType": "A100"}]))
    await running.until(lambda: running.pools() == ["of-the-file", "a100"])
    assert running.active_policy.pools[1] == NodePool(name="a100", gpu_models=("A100",), nodes_count_max=3)
    await running.until(lambda: condition(plane, "vision").get("status") == "True")
    assert condition(plane, "vision", "Ready")["observedGeneration"] == 1

    apply(plane, policy("vision", maxNodes=5, nodePools=[{"name": "a100", "gpuType": "A100"}]))
    await running.until(lambda: running.active_policy.pools[1].nodes_count_max == 5)
    await running.until(lambda: seen(plane, "vision")["observedGeneration"] == 2)
    status = seen(plane, "vision")
    assert (status["activeGeneration"], status["nodes"], status["gpus"]) == (2, 0, 0)
    assert "spentTodayUsd" not in status  # no ledger has spoken: not known is not nothing
    row = plane.kubectl("get", "asp", "vision", "--no-headers").split()
    assert row[1:5] == ["0", "0", "0", "True"]

    plane.kubectl("delete", "asp", "vision")
    await running.until(lambda: running.pools() == ["of-the-file"])


async def test_a_bad_generation_leaves_the_last_good_one(plane: ControlPlane, running: Running) -> None:
    """Refused in the condition and by an Event, with what stays in force; a good one takes its place."""
    apply(plane, policy("vision", maxNodes=3, nodePools=[{"name": "a"}]))
    await running.until(lambda: running.pools() == ["of-the-file", "a"])
    apply(plane, policy("vision", maxNodes=9, provider="gcp", nodePools=[{"name": "b"}]))
    await running.until(lambda: condition(plane, "vision").get("status") == "False")
    assert running.pools() == ["of-the-file", "a"]
    assert "gcp does not match provider sim" in condition(plane, "vision")["message"]
    status = seen(plane, "vision")
    assert (status["observedGeneration"], status["activeGeneration"], status["activeSpec"]["maxNodes"]) == (2, 1, 3)
    assert condition(plane, "vision", "Ready")["message"] == "generation 1 stays active"
    await running.until(lambda: "PolicyRefused" in plane.kubectl("describe", "asp", "vision"))

    apply(plane, policy("vision", maxNodes=9, provider="sim", nodePools=[{"name": "b"}]))
    await running.until(lambda: running.pools() == ["of-the-file", "b"])
    await running.until(lambda: "activeSpec" not in seen(plane, "vision"))


async def test_of_two_policies_with_one_pool_the_later_is_refused(plane: ControlPlane, running: Running) -> None:
    """With both names; it comes into force when the pool is free."""
    apply(plane, policy("first", nodePools=[{"name": "shared"}]))
    await running.until(lambda: condition(plane, "first").get("status") == "True")
    apply(plane, policy("second", nodePools=[{"name": "shared", "maxSize": 2}]))
    await running.until(lambda: condition(plane, "second").get("status") == "False")
    words = condition(plane, "second")["message"]
    assert "policy first" in words
    assert "policy second" in words
    assert condition(plane, "first")["status"] == "True"
    assert condition(plane, "second", "Ready")["message"] == "no generation is active"

    plane.kubectl("delete", "asp", "first")
    await running.until(lambda: condition(plane, "second").get("status") == "True")
    assert running.active_policy.pools[1].nodes_count_max == 2


async def test_a_policy_that_arrives_during_a_status_write_takes_effect(plane: ControlPlane, running: Running) -> None:
    """The watch delivers it between two writes of one tick; the tick goes on, and the next one writes its status."""
    running.events.allowed.clear()
    apply(plane, policy("first"))
    await running.until(lambda: condition(plane, "first").get("status") == "True")
    apply(plane, policy("second"))
    await running.until(lambda: "second" in running.changed)
    running.events.allowed.set()
    await running.until(lambda: condition(plane, "second").get("status") == "True")
    assert running.pools() == ["of-the-file", "first", "second"]


async def test_a_lost_stream_is_republished_from_the_objects(plane: ControlPlane, running: Running) -> None:
    """A new process, a new stream, and a policy with an invalid newest spec: the last valid spec is active again."""
    apply(plane, policy("vision", maxNodes=3, nodePools=[{"name": "a"}]))
    await running.until(lambda: condition(plane, "vision").get("status") == "True")
    apply(plane, policy("vision", provider="gcp", nodePools=[{"name": "b"}]))
    await running.until(lambda: condition(plane, "vision").get("status") == "False")

    kube = KubeClient(from_kubeconfig(str(plane.kubeconfig())), now=Clock().now)
    other = Running(kube, [])
    try:
        await other.until(lambda: other.pools() == ["of-the-file", "a"])
    finally:
        await other.stop()
        await kube.close()


async def test_a_definition_that_goes_takes_no_policy_with_it(
    plane: ControlPlane, running: Running, told: list[str]
) -> None:
    """Deleting it deletes every object first; the last good ones stay active, and that is reported."""
    apply(plane, policy("vision", maxNodes=3, nodePools=[{"name": "a"}]))
    await running.until(lambda: running.pools() == ["of-the-file", "a"])
    plane.kubectl("delete", "crd", "autoscalingpolicies.gpu-autoscaler.io", "--wait=true")
    await running.until(lambda: any("is being deleted" in words or "is not installed" in words for words in told))
    await asyncio.sleep(1.0)
    assert running.pools() == ["of-the-file", "a"]
    assert told[-1].endswith("1 active")


async def test_the_status_tells_nodes_and_their_share(plane: ControlPlane, running: Running) -> None:
    """What there is of its pools, counted from the state."""
    running.facts += node("n1", pool="default")
    apply(plane, policy("default", nodePools=[{"name": "default"}]))
    await running.until(lambda: seen(plane, "default").get("gpus") == 8)
    status = seen(plane, "default")
    assert (status["nodes"], status["nodesDesired"], status["pools"][0]["nodes"]) == (1, 1, 1)
