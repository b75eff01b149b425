"""What other objects mean for a pod: where its volumes can be reached, and how many pods of its group start together.

Source: Kubernetes documentation, "Persistent Volumes", "Storage Classes" (volume binding mode, allowed topologies),
read 2026-11-21.
"""

from collections.abc import Iterator, Mapping
from itertools import product

import msgspec

from gpu_autoscaler.events.pod import PodBudgetGone, PodBudgetObserved
from gpu_autoscaler.kube.translate.devices import NOTHING_CLAIMED, Claimed, Claims, claimed
from gpu_autoscaler.kube.translate.requirements import requirements
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.kube.wire import storage as wire_storage
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.scheduling import LabelRequirement, NodeSelectorTerm

DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
NO_PROVISIONER = "kubernetes.io/no-provisioner"  # its volumes are made by hand: there are those that there are
# Drivers call the zone by keys of their own, which nodes carry only once the driver runs there (documentation of the
# CSI drivers for EBS, Persistent Disk and Azure Disk, "topology"; read 2026-11-21). The value is that of the zone.
_ZONE_KEYS = frozenset(
    {
        "failure-domain.beta.kubernetes.io/zone",
        "topology.ebs.csi.aws.com/zone",
        "topology.gke.io/zone",
        "topology.disk.csi.azure.com/zone",
    }
)
# Alternatives of the pod times those of its volumes. More than this is no pod that anybody wrote.
_TERMS_COUNT_MAX = 256

Key = tuple[str, str]  # namespace and name
Terms = tuple[NodeSelectorTerm, ...]  # alternatives; none at all: no condition


class Storage(msgspec.Struct, kw_only=True):
    """Volumes as they were last seen."""

    claims: Mapping[Key, wire_storage.Claim] = {}
    volumes: Mapping[str, wire_storage.PersistentVolume] = {}
    classes: Mapping[str, wire_storage.StorageClass] = {}


class Around(msgspec.Struct, frozen=True, kw_only=True):
    """What other objects mean for a pod."""

    alternatives: tuple[Terms, ...] = ()  # of each of its volumes that can be reached from some nodes alone
    trouble: str = ""  # why no node helps before something else changes; empty: one would
    devices: Claimed = NOTHING_CLAIMED
    group_count_min: int | None = None  # None: its group does not say
    version: int = 0  # up to which all of this was seen


NOTHING_AROUND = Around()


def claims_of(pod: core.Pod) -> Iterator[Key]:
    """The claims that the pod's volumes name, those that are made for it alone among them."""
    for volume in pod.spec.volumes:
        if volume.persistent_volume_claim is not None:
            yield pod.metadata.namespace, volume.persistent_volume_claim.claim_name
        elif volume.ephemeral is not None:
            yield pod.metadata.namespace, f"{pod.metadata.name}-{volume.name}"


def around(pod: core.Pod, storage: Storage, known: Claims, *, version: int, group_count_min: int | None) -> Around:
    """Return what these objects mean for the pod."""
    devices = claimed(pod, known)
    alternatives: list[Terms] = [*devices.alternatives]
    for key in claims_of(pod):
        found = _reach(key, storage)
        if isinstance(found, str):
            return Around(trouble=found, devices=devices, version=version, group_count_min=group_count_min)
        if found:
            alternatives.append(found)
    return Around(alternatives=tuple(alternatives), devices=devices, version=version, group_count_min=group_count_min)


def all_terms(own: Terms, others: tuple[Terms, ...]) -> Terms:
    """Alternatives that say the same as all of these lists of alternatives together."""
    parts = [each for each in (own, *others) if each]
    if len(parts) <= 1:
        return parts[0] if parts else ()
    found: dict[NodeSelectorTerm, None] = {}
    for terms in product(*parts):
        conditions = dict.fromkeys(one for term in terms for one in term.requirements)
        found[NodeSelectorTerm(tuple(conditions))] = None
        if len(found) == _TERMS_COUNT_MAX:
            break
    return tuple(found)


