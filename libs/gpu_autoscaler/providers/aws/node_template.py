"""What the tags of a group say of its nodes before there is one, as cluster-autoscaler has users write them.

A group launches by its own template, whose user data gives the kubelet labels and taints: no order can, and nobody can
read them there. Tags on the group say the same for whoever buys, so that a node of an empty group is what pods ask for.
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
# What the offer says itself, and what is of one node alone.
_NOT_OF_ALL = frozenset({labels.INSTANCE_TYPE, labels.ZONE, labels.HOSTNAME})
# GPUs are those of the instance type: how many of them a node shows is its device plugin's to say.
_AMOUNTS: Mapping[str, tuple[str, Callable[[str], int]]] = {
    "cpu": ("cpu_milli", parse_quantity_milli),
    "memory": ("memory_bytes", parse_quantity),
    "ephemeral-storage": ("ephemeral_storage_bytes", parse_quantity),
    "pods": ("pod_count", parse_quantity),
}


class NodeTemplate(msgspec.Struct, frozen=True):
    """The node that a group would make."""

    labels: tuple[tuple[str, str], ...] = ()
    taints: tuple[Taint, ...] = ()  # those that stay
    amounts: tuple[tuple[str, int], ...] = ()  # by the names of `Resources`, in its units
    unread: tuple[str, ...] = ()  # tags that say nothing that could be understood

    def marks(self, pool: str) -> NodeMarks | None:
        """Return what its nodes have of their own in a pool, None for nothing."""
        if not self.labels and not self.taints:
            return None
        return NodeMarks(pool=pool, labels=self.labels, taints=self.taints)

    def least(self, whole: Resources) -> Resources:
        """Return the amounts with what the tags say where that is less: more than the type has, no node can hold."""
        said = {name: min(amount, getattr(whole, name)) for name, amount in self.amounts}
        return msgspec.structs.replace(whole, **said) if said else whole


def template_of(tags: Mapping[str, str]) -> NodeTemplate:
    """Return what the tags say; what cannot be understood is named and left out."""
    found: list[tuple[str, str]] = []
    taints: list[Taint] = []
    amounts: list[tuple[str, int]] = []
    unread: list[str] = []
    for key, value in sorted(tags.items()):
        if key.startswith(LABEL):
            name = key.removeprefix(LABEL)
            if name not in _NOT_OF_ALL and not name.startswith(f"{labels.PREFIX}/"):
                found.append((name, value))
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
    return NodeTemplate(tuple(found), tuple(taints), tuple(amounts), tuple(unread))


def _taint_of(key: str, told: str) -> Taint | None:
    read = _TAINT.fullmatch(told)
    return None if read is None else Taint(key, cast("Any", read[2]), read[1])
