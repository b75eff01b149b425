"""Checkpointing work in runs with faults: a save that is reported has happened."""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from gpu_autoscaler.kube.protocol import NODES, PODS
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.sim.actors.checkpointing import CheckpointingPods, checkpoint_write_seconds
from gpu_autoscaler.sim.cluster.controllers import START_SECONDS, Workloads
from gpu_autoscaler.sim.cluster.objects import Kubernetes
from gpu_autoscaler.sim.virtual_time import VirtualLoop

WRITE_SECONDS = 10.0
WORK_SECONDS = 5400.0
DRAINED_EVERY_SECONDS = 3000.0  # sooner than the work ends: from zero it would never end


class Cluster:
    """One node and the controllers; every Job checkpoints, or none does."""

    def __init__(self, *, can_save: bool) -> None:
        self.loop = VirtualLoop()
        asyncio.set_event_loop(self.loop)
        self.cluster = Kubernetes(self.loop.now)
        self.workloads = Workloads(self.cluster, self.loop, random.Random(1))  # noqa: S311 - start times, not secrets
        pods = CheckpointingPods(self.workloads, lambda _: WRITE_SECONDS if can_save else None)
        self.workloads.saved_seconds = pods.saved_seconds
        ready = core.Condition(type="Ready", status="True")
        status = core.NodeStatus(allocatable={"cpu": "8", "memory": "32Gi", "pods": "110"}, conditions=(ready,))
        self.cluster.put(NODES, core.Node(metadata=self.cluster.metadata("", "node-1"), status=status))

    def run(self, seconds: float) -> None:
        """Let the time pass."""
        self.loop.call_later(seconds, self.loop.stop)
        self.loop.run_forever()

    def submit(self, members_count: int = 1) -> None:
        """Create the Job `train`."""
        template: dict[str, Any] = {
            "metadata": {
                "labels": {labels.JOB_ID: "train"},
                "annotations": {labels.SIMULATED_RUN_SECONDS: str(WORK_SECONDS)},
            },
            "spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}]},
        }
        spec = {"completions": members_count, "parallelism": members_count, "template": template}
        self.workloads.create_job("default", {"metadata": {"name": "train"}, "spec": spec})

    def drain(self) -> None:
        """Ask every pod to save, and evict it when it has had the time."""
        for pod in self.cluster.all(PODS):
            annotations = {**pod.metadata.annotations, labels.CHECKPOINT_REQUESTED: self.cluster.now().isoformat()}
            self.cluster.put(PODS, replace(pod, metadata=replace(pod.metadata, annotations=annotations)))
        self.run(WRITE_SECONDS + 1.0)
        for pod in self.cluster.all(PODS):
            self.workloads.disrupt(pod, grace_seconds=1.0)


@pytest.fixture(autouse=True)
def _no_loop_left() -> Iterator[None]:
    yield
    asyncio.set_event_loop(None)


def test_saved_work_is_resumed_by_the_next_pod() -> None:
    """Evicted before its end and saved each time, the work still ends; only the writes are repeated."""
    cluster = Cluster(can_save=True)
    cluster.submit(members_count=2)
    cluster.run(DRAINED_EVERY_SECONDS)
    cluster.drain()
    left_seconds = WORK_SECONDS - DRAINED_EVERY_SECONDS
    cluster.run(left_seconds)
    assert cluster.workloads.completed == set()
    cluster.run(WRITE_SECONDS + 2 * START_SECONDS[1] + 5.0)
    assert cluster.workloads.completed == {"train"}


def test_work_that_cannot_save_starts_again() -> None:
    """Evicted every fifty minutes, work of ninety minutes never ends."""
    cluster = Cluster(can_save=False)
    cluster.submit()
    for _ in range(4):
        cluster.run(DRAINED_EVERY_SECONDS)
        cluster.drain()
    assert cluster.workloads.completed == set()


def test_a_save_that_the_pod_did_not_survive_is_lost() -> None:
    """Evicted before the end of the write, the member starts again."""
    cluster = Cluster(can_save=True)
    cluster.submit()
    cluster.run(DRAINED_EVERY_SECONDS)
    (pod,) = cluster.cluster.all(PODS)
    annotations = {**pod.metadata.annotations, labels.CHECKPOINT_REQUESTED: "now"}
    cluster.workloads.disrupt(
        cluster.cluster.put(PODS, replace(pod, metadata=replace(pod.metadata, annotations=annotations))),
        grace_seconds=1.0,
    )
    cluster.run(WORK_SECONDS - START_SECONDS[0])
    assert cluster.workloads.completed == set()
    cluster.run(2 * START_SECONDS[1] + 5.0)
    assert cluster.workloads.completed == {"train"}


@pytest.mark.parametrize("label", ["gpu-autoscaler.io/workload-type", "workload-type"])
def test_half_of_the_training_jobs_checkpoint_by_either_label(label: str) -> None:
    """As the product reads the workload type; other jobs never do."""
    saving = {}
    for workload_type in ("training", "batch"):
        pods = [
            core.Pod(metadata=core.Metadata(name=f"{n}", labels={labels.JOB_ID: f"job-{n}", label: workload_type}))
            for n in range(100)
        ]
        saving[workload_type] = sum(checkpoint_write_seconds(pod) is not None for pod in pods)
    assert 30 < saving["training"] < 70
    assert saving["batch"] == 0
