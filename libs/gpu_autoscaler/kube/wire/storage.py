"""Volumes and groups of pods on the wire: what decides where, or whether, a pod can run besides the pod itself.

Source: Kubernetes API reference v1.36, "PersistentVolumeClaim", "PersistentVolume", "StorageClass",
"VolumeAttachment"; PodGroup of
scheduler-plugins (scheduling.x-k8s.io/v1alpha1) and of Volcano (scheduling.volcano.sh/v1beta1) (read 2026-11-21).
"""

from typing import Literal

import msgspec

from gpu_autoscaler.kube.wire.core import NodeSelector, Object


class _Wire(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Base, as in `wire.py`."""


class ClaimSpec(_Wire, frozen=True, kw_only=True):
    """What is claimed."""

    storage_class_name: str | None = None  # None: the cluster's default class; empty: none
    volume_name: str = ""


class ClaimStatus(_Wire, frozen=True, kw_only=True):
    """Whether there is a volume for it."""

    phase: Literal["Pending", "Bound", "Lost"] = "Pending"


class Claim(Object, frozen=True, kw_only=True):
    """A PersistentVolumeClaim."""

    spec: ClaimSpec = ClaimSpec()
    status: ClaimStatus = ClaimStatus()


class AttachmentSource(_Wire, frozen=True, kw_only=True):
    """Which volume."""

    persistent_volume_name: str = ""  # empty: one that its pod describes itself


class AttachmentSpec(_Wire, frozen=True, kw_only=True):
    """What is attached where."""

    node_name: str
    source: AttachmentSource = AttachmentSource()


class Attachment(Object, frozen=True, kw_only=True):
    """A VolumeAttachment: there for as long as the volume is attached, or on its way to or from there."""

    spec: AttachmentSpec


class VolumeNodeAffinity(_Wire, frozen=True, kw_only=True):
    """From which nodes a volume can be reached."""

    required: NodeSelector | None = None


class VolumeSpec(_Wire, frozen=True, kw_only=True):
    """What the volume is, as far as it matters for where."""

    storage_class_name: str = ""
    node_affinity: VolumeNodeAffinity | None = None


class VolumeStatus(_Wire, frozen=True, kw_only=True):
    """Whether somebody has it."""

    phase: str = "Pending"  # Available: nobody has it


class PersistentVolume(Object, frozen=True, kw_only=True):
    """A volume."""

    spec: VolumeSpec = VolumeSpec()
    status: VolumeStatus = VolumeStatus()


class TopologyLabel(_Wire, frozen=True, kw_only=True):
    """One condition of a topology: the label has one of these values."""

    key: str
    values: tuple[str, ...] = ()


class TopologyTerm(_Wire, frozen=True, kw_only=True):
    """Conditions that hold together; terms are alternatives."""

    match_label_expressions: tuple[TopologyLabel, ...] = ()


class StorageClass(Object, frozen=True, kw_only=True):
    """How volumes of a kind are made."""

    provisioner: str = ""
    volume_binding_mode: Literal["Immediate", "WaitForFirstConsumer"] = "Immediate"
    allowed_topologies: tuple[TopologyTerm, ...] = ()


class GroupSpec(_Wire, frozen=True, kw_only=True):
    """How many pods start together."""

    min_member: int = 0


class Group(Object, frozen=True, kw_only=True):
    """A PodGroup, of whichever of its makers."""

    spec: GroupSpec = GroupSpec()
