"""The monitor's rule on placements: a member still to start needs a node that accepts pods."""

import asyncio
import random
from typing import Any

import pytest
from msgspec.structs import replace

from gpu_autoscaler.events.job import JobPlaced
from gpu_autoscaler.kube.protocol import NODES
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.sim.cluster.cloud import Cloud
from gpu_autoscaler.sim.cluster.controllers import Workloads
from gpu_autoscaler.sim.cluster.objects import Kubernetes
from gpu_autoscaler.sim.invariants.placement import KNOWN_SECONDS, PlacementInvariant
from gpu_autoscaler.sim.virtual_time import VirtualLoop


class World:
    """A node, job `train` whose only member ran there, and the monitor's rule."""

    def __init__(self, *, run_seconds: float) -> None:
        self.violations: list[str] = []
        self.loop = VirtualLoop()
        asyncio.set_event_loop(self.loop)
        self.cluster = Kubernetes(self.loop.now)
        workloads = Workloads(self.cluster, self.loop, random.Random(1))  # noqa: S311 - start times, not secrets
        cloud = Cloud(workloads, random.Random(1))  # noqa: S311 - as above
        self.invariant = PlacementInvariant(workloads, cloud, {}, lambda _, what: self.violations.append(what))
        ready = core.Condition(type="Ready", status="True")
        status = core.NodeStatus(allocatable={"cpu": "8", "memory": "32Gi", "pods": "110"}, conditions=(ready,))
        self.node = self.cluster.put(NODES, core.Node(metadata=self.cluster.metadata("", "node-1"), status=status))
        template: dict[str, Any] = {
            "metadata": {
                "labels": {labels.JOB_ID: "train"},
                "annotations": {labels.SIMULATED_RUN_SECONDS: str(run_seconds)},
            },
            "spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}]},
        }
        spec = {"completions": 1, "parallelism": 1, "template": template}
        workloads.create_job("default", {"metadata": {"name": "train"}, "spec": spec})
        self.run(KNOWN_SECONDS)
        self.cluster.put(NODES, replace(self.node, spec=replace(self.node.spec, unschedulable=True)))
        self.run(KNOWN_SECONDS + 10.0)

    def run(self, seconds: float) -> None:
        """Let the time pass."""
        self.loop.call_later(seconds, self.loop.stop)
        self.loop.run_forever()

    def place(self, job_id: str) -> list[str]:
        """Place the job on the cordoned node; return what the monitor reports."""
        fact = JobPlaced(
            job_id=JobId(job_id), attempt=2, node_uids=(), node_names=("node-1",), placed_at=self.cluster.now()
        )
        self.invariant.on_placed(fact, is_calm=True)
        return self.violations


@pytest.mark.parametrize("run_seconds", [30.0, 3600.0])
def test_a_member_that_runs_or_has_completed_keeps_its_cordoned_node(run_seconds: float) -> None:
    """Another member of its gang was replaced; the placement names the nodes of all."""
    assert World(run_seconds=run_seconds).place("train") == []


def test_a_job_without_a_member_there_is_placed_on_no_cordoned_node() -> None:
    """Its pods would wait for ever."""
    assert "which has accepted no pods for 70 s" in World(run_seconds=3600.0).place("other")[0]
