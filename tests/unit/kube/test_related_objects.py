"""What volumes mean for a pod: from where they are reached, and when no node would help."""

from typing import Any

import msgspec
import pytest

from gpu_autoscaler.kube.translate.devices import Claims
from gpu_autoscaler.kube.translate.pod import pod_observed
from gpu_autoscaler.kube.translate.related_objects import DEFAULT_CLASS, Storage, related_objects
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.kube.wire import storage as wire_storage
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.scheduling import LabelRequirement, NodeSelectorTerm, all_terms

ZONE_A = NodeSelectorTerm((LabelRequirement(labels.ZONE, "In", ("zone-a",)),))
ZONE_B = NodeSelectorTerm((LabelRequirement(labels.ZONE, "In", ("zone-b",)),))


def read(kind: Any, name: str, *, annotations: dict[str, str] | None = None, **fields: Any) -> Any:  # noqa: ANN401 - any object
    """The object as it is decoded from the wire."""
    metadata = {"name": name, "namespace": "default", "uid": name, "annotations": annotations or {}}
    return msgspec.json.decode(msgspec.json.encode({"metadata": metadata, **fields}), type=kind)


POD = read(core.Pod, "p", spec={"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]})
OWN = read(core.Pod, "p", spec={"volumes": [{"name": "scratch", "ephemeral": {"volumeClaimTemplate": {}}}]})


def claim(name: str = "data", *, phase: str = "Pending", **spec: str) -> Any:  # noqa: ANN401 - as decoded
    """A claim."""
    return read(wire_storage.Claim, name, spec=spec, status={"phase": phase})


def volume(key: str, zone: str, *, phase: str = "Bound", storage_class: str = "") -> Any:  # noqa: ANN401 - as decoded
    """A volume that is reached from one zone."""
    terms = [{"matchExpressions": [{"key": key, "operator": "In", "values": [zone]}]}]
    spec = {"storageClassName": storage_class, "nodeAffinity": {"required": {"nodeSelectorTerms": terms}}}
    return read(wire_storage.PersistentVolume, "v1", spec=spec, status={"phase": phase})


def storage_class(mode: str, *zones: str, is_default: bool = False, provisioner: str = "ebs.csi.aws.com") -> Any:  # noqa: ANN401 - as decoded
    """A storage class."""
    topologies = [{"matchLabelExpressions": [{"key": "topology.ebs.csi.aws.com/zone", "values": list(zones)}]}]
    return read(
        wire_storage.StorageClass,
        "fast",
        annotations={DEFAULT_CLASS: "true"} if is_default else {},
        provisioner=provisioner,
        volumeBindingMode=mode,
        allowedTopologies=topologies if zones else [],
    )


def storage(*objects: Any) -> Storage:  # noqa: ANN401 - as decoded
    """What there is."""
    of = {kind: [one for one in objects if isinstance(one, kind)] for kind in {type(one) for one in objects}}
    return Storage(
        claims={("default", one.metadata.name): one for one in of.get(wire_storage.Claim, ())},
        volumes={one.metadata.name: one for one in of.get(wire_storage.PersistentVolume, ())},
        classes={one.metadata.name: one for one in of.get(wire_storage.StorageClass, ())},
    )


@pytest.mark.parametrize(
    "key", [labels.ZONE, "topology.ebs.csi.aws.com/zone", "failure-domain.beta.kubernetes.io/zone"]
)
def test_a_volume_binds_its_zone(key: str) -> None:
    """By whoever's key the driver calls it: a node that is not there yet carries only the common one."""
    found = related_objects(
        POD,
        storage(claim(phase="Bound", volumeName="v1"), volume(key, "zone-a")),
        Claims(),
        version=7,
        group_count_min=None,
    )
    assert (found.alternatives, found.problem, found.version) == (((ZONE_A,),), "", 7)


def test_a_volume_that_waits_for_the_pod_binds_the_zones_of_its_class() -> None:
    """And none where its class allows all."""
    waits = storage_class("WaitForFirstConsumer", "zone-a", "zone-b", is_default=True)
    both = NodeSelectorTerm((LabelRequirement(labels.ZONE, "In", ("zone-a", "zone-b")),))
    assert related_objects(POD, storage(claim(), waits), Claims(), version=1, group_count_min=None).alternatives == (
        (both,),
    )
    anywhere = storage_class("WaitForFirstConsumer")
    assert (
        related_objects(
            POD, storage(claim(storageClassName="fast"), anywhere), Claims(), version=1, group_count_min=None
        ).problem
        == ""
    )


def test_a_volume_made_by_hand_is_one_of_those_that_are_free() -> None:
    """Local disks: there are those that there are."""
    by_hand = storage_class("WaitForFirstConsumer", provisioner="kubernetes.io/no-provisioner")
    asked = claim(storageClassName="fast")
    free = volume(labels.ZONE, "zone-b", phase="Available", storage_class="fast")
    assert related_objects(
        POD, storage(asked, by_hand, free), Claims(), version=1, group_count_min=None
    ).alternatives == ((ZONE_B,),)
    taken = volume(labels.ZONE, "zone-b", storage_class="fast")
    assert (
        "storage class fast has no available one"
        in related_objects(POD, storage(asked, by_hand, taken), Claims(), version=1, group_count_min=None).problem
    )


@pytest.mark.parametrize(
    ("pod", "objects", "says"),
    [
        (POD, (), "claim default/data does not exist"),
        (OWN, (), "claim default/p-scratch does not exist"),
        (POD, (claim(phase="Lost"),), "lost its volume"),
        (POD, (claim(volumeName="v9"),), "volume v9 does not exist"),
        (POD, (claim(),), "neither a volume nor a storage class"),
        (POD, (claim(storageClassName="slow"),), "storage class slow does not exist"),
        (POD, (claim(storageClassName="fast"), storage_class("Immediate")), "before the pod is scheduled"),
    ],
)
def test_no_node_helps_a_pod_whose_volume_is_not_to_be_had(pod: core.Pod, objects: tuple[Any, ...], says: str) -> None:
    """Each with the name of the claim and of what is missing."""
    assert says in related_objects(pod, storage(*objects), Claims(), version=1, group_count_min=None).problem


def test_alternatives_of_pod_and_volumes_hold_together() -> None:
    """Each way to satisfy the pod, with each way to reach its volumes."""
    gpu = NodeSelectorTerm((LabelRequirement("gpu", "Exists"),))
    assert all_terms((gpu,), ((ZONE_A, ZONE_B),)) == (
        NodeSelectorTerm(gpu.requirements + ZONE_A.requirements),
        NodeSelectorTerm(gpu.requirements + ZONE_B.requirements),
    )
    assert all_terms((), ()) == ()


@pytest.mark.parametrize(
    ("kind", "safe", "is_lost"),
    [
        pytest.param({"emptyDir": {}}, None, True, id="emptyDir"),
        pytest.param({"hostPath": {"path": "/data"}}, None, True, id="hostPath"),
        pytest.param({"emptyDir": {"medium": "Memory"}}, None, False, id="memory, such as /dev/shm"),
        pytest.param({"emptyDir": {}}, "cache,scratch", False, id="marked as safe to lose"),
        pytest.param({"emptyDir": {}}, "cache", True, id="another one is marked"),
    ],
)
def test_storage_that_is_lost_with_the_node_is_seen(
    kind: dict[str, Any],
    safe: str | None,
    is_lost: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """Of every form that a server sends, by the rules of cluster-autoscaler; a pod with such a volume can be read."""
    metadata = {"name": "p", "uid": "u", "resourceVersion": "1", "creationTimestamp": "2026-11-21T11:00:00Z"}
    marks = {} if safe is None else {"cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes": safe}
    volumes = {"volumes": [{"name": "scratch", **kind}]}
    text = msgspec.json.encode({"metadata": {**metadata, "annotations": marks}, "spec": volumes})
    assert pod_observed(msgspec.json.decode(text, type=core.Pod), epoch=1).has_local_storage is is_lost