def _reach(key: Key, storage: Storage) -> Terms | str:
    """The nodes from which the claim's volume is reached, or will be once it is made; else why there will be none."""
    name = f"claim {key[0]}/{key[1]}"
    claim = storage.claims.get(key)
    if claim is None:
        return f"{name} does not exist"
    if claim.status.phase == "Lost":
        return f"{name} has lost its volume"
    if claim.spec.volume_name:
        volume = storage.volumes.get(claim.spec.volume_name)
        return f"{name} has volume {claim.spec.volume_name}, which does not exist" if volume is None else _nodes(volume)
    return _reach_unbound(name, claim, storage)


def _reach_unbound(name: str, claim: wire_storage.Claim, storage: Storage) -> Terms | str:
    called = claim.spec.storage_class_name
    if called is None:
        called = next((each for each, one in storage.classes.items() if _is_default(one)), "")
    if not called:
        return f"{name} has no volume and no storage class that would make one"
    found = storage.classes.get(called)
    if found is None:
        return f"{name} has no volume, and there is no storage class {called}"
    if found.volume_binding_mode == "Immediate":
        return f"{name} has no volume yet, and storage class {called} makes it without waiting for a pod"
    if found.provisioner != NO_PROVISIONER:
        return tuple(
            NodeSelectorTerm(
                tuple(LabelRequirement(_key(one.key), "In", one.values) for one in term.match_label_expressions)
            )
            for term in found.allowed_topologies
        )
    free = [
        volume
        for _, volume in sorted(storage.volumes.items())
        if volume.spec.storage_class_name == called and volume.status.phase == "Available"
    ]
    if not free:
        return f"{name} has no volume, and none of storage class {called} is free"
    reached = [_nodes(volume) for volume in free]
    return () if not all(reached) else tuple(dict.fromkeys(term for terms in reached for term in terms))


def _is_default(one: wire_storage.StorageClass) -> bool:
    return one.metadata.annotations.get(DEFAULT_CLASS) == "true"


def _nodes(volume: wire_storage.PersistentVolume) -> Terms:
    affinity = volume.spec.node_affinity
    required = None if affinity is None else affinity.required
    return tuple(
        NodeSelectorTerm(
            tuple(
                LabelRequirement(_key(one.key), one.operator, one.values)
                for one in requirements(term.match_expressions) + requirements(term.match_fields)
            )
        )
        for term in (required.node_selector_terms if required else ())
    )


def _key(key: str) -> str:
    return labels.ZONE if key in _ZONE_KEYS else key


# Disruption budgets as facts. Source: Kubernetes API reference v1.36, "PodDisruptionBudget" (read
# 2026-11-21).

# No label has an empty key: a condition that never holds.
_SELECTS_NOTHING = LabelRequirement("", "Exists")


def budget_observed(budget: core.PodDisruptionBudget, *, epoch: int) -> PodBudgetObserved:
    """Return the budget as a fact. A status that lags behind its spec allows nothing, as the eviction itself has it."""
    status = budget.status
    is_current = status.observed_generation >= budget.metadata.generation
    return PodBudgetObserved(
        epoch=epoch,
        version=budget.version,
        budget_uid=budget.metadata.uid,
        namespace=budget.metadata.namespace,
        name=budget.metadata.name,
        match_labels=_selector(budget.spec.selector),
        disruptions_allowed=status.disruptions_allowed if is_current else 0,
        pods_healthy_count=status.current_healthy,
        pods_healthy_count_min=status.desired_healthy,
    )


def budget_gone(budget: core.PodDisruptionBudget, *, epoch: int) -> PodBudgetGone:
    """Return the budget's end as a fact."""
    return PodBudgetGone(
        epoch=epoch,
        version=budget.version,
        budget_uid=budget.metadata.uid,
        namespace=budget.metadata.namespace,
        name=budget.metadata.name,
    )


def _selector(selector: core.LabelSelector | None) -> tuple[LabelRequirement, ...]:
    if selector is None:
        return (_SELECTS_NOTHING,)
    equal = tuple(LabelRequirement(key, "In", (value,)) for key, value in sorted(selector.match_labels.items()))
    return equal + requirements(selector.match_expressions)
