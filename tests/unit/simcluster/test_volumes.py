"""Volumes: claims are bound as their storage class requires, and pods are placed where their volumes are."""

from tests.support.kube_objects import Json, pod
from tests.unit.simcluster.conftest import Cluster
from tests.unit.simcluster.test_scheduler import message

from gpu_autoscaler.simcluster.kinds import CLAIMS, CLASSES, PODS, VOLUMES

ONE_CLAIM: Json = {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]}


def storage_class(mode: str, *zones: str) -> Json:
    """A class whose disks may be made in these zones; none: in any."""
    labels = [{"key": "topology.kubernetes.io/zone", "values": list(zones)}]
    return {
        "metadata": {"name": "disk"},
        "provisioner": "disk.example",
        "volumeBindingMode": mode,
        "allowedTopologies": [{"matchLabelExpressions": labels}] if zones else [],
    }


CLAIM: Json = {"metadata": {"name": "data"}, "spec": {"storageClassName": "disk"}}


def volume_of(cluster: Cluster) -> str:
    """The name of the claim's volume; empty: it has none."""
    claim = cluster.world.api.find(CLAIMS, "default/data")
    return "" if claim is None else str(claim["spec"].get("volumeName", ""))


def test_a_volume_is_created_in_the_zone_of_its_first_pod(cluster: Cluster) -> None:
    """Allowed by its class; the second pod has to follow although its zone has less capacity."""
    cluster.node("a", zone="us-west-2a")
    cluster.node("b", zone="us-west-2b")
    cluster.make(CLASSES, storage_class("WaitForFirstConsumer", "us-west-2b"))
    cluster.make(CLAIMS, CLAIM)
    cluster.settle()
    assert volume_of(cluster) == ""
    cluster.make(PODS, pod("first", gpus=8, **ONE_CLAIM))
    cluster.settle()
    assert cluster.where() == {"first": "b"}
    assert volume_of(cluster) != ""
    cluster.make(PODS, pod("second", gpus=1, **ONE_CLAIM))
    cluster.settle()
    assert "second" not in {name for name, host in cluster.where().items() if host}
    assert "volume node affinity conflict" in message(cluster, "second")


def test_an_immediate_volume_is_created_without_a_pod(cluster: Cluster) -> None:
    """It has a zone before any pod uses it."""
    cluster.node("a", zone="us-west-2a")
    cluster.make(CLASSES, storage_class("Immediate"))
    cluster.make(CLAIMS, CLAIM)
    cluster.settle()
    assert cluster.world.api.find(VOLUMES, volume_of(cluster)) is not None


def test_a_pod_waits_for_its_claim(cluster: Cluster) -> None:
    """It is scheduled as soon as the claim exists."""
    cluster.node("a", zone="us-west-2a")
    cluster.make(PODS, pod("early", **ONE_CLAIM))
    cluster.settle()
    assert 'persistentvolumeclaim "data" not found' in message(cluster, "early")
    cluster.make(CLASSES, storage_class("WaitForFirstConsumer"))
    cluster.make(CLAIMS, CLAIM)
    cluster.settle()
    assert cluster.where() == {"early": "a"}
