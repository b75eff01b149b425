"""Volumes and pod groups: other objects that determine where, or whether, a pod can run.

Source: Kubernetes API reference v1.36, "PersistentVolumeClaim", "PersistentVolume", "StorageClass",
"VolumeAttachment"; PodGroup of
scheduler-plugins (scheduling.x-k8s.io/v1alpha1) and of Volcano (scheduling.volcano.sh/v1beta1) (read 2026-11-21).
"""

from typing import Literal

from gpu_autoscaler.kube.wire.core import ClaimSpec, NodeSelector, Object, Wire


class ClaimStatus(Wire, frozen=True, kw_only=True):
    """The status of a claim."""

    phase: Literal["Pending", "Bound", "Lost"] = "Pending"


class Claim(Object, frozen=True, kw_only=True):
    """A PersistentVolumeClaim."""

    spec: ClaimSpec = ClaimSpec()
    status: ClaimStatus = ClaimStatus()


class AttachmentSource(Wire, frozen=True, kw_only=True):
    """The volume of an attachment."""

    persistent_volume_name: str = ""  # empty: an inline volume of the pod


class AttachmentSpec(Wire, frozen=True, kw_only=True):
    """The spec of an attachment."""

    node_name: str
    source: AttachmentSource = AttachmentSource()


class Attachment(Object, frozen=True, kw_only=True):
    """A VolumeAttachment: exists while the volume is being attached, attached or detached."""

    spec: AttachmentSpec


class VolumeNodeAffinity(Wire, frozen=True, kw_only=True):
    """The nodes that can reach a volume."""

    required: NodeSelector | None = None


class VolumeSpec(Wire, frozen=True, kw_only=True):
    """The spec of a volume, as far as it determines the node."""

    storage_class_name: str = ""
    node_affinity: VolumeNodeAffinity | None = None


class VolumeStatus(Wire, frozen=True, kw_only=True):
    """The status of a volume."""

    phase: str = "Pending"  # Available: not bound


class PersistentVolume(Object, frozen=True, kw_only=True):
    """A PersistentVolume."""

    spec: VolumeSpec = VolumeSpec()
    status: VolumeStatus = VolumeStatus()


class TopologyLabel(Wire, frozen=True, kw_only=True):
    """A topology requirement: the label has one of these values."""

    key: str
    values: tuple[str, ...] = ()


class TopologyTerm(Wire, frozen=True, kw_only=True):
    """Topology requirements that must all hold; terms are alternatives."""

    match_label_expressions: tuple[TopologyLabel, ...] = ()


class StorageClass(Object, frozen=True, kw_only=True):
    """A StorageClass."""

    provisioner: str = ""
    volume_binding_mode: Literal["Immediate", "WaitForFirstConsumer"] = "Immediate"
    allowed_topologies: tuple[TopologyTerm, ...] = ()


class GroupSpec(Wire, frozen=True, kw_only=True):
    """The spec of a pod group."""

    min_member: int = 0


class Group(Object, frozen=True, kw_only=True):
    """A PodGroup of any of its APIs."""

    spec: GroupSpec = GroupSpec()
