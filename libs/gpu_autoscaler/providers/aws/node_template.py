"""Labels, taints and resources of a group's future nodes, from the tags that cluster-autoscaler defines.

A group launches from its own template, whose user data sets the kubelet's labels and taints: an order cannot set them,
and nobody can read them there. Tags on the group declare them, so that a node of an empty group can match pods.
Source: cluster-autoscaler, cloudprovider/aws/README.md, "Auto-discovery setup", and aws_manager.go (read 2026-11-22).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from gpu_autoscaler.model import labels
from gpu_autoscaler.model.offers import NodeMarks
from gpu_autoscaler.model.resources import Resources, parse_quantity, parse_quantity_milli
from gpu_autoscaler.model.scheduling import Taint, is_startup

_PREFIX = "k8s.io/cluster-autoscaler/node-template"
LABEL, TAINT, RESOURCE = f"{_PREFIX}/label/", f"{_PREFIX}/taint/", f"{_PREFIX}/resources/"
_TAINT = re.compile(r"(.*):(NoSchedule|PreferNoSchedule|NoExecute)")
# Part of the offer, or specific to one node.
_NOT_OF_ALL = frozenset({labels.INSTANCE_TYPE, labels.ZONE, labels.HOSTNAME})
# GPUs are those of the instance type: how many a node exposes is up to its device plugin.
_AMOUNTS: Mapping[str, tuple[str, Callable[[str], int]]] = {
    "cpu": ("cpu_milli", parse_quantity_milli),
    "memory": ("memory_bytes", parse_quantity),
    "ephemeral-storage": ("ephemeral_storage_bytes", parse_quantity),
    "pods": ("pod_count", parse_quantity),
}


class NodeTemplate(msgspec.Struct, frozen=True):
    """The node that a group would launch."""

    labels: tuple[tuple[str, str], ...] = ()
    taints: tuple[Taint, ...] = ()  # without startup taints
    amounts: tuple[tuple[str, int], ...] = ()  # by the names of `Resources`, in its units
    unread: tuple[str, ...] = ()  # tags that could not be parsed

    def marks(self, pool: str) -> NodeMarks | None:
        """Return labels and taints of its nodes in a pool; None if there are none."""
        if not self.labels and not self.taints:
            return None
        return NodeMarks(pool=pool, labels=self.labels, taints=self.taints)

    def capped(self, total: Resources) -> Resources:
        """Return the declared resources, at most what the instance type has."""
        declared = {name: min(amount, getattr(total, name)) for name, amount in self.amounts}
        return msgspec.structs.replace(total, **declared) if declared else total


def template_of(tags: Mapping[str, str]) -> NodeTemplate:
    """Return what the tags declare; tags that cannot be parsed are listed in `unread`."""
    node_labels: list[tuple[str, str]] = []
    taints: list[Taint] = []
    amounts: list[tuple[str, int]] = []
    unread: list[str] = []
    for key, value in sorted(tags.items()):
        if key.startswith(LABEL):
            name = key.removeprefix(LABEL)
            if name not in _NOT_OF_ALL and not name.startswith(f"{labels.PREFIX}/"):
                node_labels.append((name, value))
        elif key.startswith(TAINT):
            taint = _taint_of(key.removeprefix(TAINT), value)
            if taint is None:
                unread.append(key)
            elif not is_startup(taint):
                taints.append(taint)
        elif key.startswith(RESOURCE) and key.removeprefix(RESOURCE) in _AMOUNTS:
            name, parse = _AMOUNTS[key.removeprefix(RESOURCE)]
            try:
                amounts.append((name, parse(value)))
            except ValueError:
                unread.append(key)
    return NodeTemplate(tuple(node_labels), tuple(taints), tuple(amounts), tuple(unread))


def _taint_of(key: str, value: str) -> Taint | None:
    match = _TAINT.fullmatch(value)
    return None if match is None else Taint(key, cast("Any", match[2]), match[1])
