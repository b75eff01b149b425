"""`SaveRequests` against the served API of a cluster: a pod is asked to save, and answers."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from tests.support.cluster import RunningCluster, running_cluster, until
from tests.support.kube_objects import Json, pod
from tests.support.stories import T0

from gpu_autoscaler.core.disruption.protection import can_save, checkpointed_at, has_answered
from gpu_autoscaler.model import labels
from gpu_autoscaler.simcluster.faults import Refusal
from gpu_autoscaler.simcluster.kinds import PODS
from gpu_manager_sdk import CheckpointManager
from gpu_manager_sdk.errors import CheckpointError
from gpu_manager_sdk.save_requests import POLL_SECONDS, SaveRequests


@pytest.fixture
async def here() -> AsyncIterator[RunningCluster]:
    """A cluster with the pod `train`."""
    async with running_cluster(clock_factor=1.0) as cluster:
        cluster.add("pods", pod("train"))
        yield cluster


class Seconds:
    """A clock that only advances by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Where the test left it."""
        return self.now


def requests_of(here: RunningCluster, account: Path, clock: Seconds | None = None) -> SaveRequests:
    """The requests to `train`."""
    return SaveRequests(
        pod_name="train", namespace="default", api_url=here.url, account=account, clock=clock or Seconds()
    )


def request(here: RunningCluster, deadline: str) -> None:
    """Ask the pod to save, as scaler and scheduler do."""

    def annotate(item: Json) -> None:
        item["metadata"].setdefault("annotations", {})[labels.CHECKPOINT_REQUESTED] = deadline

    here.world.api.modify(PODS, "default/train", annotate)


def annotations(here: RunningCluster) -> dict[str, str]:
    """Annotations of the pod."""
    return dict(here.item("pods", "train")["metadata"].get("annotations") or {})


async def test_a_request_is_due_until_it_is_answered(here: RunningCluster, tmp_path: Path) -> None:
    """The answer is what the scaler waits for; the next deadline is another request."""
    clock = Seconds()
    requests = requests_of(here, tmp_path, clock)
    assert not await asyncio.to_thread(requests.is_due)
    assert requests.deadline is None
    asked_at = here.clock.now()
    request(here, (T0 + timedelta(minutes=2)).isoformat())
    assert not await asyncio.to_thread(requests.is_due)  # read a moment ago
    clock.now += POLL_SECONDS
    assert await asyncio.to_thread(requests.is_due)
    assert requests.deadline == T0 + timedelta(minutes=2)
    assert not has_answered(annotations(here), asked_at)
    await asyncio.to_thread(requests.saved)
    assert has_answered(annotations(here), asked_at)
    clock.now += POLL_SECONDS
    assert not await asyncio.to_thread(requests.is_due)
    request(here, (T0 + timedelta(minutes=9)).isoformat())
    clock.now += POLL_SECONDS
    assert await asyncio.to_thread(requests.is_due)


async def test_a_save_without_a_request_is_reported(here: RunningCluster, tmp_path: Path) -> None:
    """With its instant: later drains lose less."""
    await asyncio.to_thread(requests_of(here, tmp_path).saved, T0)
    assert can_save(annotations(here))
    assert checkpointed_at(annotations(here)) == T0


async def test_an_unreachable_api_keeps_the_last_request(here: RunningCluster, tmp_path: Path) -> None:
    """Training goes on; a save that cannot be reported is an error, and still due."""
    clock = Seconds()
    requests = requests_of(here, tmp_path, clock)
    request(here, "soon")
    assert await asyncio.to_thread(requests.is_due)
    assert requests.deadline is None
    here.world.faults.refuse(Refusal(method="*", path_prefix="/api", status=503, left_count=2))
    clock.now += POLL_SECONDS
    assert await asyncio.to_thread(requests.is_due)
    with pytest.raises(CheckpointError, match="PATCH failed with HTTP 503") as failed:
        await asyncio.to_thread(requests.saved)
    assert failed.value.is_temporary
    assert await asyncio.to_thread(requests.is_due)
    await asyncio.to_thread(requests.saved)
    assert not await asyncio.to_thread(requests.is_due)


async def test_a_missing_right_is_named(here: RunningCluster, tmp_path: Path) -> None:
    """Requests would never be seen: an error, not silence."""
    here.world.faults.refuse(Refusal(method="GET", path_prefix="/api", status=403, left_count=1))
    with pytest.raises(CheckpointError, match="pod default/train: GET failed with HTTP 403; grant its service account"):
        await asyncio.to_thread(requests_of(here, tmp_path).is_due)
    nobody = SaveRequests(pod_name="nobody", namespace="default", api_url=here.url, account=tmp_path)
    with pytest.raises(CheckpointError, match="HTTP 404; check POD_NAME"):
        await asyncio.to_thread(nobody.is_due)


async def test_pod_and_account_are_found(here: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the environment and the mounted service account; outside of a pod that is an error."""
    (tmp_path / "namespace").write_text("default\n", encoding="utf-8")
    (tmp_path / "token").write_text("secret\n", encoding="utf-8")
    for name in ("POD_NAME", "HOSTNAME", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CheckpointError, match="runs in no pod"):
        SaveRequests(account=tmp_path)
    monkeypatch.setenv("HOSTNAME", "train")
    request(here, T0.isoformat())
    assert await asyncio.to_thread(SaveRequests(api_url=here.url, account=tmp_path).is_due)


TRAIN = Path(__file__).parents[2] / "docs" / "examples" / "train.py"


async def test_the_example_saves_on_request_and_resumes(here: RunningCluster, tmp_path: Path) -> None:
    """Asked to save, then ended: the next attempt starts where the former one ended, and its end removes the rest."""
    (tmp_path / "api.py").write_text(
        "import gpu_manager_sdk.save_requests as module, os, runpy, sys\n"
        "class Local(module.SaveRequests):\n"
        "    def __init__(self): super().__init__(api_url=os.environ['API'], poll_seconds=0.05)\n"
        "module.SaveRequests = Local\n"
        "runpy.run_path(sys.argv[1], run_name='__main__')\n",
        encoding="utf-8",
    )
    place = {"CHECKPOINTS": str(tmp_path / "checkpoints"), "JOB_ID": "train", "POD_NAME": "train", "API": here.url}

    async def start(steps: int) -> asyncio.subprocess.Process:
        environment = {**os.environ, **place, "STEPS": str(steps)}
        command = (sys.executable, str(tmp_path / "api.py"), str(TRAIN))
        return await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE)

    first = await start(1_000_000)
    assert first.stdout is not None
    assert await first.stdout.readline() == b"starts at step 0\n"
    asked_at = here.clock.now()
    request(here, T0.isoformat())
    await until(lambda: has_answered(annotations(here), asked_at), 30.0)
    first.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(first.wait(), 30.0) == 128 + signal.SIGTERM
    saved = CheckpointManager(place["CHECKPOINTS"]).restore("train")
    assert saved is not None
    step = json.loads(saved)["step"]
    assert step > 0
    second = await start(step + 3)
    written, _ = await asyncio.wait_for(second.communicate(), 30.0)
    assert written.decode().splitlines() == [f"starts at step {step}", "done"]
    assert not list((tmp_path / "checkpoints").iterdir())
