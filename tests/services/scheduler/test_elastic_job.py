"""An elastic job in a cluster: it runs with fewer members than it asked for, and grows when a node comes."""

import msgspec
from tests.support.kube_objects import eviction
from tests.support.stories import given, job
from tests.unit.simcluster.conftest import Cluster

from gpu_autoscaler.events.job import JobQueued
from gpu_autoscaler.kube import wire
from gpu_autoscaler.kube.translate.progress import progress
from gpu_autoscaler.simcluster.kinds import JOBS, NODES
from gpu_autoscaler.simcluster.objects import key_of
from gpu_autoscaler.simcluster.subresources import evict
from gpu_autoscaler_services.scheduler.manifest import job_manifest, release_patch


def is_running(cluster: Cluster) -> bool:
    """True where the watcher would say `job.started`."""
    return progress(msgspec.convert(cluster.job("a"), wire.Job)).is_running


def running_count(cluster: Cluster) -> int:
    """Members that run."""
    return sum(item["status"]["phase"] == "Running" for item in cluster.pods())


def test_it_starts_with_two_of_three_goes_on_without_one_and_grows() -> None:
    """Its Kubernetes Job is released once and never changed: room alone decides how many members run."""
    cluster = Cluster()
    story = job("a", gpus=8, members=3, member_count_min=2)
    spec = next(told.fact.spec for told in story if isinstance(told.fact, JobQueued))
    for name in ("n1", "n2"):
        cluster.node(name)
    cluster.make(JOBS, msgspec.to_builtins(job_manifest(spec, given())))
    patch = release_patch(spec, ("n1", "n2"), given())
    cluster.api.patch(JOBS, "default/a", patch, "application/merge-patch+json")
    cluster.settle(10)
    assert (running_count(cluster), len(cluster.pods()), is_running(cluster)) == (2, 3, True)

    cluster.node("n3")
    cluster.settle(10)
    assert (running_count(cluster), is_running(cluster)) == (3, True)

    lost = next(item for item in cluster.pods() if item["spec"]["nodeName"] == "n1")
    cluster.api.patch(NODES, "n1", {"spec": {"unschedulable": True}}, "application/merge-patch+json")
    evict(cluster.api, key_of(lost), eviction(lost["metadata"]["name"]))
    cluster.settle(10)
    assert (running_count(cluster), is_running(cluster)) == (2, True)
